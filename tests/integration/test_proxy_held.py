"""A busy instance's requests are held in the router: served in turn, given up by who leaves, refused when too many."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.core.lease import Lease
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import RawAnswer, head

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Finished = Callable[[], list[dict[str, Any]]]

CHAT = "/v1/chat/completions"


def body(name: str, n_words: int = 2_000, *, stream: bool = True) -> bytes:
    """A prompt of some 2 tokens a word that shares nothing with others."""
    content = f"{name:>7} " * n_words
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], "stream": stream}).encode()


def held(**constants: Any) -> dict[str, Any]:
    """Settings with which a request is held until those before it have had their first byte."""
    return {"routing": {"strategy": "expected_latency", "expected_latency": {"hold_s": 0.0, **constants}}}


class Gated(FakeUpstream):
    """Answers each call when it is told to."""

    def __init__(self) -> None:
        super().__init__(self._gated)
        self.gates: list[asyncio.Event] = []

    def open(self, n: int) -> None:
        while len(self.gates) <= n:
            self.gates.append(asyncio.Event())
        self.gates[n].set()

    async def _gated(self, call: Call) -> None:
        n = self.calls.index(call)
        while len(self.gates) <= n:
            self.gates.append(asyncio.Event())
        await self.gates[n].wait()
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.send_chunk(b"data: 1\n\n")
        await call.send_chunk(b"")


def n_held(app: App) -> int:
    return len(app.router.held)


def in_flight(app: App) -> int:
    return app.router.load.of(0).in_flight


@asynccontextmanager
async def clients(app: App, n: int) -> AsyncIterator[list[RawClient]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(RawClient(app.url)) for _ in range(n)]


async def ask(client: RawClient, name: str, **more: Any) -> None:
    content = body(name, **more)
    await client.send(head("POST", CHAT, content, [("x-request-id", name)]) + content)


async def test_a_burst_is_held_and_then_served_one_first_byte_at_a_time(
    serve: Serve, until: Until, finished: Finished
) -> None:
    n = 6
    async with Gated() as upstream, serve(upstream, **held()) as app, clients(app, n) as asking:
        for i, client in enumerate(asking):
            await ask(client, f"r{i}")
        await until(lambda: n_held(app) == n - 1)
        assert b"prefixroute_held_requests 5.0" in app.metrics.exposition()[0]
        assert in_flight(app) == 1
        for i in range(n):
            await upstream.wait_calls(i + 1)
            # Nobody else is sent before this one's first byte.
            assert (len(upstream.calls), n_held(app)) == (i + 1, n - 1 - i)
            upstream.open(i)
        answers = [await client.answer() for client in asking]
        assert {answer.status for answer in answers} == {200}
        await until(lambda: len(finished()) == n)
    lines = {line["request_id"]: line for line in finished()}
    assert lines["r0"]["held_ms"] is None
    assert all(lines[f"r{i}"]["held_ms"] > 0 for i in range(1, n))
    assert f"prefixroute_held_seconds_count {n - 1}.0".encode() in app.metrics.exposition()[0]
    assert len(app.router.held.by_slot) == 0


async def test_an_idle_instance_takes_what_a_busy_one_is_not_given(serve: Serve, until: Until) -> None:
    async with (
        Gated() as a, Gated() as b, serve(a, b, **held()) as app, clients(app, 4) as asking,
    ):  # fmt: skip
        for i, client in enumerate(asking):
            await ask(client, f"r{i}")
        await until(lambda: n_held(app) == 2)
        await a.wait_calls(1)
        await b.wait_calls(1)
        # Whoever was bound to the other one may go where there is room.
        for i in range(3):
            b.open(i)
        await b.wait_calls(3)
        assert len(a.calls) == 1
        a.open(0)
        assert [(await client.answer()).status for client in asking] == [200] * 4


async def test_answers_in_one_piece_make_room_by_the_clock(serve: Serve) -> None:
    """They do not tell when their prefill is over: nothing but time passes between the two calls."""
    async with Gated() as upstream, serve(upstream, **held()) as app, clients(app, 2) as asking:
        await ask(asking[0], "first", stream=False)
        await upstream.wait_calls(1)
        await ask(asking[1], "second")
        await upstream.wait_calls(2)
        upstream.open(1)
        assert (await asking[1].answer()).status == 200
        upstream.open(0)
        assert (await asking[0].answer()).status == 200


@pytest.mark.parametrize("way", ["close", "reset", "half_close"])
async def test_a_client_that_leaves_frees_its_place(serve: Serve, until: Until, finished: Finished, way: str) -> None:
    async with (
        Gated() as upstream, serve(upstream, **held(max_held=1)) as app, clients(app, 3) as (first, leaves, comes),
    ):  # fmt: skip
        await ask(first, "first")
        await upstream.wait_calls(1)
        await ask(leaves, "leaves")
        await until(lambda: n_held(app) == 1)
        getattr(leaves, way)()
        await until(lambda: n_held(app) == 0)
        assert app.router.held.by_slot == {}
        await ask(comes, "comes")
        await until(lambda: n_held(app) == 1)
        upstream.open(0)
        upstream.open(1)
        assert [(await client.answer()).status for client in (first, comes)] == [200, 200]
        await until(lambda: len(finished()) == 3)
    line = next(line for line in finished() if line["request_id"] == "leaves")
    assert (line["outcome"], line["upstream"], line["attempts"]) == ("client_gone", None, None)
    assert line["held_ms"] > 0
    assert len(upstream.calls) == 2


async def test_a_client_that_leaves_between_grant_and_wake_up_gives_its_place_to_the_next(
    serve: Serve, until: Until, finished: Finished
) -> None:
    async with (
        Gated() as upstream, serve(upstream, **held()) as app, clients(app, 3) as (first, leaves, third),
    ):  # fmt: skip
        await ask(first, "first")
        await upstream.wait_calls(1)
        assert (await leaves.request("GET", "/health")).status == 200
        before = asyncio.all_tasks()
        await ask(leaves, "leaves")
        await until(lambda: n_held(app) == 1)
        handlers = asyncio.all_tasks() - before
        (waiting,) = app.router.held.oldest(1, app.router.held.kinds)  # type: ignore[arg-type]  # iterable is enough
        await ask(third, "third")
        await until(lambda: n_held(app) == 2)
        grant = waiting.grant
        leases: list[Lease | None] = []

        def grant_as_it_leaves(lease: Lease | None) -> None:
            grant(lease)
            leases.append(lease)
            # What aiohttp does when the connection is lost.
            for task in handlers:
                task.cancel()

        waiting.grant = grant_as_it_leaves
        upstream.open(0)
        await upstream.wait_calls(2)
        upstream.open(1)
        assert [(await client.answer()).status for client in (first, third)] == [200, 200]
        await until(lambda: len(finished()) == 4)
    assert len(leases) == 1
    assert leases[0] is not None
    assert [json.loads(call)["messages"][0]["content"].split()[0] for call in upstream.bodies] == ["first", "third"]
    assert {line["request_id"]: line["outcome"] for line in finished()}["leaves"] == "client_gone"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (CHAT, {"type": "rate_limit_error", "param": None, "code": "too_many_requests"}),
        ("/v1/completions", {"type": "rate_limit_error", "param": None, "code": "too_many_requests"}),
        ("/invocations", {"type": "rate_limit_error", "param": None, "code": "too_many_requests"}),
        ("/v1/messages", {"type": "rate_limit_error"}),
    ],
)
async def test_one_too_many_is_told_so_in_the_dialect_of_the_route_and_when_to_come_back(
    serve: Serve, until: Until, finished: Finished, path: str, error: dict[str, Any]
) -> None:
    async with (
        Gated() as upstream, serve(upstream, **held(max_held=1)) as app, clients(app, 3) as (first, second, refused),
    ):  # fmt: skip
        # 40,000 tokens of prompt, later ones of which cost more: 65,000 of work at 12,000 a second.
        await ask(first, "first", n_words=20_000)
        await upstream.wait_calls(1)
        await ask(second, "second", n_words=20_000)
        await until(lambda: n_held(app) == 1)
        is_completion = path == "/v1/completions"
        content = json.dumps({"model": "m", "prompt": "hello"}).encode() if is_completion else body("refused")
        answer: RawAnswer = await refused.request("POST", path, content)
        assert answer.status == 429
        assert int(answer.header("retry-after") or 0) == pytest.approx(2 * 65_000 / 12_000, abs=1.5)
        told = json.loads(answer.body)
        assert told["error"].pop("message") == "all instances are busy, and too many requests wait already"
        assert told["error"] == error
        assert told.get("type") == ("error" if path == "/v1/messages" else None)
        # The connection is as good as before.
        assert (await refused.request("GET", "/health")).status == 200
        for i in range(2):
            upstream.open(i)
        assert [(await client.answer()).status for client in (first, second)] == [200, 200]
        await until(lambda: len(finished()) == 4)
    line = next(line for line in finished() if line["status"] == 429)
    assert (line["outcome"], line["error"], line["upstream"]) == ("refused", "too_many_requests", None)


async def test_nobody_is_held_and_nobody_refused_when_none_may_be_held(serve: Serve) -> None:
    async with Gated() as upstream, serve(upstream, **held(max_held=0)) as app, clients(app, 3) as asking:
        for i, client in enumerate(asking):
            await ask(client, f"r{i}")
        await upstream.wait_calls(3)
        for i in range(3):
            upstream.open(i)
        assert [(await client.answer()).status for client in asking] == [200] * 3


async def test_who_is_held_for_an_instance_that_is_lost_is_told(serve: Serve, until: Until) -> None:
    async with (
        Gated() as upstream,
        serve(upstream, **held(), limits={"wait_for_instance_s": 0.0}) as app,
        clients(app, 4) as asking,
    ):
        for i, client in enumerate(asking):
            await ask(client, f"r{i}")
        await until(lambda: n_held(app) == 3)
        await upstream.wait_calls(1)
        await upstream.stop()
        answers = [await client.answer() for client in asking]
    # The first was sent already; one finds out that nobody listens; the others need not.
    assert sorted(answer.status for answer in answers) == [502, 503, 503, 503]


async def test_the_time_held_is_none_of_the_time_for_which_an_instance_is_waited_for(
    serve: Serve, until: Until, finished: Finished
) -> None:
    async with (
        Gated() as upstream,
        serve(upstream, **held(), limits={"wait_for_instance_s": 0.3}) as app,
        clients(app, 2) as (first, second),
    ):
        await ask(first, "first")
        await upstream.wait_calls(1)
        await ask(second, "second")
        await until(lambda: n_held(app) == 1)
        began_s = app._clock()
        await until(lambda: app._clock() - began_s > 0.35)
        app.router.fleet.drain("gpu-0")
        await until(lambda: n_held(app) == 0)
        app.router.fleet.undrain("gpu-0")
        upstream.open(0)
        upstream.open(1)
        assert [(await client.answer()).status for client in (first, second)] == [200, 200]
        await until(lambda: len(finished()) == 2)
    assert {line["request_id"]: line["status"] for line in finished()} == {"first": 200, "second": 200}


@asynccontextmanager
async def stoppable(serve: Serve, upstream: FakeUpstream, **settings: Any) -> AsyncIterator[tuple[App, asyncio.Event]]:
    """A router, and what makes it stop."""
    started: asyncio.Future[App] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def life() -> None:
        async with serve(upstream, **held(), **settings) as app:
            started.set_result(app)
            await stop.wait()

    living = asyncio.create_task(life())
    try:
        yield await started, stop
    finally:
        stop.set()
        await living


async def test_a_drain_lets_those_that_are_held_have_their_turn(serve: Serve, until: Until, finished: Finished) -> None:
    async with (
        Gated() as upstream, stoppable(serve, upstream, drain_timeout_s=60.0) as (app, stop), clients(app, 3) as asking,
    ):  # fmt: skip
        for i, client in enumerate(asking):
            await ask(client, f"r{i}")
        await until(lambda: n_held(app) == 2)
        stop.set()
        await until(lambda: app.stopping)
        for i in range(3):
            upstream.open(i)
        assert [(await client.answer()).status for client in asking] == [200] * 3
    assert [line["outcome"] for line in finished()] == ["ok"] * 3


async def test_a_stop_cuts_off_those_that_are_still_held_and_forgets_them(
    serve: Serve, until: Until, finished: Finished
) -> None:
    async with (
        Gated() as upstream, stoppable(serve, upstream, drain_timeout_s=0.05) as (app, stop), clients(app, 3) as asking,
    ):  # fmt: skip
        for i, client in enumerate(asking):
            await ask(client, f"r{i}")
        await until(lambda: n_held(app) == 2)
        stop.set()
        for client in asking:
            assert await client.wait_closed() == b""
        await until(lambda: len(finished()) == 3)
        assert (n_held(app), in_flight(app), app.router.held.by_slot) == (0, 0, {})
    assert [line["outcome"] for line in finished()] == ["cut_off"] * 3


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [("GET", "/v1/models", b""), ("GET", "/version", b""), ("POST", "/tokenize", b'{"model":"m","prompt":"hi"}')],
)
async def test_who_asks_for_no_prefill_waits_for_nobodys(
    serve: Serve, until: Until, method: str, path: str, content: bytes
) -> None:
    async with (
        Gated() as upstream, serve(upstream, **held(max_held=1)) as app, clients(app, 3) as (first, second, asks),
    ):  # fmt: skip
        await ask(first, "first")
        await upstream.wait_calls(1)
        await ask(second, "second")
        await until(lambda: n_held(app) == 1)
        upstream.open(1)
        answer: RawAnswer = await asks.request(method, path, content)
        assert answer.status == 200
        assert n_held(app) == 1
        for i in (0, 2):
            upstream.open(i)
        assert [(await client.answer()).status for client in (first, second)] == [200, 200]
