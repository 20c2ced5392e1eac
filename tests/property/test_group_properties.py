"""Groups against a naive model: who may take a request, by which rule, and what is counted where.

The model is a table of requests under way and a table of homes; each decision is checked against SageMaker's rules as
sentences on those tables.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance, ProbeFailure
from prefixroute.core.group import Group
from prefixroute.core.lease import Lease
from prefixroute.core.policies.blind import LeastOutstanding, RoundRobin
from prefixroute.core.policies.prefix_aware import PrefixAware
from prefixroute.core.policy import Policy
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.core.router import Router
from prefixroute.errors import NoInstanceError

MACHINES = {"a": "left", "b": "left", "c": "left", "d": "right", "e": "right"}
NAMES = sorted(MACHINES)
THRESHOLD = 2
PREFIX_CHARS = 4


@dataclass
class Part:
    """A group, and what the model knows of it."""

    members: Sequence[str]
    aware: bool
    copies: bool
    group: Group
    homes: dict[tuple[str, str | None], str] = field(default_factory=dict)


def policy_of(*, aware: bool) -> Policy:
    return PrefixAware(PREFIX_CHARS, THRESHOLD, 1_000, 1, by_model=False) if aware else LeastOutstanding()


def part(members: str, *, aware: bool, copies: bool) -> Part:
    policy = policy_of(aware=aware)
    return Part([*members], aware, copies, Group(policy, members, machines=MACHINES if copies else None))


class GroupMachine(RuleBasedStateMachine):
    """Requests of several groups on shared instances, which come, go and fail."""

    def __init__(self) -> None:
        super().__init__()
        instances = [Instance(name, f"http://{name}", slot) for slot, name in enumerate(NAMES)]
        self.router = Router(instances, RoundRobin(), BlockHasher(16, 1), Random(1))
        for name in NAMES:
            self.router.fleet.probe_passed(name)
        self.parts = [
            part("abcde", aware=True, copies=True),
            part("abd", aware=True, copies=True),
            part("bcde", aware=True, copies=False),
            part("ace", aware=False, copies=True),
        ]
        self.open: list[tuple[Lease, Part]] = []

    def in_flight(self, of: Part) -> Counter[str]:
        return Counter(lease.instance.name for lease, part in self.open if part is of or not of.copies)

    def allowed(self, of: Part, home: str | None, candidates: Sequence[str]) -> set[str]:
        n = self.in_flight(of)
        if of.aware and home is not None and len(candidates) > 1 and home in candidates:
            if n[home] < THRESHOLD:
                return {home}
            candidates = [name for name in candidates if name != home]
            if of.copies:
                beside = [x for x in candidates if MACHINES[x] == MACHINES[home] and n[x] < THRESHOLD]
                elsewhere = [x for x in candidates if MACHINES[x] != MACHINES[home]]
                candidates = beside or elsewhere or candidates
        least = min(n[name] for name in candidates)
        return {name for name in candidates if n[name] == least}

    @rule(
        which=st.integers(0, 3),
        text=st.sampled_from(["same", "same, longer", "sane", "x", ""]),
        identity=st.sampled_from([None, "one", "other"]),
        model=st.sampled_from(["m", "n"]),
        without=st.lists(st.sampled_from(NAMES), max_size=2),
    )
    def lease(self, which: int, text: str, identity: str | None, model: str, without: list[str]) -> None:
        of = self.parts[which]
        body = orjson.dumps({"model": model, "messages": [{"role": "user", "content": text}]})
        request = self.router.read(read_prompt(Api.CHAT, body, prefix_aware_id=identity), group=of.group)
        up = [name for name in of.members if self.router.fleet.candidates(None, 0.0, among=[name])]
        candidates = [name for name in up if name not in without]
        try:
            lease = self.router.lease(request, now_s=0.0, without=without)
        except NoInstanceError:
            assert not candidates
            return
        chosen = lease.instance.name
        # A chat without text has its body looked at, which names the model.
        key = text[:PREFIX_CHARS] or body[:PREFIX_CHARS].decode(), identity
        home = of.homes.get(key)
        assert chosen in of.members
        assert chosen in self.allowed(of, home, candidates)
        # Who was tried may be back the next time, and keeps its prefixes until then.
        if of.aware and len(candidates) > 1 and home not in candidates and (home is None or not without):
            of.homes[key] = chosen
        self.open.append((lease, of))

    @rule(which=st.integers(0, 3), at=st.integers(0, 4))
    def session(self, which: int, at: int) -> None:
        of = self.parts[which]
        name = of.members[at % len(of.members)]
        request = self.router.read(read_prompt(Api.INVOCATIONS, b"state"), group=of.group.only(name))
        try:
            lease = self.router.lease(request, now_s=0.0)
        except NoInstanceError:
            assert not self.router.fleet.candidates(None, 0.0, among=[name])
            return
        assert lease.instance.name == name
        self.open.append((lease, of))

    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        if self.open:
            lease, _ = self.open.pop(which % len(self.open))
            lease.end()
            lease.end()

    @rule(name=st.sampled_from(NAMES), drains=st.booleans())
    def drain(self, name: str, drains: bool) -> None:
        (self.router.fleet.drain if drains else self.router.fleet.undrain)(name)

    @rule(name=st.sampled_from(NAMES), is_up=st.booleans())
    def probe(self, name: str, is_up: bool) -> None:
        for _ in range(3):
            if is_up:
                self.router.fleet.probe_passed(name)
            else:
                self.router.probe_failed(name, ProbeFailure.REFUSED)

    @rule(which=st.integers(0, 3), remembers=st.booleans())
    def reload(self, which: int, remembers: bool) -> None:
        """The configuration changes: requests under way count on, and prefixes stay where the rule is the same."""
        of = self.parts[which]
        earlier, policy = of.group, policy_of(aware=of.aware)
        if isinstance(policy, PrefixAware) and isinstance(earlier.policy, PrefixAware):
            if remembers:
                policy.succeeds(earlier.policy)
            else:
                of.homes.clear()
        of.group = Group(policy, of.members, machines=earlier.machines)
        of.group.succeeds(earlier)

    @invariant()
    def counts_are_those_of_requests_under_way(self) -> None:
        for of in self.parts:
            counted = {NAMES[slot]: n for slot, n in of.group._in_flight.items()}
            assert counted == (self.in_flight(of) if of.copies else {})
        for name, slot in zip(NAMES, range(len(NAMES)), strict=True):
            assert self.router.load.of(slot).in_flight == sum(lease.instance.name == name for lease, _ in self.open)

    def teardown(self) -> None:
        for lease, _ in self.open:
            lease.end()
        assert [of.group._in_flight for of in self.parts] == [{}] * len(self.parts)


TestGroups = GroupMachine.TestCase
TestGroups.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
