"""Requests with exact tokens through a running router: the engine's own ids, and no request that fails for them."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from prefixroute.app import App
from prefixroute.core.prompt import Api
from prefixroute.exact_tokens.exact import ExactTokenizer, Options
from prefixroute.testing import Call, FakeUpstream, RawClient, json_answer

Serve = Callable[..., Any]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

DATA = Path(__file__).parents[1] / "data" / "tiny_llama"
N_PROBES = 5
BODY = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "Größe? " * 50}]})


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(gzip.decompress((DATA / "tokenizer.json.gz").read_bytes()))
    (tmp_path / "tokenizer_config.json").write_bytes((DATA / "tokenizer_config.json").read_bytes())
    return tmp_path


class Engine:
    """Tokenises as the model does, or not; answers everything else."""

    def __init__(self, directory: Path) -> None:
        self.exact = ExactTokenizer(Options(str(directory), library="tokenizers"))
        self.agrees = True
        self._answer = json_answer({"ok": True})

    def ids(self, body: bytes) -> list[int]:
        packed = self.exact.encode(Api.CHAT if b'"messages"' in body else Api.COMPLETIONS, body)
        return [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]

    async def __call__(self, call: Call) -> None:
        if call.target != "/tokenize":
            await self._answer(call)
            return
        await json_answer({"tokens": self.ids(call.body) if self.agrees else [1]})(call)


def state(app: App) -> str:
    return app.metrics.exact_tokens().state


def settings(directory: Path, **more: object) -> dict[str, Any]:
    # The budget is not what is tested here, and machines are busy.
    return {"kind": "huggingface", "path": str(directory), "library": "tokenizers", "budget_ms": 10_000.0, **more}


async def ask(app: App) -> int:
    async with RawClient(app.url) as client:
        return (await client.request(body=BODY)).status


async def test_prompts_are_counted_in_the_engines_tokens_once_it_agrees(
    serve: Serve, until: Until, model_dir: Path, finished: Callable[[], list[dict[str, Any]]]
) -> None:
    engine = Engine(model_dir)
    async with FakeUpstream(engine) as upstream, serve(upstream, tokenizer=settings(model_dir)) as app:
        await upstream.wait_calls(N_PROBES)
        await until(lambda: state(app) == "exact")
        assert await ask(app) == 200
        assert finished()[-1]["prompt_tokens"] == len(engine.ids(BODY))
        facts = app.metrics.exact_tokens()
        assert (facts.outcomes["exact"], facts.verdicts["agrees"]) == (1, N_PROBES)
        text = app.metrics.exposition()[0].decode()
        assert 'prefixroute_exact_tokens_state{state="exact"} 1.0' in text
        assert 'prefixroute_exact_tokens_total{outcome="exact"} 1.0' in text


async def test_an_instance_that_tokenises_otherwise_turns_exact_tokens_off(
    serve: Serve, until: Until, model_dir: Path, expected_errors: list[str]
) -> None:
    expected_errors.append("tokenises the probe")
    engine = Engine(model_dir)
    engine.agrees = False
    async with FakeUpstream(engine) as upstream, serve(upstream, tokenizer=settings(model_dir)) as app:
        await upstream.wait_calls(N_PROBES)
        await until(lambda: state(app) == "mismatch")
        assert await ask(app) == 200
        assert app.metrics.exact_tokens().outcomes["not_in_use"] == 1


async def test_a_tokenizer_that_cannot_be_read_costs_no_request(
    serve: Serve, until: Until, model_dir: Path, expected_errors: list[str]
) -> None:
    expected_errors.append("no tokenizer can be made of tokenizer.json")
    (model_dir / "tokenizer.json").write_text("{")
    async with FakeUpstream() as upstream, serve(upstream, tokenizer=settings(model_dir)) as app:
        await until(lambda: state(app) == "failed")
        assert await ask(app) == 200


async def test_requests_are_served_while_a_template_loops(
    serve: Serve, until: Until, model_dir: Path, expected_errors: list[str]
) -> None:
    """The worker is at it for seconds: the loop of the router is not."""
    expected_errors.append("a prompt took its process longer")
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    config["chat_template"] = "{% if messages[0].content[:2] == 'Gr' %}" + loops + "{% endif %}"
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = settings(model_dir, budget_ms=20.0, verify=False)
    async with FakeUpstream() as upstream, serve(upstream, tokenizer=tokenizer) as app:
        await until(lambda: state(app) == "exact")
        assert await asyncio.gather(*(ask(app) for _ in range(20))) == [200] * 20
        outcomes = app.metrics.exact_tokens().outcomes
        assert outcomes["timeout"] >= 1
        assert outcomes["timeout"] + outcomes["saturated"] == 20
