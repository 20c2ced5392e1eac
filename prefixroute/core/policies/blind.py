"""Strategies that do not look at the prompt: `random`, `round_robin`, `least_outstanding_requests`."""

from collections.abc import Sequence
from random import Random

from prefixroute.core.policy import Candidate, Decision, Facts, Reason, StatelessPolicy, least_outstanding


class RandomPolicy(StatelessPolicy):
    """Any candidate. What clouds do by default."""

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        return Decision(rng.choice(candidates), Reason.TURN)


# More than any fleet has. Instances come and go, and nobody tells a policy.
_MAX_REMEMBERED = 16_384


class RoundRobin:
    """Candidates in turn: the one whose last turn is longest ago."""

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        # By age rather than by position: candidates differ from request to request.
        return Decision(min(candidates, key=lambda c: self._last_turn.get(c.instance.name, 0)), Reason.TURN)

    def record(self, facts: Facts, decision: Decision) -> None:
        self._turn += 1
        name = decision.instance.name
        self._last_turn.pop(name, None)  # set again, it becomes the newest
        self._last_turn[name] = self._turn
        if len(self._last_turn) > _MAX_REMEMBERED:
            del self._last_turn[next(iter(self._last_turn))]


class LeastOutstanding(StatelessPolicy):
    """The candidate with fewest requests in flight."""

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        return Decision(least_outstanding(candidates, rng), Reason.LOAD)
