"""Whether a cache has turned over under our eyes: how those who came late, or lost something, come to know all of it.

The cache evicts what was unused for longest. Once it evicts a block that was stored under our eyes, what was there
before is gone, or in use by requests whose new blocks are stored behind blocks that we do not know. When of the last
`WINDOW_BLOCKS` hardly any are, all is known; when too many are, it is not, whatever was thought.
"""

from prefixroute.core.kv_sources import Counts

WINDOW_BLOCKS = 256
MAX_ORPHAN_RATIO = 0.05


class Turnover:
    """Watches what is counted of one publisher, from `begin` on."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        # Whether a block that we know was evicted.
        self._turned = False
        # What was counted when the window began.
        self._placed_before = self._orphans_before = self._evicted_before = 0

    def begin(self) -> None:
        """Something is not known, or all of it is: nothing is concluded from what was before."""
        self._turned = False
        self._open_window()

    def look(self, is_complete: bool) -> bool:
        """Whether all is known, after a batch; `is_complete`: whether it was until now."""
        counts = self._counts
        if not is_complete and counts.evicted_blocks > self._evicted_before:
            self._turned = True
        n_orphans = counts.orphan_blocks - self._orphans_before
        n_blocks = counts.placed_blocks - self._placed_before + n_orphans
        if n_blocks < WINDOW_BLOCKS:
            return is_complete
        self._open_window()
        return n_orphans <= MAX_ORPHAN_RATIO * n_blocks and (is_complete or self._turned)

    def _open_window(self) -> None:
        counts = self._counts
        self._placed_before, self._orphans_before = counts.placed_blocks, counts.orphan_blocks
        self._evicted_before = counts.evicted_blocks
