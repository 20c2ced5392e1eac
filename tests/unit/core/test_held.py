"""Requests that are held: when, for whom, in which order they go, and what others see of them."""

from random import Random
from typing import Any

import pytest

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance, ProbeFailure
from prefixroute.core.held import Held, HeldRequests, HoldConstants
from prefixroute.core.lease import Lease
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.prompt import Prompt
from prefixroute.core.request import Request
from prefixroute.core.router import Router
from prefixroute.core.survey import Survey
from prefixroute.errors import NoInstanceError, TooManyRequestsError

BLOCK = 16
# Pending work above which an instance is busy here: 0.3 s at the speed assumed at first.
LIMIT = 3_600


class Queue:
    """A router and what its held requests were granted, in order."""

    def __init__(self, n: int = 1, models: dict[int, str] | None = None, **hold: Any) -> None:
        instances = [
            Instance(f"gpu-{i}", f"http://gpu-{i}", i, frozenset({models[i]}) if models else None) for i in range(n)
        ]
        constants = HoldConstants(**{"hold_s": 0.3, **hold})
        self.router = Router(instances, ExpectedLatency(), BlockHasher(BLOCK, 1), Random(1), hold=constants)
        for instance in instances:
            self.router.fleet.probe_passed(instance.name)
        self.granted: list[tuple[str, Lease | None]] = []

    def enter(
        self, name: str, n_tokens: int = 2_000, *, now_s: float = 0.0, chain: list[int] | None = None, model: str = "m"
    ) -> Lease | Held:
        request = Request(Prompt(model, b"", name.encode(), n_tokens, stream=True), chain or [], n_tokens)
        return self.router.enter(request, now_s=now_s, grant=lambda lease: self.granted.append((name, lease)))

    def take(self, name: str, n_tokens: int = 2_000, **more: Any) -> Lease:
        """Enters one that is not held."""
        lease = self.enter(name, n_tokens, **more)
        assert isinstance(lease, Lease)
        return lease

    def hold(self, name: str, n_tokens: int = 2_000, **more: Any) -> Held:
        """Enters one that is."""
        held = self.enter(name, n_tokens, **more)
        assert isinstance(held, Held)
        return held

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.granted]

    def lease_of(self, name: str) -> Lease:
        lease = dict(self.granted)[name]
        assert lease is not None
        return lease

    def held_work(self, slot: int = 0) -> float:
        return self.router.held.by_slot.get(slot, 0.0)


def test_nothing_is_held_while_the_instance_has_room() -> None:
    queue = Queue()
    first = queue.take("first", LIMIT * 2)
    assert first.decision.candidate.pending_work == 0
    queue.hold("second")
    first.first_byte(2.0, learn=False)
    queue.take("third", now_s=2.0)


def test_a_request_is_held_when_its_instance_is_busy_and_goes_when_it_has_room() -> None:
    queue = Queue()
    first = queue.take("first", 10_000)
    queue.hold("second")
    assert len(queue.router.held) == 1
    queue.router.release(0.1)
    assert queue.granted == []
    first.first_byte(1.0, learn=False)
    queue.router.release(1.0)
    assert queue.names == ["second"]
    assert queue.lease_of("second").instance.name == "gpu-0"
    assert len(queue.router.held) == 0
    assert queue.router.load.of(0).in_flight == 2


def test_work_done_on_the_oldest_prompt_makes_room_by_the_clock() -> None:
    queue = Queue()
    queue.take("first", 10_000)
    queue.hold("second")
    queue.router.release(0.65)  # 11,560 of work, of which 7,800 are done
    assert queue.names == []
    queue.router.release(0.7)
    assert queue.names == ["second"]


def test_a_burst_is_let_in_only_as_far_as_there_is_room() -> None:
    queue = Queue()
    first = queue.take("first", 10_000)
    for i in range(5):
        queue.hold(f"held-{i}")
    first.first_byte(1.0, learn=False)
    queue.router.release(1.0)
    # 2,063 of work each: the second finds room, the third does not.
    assert queue.names == ["held-0", "held-1"]


def test_least_left_to_compute_goes_first_weighed_against_the_time_waited() -> None:
    queue = Queue(hold_s=0.05)
    first = queue.take("first", 10_000)
    queue.hold("long, old", 3_000, now_s=0.0)
    queue.hold("short", 1_000, now_s=3.9)
    queue.hold("long, new", 3_000, now_s=3.9)
    first.first_byte(4.0, learn=False)
    for now_s in (4.0, 5.0, 6.0):
        queue.router.release(now_s)
        for _, lease in queue.granted:
            assert lease is not None
            lease.first_byte(now_s, learn=False)
    # 3,141 − 500 · 4 s against 1,016 − 500 · 0.1 s
    assert queue.names == ["short", "long, old", "long, new"]


def test_waiting_long_enough_outweighs_any_match() -> None:
    queue = Queue(hold_s=0.05)
    first = queue.take("first", 10_000)
    queue.hold("long, old", 3_000, now_s=0.0)
    queue.hold("short", 1_000, now_s=5.0)
    first.first_byte(5.0, learn=False)
    queue.router.release(5.0)
    assert queue.names[0] == "long, old"


def test_those_that_match_what_came_in_since_go_before_those_that_do_not() -> None:
    """Matches are looked up when there is room, not when a request came."""
    queue = Queue(hold_s=0.05)
    shared = list(range(1_000, 1_000 + 3_000 // BLOCK))
    first = queue.take("first", 10_000)
    queue.hold("cold", 3_000, now_s=0.0, chain=list(range(3_000 // BLOCK)))
    queue.hold("warm", 3_000, now_s=0.1, chain=shared)
    queue.router.index.record(shared, 0)
    first.first_byte(1.0, learn=False)
    queue.router.release(1.0)
    assert queue.names[0] == "warm"
    assert queue.lease_of("warm").decision.candidate.matched_tokens == len(shared) * BLOCK


def test_only_the_oldest_are_looked_at() -> None:
    queue = Queue(hold_batch=2)
    first = queue.take("first", 10_000)
    queue.hold("a", 2_000)
    queue.hold("b", 2_000)
    queue.hold("short", 10)
    first.first_byte(1.0, learn=False)
    queue.router.release(1.0)
    assert "short" not in queue.names


def test_newcomers_see_the_work_that_is_held_for_an_instance() -> None:
    queue = Queue(2)
    queue.take("first", 20_000)
    queue.take("second", 20_000)
    held = queue.hold("third", 6_000)
    newcomer = queue.hold("fourth", 2_000)
    # Equal instances, but for what is held.
    assert newcomer.slot != held.slot
    assert queue.held_work(held.slot) == held.work


def test_a_held_request_is_bound_anew_at_each_look() -> None:
    queue = Queue(3)
    leases = [queue.take(f"{i}", 30_000) for i in range(3)]
    helds = [queue.hold(f"held-{i}", 8_000) for i in range(3)]
    assert sorted(held.slot for held in helds) == [0, 1, 2]
    leases[0].first_byte(1.0, learn=False)
    queue.router.release(1.0)
    assert len(queue.granted) == 1
    bound = {0: 0.0, 1: 0.0, 2: 0.0}
    for held in helds:
        if held in queue.router.held:
            bound[held.slot] += held.work
    assert {slot: queue.held_work(slot) for slot in bound} == pytest.approx(bound)


def test_a_full_queue_refuses_and_says_when_what_waits_will_have_been_done() -> None:
    queue = Queue(max_held=2)
    queue.take("first", 10_000)
    queue.hold("a", 10_000)
    queue.hold("b", 10_000)
    with pytest.raises(TooManyRequestsError) as refused:
        queue.enter("c")
    # Three times 11,562 of work at 12,000 a second.
    assert refused.value.retry_after_s == 3
    assert len(queue.router.held) == 2
    assert queue.router.load.of(0).in_flight == 1


def test_retry_after_counts_what_is_done_already() -> None:
    queue = Queue(max_held=0)
    queue.take("first", 20_000)
    for now_s, retry_after_s in ((0.0, 3), (0.6, 2), (1.5, 1)):
        with pytest.raises(TooManyRequestsError) as refused:
            queue.enter("next", now_s=now_s)
        assert refused.value.retry_after_s == retry_after_s


def test_a_request_that_leaves_makes_room_and_takes_its_work_along() -> None:
    queue = Queue(max_held=1)
    queue.take("first", 10_000)
    held = queue.hold("leaves")
    assert queue.router.held.leave(held)
    assert not queue.router.held.leave(held)
    assert (len(queue.router.held), queue.held_work()) == (0, 0)
    queue.hold("comes")


def test_whoever_cannot_be_served_by_anybody_any_more_is_told() -> None:
    queue = Queue()
    queue.take("first", 10_000)
    queue.hold("a")
    queue.hold("b")
    queue.router.connect_failed("gpu-0", 0.1, timed_out=False)
    queue.router.release(0.1)
    assert queue.granted == [("a", None), ("b", None)]
    assert len(queue.router.held) == 0
    with pytest.raises(NoInstanceError):
        queue.enter("c", now_s=0.1)


def test_whose_models_last_instance_is_lost_is_told_while_others_are_busy() -> None:
    queue = Queue(2, models={0: "m", 1: "n"})
    queue.take("m", 10_000, model="m")
    queue.take("n", 10_000, model="n")
    queue.hold("held m", model="m")
    queue.hold("held n", model="n")
    queue.router.connect_failed("gpu-1", 0.1, timed_out=False)
    queue.router.release(0.1)
    assert queue.granted == [("held n", None)]
    assert len(queue.router.held) == 1


def test_requests_for_a_busy_model_do_not_hide_those_that_could_go() -> None:
    queue = Queue(2, models={0: "m", 1: "n"}, hold_batch=3)
    queue.take("m", 50_000, model="m")
    n = queue.take("n", 10_000, model="n")
    for i in range(5):
        queue.hold(f"held m-{i}", model="m")
    queue.hold("held n", model="n")
    n.first_byte(0.5, learn=False)
    queue.router.release(0.5)
    assert queue.names == ["held n"]


def test_a_held_request_goes_elsewhere_when_its_instance_is_lost() -> None:
    queue = Queue(2)
    leases = {lease.instance.slot: lease for lease in (queue.take("0", 30_000), queue.take("1", 30_000))}
    held = queue.hold("held", 4_000)
    lost, other = held.slot, 1 - held.slot
    queue.router.probe_failed(f"gpu-{lost}", ProbeFailure.REFUSED)
    for _ in range(2):
        queue.router.probe_failed(f"gpu-{lost}", ProbeFailure.REFUSED)
    leases[other].first_byte(1.0, learn=False)
    queue.router.release(1.0)
    assert queue.lease_of("held").instance.slot == other


def test_a_drained_instance_gets_none_of_those_held_for_it() -> None:
    queue = Queue(2)
    leases = {lease.instance.slot: lease for lease in (queue.take("0", 30_000), queue.take("1", 30_000))}
    held = queue.hold("held", 4_000)
    drained = held.slot
    queue.router.fleet.drain(f"gpu-{drained}")
    leases[drained].first_byte(1.0, learn=False)
    queue.router.release(1.0)
    assert queue.granted == []
    leases[1 - drained].first_byte(1.1, learn=False)
    queue.router.release(1.1)
    assert queue.lease_of("held").instance.slot == 1 - drained


def test_a_grant_that_makes_another_leave_is_no_grant_for_that_one() -> None:
    queue = Queue()
    first = queue.take("first", 10_000)
    request = Request(Prompt("m", b"", b"a", 100, stream=True), [], 100)
    other: list[Held] = []
    leases: list[Lease | None] = []

    def grant(lease: Lease | None) -> None:
        leases.append(lease)
        queue.router.held.leave(other[0])
        queue.router.release(1.0)

    entered = queue.router.enter(request, now_s=0.0, grant=grant)
    assert isinstance(entered, Held)
    other.append(queue.hold("b", 200))
    queue.hold("c", 300)
    first.first_byte(1.0, learn=False)
    queue.router.release(1.0)
    assert len(leases) == 1
    assert queue.names == ["c"]
    assert (len(queue.router.held), queue.held_work()) == (0, 0)


def test_an_explanation_says_that_a_request_would_be_held_and_holds_nothing() -> None:
    queue = Queue()
    prompt = Prompt("m", b"", b"k" * 400, 100, stream=True)
    assert not queue.router.explain(prompt, now_s=0.0).is_held
    queue.take("first", 10_000)
    queue.hold("second", 3_000)
    explanation = queue.router.explain(prompt, now_s=0.0)
    assert explanation.is_held
    assert explanation.candidates[0].held_work == queue.held_work() > 3_000
    assert len(queue.router.held) == 1


def test_without_constants_nothing_is_ever_held() -> None:
    instance = Instance("gpu-0", "http://gpu-0", 0)
    router = Router([instance], ExpectedLatency(), BlockHasher(BLOCK, 1), Random(1))
    request = Request(Prompt("m", b"", b"k", 50_000, stream=True), [], 50_000)
    for _ in range(3):
        assert isinstance(router.enter(request, now_s=0.0, grant=lambda _: None), Lease)


def test_sums_are_exactly_zero_when_nobody_is_held() -> None:
    helds = HeldRequests(10)
    works = [0.1, 0.2, 0.3, 1e9]
    requests = [Held(Request(Prompt(None, b"", b"", 1, stream=True), [], 1), 0.0, lambda _: None) for _ in works]
    for held, work in zip(requests, works, strict=True):
        helds.hold(held, 0, work, retry_after_s=1)
    for held in requests:
        helds.bind(held, 1, 0.7)
    for held in requests:
        helds.leave(held)
    assert (helds.by_slot, list(helds.kinds)) == ({}, [])


def test_who_wants_an_idle_instance_does_not_wait_behind_all_who_wait_for_a_busy_one() -> None:
    """A long shared prefix is worth waiting for; who does not have it must not wait with them."""
    shared = list(range(1_000, 1_000 + 100_000 // BLOCK))
    queue = Queue(2, hold_s=0.3, hold_batch=8)
    with queue.take("home", 100_000, chain=shared) as home:
        home.first_byte(5.0, learn=False)
    pending = [queue.take(f"pending-{i}", 30_000, now_s=5.0) for i in range(2)]
    assert {lease.instance.slot for lease in pending} == {0, 1}
    for i in range(20):
        queue.hold(f"shared-{i}", 100_100, now_s=5.0, chain=[*shared, 7_000 + i])
    (idle,) = (lease for lease in pending if lease.instance is not home.instance)
    # Bound to either; those who were bound to the idle one go.
    others = {f"other-{i}": queue.hold(f"other-{i}", 200, now_s=5.0).slot for i in range(8)}
    assert idle.instance.slot in others.values()
    idle.first_byte(6.0, learn=False)
    idle.end()
    for now_s in (6.0, 7.0, 8.0):
        queue.router.release(now_s)
        for _, lease in queue.granted:
            assert lease is not None
            lease.first_byte(now_s, learn=False)
    assert {name for name, slot in others.items() if slot == idle.instance.slot} <= set(queue.names)


def test_nobody_waits_for_prefill_whose_time_is_only_guessed() -> None:
    """Answers in one piece teach no speed: a fast instance would be kept as slow as it was assumed to be."""
    queue = Queue(hold_s=0.3)
    unary = Request(Prompt("m", b"", b"unary", 10_000, stream=False), [], 10_000)
    leases = [queue.router.enter(unary, now_s=0.0, grant=lambda _: None) for _ in range(20)]
    assert all(isinstance(lease, Lease) for lease in leases)
    # Those that tell of their first byte count as ever.
    queue.take("streamed", 10_000)
    queue.hold("held", 10_000)


def test_prefill_of_answers_in_one_piece_counts_once_a_speed_was_measured() -> None:
    queue = Queue(hold_s=0.3)
    with queue.take("streamed", 10_000) as lease:
        lease.first_byte(1.0, learn=True)
    unary = Request(Prompt("m", b"", b"unary", 10_000, stream=False), [], 10_000)
    assert isinstance(queue.router.enter(unary, now_s=1.0, grant=lambda _: None), Lease)
    held = queue.router.enter(unary, now_s=1.0, grant=lambda lease: queue.granted.append(("unary", lease)))
    assert isinstance(held, Held)
    queue.router.release(1.9)
    assert queue.names == ["unary"]


def test_who_is_refused_is_told_to_come_back_within_a_minute() -> None:
    """All that is held takes an hour, but a place is free as soon as one of them goes."""
    queue = Queue(hold_s=0.3, max_held=3)
    queue.take("first", 100_000)
    for i in range(3):
        queue.hold(f"held-{i}", 1_000_000)
    with pytest.raises(TooManyRequestsError) as refused:
        queue.hold("refused")
    assert refused.value.retry_after_s == 60


def test_a_fault_in_one_turn_costs_that_request_its_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(2)
    busy = [queue.take(f"busy {slot}", LIMIT * 2) for slot in range(2)]
    first = queue.hold("first")
    queue.hold("second")
    look = Survey.look

    def broken(survey: Survey, request: Request, *rest: Any) -> Any:
        if request is first.request:
            raise ZeroDivisionError
        return look(survey, request, *rest)

    monkeypatch.setattr(Survey, "look", broken)
    for lease in busy:
        lease.first_byte(1.0, learn=False)
        lease.end()
    queue.router.release(1.0)
    assert queue.router.n_policy_faults == 1
    assert not len(queue.router.held)
    assert queue.held_work(0) == queue.held_work(1) == 0
    granted = dict(queue.granted)
    assert granted["first"] is None
    assert granted["second"] is not None


def test_who_waits_for_an_instance_that_hangs_goes_elsewhere() -> None:
    queue = Queue(2)
    chain = list(range(1, 2_001))
    first = queue.take("first", 32_000, chain=chain)
    follows = queue.hold("follows", 32_016, chain=[*chain, 9_999], now_s=0.5)
    assert follows.slot == first.instance.slot
    queue.router.release(5.0)
    assert queue.names == []
    queue.router.release(120.0)  # nothing came, and its health check may well be fine
    assert queue.names == ["follows"]
    assert queue.lease_of("follows").instance.slot != first.instance.slot
