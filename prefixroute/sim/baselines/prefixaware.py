"""vLLM production-stack's `prefixaware`: a trie, and no look at the load."""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.sim.baselines.maps import SentMap, reason_of

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation


class PrefixAwareTrie:
    """Any of those who hold the deepest match; without one, any. The trie forgets nothing."""

    def __init__(self, sim: "Simulation") -> None:
        self._map = SentMap(sim)

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        matched = self._map.match(facts)
        longest = max(matched.get(c.instance.slot, 0) for c in candidates)
        chosen = rng.choice([c for c in candidates if matched.get(c.instance.slot, 0) == longest])
        return Decision(chosen, reason_of(chosen, matched, candidates))

    def record(self, facts: Facts, decision: Decision) -> None:
        self._map.record(facts, decision.instance.slot)
