"""D2LPM: longest prefix first among those who have credit left, as deficit round robin gives it."""

from collections.abc import Sequence
from math import floor
from random import Random
from typing import TYPE_CHECKING

from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.sim.baselines.maps import reason_of

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation


class D2lpm:
    """The longest match among instances with credit; when nobody has any, all get `quantum` until somebody has.

    A request costs its instance what must be prefilled, and the answer expected, in tokens. Matches are those of
    the router's own map; quantum and answer are not given by the source's rule and are settings here.
    """

    def __init__(self, sim: "Simulation", *, quantum: float = 8_192.0, answer_tokens: float = 300.0) -> None:
        self._quantum = quantum
        self._answer_tokens = answer_tokens
        self._credit = [quantum] * len(sim.engines)

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        most = max(self._credit[c.instance.slot] for c in candidates)
        refill = self._rounds(most)
        able = [c for c in candidates if self._credit[c.instance.slot] + refill > 0]
        longest = max(c.matched_tokens for c in able)
        chosen = rng.choice([c for c in able if c.matched_tokens == longest])
        matched = {c.instance.slot: c.matched_tokens for c in candidates}
        return Decision(chosen, reason_of(chosen, matched, candidates))

    def record(self, facts: Facts, decision: Decision) -> None:
        chosen = decision.candidate
        # Whoever was picked had credit after the refill of the pick, and that refill was the least there is.
        refill = self._rounds(self._credit[chosen.instance.slot])
        self._credit = [credit + refill for credit in self._credit]
        self._credit[chosen.instance.slot] -= facts.n_tokens - chosen.matched_tokens + self._answer_tokens

    def _rounds(self, credit: float) -> float:
        """The fewest quanta that lift `credit` above zero, in tokens."""
        return (floor(-credit / self._quantum) + 1) * self._quantum if credit <= 0 else 0.0
