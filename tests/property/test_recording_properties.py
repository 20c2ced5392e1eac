"""Ids of recorded prompts: equal exactly where prefixes are equal, under one key."""

from hypothesis import given
from hypothesis import strategies as st

from prefixroute.core.blocks import BlockHasher
from prefixroute.recording.prefixes import SLICE_BYTES, PrefixHasher

KEY = b"k" * 32
BLOCK_TOKENS = 4

keys = st.binary(min_size=32, max_size=32)
# Few letters, so that prefixes are often shared.
materials = st.text("ab", max_size=200).map(str.encode)
scopes = st.text("ab", max_size=3).map(str.encode)


def n_common(one: list[int] | bytes, other: list[int] | bytes) -> int:
    return next(
        (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


@given(materials, materials, scopes, keys)
def test_ids_are_shared_as_far_as_full_blocks_are(one: bytes, other: bytes, scope: bytes, key: bytes) -> None:
    hasher = PrefixHasher(key, BLOCK_TOKENS)
    ids, its_ids = hasher.ids(scope, one), hasher.ids(scope, other)
    assert len(ids) == len(one) // (4 * BLOCK_TOKENS)
    assert n_common(ids, its_ids) == n_common(one, other) // (4 * BLOCK_TOKENS)
    assert len({*ids, *its_ids}) == len(ids) + len(its_ids) - n_common(ids, its_ids)
    assert all(0 <= number < 2**63 for number in ids)


@given(materials, scopes, scopes, keys, keys)
def test_nothing_is_shared_across_scopes_or_keys(
    material: bytes, scope: bytes, other_scope: bytes, key: bytes, other_key: bytes
) -> None:
    ids = PrefixHasher(key, BLOCK_TOKENS).ids(scope, material)
    other = PrefixHasher(other_key, BLOCK_TOKENS).ids(other_scope, material)
    same = (scope, key) == (other_scope, other_key)
    assert ids == other if same else set(ids).isdisjoint(other)


@given(materials, st.integers(0, 20))
def test_what_stands_at_the_end_of_a_scope_is_not_the_beginning_of_the_prompt(material: bytes, n: int) -> None:
    hasher = PrefixHasher(KEY, BLOCK_TOKENS)
    moved = hasher.ids(material[:n], material[n:])
    assert n == 0 or not material or set(moved).isdisjoint(hasher.ids(b"", material))


@given(materials, st.integers(1, 4))
def test_blocks_of_another_size_give_the_same_ids_where_both_end(material: bytes, n: int) -> None:
    fine = PrefixHasher(KEY, BLOCK_TOKENS).ids(b"s", material)
    assert PrefixHasher(KEY, n * BLOCK_TOKENS).ids(b"s", material) == fine[n - 1 :: n]


@given(materials)
def test_the_router_cuts_the_same_blocks(material: bytes) -> None:
    """So a simulation on a recording matches what the router would have."""
    assert len(PrefixHasher(KEY, BLOCK_TOKENS).ids(b"", material)) == len(
        BlockHasher(BLOCK_TOKENS, 1).chain(b"", material)
    )


@given(st.lists(st.integers(0, 3 * SLICE_BYTES), max_size=4))
def test_others_get_their_turn_after_every_slice(lengths: list[int]) -> None:
    turns: list[None] = []
    hasher = PrefixHasher(KEY, BLOCK_TOKENS, lambda: turns.append(None))
    for length in lengths:
        hasher.ids(b"", bytes(length))
    assert len(turns) == sum(length // 16 * 16 for length in lengths) // SLICE_BYTES
