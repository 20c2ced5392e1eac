"""What is remembered of whom, what goes first, and what is taken back."""

import tracemalloc
from random import Random

import pytest

from prefixroute.core.index import BYTES_PER_BLOCK, PrefixIndex

UNBOUNDED = 1 << 40


def make_chain(n_blocks: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.getrandbits(64) for _ in range(n_blocks)]


def make_index(*capacities: int, max_bytes: int = UNBOUNDED) -> PrefixIndex:
    index = PrefixIndex(max_bytes)
    for slot, capacity in enumerate(capacities):
        index.add(slot, capacity)
    return index


def held(index: PrefixIndex, chain: list[int], slot: int = 0) -> int:
    return index.match(chain).get(slot, 0)


def test_each_instance_matches_as_far_as_it_was_sent() -> None:
    index = make_index(100, 100, 100, 100)
    chain = make_chain(8)
    index.record(chain[:3], 0)
    index.record(chain, 1)
    index.record(make_chain(5, seed=1), 2)
    index.record(chain[:4] + make_chain(4, seed=2), 3)
    assert index.match(chain) == {0: 3, 1: 8, 3: 4}


def test_nothing_matches_an_empty_chain_or_an_unknown_one() -> None:
    index = make_index(100)
    index.record(make_chain(3), 0)
    assert index.match([]) == {}
    assert index.match(make_chain(3, seed=1)) == {}


def test_blocks_behind_one_that_is_not_held_do_not_match() -> None:
    index = make_index(100)
    chain = make_chain(3)
    index.record(chain, 0)
    assert index.match(make_chain(1, seed=1) + chain) == {}


def test_slots_of_any_number_are_told_apart() -> None:
    index = PrefixIndex(UNBOUNDED)
    chain = make_chain(2)
    for slot in (0, 63, 64, 255, 1000):
        index.add(slot, 10)
        index.record(chain, slot)
    index.clear(64)
    assert index.match(chain) == {0: 2, 63: 2, 255: 2, 1000: 2}


def test_the_tail_is_evicted_before_the_head() -> None:
    index = make_index(5)
    old, new = make_chain(4), make_chain(3, seed=1)
    index.record(old, 0)
    index.record(new, 0)
    assert held(index, old) == 2
    assert held(index, new) == 3


def test_what_is_asked_for_again_outlives_what_is_not() -> None:
    index = make_index(6)
    warm, cold = make_chain(2), make_chain(3, seed=1)
    index.record(warm, 0)
    index.record(cold, 0)
    index.record(warm, 0)
    index.record(make_chain(4, seed=2), 0)
    assert held(index, warm) == 2
    assert held(index, cold) == 0


def test_of_a_chain_longer_than_the_capacity_the_head_is_kept() -> None:
    index = make_index(3)
    index.record(make_chain(5), 0)
    assert held(index, make_chain(5)) == 3
    assert index.n_blocks(0) == 3


def test_a_capacity_below_one_block_is_one_block() -> None:
    index = make_index(0)
    assert index.capacity_blocks(0) == 1
    index.resize(0, -5)
    assert index.capacity_blocks(0) == 1
    index.record(make_chain(2), 0)
    assert index.n_blocks(0) == 1


def test_a_smaller_capacity_evicts_at_once_and_a_larger_one_makes_room() -> None:
    index = make_index(6)
    old, new = make_chain(3), make_chain(3, seed=1)
    index.record(old, 0)
    index.record(new, 0)
    index.resize(0, 4)
    assert index.n_blocks(0) == 4
    assert (held(index, old), held(index, new)) == (1, 3)
    index.resize(0, 100)
    index.record(make_chain(50, seed=2), 0)
    assert (held(index, old), held(index, new)) == (1, 3)


def test_a_full_map_keeps_exactly_the_newest_blocks_however_often_it_turns_over() -> None:
    capacity, n_chain = 2500, 10
    index = make_index(capacity)
    for seed in range(3000):
        index.record(make_chain(n_chain, seed), 0)
        assert index.n_blocks(0) <= capacity
    n_kept = capacity // n_chain
    assert all(held(index, make_chain(n_chain, seed)) == n_chain for seed in range(3000 - n_kept, 3000))
    assert not any(held(index, make_chain(n_chain, seed)) for seed in range(3000 - n_kept))


def test_a_cleared_instance_holds_nothing_and_can_learn_again() -> None:
    index = make_index(10, 10)
    chain = make_chain(4)
    index.record(chain, 0)
    index.record(chain, 1)
    index.clear(0)
    assert index.match(chain) == {1: 4}
    assert index.n_blocks(0) == 0
    index.record(chain[:2], 0)
    assert index.match(chain) == {0: 2, 1: 4}


def test_nothing_is_left_when_all_are_cleared() -> None:
    index = make_index(10, 10)
    for seed in range(50):
        index.record(make_chain(4, seed), seed % 2)
    index.clear(0)
    index.clear(1)
    assert index.n_bytes == 0
    assert not any(index.match(make_chain(4, seed)) for seed in range(50))


def test_a_removed_slot_can_be_given_out_again_empty() -> None:
    index = make_index(10)
    chain = make_chain(4)
    index.record(chain, 0)
    index.remove(0)
    assert index.match(chain) == {}
    assert index.n_bytes == 0
    index.add(0, 20)
    assert index.n_blocks(0) == 0
    assert index.capacity_blocks(0) == 20


def test_a_slot_in_use_is_not_given_out_twice() -> None:
    index = make_index(10)
    with pytest.raises(ValueError, match="slot 0 is in use"):
        index.add(0, 10)


# ------------------------------------------------------------------ taking back


def test_a_prompt_that_was_refused_is_forgotten() -> None:
    index = make_index(10)
    index.forget(index.record(make_chain(4), 0))
    assert index.match(make_chain(4)) == {}
    assert index.n_bytes == 0


def test_what_was_there_before_the_refused_prompt_stays() -> None:
    index = make_index(10)
    chain = make_chain(6)
    index.record(chain[:2], 0)
    index.forget(index.record(chain, 0))
    assert held(index, chain) == 2


def test_forgetting_twice_is_forgetting_once() -> None:
    index = make_index(10)
    recorded = index.record(make_chain(4), 0)
    index.forget(recorded)
    index.record(make_chain(4), 0)
    index.forget(recorded)
    assert held(index, make_chain(4)) == 4


def test_a_prefix_that_another_prompt_brought_too_is_not_forgotten() -> None:
    index = make_index(20)
    chain = make_chain(8)
    refused = index.record(chain[:5], 0)
    index.record(chain[:3] + make_chain(4, seed=1), 0)
    index.forget(refused)
    assert held(index, chain) == 3
    assert held(index, chain[:3] + make_chain(4, seed=1)) == 7
    assert index.n_blocks(0) == 7


def test_forgetting_after_the_map_shrank_leaves_what_was_there_before() -> None:
    index = make_index(10)
    chain = make_chain(10)
    index.record(chain[:5], 0)
    refused = index.record(chain, 0)
    index.resize(0, 5)
    index.forget(refused)
    assert held(index, chain) == 5


def test_forgetting_after_the_map_grew_leaves_nothing() -> None:
    index = make_index(5)
    refused = index.record(make_chain(10), 0)
    index.resize(0, 10)
    index.forget(refused)
    assert index.n_blocks(0) == 0


def test_what_came_after_a_restart_is_not_forgotten_for_what_came_before() -> None:
    index = make_index(10)
    refused = index.record(make_chain(4), 0)
    index.clear(0)
    index.record(make_chain(4), 0)
    index.forget(refused)
    assert held(index, make_chain(4)) == 4


def test_forgetting_at_an_instance_that_is_gone_does_nothing() -> None:
    index = make_index(10, 10)
    refused = index.record(make_chain(4), 0)
    index.remove(0)
    index.forget(refused)
    assert index.n_bytes == 0


# ------------------------------------------------------------------ memory


def test_above_the_bound_in_bytes_the_fullest_instance_loses_its_oldest() -> None:
    index = make_index(1000, 1000, max_bytes=100 * BYTES_PER_BLOCK)
    small = make_chain(10)
    index.record(small, 0)
    for seed in range(1, 50):
        index.record(make_chain(10, seed), 1)
        assert index.n_bytes <= 100 * BYTES_PER_BLOCK
    assert held(index, small) == 10
    assert held(index, make_chain(10, 49), slot=1) == 10
    assert held(index, make_chain(10, 1), slot=1) == 0


@pytest.mark.parametrize("n_blocks", [1, 63, 64, 65, 200])
def test_the_oldest_go_first_however_many_at_a_time(n_blocks: int) -> None:
    """Some are looked up ahead: what is touched in between, taken back or evicted in a heap, must not go wrong."""
    index = make_index(300)
    old = [make_chain(10, seed) for seed in range(30)]
    for chain in old:
        index.record(chain, 0)
    refused = index.record(make_chain(1, 99), 0)  # the oldest are looked up
    assert held(index, old[0]) == 9
    index.forget(refused)
    index.record(old[1], 0)
    index.record(make_chain(n_blocks, 100), 0)
    # The room of the refused one was used first; old[1] is younger than the new blocks' victims.
    order = [0, *range(2, 30)]
    n_left = [10] * 30
    n_left[0] = 9
    n_to_go = n_blocks - 1
    for n in order:
        n_gone = min(n_to_go, n_left[n])
        n_left[n] -= n_gone
        n_to_go -= n_gone
    assert [held(index, chain) for chain in old] == n_left
    assert index.n_blocks(0) == 300


def test_a_bound_in_bytes_too_small_for_anything_leaves_one_block_an_instance() -> None:
    index = make_index(10, 10, max_bytes=0)
    for seed in range(20):
        index.record(make_chain(5, seed), seed % 2)
    assert (index.n_blocks(0), index.n_blocks(1)) == (1, 1)


def test_real_memory_stays_below_the_estimate_however_many_prompts_pass() -> None:
    """Maps turn over 25 times, what is hot is touched all the time, and at this capacity dicts grow most."""
    n_instances, capacity, n_chain = 4, 1400, 8
    hot = [make_chain(n_chain // 2, seed) for seed in range(n_instances)]
    rng = Random(1)
    tracemalloc.start()
    try:
        index = make_index(*[capacity] * n_instances)
        for n in range(25 * n_instances * capacity // (n_chain // 2)):
            chain = [*hot[n % n_instances], *(rng.getrandbits(64) for _ in range(n_chain // 2))]
            index.record(chain, n % n_instances)
        used_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.n_bytes == n_instances * capacity * BYTES_PER_BLOCK
    assert used_bytes < index.n_bytes
    # While a map is copied there are two of it, of one instance at a time.
    assert peak_bytes < index.n_bytes * (1 + 1 / n_instances)
