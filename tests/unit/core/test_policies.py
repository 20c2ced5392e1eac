"""What each strategy does in situations that have a name."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import orjson
import pytest

from prefixroute.core.fleet import Instance
from prefixroute.core.load import prefill_work
from prefixroute.core.policies import blind
from prefixroute.core.policies.blind import LeastOutstanding, RandomPolicy, RoundRobin
from prefixroute.core.policies.expected_latency import ExpectedLatency, LatencyConstants
from prefixroute.core.policies.prefix_aware import PrefixAware
from prefixroute.core.policies.session import SessionPolicy
from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason
from prefixroute.core.prompt import Api, Prompt, read_prompt

INSTANCES = [Instance(f"gpu-{slot}", f"http://10.0.0.{slot}:8000", slot) for slot in range(8)]
FLEET_RATE = 12_000.0
L = 8_000
"""Tokens of the prompt asked about, where it matters."""


def chat(text: str, **more: Any) -> Prompt:
    return read_prompt(Api.CHAT, orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}), **more)


def facts(prompt: Prompt | None = None) -> Facts:
    return Facts(prompt or chat("x" * 4 * L), L, now_s=0.0, fleet_rate=FLEET_RATE)


def candidate(slot: int, matched: int = 0, **more: Any) -> Candidate:
    work = prefill_work(matched, max(1, L - matched), 32_000)
    return Candidate(INSTANCES[slot], matched_tokens=matched, work=work, prefill_rate=FLEET_RATE, **more)


def busy(*in_flight: int) -> list[Candidate]:
    return [Candidate(INSTANCES[slot], in_flight=n) for slot, n in enumerate(in_flight)]


def take(policy: Policy, asked: Facts, candidates: Sequence[Candidate], seed: int = 0) -> Decision:
    """Pick and carry out."""
    decision = policy.pick(asked, candidates, Random(seed))
    policy.record(asked, decision)
    return decision


# ------------------------------------------------------------------ blind


def test_random_reaches_everybody_evenly() -> None:
    rng = Random(1)
    found = Counter(RandomPolicy().pick(facts(), busy(0, 9, 0, 0), rng).instance.name for _ in range(4_000))
    assert len(found) == 4
    assert all(900 < n < 1_100 for n in found.values())


def test_round_robin_takes_turns() -> None:
    policy = RoundRobin()
    candidates = busy(0, 9, 0)
    slots = [take(policy, facts(), candidates).instance.slot for _ in range(7)]
    assert slots == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_lets_nobody_jump_the_queue_when_candidates_come_and_go() -> None:
    policy = RoundRobin()
    candidates = busy(0, 0, 0)
    assert take(policy, facts(), candidates).instance.slot == 0
    assert take(policy, facts(), [candidates[0], candidates[2]]).instance.slot == 2
    assert take(policy, facts(), candidates).instance.slot == 1
    assert take(policy, facts(), candidates).instance.slot == 0


def test_round_robin_does_not_remember_everybody_who_ever_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blind, "_MAX_REMEMBERED", 3)
    policy = RoundRobin()
    for n in range(10):
        take(policy, facts(), [Candidate(Instance(f"pod-{n}", "", n))])
    assert len(policy._last_turn) == 3
    # Those who are there still take turns.
    candidates = busy(0, 0, 0)
    assert [take(policy, facts(), candidates).instance.slot for _ in range(4)] == [0, 1, 2, 0]


def test_least_outstanding_takes_the_emptiest_and_equals_by_lot() -> None:
    rng = Random(1)
    picked = Counter(LeastOutstanding().pick(facts(), busy(3, 1, 2, 1), rng).instance.slot for _ in range(1_000))
    assert picked.keys() == {1, 3}
    assert min(picked.values()) > 400


# ------------------------------------------------------------------ expected latency


def test_an_idle_cold_fleet_is_filled_evenly() -> None:
    rng = Random(1)
    candidates = [candidate(slot) for slot in range(8)]
    picked = Counter(ExpectedLatency().pick(facts(), candidates, rng).instance.slot for _ in range(1_000))
    assert len(picked) == 8
    assert all(75 < n < 175 for n in picked.values())


def test_an_instance_measured_a_hair_faster_does_not_get_every_cold_prompt() -> None:
    rng = Random(1)
    candidates = [candidate(slot) for slot in range(4)]
    for slot, one in enumerate(candidates):
        one.prefill_rate = FLEET_RATE * (1 + slot / 100)
    picked = Counter(ExpectedLatency().pick(facts(), candidates, rng).instance.slot for _ in range(400))
    assert len(picked) == 4


def test_an_idle_holder_keeps_its_prefix() -> None:
    decision = take(
        ExpectedLatency(), facts(), [candidate(0), candidate(1, matched=6_144), candidate(2, matched=1_024)]
    )
    assert decision.instance.slot == 1
    assert decision.reason is Reason.AFFINITY


def test_a_holder_that_is_hardly_slower_keeps_its_prefix() -> None:
    holder, other = candidate(0, matched=256), candidate(1)
    holder.prefill_rate = 0.98 * FLEET_RATE
    assert {take(ExpectedLatency(), facts(), [holder, other], seed).instance.slot for seed in range(50)} == {0}


@pytest.mark.parametrize(("share", "slot"), [(0.95, 0), (1.05, 1)])
def test_it_spills_when_waiting_costs_more_than_computing_anew(share: float, slot: int) -> None:
    holder, other = candidate(0, matched=6_144), candidate(1)
    spared = other.work - holder.work
    # Break-even: P = spared + a·spared, where a = 1 + mean P / 16,000 grows with P itself.
    break_even = 2 * spared / (1 - spared / (2 * 16_000))
    holder.pending_work = share * break_even
    decision = take(ExpectedLatency(), facts(), [holder, other])
    assert decision.instance.slot == slot
    assert decision.reason is (Reason.AFFINITY if slot == 0 else Reason.SPILL)


def test_when_shedding_an_instance_that_holds_a_part_is_preferred() -> None:
    hot = candidate(0, matched=7_936, pending_work=80_000.0, in_flight=50)
    decision = take(ExpectedLatency(), facts(), [hot, candidate(1), candidate(2, matched=2_048)])
    assert decision.instance.slot == 2
    assert decision.reason is Reason.SPILL


def test_one_hot_instance_leaves_the_affinity_of_others_alone() -> None:
    hot = candidate(2, pending_work=200_000.0, in_flight=50, in_flight_tokens=400_000)
    decision = take(ExpectedLatency(), facts(), [candidate(0, matched=7_168), candidate(1), hot])
    assert decision.instance.slot == 0
    assert decision.reason is Reason.AFFINITY


def test_a_slow_instance_is_avoided_until_the_others_wait_longer() -> None:
    slow, fast = candidate(0), candidate(1)
    slow.prefill_rate = FLEET_RATE / 10
    assert take(ExpectedLatency(), facts(), [slow, fast]).instance.slot == 1
    fast.pending_work = 20 * L
    assert take(ExpectedLatency(), facts(), [slow, fast]).instance.slot == 0


def test_work_done_on_the_head_counts() -> None:
    candidates = [candidate(0, pending_work=8_000.0), candidate(1, pending_work=8_000.0, head_progress=7_000.0)]
    assert take(ExpectedLatency(), facts(), candidates).instance.slot == 1


def test_prefilling_beside_decodes_has_a_price() -> None:
    assert take(ExpectedLatency(), facts(), [candidate(0, in_flight=4), candidate(1)]).instance.slot == 1


def test_resident_tokens_weigh_by_the_size_of_the_cache() -> None:
    small = candidate(0, in_flight_tokens=60_000, capacity_tokens=100_000)
    large = candidate(1, in_flight_tokens=60_000, capacity_tokens=1_000_000)
    assert take(ExpectedLatency(), facts(), [small, large]).instance.slot == 1


def test_backlog_everywhere_makes_recomputing_dearer() -> None:
    """Near saturation computing twice is what the fleet cannot afford."""
    candidates = [candidate(0, matched=6_144, pending_work=27_000.0), candidate(1)]
    assert take(ExpectedLatency(), facts(), candidates).instance.slot == 1
    for one in candidates:
        one.pending_work += 50_000
    assert take(ExpectedLatency(), facts(), candidates).instance.slot == 0


def test_without_a_match_the_reason_is_a_cold_prompt_or_no_key() -> None:
    assert take(ExpectedLatency(), facts(), [candidate(0)]).reason is Reason.COLD
    assert take(ExpectedLatency(), facts(read_prompt(Api.POOLING, b"{}")), [candidate(0)]).reason is Reason.LOAD


def test_the_charge_for_recomputing_can_be_set() -> None:
    indifferent = ExpectedLatency(LatencyConstants(affinity=0))
    holder, other = candidate(0, matched=6_144), candidate(1)
    holder.pending_work = 1.1 * (other.work - holder.work)
    assert take(indifferent, facts(), [holder, other]).instance.slot == 1
    assert take(ExpectedLatency(), facts(), [holder, other]).instance.slot == 0


# ------------------------------------------------------------------ SageMaker's PREFIX_AWARE


def prefix_aware(length: int = 1_024, threshold: int = 4, max_prefixes: int = 1_000) -> PrefixAware:
    return PrefixAware(length, threshold, max_prefixes, seed=1)


def test_requests_of_one_prefix_go_to_one_instance() -> None:
    policy = prefix_aware()
    first = take(policy, facts(chat("p" * 2_000)), busy(0, 0, 0, 0))
    assert first.reason is Reason.COLD
    for seed in range(20):
        again = take(policy, facts(chat("p" * 2_000)), busy(3, 3, 3, 3), seed)
        assert again.instance is first.instance
        assert again.reason is Reason.AFFINITY


def test_a_new_prefix_starts_where_fewest_are_in_flight() -> None:
    for seed in range(20):
        assert take(prefix_aware(), facts(chat(f"{seed}")), busy(2, 1, 0, 3), seed).instance.slot == 2


@pytest.mark.parametrize(("in_flight", "stays"), [(0, True), (3, True), (4, False), (5, False), (100, False)])
def test_the_prefix_stays_until_the_threshold_is_reached(in_flight: int, stays: bool) -> None:
    policy = prefix_aware(threshold=4)
    take(policy, facts(chat("p")), busy(0, 9))
    decision = take(policy, facts(chat("p")), busy(in_flight, 2))
    assert decision.instance.slot == (0 if stays else 1)
    assert decision.reason is (Reason.AFFINITY if stays else Reason.SPILL)


def test_beyond_the_threshold_it_goes_where_fewest_of_the_others_are() -> None:
    policy = prefix_aware(threshold=4)
    take(policy, facts(chat("p")), busy(0, 9, 9, 9))
    assert take(policy, facts(chat("p")), busy(4, 7, 5, 6)).instance.slot == 2


def test_a_spill_does_not_move_the_prefix() -> None:
    policy = prefix_aware(threshold=4)
    take(policy, facts(chat("p")), busy(0, 9))
    for _ in range(5):
        assert take(policy, facts(chat("p")), busy(4, 0)).instance.slot == 1
    assert take(policy, facts(chat("p")), busy(3, 0)).instance.slot == 0


def test_a_prefix_whose_instance_cannot_serve_moves_and_stays_there() -> None:
    policy = prefix_aware()
    take(policy, facts(chat("p")), busy(0, 9, 9))
    home_is_gone = busy(0, 5, 0)[1:]
    moved = take(policy, facts(chat("p")), home_is_gone)
    assert (moved.instance.slot, moved.reason) == (2, Reason.COLD)
    assert take(policy, facts(chat("p")), busy(0, 0, 3)).instance.slot == 2


def test_a_retry_elsewhere_does_not_move_the_prefix() -> None:
    """Its instance answered that it is busy: what it holds, it holds."""
    policy = prefix_aware()
    take(policy, facts(chat("p")), busy(0, 9, 9))
    tried = replace(facts(chat("p")), is_retry=True)
    again = take(policy, tried, busy(0, 5, 0)[1:])
    assert (again.instance.slot, again.reason) == (2, Reason.SPILL)
    assert take(policy, facts(chat("p")), busy(0, 0, 0)).instance.slot == 0


def test_a_new_prefix_stays_where_a_retry_brought_it() -> None:
    policy = prefix_aware()
    tried = replace(facts(chat("p")), is_retry=True)
    assert take(policy, tried, busy(0, 0, 9)[1:]).reason is Reason.COLD
    assert take(policy, facts(chat("p")), busy(0, 3, 0)).instance.slot == 1


def test_a_single_candidate_is_plain_and_remembers_nothing() -> None:
    policy = prefix_aware()
    assert take(policy, facts(chat("p")), busy(50)).reason is Reason.LOAD
    assert take(policy, facts(chat("p")), busy(5, 0)).instance.slot == 1


def test_ids_separate_applications_that_share_a_prefix() -> None:
    policy = prefix_aware()
    take(policy, facts(chat("p", prefix_aware_id="a")), busy(0, 9))
    take(policy, facts(chat("p", prefix_aware_id="b")), busy(9, 0))
    take(policy, facts(chat("p")), busy(9, 9, 0))
    assert take(policy, facts(chat("p", prefix_aware_id="a")), busy(1, 0, 0)).instance.slot == 0
    assert take(policy, facts(chat("p", prefix_aware_id="b")), busy(0, 1, 0)).instance.slot == 1
    assert take(policy, facts(chat("p")), busy(0, 0, 1)).instance.slot == 2


def test_models_that_share_a_prefix_have_homes_of_their_own() -> None:
    """Else two models on different instances would move it to and fro, and neither would find its cache."""
    policy = prefix_aware()
    ours, theirs = busy(0, 0, 0, 0)[:2], busy(0, 0, 0, 0)[2:]
    other = read_prompt(Api.CHAT, b'{"model":"n","messages":[{"role":"user","content":"p"}]}')
    home = take(policy, facts(chat("p")), ours).instance
    assert take(policy, facts(other), theirs).reason is Reason.COLD
    again = take(policy, facts(chat("p")), ours)
    assert (again.instance, again.reason) == (home, Reason.AFFINITY)


def test_an_id_and_a_prefix_are_not_taken_for_a_longer_id() -> None:
    policy = prefix_aware()
    # The model "m" stands between the two: one after the other, both read "ammc".
    take(policy, facts(chat("mc", prefix_aware_id="a")), busy(0, 9))
    assert take(policy, facts(chat("c", prefix_aware_id="am")), busy(3, 0)).reason is Reason.COLD


@pytest.mark.parametrize(("same", "reason"), [(1_024, Reason.AFFINITY), (1_023, Reason.COLD)])
def test_on_the_chat_path_the_length_counts_characters_of_the_text(same: int, reason: Reason) -> None:
    policy = prefix_aware(length=1_024)
    take(policy, facts(chat("é" * same + "one end")), busy(0, 9))
    assert take(policy, facts(chat("é" * same + "another")), busy(0, 9)).reason is reason


@pytest.mark.parametrize(("same", "reason"), [(1_024, Reason.AFFINITY), (1_023, Reason.COLD)])
def test_on_invocations_the_length_counts_bytes_of_the_body(same: int, reason: Reason) -> None:
    def invocation(end: str) -> Prompt:
        start = b'{"messages":[{"role":"user","content":"'
        # Two bytes a character: were characters counted, both ends would be beyond the length.
        text = "é".encode() * same
        return read_prompt(Api.INVOCATIONS, (start + text)[:same] + end.encode() + b'"}]}')

    policy = prefix_aware(length=1_024)
    take(policy, facts(invocation("one end")), busy(0, 9))
    assert take(policy, facts(invocation("another")), busy(0, 9)).reason is reason


def test_what_is_shorter_than_the_length_counts_whole() -> None:
    policy = prefix_aware(length=65_536)
    take(policy, facts(chat("short")), busy(0, 9))
    assert take(policy, facts(chat("short")), busy(0, 9)).reason is Reason.AFFINITY
    assert take(policy, facts(chat("short, but longer")), busy(0, 9)).reason is Reason.COLD


def test_a_request_without_a_body_goes_by_load() -> None:
    policy = prefix_aware()
    empty = facts(read_prompt(Api.OTHER, b""))
    assert take(policy, empty, busy(3, 1, 2)).instance.slot == 1
    assert take(policy, empty, busy(3, 1, 2)).reason is Reason.LOAD


def test_the_least_recently_used_prefix_is_forgotten() -> None:
    policy = prefix_aware(max_prefixes=2)
    take(policy, facts(chat("a")), busy(0, 9))
    take(policy, facts(chat("b")), busy(0, 9))
    take(policy, facts(chat("a")), busy(0, 9))
    take(policy, facts(chat("c")), busy(0, 9))
    assert take(policy, facts(chat("a")), busy(0, 9)).reason is Reason.AFFINITY
    assert take(policy, facts(chat("c")), busy(0, 9)).reason is Reason.AFFINITY
    assert take(policy, facts(chat("b")), busy(0, 9)).reason is Reason.COLD


def test_a_spill_is_a_use_of_the_prefix() -> None:
    policy = prefix_aware(max_prefixes=2)
    take(policy, facts(chat("a")), busy(0, 9))
    take(policy, facts(chat("b")), busy(0, 9))
    assert take(policy, facts(chat("a")), busy(4, 0)).reason is Reason.SPILL
    take(policy, facts(chat("c")), busy(0, 9))
    assert take(policy, facts(chat("a")), busy(0, 9)).reason is Reason.AFFINITY


def copies(*in_flight: int, machines: str = "llrr") -> list[Candidate]:
    """Copies of a model on machines of one letter each."""
    return [Candidate(INSTANCES[slot], in_flight=n, machine=machines[slot]) for slot, n in enumerate(in_flight)]


@pytest.mark.parametrize(
    ("in_flight", "slot"),
    [
        ((3, 9, 9, 9), 0),  # one below the threshold: it stays
        ((4, 3, 0, 0), 1),  # the copy beside it, though it is the busiest that has room
        ((4, 4, 1, 0), 3),  # which has none at the threshold itself
        ((4, 5, 9, 8), 3),  # elsewhere, even above the threshold: less than beside it or not
        ((9, 4, 4, 5), 2),
    ],
)
def test_of_copies_one_on_the_same_machine_that_has_room_goes_before_another_machine(
    in_flight: tuple[int, ...], slot: int
) -> None:
    policy = prefix_aware(threshold=4)
    take(policy, facts(chat("p")), copies(0, 9, 9, 9))
    decision = take(policy, facts(chat("p")), copies(*in_flight))
    assert decision.instance.slot == slot
    assert decision.reason is (Reason.AFFINITY if slot == 0 else Reason.SPILL)
    # And the prefix has not moved.
    assert take(policy, facts(chat("p")), copies(3, 0, 0, 0)).instance.slot == 0


def test_of_several_copies_beside_it_the_one_with_fewest_in_flight_is_taken_and_equals_by_lot() -> None:
    policy = prefix_aware(threshold=4)
    take(policy, facts(chat("p")), copies(0, 9, 9, 9, 9, machines="lllll"))
    beside = [take(policy, facts(chat("p")), copies(4, 3, 1, 1, 0, machines="llllr"), seed) for seed in range(100)]
    picked = Counter(decision.instance.slot for decision in beside)
    assert picked.keys() == {2, 3}
    assert min(picked.values()) > 20


def test_of_copies_that_are_all_on_one_machine_and_all_full_the_least_full_other_one_is_taken() -> None:
    policy = prefix_aware(threshold=4)
    take(policy, facts(chat("p")), copies(0, 9, 9, machines="lll"))
    decision = take(policy, facts(chat("p")), copies(4, 6, 5, machines="lll"))
    assert (decision.instance.slot, decision.reason) == (2, Reason.SPILL)


def test_instances_that_are_no_copies_are_beside_nobody() -> None:
    """Else all of them would be on one machine, and there only those with room would do."""
    policy = prefix_aware(threshold=4)
    take(policy, facts(chat("p")), busy(0, 9, 9))
    mixed = [*busy(4, 3), Candidate(INSTANCES[2], in_flight=2, machine="l")]
    assert take(policy, facts(chat("p")), mixed).instance.slot == 2


def test_where_there_is_one_model_what_requests_call_it_makes_no_difference() -> None:
    policy = PrefixAware(1_024, 4, 1_000, seed=1, by_model=False)
    other = read_prompt(Api.CHAT, b'{"model":"n","messages":[{"role":"user","content":"p"}]}')
    take(policy, facts(chat("p")), busy(0, 9))
    assert take(policy, facts(other), busy(3, 0)).reason is Reason.AFFINITY
    none = read_prompt(Api.CHAT, b'{"messages":[{"role":"user","content":"p"}]}')
    assert take(policy, facts(none), busy(3, 0)).reason is Reason.AFFINITY


def test_who_succeeds_knows_the_homes_and_goes_on_with_its_own_threshold() -> None:
    earlier, policy = prefix_aware(threshold=4), prefix_aware(threshold=2)
    take(earlier, facts(chat("p")), busy(0, 9))
    assert take(policy, facts(chat("p")), busy(1, 0)).reason is Reason.COLD
    policy.succeeds(earlier)
    assert take(policy, facts(chat("p")), busy(1, 0)).instance.slot == 0
    assert take(policy, facts(chat("p")), busy(2, 0)).reason is Reason.SPILL


def test_a_stored_response_gives_its_prefix_no_home() -> None:
    policy = prefix_aware()
    policy.record(facts(chat("p")), Decision(busy(0)[0], Reason.STORED))
    assert take(policy, facts(chat("p")), busy(9, 0)).reason is Reason.COLD


# ------------------------------------------------------------------ sessions


def session_policy(bounded_load: float = 1.25) -> SessionPolicy:
    return SessionPolicy(bounded_load, seed=1)


def test_a_session_stays_where_it_is_and_many_spread() -> None:
    homes = Counter[int]()
    for n in range(400):
        asked = facts(chat("x", session_id=f"session {n}"))
        first = take(session_policy(), asked, busy(*[0] * 8))
        assert first.reason is Reason.SESSION
        assert take(session_policy(), asked, busy(*[0] * 8)[::-1], seed=n).instance is first.instance
        homes[first.instance.slot] += 1
    assert len(homes) == 8
    assert all(25 < n < 80 for n in homes.values())


def test_a_session_whose_instance_is_overfull_spills_and_comes_back() -> None:
    asked = facts(chat("x", session_id="s"))
    home = take(session_policy(), asked, busy(0, 0, 0, 0)).instance.slot
    in_flight = [8] * 4
    in_flight[home] = 11  # the bound is ⌈1.25 · 36 / 4⌉ = 12
    assert take(session_policy(), asked, busy(*in_flight)).instance.slot == home
    in_flight[home] = 12  # and still 12, for 37
    spilled = take(session_policy(), asked, busy(*in_flight))
    assert spilled.instance.slot != home
    assert spilled.reason is Reason.SPILL
    # Everybody spills to the same next one, so that the session is warm there too.
    assert take(session_policy(), asked, busy(*in_flight), seed=9).instance is spilled.instance


def test_a_session_with_a_few_requests_at_once_is_no_hot_spot() -> None:
    asked = facts(chat("x", session_id="s"))
    home = take(session_policy(), asked, busy(0, 0, 0, 0)).instance.slot
    in_flight = [0] * 4
    in_flight[home] = 3
    assert take(session_policy(), asked, busy(*in_flight)).instance.slot == home
    in_flight[home] = 4
    assert take(session_policy(), asked, busy(*in_flight)).reason is Reason.SPILL


def test_sessions_that_know_nothing_of_each_other_depend_on_the_seed() -> None:
    asked = [facts(chat("x", session_id=f"{n}")) for n in range(50)]
    homes = [[take(SessionPolicy(1.25, seed), one, busy(*[0] * 8)).instance.slot for one in asked] for seed in (1, 2)]
    assert homes[0] != homes[1]


@pytest.mark.parametrize("session_id", [None, ""])
def test_a_request_without_a_session_goes_where_fewest_are_in_flight(session_id: str | None) -> None:
    decision = take(session_policy(), facts(chat("x", session_id=session_id)), busy(2, 1, 3))
    assert decision.instance.slot == 1
    assert decision.reason is Reason.LOAD


@pytest.mark.parametrize("odd", ["\udcff", "é", "\x00"])
def test_ids_of_any_characters_are_ids(odd: str) -> None:
    """Headers are bytes: what is no UTF-8 comes as lone surrogates."""
    assert take(session_policy(), facts(chat("x", session_id=odd)), busy(0, 0)).reason is Reason.SESSION
    assert take(prefix_aware(), facts(chat("x", prefix_aware_id=odd)), busy(0, 0)).reason is Reason.COLD


def test_a_candidate_shows_its_name_and_facts_and_no_url() -> None:
    shown = repr(Candidate(INSTANCES[0], matched_tokens=7))
    assert shown.startswith("Candidate(gpu-0, ")
    assert "matched_tokens=7" in shown
    assert "http" not in shown
