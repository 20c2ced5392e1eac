"""What a decision costs: `python -m benchmarks.decision --help`.

The whole way from a body to a lease and back, and each step of it, in µs of one core. The router is warm: every
map is full, so that what is new evicts what is old, and all instances have requests in flight. Each prompt is a
conversation's next turn; the earlier ones are on two instances, and its system prompt is wherever a conversation
that shares it is. After each pass what was recorded is taken back, so that every pass does the same work.

Steps are measured in loops of their own, over the same prompts, with the garbage collector off; a figure is the
median over the rounds. "Whole, less loads" is a pass of its own, less parsing, which any router that reads the
model's name has to pay.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter_ns
from typing import TypeVar

import orjson

from benchmarks.bodies import make_body, make_text
from benchmarks.tables import markdown
from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance
from prefixroute.core.held import HoldConstants
from prefixroute.core.index import Recorded
from prefixroute.core.lease import Lease
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.core.request import Request
from prefixroute.core.router import Router
from prefixroute.core.survey import Sampling

T = TypeVar("T")
R = TypeVar("R")

SEED = 7
BLOCK_TOKENS = 256
NOW_S = 10_000.0
N_SYSTEM_PROMPTS = 8
MAX_IN_FLIGHT = 8
# Enough prompts that none stays in the processor's nearest caches, few enough that a round is short.
BYTES_PER_ROUND = 4 << 20
MAX_PROMPTS = 128
STEPS = (
    "orjson.loads alone",
    "read_prompt, less loads",
    "chain of hashes",
    "match and facts",
    "pick",
    "record and begin",
    "report and end",
    "**whole, less loads**",
)


@dataclass(frozen=True, slots=True)
class Bench:
    """A warm router and bodies to ask it about."""

    router: Router
    hasher: BlockHasher
    bodies: list[bytes]
    earlier: list[tuple[list[int], int]]
    """Chain of each conversation so far, and a slot that holds it."""
    rng: Random

    def settle(self, records: Sequence[Recorded]) -> None:
        """Takes back what was recorded; maps are full again, and the conversations are where they were."""
        index = self.router.index
        for recorded in records:
            index.forget(recorded)
        for instance in self.router.fleet.instances:
            n_free = index.capacity_blocks(instance.slot) - index.n_blocks(instance.slot)
            index.record([self.rng.getrandbits(64) for _ in range(n_free)], instance.slot)
        for chain, slot in self.earlier:
            index.record(chain, slot)


def make_bench(body_bytes: int, n_instances: int) -> Bench:
    rng = Random(SEED)
    hasher = BlockHasher(BLOCK_TOKENS, rng.getrandbits(64))
    instances = [Instance(f"gpu-{slot}", f"http://10.0.0.{slot}:8000", slot) for slot in range(n_instances)]
    router = Router(instances, ExpectedLatency(), hasher, rng, hold=HoldConstants(), sampling=Sampling())
    for instance in instances:
        router.fleet.probe_passed(instance.name)
    system_prompts = [make_text(body_bytes // 4, rng) for _ in range(N_SYSTEM_PROMPTS)]
    n_bodies = min(MAX_PROMPTS, BYTES_PER_ROUND // body_bytes)
    bodies = [make_body(body_bytes, system_prompts[i % N_SYSTEM_PROMPTS], rng).encode() for i in range(n_bodies)]
    occupy(router, rng)
    earlier = [
        (hasher.chain(prompt.scope, prompt.key), slot)
        for prompt in map(earlier_turns, bodies)
        for slot in rng.sample(range(n_instances), 2)
    ]
    bench = Bench(router, hasher, bodies, earlier, rng)
    bench.settle([])
    return bench


def earlier_turns(body: bytes) -> Prompt:
    """The conversation one answer and one question earlier."""
    document = orjson.loads(body)
    document["messages"] = document["messages"][:-2] or document["messages"]
    return read_prompt(Api.CHAT, orjson.dumps(document))


def occupy(router: Router, rng: Random) -> None:
    """Requests in flight on every instance, of which the last has had no first byte; speeds are learned."""
    for instance in router.fleet.instances:
        for _ in range(rng.randint(1, MAX_IN_FLIGHT)):
            n_tokens = rng.randint(500, 8000)
            begun_s = NOW_S - rng.uniform(5, 10)
            flight = router.load.begin(instance.slot, n_tokens, float(n_tokens), begun_s, streamed=True)
            router.load.first_byte(flight, begun_s + n_tokens / rng.uniform(10_000, 14_000))
        router.load.begin(instance.slot, 2000, 2000.0, NOW_S - 0.05, streamed=True)


def timed_us(step: Callable[[T], R], items: Sequence[T]) -> tuple[float, list[R]]:
    """Mean µs of `step` over `items`, and what it returned."""
    results: list[R] = []
    keep = results.append
    began_ns = perf_counter_ns()
    for item in items:
        keep(step(item))
    return (perf_counter_ns() - began_ns) / len(items) / 1000, results


def one_round(bench: Bench) -> list[float]:
    """µs of each of `STEPS`."""
    router = bench.router

    def read(body: bytes) -> Prompt:
        return read_prompt(Api.CHAT, body)

    def facts(request: Request) -> tuple[Facts, list[Candidate]]:
        return router._survey.look(request, NOW_S, ())

    def pick(known: tuple[Request, Facts, list[Candidate]]) -> Decision:
        return router._pick(*known)

    def take(decided: tuple[Request, Facts, Sequence[Candidate], Decision]) -> Lease:
        return router._take(*decided)

    def end(lease: Lease) -> None:
        lease.reported(lease.decision.candidate.matched_tokens, lease.request.n_tokens)
        lease.end()

    def whole(body: bytes) -> Recorded:
        lease = router.lease(router.read(read_prompt(Api.CHAT, body)), now_s=NOW_S)
        end(lease)
        # The rest is garbage, as it is when a request is over: prompts that are kept would need new memory each.
        return lease._recorded

    loads_us, _ = timed_us(orjson.loads, bench.bodies)
    read_us, prompts = timed_us(read, bench.bodies)
    chain_us, requests = timed_us(router.read, prompts)
    facts_us, known = timed_us(facts, requests)
    asked = [(r, *facts) for r, facts in zip(requests, known, strict=True)]
    pick_us, decisions = timed_us(pick, asked)
    decided = [(r, *facts, decision) for r, facts, decision in zip(requests, known, decisions, strict=True)]
    take_us, leases = timed_us(take, decided)
    end_us, _ = timed_us(end, leases)
    bench.settle([lease._recorded for lease in leases])
    whole_us, records = timed_us(whole, bench.bodies)
    bench.settle(records)
    return [loads_us, read_us - loads_us, chain_us, facts_us, pick_us, take_us, end_us, whole_us - loads_us]


def measured_us(bench: Bench, n_rounds: int) -> list[float]:
    """Median µs of each of `STEPS`."""
    one_round(bench)
    gc.collect()
    gc.disable()
    try:
        rounds = [one_round(bench) for _ in range(n_rounds)]
    finally:
        gc.enable()
    return [statistics.median(figures) for figures in zip(*rounds, strict=True)]


def numbers(text: str) -> list[int]:
    found = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"not positive numbers with commas between: {text}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decision", description="Cost of a routing decision, µs."
    )
    parser.add_argument("--bodies-kb", type=numbers, default="1,32,500", help="body sizes, KiB (default %(default)s)")
    parser.add_argument("--instances", type=numbers, default="8,64,256", help="fleet sizes (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=31, help="rounds of each measurement (default %(default)s)")
    options = parser.parse_args(arguments)
    headings = ["body, step", *(f"{n} instances, µs" for n in options.instances)]
    rows = []
    for body_kb in options.bodies_kb:
        columns = [measured_us(make_bench(body_kb << 10, n), options.rounds) for n in options.instances]
        rows += [
            [f"{body_kb} KB, {step}", *(f"{figure:,.1f}" for figure in figures)]
            for step, *figures in zip(STEPS, *columns, strict=True)
        ]
    print(markdown(headings, rows))


if __name__ == "__main__":
    main()
