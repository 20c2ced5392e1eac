"""Preble's E2: exploit a long match, else explore by load, eviction and own prefill."""

from collections.abc import Sequence
from math import exp
from random import Random
from typing import TYPE_CHECKING

from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.sim.baselines.maps import reason_of, router_block_tokens

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation

_WINDOW_S = 180.0
_DECODE_S_PER_TOKEN = 0.0005
_OVERLOAD_RATIO = 1.5
_OVERLOAD_S = 1.0


class Preble:
    """A match of more than half of the prompt: whichever of its holders had least work lately, unless that is too much.

    Too much is more than 1.5 times the least of all + 1 s; then the least of all. Otherwise the least of: work
    lately, prefill that would be lost by eviction (at `eviction_weight`), own prefill. Work lately is what was sent
    there, in seconds, fading over three minutes (by e each). Matches and sizes are those of the router's own map;
    `answer_tokens` is what every answer is expected to be.
    """

    def __init__(self, sim: "Simulation", *, eviction_weight: float = 0.3, answer_tokens: float = 300.0) -> None:
        self._sim = sim
        self._eviction_weight = eviction_weight
        self._answer_s = answer_tokens * _DECODE_S_PER_TOKEN
        # By slot: seconds of work, as of when.
        self._work_s = [0.0] * len(sim.engines)
        self._as_of_s = [0.0] * len(sim.engines)

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        matched = {c.instance.slot: c.matched_tokens for c in candidates}
        work_s = [self._lately_s(c.instance.slot, facts.now_s) for c in candidates]
        longest = max(matched.values())
        least_s = min(work_s)
        if longest > facts.n_tokens / 2:
            costs = [
                s if c.matched_tokens == longest else float("inf") for c, s in zip(candidates, work_s, strict=True)
            ]
            if min(costs) > _OVERLOAD_RATIO * least_s + _OVERLOAD_S:
                costs = work_s
        else:
            costs = [
                s + (self._eviction_weight * self._evicted_tokens(facts, c) + c.work) / c.prefill_rate
                for c, s in zip(candidates, work_s, strict=True)
            ]
        least = min(costs)
        chosen = rng.choice([c for c, cost in zip(candidates, costs, strict=True) if cost == least])
        return Decision(chosen, reason_of(chosen, matched, candidates))

    def record(self, facts: Facts, decision: Decision) -> None:
        chosen = decision.candidate
        slot = chosen.instance.slot
        self._work_s[slot] = self._lately_s(slot, facts.now_s) + chosen.work / chosen.prefill_rate + self._answer_s
        self._as_of_s[slot] = facts.now_s

    def _lately_s(self, slot: int, now_s: float) -> float:
        return self._work_s[slot] * exp((self._as_of_s[slot] - now_s) / _WINDOW_S)

    def _evicted_tokens(self, facts: Facts, candidate: Candidate) -> int:
        """What would have to go from there to make room."""
        index, slot = self._sim.router.index, candidate.instance.slot
        block_tokens = router_block_tokens(self._sim)
        n_new = len(facts.chain) - candidate.matched_tokens // block_tokens
        return max(0, index.n_blocks(slot) + n_new - index.capacity_blocks(slot)) * block_tokens
