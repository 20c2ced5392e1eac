"""Ray Serve's prefix-aware router."""

from collections.abc import Sequence
from math import inf
from random import Random
from typing import TYPE_CHECKING

from prefixroute.core.policy import Candidate, Decision, Facts, Reason, least_outstanding
from prefixroute.sim.baselines.maps import SentMap, reason_of, router_block_tokens

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation

_MIN_MATCH = 0.1


class Ray:
    """The longest match, if it is at least a tenth of the prompt; else the instance that was sent the least text.

    Among equals the one with fewest in flight. When the most in flight exceed the least by more than
    `imbalanced_threshold`, the better of two by lot; by default that is never. Its tree forgets nothing.
    """

    def __init__(self, sim: "Simulation", *, imbalanced_threshold: float = inf) -> None:
        self._sim = sim
        self._map = SentMap(sim)
        self._threshold = imbalanced_threshold
        # Text in the tree by slot, in tokens; what two prompts share is there once.
        self._tree_tokens = [0] * len(sim.engines)

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        counts = [c.in_flight for c in candidates]
        if max(counts) - min(counts) > self._threshold:
            return Decision(least_outstanding(rng.sample(candidates, min(2, len(candidates))), rng), Reason.LOAD)
        matched = self._map.match(facts)
        longest = max(matched.get(c.instance.slot, 0) for c in candidates)
        if longest >= _MIN_MATCH * facts.n_tokens:
            able = [c for c in candidates if matched.get(c.instance.slot, 0) == longest]
        else:
            smallest = min(self._tree_tokens[c.instance.slot] for c in candidates)
            able = [c for c in candidates if self._tree_tokens[c.instance.slot] == smallest]
        chosen = least_outstanding(able, rng)
        return Decision(chosen, reason_of(chosen, matched, candidates))

    def record(self, facts: Facts, decision: Decision) -> None:
        slot = decision.instance.slot
        tail_tokens = facts.n_tokens - len(facts.chain) * router_block_tokens(self._sim)
        self._tree_tokens[slot] += self._map.record(facts, slot) + tail_tokens
