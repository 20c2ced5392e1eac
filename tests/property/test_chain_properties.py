"""What equal hashes of blocks promise: equal scopes, and equal prompts up to there."""

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from prefixroute.core.blocks import BYTES_PER_TOKEN, BlockHasher

scopes = st.binary(max_size=20)
seeds = st.integers(0, 2**64 - 1)
block_sizes = st.integers(1, 8)
# Few letters and short blocks: equal blocks at different places are common.
materials = st.lists(st.sampled_from([b"aaaa", b"aaab", b"b"]), max_size=40).map(b"".join)


@given(scopes, seeds, block_sizes, materials, materials)
def test_the_chain_of_a_prefix_is_a_prefix_of_the_chain(
    scope: bytes, seed: int, block_tokens: int, prefix: bytes, rest: bytes
) -> None:
    hasher = BlockHasher(block_tokens, seed)
    chain = hasher.chain(scope, prefix)
    assert hasher.chain(scope, prefix + rest)[: len(chain)] == chain
    assert len(chain) == len(prefix) // (block_tokens * BYTES_PER_TOKEN)


@given(scopes, seeds, block_sizes, materials, materials)
def test_chains_part_at_the_first_block_that_differs_and_never_meet_again(
    scope: bytes, seed: int, block_tokens: int, one: bytes, other: bytes
) -> None:
    hasher = BlockHasher(block_tokens, seed)
    block_bytes = block_tokens * BYTES_PER_TOKEN
    chains = hasher.chain(scope, one), hasher.chain(scope, other)
    for depth, (a, b) in enumerate(zip(*chains, strict=False), 1):
        assert (a == b) is (one[: depth * block_bytes] == other[: depth * block_bytes])
    n_equal = sum(a == b for a, b in zip(*chains, strict=False))
    assert set(chains[0][n_equal:]).isdisjoint(chains[1][n_equal:])


@given(st.lists(scopes, min_size=2, max_size=2, unique=True), seeds, materials)
def test_other_scopes_share_no_block(two: list[bytes], seed: int, material: bytes) -> None:
    hasher = BlockHasher(1, seed)
    assert set(hasher.chain(two[0], material)).isdisjoint(hasher.chain(two[1], material))


@given(st.lists(seeds, min_size=2, max_size=2, unique=True), scopes, materials)
def test_other_seeds_share_no_block(two: list[int], scope: bytes, material: bytes) -> None:
    chains = [BlockHasher(1, seed).chain(scope, material) for seed in two]
    assert set(chains[0]).isdisjoint(chains[1])


# A stride of such blocks is 128 bytes: some of these have none, some have several.
long_materials = st.lists(st.sampled_from([b"a" * 50, b"b" * 128, b"c" * 4, b"d"]), max_size=12).map(b"".join)


@given(st.lists(st.tuples(st.sampled_from([b"", b"m"]), long_materials), min_size=1, max_size=12), seeds)
def test_what_a_hasher_has_seen_before_changes_no_chain(seen: list[tuple[bytes, bytes]], seed: int) -> None:
    hasher = BlockHasher(1, seed)
    for scope, material in [*seen, *reversed(seen)]:
        parent = xxh3_64_intdigest(scope, seed)
        chain = []
        for begin in range(0, len(material) - BYTES_PER_TOKEN + 1, BYTES_PER_TOKEN):
            parent = xxh3_64_intdigest(material[begin : begin + BYTES_PER_TOKEN], parent)
            chain.append(parent)
        assert hasher.chain(scope, material) == chain
