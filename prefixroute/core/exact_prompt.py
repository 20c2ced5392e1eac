"""A prompt by its tokens, as instances that tell of their blocks see it."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prefixroute.core.blocks import BYTES_PER_TOKEN, extend

# Keys of a prompt are made as they are needed: most prompts end to match early.
_STEP_BLOCKS = 32


class ExactPrompt:
    """A prompt's tokens, and the keys made of them so far, by block size. Good for any number of matches."""

    __slots__ = ("_keys", "_root", "_tokens")

    def __init__(self, tokens: bytes, root: int) -> None:
        self._tokens = tokens
        self._root = root
        self._keys: dict[int, list[int]] = {}

    def keys(self, block_tokens: int) -> Iterator[int]:
        """Keys of the blocks that a cache may spare: the last token is always computed, so never all of them."""
        size = block_tokens * BYTES_PER_TOKEN
        n_blocks = (len(self._tokens) - 1) // size
        keys = self._keys.setdefault(block_tokens, [])
        yield from keys
        while (n := len(keys)) < n_blocks:
            end = min(n + _STEP_BLOCKS, n_blocks)
            more = extend(keys[-1] if keys else self._root, self._tokens[n * size : end * size], size)
            keys += more
            yield from more

    def n_shared(self, others: Iterable["ExactPrompt"], block_tokens: int, behind: int) -> int:
        """Leading tokens that one of `others` would spare this prompt, in full blocks; at least `behind`.

        Costs the comparison of one block for each that shares no more than that.
        """
        size = block_tokens * BYTES_PER_TOKEN
        mine, root = self._tokens, self._root
        n, n_blocks = behind // block_tokens, (len(mine) - 1) // size
        if n >= n_blocks:
            return behind
        following = mine[n * size : (n + 1) * size]
        for other in others:
            theirs = other._tokens
            if theirs[n * size : (n + 1) * size] != following or other._root != root:
                continue
            # Its next block may be equal behind a beginning that is not.
            n = max(n, _n_equal(mine, theirs, size, min(n_blocks, len(theirs) // size)))
            if n == n_blocks:
                break
            following = mine[n * size : (n + 1) * size]
        return max(behind, n * block_tokens)


def _n_equal(mine: bytes, theirs: bytes, size: int, n_blocks: int) -> int:
    """Leading blocks, of so many, that are equal."""
    return bisect_left(range(n_blocks), True, key=lambda i: not mine.startswith(theirs[: (i + 1) * size]))
