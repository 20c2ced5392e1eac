"""Shadow strategies: what others would have chosen, on live traffic, without choosing.

Each sees the facts and candidates of every decision that left a choice, and keeps its own memory (its `record` gets
its own decisions). Where prefixes are and who is busy is what the real strategy made of it: this compares single
decisions, not the fleets that the strategies would have made.

*Regret*: expected seconds that the shadow's choice costs more than the real one, by the scores of the real decision,
or of `judge` when that has none; less is counted apart. A shadow's fault is counted and costs nobody anything.
"""

from collections.abc import Sequence
from math import isfinite
from random import Random

from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason

MAX_SHADOWS = 4
"""Each costs as much as the real decision's pick, and its own memory."""


class Shadow:
    """One strategy and what it would have done. Read-only outside this module."""

    __slots__ = ("better_s", "last_fault", "n_different", "n_faults", "n_same", "name", "policy", "worse_s")

    def __init__(self, name: str, policy: Policy) -> None:
        self.name = name
        self.policy = policy
        self.n_same = 0
        self.n_different = 0
        self.worse_s = 0.0
        """Expected seconds that its choices cost more, where they do."""
        self.better_s = 0.0
        """Expected seconds that its choices cost less, where they do."""
        self.n_faults = 0
        self.last_fault: Exception | None = None


class Shadows:
    """At most MAX_SHADOWS. `judge`: the policy whose scores count where the real one gives none."""

    __slots__ = ("_judge", "_rng", "shadows")

    def __init__(self, shadows: Sequence[Shadow], judge: Policy, rng: Random) -> None:
        if len(shadows) > MAX_SHADOWS:
            raise ValueError(f"{len(shadows)} shadow strategies are more than {MAX_SHADOWS}")
        self.shadows = tuple(shadows)
        self._judge = judge
        # Their own dice: the real decisions are the same with and without them.
        self._rng = rng

    def see(self, facts: Facts, candidates: Sequence[Candidate], decision: Decision) -> None:
        """A decision that is carried out, and what it was made from."""
        if len(candidates) < 2 or decision.reason is Reason.STORED:
            return
        seen = tuple(candidates)
        scores: Sequence[float] | None = decision.scores
        for shadow in self.shadows:
            try:
                own = shadow.policy.pick(facts, seen, self._rng)
                at = seen.index(own.candidate)
                shadow.policy.record(facts, own)
                if own.candidate is decision.candidate:
                    shadow.n_same += 1
                    continue
                shadow.n_different += 1
                if scores is None:
                    scores = self._judge.pick(facts, seen, self._rng).scores or (0.0,) * len(seen)
                regret_s = scores[at] - scores[seen.index(decision.candidate)]
                # A policy may give what it will not have an infinite cost: that is no number of seconds.
                if not isfinite(regret_s):
                    continue
                if regret_s > 0:
                    shadow.worse_s += regret_s
                else:
                    shadow.better_s -= regret_s
            except Exception as fault:  # noqa: BLE001  a shadow's fault must never touch a request
                shadow.n_faults += 1
                shadow.last_fault = fault
