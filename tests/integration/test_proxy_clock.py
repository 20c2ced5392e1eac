"""O69: the wall clock jumps by an hour, there and back, and nothing follows from it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from itertools import cycle
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.core.fleet import State
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.upstream import json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called, each look at the wall clock is an hour from the last one."""
    wall, steps = time.time, cycle((3600.0, -3600.0))

    def jump() -> None:
        monkeypatch.setattr(time, "time", lambda: wall() + next(steps))

    return jump


async def test_connections_are_kept_and_slow_answers_waited_for(
    serve: Serve, finished: Finished, jumping: Callable[[], None]
) -> None:
    go_on = asyncio.Event()

    async def slow(call: Call) -> None:
        await go_on.wait()
        await json_answer({})(call)

    limits = {"first_byte_timeout_s": 600.0, "idle_timeout_s": 600.0, "keepalive_s": 600.0}
    async with FakeUpstream() as upstream, serve(upstream, upstream=limits) as app, RawClient(app.url) as client:
        assert (await client.request("POST", CHAT, body=BODY)).status == 200
        n_connections = upstream.n_connections_ever
        upstream.script = slow
        under_way = asyncio.create_task(client.request("POST", CHAT, body=BODY))
        await upstream.wait_calls(2)
        jumping()
        go_on.set()
        assert (await under_way).status == 200
        assert (await client.request("POST", CHAT, body=BODY)).status == 200
        assert upstream.n_connections_ever == n_connections
    assert all(0 <= line["duration_ms"] < 600_000 for line in finished())


async def test_who_is_ejected_stays_so_and_who_waits_goes_on_waiting(
    serve: Serve, until: Until, jumping: Callable[[], None]
) -> None:
    health = {"eject_s": 600.0, "eject_max_s": 600.0}
    async with (
        FakeUpstream() as upstream,
        serve(upstream, health=health, limits={"wait_for_instance_s": 600.0}) as app,
    ):
        upstream.refuse()
        waiting = [asyncio.create_task(ask(app)) for _ in range(2)]
        await until(lambda: app.waiting == 2)
        jumping()
        app.parts.waiting.wake()
        await until(lambda: app.waiting == 2)
        assert app.router.fleet.state("gpu-0").state is State.EJECTED
        await upstream.start()
        app.router.fleet.probe_passed("gpu-0")
        app.parts.waiting.wake()
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]


async def ask(app: App) -> Any:
    async with RawClient(app.url) as client:
        return await client.request("POST", CHAT, body=BODY)
