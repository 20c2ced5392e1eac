"""Predictions against reports: what was thought to be cached where a request went, and what the instance said of it.

Both are counted in the router's tokens; a report comes in the instance's own and is scaled to them by the length of the
prompt in both. An instance that reports nothing is unknown, not zero.

- *Drift*: recent reports (about the last 100) against the predictions made for them, for each instance.
- *Capacity*: an instance that does not tell its size is sized by how it errs (`capacity_factor`). Less than predicted
  was cached: its cache is smaller than its map. More, while the map is full: larger.
"""

from enum import Enum

# Weight of older reports at each new one.
_DECAY = 0.99
# Reports, and recent blocks predicted or reported, below which nothing is concluded.
_MIN_REPORTS = 20
_MIN_BLOCKS = 32
# The lesser of the two sums below this share of the greater: they have drifted apart. Back above the second: no more.
_DRIFTED = 0.5
_AGREED = 0.7

SHRINK = 0.97
GROW = 1.03
# Bytes for a token differ within a prompt (English, then code), so the report's scale is off by some share. As far as
# the sizing goes, a prompt all cached and one not at all cannot be off by it, one half cached most.
_SCALE_ERROR = 0.2


class Prediction(Enum):
    """How predictions for an instance hold. Closed: values are metric labels."""

    UNKNOWN = "unknown"
    """It reports nothing, or too little so far."""
    SOUND = "sound"
    OVER = "over_predicting"
    """Much less was cached than predicted."""
    UNDER = "under_predicting"
    """Much more was cached than predicted."""


# Python 3.11 takes as long to find a member of an enum as to call a function.
_SOUND = Prediction.SOUND


class InstanceFeedback:
    """Of one instance. Read-only outside this module. Tokens are the router's."""

    __slots__ = (
        "_recent_predicted",
        "_recent_reported",
        "n_reports",
        "predicted_tokens",
        "prediction",
        "reported_tokens",
    )

    def __init__(self) -> None:
        self.predicted_tokens = 0.0
        """Of the requests that `reported_tokens` is about."""
        self.reported_tokens = 0.0
        self.prediction = Prediction.UNKNOWN
        self.n_reports = 0
        """Since the instance was last lost."""
        self._recent_predicted = 0.0
        self._recent_reported = 0.0

    @property
    def recent_ratio(self) -> float | None:
        """Reported over predicted, recently; None: nothing was predicted."""
        return self._recent_reported / self._recent_predicted if self._recent_predicted > 0 else None


class Feedback:
    """By instance slot."""

    __slots__ = ("_by_slot", "_changed", "_min_tokens")

    def __init__(self, block_tokens: int) -> None:
        self._by_slot: dict[int, InstanceFeedback] = {}
        self._min_tokens = _MIN_BLOCKS * block_tokens
        self._changed: set[int] = set()

    def add(self, slot: int) -> None:
        self._by_slot[slot] = InstanceFeedback()

    def remove(self, slot: int) -> None:
        """The instance leaves the fleet; what else is reported of it is not counted."""
        del self._by_slot[slot]
        self._changed.discard(slot)

    def of(self, slot: int) -> InstanceFeedback:
        return self._by_slot[slot]

    def forget(self, slot: int) -> None:
        """Another machine may answer there: nothing is known of its predictions. The sums stay."""
        one = self._by_slot[slot]
        one.n_reports = 0
        one._recent_predicted = one._recent_reported = 0.0
        self._set(slot, one, Prediction.UNKNOWN)

    def reported(self, slot: int, predicted_tokens: float, reported_tokens: float) -> None:
        """One answer's report, and what was predicted for it."""
        one = self._by_slot.get(slot)
        if one is None:
            return
        one.n_reports += 1
        one.predicted_tokens += predicted_tokens
        one.reported_tokens += reported_tokens
        predicted = one._recent_predicted = _DECAY * one._recent_predicted + predicted_tokens
        reported = one._recent_reported = _DECAY * one._recent_reported + reported_tokens
        if one.n_reports < _MIN_REPORTS:
            return
        less, more = (reported, predicted) if reported < predicted else (predicted, reported)
        if more < self._min_tokens:
            # Too little to conclude from. What was concluded stays: an instance that caches nothing makes its own
            # predictions vanish, which is no sign that they were sound.
            return
        if less < _DRIFTED * more:
            self._set(slot, one, Prediction.OVER if reported < predicted else Prediction.UNDER)
        elif one.prediction is _SOUND:
            return  # the usual case
        elif less > _AGREED * more or one.prediction is Prediction.UNKNOWN:
            self._set(slot, one, _SOUND)

    def take_changed(self) -> list[tuple[int, InstanceFeedback]]:
        """Slots whose `prediction` has changed since this was last called; that it is sound at first is no change."""
        if not self._changed:
            return []
        changed = [(slot, self._by_slot[slot]) for slot in sorted(self._changed)]
        self._changed.clear()
        return changed

    def _set(self, slot: int, one: InstanceFeedback, prediction: Prediction) -> None:
        before, one.prediction = one.prediction, prediction
        if prediction is not before and (before, prediction) != (Prediction.UNKNOWN, Prediction.SOUND):
            self._changed.add(slot)


def capacity_factor(
    predicted_tokens: float, reported_tokens: float, n_tokens: int, block_tokens: int, *, is_full: bool
) -> float:
    """What the size of an instance's map is to be multiplied by, after one report. `is_full`: the map was.

    Within a block, and what the report's scale may be off by, nothing is concluded.
    """
    error = reported_tokens - predicted_tokens
    if -block_tokens <= error <= block_tokens:
        return 1.0
    tolerance = block_tokens + _SCALE_ERROR * predicted_tokens * max(0.0, 1 - predicted_tokens / n_tokens)
    if error < -tolerance:
        return SHRINK
    return GROW if is_full and error > tolerance else 1.0
