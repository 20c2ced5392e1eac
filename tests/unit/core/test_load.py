"""What is counted for an instance, and what is learned from its first bytes."""

import pytest

from prefixroute.core.load import Flight, Load, LoadConstants, prefill_work

RATE = 10_000.0
"""Tokens per second, where a test has no reason for another speed."""


def make_load(n_instances: int = 1) -> Load:
    load = Load()
    for slot in range(n_instances):
        load.add(slot)
    return load


def begin(load: Load, work: float, now_s: float = 0.0, *, slot: int = 0, streamed: bool = True) -> Flight:
    return load.begin(slot, int(work), work, now_s, streamed=streamed)


def counted(load: Load, slot: int = 0) -> tuple[int, int, float]:
    own = load.of(slot)
    return own.in_flight, own.in_flight_tokens, own.pending_work


def rate(load: Load, slot: int = 0) -> float:
    return load.observe(slot, 0.0, load.fleet_rate())[1]


def progress(load: Load, now_s: float, fleet_rate: float = RATE, slot: int = 0) -> float:
    return load.observe(slot, now_s, fleet_rate)[2]


def pending(load: Load, now_s: float, fleet_rate: float = RATE, slot: int = 0) -> float:
    return load.observe(slot, now_s, fleet_rate)[0].pending_work


# ------------------------------------------------------------------ work


def test_work_is_new_tokens_weighted_by_position() -> None:
    assert prefill_work(0, 32_000, 32_000) == 48_000
    assert prefill_work(32_000, 1_000, 32_000) == pytest.approx(1_000 * (1 + 32_500 / 32_000))


def test_a_prompt_in_two_pieces_is_as_much_work_as_in_one() -> None:
    whole = prefill_work(0, 5_000, 32_000)
    assert prefill_work(0, 2_000, 32_000) + prefill_work(2_000, 3_000, 32_000) == pytest.approx(whole)


@pytest.mark.parametrize("matched", [1_000, 1_024, 5_000])
def test_of_a_prompt_that_is_all_cached_one_token_is_computed(matched: int) -> None:
    assert make_load().work(matched, 1_000) == pytest.approx(1 + (matched + 0.5) / 32_000)


# ------------------------------------------------------------------ counting


def test_a_flight_counts_from_its_beginning_and_is_pending_until_its_first_byte() -> None:
    load = make_load()
    flight = begin(load, 600)
    assert counted(load) == (1, 600, 600)
    load.first_byte(flight, 0.1)
    assert counted(load) == (1, 600, 0)
    load.end(flight)
    assert counted(load) == (0, 0, 0)


def test_a_flight_without_a_first_byte_gives_its_work_back_at_the_end() -> None:
    load = make_load()
    first, second = begin(load, 600), begin(load, 300)
    load.end(first)
    assert counted(load) == (1, 300, 300)
    load.first_byte(first, 1.0)  # the end came first
    assert counted(load) == (1, 300, 300)
    load.end(second)
    assert counted(load) == (0, 0, 0)


def test_an_idle_instance_has_nothing_pending_whatever_floats_leave_over() -> None:
    load = make_load()
    flights = [begin(load, work) for work in (0.1, 0.2, 0.3, 1e9, 0.7)]
    for flight in (flights[3], flights[0], flights[4], flights[1], flights[2]):
        load.end(flight)
    assert load.of(0).pending_work == 0.0


def test_flights_of_an_instance_that_left_the_fleet_end_well_and_teach_nothing() -> None:
    load = make_load(2)
    streamed, silent = begin(load, 5_000), begin(load, 5_000, streamed=False)
    own = load.of(0)
    load.remove(0)
    fleet_rate = load.fleet_rate()
    load.first_byte(streamed, 1.0)
    load.first_byte(silent, 2.0)
    load.end(streamed)
    load.end(silent)
    assert (own.in_flight, own.in_flight_tokens, own.pending_work) == (0, 0, 0)
    assert load.fleet_rate() == fleet_rate


def test_a_slot_given_out_again_starts_empty_while_old_flights_end() -> None:
    load = make_load()
    old = begin(load, 5_000)
    load.remove(0)
    load.add(0)
    assert counted(load) == (0, 0, 0)
    new = begin(load, 700)
    load.end(old)
    assert counted(load) == (1, 700, 700)
    load.end(new)


def test_the_mean_work_follows_what_is_dispatched() -> None:
    load = make_load()
    assert load.mean_work == 2_000
    begin(load, 12_000)
    assert load.mean_work == pytest.approx(2_000 + 0.01 * 10_000)


# ------------------------------------------------------------------ speed


def test_before_anything_is_measured_everybody_has_the_prior_speed() -> None:
    load = make_load(2)
    assert load.fleet_rate() == 12_000
    assert rate(load, 1) == 12_000


def test_a_first_byte_teaches_speed_by_the_formula() -> None:
    load = make_load(2)
    load.first_byte(begin(load, 3_000), 0.5)
    load.first_byte(begin(load, 4_000, 10.0), 10.4)
    tokens, time_s = 0.98 * 3_000 + 4_000, 0.98 * 0.5 + 0.4
    fleet = (tokens + 12_000 * 2) / (time_s + 2)
    assert load.fleet_rate() == pytest.approx(fleet)
    assert rate(load, 0) == pytest.approx((tokens + fleet * 20) / (time_s + 20))
    assert rate(load, 1) == pytest.approx(fleet)


def test_the_fleet_speed_adds_up_what_all_instances_taught() -> None:
    load = make_load(2)
    load.first_byte(begin(load, 3_000, slot=0), 0.1)
    load.first_byte(begin(load, 1_000, slot=1), 0.5)
    assert load.fleet_rate() == pytest.approx((4_000 + 24_000) / (0.6 + 2))
    assert rate(load, 0) > load.fleet_rate() > rate(load, 1)


def test_time_counts_from_the_previous_first_byte_when_prompts_queue() -> None:
    load = make_load()
    first, second = begin(load, 5_000), begin(load, 5_000)
    load.first_byte(first, 1.0)
    load.first_byte(second, 2.0)
    assert load.fleet_rate() == pytest.approx((4_900 + 5_000 + 24_000) / (0.98 + 1 + 2))


@pytest.mark.parametrize(("work", "taught"), [(255, False), (256, True)])
def test_short_prefills_teach_no_speed(work: float, taught: bool) -> None:
    load = make_load()
    load.first_byte(begin(load, work), 1.0)
    assert (load.fleet_rate() != 12_000) is taught


def test_answers_that_are_not_sound_or_not_streamed_teach_no_speed() -> None:
    load = make_load()
    load.first_byte(begin(load, 5_000), 1.0, learn=False)
    load.first_byte(begin(load, 5_000, 2.0, streamed=False), 2.1)
    assert load.fleet_rate() == 12_000


def test_a_first_byte_at_the_moment_of_the_last_one_teaches_nothing() -> None:
    load = make_load()
    first, second = begin(load, 5_000), begin(load, 5_000)
    load.first_byte(first, 1.0)
    fleet_rate = load.fleet_rate()
    load.first_byte(second, 1.0)
    assert load.fleet_rate() == fleet_rate


def test_a_second_first_byte_changes_nothing() -> None:
    load = make_load()
    flight = begin(load, 5_000)
    load.first_byte(flight, 1.0)
    before = load.fleet_rate(), load.of(0).last_first_byte_s
    load.first_byte(flight, 7.0)
    assert (load.fleet_rate(), load.of(0).last_first_byte_s) == before


def test_an_instance_that_was_lost_starts_over_and_leaves_the_fleet_speed_too() -> None:
    load = make_load(2)
    load.first_byte(begin(load, 9_000, slot=0), 0.1)
    load.first_byte(begin(load, 1_000, slot=1), 0.5)
    load.relearn(0)
    assert load.fleet_rate() == pytest.approx((1_000 + 24_000) / (0.5 + 2))
    assert rate(load, 0) == load.fleet_rate()


# ------------------------------------------------------------------ progress on the oldest prefill


def test_the_oldest_prefill_progresses_with_the_clock_up_to_nine_tenths() -> None:
    load = make_load()
    begin(load, 10_000)
    begin(load, 50_000)
    assert progress(load, 0.0) == 0
    assert progress(load, 0.5) == pytest.approx(0.5 * RATE)
    assert progress(load, 0.9) == pytest.approx(9_000)
    assert progress(load, 5.0) == pytest.approx(9_000)
    assert progress(load, 100.0) == 0  # it hangs


def test_an_instance_without_pending_prefill_makes_no_progress() -> None:
    load = make_load()
    assert progress(load, 5.0) == 0
    load.first_byte(begin(load, 10_000), 1.0)
    assert progress(load, 5.0) == 0


def test_the_next_prefill_starts_at_the_first_byte_of_the_last_one() -> None:
    load = make_load()
    first, _ = begin(load, 10_000), begin(load, 10_000)
    load.first_byte(first, 10_000 / RATE)
    assert progress(load, 1.25) == pytest.approx(0.25 * RATE)


def test_a_clock_that_seems_to_run_backwards_is_no_negative_progress() -> None:
    load = make_load()
    begin(load, 10_000, now_s=5.0)
    assert progress(load, 4.0) == 0


def test_an_answer_that_refuses_at_once_does_not_hide_the_progress_of_others() -> None:
    load = make_load()
    begin(load, 10_000)
    invalid = begin(load, 10, now_s=0.4)
    load.first_byte(invalid, 0.5, learn=False)
    assert progress(load, 0.5) == pytest.approx(0.5 * RATE)


def test_an_answer_that_refuses_at_once_does_not_make_others_look_fast() -> None:
    load = make_load()
    slow, invalid = begin(load, 10_000), begin(load, 10)
    load.first_byte(invalid, 0.9, learn=False)
    load.first_byte(slow, 1.0)
    assert load.fleet_rate() == pytest.approx((10_000 + 24_000) / (1 + 2))


# ------------------------------------------------------------------ answers that are not streamed


def test_a_silent_prefill_is_over_when_the_clock_says_so() -> None:
    load = make_load()
    flight = begin(load, 12_000, streamed=False)  # one second at the prior speed
    assert pending(load, 0.99) == 12_000
    assert pending(load, 1.01) == 0
    assert counted(load) == (1, 12_000, 0)
    load.first_byte(flight, 5.0)
    load.end(flight)
    assert counted(load) == (0, 0, 0)


def test_silent_prefills_end_one_after_the_other() -> None:
    load = make_load()
    for _ in range(3):
        begin(load, 12_000, streamed=False)
    assert [pending(load, now_s) for now_s in (0.5, 1.5, 2.5, 3.5)] == [36_000, 24_000, 12_000, 0]


def test_a_silent_prefill_waits_for_what_is_left_of_those_before_it() -> None:
    load = make_load()
    begin(load, 12_000)
    begin(load, 12_000, now_s=0.5, streamed=False)  # half of the first is done: over at 2.0
    assert pending(load, 1.99, fleet_rate=12_000) == 24_000
    assert pending(load, 2.01, fleet_rate=12_000) == 12_000


def test_a_silent_flight_that_ends_early_does_not_hold_up_those_behind_it() -> None:
    load = make_load()
    first, _ = begin(load, 12_000, streamed=False), begin(load, 12_000, streamed=False)
    load.end(first)
    assert pending(load, 0.0) == 12_000
    assert pending(load, 2.01) == 0


def test_the_prefill_after_a_silent_one_starts_when_that_one_is_thought_over() -> None:
    load = make_load()
    begin(load, 12_000, streamed=False)
    begin(load, 12_000)
    assert progress(load, 1.5, fleet_rate=12_000) == pytest.approx(6_000)


def test_a_silent_prefill_is_not_charged_to_the_streamed_one_behind_it() -> None:
    load = make_load()
    begin(load, 12_000, streamed=False)  # over at 1.0, though nobody looked
    load.first_byte(begin(load, 12_000), 2.0)
    assert load.fleet_rate() == pytest.approx(12_000)


def test_a_silent_answer_that_comes_early_is_believed() -> None:
    load = make_load()
    flight = begin(load, 12_000, streamed=False)
    load.first_byte(flight, 0.25)
    assert load.of(0).pending_work == 0
    assert load.of(0).last_first_byte_s == 0.25


def test_constants_can_be_set() -> None:
    load = Load(LoadConstants(prior_prefill_tokens_per_s=500, position_scale_tokens=1_000, head_progress_cap=0.5))
    load.add(0)
    begin(load, 100)
    assert load.fleet_rate() == 500
    assert load.work(0, 1_000) == 1_500
    assert progress(load, 5.0) == 50


@pytest.mark.parametrize("n_before", [0, 100])
def test_one_stall_does_not_make_the_fleet_slow(n_before: int) -> None:
    """An engine that compiles answers its first prompt a minute late."""
    load = Load()
    load.add(0)
    now_s = 0.0
    for took_s in [*[0.2] * n_before, 60.0]:
        flight = load.begin(0, 2_000, 2_000, now_s, streamed=True)
        load.first_byte(flight, now_s + took_s)
        load.end(flight)
        now_s += 100.0
    assert load.fleet_rate() > 5_000


def test_an_engine_that_is_a_hundred_times_slower_is_found_out_all_the_same() -> None:
    load = Load()
    load.add(0)
    for n in range(30):
        flight = load.begin(0, 1_000, 1_000, 100.0 * n, streamed=True)
        load.first_byte(flight, 100.0 * n + 10.0)
        load.end(flight)
    assert load.fleet_rate() < 400


def test_an_instance_that_hangs_gets_slower_the_longer_it_does() -> None:
    load = Load()
    load.add(0)
    load.begin(0, 12_000, 12_000.0, 0.0, streamed=True)  # a second at the speed assumed at first
    rates = [load.observe(0, now_s, load.fleet_rate())[1] for now_s in (0.5, 2.0, 9.0, 18.0, 90.0)]
    assert rates[:3] == [12_000.0] * 3
    # Patience is four times a second, and five more.
    assert rates[3:] == [pytest.approx(6_000), pytest.approx(1_200)]
