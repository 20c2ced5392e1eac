"""What a vLLM server says of its KV cache, as plain values, and the keys that its blocks have here.

The server names a block by a hash of its own making, which is never computed again: from the tokens of an event and
the key of its parent comes our own key (xxh3-64, chained as in `blocks`), and a map leads from one to the other. So
neither the server's algorithm nor its seed matter, and a prompt's tokens give the same keys.

A chain's scope is what the server mixes into the first block: adapter and salt. The model's name is not among them,
because events do not tell it: one server has one model, and who does not serve it is no candidate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from prefixroute.core.blocks import BYTES_PER_TOKEN, extend, root

# How the server keeps the keys and values of one group of layers. Hits end where the first kind of block is missing,
# so a group that forgets what has left its window says nothing about a prefix.
_WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_ON_GPU = frozenset({None, "GPU"})


@dataclass(slots=True)
class Stored:
    """Blocks that follow one another are in the cache now."""

    hashes: Sequence[int]
    """The server's names, shallowest first. Of longer ones, the last 64 bits."""
    parent: int | None
    """Name of the block before them; None: they begin a prompt."""
    tokens: bytes
    """Their token ids, four bytes each, little-endian."""
    block_tokens: int
    adapter: str | None = None
    extra_keys: Sequence[Sequence[object] | None] | None = None
    """What the server mixed into each block besides tokens: adapter, media, salt (first block), embeddings."""
    medium: str | None = None
    group: int | None = None
    """Number of the group of layers, in models that have several kinds."""
    kind: str | None = None

    @property
    def is_on_gpu(self) -> bool:
        """Where a prompt hits them at no cost. Of other tiers not even the tokens are always told."""
        return self.medium in _ON_GPU

    @property
    def is_indexed(self) -> bool:
        """Whether it says what a prompt may hit: blocks in GPU memory, of layers that keep the whole prefix."""
        return self.medium in _ON_GPU and self.kind in _WHOLE_PREFIX


@dataclass(slots=True)
class Removed:
    """One reference to each of these blocks is gone."""

    hashes: Sequence[int]
    medium: str | None = None
    group: int | None = None

    @property
    def is_on_gpu(self) -> bool:
        return self.medium in _ON_GPU


@dataclass(slots=True)
class Cleared:
    """The cache is empty."""


Event = Stored | Removed | Cleared


def root_key(adapter: str | None, salt: str | None, seed: int) -> int:
    """Where the keys of prompts with this adapter and salt begin."""
    return root(repr((adapter, salt)).encode(), seed)  # in repr no two pairs read the same


def block_keys(stored: Stored, parent_key: int | None, seed: int) -> list[int]:
    """Keys of the blocks of `stored`, one for each hash; `parent_key` None: they begin a prompt.

    Blocks with extra keys other than the adapter, and one text with the first block, which is taken as the salt,
    get keys that no text prompt has: an image, of which only the server knows the name.
    """
    size = stored.block_tokens * BYTES_PER_TOKEN
    extras = stored.extra_keys
    if not extras or not any(extras):
        return extend(root_key(stored.adapter, None, seed) if parent_key is None else parent_key, stored.tokens, size)
    keys: list[int] = []
    parent = parent_key
    for n in range(len(stored.hashes)):
        extra = tuple(extras[n] or ()) if n < len(extras) else ()
        if extra and extra[0] == stored.adapter:
            extra = extra[1:]
        if parent is None:
            salt = extra[0] if len(extra) == 1 and isinstance(extra[0], str) else None
            parent = root_key(stored.adapter, salt, seed)
            extra = () if salt is not None else extra
        if extra:
            parent = xxh3_64_intdigest(repr(extra).encode(), parent)
        (parent,) = extend(parent, stored.tokens[n * size : (n + 1) * size], size)
        keys.append(parent)
    return keys
