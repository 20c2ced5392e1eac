"""sglang-router 0.3.2, `cache_aware`, with the defaults of its command line."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from prefixroute.core.policy import Candidate, Decision, Facts, Reason
from prefixroute.sim.baselines.maps import SentMap, reason_of, router_block_tokens

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation

# The source's 2^26 characters an instance. It evicts once a minute, this all the time.
_TREE_TOKENS = 2**26 // 4


class Sglang:
    """While the fleet is balanced, to whom the tree names for the prompt; else all to the least loaded.

    Unbalanced: the most in flight exceed the least by more than `balance_abs` and are more than `balance_rel` times
    as many. The tree names one instance for a node whoever else has it, and nobody looks at its load. Among the
    least loaded the first in order is taken, as the source does.
    """

    def __init__(
        self, sim: "Simulation", *, cache_threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5
    ) -> None:
        self._sim = sim
        self._map = SentMap(sim, _TREE_TOKENS)
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        least = min(candidates, key=lambda c: c.in_flight)
        most = max(c.in_flight for c in candidates)
        if most - least.in_flight > self._balance_abs and most > self._balance_rel * least.in_flight:
            return Decision(least, Reason.LOAD)
        matched = self._map.match(facts)
        longest = max(matched.values(), default=0)
        if longest <= self._cache_threshold * facts.n_tokens:
            return Decision(least, reason_of(least, matched, candidates))
        slot = self._named(facts, matched, longest)
        # Whom it names may be out: then the first that is not.
        chosen = next((c for c in candidates if c.instance.slot == slot), candidates[0])
        return Decision(chosen, reason_of(chosen, matched, candidates))

    def record(self, facts: Facts, decision: Decision) -> None:
        self._map.record(facts, decision.instance.slot)

    def _named(self, facts: Facts, matched: Mapping[int, int], longest: int) -> int:
        """One of those who have all of the match: any, but for a node always the same."""
        node = facts.chain[longest // router_block_tokens(self._sim) - 1].to_bytes(8)
        holders = [slot for slot, tokens in matched.items() if tokens == longest]
        return min(holders, key=lambda slot: xxh3_64_intdigest(node, slot))
