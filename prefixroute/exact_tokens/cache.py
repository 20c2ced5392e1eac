"""Token ids of recent pieces of prompts, by digest, within a bound of bytes."""

import secrets
from collections import OrderedDict

import xxhash

# Two bytes objects, one of them the digest, and an entry of an ordered dict: 187 by tracemalloc.
ENTRY_BYTES = 200


class TokenCache:
    """Least recently used pieces go first. For one thread.

    Digests are xxh3-128 under a random seed: who cannot know it cannot prepare two pieces of one digest.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._seed = secrets.randbits(64)
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._ids)

    def digest(self, piece: str) -> bytes:
        """The key of a piece. Raises UnicodeEncodeError for half a surrogate pair, which no tokenizer takes."""
        return xxhash.xxh3_128_digest(piece.encode(), self._seed)

    def get(self, digest: bytes) -> bytes | None:
        """Token ids of the piece, which counts as used; None when they are not here."""
        ids = self._ids.get(digest)
        if ids is not None:
            self._ids.move_to_end(digest)
        return ids

    def put(self, digest: bytes, ids: bytes) -> None:
        """Keeps the ids. A piece that would fill more than a quarter of the cache is not kept."""
        cost = len(ids) + ENTRY_BYTES
        if cost > self._max_bytes // 4 or digest in self._ids:
            return
        self._ids[digest] = ids
        self.n_bytes += cost
        while self.n_bytes > self._max_bytes:
            _, old = self._ids.popitem(last=False)
            self.n_bytes -= len(old) + ENTRY_BYTES

    def clear(self) -> None:
        self._ids.clear()
        self.n_bytes = 0
