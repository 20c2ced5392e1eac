"""The ladder against caches that can be worked out by hand."""

from collections.abc import Sequence
from random import Random

import pytest

from prefixroute.core.ladder import IDEAL_MULTIPLE, MAX_POOLED_BLOCKS, Gap, Ladder, Rungs, gaps

BLOCK = 16


def asked(ladder: Ladder, *chains: Sequence[int], reported: float | None = 0.0) -> dict[str, float]:
    """The rungs after these prompts, none of which any instance holds."""
    for chain in chains:
        missing = ladder.dispatched(chain)
        ladder.count(len(chain) * BLOCK + 3, len(chain), missing, 0, 0, reported)
    return (ladder.unreported if reported is None else ladder.reported).by_name()


def blocks(rungs: dict[str, float]) -> tuple[float, float]:
    return rungs["ideal"] / BLOCK, rungs["pooled"] / BLOCK


def test_a_prompt_seen_before_is_ideal_and_pooled_while_it_fits() -> None:
    assert blocks(asked(Ladder(BLOCK, 10), range(5), range(5))) == (5, 5)
    assert blocks(asked(Ladder(BLOCK, 10), range(5), range(7), range(5))) == (10, 10)


def test_what_the_fleet_is_too_small_for_is_ideal_only() -> None:
    assert blocks(asked(Ladder(BLOCK, 4), range(3), range(10, 13), range(3))) == (3, 1)


def test_tails_of_prompts_are_evicted_before_their_heads() -> None:
    rungs = asked(Ladder(BLOCK, 3), [1, 2, 3, 4, 5], [1, 2, 3])
    assert blocks(rungs) == (3, 3)


def test_ideal_looks_back_a_multiple_of_the_fleets_capacity() -> None:
    n = 10
    for n_between, found in ((n * IDEAL_MULTIPLE - 1, 1), (n * (IDEAL_MULTIPLE + 1), 0)):
        ladder = Ladder(BLOCK, n)
        asked(ladder, [1], *([i] for i in range(1000, 1000 + n_between)))
        assert blocks(asked(ladder, [1]))[0] == found


def test_answers_are_seen_but_count_as_no_prompt() -> None:
    ladder = Ladder(BLOCK, 10)
    asked(ladder, [1, 2])
    ladder.extended([3, 4])
    ladder.extended([])
    assert blocks(asked(ladder, [1, 2, 3, 4, 5])) == (4, 4)
    assert ladder.reported.n_requests == 2


def test_requests_without_a_report_are_counted_apart_over_the_same_caches() -> None:
    ladder = Ladder(BLOCK, 10)
    asked(ladder, range(3))
    rungs = asked(ladder, range(4), reported=None)
    assert (rungs["prompt"], rungs["ideal"]) == (4 * BLOCK + 3, 3 * BLOCK)
    assert ladder.reported.n_requests == ladder.unreported.n_requests == 1


@pytest.mark.parametrize("capacity", [MAX_POOLED_BLOCKS + 1, 40_000, 3_000_000])
def test_memory_is_bounded_whatever_the_capacity(capacity: int) -> None:
    ladder, rng = Ladder(BLOCK, capacity), Random(1)
    assert MAX_POOLED_BLOCKS // 2 <= capacity // ladder.sampling <= MAX_POOLED_BLOCKS
    for _ in range(40):
        ladder.dispatched([rng.getrandbits(64) * ladder.sampling for _ in range(3_000)])  # all of them in the sample
    assert ladder.n_blocks <= MAX_POOLED_BLOCKS * IDEAL_MULTIPLE * 1.02


def test_a_sample_tells_nearly_what_all_blocks_would() -> None:
    """Conversations over a common head, with a working set about the fleet's size: the hardest place to be right."""
    rng = Random(3)
    whole, sampled = Ladder(BLOCK, 4_000), Ladder(BLOCK, 4_000)
    sampled.resize(16 * MAX_POOLED_BLOCKS)
    sampled.dispatched([0])  # not empty: what was left out of the sample stays out
    sampled.resize(4_000)
    assert (whole.sampling, sampled.sampling) == (1, 16)
    head = [rng.getrandbits(64) for _ in range(5)]
    talks = [[rng.getrandbits(64) for _ in range(40)] for _ in range(200)]
    for _ in range(3_000):
        talk = rng.choices(talks, weights=range(1, 201))[0]
        chain = head + talk[: rng.randint(5, 40)]
        for ladder in (whole, sampled):
            asked(ladder, chain)
    exact, estimate = whole.reported.by_name(), sampled.reported.by_name()
    assert exact["pooled"] < 0.95 * exact["ideal"]
    for rung in ("ideal", "pooled"):
        assert estimate[rung] / exact["prompt"] == pytest.approx(exact[rung] / exact["prompt"], abs=0.03)


def test_totals_never_go_down() -> None:
    """An estimate of one request may be negative: a new block in the sample stands for more than the prompt has."""
    ladder = Ladder(BLOCK, 2 * MAX_POOLED_BLOCKS)
    last = 0.0
    for block in range(200):
        now = asked(ladder, [block])["ideal"]
        assert now >= last
        last = now
    assert last <= 2 * BLOCK


def test_a_ladder_that_has_seen_nothing_takes_a_new_capacity_as_if_it_were_the_first() -> None:
    ladder = Ladder(BLOCK, 10**6)
    ladder.resize(100)
    assert ladder.sampling == 1


def test_shrinking_cuts_the_pooled_part_at_once() -> None:
    ladder = Ladder(BLOCK, 10)
    asked(ladder, range(10))
    ladder.resize(2)
    assert blocks(asked(ladder, range(10))) == (10, 2)


def rungs_of(*values: float) -> Rungs:
    rungs = Rungs()
    prompt, ideal, pooled, reachable, chosen, reported = values
    rungs.add(int(prompt), int(ideal), int(pooled), int(reachable), int(chosen), reported)
    return rungs


def test_gaps_are_shares_of_the_prompt_and_add_up_to_what_is_not_cached() -> None:
    shares = gaps(rungs_of(100, 80, 70, 55, 50, 30))
    assert shares == pytest.approx(
        {Gap.WORKLOAD: 0.2, Gap.CAPACITY: 0.1, Gap.SPREAD: 0.15, Gap.SPILL: 0.05, Gap.ENGINE: 0.2}
    )
    assert sum(shares.values()) == pytest.approx(0.7)


def test_a_rung_above_the_one_before_it_leaves_no_gap() -> None:
    assert gaps(rungs_of(100, 50, 40, 45, 45, 60)) == pytest.approx(
        {Gap.WORKLOAD: 0.5, Gap.CAPACITY: 0.1, Gap.SPREAD: 0, Gap.SPILL: 0, Gap.ENGINE: 0}
    )


def test_nothing_counted_has_no_gaps() -> None:
    assert gaps(Rungs()) == {}
