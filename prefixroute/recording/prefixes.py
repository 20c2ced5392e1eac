"""Key material → ids of its prefixes, by a keyed hash (blake2b).

An id stands for everything up to the end of its block, scope included: under one key, equal ids mean equal prefixes.
Without the key nobody can tell what an id stands for, nor try guesses. Ids do not depend on the size of blocks: a
prefix has the same id in recordings with blocks of another size.
"""

from collections.abc import Callable
from hashlib import blake2b

from prefixroute.core.blocks import BYTES_PER_TOKEN

# About 0.1 ms of work, for which whoever waits for the interpreter has to wait.
SLICE_BYTES = 64 * 1024


class PrefixHasher:
    """Hashes one prompt after the other; not for several threads at a time.

    `between`: called each time another `SLICE_BYTES` have been hashed, to let others run.
    """

    __slots__ = ("_between", "_block_bytes", "_key", "_n_bytes")

    def __init__(self, key: bytes, block_tokens: int, between: Callable[[], object] = lambda: None) -> None:
        self._key = key
        self._block_bytes = block_tokens * BYTES_PER_TOKEN
        self._between = between
        self._n_bytes = 0

    def ids(self, scope: bytes, material: bytes) -> list[int]:
        """Ids of the full blocks of `material`, shallowest first; each from 0 to 2^63 − 1.

        Prefix property: the ids of a prefix of `material` are a prefix of the ids.
        """
        size = self._block_bytes
        state = blake2b(key=self._key, digest_size=8, person=b"prefixroute-ids")
        # With its length: no scope runs into the material behind it.
        state.update(len(scope).to_bytes(8, "little") + scope)
        view = memoryview(material)
        ids: list[int] = []
        for end in range(size, len(material) + 1, size):
            state.update(view[end - size : end])
            # 63 bits: a signed 64-bit integer, which is all that many readers of JSON hold.
            ids.append(int.from_bytes(state.copy().digest(), "little") >> 1)
            self._n_bytes += size
            if self._n_bytes >= SLICE_BYTES:
                self._n_bytes = 0
                self._between()
        return ids
