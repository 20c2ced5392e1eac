"""Key material → chain of block hashes.

A block is the router's unit of matching: `block_tokens` tokens, four bytes of key material each. The hash
of a block covers everything before it, because its parent's hash seeds it: equal hashes mean equal prefixes.
"""

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

BYTES_PER_TOKEN = 4
"""UTF-8 text averages about four bytes a token, and a packed token id is four bytes: one unit for both."""

# Long prompts come again, grown at their end: whole strides of them are looked up rather than hashed block by block.
# At 256 tokens a block a stride is 32 KiB of text, which most prompts do not fill.
_STRIDE_BLOCKS = 32
# Some 1,600 bytes each, 1.7 MB in all: 32 MiB of text, or fifty conversations of 150,000 tokens.
_MAX_STRIDES = 1_024


def root(scope: bytes, seed: int) -> int:
    """Where the chains of `scope` begin: the parent of their first block."""
    return xxh3_64_intdigest(scope, seed)


def extend(parent: int, material: bytes | memoryview, block_bytes: int) -> list[int]:
    """Hashes of the full blocks of `material` behind `parent`, shallowest first; a rest has none."""
    chain = []
    view = memoryview(material)  # a slice of bytes is a copy, which costs more than its hash
    for end in range(block_bytes, len(view) + 1, block_bytes):
        parent = xxh3_64_intdigest(view[end - block_bytes : end], parent)
        chain.append(parent)
    return chain


class BlockHasher:
    """Cuts key material into full blocks and chains their hashes (xxh3-64).

    `seed` (0 … 2^64 − 1) is secret by default: who cannot know it cannot prepare colliding prompts, and a
    collision would only cost a cold prefill. Equal seeds let several processes speak of the same blocks.
    """

    __slots__ = ("_block_bytes", "_seed", "_strides", "block_tokens")

    def __init__(self, block_tokens: int, seed: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        self.block_tokens = block_tokens
        self._block_bytes = block_tokens * BYTES_PER_TOKEN
        self._seed = seed
        # Hashes of recent strides by digest, oldest use first. 128 bits, made with the parent's hash as their seed: two
        # strides are as good as never taken for each other.
        self._strides: OrderedDict[int, list[int]] = OrderedDict()

    def chain(self, scope: bytes, material: bytes) -> list[int]:
        """Hashes of the full blocks of `material`, shallowest first; a rest shorter than a block has none.

        `scope` is what must be equal before any prefix may match: model, adapter, salt.
        Prefix property: the chain of a prefix of `material` is a prefix of the chain.
        """
        block_bytes = self._block_bytes
        stride_bytes = _STRIDE_BLOCKS * block_bytes
        parent = root(scope, self._seed)
        if len(material) < stride_bytes:
            return extend(parent, material, block_bytes)
        strides = self._strides
        chain: list[int] = []
        view = memoryview(material)
        n_bytes = len(material)
        at = 0
        while at + stride_bytes <= n_bytes:
            digest = xxh3_128_intdigest(view[at : at + stride_bytes], parent)
            hashes = strides.get(digest)
            if hashes is None:
                break
            strides.move_to_end(digest)
            chain += hashes
            parent = chain[-1]
            at += stride_bytes
        # What is behind a stride that is not known is not known either.
        n_known = len(chain)
        chain += extend(parent, view[at:], block_bytes)
        for end in range(n_known + _STRIDE_BLOCKS, len(chain) + 1, _STRIDE_BLOCKS):
            strides[xxh3_128_intdigest(view[at : at + stride_bytes], parent)] = chain[end - _STRIDE_BLOCKS : end]
            parent = chain[end - 1]
            at += stride_bytes
        while len(strides) > _MAX_STRIDES:
            strides.popitem(last=False)
        return chain

    def rest(self, material: bytes) -> bytes:
        """What of `material` is behind its last full block."""
        return material[len(material) - len(material) % self._block_bytes :]

    def continued(self, scope: bytes, chain: Sequence[int], material: bytes) -> Sequence[int]:
        """`chain`, made under `scope`, and behind it the full blocks of `material`, the rest of its own in front.

        `continued(scope, chain(scope, a), rest(a) + b)` is `chain(scope, a + b)`, at the cost of b.
        """
        if len(material) < self._block_bytes:
            return chain
        parent = chain[-1] if chain else root(scope, self._seed)
        return [*chain, *extend(parent, material, self._block_bytes)]
