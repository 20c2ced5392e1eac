"""Clients that leave: their request is cancelled upstream at once, their place is given back, nothing more is sent."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import Script, json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Finished = Callable[[], list[dict[str, Any]]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
CHAT = "/v1/chat/completions"
WAYS = ["close", "reset", "half_close"]


def in_flight(app: App, slot: int = 0) -> int:
    return app.router.load.of(slot).in_flight


def leave(client: RawClient, way: str) -> None:
    getattr(client, way)()


async def silent(call: Call) -> None:
    await call.wait_disconnected()


async def begins(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await call.send_chunk(b"data: 1\n\n")
    await call.wait_disconnected()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("settings", [{}, {"response_headers": True, "log": {"format": "json"}}])
async def test_mid_stream(serve: Serve, until: Until, finished: Finished, way: str, settings: dict[str, Any]) -> None:
    async with FakeUpstream(begins) as upstream, serve(upstream, **settings) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, BODY) + BODY)
        await client.begin()
        assert await client.chunk() == b"data: 1\n\n"
        assert in_flight(app) == 1
        leave(client, way)
        await upstream.calls[0].wait_disconnected()
        assert in_flight(app) == 0
        await until(lambda: len(finished()) == 1)
        (line,) = finished()
        assert (line["outcome"], line["status"], line["error"], line["attempts"]) == (
            "client_gone", 200, None, "abandoned",
        )  # fmt: skip
        assert b"prefixroute_client_disconnects_total 1.0" in app.metrics.exposition()[0]


async def test_during_silence_before_the_head(serve: Serve, until: Until, finished: Finished, way: str) -> None:
    async with FakeUpstream(silent) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, BODY) + BODY)
        await upstream.wait_calls(1)
        assert in_flight(app) == 1
        leave(client, way)
        await upstream.calls[0].wait_disconnected()
        assert in_flight(app) == 0
        await until(lambda: len(finished()) == 1)
        assert (finished()[0]["outcome"], finished()[0]["status"]) == ("client_gone", None)
        assert len(upstream.calls) == 1


async def test_while_it_takes_nothing(serve: Serve, until: Until, finished: Finished, way: str) -> None:
    """The router waits for room in the client's socket, not for the instance."""
    sent = 0

    async def pours(call: Call) -> None:
        nonlocal sent
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await call.send_chunk(b"x" * 65_536)
            sent += 1

    async with FakeUpstream(pours) as upstream, serve(upstream) as app:
        async with RawClient(app.url, read_bytes=4096) as client, RawClient(app.url) as other:
            await client.send(head("POST", CHAT, BODY) + BODY)
            await client.begin()
            before = -1
            while sent != before:
                before = sent
                for _ in range(50):
                    await other.request("GET", "/health")
            leave(client, way)
            await upstream.calls[0].wait_disconnected()
            assert in_flight(app) == 0
        await until(lambda: finished()[-1]["route"] == "/v1/chat/completions")
        assert finished()[-1]["outcome"] == "client_gone"


async def test_while_nobody_can_take_the_request(serve: Serve, until: Until, finished: Finished, way: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream, limits={"wait_for_instance_s": 60.0}) as app:
        await upstream.stop()
        async with RawClient(app.url) as client:
            await client.send(head("POST", CHAT, BODY) + BODY)
            await until(lambda: app.metrics.waiting() == 1)
            leave(client, way)
            await until(lambda: len(finished()) == 1)
        assert app.metrics.waiting() == 0
        assert finished()[0]["outcome"] == "client_gone"
        await upstream.start()
        async with RawClient(app.url) as client:
            app.router.fleet.probe_passed("gpu-0")
            assert (await client.request(body=BODY)).status == 200
        # What it asked for did not come after all.
        assert len(upstream.calls) == 1


async def test_while_a_busy_instances_answer_is_held_back(
    serve: Serve, until: Until, finished: Finished, way: str
) -> None:
    """The failover stops with the client: no further delivery."""
    async with (
        FakeUpstream(json_answer({}, status=503)) as busy,
        FakeUpstream(silent) as other,
        FakeUpstream() as third,
        serve(busy, other, third) as app,
        RawClient(app.url) as client,
    ):
        await client.send(head("POST", CHAT, BODY) + BODY)
        await other.wait_calls(1)
        assert (in_flight(app, 0), in_flight(app, 1)) == (0, 1)
        leave(client, way)
        await other.calls[0].wait_disconnected()
        await until(lambda: len(finished()) == 1)
        assert [len(upstream.calls) for upstream in (busy, other, third)] == [1, 1, 0]
        assert (finished()[0]["outcome"], finished()[0]["attempts"]) == ("client_gone", "busy,abandoned")
        assert in_flight(app, 1) == 0


async def test_while_its_busy_answer_is_still_to_come(serve: Serve, until: Until, finished: Finished, way: str) -> None:
    async with FakeUpstream(silent) as slow, FakeUpstream() as other, serve(slow, other) as app:
        async with RawClient(app.url) as client:
            await client.send(head("POST", CHAT, BODY) + BODY)
            await slow.wait_calls(1)
            leave(client, way)
            await slow.calls[0].wait_disconnected()
            await until(lambda: len(finished()) == 1)
        assert other.calls == []


@pytest.mark.parametrize("target", [CHAT, "/v1/audio/transcriptions"])
async def test_in_the_middle_of_its_own_body(
    serve: Serve, until: Until, finished: Finished, way: str, target: str
) -> None:
    async def takes_it_in(call: Call) -> None:
        await call.read_body()

    async with FakeUpstream(takes_it_in, by_hand=True) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            await client.send(head("POST", target, b"x" * 1000) + b"half")
            if target != CHAT:
                await upstream.wait_calls(1)
            else:
                # A body that has not come is no load on anybody.
                await until(lambda: app.proxy.n_active == 1)
                assert in_flight(app) == 0
            leave(client, way)
            await until(lambda: len(finished()) == 1)
        await upstream.wait_connections(0)
        assert finished()[0]["outcome"] == "client_gone"
        assert len(upstream.calls) == (0 if target == CHAT else 1)


@pytest.mark.parametrize("script", [silent, begins])
async def test_a_crowd_leaves_nothing_behind(serve: Serve, until: Until, finished: Finished, script: Script) -> None:
    n = 100
    async with FakeUpstream(script) as one, FakeUpstream(script) as other, serve(one, other) as app:
        clients = [RawClient(app.url) for _ in range(n)]
        await asyncio.gather(*(client.__aenter__() for client in clients))
        for client in clients:
            await client.send(head("POST", CHAT, BODY) + BODY)
        await one.wait_calls(n // 2)
        await other.wait_calls(n // 2)
        assert (in_flight(app, 0), in_flight(app, 1)) == (n // 2, n // 2)
        for i, client in enumerate(clients):
            leave(client, WAYS[i % 3])
        for call in one.calls + other.calls:
            await call.wait_disconnected()
        await until(lambda: len(finished()) == n)
        assert (in_flight(app, 0), in_flight(app, 1)) == (0, 0)
        assert {line["outcome"] for line in finished()} == {"client_gone"}
        await asyncio.gather(*(client.__aexit__(None, None, None) for client in clients))


@pytest.mark.parametrize("what", ["upload", "ahead", "tunnel"])
async def test_a_client_is_missed_though_it_is_not_being_read(serve: Serve, what: str) -> None:
    """What it sends is more than anybody takes: no event tells of its end then."""

    async def takes_nothing(call: Call) -> None:
        if what == "tunnel":
            await call.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        taken.set()
        await asyncio.sleep(3600)

    taken = asyncio.Event()
    offer = [("Connection", "Upgrade"), ("Upgrade", "websocket")]
    start = {
        "upload": head("POST", "/unknown", bytes(60_000_000), None),
        "ahead": head("GET", "/x", None, None) * 100 + head("POST", "/x", bytes(60_000_000), None),
        "tunnel": head("GET", "/v1/realtime", None, offer),
    }[what]
    async with FakeUpstream(takes_nothing, by_hand=True) as upstream, serve(upstream) as app:
        with socket.create_connection(("127.0.0.1", app.port)) as client:
            client.setblocking(False)
            client.send(start)
            await taken.wait()
            n_refused = 0
            while n_refused < 5:
                try:
                    client.send(bytes(1_000_000))
                    n_refused = 0
                except BlockingIOError:
                    n_refused += 1
                    await asyncio.sleep(0.05)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            await app.proxy.wait_idle()
        assert app.router.load.of(0).in_flight == 0
