"""A pool of KV blocks with vLLM's rules for reuse and eviction.

A block is *referenced* while a running request uses it, otherwise *free*. A free block keeps its content and
may be found again by hash until it is taken for something else: the least recently freed goes first. A request
gives its blocks back tail first, so the start of a prompt outlives its end.

Unlike vLLM, a hash names one block only: when a request computes a block that is cached already (it had to, as
the last block of a prompt is always computed), the new copy replaces the old one under that hash. vLLM keeps
both; the difference is one block a repeated prompt.
"""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """`n_blocks` blocks, named by their index. Hashes are chained by the caller: equal hash, equal prefix."""

    __slots__ = ("_by_hash", "_free", "_hashes", "_refs", "n_blocks")

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._refs = [0] * n_blocks
        self._hashes: list[int | None] = [None] * n_blocks
        self._by_hash: dict[int, int] = {}
        # Free blocks, next victim first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))

    @property
    def n_free(self) -> int:
        """Blocks nobody references, whether or not their content can still be found."""
        return len(self._free)

    @property
    def n_cached(self) -> int:
        """Blocks that can be found by hash, referenced or free."""
        return len(self._by_hash)

    def references(self, block: int) -> int:
        """How many running requests use `block`."""
        return self._refs[block]

    def match(self, hashes: Sequence[int], limit: int) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`, at most `limit` of them. Takes no reference."""
        found: list[int] = []
        by_hash = self._by_hash
        for index in range(min(limit, len(hashes))):
            block = by_hash.get(hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def n_leading(self, hashes: Sequence[int]) -> int:
        """How many of `hashes` are cached, up to the first that is not."""
        by_hash = self._by_hash
        n = 0
        for block_hash in hashes:
            if block_hash not in by_hash:
                break
            n += 1
        return n

    def count_free(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are free, that is, would leave the free queue if they were shared."""
        refs = self._refs
        return sum(refs[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Take a reference to each of `blocks`, found by `match`."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def take(self, n: int) -> list[int]:
        """`n` blocks with nothing in them, referenced once. The caller has checked `n_free`."""
        taken: list[int] = []
        for _ in range(n):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def name(self, block: int, block_hash: int) -> None:
        """Let the referenced, full `block` be found by `block_hash` from now on."""
        older = self._by_hash.get(block_hash)
        if older is not None and older != block:
            self._hashes[older] = None
        self._by_hash[block_hash] = block
        self._hashes[block] = block_hash

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a request's `blocks`, in prompt order; those unused become free."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None

    def clear(self) -> bool:
        """Forget all content. False, and nothing done, while any block is referenced."""
        if len(self._free) != self.n_blocks:
            return False
        self._by_hash.clear()
        self._hashes = [None] * self.n_blocks
        return True

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            self._hashes[block] = None
            del self._by_hash[block_hash]
