"""Instances come and go while requests are under way, in any order: what is taken is given back, and nothing mixes."""

from collections.abc import Iterable
from random import Random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.exact import ExactIndex
from prefixroute.core.fleet import Instance, ProbeFailure
from prefixroute.core.held import Held, HoldConstants
from prefixroute.core.lease import Lease
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.core.request import Request
from prefixroute.core.router import Router
from prefixroute.errors import NoInstanceError

NAMES = ("gpu-a", "gpu-b", "gpu-c", "gpu-d")
TEXTS = ("once upon a time " * 300, "it was a dark night " * 300, "hello")


def request(router: Router, text: str, streamed: bool) -> Request:
    body = f'{{"model": "m", "stream": {str(streamed).lower()}, "prompt": "{text}"}}'
    return router.read(read_prompt(Api.COMPLETIONS, body.encode()))


class Membership(RuleBasedStateMachine):
    """Against a model that only remembers who is there, and who holds a lease on whom."""

    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.exact = ExactIndex(7, 2**20)
        self.router = Router(
            [Instance("gpu-a", "http://gpu-a", 0)],
            ExpectedLatency(),
            BlockHasher(16, 7),
            Random(7),
            hold=HoldConstants(hold_s=0.05, max_held=8),
            exact=self.exact,
        )
        self.now_s = 0.0
        self.there: dict[str, int] = {"gpu-a": 0}
        self.slots_ever = {0}
        self.open: list[Lease] = []
        self.held: list[Held] = []
        self.granted: list[Lease | None] = []

    # ------------------------------------------------------------------ who is there

    @rule(name=st.sampled_from(NAMES), capacity=st.none() | st.integers(1, 10_000))
    def add(self, name: str, capacity: int | None) -> None:
        if name in self.there:
            return
        instance = self.router.add_instance(name, f"http://{name}", capacity_tokens=capacity)
        assert instance.slot not in self.slots_ever
        self.slots_ever.add(instance.slot)
        self.there[name] = instance.slot
        # Nothing of a former instance of this name is its own.
        assert self.router.load.of(instance.slot).in_flight == 0
        assert self.router.index.n_blocks(instance.slot) == 0
        self.exact.open(instance.slot)

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        if name not in self.there:
            return
        assert self.router.remove_instance(name).slot == self.there.pop(name)

    @rule(name=st.sampled_from(NAMES), good=st.booleans())
    def probe(self, name: str, good: bool) -> None:
        if name not in self.there:
            return
        if good:
            self.router.fleet.probe_passed(name)
        else:
            self.router.probe_failed(name, ProbeFailure.REFUSED)

    # ------------------------------------------------------------------ requests

    @rule(target=leases, text=st.sampled_from(TEXTS), streamed=st.booleans())
    def lease(self, text: str, streamed: bool) -> Lease | MultipleResults[Lease]:
        try:
            lease = self.router.lease(request(self.router, text, streamed), now_s=self.now_s)
        except NoInstanceError:
            return multiple()
        self.open.append(lease)
        return lease

    @rule(target=leases, text=st.sampled_from(TEXTS))
    def enter(self, text: str) -> Lease | MultipleResults[Lease]:
        if len(self.router.held) == 8:
            return multiple()
        try:
            entered = self.router.enter(request(self.router, text, True), now_s=self.now_s, grant=self.granted.append)
        except NoInstanceError:
            return multiple()
        if isinstance(entered, Lease):
            self.open.append(entered)
            return entered
        self.held.append(entered)
        return multiple()

    @rule(target=leases)
    def release(self) -> MultipleResults[Lease]:
        self.router.release(self.now_s)
        return self._take_granted()

    @rule(lease=leases)
    def answer(self, lease: Lease) -> None:
        lease.answered()
        lease.first_byte(self.now_s, learn=True)

    @rule(lease=leases, share=st.floats(0, 1))
    def report(self, lease: Lease, share: float) -> None:
        lease.reported(int(100 * share), 100)
        lease.computed()

    @rule(lease=leases, timed_out=st.booleans())
    def fail(self, lease: Lease, timed_out: bool) -> None:
        states = {name: self.router.fleet.state(name).state for name in self.there}
        lease.refused()
        lease.connect_failed(self.now_s, timed_out=timed_out)
        for name, state in states.items():
            if self.there[name] != lease.instance.slot:
                assert self.router.fleet.state(name).state is state

    @rule(lease=consumes(leases))
    def end(self, lease: Lease) -> None:
        lease.end()
        self.open.remove(lease)

    @rule(step_s=st.floats(0.01, 40))
    def wait(self, step_s: float) -> None:
        self.now_s += step_s

    def _take_granted(self) -> MultipleResults[Lease]:
        taken = [lease for lease in self.granted if lease is not None]
        self.open += taken
        self.granted.clear()
        return multiple(*taken)

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def the_fleet_is_who_is_there(self) -> None:
        assert {i.name: i.slot for i in self.router.fleet.instances} == self.there
        assert self.router.capacities.by_slot.keys() == set(self.there.values())

    @invariant()
    def what_is_in_flight_is_what_is_leased(self) -> None:
        for name, slot in self.there.items():
            on_it = [lease for lease in self._all_leases() if lease.instance.slot == slot]
            own = self.router.load.of(slot)
            assert own.in_flight == len(on_it), name
            assert own.in_flight_tokens == sum(lease.request.n_tokens for lease in on_it)

    @invariant()
    def who_left_is_counted_until_the_last_lease_ends(self) -> None:
        slots = set(self.there.values())
        gone = [lease.instance.name for lease in self._all_leases() if lease.instance.slot not in slots]
        assert self.router.leaving() == {name: gone.count(name) for name in gone}

    @invariant()
    def matches_are_of_those_who_are_there(self) -> None:
        asked = request(self.router, TEXTS[0], True)
        assert self.router.index.match(asked.chain).keys() <= set(self.there.values())
        assert {one.instance.name for one in self.router.explain(asked.prompt, now_s=self.now_s).candidates} <= (
            self.there.keys()
        )

    @invariant()
    def nobody_is_held_for_who_left(self) -> None:
        slots = set(self.there.values())
        assert self.router.held.by_slot.keys() <= slots
        assert {held.slot for held in self.held if held in self.router.held} <= slots | {-1}

    def _all_leases(self) -> Iterable[Lease]:
        return [*self.open, *(lease for lease in self.granted if lease is not None)]

    def teardown(self) -> None:
        for held in self.held:
            self.router.held.leave(held)
        for lease in self._all_leases():
            lease.end()
        for name, slot in list(self.there.items()):
            own = self.router.load.of(slot)
            assert (own.in_flight, own.in_flight_tokens, own.pending_work) == (0, 0, 0.0), name
            self.router.remove_instance(name)
        assert self.router.leaving() == {}
        assert self.router.index.n_bytes == 0
        assert self.exact.n_bytes == 0
        assert self.router.held.work == 0.0


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
