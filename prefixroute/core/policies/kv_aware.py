"""Amazon SageMaker's KV_AWARE rule on what instances say they hold (KV events).

The instance that holds the longest start of the prompt, among those whose number in flight has not reached the
threshold; equals go to the one with fewer in flight, then by lot. Where none holds any, and where all who do are too
busy, the candidate with fewest in flight. Only exact knowledge counts: what is merely estimated holds nothing here.

The documentation says that the length of the match is weighed against how busy each instance is, and not how: the
threshold of PREFIX_AWARE does it here.
"""

from collections.abc import Sequence
from random import Random

from prefixroute.core.policy import Candidate, Decision, Facts, Reason, StatelessPolicy, least_outstanding


class KvAware(StatelessPolicy):
    """`concurrency_threshold`: requests in flight at which an instance is passed over."""

    def __init__(self, concurrency_threshold: int) -> None:
        self._threshold = concurrency_threshold

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        longest = max(_matched(c) for c in candidates)
        if not longest:
            return Decision(least_outstanding(candidates, rng), Reason.COLD)
        free = [c for c in candidates if c.in_flight < self._threshold]
        best = max((_matched(c) for c in free), default=0)
        if not best:
            return Decision(least_outstanding(candidates, rng), Reason.SPILL)
        choice = least_outstanding([c for c in free if _matched(c) == best], rng)
        return Decision(choice, Reason.AFFINITY if best == longest else Reason.SPILL)


def _matched(candidate: Candidate) -> int:
    return candidate.matched_tokens if candidate.exact else 0
