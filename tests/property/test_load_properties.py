"""What is taken is given back, in whatever order things happen; and speeds follow the formula."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance, ProbeFailure, State
from prefixroute.core.lease import Lease
from prefixroute.core.load import Flight, Load
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policy import Candidate, Decision, Facts, Policy
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.core.router import Router
from prefixroute.errors import NoInstanceError

NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)
steps_s = st.floats(0, 3)


class Flaky:
    """Expected latency that fails every third time, in one of its two methods."""

    def __init__(self) -> None:
        self._policy: Policy = ExpectedLatency()
        self._n_calls = 0

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        self._fail_sometimes()
        return self._policy.pick(facts, candidates, rng)

    def record(self, facts: Facts, decision: Decision) -> None:
        self._fail_sometimes()

    def _fail_sometimes(self) -> None:
        self._n_calls += 1
        if self._n_calls % 3 == 0:
            raise RuntimeError("flaky")


def make_prompt(topic: int, n_turns: int, stream: bool) -> Prompt:
    messages = [{"role": "user", "content": f"{topic}:{turn} " * 30} for turn in range(n_turns)]
    return read_prompt(Api.CHAT, orjson.dumps({"model": "m", "messages": messages, "stream": stream}))


class LeaseMachine(RuleBasedStateMachine):
    """Everything that can happen to leases and instances, on a clock that only goes forward."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        instances = [Instance(name, f"http://{name}", slot) for slot, name in enumerate(NAMES)]
        self.router = Router(
            instances,
            Flaky(),
            BlockHasher(16, seed=1),
            Random(1),
            default_capacity_tokens=16 * 20,
        )
        self.now_s = 0.0
        self.open: list[Lease] = []

    @rule(step_s=steps_s)
    def wait(self, step_s: float) -> None:
        self.now_s += step_s

    @rule(
        target=leases,
        topic=st.integers(0, 2),
        n_turns=st.integers(0, 4),
        stream=st.booleans(),
        without=st.sets(names, max_size=2),
        only=st.none() | names,
    )
    def lease(self, topic: int, n_turns: int, stream: bool, without: set[str], only: str | None) -> list[Lease]:
        prompt = make_prompt(topic, n_turns, stream)
        try:
            lease = self.router.lease(self.router.read(prompt), now_s=self.now_s, without=without, only=only)
        except NoInstanceError:
            assert not self.router.fleet.candidates(prompt.model, self.now_s, without)
            return []
        assert lease.instance.name not in without
        self.open.append(lease)
        return [lease]

    @rule(leases=leases, learn=st.booleans())
    def first_byte(self, leases: list[Lease], learn: bool) -> None:
        for lease in leases:
            lease.answered()
            lease.first_byte(self.now_s, learn=learn)

    @rule(leases=leases)
    def refused(self, leases: list[Lease]) -> None:
        for lease in leases:
            lease.refused()

    @rule(leases=consumes(leases))
    def end(self, leases: list[Lease]) -> None:
        for lease in leases:
            self.end_twice(lease)

    @rule(leases=consumes(leases), fault=st.sampled_from([RuntimeError, KeyboardInterrupt, GeneratorExit]))
    def end_by_an_exception(self, leases: list[Lease], fault: type[BaseException]) -> None:
        for lease in leases:
            with pytest.raises(fault), lease:
                raise fault
            self.end_twice(lease)

    @rule(leases=consumes(leases), timed_out=st.booleans())
    def end_by_a_connect_failure(self, leases: list[Lease], timed_out: bool) -> None:
        for lease in leases:
            lease.refused()
            self.router.connect_failed(lease.instance.name, self.now_s, timed_out=timed_out)
            self.end_twice(lease)

    def end_twice(self, lease: Lease) -> None:
        lease.end()
        if lease in self.open:
            self.open.remove(lease)
        before = self.counts()
        lease.end()
        lease.first_byte(self.now_s, learn=True)
        assert self.counts() == before

    @rule(name=names, failure=st.none() | st.sampled_from(ProbeFailure))
    def probe(self, name: str, failure: ProbeFailure | None) -> None:
        if failure is None:
            self.router.fleet.probe_passed(name)
        else:
            self.router.probe_failed(name, failure)

    @rule(name=names, what=st.sampled_from(["drain", "undrain", "restart", "capacity"]))
    def administer(self, name: str, what: str) -> None:
        match what:
            case "drain":
                self.router.fleet.drain(name)
            case "undrain":
                self.router.fleet.undrain(name)
            case "restart":
                self.router.cache_emptied(name)
            case _:
                self.router.learned_capacity(name, 16 * (5 + int(self.now_s) % 30))

    @rule(topic=st.integers(0, 2))
    def explain(self, topic: int) -> None:
        before = self.counts(), self.router.index.n_bytes
        self.router.explain(make_prompt(topic, 3, stream=True), now_s=self.now_s)
        assert (self.counts(), self.router.index.n_bytes) == before

    def counts(self) -> list[tuple[int, int]]:
        return [(own.in_flight, own.in_flight_tokens) for own in map(self.router.load.of, range(len(NAMES)))]

    @invariant()
    def counts_the_open_leases_and_nothing_else(self) -> None:
        for slot, name in enumerate(NAMES):
            own = self.router.load.of(slot)
            mine = [lease for lease in self.open if lease.instance.name == name]
            assert own.in_flight == len(mine)
            assert own.in_flight_tokens == sum(lease.request.n_tokens for lease in mine)
            assert own.pending_work >= 0
            assert own.pending_work <= sum(lease.decision.candidate.work for lease in mine) + 1e-6

    @invariant()
    def a_half_open_instance_has_at_most_one_trial(self) -> None:
        for name in NAMES:
            state = self.router.fleet.state(name)
            trials = [lease for lease in self.open if lease.instance.name == name and lease._trial == state._trial]
            assert state.state is not State.HALF_OPEN or not state._trial or len(trials) == 1

    def teardown(self) -> None:
        for lease in self.open:
            lease.end()
        for slot, name in enumerate(NAMES):
            own = self.router.load.of(slot)
            assert (own.in_flight, own.in_flight_tokens, own.pending_work) == (0, 0, 0.0)
            assert not self.router.fleet.state(name)._trial


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


# ------------------------------------------------------------------ the formula


@dataclass(slots=True)
class NaiveInstance:
    """T, D and the flights without a first byte, as docs/routing.md writes them."""

    T: float = 0.0
    D: float = 0.0
    last_first_byte_s: float = float("-inf")
    waiting: list[tuple[float, float]] = field(default_factory=list)
    """(m, dispatch) in order of dispatch."""


def naive_fleet_speed(fleet: list[NaiveInstance]) -> float:
    return (sum(one.T for one in fleet) + 12_000 * 2) / (sum(one.D for one in fleet) + 2)


def naive_speed(one: NaiveInstance, fleet_speed: float) -> float:
    return (one.T + fleet_speed * 20) / (one.D + 20)


def naive_progress(one: NaiveInstance, speed: float, now_s: float) -> tuple[float, float]:
    """Speed now, and progress on the oldest."""
    if not one.waiting:
        return speed, 0.0
    m_head, dispatch_s = one.waiting[0]
    done = speed * (now_s - max(one.last_first_byte_s, dispatch_s))
    patience = 4 * m_head + 5 * speed
    return (speed * patience / done, 0.0) if done > patience else (speed, min(done, 0.9 * m_head))


works = st.floats(1, 50_000)
# (instance, step of the clock, work to dispatch; None: a first byte of the flight chosen by the last number)
events = st.lists(st.tuples(st.integers(0, 1), steps_s, works | st.none(), st.integers(0, 9)), max_size=40)


@given(events)
def test_pending_work_progress_and_speeds_follow_the_formula(
    happened: list[tuple[int, float, float | None, int]],
) -> None:
    load, fleet = Load(), [NaiveInstance(), NaiveInstance()]
    flights: list[list[Flight]] = [[], []]
    mean_work, now_s = 2_000.0, 0.0
    for slot in range(2):
        load.add(slot)
    for slot, step_s, work, which in happened:
        now_s += step_s
        one = fleet[slot]
        if work is not None:
            flights[slot].append(load.begin(slot, 1, work, now_s, streamed=True))
            one.waiting.append((work, now_s))
            mean_work += 0.01 * (work - mean_work)
        elif one.waiting:
            load.first_byte(flights[slot].pop(which % len(one.waiting)), now_s)
            m, dispatch_s = one.waiting.pop(which % len(one.waiting))
            took_s = now_s - max(dispatch_s, one.last_first_byte_s)
            if m >= 256 and took_s > 0:
                took_s = min(took_s, 10 * m / naive_speed(one, naive_fleet_speed(fleet)))
                one.T, one.D = 0.98 * one.T + m, 0.98 * one.D + took_s
            one.last_first_byte_s = now_s
        fleet_speed = naive_fleet_speed(fleet)
        assert load.fleet_rate() == pytest.approx(fleet_speed)
        assert load.mean_work == pytest.approx(mean_work)
        for other, naive in enumerate(fleet):
            own, rate, progress = load.observe(other, now_s, load.fleet_rate())
            assert own.pending_work == pytest.approx(sum(m for m, _ in naive.waiting))
            assert (rate, progress) == pytest.approx(naive_progress(naive, naive_speed(naive, fleet_speed), now_s))


@given(st.lists(st.tuples(st.integers(1, 50_000), steps_s), min_size=1, max_size=20))
def test_silent_prefills_are_drained_by_the_clock_at_the_learned_speed(dispatched: list[tuple[int, float]]) -> None:
    """Nothing is learned from them, so the speed is the prior one; whole tokens keep floats equal on both sides."""
    load, speed = Load(), 12_000.0
    load.add(0)
    naive = NaiveInstance()
    over_by_s: list[float] = []
    now_s = 0.0
    for work, step_s in dispatched:
        now_s += step_s
        while over_by_s and over_by_s[0] <= now_s:
            naive.last_first_byte_s = max(naive.last_first_byte_s, over_by_s.pop(0))
            naive.waiting.pop(0)
        pending = sum(m for m, _ in naive.waiting)
        speed_now, done = naive_progress(naive, speed, now_s)
        over_by_s.append(now_s + (pending - done + work) / speed_now)
        naive.waiting.append((work, now_s))
        load.begin(0, work, work, now_s, streamed=False)
        assert load.observe(0, now_s, speed)[0].pending_work == pending + work
    assert load.observe(0, max(over_by_s), speed)[0].pending_work == 0
