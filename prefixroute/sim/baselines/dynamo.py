"""NVIDIA Dynamo's KV router: linear cost, with and without KV events."""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.sim.baselines.active import ActiveTokens
from prefixroute.sim.baselines.maps import ExactMap, ExpiringMap, TokenMap, reason_of

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation


class _Dynamo:
    """Least `overlap_weight` × prefill that would be pending there + KV that would be in use there.

    Both from the router's own count of what it has sent. The source counts in blocks, which is the same but for
    rounding. Its queue is off and its temperature 0, as by default.
    """

    def __init__(self, sim: "Simulation", held: TokenMap, overlap_weight: float) -> None:
        self._map = held
        self._active = ActiveTokens(sim)
        self._overlap_weight = overlap_weight

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        active = self._active
        active.settle()
        matched = self._map.match(facts)
        costs = []
        for c in candidates:
            slot = c.instance.slot
            prefill = active.prefill_tokens(slot) + facts.n_tokens - matched.get(slot, 0)
            costs.append(self._overlap_weight * max(prefill, 0) + active.kv_tokens(slot, facts))
        least = min(costs)
        chosen = rng.choice([c for c, cost in zip(candidates, costs, strict=True) if cost == least])
        return Decision(chosen, reason_of(chosen, matched, candidates))

    def record(self, facts: Facts, decision: Decision) -> None:
        slot = decision.instance.slot
        self._active.sent(facts, slot, facts.n_tokens - self._map.match(facts).get(slot, 0))
        self._map.record(facts, slot)


class Dynamo(_Dynamo):
    """Approximate: what was sent in the last `ttl_s` is taken to be cached.

    The source's bound of 2^20 blocks is left out: what eight instances can prefill in that time is less.
    """

    def __init__(self, sim: "Simulation", *, overlap_weight: float = 1.0, ttl_s: float = 120.0) -> None:
        super().__init__(sim, ExpiringMap(sim, ttl_s), overlap_weight)


class DynamoExact(_Dynamo):
    """With KV events that take no time. What is sent and not yet computed is nobody's (no predict-on-route)."""

    def __init__(self, sim: "Simulation", *, overlap_weight: float = 1.0) -> None:
        super().__init__(sim, ExactMap(sim), overlap_weight)
