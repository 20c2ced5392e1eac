"""Clients and engines that go: what is freed, what is forgotten, and what those who stay get to see."""

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import aiohttp
import pytest

from prefixroute import prober
from prefixroute.app import App
from prefixroute.core.fleet import State
from tests.engines.engine_facts import n_running
from tests.engines.load import client, words
from tests.engines.routers import before, exact_tokens, wait_until_trusted
from tests.engines.servers import BLOCK_TOKENS, VllmServer
from tests.engines.tiny_model import NAME
from tests.engines.waiting import wait_until, wait_until_told

# Guards against hanging. What is asserted is asserted by counts, and by the clock only where a promise names a second.
PATIENCE_S = 60.0
# How long the router waits for a stream that has fallen silent. An engine at work says something all the time.
SILENCE_S = 10.0
# Long enough to be still going on whatever happens, if nobody stops it.
ENDLESS = {"model": NAME, "max_tokens": 8_000, "ignore_eos": True, "temperature": 0}


@asynccontextmanager
async def streaming(session: aiohttp.ClientSession, url: str, prompt: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """An endless answer that has begun."""
    body = {**ENDLESS, "prompt": prompt, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200
        await response.content.readuntil(b"\n\n")
        yield response


async def complete(session: aiohttp.ClientSession, url: str, prompt: str | list[int]) -> int:
    """Asks for one token; what was cached."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0


# ---------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("kind", ["in a stream", "while it waits for the whole answer", "during the prefill"])
async def test_a_client_that_leaves_frees_the_engine(
    kind: str, vllm: list[VllmServer], tell: Callable[[str], None]
) -> None:
    server = vllm[0]
    async with before([server]) as app, client() as session, client() as leaver:

        async def idle() -> bool:
            return await n_running(session, server) == 0

        async def busy() -> bool:
            return not await idle()

        if kind == "in a stream":
            async with streaming(leaver, app.url, "def f(x):"):
                await wait_until_told(busy, PATIENCE_S)
                left_s = time.monotonic()
        else:
            prompt = "def f(x):" if kind != "during the prefill" else [9] * 8_000
            body = {**ENDLESS, "prompt": prompt}
            asking = asyncio.create_task(leaver.post(f"{app.url}/v1/completions", json=body))
            await wait_until_told(busy, PATIENCE_S)
            left_s = time.monotonic()
            asking.cancel()
        await wait_until_told(idle, PATIENCE_S)
        took_s = time.monotonic() - left_s
        await wait_until(lambda: app.proxy.n_active == 0, PATIENCE_S)
    tell(f"a client that leaves {kind} frees the engine within {took_s:.2f} s (less than one)")


# ---------------------------------------------------------------------- engines that forget


@pytest.fixture
def quick_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances are asked for their metrics at each probe, not every half minute."""
    monkeypatch.setattr(prober, "LEARN_EVERY_S", 0.0)


def n_known(app: App) -> int:
    """Blocks that the router believes are on the one instance that it has."""
    (instance,) = app.router.fleet.instances
    exact = 0 if app.exact is None else app.exact.n_blocks(instance.slot)
    return app.router.index.n_blocks(instance.slot) + exact


async def test_a_restart_is_seen(vllm: list[VllmServer], quick_learning: None) -> None:
    server = vllm[0]
    async with before([server]) as app, client() as session:
        prompt = words(Random(1), 2_000)
        await complete(session, app.url, prompt)
        assert await complete(session, app.url, prompt) > 0
        assert n_known(app) > 0
        await asyncio.to_thread(server.restart)
        await wait_until(lambda: n_known(app) == 0, PATIENCE_S)
        await wait_until(lambda: app.router.fleet.can_serve(time.monotonic()), PATIENCE_S)
        assert await complete(session, app.url, prompt) == 0


async def test_a_restart_is_seen_with_kv_events(vllm: list[VllmServer], quick_learning: None) -> None:
    server = vllm[0]
    router = before([server], instance={"kv_events": "auto"}, tokenizer=exact_tokens())
    async with router as app, client() as session:
        prompt = [100, 200, 300] * 500
        await complete(session, app.url, prompt)
        await wait_until(lambda: exact_blocks(app) == len(prompt) // BLOCK_TOKENS, PATIENCE_S)
        await asyncio.to_thread(server.restart)
        await wait_until(lambda: n_known(app) == 0, PATIENCE_S)
        await wait_until_trusted(app)
        assert await complete(session, app.url, prompt) == 0
        await wait_until(lambda: exact_blocks(app) == len(prompt) // BLOCK_TOKENS, PATIENCE_S)


def exact_blocks(app: App) -> int:
    assert app.exact is not None
    (instance,) = app.router.fleet.instances
    return app.exact.n_blocks(instance.slot)


@pytest.mark.parametrize("events", ["off", "auto"])
async def test_an_engine_that_sleeps_has_forgotten(events: str, vllm: list[VllmServer], quick_learning: None) -> None:
    server = vllm[0]
    tables: dict[str, Any] = {} if events == "off" else {"tokenizer": exact_tokens()}
    async with before([server], instance={"kv_events": events}, **tables) as app, client() as session:
        prompt = [101, 202, 303] * 500
        await complete(session, app.url, prompt)
        await wait_until(lambda: n_known(app) > 0, PATIENCE_S)
        async with session.post(f"{server.url}/sleep?level=1") as response:
            assert response.status == 200
        try:
            await wait_until(lambda: n_known(app) == 0, PATIENCE_S)
        finally:
            async with session.post(f"{server.url}/wake_up") as response:
                assert response.status == 200
        assert await complete(session, app.url, prompt) == 0


async def test_a_reset_is_told_with_the_next_request(vllm: list[VllmServer]) -> None:
    server = vllm[0]
    router = before([server], instance={"kv_events": "auto"}, tokenizer=exact_tokens())
    async with router as app, client() as session:
        long, short = [110, 220, 330] * 500, [5] * 40
        await complete(session, app.url, long)
        await wait_until(lambda: exact_blocks(app) == len(long) // BLOCK_TOKENS, PATIENCE_S)
        await asyncio.to_thread(server.reset_cache)
        await complete(session, app.url, short)
        await wait_until(lambda: exact_blocks(app) == len(short) // BLOCK_TOKENS, PATIENCE_S)
        assert await complete(session, app.url, long) == 0


async def test_capacity_is_read_from_its_metrics(vllm: list[VllmServer]) -> None:
    async with before(vllm) as app:
        names = [one.name for one in app.router.fleet.instances]
        await wait_until(lambda: all(map(app.router.is_capacity_told, names)), PATIENCE_S)
        assert [app.router.capacity_tokens(name) for name in names] == [s.n_blocks * BLOCK_TOKENS for s in vllm]


# ---------------------------------------------------------------------- engines that end


async def rest_of(response: aiohttp.ClientResponse) -> tuple[str, bytes]:
    """How a stream ended, for its reader: `done`, `cut` (visibly broken), or `clean` (as if complete); and the rest."""
    received = bytearray()
    try:
        async for piece in response.content.iter_any():
            received += piece
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError):
        return "cut", bytes(received)
    return ("done" if received.endswith(b"data: [DONE]\n\n") else "clean"), bytes(received)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
async def test_an_engine_that_ends_in_mid_stream(
    number: signal.Signals, vllm: list[VllmServer], tell: Callable[[str], None]
) -> None:
    """Who streams from it directly, and who does through the router, see the same end. Others are served elsewhere."""
    leaving, staying = vllm[:2]
    async with before([leaving, staying], upstream={"gone_timeout_s": SILENCE_S}) as app, client() as session:
        app.router.fleet.drain("gpu-1")
        async with (
            asyncio.timeout(4 * PATIENCE_S),
            streaming(session, app.url, "def f(x):") as routed,
            streaming(session, leaving.url, "class A:") as direct,
        ):
            app.router.fleet.undrain("gpu-1")
            ends = asyncio.gather(rest_of(routed), rest_of(direct))
            leaving.signal(number)
            # With its engine gone, vLLM's server has been seen to keep such a stream open and say no more.
            hung = not await ended_within(ends, 2 * SILENCE_S)
            if hung:
                await asyncio.to_thread(leaving.kill)
            (how_routed, text_routed), (how_direct, text_direct) = await ends
        try:
            assert how_routed == ("cut" if hung else how_direct)
            assert how_routed in ("done", "cut")
            if how_routed == "done":
                # The engine says that it did not finish: by the reason, or by an error in place of one.
                assert reasons(text_routed) == reasons(text_direct)
                assert reasons(text_routed) == ["abort"] or b'"error"' in text_routed, text_routed[-500:]
            # Until its port closes or its health check fails, vLLM answers 500 without its engine, as it does directly.
            leaving_state = app.router.fleet.state("gpu-0")
            await wait_until(lambda: leaving_state.state is not State.UP, PATIENCE_S)
            for _ in range(4):
                await complete(session, app.url, words(Random(2), 100))
        finally:
            await asyncio.to_thread(leaving.wait_ended)
            await asyncio.to_thread(leaving.start)
            await asyncio.to_thread(leaving.wait_ready)
    direct_end = "open and silent" if hung else how_direct
    tell(f"streams of an engine that gets {number.name}: directly {direct_end}, through the router {how_routed}")


async def ended_within(ends: asyncio.Future[Any], timeout_s: float) -> bool:
    done, _ = await asyncio.wait([ends], timeout=timeout_s)
    return bool(done)


def reasons(events: bytes) -> list[str]:
    """Why the choices of a stream ended."""
    return re.findall(r'"finish_reason":\s*"(\w+)"', events.decode())
