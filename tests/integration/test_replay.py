"""A trace over HTTP: exact prompts, exact sharing, and each kind of failure told apart."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from aiohttp import web

from prefixroute.demo.client import MeasuringClient, TargetError
from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer, tokens
from prefixroute.sim.replay import ReplayReport, block_text, prompt_text, replay
from prefixroute.sim.traces import MOONCAKE_BLOCK_TOKENS as BLOCK_TOKENS
from prefixroute.sim.traces import Trace, TraceRequest

FAST = EngineConfig(speed=1_000.0)
MODEL = "demo-model"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def requests(*ids: Sequence[int], n_tokens: int | None = None) -> list[TraceRequest]:
    """One after the other, ten seconds apart, each of whole blocks or of `n_tokens`."""
    return [
        TraceRequest(10.0 * place, n_tokens or len(one) * BLOCK_TOKENS, 5, tuple(one)) for place, one in enumerate(ids)
    ]


@pytest.fixture
async def server() -> AsyncIterator[SimulatedServer]:
    async with SimulatedServer(ServerConfig(FAST, model=MODEL)) as running:
        yield running


async def played(url: str, trace: Sequence[TraceRequest], *, max_in_flight: int | None = 1) -> ReplayReport:
    """As fast as the answers come, one at a time, in order."""
    async with MeasuringClient(url, timeout_s=20) as client:
        return await replay(Trace(trace), client, model=MODEL, speed=1e6, max_in_flight=max_in_flight)


async def served(handler: Handler) -> tuple[web.AppRunner, str]:
    """A server that answers every request by `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def played_against(handler: Handler, *, timeout_s: float = 20) -> ReplayReport:
    runner, url = await served(handler)
    try:
        async with MeasuringClient(url, timeout_s=timeout_s) as client:
            return await replay(Trace(requests([1])), client, model=MODEL)
    finally:
        await runner.cleanup()


async def wait_requests(server: SimulatedServer, n: int) -> None:
    await server.wait_until(lambda engine: engine.n_requests == n)


def refusing_url() -> str:
    """Of a port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_prompt_is_exactly_as_long_as_the_trace_says() -> None:
    for n_tokens in (1, 7, 511, 512, 513, 1_500):
        (request,) = requests(range(-(-n_tokens // BLOCK_TOKENS)), n_tokens=n_tokens)
        assert tokens.count(tokens.encode(prompt_text(request, BLOCK_TOKENS, 0))) == n_tokens


def test_what_no_id_covers_is_filled_up_and_shared_with_nobody() -> None:
    """A recording has ids for full blocks only."""
    for n_rest in (1, 7, 100):
        request = TraceRequest(0.0, 2 * 16 + n_rest, 5, (8, 9))
        first, second = (prompt_text(request, 16, place) for place in (0, 1))
        assert tokens.count(tokens.encode(first)) == request.input_tokens
        shared = block_text(8, 16) + block_text(9, 16)
        assert first.startswith(shared)
        assert second.startswith(shared)
        assert first[len(shared) :][:4] != second[len(shared) :][:4]


def test_equal_ids_are_equal_texts_and_others_differ_at_once() -> None:
    assert block_text(7, BLOCK_TOKENS) == block_text(7, BLOCK_TOKENS)
    texts = [block_text(number, BLOCK_TOKENS) for number in range(3_000)]
    assert {len(text) for text in texts} == {BLOCK_TOKENS * tokens.TOKEN_BYTES}
    assert len({text[:32] for text in texts}) == len(texts)


async def test_shared_blocks_are_served_from_cache_and_no_others(server: SimulatedServer) -> None:
    report = await played(server.url, requests([1, 2, 3], [1, 2, 4], [5, 2, 3]))
    assert report.n_errors == 0
    assert report.prompt_tokens == 9 * BLOCK_TOKENS
    assert report.output_tokens == 3 * 5
    # The second request shares two blocks with the first; the third begins otherwise, so it shares none.
    assert report.cached_tokens == 2 * BLOCK_TOKENS
    assert report.cached_ratio == pytest.approx(2 / 9)
    assert report.ttft_p50_s is not None


async def test_the_loop_is_open_unless_a_cap_is_given() -> None:
    # A step of this server takes a minute: nothing is answered while requests come.
    async with SimulatedServer(ServerConfig(EngineConfig(speed=0.0001), model=MODEL)) as stuck:
        for max_in_flight, n_expected in ((None, 4), (2, 2)):
            task = asyncio.create_task(played(stuck.url, requests([1], [2], [3], [4]), max_in_flight=max_in_flight))
            await wait_requests(stuck, n_expected)
            task.cancel()
            await asyncio.wait([task])
            await wait_requests(stuck, 0)


async def test_refusals_are_told_by_status() -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.Response(status=503, text="busy")

    report = await played_against(busy)
    assert report.errors == {"HTTP 503": 1}
    assert (report.n_requests, report.n_errors, report.ttft_p50_s, report.cached_ratio) == (1, 1, None, None)


async def test_a_lost_connection_is_told() -> None:
    async def hangs_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    assert (await played_against(hangs_up)).errors == {"connection": 1}


async def test_nobody_there_is_told() -> None:
    assert (await played(refusing_url(), requests([1]))).errors == {"connection": 1}


async def test_silence_is_told() -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    assert (await played_against(never, timeout_s=0.2)).errors == {"timeout": 1}


@pytest.mark.parametrize(
    "body",
    [
        b'data: {"choices": [{"text": "a"}]}\n\n',
        b"data: [\n\n",
        b"data: 7\n\n",
        b'data: {"choices": [7]}\n\n',
        b"<html>",
        b"",
    ],
)
async def test_an_answer_that_is_no_whole_stream_is_told(body: bytes) -> None:
    async def answers(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="text/event-stream")

    assert (await played_against(answers)).errors == {"broken answer": 1}


async def test_an_error_within_the_stream_is_told() -> None:
    async def answers(_: web.Request) -> web.Response:
        return web.Response(body=b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n')

    assert (await played_against(answers)).errors == {"error in the stream": 1}


async def test_a_target_that_reports_no_cached_tokens_has_no_cached_share() -> None:
    async def answers(_: web.Request) -> web.Response:
        events = (
            b'data: {"choices": [{"text": ""}]}\r\n\r\n',
            b'data: {"choices": [{"text": "a"}], "usage": null}\r\n\r\n',
            b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}\r\n\r\n',
            b"data: [DONE]\r\n\r\n",
        )
        return web.Response(body=b"".join(events))

    report = await played_against(answers)
    assert (report.n_errors, report.prompt_tokens, report.output_tokens) == (0, 9, 1)
    assert report.cached_ratio is report.cached_tokens is None
    assert report.ttft_p50_s is not None


async def test_models_are_asked_for(server: SimulatedServer) -> None:
    async with MeasuringClient(server.url) as client:
        assert await client.models() == [MODEL]


async def test_a_target_that_is_not_there_is_one_clear_line() -> None:
    url = refusing_url()
    async with MeasuringClient(url) as client:
        with pytest.raises(TargetError, match=rf"^{url} cannot be reached: Connection refused$"):
            await client.models()


async def test_a_target_without_a_list_of_models_lists_none() -> None:
    async def answers(_: web.Request) -> web.Response:
        return web.Response(status=404, text="no such path")

    runner, url = await served(answers)
    async with MeasuringClient(url) as client:
        assert await client.models() == []
    await runner.cleanup()
