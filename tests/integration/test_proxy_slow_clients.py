"""Clients that take their time over a request: bounded, and answered where there is something to answer.

The limits are short here, so that they run out; what a test needs in time has a limit far beyond any test.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"
HEAD_LIMIT = {"limits": {"client_head_timeout_s": 0.2}}
BODY_LIMIT = {"limits": {"client_body_timeout_s": 0.2, "client_body_bytes_per_s": 1_000_000}}


async def test_a_connection_that_asks_nothing_is_closed(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **HEAD_LIMIT) as app, RawClient(app.url) as client:
        assert await client.wait_closed() == b""


@pytest.mark.parametrize("n_before", [0, 1])
async def test_a_head_that_does_not_end_is_refused(serve: Serve, n_before: int) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **HEAD_LIMIT) as app, RawClient(app.url) as client:
        for _ in range(n_before):
            assert (await client.request(body=BODY)).status == 200

        async def trickle() -> None:
            for byte in b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Secret: " + b"x" * 10_000:
                await client.send(bytes([byte]))
                await asyncio.sleep(0.01)

        writing = asyncio.create_task(trickle())
        answer = await client.answer()
        writing.cancel()
        assert (answer.status, answer.header("connection")) == (408, "close")
        assert json.loads(answer.body)["error"]["code"] == "request_timeout"
        assert b"Secret" not in answer.raw
        assert len(upstream.calls) == n_before


@pytest.mark.parametrize("begun", [b"G", b"GET /x HTTP/1.1\r\nHost: a\r\nX: 1\r\n"])
@pytest.mark.parametrize("limits", [HEAD_LIMIT["limits"], {"client_head_timeout_s": 0.4, "client_idle_timeout_s": 0.1}])
@pytest.mark.parametrize("n_before", [0, 1])
async def test_a_head_that_came_in_one_piece_and_does_not_end_is_refused(
    serve: Serve, begun: bytes, limits: dict[str, float], n_before: int
) -> None:
    """Also where an idle connection is kept for less time than a head may take."""
    async with FakeUpstream() as upstream, serve(upstream, limits=limits) as app, RawClient(app.url) as client:
        for _ in range(n_before):
            assert (await client.request(body=BODY)).status == 200
        await client.send(begun)
        assert ((await client.answer()).status, await client.wait_closed()) == (408, b"")
        assert b'prefixroute_unread_requests_total{cause="request_timeout"} 1.0' in app.metrics.exposition()[0]


async def test_a_head_that_was_there_before_its_connection_was_accepted_is_one(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **HEAD_LIMIT) as app:
        port = int(app.url.rpartition(":")[2])
        # Blocking, so that nothing is accepted before all of it is there.
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\nX: 1\r\n")
            raw.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(raw, 65_536)
        assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("at", [1, 30])
async def test_a_head_that_begins_during_an_answer_has_its_time_from_then_on(serve: Serve, at: int) -> None:
    """And is taken in whole, however long the answer before it took."""
    next_one = head("GET", "/next", None)
    go_on = asyncio.Event()

    async def slow(call: Call) -> None:
        await go_on.wait()
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with FakeUpstream(slow) as upstream, serve(upstream, **HEAD_LIMIT) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, BODY, None) + BODY)
        await upstream.wait_calls(1)
        await client.send(next_one[:at])
        await asyncio.sleep(0.5)
        go_on.set()
        assert (await client.answer()).status == 200
        await client.send(next_one[at:])
        assert (await client.answer()).status == 200
        await client.send(head("POST", CHAT, BODY, None) + BODY)
        assert (await client.answer()).status == 200
        go_on.clear()
        await client.send(head("POST", CHAT, BODY, None) + BODY)
        await upstream.wait_calls(4)
        await client.send(next_one[:at])
        go_on.set()
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 408


async def test_a_connection_between_requests_is_no_head(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **HEAD_LIMIT) as app, RawClient(app.url) as client:
        for _ in range(2):
            assert (await client.request(body=BODY)).status == 200
            await asyncio.sleep(0.5)


async def test_a_connection_that_is_idle_for_too_long_is_closed(serve: Serve) -> None:
    limits = {"limits": {"client_idle_timeout_s": 0.2}}
    async with FakeUpstream() as upstream, serve(upstream, **limits) as app, RawClient(app.url) as client:
        assert (await client.request(body=BODY)).status == 200
        assert await client.wait_closed() == b""


async def test_a_slow_answer_is_no_slow_request(serve: Serve) -> None:
    async def slow(call: Call) -> None:
        await asyncio.sleep(0.5)
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
        await asyncio.sleep(0.5)
        await call.send(b"k")

    limits = {"limits": {**HEAD_LIMIT["limits"], **BODY_LIMIT["limits"], "client_idle_timeout_s": 0.2}}
    async with FakeUpstream(slow) as upstream, serve(upstream, **limits) as app, RawClient(app.url) as client:
        assert (await client.request(body=BODY)).body == b"ok"


@pytest.mark.parametrize("target", [CHAT, "/v1/messages", "/v1/audio/transcriptions", "/unknown"])
async def test_a_body_that_does_not_come_is_refused_in_the_dialect(
    serve: Serve, finished: Finished, target: str
) -> None:
    """Read whole for routing, or streamed up."""
    async with FakeUpstream() as upstream, serve(upstream, **BODY_LIMIT) as app, RawClient(app.url) as client:
        await client.send(head("POST", target, BODY, None) + BODY[:10])
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (408, "close")
        document = json.loads(answer.body)
        assert ("type" in document) == (target == "/v1/messages")
        await client.wait_closed()
        assert upstream.calls == []
        await app.proxy.wait_idle()
        assert finished()[-1]["error"] == "request_timeout"
        assert finished()[-1]["body_bytes"] == 10  # what came of it, not what was announced


async def test_each_byte_buys_time(serve: Serve) -> None:
    """Twice the limit in all, at a rate that is above the least."""
    limits = {"limits": {"client_body_timeout_s": 0.3, "client_body_bytes_per_s": 20}}
    async with FakeUpstream() as upstream, serve(upstream, **limits) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, BODY, None))
        for at in range(0, len(BODY), 10):
            await client.send(BODY[at : at + 10])
            await asyncio.sleep(0.1)
        assert (await client.answer()).status == 200
        assert upstream.bodies == [BODY]


async def test_an_instance_that_is_slow_to_take_a_body_is_not_the_clients_fault(serve: Serve) -> None:
    body = b"x" * 20_000_000

    async def slow(call: Call) -> None:
        await asyncio.sleep(1.0)
        await call.read_body()
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with (
        FakeUpstream(slow, by_hand=True) as upstream,
        serve(upstream, **BODY_LIMIT) as app,
        RawClient(app.url) as client,
    ):
        assert (await client.request("POST", "/unknown", body)).status == 200
        assert upstream.calls[0].body == body


STALL = {"limits": {"client_stall_timeout_s": 0.2}}
LARGE_BYTES = 20_000_000


async def large(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LARGE_BYTES)
    for _ in range(LARGE_BYTES // 100_000):
        await call.send(bytes(100_000))


@pytest.mark.parametrize("n_bytes", [LARGE_BYTES, 300_000])
async def test_a_client_that_takes_nothing_has_left(serve: Serve, n_bytes: int) -> None:
    """While the answer is under way, or when it has all been written but not taken."""

    async def answers(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % n_bytes)
        with suppress(ConnectionError):
            for _ in range(n_bytes // 100_000):
                await call.send(bytes(100_000))

    async with (
        FakeUpstream(answers, by_hand=True) as upstream,
        serve(upstream, **STALL) as app,
        RawClient(app.url, read_bytes=4096) as client,
    ):
        # Many, so that the sockets' buffers do not hold them all.
        await client.send(head("GET", "/x", None, None) * 40)
        await client.begin()
        with suppress(ConnectionError):
            while True:
                await client.send(b"\r\n")
                await asyncio.sleep(0.05)
        await app.proxy.wait_idle()


async def test_a_client_that_takes_little_is_served(serve: Serve) -> None:
    async with (
        FakeUpstream(large) as upstream,
        serve(upstream, **STALL) as app,
        RawClient(app.url, read_bytes=4096) as client,
    ):
        await client.send(head("GET", "/x", None, None))
        await client.begin()
        for _ in range(30):
            await client.read(4096)
            await asyncio.sleep(0.05)
        rest = LARGE_BYTES - 30 * 4096
        while rest:
            rest -= len(await client.read(min(rest, 65_536)))
