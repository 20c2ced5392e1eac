"""The router before llama.cpp: what it reports is learned, and what it does to connections costs no request."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage

from prefixroute.app import App, running
from prefixroute.config import Settings
from prefixroute.core.fleet import State
from prefixroute.instance_facts import InstanceFacts, read_metrics
from prefixroute.testing.client import RawAnswer, RawClient
from tests.conformance.wiretap import Wiretap
from tests.engines.load import words
from tests.engines.processes import Keeper
from tests.engines.routers import before
from tests.engines.scraping import metrics_of, total
from tests.engines.servers import LLAMA_MODEL, LlamaServer
from tests.engines.waiting import wait_until

# Its HTTP server closes a connection after so many.
REQUESTS_OF_A_CONNECTION = 100
N_CLIENTS = 4
# One CPU thread takes about two seconds for it.
DOCUMENT_WORDS = 300
LOADED_S = 120.0
JSON = [("Content-Type", "application/json")]


@pytest.fixture
async def app(llama: list[LlamaServer]) -> AsyncIterator[App]:
    async with before(llama) as app:
        yield app


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def asked(system: str, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": LLAMA_MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}


async def ask_shortly(client: RawClient) -> RawAnswer:
    return await client.request(body=json.dumps(asked("Be short.", "Why?") | {"max_tokens": 1}).encode(), headers=JSON)


def cached(usage: CompletionUsage | None) -> int:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


# What it reports


async def test_what_is_cached_is_learned_of_chats_streams_and_completions(app: App) -> None:
    system, text = words(Random(), DOCUMENT_WORDS), words(Random(), DOCUMENT_WORDS)
    told: list[CompletionUsage | None] = []
    async with client_of(app.url) as client:
        for n in range(2):
            answer = await client.chat.completions.create(**asked(system, f"Part {n}?"))
            assert answer.choices[0].message.content
            told.append(answer.usage)
            stream = await client.chat.completions.create(
                **asked(system, f"Verse {n}?"), stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
            told.append(chunks[-1].usage)
            completion = await client.completions.create(model=LLAMA_MODEL, prompt=text, max_tokens=4, temperature=0)
            told.append(completion.usage)
    reported = [cached(usage) for usage in told]
    # The first of its kind is computed, all others find it.
    assert [n >= DOCUMENT_WORDS for n in reported] == [False, True, False, True, True, True], reported
    assert await total(app.admin_url, "prefixroute_cached_tokens_total") == sum(reported)
    prompts = sum(usage.prompt_tokens for usage in told if usage is not None)
    assert await total(app.admin_url, "prefixroute_reported_prompt_tokens_total") == prompts


async def test_its_metrics_are_read_and_tell_nothing_of_its_cache(
    app: App, llama: list[LlamaServer], caplog: pytest.LogCaptureFixture
) -> None:
    page = await metrics_of(llama[0].url)
    assert "llamacpp:requests_processing" in page
    assert read_metrics(page.encode()) == InstanceFacts()
    await wait_until(lambda: app.router.fleet.knows_model(LLAMA_MODEL), LOADED_S)
    assert app.router.capacity_tokens("gpu-0") == app.settings.routing.default_capacity_tokens
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


# What it does to connections


async def test_its_limits_on_connections_cost_no_request(llama: list[LlamaServer]) -> None:
    """By turns, on the wire: it closes a connection after a hundred requests, and when it was idle for five seconds."""
    async with AsyncExitStack() as stack:
        taps = [await stack.enter_async_context(Wiretap(server)) for server in llama]
        # Far longer than the servers keep connections, whose own word is to be obeyed.
        app = await stack.enter_async_context(before(taps, strategy="round_robin", upstream={"keepalive_s": 60.0}))
        statuses = await ask_in_a_row(app.url, 220)
        assert [max(map(len, tap.connections)) for tap in taps] == [REQUESTS_OF_A_CONNECTION] * 2
        for _ in range(2):
            await wait_until_idle_connections_close(llama)
            rows = await asyncio.gather(*(ask_in_a_row(app.url, 10) for _ in range(N_CLIENTS)))
            statuses += [status for row in rows for status in row]
        assert statuses == [200] * 300
        assert await total(app.admin_url, "prefixroute_requests_total", outcome="ok") == 300
        assert await total(app.admin_url, "prefixroute_attempts_total", outcome="answered") == 300
        # A stale connection (`stale`) would be found out before anything could be computed; these would not.
        for outcome in ("unanswered", "unreachable", "broken"):
            assert await total(app.admin_url, "prefixroute_attempts_total", outcome=outcome) == 0


async def ask_in_a_row(url: str, n: int) -> list[int]:
    async with RawClient(url) as client:
        return [(await ask_shortly(client)).status for _ in range(n)]


async def wait_until_idle_connections_close(servers: Sequence[LlamaServer]) -> None:
    """Until each has closed a connection that was used just now: the router's are then as old."""

    async def see_one_close(url: str) -> None:
        async with RawClient(url) as client:
            await ask_shortly(client)
            await client.wait_closed()

    await asyncio.gather(*(see_one_close(server.url) for server in servers))


# While it loads


async def test_one_that_still_loads_its_model_costs_no_request(
    llama: list[LlamaServer], keeper: Keeper, engine_logs: Path
) -> None:
    loading = LlamaServer("llama-loading", keeper, engine_logs)
    settings = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "fleet": {
            "instances": [{"url": llama[0].url, "name": "loaded"}, {"url": loading.url, "name": "loading"}],
            "health": {"interval_s": 0.1, "eject_s": 0.1, "eject_max_s": 0.1},
        },
        # Whoever may be asked is.
        "routing": {"strategy": "round_robin"},
    }
    async with running(Settings.model_validate(settings), environ={}) as app, RawClient(app.url) as client:
        asking = asyncio.create_task(health_until_loaded(loading))
        try:
            await asyncio.to_thread(loading.start)
            statuses = []
            while app.router.fleet.state("loading").state is not State.UP:
                statuses.append((await ask_shortly(client)).status)
            statuses += [(await ask_shortly(client)).status for _ in range(4)]
            health = await asking
        finally:
            asking.cancel()
            await asyncio.to_thread(loading.kill)
        assert 503 in health, "or else this test tests nothing"
        assert set(statuses) == {200}
        assert await total(app.admin_url, "prefixroute_requests_total", upstream="loading") > 0


async def health_until_loaded(server: LlamaServer) -> list[int]:
    """What it says of itself, up to the first 200."""
    said: list[int] = []
    async with asyncio.timeout(LOADED_S):
        while 200 not in said:
            try:
                async with RawClient(server.url) as client:
                    said.append((await client.request("GET", "/health")).status)
            except (ConnectionError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.01)  # nobody listens yet, of which nothing tells
    return said


# What routing is for


async def test_the_same_document_goes_where_it_is_cached(llama: list[LlamaServer], tell: Callable[[str], None]) -> None:
    """Of four questions about each document one is computed; by turns, one on each server."""
    shares = {}
    for strategy in ("round_robin", "expected_latency"):
        async with before(llama, strategy=strategy) as app, client_of(app.url) as client:
            usages = await ask_of_documents(client, n_documents=5, n_questions=4)
        prompt_tokens = sum(usage.prompt_tokens for usage in usages)
        shares[strategy] = sum(map(cached, usages)) / prompt_tokens
    tell(
        f"llama.cpp, cached: {shares['round_robin']:.0%} by turns, {shares['expected_latency']:.0%} by expected latency"
    )
    # Questions and the template's words are never cached.
    assert 0.40 < shares["round_robin"] < 0.51
    assert 0.68 < shares["expected_latency"] < 0.76


async def ask_of_documents(client: openai.AsyncOpenAI, *, n_documents: int, n_questions: int) -> list[CompletionUsage]:
    """One after the other, each document in its turn. Documents are new each time."""
    documents = [words(Random(), DOCUMENT_WORDS) for _ in range(n_documents)]
    usages = []
    for n in range(n_questions):
        for document in documents:
            answer = await client.chat.completions.create(**asked(document, f"Question {n}?"))
            assert answer.usage is not None
            usages.append(answer.usage)
    return usages
