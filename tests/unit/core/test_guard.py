"""The guard rail: what it concludes from realised prefill times."""

import pytest

from prefixroute.core.guard import Guard, GuardConstants
from prefixroute.core.load import Load

COLD = 8_000.0
WARM = 800.0
RATE = 16_000.0


def see(guard: Guard, n: int, *, kept: float, matched: bool = True) -> None:
    """`n` prefills on engines on which a match saves the share `kept` of what it promises."""
    promised = WARM if matched else COLD
    for _ in range(n):
        guard.observe(COLD, promised, (COLD - kept * (COLD - promised)) / RATE)


def test_matches_count_in_full_until_something_is_known() -> None:
    guard = Guard()
    see(guard, 1_000, kept=0.0)
    assert guard.weight == 1.0
    assert guard.kept_ratio() is None


@pytest.mark.parametrize(("kept", "weight"), [(1.0, 1.0), (0.6, 1.0), (0.25, 0.5), (0.0, 0.0), (-1.0, 0.0)])
def test_the_weight_follows_what_is_kept_of_the_promise(kept: float, weight: float) -> None:
    guard = Guard()
    see(guard, 50, kept=1.0, matched=False)
    see(guard, 50, kept=kept)
    assert guard.kept_ratio() == pytest.approx(kept)
    assert guard.weight == pytest.approx(weight)


def test_the_weight_returns_by_itself() -> None:
    guard = Guard()
    see(guard, 100, kept=0.0, matched=False)
    see(guard, 300, kept=0.0)
    assert guard.weight < 0.01
    see(guard, 300, kept=1.0)
    assert guard.weight == 1.0


def test_short_prompts_and_half_matches_tell_nothing() -> None:
    guard = Guard()
    see(guard, 50, kept=1.0, matched=False)
    for _ in range(100):
        guard.observe(500.0, 50.0, 10.0)
        guard.observe(COLD, 0.7 * COLD, 10.0)
    assert guard.kept_ratio() is None


def test_evidence_is_a_setting() -> None:
    guard = Guard(GuardConstants(guard_evidence=1))
    see(guard, 2, kept=0.0, matched=False)
    see(guard, 2, kept=0.0)
    assert guard.weight == 0.0


def serve(load: Load, matched_tokens: int, took_s: float, now_s: float) -> None:
    flight = load.begin(0, 8_000, load.work(matched_tokens, 8_000), now_s, streamed=True, matched_tokens=matched_tokens)
    load.first_byte(flight, now_s + took_s)
    load.end(flight)


def test_work_counts_matches_for_what_they_are_worth() -> None:
    load = Load()
    load.add(0)
    cold = load.work(0, 8_000)
    assert load.work(7_900, 8_000) < cold / 10
    for n in range(200):
        serve(load, 7_900 if n % 2 else 0, 0.5, now_s=10.0 * n)  # hits are as slow as misses
    assert load.guard.weight < 0.01
    assert load.work(7_900, 8_000) == pytest.approx(cold, rel=0.01)
    for n in range(200, 700):
        serve(load, 7_900 if n % 2 else 0, 0.05 if n % 2 else 0.5, now_s=10.0 * n)
    assert load.guard.weight == 1.0
    assert load.work(7_900, 8_000) < cold / 10


def test_prefills_that_do_not_teach_speed_do_not_guard_either() -> None:
    load = Load()
    load.add(0)
    for n in range(100):
        flight = load.begin(0, 8_000, 8_000, 10.0 * n, streamed=False, matched_tokens=7_900 * (n % 2))
        load.first_byte(flight, 10.0 * n + 0.5)
        load.end(flight)
    assert load.guard.kept_ratio() is None


@pytest.mark.parametrize("n_before", [0, 50])
def test_one_stall_does_not_switch_affinity_off(n_before: int) -> None:
    """An instance that compiles, or waits for memory, answers a minute late: this says nothing of its cache."""
    guard = Guard()
    see(guard, n_before, kept=1.0, matched=False)
    see(guard, n_before, kept=1.0)
    guard.observe(COLD, WARM, 60.0)
    see(guard, 50, kept=1.0, matched=False)
    see(guard, 50, kept=1.0)
    assert guard.weight == 1.0


def test_a_tenth_of_slow_prompts_does_not_either() -> None:
    guard = Guard()
    for _ in range(50):
        see(guard, 10, kept=1.0, matched=False)
        see(guard, 9, kept=0.95)
        guard.observe(COLD, WARM, 20.0)
        assert guard.weight == 1.0
