"""What the index of told blocks shows, and to whom it does not."""

from array import array
from collections.abc import Sequence

import pytest

from prefixroute.core.exact import BYTES_PER_BLOCK, ExactIndex
from prefixroute.core.kv_blocks import Cleared, Removed, Stored
from prefixroute.core.kv_sources import Source, Trust

SIZE = 16
TOKENS = list(range(100, 100 + 10 * SIZE))


def packed(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def stored(
    names: Sequence[int], tokens: Sequence[int], parent: int | None = None, *, size: int = SIZE, **more: object
) -> Stored:
    one = Stored(list(names), parent, packed(tokens), size)
    for field, value in more.items():
        setattr(one, field, value)
    return one


@pytest.fixture
def index() -> ExactIndex:
    return ExactIndex(seed=3, max_bytes=1 << 20)


def trusted(index: ExactIndex, slot: int = 0) -> Source:
    source = index.open(slot)
    index.set_trust(source, Trust.TRUSTED)
    return source


def match(
    index: ExactIndex, tokens: Sequence[int], model: str | None = None, salt: str | None = None
) -> dict[int, int]:
    return index.match(index.prompt(packed(tokens), model=model, salt=salt))


# Matches


def test_what_was_stored_is_found(index: ExactIndex) -> None:
    index.apply(trusted(index), stored([1, 2, 3], TOKENS[: 3 * SIZE]))
    assert match(index, TOKENS) == {0: 3 * SIZE}
    assert match(index, TOKENS[: 2 * SIZE + 5]) == {0: 2 * SIZE}
    assert match(index, TOKENS[1:]) == {0: 0}


def test_blocks_follow_their_parent(index: ExactIndex) -> None:
    source = trusted(index)
    index.apply(source, stored([1, 2], TOKENS[: 2 * SIZE]))
    index.apply(source, stored([3], TOKENS[2 * SIZE : 3 * SIZE], parent=2))
    index.apply(source, stored([4], [7] * SIZE, parent=1))
    assert match(index, TOKENS) == {0: 3 * SIZE}
    assert match(index, [*TOKENS[:SIZE], *[7] * SIZE, 9]) == {0: 2 * SIZE}


def test_the_last_token_is_always_computed(index: ExactIndex) -> None:
    index.apply(trusted(index), stored([1, 2], TOKENS[: 2 * SIZE]))
    assert match(index, TOKENS[: 2 * SIZE]) == {0: SIZE}
    assert match(index, TOKENS[: 2 * SIZE + 1]) == {0: 2 * SIZE}
    assert match(index, []) == {0: 0}


def test_a_hole_ends_the_match(index: ExactIndex) -> None:
    source = trusted(index)
    index.apply(source, stored([1, 2, 3], TOKENS[: 3 * SIZE]))
    index.apply(source, Removed([2]))
    assert match(index, TOKENS) == {0: SIZE}
    index.apply(source, stored([2], TOKENS[SIZE : 2 * SIZE], parent=1))
    assert match(index, TOKENS) == {0: 3 * SIZE}


def test_each_instance_has_its_own_depth_and_block_size(index: ExactIndex) -> None:
    index.apply(trusted(index, 0), stored([1, 2], TOKENS[: 2 * SIZE]))
    index.apply(trusted(index, 5), stored([1], TOKENS[:64], size=64))
    index.apply(trusted(index, 7), stored([9, 8, 7], TOKENS[: 3 * SIZE]))
    trusted(index, 70)
    assert match(index, TOKENS) == {0: 2 * SIZE, 5: 64, 7: 3 * SIZE, 70: 0}


def test_a_prompt_can_be_asked_for_again_when_more_is_held(index: ExactIndex) -> None:
    source = trusted(index)
    tokens = list(range(100 * SIZE))
    prompt = index.prompt(packed(tokens))
    index.apply(source, stored(range(1, 41), tokens[: 40 * SIZE]))
    assert index.match(prompt) == {0: 40 * SIZE}
    index.apply(source, stored(range(41, 101), tokens[40 * SIZE :], parent=40))
    assert index.match(prompt) == {0: 99 * SIZE}


def test_the_mean_over_ranks_is_told_and_only_if_all_are_trusted(index: ExactIndex) -> None:
    first, second = trusted(index), index.open(0)
    index.apply(first, stored([1, 2, 3], TOKENS[: 3 * SIZE]))
    index.apply(second, stored([1], TOKENS[:SIZE]))
    assert match(index, TOKENS) == {}
    assert index.trust(0) is Trust.CONNECTING

    index.set_trust(second, Trust.TRUSTED)
    assert index.trust(0) is Trust.TRUSTED
    assert match(index, TOKENS) == {0: 2 * SIZE}


# Scope


def test_adapters_and_salts_do_not_share(index: ExactIndex) -> None:
    source = trusted(index)
    tokens = TOKENS[: 2 * SIZE]
    index.apply(source, stored([1, 2], tokens, adapter="sql", extra_keys=[["sql"], ["sql"]]))
    assert match(index, TOKENS) == {0: 0}
    assert match(index, TOKENS, model="base") == {0: 0}
    assert match(index, TOKENS, model="sql") == {0: 2 * SIZE}

    index.apply(source, stored([3, 4], tokens, adapter="sql", extra_keys=[["sql", "tenant"], ["sql"]]))
    index.apply(source, Removed([1, 2]))
    assert match(index, TOKENS, model="sql") == {0: 0}
    assert match(index, TOKENS, model="sql", salt="tenant") == {0: 2 * SIZE}
    assert match(index, TOKENS, salt="tenant") == {0: 0}


def test_an_adapter_may_be_known_before_its_first_block(index: ExactIndex) -> None:
    index.apply(trusted(index), stored([1], TOKENS[:SIZE]))
    assert match(index, TOKENS, model="new") == {0: SIZE}, "a model's own name is no adapter"
    index.learned_adapters(["new"])
    assert match(index, TOKENS, model="new") == {0: 0}


@pytest.mark.parametrize(
    "extra",
    [[["image", 0]], ["an-image", "another"], [b"embedding"], ["image", "salt"], [7]],
    ids=str,
)
def test_a_block_with_media_is_not_a_text_prompts(index: ExactIndex, extra: list[object]) -> None:
    source = trusted(index)
    index.apply(source, stored([1, 2], TOKENS[: 2 * SIZE], extra_keys=[extra, None]))
    assert index.n_blocks(0) == 2
    for salt in (None, "salt", "an-image"):
        assert match(index, TOKENS, salt=salt) == {0: 0}


def test_media_in_a_later_block_leave_those_before_it(index: ExactIndex) -> None:
    source = trusted(index)
    index.apply(source, stored([1, 2, 3], TOKENS[: 3 * SIZE], extra_keys=[None, ["image"], None]))
    assert match(index, TOKENS) == {0: SIZE}


# References


def test_a_block_in_two_places_is_held_until_both_are_gone(index: ExactIndex) -> None:
    source = trusted(index)
    for _ in range(3):
        index.apply(source, stored([1], TOKENS[:SIZE]))
    for expected in (SIZE, SIZE, 0, 0):
        index.apply(source, Removed([1]))
        assert match(index, TOKENS) == {0: expected}
    assert index.n_bytes == 0


def test_two_names_for_one_block(index: ExactIndex) -> None:
    """Servers that do not tell salts name the same tokens twice."""
    source = trusted(index)
    index.apply(source, stored([1], TOKENS[:SIZE]))
    index.apply(source, stored([2], TOKENS[:SIZE]))
    index.apply(source, Removed([1]))
    assert match(index, TOKENS) == {0: SIZE}
    index.apply(source, Removed([2]))
    assert match(index, TOKENS) == {0: 0}


def test_groups_of_layers_have_the_same_names(index: ExactIndex) -> None:
    source = trusted(index)
    index.apply(source, stored([1], TOKENS[: 2 * SIZE], group=0, kind="sliding_window"))
    index.apply(source, stored([1, 2], TOKENS[: 2 * SIZE], group=1, kind="full_attention"))
    index.apply(source, stored([1, 2], TOKENS[: 2 * SIZE], group=2, kind="full_attention"))
    index.apply(source, Removed([1, 2], group=0))
    index.apply(source, Removed([1, 2], group=2))
    assert match(index, TOKENS) == {0: 2 * SIZE}
    index.apply(source, Removed([2], group=1))
    assert match(index, TOKENS) == {0: SIZE}
    assert source.counts.ignored == 4


def test_other_tiers_do_not_count(index: ExactIndex) -> None:
    source = trusted(index)
    index.apply(source, stored([1], TOKENS[:SIZE], medium="GPU"))
    index.apply(source, stored([1, 2], [], medium="CPU"))
    index.apply(source, Removed([1], medium="CPU"))
    assert match(index, TOKENS) == {0: SIZE}
    assert not source.skipped


@pytest.mark.parametrize(
    "orphan",
    [
        stored([5, 6], TOKENS[: 2 * SIZE], parent=77),
        stored([5, 6], TOKENS[: 3 * SIZE]),
        stored([5, 6], TOKENS[:16], size=8),
    ],
    ids=["behind an unknown block", "a longer span", "blocks of another size"],
)
def test_what_has_no_place_is_left_out_and_counted(index: ExactIndex, orphan: Stored) -> None:
    source = trusted(index)
    index.apply(source, stored([1], TOKENS[:SIZE]))
    index.apply(source, orphan)
    assert source.counts.orphan_blocks == 2
    assert index.n_blocks(0) == 1


def test_emptied_caches_hold_nothing_and_others_keep_theirs(index: ExactIndex) -> None:
    first, second = trusted(index, 0), trusted(index, 1)
    for source in (first, second):
        index.apply(source, stored([1, 2], TOKENS[: 2 * SIZE]))
    index.apply(first, Cleared())
    assert match(index, TOKENS) == {0: 0, 1: 2 * SIZE}
    index.apply(first, stored([1], TOKENS[:8], size=8))
    assert match(index, TOKENS) == {0: 8, 1: 2 * SIZE}


# Trust and bounds


@pytest.mark.parametrize("trust", [trust for trust in Trust if trust is not Trust.TRUSTED])
def test_who_is_not_trusted_is_not_shown(index: ExactIndex, trust: Trust) -> None:
    source = trusted(index)
    index.apply(source, stored([1], TOKENS[:SIZE]))
    index.set_trust(source, trust)
    assert match(index, TOKENS) == {}
    assert index.trust(0) is not Trust.TRUSTED
    assert index.trust(0) is trust
    index.set_trust(source, Trust.TRUSTED)
    assert match(index, TOKENS) == {0: SIZE}


def test_an_instance_without_events_is_off(index: ExactIndex) -> None:
    assert index.trust(3) is Trust.OFF
    assert index.n_blocks(3) == 0


def test_a_closed_source_leaves_its_counts(index: ExactIndex) -> None:
    source = trusted(index)
    index.apply(source, stored([1], TOKENS[:SIZE]))
    index.close(source)
    assert match(index, TOKENS) == {}
    assert index.n_bytes == 0
    again = trusted(index)
    index.apply(again, stored([1], TOKENS[:SIZE]))
    assert index.counts(0).stored == 2
    assert again.bit == source.bit


def test_who_would_pass_the_bound_is_emptied_until_it_begins_anew() -> None:
    index = ExactIndex(seed=3, max_bytes=5 * BYTES_PER_BLOCK)
    small, large = trusted(index, 0), trusted(index, 1)
    index.apply(small, stored([1, 2], TOKENS[: 2 * SIZE]))
    index.apply(large, stored([1, 2, 3], TOKENS[: 3 * SIZE]))
    assert index.n_bytes == 5 * BYTES_PER_BLOCK
    index.apply(large, stored([4], TOKENS[3 * SIZE : 4 * SIZE], parent=3))
    assert index.trust(1) is Trust.OVER_LIMIT
    index.set_trust(large, Trust.TRUSTED)
    assert index.trust(1) is Trust.OVER_LIMIT
    index.apply(large, stored([1], TOKENS[:SIZE]))
    assert index.n_blocks(1) == 0
    assert match(index, TOKENS) == {0: 2 * SIZE}

    index.apply(large, Cleared())
    index.set_trust(large, Trust.TRUSTED)
    index.apply(large, stored([1], TOKENS[:SIZE]))
    assert match(index, TOKENS) == {0: 2 * SIZE, 1: SIZE}
