"""The router before real vLLM servers: what it says is cached is what they report. Skipped unless they are named.

    PREFIXROUTE_TEST_VLLM_URLS=http://127.0.0.1:8100,http://127.0.0.1:8101 PREFIXROUTE_TEST_VLLM_TOKENIZER=MODEL_DIR \
        python -m pytest tests/e2e/test_real_vllm.py

They must run with KV events, a replay endpoint and `--enable-prompt-tokens-details`, have room for a few hundred
blocks, and get no other requests meanwhile (docs/kv-events.md). Caches are not emptied before; each run has prompts of
its own.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types import CompletionUsage

from prefixroute.app import App, running
from prefixroute.config import Settings
from prefixroute.core.exact import ExactIndex
from prefixroute.core.kv_sources import Trust
from prefixroute.record import RequestRecord

URLS = [url for url in os.environ.get("PREFIXROUTE_TEST_VLLM_URLS", "").split(",") if url]
TOKENIZER = os.environ.get("PREFIXROUTE_TEST_VLLM_TOKENIZER")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not URLS, reason="PREFIXROUTE_TEST_VLLM_URLS names no servers"),
    pytest.mark.skipif(not TOKENIZER, reason="PREFIXROUTE_TEST_VLLM_TOKENIZER names no model directory"),
]

WORDS = (
    "import",
    "def",
    "class",
    "return",
    "value",
    "list",
    "while",
    "open",
    "read",
    "write",
    "path",
    "index",
    "token",
)
# After an answer its last blocks may be told a moment later; a busy machine may take long.
SETTLE_S = 10.0


class Run:
    """A router before the servers, and a client that waits until what a request changed has been told."""

    def __init__(self, app: App, client: AsyncOpenAI, model: str, records: list[RequestRecord]) -> None:
        assert app.exact is not None
        self.exact: ExactIndex = app.exact
        self.records = records
        self._client = client
        self._model = model

    async def chat(self, messages: list[Any], **fields: object) -> str:
        before = self._placed()
        answer = await self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            max_tokens=40,
            temperature=0,
            extra_body={"ignore_eos": True, **fields},
        )
        await self._settled(before, answer.usage)
        return answer.choices[0].message.content or ""

    async def complete(self, prompt: str | list[int], max_tokens: int = 1) -> None:
        before = self._placed()
        answer = await self._client.completions.create(
            model=self._model, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        await self._settled(before, answer.usage)

    def agree(self) -> None:
        """All requests so far matched exactly what the servers report."""
        for record in self.records:
            candidate = record.decisions[-1].decision.candidate
            assert candidate.exact
            assert record.prompt_tokens == record.reported_prompt_tokens
        told = [(record.upstream, record.matched_tokens) for record in self.records]
        assert told == [(record.upstream, record.cached_tokens) for record in self.records]

    def _placed(self) -> int:
        return sum(self.exact.counts(slot).placed_blocks for slot in range(len(URLS)))

    async def _settled(self, before: int, usage: CompletionUsage | None) -> None:
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        size = max(source.block_tokens for slot in range(len(URLS)) for source in self.exact.sources(slot)) or 1
        cached = usage.prompt_tokens_details.cached_tokens or 0
        n_new = (usage.prompt_tokens + usage.completion_tokens - 1) // size - cached // size
        with suppress(TimeoutError):
            await _until(lambda: self._placed() >= before + n_new, SETTLE_S)


async def _until(condition: Any, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)  # nothing tells of the change


@pytest.fixture(params=["expected_latency", "kv_aware"])
async def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    settings = Settings.model_validate(
        {
            "listen": {"port": 0},
            "admin": None,
            "fleet": {
                "instances": [{"url": url, "name": f"gpu-{i}", "kv_events": "auto"} for i, url in enumerate(URLS)]
            },
            "routing": {"strategy": request.param},
            "tokenizer": {"kind": "huggingface", "path": TOKENIZER, "budget_ms": 10_000.0},
        }
    )
    records: list[RequestRecord] = []
    on_record = App._on_record

    def recorded(app: App, record: RequestRecord) -> None:
        on_record(app, record)
        if record.decisions and record.cached_tokens is not None:
            records.append(record)

    monkeypatch.setattr(App, "_on_record", recorded)
    async with running(settings, environ={}) as app, AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none") as client:
        exact = app.exact
        assert exact is not None
        await _until(lambda: all(exact.trust(slot) is Trust.TRUSTED for slot in range(len(URLS))), 60)
        await _until(lambda: app.metrics.exact_tokens().state == "exact", 60)
        model = (await client.models.list()).data[0].id
        # A clear that nobody has heard of yet is told with the next request of each.
        for slot in range(len(URLS)):
            for other in range(len(URLS)):
                if other != slot:
                    app.router.fleet.drain(f"gpu-{other}")
            await client.completions.create(model=model, prompt=words(Random(), 3), max_tokens=1)
            for other in range(len(URLS)):
                app.router.fleet.undrain(f"gpu-{other}")
        records.clear()
        yield Run(app, client, model, records)


def words(rng: Random, n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


async def test_conversations_are_matched_to_the_block(run: Run) -> None:
    rng = Random()
    system = words(rng, 150)
    for n in range(4):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": words(rng, 60)}]
        for _ in range(4):
            answer = await run.chat(messages)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": words(rng, 5 + n)}]
    run.agree()
    assert sum(record.matched_tokens > 0 for record in run.records) >= 14


async def test_completions_and_token_ids_are_matched_to_the_block(run: Run) -> None:
    rng = Random()
    text, ids = words(rng, 200), [rng.randrange(100, 8_000) for _ in range(256)]
    for _ in range(2):
        await run.complete(text, 20)
        await run.complete(f"{text} and {words(rng, 20)}")
        await run.complete(ids)
        await run.complete([*ids, 200, 201])
    run.agree()


async def test_salts_share_nothing(run: Run) -> None:
    rng = Random()
    messages = [{"role": "user", "content": words(rng, 150)}]
    salt = words(rng, 12)
    for fields in ({}, {"cache_salt": salt}, {}, {"cache_salt": salt}):
        await run.chat(messages, **fields)
    run.agree()
    assert [record.matched_tokens > 0 for record in run.records] == [False, False, True, True]
