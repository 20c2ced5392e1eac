"""Nothing that is held is lost: each request is granted exactly once, or has left; and all sums come back to zero."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance, ProbeFailure
from prefixroute.core.held import Held, HoldConstants
from prefixroute.core.lease import Lease
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.prompt import Prompt
from prefixroute.core.request import Request
from prefixroute.core.router import Router
from prefixroute.errors import NoInstanceError, TooManyRequestsError

BLOCK = 16
MODELS = {"a": frozenset({"m"}), "b": frozenset({"m", "n"}), "c": frozenset({"n"})}
MAX_HELD = 6
names = st.sampled_from(sorted(MODELS))


@dataclass(eq=False)
class Asked:
    """A request that entered, and what has become of it."""

    grants: list[Lease | None] = field(default_factory=list)
    held: Held | None = None
    has_left: bool = False


class HeldMachine(RuleBasedStateMachine):
    """Everything that can happen to held requests, on a clock that only goes forward."""

    def __init__(self) -> None:
        super().__init__()
        instances = [
            Instance(name, f"http://{name}", slot, models) for slot, (name, models) in enumerate(MODELS.items())
        ]
        self.router = Router(
            instances,
            ExpectedLatency(),
            BlockHasher(BLOCK, 1),
            Random(1),
            hold=HoldConstants(hold_s=0.05, hold_batch=3, max_held=MAX_HELD),
        )
        for instance in instances:
            self.router.fleet.probe_passed(instance.name)
        self.now_s = 0.0
        self.asked: list[Asked] = []
        self.open: list[Lease] = []

    @rule(step_s=st.floats(0, 1))
    def wait(self, step_s: float) -> None:
        self.now_s += step_s

    @rule(
        n_tokens=st.integers(1, 5_000),
        topic=st.integers(0, 2),
        model=st.sampled_from(["m", "n", "unknown", None]),
        stream=st.booleans(),
    )
    def enter(self, n_tokens: int, topic: int, model: str | None, stream: bool) -> None:
        chain = [topic * 1_000 + i for i in range(n_tokens // BLOCK)]
        request = Request(Prompt(model, b"", b"k", n_tokens, stream=stream), chain, n_tokens)
        asked = Asked()

        def grant(lease: Lease | None) -> None:
            asked.grants.append(lease)
            if lease is not None:
                self.open.append(lease)

        n_held = len(self.router.held)
        try:
            entered = self.router.enter(request, now_s=self.now_s, grant=grant)
        except NoInstanceError:
            assert not self.router.fleet.candidates(model, self.now_s)
            return
        except TooManyRequestsError:
            assert n_held == MAX_HELD
            return
        self.asked.append(asked)
        if isinstance(entered, Held):
            asked.held = entered
        else:
            grant(entered)

    @rule()
    def release(self) -> None:
        self.router.release(self.now_s)

    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        waiting = [asked for asked in self.asked if asked.held is not None and asked.held in self.router.held]
        if waiting:
            asked = waiting[which % len(waiting)]
            assert asked.held is not None
            assert self.router.held.leave(asked.held)
            asked.has_left = True

    @rule(which=st.integers(0, 99))
    def first_byte(self, which: int) -> None:
        if self.open:
            self.open[which % len(self.open)].first_byte(self.now_s, learn=True)

    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        if self.open:
            self.open.pop(which % len(self.open)).end()

    @rule(name=names, refused=st.booleans())
    def connect_failed(self, name: str, refused: bool) -> None:
        self.router.connect_failed(name, self.now_s, timed_out=not refused)

    @rule(name=names, failure=st.none() | st.sampled_from(ProbeFailure))
    def probe(self, name: str, failure: ProbeFailure | None) -> None:
        if failure is None:
            self.router.fleet.probe_passed(name)
        else:
            self.router.probe_failed(name, failure)

    @rule(name=names, drains=st.booleans())
    def drain(self, name: str, drains: bool) -> None:
        (self.router.fleet.drain if drains else self.router.fleet.undrain)(name)

    @invariant()
    def each_is_held_or_granted_once_or_has_left(self) -> None:
        for asked in self.asked:
            is_held = asked.held is not None and asked.held in self.router.held
            assert is_held + len(asked.grants) + asked.has_left == 1
        assert len(self.router.held) <= MAX_HELD

    @invariant()
    def held_work_is_that_of_those_that_are_held(self) -> None:
        held = [asked.held for asked in self.asked if asked.held is not None and asked.held in self.router.held]
        for slot in range(len(MODELS)):
            bound = sum(one.work for one in held if one.slot == slot)
            assert self.router.held.by_slot.get(slot, 0.0) == pytest.approx(bound, abs=1e-6)
        assert set(self.router.held.kinds) == {one.kind for one in held}

    def teardown(self) -> None:
        """Whatever happened, a fleet that is well and answers lets everybody in."""
        for name in MODELS:
            self.router.fleet.undrain(name)
            for _ in range(3):
                self.router.fleet.probe_passed(name)
        n_looks = 0
        while len(self.router.held):
            while self.open:
                self.open.pop().end()
            self.router.release(self.now_s)
            n_looks += 1
            assert n_looks <= MAX_HELD
        for asked in self.asked:
            assert len(asked.grants) == (not asked.has_left)
        while self.open:
            self.open.pop().end()
        assert self.router.held.by_slot == {}
        for slot in range(len(MODELS)):
            own = self.router.load.of(slot)
            assert (own.in_flight, own.in_flight_tokens, own.pending_work) == (0, 0, 0.0)


TestHeld = HeldMachine.TestCase
TestHeld.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
