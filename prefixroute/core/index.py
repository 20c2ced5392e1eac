"""Which instance holds which prefix: a map of block hashes for each instance, bounded in blocks and in bytes.

The hash of a block covers everything before it, so a map is a radix tree without pointers: a block stands for the
whole prefix that ends with it.

Rules:
- Each instance's blocks form an LRU. A chain is touched deepest block first, so its tail is evicted before its
  head, as the engines do.
- An instance that holds a block holds the blocks before it, always. Therefore the longest match is found by
  bisection, in a few lookups an instance.
- The map is an estimate of another machine's cache: it claims only what was sent there, and forgets it when
  the instance is lost.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

# CPython 3.11 to 3.13: 36 bytes for a 64-bit hash as int, and 20 bytes for a place in a dict, of which a map has
# at most 4 a block (see _COMPACT_RATIO). benchmarks/index_memory.py measures 75 to 100 in all.
BYTES_PER_BLOCK = 120
"""Estimated memory of one block held by one instance."""

# Blocks to be evicted next are looked up so many at a time: a dict is walked from its start, over all places whose
# entries have gone.
_N_OLDEST = 64

# A dict does not use the places of deleted entries again. When it is full, it grows to at least three times its
# entries, in powers of two: up to six places an entry in a map that always evicts. Copied whenever this share
# of its entries has changed, it stays below four, at some 60 ns a change.
_COMPACT_RATIO = 1 / 3

# Above `max_bytes`, this share of the fullest map goes at once: to find the fullest, each is looked at.
_SHED_RATIO = 1 / 64


class Recorded:
    """What a `record` has put into the map, for `forget`."""

    __slots__ = ("_chain", "_n_new", "number", "slot")

    def __init__(self, slot: int, number: int, chain: Sequence[int], n_new: int) -> None:
        self.slot = slot
        self.number = number
        self._chain = chain
        self._n_new = n_new

    @property
    def new_blocks(self) -> Sequence[int]:
        # Whoever holds a block holds those before it: the new ones are the deepest.
        return self._chain[len(self._chain) - self._n_new :]


class _Lru:
    """Blocks of one instance in order of touch, oldest first, each with the number of the record that touched it."""

    __slots__ = ("_oldest", "blocks", "capacity", "n_changes")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: dict[int, int] = {}
        self.n_changes = 0
        # The oldest blocks as they were at a moment, youngest first. One that was touched since has another number.
        self._oldest: list[tuple[int, int]] = []

    def evict(self, n_blocks: int) -> None:
        """The oldest go. There must be so many."""
        blocks, oldest = self.blocks, self._oldest
        if n_blocks > _N_OLDEST:
            oldest.clear()  # they go first
            for block in list(islice(blocks, n_blocks)):
                del blocks[block]
            return
        while n_blocks > 0:
            if not oldest:
                oldest += islice(blocks.items(), _N_OLDEST)
                oldest.reverse()
            block, number = oldest.pop()
            if blocks.get(block) == number:
                del blocks[block]
                n_blocks -= 1

    def clear(self) -> None:
        self.blocks = {}
        self._oldest.clear()

    def compact(self) -> None:
        self.blocks = dict(self.blocks)
        self.n_changes = 0


class PrefixIndex:
    """Instance → blocks that it holds. Instances are known by slot: a small integer that the fleet gives out.

    `max_bytes` bounds the whole by the estimate `n_bytes`; beyond it the fullest instance loses its oldest blocks.
    """

    __slots__ = ("_lrus", "_max_held", "_n_held", "_n_records")

    def __init__(self, max_bytes: int) -> None:
        self._max_held = max_bytes // BYTES_PER_BLOCK
        self._lrus: dict[int, _Lru] = {}
        self._n_held = 0
        self._n_records = 0

    def configure(self, max_bytes: int) -> None:
        """Another bound from now on; what is above it goes with the next `record`."""
        self._max_held = max_bytes // BYTES_PER_BLOCK

    @property
    def n_bytes(self) -> int:
        """Estimated memory of the index, bytes."""
        return self._n_held * BYTES_PER_BLOCK

    def n_blocks(self, slot: int) -> int:
        """Blocks that the instance in `slot` is thought to hold."""
        return len(self._lrus[slot].blocks)

    def capacity_blocks(self, slot: int) -> int:
        """The bound on `n_blocks(slot)`."""
        return self._lrus[slot].capacity

    def is_full(self, slot: int) -> bool:
        """Whether what is new evicts what is old there."""
        lru = self._lrus[slot]
        return len(lru.blocks) >= lru.capacity

    def add(self, slot: int, capacity_blocks: int) -> None:
        """Opens an empty map for `slot`. Raises ValueError when it is open already."""
        if slot in self._lrus:
            raise ValueError(f"slot {slot} is in use")
        self._lrus[slot] = _Lru(max(1, capacity_blocks))

    def remove(self, slot: int) -> None:
        """Forgets `slot` and all it holds."""
        self.clear(slot)
        del self._lrus[slot]

    def resize(self, slot: int, capacity_blocks: int) -> None:
        """Sets the capacity of `slot`; what is above it is evicted now, oldest first."""
        lru = self._lrus[slot]
        lru.capacity = max(1, capacity_blocks)
        self._evict(lru, len(lru.blocks) - lru.capacity)

    def clear(self, slot: int) -> None:
        """Forgets what `slot` holds: the instance was lost, restarted or emptied its cache."""
        lru = self._lrus[slot]
        self._n_held -= len(lru.blocks)
        lru.clear()

    def match(self, chain: Sequence[int]) -> dict[int, int]:
        """Slot → how many leading blocks of `chain` it holds; slots that hold none are left out.

        Costs one lookup for an instance that holds none, and log2 of the chain's length for another.
        """
        matched: dict[int, int] = {}
        if not chain:
            return matched
        first, depth = chain[0], len(chain)
        for slot, lru in self._lrus.items():
            if first in lru.blocks:
                # Many hold the same: a system prompt, say. So the depth of the last one is tried first.
                depth = matched[slot] = _n_leading(chain, lru.blocks, depth)
        return matched

    def record(self, chain: Sequence[int], slot: int) -> Recorded:
        """`slot` is sent the prompt of `chain`: it holds these blocks from now on.

        Of a chain longer than the capacity only the head is kept.
        """
        lru = self._lrus[slot]
        self._n_records = number = self._n_records + 1
        blocks = lru.blocks
        n_before, pop = len(blocks), blocks.pop
        for block in reversed(chain):
            pop(block, None)  # set again, it becomes the newest
            blocks[block] = number
        n_new = len(blocks) - n_before
        lru.n_changes += len(chain)
        self._n_held += n_new
        if len(blocks) > lru.capacity:
            self._evict(lru, len(blocks) - lru.capacity)
        while self._n_held > self._max_held:
            fullest = max(self._lrus.values(), key=lambda lru: len(lru.blocks))
            if len(fullest.blocks) <= 1:
                break
            self._evict(fullest, max(1, int(len(fullest.blocks) * _SHED_RATIO)))
        if lru.n_changes > len(blocks) * _COMPACT_RATIO:
            lru.compact()
        return Recorded(slot, number, chain, n_new)

    def forget(self, recorded: Recorded) -> None:
        """Takes back what a `record` put in: the blocks were never computed there.

        What was there before stays, and so does what another record has touched since: that prompt is there.
        """
        lru = self._lrus.get(recorded.slot)
        if lru is None:
            return
        for block in recorded.new_blocks:
            if lru.blocks.get(block) == recorded.number:
                del lru.blocks[block]
                self._n_held -= 1

    def _evict(self, lru: _Lru, n_blocks: int) -> None:
        if n_blocks > 0:
            lru.evict(n_blocks)
            self._n_held -= n_blocks


def _n_leading(chain: Sequence[int], held: dict[int, int], guess: int) -> int:
    if chain[guess - 1] in held and (guess == len(chain) or chain[guess] not in held):
        return guess
    return bisect_left(chain, True, key=lambda block: block not in held)
