"""Sources of KV events: the publisher of an instance, or of one of its data-parallel ranks, and how far it is
believed.
"""

from dataclasses import dataclass, field
from enum import Enum


class Trust(Enum):
    """How far the events of an instance are believed. Values are metric labels; of several ranks the first counts."""

    OFF = "off"
    """It has no source of events."""
    CONNECTING = "connecting"
    """Not connected."""
    REPLAYING = "replaying"
    """Connected; what was missed is being asked for."""
    OVER_LIMIT = "over_limit"
    """It holds more than the bound on memory allows."""
    PARTIAL = "partial"
    """It holds blocks that are not known: stored before we listened, lost, or not understood."""
    TRUSTED = "trusted"


@dataclass(slots=True)
class Counts:
    """What came from a source, since it was opened."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    ignored: int = 0
    """Events about other memory than the GPU's, or layers that forget."""
    unknown: int = 0
    """Events of kinds that are not known here."""
    undecodable: int = 0
    """Messages and events that could not be read."""
    gaps: int = 0
    restarts: int = 0
    placed_blocks: int = 0
    orphan_blocks: int = 0
    """Blocks stored behind a block that is not known, or of a span that does not fit: left out."""
    evicted_blocks: int = 0
    """Blocks removed that were known."""
    lag_s: float | None = None
    """Age of the last batch when it was applied, by the clocks of both machines."""

    def add(self, other: "Counts") -> None:
        lags = [lag for lag in (self.lag_s, other.lag_s) if lag is not None]
        for name in self.__slots__:
            if name != "lag_s":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lag_s = max(lags, default=None)


@dataclass(slots=True, eq=False)
class Source:
    """One publisher of events. Written by `exact.ExactIndex`, but for the counts of what only its caller sees."""

    slot: int
    bit: int
    trust: Trust = Trust.CONNECTING
    counts: Counts = field(default_factory=Counts)
    block_tokens: int = 0
    """Size of its blocks; 0 until it stored one that can be placed."""
    group: int | None = None
    skipped: bool = False
    """Whether it stored, in GPU memory, something that is not indexed."""
    over_limit: bool = False
    keys: dict[int, int] = field(default_factory=dict)
    """Block as the server names it → own key."""
    repeats: dict[int, int] = field(default_factory=dict)
    """How often more than once it is held: the same block may be in several places of the memory."""
    twins: dict[int, int] = field(default_factory=dict)
    """Own keys that more than one name leads to, and how many more."""
