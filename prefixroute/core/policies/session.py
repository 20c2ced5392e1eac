"""`session`: a client-given session id decides, by rendezvous hashing with bounded load.

Every instance gets a hash with the session id; the highest one that is not overfull wins. When an instance comes or
goes, only its own sessions move.
"""

from collections.abc import Sequence
from math import ceil
from random import Random

from xxhash import xxh3_64_intdigest

from prefixroute.core.policy import Candidate, Decision, Facts, Reason, StatelessPolicy, least_outstanding

# With many instances and little traffic the mean is below one: a handful of requests is no hot spot.
_LEAST_BOUND = 4


class SessionPolicy(StatelessPolicy):
    """`bounded_load`: how far above the mean in-flight count an instance may go before its sessions spill, ≥ 1."""

    def __init__(self, bounded_load: float, seed: int) -> None:
        self._bounded_load = bounded_load
        self._seed = seed

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        session = facts.prompt.session_id
        if not session:
            return Decision(least_outstanding(candidates, rng), Reason.LOAD)
        key = xxh3_64_intdigest(session.encode("utf-8", "surrogatepass"), self._seed)
        ranked = sorted(candidates, key=lambda c: xxh3_64_intdigest(c.instance.name.encode(), key), reverse=True)
        n_in_flight = sum(c.in_flight for c in candidates) + 1
        bound = max(_LEAST_BOUND, ceil(self._bounded_load * n_in_flight / len(candidates)))
        for candidate in ranked:
            if candidate.in_flight < bound:
                return Decision(candidate, Reason.SESSION if candidate is ranked[0] else Reason.SPILL)
        # Unreachable by arithmetic: not all can be at or above a bound that is at or above their mean.
        return Decision(ranked[0], Reason.SESSION)
