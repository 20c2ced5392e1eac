"""SageMaker's routing strategies but PREFIX_AWARE, through a running router, each beside what would nearly be it."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgpack
import pytest
import zmq

from prefixroute.core.kv_sources import Trust
from prefixroute.testing import Call, FakeUpstream, RawClient, json_answer
from tests.integration.stand import (
    OPENAI,
    PATHS,
    STAYS,
    STREAM,
    STREAMS,
    Serve,
    Stand,
    StandWith,
    Until,
    aware,
    chat,
    component,
    endpoint,
    pinned,
    request,
    rule,
    variant,
    within,
)

Finished = Callable[[], list[dict[str, Any]]]

# ------------------------------------------------------------------ RANDOM


@pytest.mark.parametrize("routing", [None, rule("RANDOM"), {}], ids=["left out", "named", "empty"])
@pytest.mark.parametrize("strategy", ["prefix_aware", "least_outstanding_requests"])
async def test_random_spreads_over_all_however_busy_they_are_and_whatever_the_prefix(
    stand: StandWith, routing: dict[str, Any] | None, strategy: str
) -> None:
    async with stand(endpoint("bot", variant(routing=routing)), routing={"strategy": strategy}) as s:
        for _ in range(4):
            await s.hold("on-0")
        found, _ = await s.spread("bot", 150, chat("the same prefix" * 100))
        assert all(within(150, 1 / 3, found[n]) for n in range(3)), found


# ------------------------------------------------------------------ LEAST_OUTSTANDING_REQUESTS


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("attributes", [STAYS, STREAMS])
async def test_least_outstanding_counts_what_is_in_flight(stand: StandWith, path: str, attributes: str) -> None:
    """Until the end of the answer, and whichever endpoint it was for."""
    async with stand(endpoint("bot", variant(routing=rule("LEAST_OUTSTANDING_REQUESTS")))) as s:
        await s.hold("on-0", attributes=attributes)
        await s.hold("on-2", attributes=attributes)
        for _ in range(12):
            assert await s.send("bot", chat("x"), path=path) == 1


async def test_least_outstanding_does_not_count_what_is_over(stand: StandWith) -> None:
    async with stand(endpoint("bot", variant(routing=rule("LEAST_OUTSTANDING_REQUESTS")))) as s:
        for _ in range(10):
            await s.send("on-1")
        await s.hold("on-0")
        await s.hold("on-2")
        for _ in range(12):
            assert await s.send("bot") == 1


async def test_least_outstanding_fills_all_evenly(stand: StandWith) -> None:
    async with stand(endpoint("bot", variant(routing=rule("LEAST_OUTSTANDING_REQUESTS")))) as s:
        assert Counter([await s.hold("bot") for _ in range(9)]) == {0: 3, 1: 3, 2: 3}


# ------------------------------------------------------------------ KV_AWARE

BLOCK = 16


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Publisher:
    """Says what an engine holds, as vLLM does."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._pub = context.socket(zmq.XPUB)
        self._pub.bind("tcp://127.0.0.1:*")
        endpoint = self._pub.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.endpoint = endpoint.rstrip(b"\0").decode()

    def holds(self, ids: Sequence[int]) -> None:
        names = [hash((*ids[: at + BLOCK],)) & (2**63 - 1) for at in range(0, len(ids), BLOCK)]
        stored = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": None,
            "token_ids": [*ids],
            "block_size": BLOCK,
        }
        self._pub.send_multipart([b"", (0).to_bytes(8), msgpack.packb([0.0, [stored], 0])])


IDS = list(range(100, 100 + 4 * BLOCK))
ASKED = json.dumps({"model": "m", "prompt": [*IDS, 7]}).encode()


@asynccontextmanager
async def knowing(
    context: zmq.Context[zmq.Socket[bytes]], serve: Serve, until: Until, *n_blocks: int, **routing: Any
) -> AsyncIterator[Stand]:
    """A router before containers that said how many blocks of `ASKED` they hold."""
    publishers = [Publisher(context) for _ in n_blocks]
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeUpstream()) for _ in n_blocks]
        made: list[Stand] = []

        def script(n: int) -> Callable[[Call], Awaitable[None]]:
            async def script(call: Call) -> None:
                if call.target == "/kv_event_sources":
                    fakes[n].calls.remove(call)
                    said = {"0": {"endpoint": publishers[n].endpoint.replace("127.0.0.1", "*"), "topic": ""}}
                    await json_answer(said)(call)
                else:
                    await made[0].script(call)

            return script

        for n, fake in enumerate(fakes):
            fake.script = script(n)
        endpoints = [endpoint("bot", variant(routing=rule("KV_AWARE"))), *pinned(len(fakes))]
        app = await stack.enter_async_context(
            serve(
                *fakes,
                instance={"kv_events": "auto"},
                routing={"strategy": "random", **routing},
                sagemaker={"endpoints": endpoints},
            )
        )
        made.append(Stand(app, fakes, until))
        exact = app.exact
        assert exact is not None
        await until(lambda: all(exact.trust(slot) is Trust.PARTIAL for slot in range(len(fakes))))
        for publisher, n in zip(publishers, n_blocks, strict=True):
            if n:
                publisher.holds(IDS[: n * BLOCK])
        await until(lambda: [exact.counts(slot).stored for slot in range(len(fakes))] == [*map(bool, n_blocks)])
        yield made[0]
        await made[0].let_go()


@pytest.mark.parametrize("path", ["invocations", STREAM])
async def test_kv_aware_weighs_the_longest_match_against_how_busy_each_is(
    context: zmq.Context[zmq.Socket[bytes]], serve: Serve, until: Until, path: str
) -> None:
    async with knowing(context, serve, until, 2, 3, 0, kv_aware={"concurrency_threshold": 2}) as s:
        for _ in range(4):
            assert await s.send("bot", ASKED, path=path) == 1
        await s.hold("on-1")
        # One below the threshold it is the longest match, though others are idle.
        assert await s.send("bot", ASKED, path=path) == 1
        await s.hold("on-1")
        # Then the next longest, though the third one is idle.
        await s.hold("on-0")
        assert await s.send("bot", ASKED, path=path) == 0
        await s.hold("on-0")
        # All who hold some are busy: as LEAST_OUTSTANDING_REQUESTS.
        assert await s.send("bot", ASKED, path=path) == 2
        for _ in range(3):
            await s.hold("on-2")
        await s.hold("on-1")
        assert await s.send("bot", ASKED, path=path) == 0


async def test_where_nobody_holds_a_prompt_kv_aware_goes_by_load(
    context: zmq.Context[zmq.Socket[bytes]], serve: Serve, until: Until
) -> None:
    other = json.dumps({"model": "m", "prompt": [*reversed(IDS)]}).encode()
    async with knowing(context, serve, until, 0, 3, 3) as s:
        await s.hold("on-1")
        await s.hold("on-2")
        for _ in range(6):
            assert await s.send("bot", other) == 0


# ------------------------------------------------------------------ EXPECTED_LATENCY


async def test_a_variant_may_go_by_expected_latency_while_the_fleet_goes_by_another_rule(
    stand: StandWith, finished: Finished
) -> None:
    by_latency = endpoint("bot", variant(routing=rule("EXPECTED_LATENCY")))
    by_load = endpoint("by-load", variant(routing=rule("LEAST_OUTSTANDING_REQUESTS")))
    text = "a long prompt " * 500
    async with stand(by_latency, by_load, routing={"strategy": "random"}) as s:
        home = await s.send("bot", chat(text), path=OPENAI)
        for n in range(10):
            assert await s.send("bot", chat(f"{text}{n}"), path=OPENAI) == home
        assert [line["reason"] for line in finished()] == ["cold"] + ["affinity"] * 10
        # It has no threshold of requests: their answers cost little, and the prompt is here.
        await s.hold(f"on-{home}")
        assert await s.send("bot", chat(text), path=OPENAI) == home
        assert await s.send("by-load", chat(text), path=OPENAI) != home


# ------------------------------------------------------------------ variants


@pytest.mark.parametrize("path", ["invocations", STREAM])
async def test_traffic_is_divided_by_weight(stand: StandWith, path: str) -> None:
    weighted = endpoint("bot", variant("none", 2, weight=0), variant("most", 0, weight=6), variant("some", 1, weight=2))
    async with stand(weighted) as s:
        n = 400
        found, variants = await s.spread("bot", n, path=path)
        assert found[2] == 0
        assert found[0] + found[1] == n
        assert within(n, 0.75, found[0]), found
        assert Counter(variants) == {"most": found[0], "some": found[1]}


@pytest.mark.parametrize("path", PATHS)
async def test_who_names_a_variant_gets_it_whatever_its_weight(stand: StandWith, path: str) -> None:
    weighted = endpoint("bot", variant("first", 0, weight=1e6), variant("last", 1, weight=0))
    async with stand(weighted, n=2) as s:
        for target, reached in (("first", 0), ("last", 1)):
            found, variants = await s.spread("bot", 20, chat("x"), path=path, target=target)
            assert found == Counter({reached: 20})
            if path != OPENAI:
                assert set(variants) == {target}


async def test_each_variant_has_its_own_rule_and_prefixes(stand: StandWith) -> None:
    two = endpoint(
        "bot", variant("aware", routing=aware()), variant("by-load", routing=rule("LEAST_OUTSTANDING_REQUESTS"))
    )
    async with stand(two) as s:
        home = await s.send("bot", b"p", target="aware")
        await s.hold(f"on-{home}")
        assert await s.send("bot", b"p", target="aware") == home
        assert await s.send("bot", b"p", target="by-load") != home


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_waits_goes_where_the_configuration_says_by_then(stand: StandWith, path: str) -> None:
    async with stand(endpoint("bot", variant("all", 0)), n=2, limits={"wait_for_instance_s": 60}) as s:
        s.app.router.fleet.drain("gpu-0")
        asked = asyncio.create_task(s.send("bot", chat("x"), path=path))
        await s.until(lambda: len(s.app.parts.waiting) == 1)
        s.configure(endpoint("bot", variant("all", 1)))
        assert await asked == 1


async def test_a_request_names_one_inference_component(stand: StandWith) -> None:
    two = endpoint("bot", variant(), components=[component("one", ("m", 0)), component("two", ("m", 1))])
    async with stand(two, n=2) as s, RawClient(s.app.url) as client:
        target, body = f"/endpoints/bot/inference-components/one/{OPENAI}", chat("x")
        for named, status in (("one", 200), ("two", 400)):
            line = ("X-Amzn-SageMaker-Inference-Component", named)
            answer = await client.request("POST", target, body, [("Content-Type", "application/json"), line])
            assert answer.status == status
        assert [len(fake.calls) for fake in s.fakes] == [1, 0]


async def test_without_endpoints_any_name_means_the_fleet_by_its_own_rule(serve: Serve) -> None:
    async with FakeUpstream() as one, FakeUpstream() as two, serve(one, two) as app, RawClient(app.url) as client:
        for n in range(4):
            await client.send(request(f"any-{n}", b"same"))
            assert (await client.answer()).status == 200
        # Which is round robin.
        assert (len(one.calls), len(two.calls)) == (2, 2)
