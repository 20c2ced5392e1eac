"""InvokeEndpointWithResponseStream: the container's bytes in frames, as they come, and how a stream says that it cannot
go on. By boto3, and at the level of bytes, where botocore's own parser checks every sum."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import Any

import pytest
from botocore.exceptions import EventStreamError

from prefixroute.app import App
from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer
from prefixroute.sagemaker.relay import StreamRelay
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import raw_answer
from tests.integration.aws import STREAM, Json, last_words, messages, payload, post, runtime

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b"data: %d\n\n" % n for n in range(5)]
COMMENT = b": keep-alive\n\n"
ASKED = head("POST", STREAM, b"{}") + b"{}"
EVERYTHING: Json = {
    "ContentType": "application/x-own; v=1",
    "Accept": "text/event-stream;q=1",
    "CustomAttributes": "trace=1, tenant=a",
    "TargetVariant": "blue",
    "TargetContainerHostname": "second",
    "InferenceId": "inference 17",
    "InferenceComponentName": "adapter-1",
    "PrefixAwareId": "app one",
}
OTHERS = {"host", "user-agent", "content-length", "x-request-id"}

lanes = pytest.mark.parametrize("lane", ["auto", "aiohttp"])


def says(*pieces: bytes, start: bytes = SSE) -> Callable[[Call], Awaitable[None]]:
    """A script that answers these pieces, to their end."""

    async def script(call: Call) -> None:
        await call.send(start)
        for piece in (*pieces, b""):
            await call.send_chunk(piece)

    return script


def holds(let_go: asyncio.Event, first: bytes, rest: bytes) -> Callable[[Call], Awaitable[None]]:
    """A script that keeps the rest of its answer to itself for a while."""

    async def script(call: Call) -> None:
        await call.send(SSE)
        await call.send_chunk(first)
        await let_go.wait()
        await call.send_chunk(rest)
        await call.send_chunk(b"")

    return script


class Lines:
    """Whole lines of pieces that end anywhere, as clients of SageMaker's streams put them together."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, piece: bytes) -> list[str]:
        *whole, self._rest = (self._rest + piece).split(b"\n")
        return [line.decode() for line in whole]


# What is asked, and what is answered


@lanes
async def test_everything_that_is_said_reaches_the_container_and_nothing_else(serve: Serve, lane: str) -> None:
    """What is accepted of the container arrives as its Accept."""
    async with (
        FakeUpstream() as upstream,
        serve(upstream, lane=lane) as app,
        runtime(app.url, "AKID", "secret", "a-session-token") as client,
    ):
        await client.stream(b"\x00 a body", **EVERYTHING)
        (call,) = upstream.calls
        assert (call.method, call.target, call.body) == ("POST", "/invocations", b"\x00 a body")
        operation = client.client.meta.service_model.operation_model("InvokeEndpointWithResponseStream")
        told = operation.input_shape.members
        names = {shape.serialization["name"]: EVERYTHING[n] for n, shape in told.items() if n in EVERYTHING}
        names["Accept"] = names.pop("X-Amzn-SageMaker-Accept")
        assert {name: call.all_headers(name) for name in names} == {name: [value] for name, value in names.items()}
        assert {name.lower() for name, _ in call.headers} == OTHERS | {name.lower() for name in names}


async def test_what_is_accepted_of_frames_is_not_what_is_accepted_of_the_container(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        await post(app.url, STREAM, Accept="application/vnd.amazon.eventstream")
        await post(app.url, STREAM, Accept="application/vnd.amazon.eventstream", x_amzn_sagemaker_accept="text/csv")
        assert [call.all_headers("accept") for call in upstream.calls] == [[], ["text/csv"]]


@lanes
async def test_everything_that_the_container_says_comes_back(serve: Serve, lane: str, finished: Finished) -> None:
    said = (
        "Content-Type: application/jsonlines\r\n"
        "X-Amzn-SageMaker-Custom-Attributes: c=1\r\n"
        "X-Amzn-SageMaker-New-Session-Id: s-1\r\n"
        "X-Amzn-SageMaker-Closed-Session-Id: s-0\r\n"
        "x-Amzn-Invoked-Production-Variant: mine\r\n"
        "x-amzn-RequestId: mine\r\n"
        "X-Amzn-SageMaker-Content-Type: mine\r\n"
        "Content-MD5: AAAA\r\n"
        "X-Of-The-Container: 1\r\n"
    )
    async with (
        FakeUpstream(raw_answer(b'{"a": 1}\n', headers=said)) as upstream,
        serve(upstream, lane=lane) as app,
        runtime(app.url) as client,
    ):
        answer, pieces = await client.stream(TargetVariant="blue")
        about = answer.pop("ResponseMetadata")
        assert b"".join(pieces) == b'{"a": 1}\n'
        assert answer == {
            "ContentType": "application/jsonlines",
            "InvokedProductionVariant": "blue",
            "CustomAttributes": "c=1",
        }
        told = about["HTTPHeaders"]
        assert (told["content-type"], told["x-of-the-container"]) == ("application/vnd.amazon.eventstream", "1")
        # None of what is true of the container's bytes alone, and no sessions: the operation's answer has none.
        assert not [name for name in told if "session" in name or name in ("content-length", "content-md5")]
        (line,) = finished()
        assert about["RequestId"] == line["request_id"]
        assert (line["route"], line["outcome"]) == ("/endpoints/{name}/invocations-response-stream", "ok")


@lanes
async def test_frames_are_as_aws_makes_them(serve: Serve, lane: str) -> None:
    async with FakeUpstream(says(*EVENTS)) as upstream, serve(upstream, lane=lane) as app:
        answer = await post(app.url, STREAM)
        assert answer.complete
        for message in messages(answer.body):
            assert message.headers == {
                ":message-type": "event",
                ":event-type": "PayloadPart",
                ":content-type": "application/octet-stream",
            }
        assert payload(answer.body) == b"".join(EVENTS)
        assert answer.all_headers("content-type") == ["application/vnd.amazon.eventstream"]


@pytest.mark.parametrize(
    ("start", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No\r\n\r\n", b""),
        (b"HTTP/1.1 201 Made\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.1 200 OK\r\nTrailer: X-T\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-T: 1\r\n\r\n", b"a"),
    ],
    ids=["empty", "204", "201", "close", "trailers"],
)
async def test_every_framing_of_the_container_becomes_frames(serve: Serve, start: bytes, body: bytes) -> None:
    async def answers(call: Call) -> None:
        await call.send(start)
        if b"close" in start:
            call.close()

    async with FakeUpstream(answers) as upstream, serve(upstream) as app, runtime(app.url) as client:
        for _ in range(2):
            assert b"".join((await client.stream())[1]) == body
        answer = await post(app.url, STREAM)
        assert (payload(answer.body), answer.trailers, answer.header("trailer")) == (body, [], None)


# Pieces, as they come


@lanes
async def test_a_piece_is_there_while_the_container_holds_the_rest(serve: Serve, lane: str) -> None:
    let_go = asyncio.Event()
    async with (
        FakeUpstream(holds(let_go, b"data: 1\n\n", b"data: 2\n\n")) as upstream,
        serve(upstream, lane=lane) as app,
        runtime(app.url) as client,
    ):
        _, pieces = await client.open()
        assert await anext(pieces) == b"data: 1\n\n"
        assert not let_go.is_set()
        let_go.set()
        assert [piece async for piece in pieces] == [b"data: 2\n\n"]


async def test_pieces_may_end_inside_a_character_and_inside_a_line(serve: Serve) -> None:
    """Clients put lines together, and get the same whatever the pieces are."""
    lines = ['{"outputs": [" Å"]}', '{"outputs": ["日本語 🙂"]}', '{"outputs": [" end"]}']
    whole = "".join(f"{line}\n" for line in lines).encode()

    async def byte_by_byte(call: Call) -> None:
        await call.send(SSE)
        for byte in whole:
            await call.send_chunk(bytes([byte]))
            await asyncio.sleep(0)
        await call.send_chunk(b"")

    async with FakeUpstream(byte_by_byte) as upstream, serve(upstream) as app, runtime(app.url) as client:
        _, pieces = await client.stream()
        assert b"".join(pieces) == whole
        buffer = Lines()
        assert [line for piece in pieces for line in buffer.of(piece)] == lines


async def test_comments_in_silent_event_streams_are_frames_too(serve: Serve) -> None:
    async def pauses(call: Call) -> None:
        await call.send(SSE)
        for piece in EVENTS[:2]:
            await asyncio.sleep(0.3)
            await call.send_chunk(piece)
        await call.send_chunk(b"")

    async with (
        FakeUpstream(pauses) as upstream,
        serve(upstream, upstream={"sse_comment_s": 0.05}) as app,
        runtime(app.url) as client,
    ):
        _, pieces = await client.stream()
        assert pieces.count(COMMENT) >= 2
        assert [piece for piece in pieces if piece != COMMENT] == EVENTS[:2]


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_twenty_megabytes_come_whole(serve: Serve, framing: str) -> None:
    body = Random(2).randbytes(20_000_000)
    script = says(body) if framing == "chunks" else raw_answer(body)
    async with FakeUpstream(script) as upstream, serve(upstream) as app, runtime(app.url) as client:
        _, pieces = await client.stream()
        assert b"".join(pieces) == body
        assert len(pieces) > 1


async def test_a_slow_reader_holds_up_the_container_not_the_routers_memory(serve: Serve) -> None:
    size, piece = 50_000_000, b"x" * 100_000
    sent = 0

    async def pours(call: Call) -> None:
        nonlocal sent
        await call.send(SSE)
        for _ in range(size // len(piece)):
            await call.send_chunk(piece)
            sent += len(piece)
        await call.send_chunk(b"")

    async with (
        FakeUpstream(pours) as upstream,
        serve(upstream) as app,
        RawClient(app.url, read_bytes=65_536) as client,
        RawClient(app.url) as other,
    ):
        await client.send(ASKED)
        await client.begin()
        before = -1
        # What sockets and buffers of a fixed size hold has come; then nothing moves.
        while sent != before:
            before = sent
            for _ in range(50):
                assert (await other.request("GET", "/health")).status == 200
        assert sent < 15_000_000
        n_payload = 0
        while framed := await client.chunk():
            n_payload += len(payload(framed))
        assert n_payload == size


@pytest.mark.parametrize("way", ["close", "reset"])
@lanes
async def test_a_client_that_leaves_ends_the_containers_work(
    serve: Serve, finished: Finished, lane: str, way: str
) -> None:
    async with FakeUpstream(holds(asyncio.Event(), b"data: 1\n\n", b"")) as upstream, serve(upstream, lane=lane) as app:
        async with RawClient(app.url) as client:
            await client.send(ASKED)
            await client.begin()
            assert payload(await client.chunk()) == b"data: 1\n\n"
            getattr(client, way)()
            await upstream.calls[0].wait_disconnected()
        await app.proxy.wait_idle()
        assert finished()[-1]["outcome"] == "client_gone"


async def test_old_clients_get_frames_to_the_end_of_the_connection(serve: Serve) -> None:
    async with (
        FakeUpstream(says(*EVENTS)) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        await client.send(ASKED.replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = await client.answer()
        assert (answer.header("transfer-encoding"), answer.header("connection"), answer.complete) == (
            None,
            "close",
            True,
        )
        assert payload(answer.body) == b"".join(EVENTS)


# How a stream ends that cannot go on


def breaks(way: str) -> Callable[[Call], Awaitable[None]]:
    async def script(call: Call) -> None:
        await call.send(SSE)
        await call.send_chunk(EVENTS[0])
        if way == "reset":
            await asyncio.sleep(0.05)
            call.reset()
        elif way == "garbage":
            await asyncio.sleep(0.05)
            await call.send(b"no chunk at all\r\n")
        else:
            call.close()

    return script


@pytest.mark.parametrize("way", ["close", "reset", "garbage"])
@pytest.mark.parametrize("minor", [1, 0])
@lanes
async def test_a_container_that_breaks_off_is_told_of_in_a_last_frame(
    serve: Serve, finished: Finished, lane: str, minor: int, way: str
) -> None:
    async with (
        FakeUpstream(breaks(way)) as upstream,
        serve(upstream, lane=lane) as app,
        RawClient(app.url) as client,
    ):
        await client.send(ASKED.replace(b"HTTP/1.1", b"HTTP/1.%d" % minor))
        answer = await client.answer()
        assert (answer.status, answer.complete) == (200, True)
        assert messages(answer.body)[0].payload == EVENTS[0]
        name, fields = last_words(answer.body)
        assert (name, fields["ErrorCode"]) == ("ModelStreamError", "StreamBroken")
        assert fields["Message"]
        await app.proxy.wait_idle()
        assert finished()[-1]["outcome"] == "broken"


async def test_programs_get_it_as_an_event_stream_error(serve: Serve) -> None:
    async with FakeUpstream(breaks("close")) as upstream, serve(upstream) as app, runtime(app.url) as client:
        # Twice: the connection is as good as any.
        for _ in range(2):
            _, pieces = await client.open()
            assert await anext(pieces) == EVENTS[0]
            with pytest.raises(EventStreamError) as caught:
                await anext(pieces)
            assert caught.value.response["Error"]["Code"] == "ModelStreamError"
        assert app.metrics.exposition()[0].count(b'outcome="broken"') > 0


async def test_a_container_that_goes_silent_is_told_of_in_a_last_frame(serve: Serve, finished: Finished) -> None:
    async with (
        FakeUpstream(holds(asyncio.Event(), EVENTS[0], b"")) as upstream,
        serve(upstream, upstream={"idle_timeout_s": 0.2}) as app,
    ):
        answer = await post(app.url, STREAM)
        assert answer.complete
        name, fields = last_words(answer.body)
        assert (name, fields["ErrorCode"]) == ("ModelStreamError", "ModelInvocationTimeExceeded")
        await app.proxy.wait_idle()
        assert finished()[-1]["outcome"] == "timeout"


async def test_a_fault_of_the_router_is_told_of_in_a_last_frame(
    serve: Serve, expected_errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_errors.append("fault in the router")
    wrap = StreamRelay._wrap
    assert wrap is not None

    def wraps_once(piece: bytes) -> bytes:
        assert b"data: 1" not in piece
        return wrap(piece)

    monkeypatch.setattr(StreamRelay, "_wrap", staticmethod(wraps_once))
    let_go = asyncio.Event()
    async with (
        FakeUpstream(holds(let_go, EVENTS[0], EVENTS[1])) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        await client.send(ASKED)
        await client.begin()
        assert payload(await client.chunk()) == EVENTS[0]
        let_go.set()
        assert last_words(await client.chunk()) == (
            "InternalStreamFailure",
            {"Message": "the router failed in the middle of the answer"},
        )
        assert await client.chunk() == b""


@asynccontextmanager
async def stoppable(serve: Serve, *upstreams: FakeUpstream, **tables: Any) -> AsyncIterator[tuple[App, asyncio.Event]]:
    """A router, and what makes it stop."""
    started: asyncio.Future[App] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def life() -> None:
        async with serve(*upstreams, **tables) as app:
            started.set_result(app)
            await leave.wait()

    living = asyncio.create_task(life())
    try:
        yield await started, leave
    finally:
        leave.set()
        await living


async def test_a_router_that_stops_lets_a_stream_come_to_its_end(serve: Serve, until: Until) -> None:
    let_go = asyncio.Event()
    async with (
        FakeUpstream(holds(let_go, EVENTS[0], EVENTS[1])) as upstream,
        stoppable(serve, upstream, drain_timeout_s=60.0) as (app, stop),
        RawClient(app.url) as client,
    ):
        await client.send(ASKED)
        await client.begin()
        assert payload(await client.chunk()) == EVENTS[0]
        stop.set()
        await until(lambda: app.stopping)
        let_go.set()
        assert payload(await client.chunk()) == EVENTS[1]
        assert await client.chunk() == b""


async def test_a_stream_that_a_stopping_router_cuts_off_is_no_whole_one(serve: Serve, finished: Finished) -> None:
    async with (
        FakeUpstream(holds(asyncio.Event(), EVENTS[0], b"")) as upstream,
        stoppable(serve, upstream, drain_timeout_s=0.0) as (app, stop),
        RawClient(app.url) as client,
    ):
        await client.send(ASKED)
        await client.begin()
        assert payload(await client.chunk()) == EVENTS[0]
        stop.set()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.chunk()
    assert finished()[-1]["outcome"] == "cut_off"


# Model servers


async def test_a_streamed_chat_with_a_model_server(serve: Serve, finished: Finished) -> None:
    async with (
        SimulatedServer(ServerConfig(EngineConfig(speed=1_000.0))) as server,
        serve(server.url) as app,
        runtime(app.url) as client,
    ):
        chat: Json = {
            "messages": [{"role": "user", "content": "What is a prefix cache?"}],
            "max_tokens": 20,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, pieces = await client.stream(json.dumps(chat).encode(), ContentType="application/json")
        assert answer["ContentType"].startswith("text/event-stream")
        buffer = Lines()
        lines = [line for piece in pieces for line in buffer.of(piece) if line]
        assert lines[-1] == "data: [DONE]"
        said = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert said[-1]["usage"]["completion_tokens"] == 20
        (line,) = finished()
        assert line["streamed"]
        assert line["ttft_ms"] > 0
