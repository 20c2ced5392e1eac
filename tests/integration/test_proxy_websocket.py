"""WebSockets: relayed as bytes, both ways, until both sides have closed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

OFFER = [
    ("Connection", "keep-alive, Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Key", "x" * 24),
    ("Sec-WebSocket-Protocol", "realtime"),
]
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Kept: 1\r\n\r\n"
LARGE_BYTES = 40_000_000


async def echoes(call: Call) -> None:
    """Switches, says something at once, then what it is told, until told to stop."""
    await call.send(SWITCH + b"hello")
    while (said := await call.read(1)) != b"!":
        await call.send(said)
    call.close()


async def offer(client: RawClient, rest: bytes = b"") -> None:
    await client.send(head("GET", "/v1/realtime", None, OFFER) + rest)


async def ok(_request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def websocket_server() -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=("realtime",))
        await socket.prepare(request)
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                await socket.send_bytes(message.data[::-1])
            elif message.data == "bye":
                await socket.close(code=4001, message=b"as you wish")
            else:
                await socket.send_str(message.data.upper())
        return socket

    app = web.Application()
    app.router.add_get("/v1/realtime", handle)
    app.router.add_get("/health", ok)
    app.router.add_get("/metrics", ok)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_real_client_talks_to_a_real_server(serve: Serve) -> None:
    async with (
        websocket_server() as url,
        serve(url) as app,
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{app.url}/v1/realtime?model=m", protocols=("realtime",)) as socket,
    ):
        assert socket.protocol == "realtime"
        await socket.send_str("hi")
        assert await socket.receive_str() == "HI"
        await socket.send_bytes(bytes(range(256)) * 4000)
        assert await socket.receive_bytes() == (bytes(range(256)) * 4000)[::-1]
        await socket.ping(b"there?")
        await socket.send_str("bye")
        assert (await socket.receive()).data == 4001
        assert socket.close_code == 4001


async def test_heads_pass_and_what_is_said_at_once_is_not_lost(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream(echoes, by_hand=True) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            await offer(client, b"ab")
            answer = await client.read(len(SWITCH))
            assert answer.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
            assert b"X-Kept: 1\r\n" in answer
            assert b"Upgrade: websocket\r\n" in answer
            assert b"Connection: Upgrade\r\n" in answer
            assert await client.read(7) == b"helloab"
            await client.send(b"c")
            assert await client.read(1) == b"c"
            assert app.router.load.of(0).in_flight == 1
            await client.send(b"!")
            assert await client.wait_closed() == b""
        call = upstream.calls[0]
        assert call.header("sec-websocket-key") == "x" * 24
        assert call.header("sec-websocket-protocol") == "realtime"
        assert (call.all_headers("connection"), call.all_headers("upgrade")) == (["Upgrade"], ["websocket"])
        await app.proxy.wait_idle()
        line = finished()[-1]
        assert (line["status"], line["outcome"], line["answer_bytes"]) == (101, "ok", 8)


async def test_a_client_that_leaves_takes_the_instance_along(serve: Serve) -> None:
    async with FakeUpstream(echoes, by_hand=True) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            await offer(client)
            await client.read(len(SWITCH) + 5)
            client.reset()
        await upstream.wait_connections(0)
        await app.proxy.wait_idle()


async def test_who_closes_its_sending_side_has_left(serve: Serve) -> None:
    said = bytearray()

    async def listens(call: Call) -> None:
        await call.send(SWITCH)
        with suppress(asyncio.IncompleteReadError):
            while True:
                said.extend(await call.read(1))
        call.close()

    async with FakeUpstream(listens, by_hand=True) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            await offer(client)
            await client.read(len(SWITCH))
            await client.send(b"all")
            client.half_close()
            await app.proxy.wait_idle()
            assert await client.wait_closed() == b""
        await upstream.wait_connections(0)
    assert said == b"all"


async def test_a_slow_side_holds_the_other_one_back(serve: Serve, until: Until) -> None:
    n_sent = 0

    async def floods(call: Call) -> None:
        nonlocal n_sent
        await call.send(SWITCH)
        for _ in range(LARGE_BYTES // 50_000):
            await call.send(b"x" * 50_000)
            n_sent += 50_000
        call.close()

    async with FakeUpstream(floods, by_hand=True) as upstream, serve(upstream) as app:
        async with RawClient(app.url, read_bytes=4096) as client:
            await offer(client)
            await client.read(len(SWITCH))
            n_before = -1
            while n_before != n_sent or not n_sent:
                n_before = n_sent
                await asyncio.sleep(0.1)
            # Sockets' buffers, and no more than a few reads' worth of ours.
            assert n_sent < LARGE_BYTES
        await upstream.wait_connections(0)
        await app.proxy.wait_idle()


async def test_a_refusal_passes_and_the_connection_goes_on(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request("GET", "/v1/realtime", headers=OFFER)
        assert (answer.status, answer.body) == (200, b'{"ok": true}')
        assert (await client.request("GET", "/x")).status == 200
        assert [call.target for call in upstream.calls] == ["/v1/realtime", "/x"]


@pytest.mark.parametrize(
    "headers",
    [
        [("Upgrade", "websocket")],  # not named by Connection
        [("Connection", "Upgrade"), ("Upgrade", "h2c")],
        [],
    ],
)
async def test_a_switch_that_was_not_asked_for_is_a_bad_gateway(
    serve: Serve, headers: list[tuple[str, str]], finished: Finished
) -> None:
    async with FakeUpstream(echoes, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request("GET", "/v1/realtime", headers=headers)).status == 502
        assert upstream.calls[0].header("upgrade") is None


async def test_a_router_that_stops_closes_them(serve: Serve) -> None:
    async with FakeUpstream(echoes, by_hand=True) as upstream:
        async with serve(upstream) as app:
            client = RawClient(app.url)
            await client.__aenter__()
            await offer(client)
            await client.read(len(SWITCH) + 5)
        await client.wait_closed()
        await client.__aexit__(None, None, None)
        await upstream.wait_connections(0)
