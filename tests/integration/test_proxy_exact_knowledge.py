"""Exact tokens and KV events together, through a running router: what it says is cached is what the engine says was.

The engines are fakes that tokenise as the model does, keep blocks as vLLM does, and publish what they do over real
ZeroMQ sockets before they answer. tests/engines/test_knowledge.py asks the same of real ones.
"""

import gzip
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgpack
import orjson
import pytest
import zmq
from xxhash import xxh3_64_intdigest

from prefixroute.app import App
from prefixroute.core.kv_sources import Trust
from prefixroute.core.prompt import Api
from prefixroute.exact_tokens.exact import ExactTokenizer, Options
from prefixroute.testing import Call, FakeUpstream, RawClient, json_answer

Serve = Callable[..., Any]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Finished = Callable[[], list[dict[str, Any]]]
Message = dict[str, str]

DATA = Path(__file__).parents[1] / "data" / "tiny_llama"
SIZE = 16
WORDS = ("the", "router", "sends", "each", "request", "where", "its", "prefix", "is", "cached", "unless", "slower")
ANSWER = "It is cached there. " * 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "tokenizer.json").write_bytes(gzip.decompress((DATA / "tokenizer.json.gz").read_bytes()))
    (path / "tokenizer_config.json").write_bytes((DATA / "tokenizer_config.json").read_bytes())
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> ExactTokenizer:
    return ExactTokenizer(Options(str(model_dir), library="tokenizers"))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Engine:
    """One vLLM, as far as prefixes go. `script` answers for it; `capacity_blocks` as its cache has room for."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], tokenizer: ExactTokenizer, capacity_blocks: int = 10_000
    ) -> None:
        self.n_stored = 0
        """Events of stored blocks, since it was made."""
        self.n_evicted = 0
        self._tokenizer = tokenizer
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._number = 0
        self._pub = context.socket(zmq.XPUB)
        self._pub.bind("tcp://127.0.0.1:*")
        endpoint = self._pub.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._endpoint = endpoint.rstrip(b"\0").decode()

    def restart(self) -> None:
        """A new process at the same address."""
        self._blocks.clear()
        self._number = 0

    def holds(self, api: Api, body: bytes, adapter: str | None = None) -> int:
        """Leading tokens of the prompt that it would find."""
        ids = self._ids(api, body)
        n = 0
        for name in self._names(ids, adapter)[: (len(ids) - 1) // SIZE]:
            if name not in self._blocks:
                break
            n += SIZE
        return n

    async def script(self, call: Call) -> None:
        match call.target:
            case "/kv_event_sources":
                await json_answer({"0": {"endpoint": self._endpoint.replace("127.0.0.1", "*"), "topic": ""}})(call)
            case "/tokenize":
                api = Api.CHAT if b'"messages"' in call.body else Api.COMPLETIONS
                await json_answer({"tokens": self._ids(api, call.body)})(call)
            case "/v1/chat/completions":
                cached, n = self._compute(Api.CHAT, call.body)
                await json_answer(
                    {
                        "choices": [{"message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}],
                        "usage": {"prompt_tokens": n, "prompt_tokens_details": {"cached_tokens": cached}},
                    }
                )(call)
            case _:
                cached, n = self._compute(Api.COMPLETIONS, call.body)
                await json_answer(
                    {
                        "choices": [{"text": ANSWER, "finish_reason": "stop"}],
                        "usage": {"prompt_tokens": n, "prompt_tokens_details": {"cached_tokens": cached}},
                    }
                )(call)

    def _compute(self, api: Api, body: bytes) -> tuple[int, int]:
        """Cached and all tokens of a prompt, which is cached from now on, as is the answer."""
        fields = json.loads(body)
        adapter = fields["model"] if fields["model"] != "m" else None
        ids = self._ids(api, body)
        cached = self.holds(api, body, adapter)
        answer = self._ids(Api.COMPLETIONS, orjson.dumps({"prompt": ANSWER, "add_special_tokens": False}))
        whole = [*ids, *answer][:-1]
        names = self._names(whole, adapter)
        new = [n for n, name in enumerate(names) if name not in self._blocks]
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(max(0, len(self._blocks) - self._capacity))]
        self.n_evicted += len(gone)
        events: list[Any] = [{"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"}] if gone else []
        for n in new:
            self.n_stored += 1
            stored: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": [names[n]],
                "parent_block_hash": names[n - 1] if n else None,
                "token_ids": whole[n * SIZE : (n + 1) * SIZE],
                "block_size": SIZE,
                "medium": "GPU",
            }
            if adapter is not None:
                stored |= {"lora_name": adapter, "lora_id": 1, "extra_keys": [[adapter]]}
            # What is evicted to make room was evicted before.
            events.append(stored)
        if events:
            self._pub.send_multipart([b"", self._number.to_bytes(8), msgpack.packb([0.0, events, 0])])
            self._number += 1
        return cached, len(ids)

    def _ids(self, api: Api, body: bytes) -> list[int]:
        packed = self._tokenizer.encode(api, body)
        return [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]

    def _names(self, ids: Sequence[int], adapter: str | None) -> list[int]:
        names, parent = [], xxh3_64_intdigest(repr(adapter).encode())
        for n in range(len(ids) // SIZE):
            parent = xxh3_64_intdigest(repr((parent, ids[n * SIZE : (n + 1) * SIZE])).encode())
            names.append(parent)
        return names


class Fleet:
    """A router before two engines."""

    def __init__(self, app: App, client: RawClient, engines: Sequence[Engine], until: Until) -> None:
        self.app = app
        self.client = client
        self.engines = engines
        self._until = until

    async def ask(self, body: dict[str, Any], target: str = "/v1/chat/completions") -> None:
        """One request; what it changed has been told when it returns."""
        answer = await self.client.request("POST", target, body=orjson.dumps({"model": "m"} | body))
        assert answer.status == 200
        await self._until(lambda: self.app.proxy.n_active == 0)
        await self.settled()

    async def settled(self) -> None:
        exact = self.app.exact
        assert exact is not None
        await self._until(lambda: [exact.counts(slot).stored for slot in (0, 1)] == [e.n_stored for e in self.engines])

    async def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.app.admin_url}/explain", json={"model": "m"} | body) as response,
        ):
            told: dict[str, Any] = await response.json()
            return told


@pytest.fixture
def run(
    serve: Serve, until: Until, context: zmq.Context[zmq.Socket[bytes]], tokenizer: ExactTokenizer, model_dir: Path
) -> Callable[..., Any]:
    @asynccontextmanager
    async def run(
        strategy: str = "expected_latency",
        *,
        capacity_blocks: int = 10_000,
        adapter: str | None = None,
        with_tokenizer: bool = True,
    ) -> AsyncIterator[Fleet]:
        engines = [Engine(context, tokenizer, capacity_blocks) for _ in range(2)]
        async with AsyncExitStack() as stack:
            upstreams = []
            for engine in engines:
                upstream = FakeUpstream(engine.script)
                if adapter is not None:
                    upstream.adapters[adapter] = "m"
                upstreams.append(await stack.enter_async_context(upstream))
            # The budget is not what is tested here, and machines are busy.
            exactly = {"kind": "huggingface", "path": str(model_dir), "library": "tokenizers", "budget_ms": 10_000.0}
            app = await stack.enter_async_context(
                serve(
                    *upstreams,
                    instance={"kv_events": "auto"},
                    routing={"strategy": strategy},
                    admin={"port": 0},
                    tokenizer=exactly if with_tokenizer else {"kind": "bytes"},
                )
            )
            assert app.exact is not None
            if with_tokenizer:
                await until(lambda: app.metrics.exact_tokens().state == "exact")
            await until(lambda: all(app.exact.trust(slot) is Trust.PARTIAL for slot in (0, 1)))
            client = await stack.enter_async_context(RawClient(app.url))
            yield Fleet(app, client, engines, until)

    return run


def words(rng: Random, n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


async def converse(fleet: Fleet, rng: Random, n_turns: int, **fields: str) -> None:
    messages = [{"role": "system", "content": words(Random(1), 60)}, {"role": "user", "content": words(rng, 40)}]
    for _ in range(n_turns):
        await fleet.ask({"messages": messages, **fields})
        messages += [
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": words(rng, rng.randint(1, 40))},
        ]


def told(finished: Finished) -> list[tuple[int, int]]:
    """Matched and cached tokens of each request."""
    return [(one["matched_tokens"], one["cached_tokens"]) for one in finished()]


async def begin(fleet: Fleet) -> None:
    """Both engines publish their first message, so that all of their caches is known."""
    exact = fleet.app.exact
    assert exact is not None
    for n, name in enumerate(("gpu-1", "gpu-0")):
        fleet.app.router.fleet.drain(name)
        await fleet.ask({"messages": [{"role": "user", "content": f"{n} " * 40}]})
        fleet.app.router.fleet.undrain(name)
    assert [exact.trust(slot) for slot in (0, 1)] == [Trust.TRUSTED] * 2


@pytest.mark.parametrize("strategy", ["expected_latency", "kv_aware"])
async def test_what_is_matched_is_what_the_engine_reports(
    run: Callable[..., Any], finished: Finished, strategy: str
) -> None:
    async with run(strategy) as fleet:
        await begin(fleet)
        for n in range(4):
            await converse(fleet, Random(n), 4)
        await fleet.ask({"prompt": words(Random(9), 300)}, "/v1/completions")
        await fleet.ask({"prompt": words(Random(9), 300) + " and more"}, "/v1/completions")
        pairs = told(finished)[2:]
    assert [matched for matched, _ in pairs] == [cached for _, cached in pairs]
    assert sum(cached > 0 for _, cached in pairs) >= 13, "all but a first turn on each instance"


async def test_evictions_are_followed(run: Callable[..., Any], finished: Finished) -> None:
    async with run(capacity_blocks=40) as fleet:
        await begin(fleet)
        for n in range(8):
            await converse(fleet, Random(n), 2)
        pairs = told(finished)[2:]
        assert sum(engine.n_evicted for engine in fleet.engines) > 50
    assert [matched for matched, _ in pairs] == [cached for _, cached in pairs]


async def test_after_a_restart_nothing_is_promised(run: Callable[..., Any], finished: Finished) -> None:
    async with run("kv_aware") as fleet:
        await begin(fleet)
        body = {"messages": [{"role": "user", "content": words(Random(3), 200)}]}
        await fleet.ask(body)
        name = finished()[-1]["upstream"]
        engine = fleet.engines[int(name[-1])]
        engine.restart()
        other = {"messages": [{"role": "user", "content": "something else " * 40}]}
        fleet.app.router.fleet.drain("gpu-1" if name == "gpu-0" else "gpu-0")
        await fleet.ask(other)
        await fleet.ask(body)
        assert told(finished)[-1] == (0, 0)
        await fleet.ask(body)
        matched, cached = told(finished)[-1]
        assert matched == cached > 0


async def test_an_adapters_prompts_share_nothing_with_its_models(run: Callable[..., Any], finished: Finished) -> None:
    """It is an adapter before its first block is stored, because the instance lists it as one."""
    async with run(adapter="sql") as fleet:
        await begin(fleet)
        body = {"messages": [{"role": "user", "content": words(Random(4), 200)}]}
        await fleet.ask(body)
        for expected in (False, True):
            await fleet.ask(body | {"model": "sql"})
            matched, cached = told(finished)[-1]
            assert matched == cached
            assert (cached > 0) is expected


async def test_prompts_of_token_ids_need_no_tokenizer(run: Callable[..., Any], finished: Finished) -> None:
    async with run(with_tokenizer=False) as fleet:
        ids = list(range(1_000, 1_100))
        for name in ("gpu-1", "gpu-0"):
            fleet.app.router.fleet.drain(name)
            await fleet.ask({"prompt": [*range(40)]}, "/v1/completions")
            fleet.app.router.fleet.undrain(name)
        await fleet.ask({"prompt": ids}, "/v1/completions")
        await fleet.ask({"prompt": [*ids, 7]}, "/v1/completions")
        await fleet.ask({"prompt": [[*ids, 8], [9]]}, "/v1/completions")
    assert told(finished)[-3:] == [(0, 0), (96, 96), (96, 96)]


async def test_an_explanation_tells_what_is_exact(run: Callable[..., Any]) -> None:
    body = {"messages": [{"role": "user", "content": words(Random(5), 200)}]}
    async with run() as fleet:
        await fleet.ask(body)
        before = await fleet.explain(body)
        assert before["exact_tokens"]
        await begin(fleet)
        after = await fleet.explain(body)
        held = {f"gpu-{n}": engine.holds(Api.CHAT, orjson.dumps(body)) for n, engine in enumerate(fleet.engines)}
        odd = await fleet.explain({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{fleet.app.admin_url}/instances") as response,
        ):
            instances = await response.json()
    # Who has said nothing so far is not known to hold nothing.
    assert sorted(candidate["exact"] for candidate in before["candidates"]) == [False, True]
    assert {c["instance"]: c["matched_tokens"] for c in after["candidates"]} == held
    assert all(candidate["exact"] for candidate in after["candidates"])
    assert not odd["exact_tokens"]
    assert not any(candidate["exact"] for candidate in odd["candidates"])
    assert [instance["kv_events"] for instance in instances] == ["trusted", "trusted"]
