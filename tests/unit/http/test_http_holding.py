"""When the router looks at those it holds: not so often that looking keeps the event loop from everything else."""

import asyncio
from collections.abc import Sequence
from random import Random

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance
from prefixroute.core.held import HoldConstants
from prefixroute.core.lease import Lease
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.core.prompt import Prompt
from prefixroute.core.request import Request
from prefixroute.core.router import Router
from prefixroute.http.holding import Holding, Turn


class Costly(ExpectedLatency):
    """Takes its time: a millisecond for each decision."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.n_decisions = 0

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        self.now_s += 0.001
        self.n_decisions += 1
        return super().pick(facts, candidates, rng)


def request(n_tokens: int, chain: Sequence[int] = ()) -> Request:
    return Request(Prompt("m", b"", b"k", n_tokens, stream=True), list(chain), n_tokens)


async def test_looking_in_vain_takes_a_small_share_of_the_time() -> None:
    policy = Costly()
    instances = [Instance(f"gpu-{i}", f"http://gpu-{i}", i) for i in range(2)]
    router = Router(instances, policy, BlockHasher(16, 1), Random(1), hold=HoldConstants(hold_s=0.3))
    for instance in instances:
        router.fleet.probe_passed(instance.name)
    holding = Holding(router, lambda: policy.now_s)
    shared = range(1_000, 1_000 + 100_000 // 16)
    with router.lease(request(100_000, shared), now_s=policy.now_s):
        pass
    # Its home is busy, and worth waiting for; the other one is idle.
    turns = [holding.enter(request(100_100, [*shared, i]), policy.now_s) for i in range(30)]
    waiting = [turn for turn in turns if isinstance(turn, Turn)]
    assert len(waiting) >= 20
    policy.n_decisions = 0
    began_s = policy.now_s
    for _ in range(1_000):  # first bytes, one each 0.1 ms
        holding.look()
        policy.now_s += 0.0001
    spent_s = 0.001 * policy.n_decisions
    assert policy.n_decisions
    assert spent_s < 0.5 * (policy.now_s - began_s)
    for turn in turns:
        if isinstance(turn, Lease):
            turn.end()
        else:
            holding.give_up(turn._held, turn._granted)
    assert not len(router.held)


async def test_who_asks_during_the_rest_is_heard_at_its_end() -> None:
    policy = Costly()
    instance = Instance("gpu-0", "http://gpu-0", 0)
    router = Router([instance], policy, BlockHasher(16, 1), Random(1), hold=HoldConstants(hold_s=0.3))
    router.fleet.probe_passed("gpu-0")
    holding = Holding(router, lambda: policy.now_s)
    first = holding.enter(request(10_000), policy.now_s)
    second = holding.enter(request(10_000), policy.now_s)
    third = holding.enter(request(10_000), policy.now_s)
    assert isinstance(first, Lease)
    assert isinstance(second, Turn)
    assert isinstance(third, Turn)
    waits = [asyncio.create_task(turn.wait()) for turn in (second, third)]
    first.first_byte(policy.now_s, learn=False)
    holding.look()
    granted = await waits[0]
    assert granted is not None
    granted.first_byte(policy.now_s, learn=False)
    holding.look()
    assert not waits[1].done()
    policy.now_s += 1.0
    last = await waits[1]
    assert last is not None
    for lease in (first, granted, last):
        lease.end()
