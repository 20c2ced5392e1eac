"""The guard rail: does affinity bring what it promises?

A match promises that a prompt's beginning need not be computed. Engines may break that promise without a word: caching
is off, a hybrid model keeps only its last window, the cache sits behind a slow link. Affinity would then gather
requests where they wait for each other, for nothing.

So realised prefill times, corrected for length, are compared: of prompts that matched for the most part against those
that hardly matched. If the former take no less, matches lose their weight; as matching prompts are still seen (by
chance, a good part of them lands where they match), the weight returns by itself when the promise is kept again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GuardConstants:
    """When matches lose their weight."""

    # Weight of older observations at each new one: about the last 100 count.
    guard_decay: float = 0.99
    # Observations of each kind needed before anything is concluded.
    guard_evidence: float = 20
    # Below this share of the promised saving, matches lose weight. Waiting for the step under way, network and
    # fixed costs take their part of the promise on any engine: sound ones keep 0.7 or more of it in simulation.
    guard_kept_ratio: float = 0.5


MIN_COLD_TOKENS = 1_024
"""Shorter prefills are mostly fixed costs: they are not looked at."""
_MOSTLY = 0.5
_HARDLY = 0.1
# Times as long as without any match: who took longer waited for something else (a stall, a grammar to be compiled), and
# one such prompt would outweigh a hundred others.
_LONGEST = 2.0


class _Kind:
    """Decayed sums over prompts of one kind. `promised`: work, tokens, if matches hold; `cold`: if nothing does."""

    __slots__ = ("cold", "n", "promised", "took")

    def __init__(self) -> None:
        self.n = self.cold = self.promised = self.took = 0.0

    def add(self, cold: float, promised: float, took: float, decay: float) -> None:
        self.n = decay * self.n + 1
        self.cold = decay * self.cold + cold
        self.promised = decay * self.promised + promised
        self.took = decay * self.took + took


class Guard:
    """`weight`: 1 as long as matches are worth what they promise, falling to 0 when they bring nothing."""

    __slots__ = ("_constants", "_matched", "_unmatched", "weight")

    def __init__(self, constants: GuardConstants | None = None) -> None:
        self._constants = constants or GuardConstants()
        self._matched = _Kind()
        self._unmatched = _Kind()
        self.weight = 1.0

    def configure(self, constants: GuardConstants) -> None:
        """Other constants from now on; what was observed stays."""
        self._constants = constants
        self.weight = self._weight()

    def observe(self, cold_work: float, promised_work: float, took_s: float) -> None:
        """A prefill of `cold_work` tokens, of which matches left `promised_work` to do, took so long, alone."""
        if cold_work < MIN_COLD_TOKENS:
            return
        saved = 1 - promised_work / cold_work
        if saved >= _MOSTLY:
            kind = self._matched
        elif saved <= _HARDLY:
            kind = self._unmatched
        else:
            return
        if kind is self._matched:
            per_token_s = self._per_token_s()
            if per_token_s is None:
                return  # nothing to be compared with yet
            took_s = min(took_s, _LONGEST * cold_work * per_token_s)
        kind.add(cold_work, promised_work, took_s, self._constants.guard_decay)
        self.weight = self._weight()

    def _per_token_s(self) -> float | None:
        """Of prefill without a match; None: too little was seen."""
        unmatched = self._unmatched
        if unmatched.n < self._constants.guard_evidence or unmatched.took <= 0:
            return None
        return unmatched.took / unmatched.promised

    def kept_ratio(self) -> float | None:
        """Share of the promised saving that was realised; None: too little was seen."""
        matched, per_token_s = self._matched, self._per_token_s()
        if per_token_s is None or matched.n < self._constants.guard_evidence:
            return None
        return (matched.cold - matched.took / per_token_s) / (matched.cold - matched.promised)

    def _weight(self) -> float:
        kept = self.kept_ratio()
        if kept is None:
            return 1.0
        return min(1.0, max(0.0, kept / self._constants.guard_kept_ratio))
