"""Least expected time to first token, and nothing else: what is pending, and the request itself."""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from prefixroute.core.policy import Candidate, Decision, Facts, StatelessPolicy
from prefixroute.sim.baselines.maps import reason_of

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation


class MinTtft(StatelessPolicy):
    """Least pending prefill + own prefill, by the router's own map and count, in work (see `load.prefill_work`).

    Nobody's product: the simplest rule that weighs both, and so what a better one must beat. All instances are
    taken to be equally fast.
    """

    def __init__(self, sim: "Simulation") -> None:
        """Of the simulation it needs nothing."""

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        costs = [c.pending_work + c.work for c in candidates]
        least = min(costs)
        chosen = rng.choice([c for c, cost in zip(candidates, costs, strict=True) if cost == least])
        matched = {c.instance.slot: c.matched_tokens for c in candidates}
        return Decision(chosen, reason_of(chosen, matched, candidates))
