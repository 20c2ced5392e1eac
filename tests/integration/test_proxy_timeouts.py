"""Each limit on an instance's silence, named where it fires; and what is no silence of the instance."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.core.fleet import State
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import black_hole

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"
UPLOAD = "/v1/audio/transcriptions"


async def silent(call: Call) -> None:
    await call.wait_disconnected()


async def begins(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await call.send_chunk(b"half")
    await call.wait_disconnected()


def message_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["message"])


async def test_no_connection(serve: Serve, finished: Finished, caplog: pytest.LogCaptureFixture) -> None:
    upstream = {"connect_timeout_s": 0.2}
    async with black_hole() as url, FakeUpstream() as other:
        async with (
            serve(url, other, upstream=upstream, retry={"max_attempts": 1}) as app,
            RawClient(app.url) as client,
        ):
            answer = await client.request(body=BODY)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (502, "upstream_unreachable")
        assert "connect_timeout_s (0.2 s)" in message_of(answer.body)
        assert "connect_timeout_s (0.2 s)" in caplog.text
        assert (finished()[0]["outcome"], finished()[0]["attempts"]) == ("unreachable", "unreachable")
        async with serve(url, other, upstream=upstream) as app, RawClient(app.url) as client:
            assert (await client.request("POST", UPLOAD, BODY)).status == 200
        assert finished()[1]["attempts"] == "unreachable,answered"


@pytest.mark.parametrize("target", [CHAT, UPLOAD, "/v1/messages"])
async def test_no_answer(serve: Serve, finished: Finished, target: str) -> None:
    async with FakeUpstream(silent) as upstream, FakeUpstream() as other:
        async with serve(upstream, other, upstream={"first_byte_timeout_s": 0.05}) as app, RawClient(app.url) as client:
            answer = await client.request("POST", target, BODY)
            assert answer.status == 504
            assert "first_byte_timeout_s (0.05 s)" in message_of(answer.body)
            await upstream.calls[0].wait_disconnected()
        # It may have been computed: it is not sent again.
        assert other.calls == []
        assert (finished()[0]["outcome"], finished()[0]["attempts"]) == ("timeout", "timeout")


async def test_silence_in_the_middle(serve: Serve, finished: Finished, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeUpstream(begins) as upstream, FakeUpstream() as other:
        async with serve(upstream, other, upstream={"idle_timeout_s": 0.05}) as app, RawClient(app.url) as client:
            answer = await client.request(body=BODY)
            assert (answer.status, answer.body, answer.complete) == (200, b"half", False)
            await upstream.calls[0].wait_disconnected()
        assert "idle_timeout_s (0.05 s)" in caplog.text
        assert other.calls == []
        line = finished()[0]
        assert (line["outcome"], line["status"], line["attempts"], line["error"]) == (
            "timeout", 200, "timeout", "upstream_timeout",
        )  # fmt: skip


async def test_silence_after_the_head(serve: Serve, finished: Finished) -> None:
    async def head_only(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        await call.wait_disconnected()

    async with FakeUpstream(head_only) as upstream:
        async with serve(upstream, upstream={"idle_timeout_s": 0.05}) as app, RawClient(app.url) as client:
            answer = await client.request(body=BODY)
            assert (answer.status, answer.body, answer.complete) == (200, b"", False)
        assert finished()[0]["outcome"] == "timeout"


async def test_an_instance_that_takes_nothing_of_a_body(serve: Serve, finished: Finished) -> None:
    async def deaf(call: Call) -> None:
        await heard.wait()

    heard = asyncio.Event()
    async with FakeUpstream(deaf, by_hand=True) as upstream:
        async with serve(upstream, upstream={"idle_timeout_s": 0.05}) as app, RawClient(app.url) as client:
            answer = await client.request("POST", UPLOAD, b"x" * 20_000_000)
            assert answer.status == 504
            assert "idle_timeout_s (0.05 s)" in message_of(answer.body)
        heard.set()
        assert (finished()[0]["outcome"], finished()[0]["attempts"]) == ("timeout", "timeout")


async def test_a_client_that_uploads_slowly_is_no_silence_of_the_instance(serve: Serve) -> None:
    async def script(call: Call) -> None:
        if call.target == CHAT:
            await call.read(len(BODY))
            await silence.wait()
        else:
            assert await call.read_body() == b"half and half"
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    silence = asyncio.Event()
    limits = {"first_byte_timeout_s": 0.25, "idle_timeout_s": 0.25}
    async with FakeUpstream(script, by_hand=True) as upstream, serve(upstream, upstream=limits) as app:
        async with RawClient(app.url) as client, RawClient(app.url) as other:
            await client.send(head("POST", UPLOAD, b"half and half") + b"half ")
            await upstream.wait_calls(1)
            # By the time that the same limit has passed twice for others …
            for _ in range(2):
                assert (await other.request(body=BODY)).status == 504
            # … the rest of the body is still welcome.
            await client.send(b"and half")
            assert (await client.answer()).status == 200
        silence.set()


async def test_a_client_that_reads_slowly_is_no_silence_of_the_instance(serve: Serve, finished: Finished) -> None:
    size = 30_000_000

    async def script(call: Call) -> None:
        if call.target == CHAT:
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
        else:
            await begins(call)

    async with FakeUpstream(script) as upstream, serve(upstream, upstream={"idle_timeout_s": 0.2}) as app:
        async with RawClient(app.url, read_bytes=65_536) as client, RawClient(app.url) as other:
            await client.send(head("POST", CHAT, BODY) + BODY)
            await client.begin()
            for _ in range(2):
                assert not (await other.request("GET", "/x")).complete
                other.close()
                await other.__aenter__()
            n = 0
            while n < size:
                n += len(await client.read(min(size - n, 1_000_000)))
        assert [line["outcome"] for line in finished()] == ["timeout", "timeout", "ok"]


async def test_no_limit_runs_on_an_answer_as_a_whole(serve: Serve) -> None:
    """Each piece of an answer starts the limit on silence anew, so a long answer may take as long as it takes."""

    async def script(call: Call) -> None:
        if call.target != CHAT:
            await silent(call)
            return
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not done.is_set():
            await ticked.wait()
            ticked.clear()
            await call.send_chunk(b"x")
        await call.send_chunk(b"")

    ticked, done = asyncio.Event(), asyncio.Event()
    limits = {"first_byte_timeout_s": 0.05, "idle_timeout_s": 0.5}
    async with (
        FakeUpstream(script) as upstream,
        serve(upstream, upstream=limits) as app,
        RawClient(app.url) as client,
        RawClient(app.url) as other,
    ):
        await client.send(head("POST", CHAT, BODY) + BODY)
        # Eleven requests that time out one after the other: longer than the limit on silence.
        for _ in range(11):
            assert (await other.request("GET", "/tick")).status == 504
            ticked.set()
        done.set()
        ticked.set()
        answer = await client.answer()
        assert answer.complete
        assert set(answer.body) == {ord("x")}


async def test_a_stream_of_an_instance_that_is_gone_does_not_hang(
    serve: Serve, finished: Finished, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may lose its engine to a signal, and keep its streams open without a word."""
    limits = {"gone_timeout_s": 0.1}
    async with FakeUpstream(begins) as upstream:
        async with (
            serve(upstream, upstream=limits, health={"interval_s": 0.02}) as app,
            RawClient(app.url) as client,
        ):
            await client.send(head("POST", CHAT, BODY) + BODY)
            await client.begin()
            assert await client.chunk() == b"half"
            upstream.refuse()
            await client.wait_closed()
        assert "silent for gone_timeout_s (0.1 s), and nothing listens there any more" in caplog.text
        assert finished()[0]["outcome"] == "timeout"


async def test_who_still_says_something_or_has_not_begun_is_not_gone(serve: Serve, finished: Finished) -> None:
    """A server that stops in good order closes its port first, and finishes what it has."""
    limits = {"gone_timeout_s": 2}
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        if call.target == CHAT:
            await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(25):
                await call.send_chunk(b"more")
                await asyncio.sleep(0.1)
            await call.send_chunk(b"")
            go_on.set()
        else:
            await go_on.wait()
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlate")

    async with FakeUpstream(script) as upstream:
        async with (
            serve(upstream, upstream=limits, health={"interval_s": 0.02}) as app,
            RawClient(app.url) as one,
            RawClient(app.url) as other,
        ):
            whole = asyncio.create_task(other.request("POST", "/v1/completions", b'{"prompt":"x"}'))
            await upstream.wait_calls(1)
            streamed = asyncio.create_task(one.request("POST", CHAT, BODY))
            await upstream.wait_calls(2)
            upstream.refuse()
            assert (await streamed).body == b"more" * 25
            assert (await whole).body == b"late"
        assert [record["outcome"] for record in finished()] == ["ok", "ok"]


async def test_an_instance_that_is_back_may_be_silent_again(serve: Serve, finished: Finished, until: Until) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.send_chunk(b"half")
        await go_on.wait()
        await call.send_chunk(b"whole")
        await call.send_chunk(b"")

    async with FakeUpstream(script) as upstream:
        async with (
            serve(upstream, upstream={"gone_timeout_s": 2}, health={"interval_s": 0.02, "fall": 1, "rise": 1}) as app,
            RawClient(app.url) as client,
        ):
            await client.send(head("POST", CHAT, BODY) + BODY)
            await client.begin()
            assert await client.chunk() == b"half"
            state = app.router.fleet.state("gpu-0")
            upstream.refuse()
            await until(lambda: state.state is State.DOWN)
            await upstream.start()
            await until(lambda: state.state is State.UP)
            # Longer than it would have had.
            await asyncio.sleep(2.5)
            go_on.set()
            assert (await client.chunk(), await client.chunk()) == (b"whole", b"")
        assert finished()[0]["outcome"] == "ok"
