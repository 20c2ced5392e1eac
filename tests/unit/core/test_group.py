"""Requests of a group: who may take them, by which rule, and what counts where."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import orjson
import pytest

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Fleet, HealthConstants, Instance, ProbeFailure, State
from prefixroute.core.group import Group
from prefixroute.core.guard import GuardConstants
from prefixroute.core.held import Held, HoldConstants
from prefixroute.core.lease import Lease
from prefixroute.core.load import LoadConstants
from prefixroute.core.policies.blind import LeastOutstanding, RandomPolicy, RoundRobin
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policies.prefix_aware import PrefixAware
from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason, StatelessPolicy
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.core.request import Request
from prefixroute.core.router import Router
from prefixroute.core.survey import Sampling
from prefixroute.errors import NoInstanceError

MACHINES = {"gpu-0": "left", "gpu-1": "left", "gpu-2": "right", "gpu-3": "right"}


def make_router(
    n: int = 4, policy: Policy | None = None, *, models: Mapping[int, str] | None = None, **more: Any
) -> Router:
    instances = [
        Instance(f"gpu-{slot}", f"http://10.0.0.{slot}:8000", slot, frozenset({models[slot]}) if models else None)
        for slot in range(n)
    ]
    router = Router(instances, policy or RoundRobin(), BlockHasher(16, seed=1), Random(1), **more)
    for instance in instances:
        router.fleet.probe_passed(instance.name)
    return router


def prompt(text: str = "hello", *, model: str = "m") -> Prompt:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True}
    return read_prompt(Api.CHAT, orjson.dumps(body))


def take(
    router: Router, group: Group | None, text: str = "hello", *, model: str = "m", without: Sequence[str] = ()
) -> Lease:
    return router.lease(router.read(prompt(text, model=model), group=group), now_s=0.0, without=without)


def reached(router: Router, group: Group | None, n: int = 40, **more: Any) -> set[str]:
    """Who gets requests that come and go one after the other."""
    names = set()
    for _ in range(n):
        with take(router, group, **more) as lease:
            names.add(lease.instance.name)
    return names


def prefix_aware(threshold: int = 4) -> PrefixAware:
    return PrefixAware(1_024, threshold, 1_000, seed=1, by_model=False)


class SeesCandidates(StatelessPolicy):
    """Takes the first one, and remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Candidate] = []

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        self.seen = list(candidates)
        return Decision(candidates[0], Reason.CUSTOM)

    @property
    def in_flight(self) -> dict[str, int]:
        return {candidate.instance.name: candidate.in_flight for candidate in self.seen}


def shown(router: Router, group: Group) -> SeesCandidates:
    """What a policy is shown of the group at the moment."""
    eyes = SeesCandidates()
    own, group.policy = group.policy, eyes
    router.explain(prompt(), now_s=0.0, group=group)
    group.policy = own
    return eyes


# ------------------------------------------------------------------ who may take a request


def test_only_members_are_asked_and_without_a_list_all_are() -> None:
    router = make_router(4)
    assert reached(router, Group(RandomPolicy(), ["gpu-1", "gpu-3"])) == {"gpu-1", "gpu-3"}
    assert reached(router, Group(RandomPolicy())) == {"gpu-0", "gpu-1", "gpu-2", "gpu-3"}
    assert reached(router, None) == {"gpu-0", "gpu-1", "gpu-2", "gpu-3"}


def test_neither_a_match_nor_an_idle_instance_draws_a_request_out_of_its_group() -> None:
    router = make_router(3, ExpectedLatency())
    text = "hello " * 2_000
    with take(router, Group(ExpectedLatency(), ["gpu-0"]), text):
        pass
    others = Group(ExpectedLatency(), ["gpu-1", "gpu-2"])
    leases = [take(router, others, text) for _ in range(20)]
    assert {lease.instance.name for lease in leases} <= {"gpu-1", "gpu-2"}
    # What was computed for one group is there for those who share its instances.
    with take(router, Group(ExpectedLatency(), ["gpu-0", "gpu-3"]), text) as lease:
        assert (lease.instance.name, lease.decision.reason) == ("gpu-0", Reason.AFFINITY)


def test_members_that_are_not_in_the_fleet_may_join_later() -> None:
    router = make_router(1)
    group = Group(LeastOutstanding(), ["gpu-7"])
    with pytest.raises(NoInstanceError):
        take(router, group)
    router.add_instance("gpu-7", "http://10.0.0.7:8000")
    # Nobody else of the group could: so it is tried before its first probe.
    with take(router, group) as lease:
        assert lease.instance.name == "gpu-7"
    router.remove_instance("gpu-7")
    with pytest.raises(NoInstanceError):
        take(router, group)


def test_members_that_list_the_model_go_first_within_a_group() -> None:
    router = make_router(4, models={0: "m", 1: "other", 2: "m", 3: "other"})
    assert reached(router, Group(RandomPolicy(), ["gpu-1", "gpu-2", "gpu-3"])) == {"gpu-2"}


def test_when_nobody_of_the_group_lists_the_model_its_members_answer_for_themselves() -> None:
    """Though somebody else does: a group is as if there were no others."""
    router = make_router(3, models={0: "m", 1: "other", 2: "else"})
    assert reached(router, Group(RandomPolicy(), ["gpu-1", "gpu-2"])) == {"gpu-1", "gpu-2"}
    assert reached(router, Group(RandomPolicy(), ["gpu-1", "gpu-2"]), model="nobody's") == {"gpu-1", "gpu-2"}


def test_a_group_that_is_all_down_is_tried_as_if_there_were_no_others() -> None:
    router = make_router(3)
    group = Group(RandomPolicy(), ["gpu-0", "gpu-1"])
    for name in ("gpu-0", "gpu-1"):
        for _ in range(HealthConstants().fall):
            router.probe_failed(name, ProbeFailure.STATUS)
    assert router.fleet.state("gpu-2").state is State.UP
    assert reached(router, group) == {"gpu-0", "gpu-1"}
    router.fleet.drain("gpu-0")
    assert reached(router, group) == {"gpu-1"}
    router.connect_failed("gpu-1", 0.0, timed_out=False)
    with pytest.raises(NoInstanceError):
        take(router, group)
    assert reached(router, None) == {"gpu-2"}


def test_a_member_that_is_up_goes_before_one_that_is_not() -> None:
    router = make_router(3)
    for _ in range(HealthConstants().fall):
        router.probe_failed("gpu-0", ProbeFailure.STATUS)
    assert reached(router, Group(RandomPolicy(), ["gpu-0", "gpu-1"])) == {"gpu-1"}


def test_a_returning_instance_has_one_trial_for_all_groups() -> None:
    router = make_router(2)
    router.connect_failed("gpu-0", 0.0, timed_out=False)
    router.fleet.probe_passed("gpu-0")
    assert router.fleet.state("gpu-0").state is State.HALF_OPEN
    one, other = Group(LeastOutstanding(), ["gpu-0"]), Group(LeastOutstanding(), ["gpu-0"])
    trial = take(router, one)
    with pytest.raises(NoInstanceError):
        take(router, other)
    trial.end()
    with take(router, other) as lease:
        assert lease.instance.name == "gpu-0"


def test_who_was_tried_is_not_asked_again_within_the_group() -> None:
    router = make_router(3)
    group = Group(LeastOutstanding(), ["gpu-0", "gpu-1"])
    with take(router, group, without=["gpu-0"]) as lease:
        assert lease.instance.name == "gpu-1"
    with pytest.raises(NoInstanceError):
        take(router, group, without=["gpu-0", "gpu-1"])


def test_a_fleet_tells_of_any_of_its_instances_whether_they_are_all_starting() -> None:
    fleet = Fleet([Instance("gpu-0", "", 0), Instance("gpu-1", "", 1)])
    fleet.probe_passed("gpu-1")
    assert not fleet.is_starting()
    assert fleet.is_starting(["gpu-0"])
    assert not fleet.is_starting(["gpu-1"])
    assert not fleet.is_starting(["gpu-0", "gpu-1"])
    fleet.probe_passed("gpu-0")
    assert not fleet.is_starting(["gpu-0"])


# ------------------------------------------------------------------ by which rule


def test_the_group_s_policy_decides_and_remembers_and_the_router_s_does_neither() -> None:
    router = make_router(4, RoundRobin())
    group = Group(prefix_aware())
    assert len(reached(router, group, text="one prefix")) == 1
    # The router's own turns have not moved on.
    assert [take(router, None).instance.name for _ in range(3)] == ["gpu-0", "gpu-1", "gpu-2"]


def test_when_the_group_s_policy_fails_load_decides_within_the_group() -> None:
    class Fails(StatelessPolicy):
        def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
            raise RuntimeError("no idea")

    router = make_router(4)
    group = Group(Fails(), ["gpu-0", "gpu-1"], machines=MACHINES)
    leases = [take(router, group) for _ in range(4)]
    assert {lease.decision.reason for lease in leases} == {Reason.FALLBACK}
    assert Counter(lease.instance.name for lease in leases) == {"gpu-0": 2, "gpu-1": 2}
    assert router.n_policy_faults == 4


def test_only_some_are_weighed_where_the_group_says_so() -> None:
    sampling = Sampling(sample_above=4, sample_matches=1, sample_others=2)
    router = make_router(8, sampling=sampling)
    assert len(shown(router, Group(RandomPolicy())).seen) == 8
    assert len(shown(router, Group(RandomPolicy(), [f"gpu-{n}" for n in range(6)], sampling=sampling)).seen) == 2
    few = Group(RandomPolicy(), ["gpu-0", "gpu-1", "gpu-2", "gpu-3"], sampling=sampling)
    assert len(shown(router, few).seen) == 4
    # And though the router does not.
    assert len(shown(make_router(8), Group(RandomPolicy(), sampling=sampling)).seen) == 2


def test_a_dry_run_with_a_group_tells_what_would_be_and_changes_nothing() -> None:
    router = make_router(4, RoundRobin())
    group = Group(prefix_aware(threshold=2), MACHINES, machines=MACHINES)
    busy = take(router, group, "another prefix")
    explained = [router.explain(prompt("p"), now_s=0.0, group=group).decision for _ in range(5)]
    assert all(decision is not None and decision.reason is Reason.COLD for decision in explained)
    with take(router, group, "p") as lease:
        assert lease.decision.reason is Reason.COLD
        assert {decision.instance for decision in explained if decision} == {lease.instance}
        assert shown(router, group).in_flight == Counter([busy.instance.name, lease.instance.name]) + Counter() | {
            name: 0 for name in MACHINES if name not in (busy.instance.name, lease.instance.name)
        }
    busy.end()
    home = router.explain(prompt("p"), now_s=0.0, group=group).decision
    assert home is not None
    assert (home.instance, home.reason) == (lease.instance, Reason.AFFINITY)
    nobody = router.explain(prompt("p"), now_s=0.0, group=Group(RandomPolicy(), ["gone"]))
    assert (nobody.decision, list(nobody.candidates)) == (None, [])


# ------------------------------------------------------------------ what counts


def test_groups_that_share_an_instance_see_each_other_s_requests_there() -> None:
    router = make_router(2)
    leases = [take(router, Group(LeastOutstanding(), ["gpu-0"])) for _ in range(3)]
    assert shown(router, Group(LeastOutstanding())).in_flight == {"gpu-0": 3, "gpu-1": 0}
    assert reached(router, Group(LeastOutstanding())) == {"gpu-1"}
    for lease in leases:
        lease.end()
    assert reached(router, Group(LeastOutstanding())) == {"gpu-0", "gpu-1"}


def test_a_copy_counts_the_requests_of_its_own_model_alone() -> None:
    router = make_router(2)
    ours = Group(LeastOutstanding(), ["gpu-0", "gpu-1"], machines=MACHINES)
    theirs = Group(LeastOutstanding(), ["gpu-0"], machines=MACHINES)
    leases = [take(router, group) for group in (theirs, None, Group(LeastOutstanding(), ["gpu-0"])) for _ in range(3)]
    seen = shown(router, ours)
    assert seen.in_flight == {"gpu-0": 0, "gpu-1": 0}
    assert [candidate.machine for candidate in seen.seen] == ["left", "left"]
    assert shown(router, theirs).in_flight == {"gpu-0": 3}
    # By what their servers do, both would go to the other one.
    assert {take(router, ours).instance.name for _ in range(2)} == {"gpu-0", "gpu-1"}
    assert shown(router, ours).in_flight == {"gpu-0": 1, "gpu-1": 1}
    assert router.load.of(0).in_flight == 1 + sum(lease.instance.name == "gpu-0" for lease in leases)


def test_where_members_are_no_copies_there_are_no_machines() -> None:
    router = make_router(2)
    assert [candidate.machine for candidate in shown(router, Group(LeastOutstanding())).seen] == ["", ""]


@pytest.mark.parametrize("fault", [RuntimeError, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit])
def test_whatever_is_raised_meanwhile_the_copy_s_place_is_given_back(fault: type[BaseException]) -> None:
    router = make_router(1)
    group = Group(LeastOutstanding(), ["gpu-0"], machines=MACHINES)
    with pytest.raises(fault), take(router, group):
        raise fault
    assert shown(router, group).in_flight == {"gpu-0": 0}


def test_a_copy_s_place_is_given_back_once() -> None:
    router = make_router(1)
    group = Group(LeastOutstanding(), ["gpu-0"], machines=MACHINES)
    first, second = take(router, group), take(router, group)
    first.end()
    first.end()
    assert shown(router, group).in_flight == {"gpu-0": 1}
    second.end()
    assert shown(router, group).in_flight == {"gpu-0": 0}


def test_a_request_that_goes_on_to_another_copy_counts_there_alone() -> None:
    router = make_router(4)
    group = Group(LeastOutstanding(), MACHINES, machines=MACHINES)
    request = router.read(prompt(), group=group)
    tried: list[str] = []
    for _ in range(4):
        with router.lease(request, now_s=0.0, without=tried) as lease:
            tried.append(lease.instance.name)
            assert shown(router, group).in_flight == {name: int(name == tried[-1]) for name in MACHINES}
            lease.refused()
    assert sorted(tried) == sorted(MACHINES)
    with pytest.raises(NoInstanceError):
        router.lease(request, now_s=0.0, without=tried)
    assert shown(router, group).in_flight == dict.fromkeys(MACHINES, 0)


def test_a_request_bound_to_one_member_goes_there_or_nowhere_and_counts_in_the_group() -> None:
    router = make_router(4)
    group = Group(prefix_aware(threshold=1), MACHINES, machines=MACHINES)
    leases = [take(router, group.only("gpu-2"), "p") for _ in range(5)]
    assert {lease.instance.name for lease in leases} == {"gpu-2"}
    assert {lease.decision.reason for lease in leases} == {Reason.SESSION}
    assert shown(router, group).in_flight == {"gpu-0": 0, "gpu-1": 0, "gpu-2": 5, "gpu-3": 0}
    # It gave the prefix no home.
    with take(router, group, "p") as lease:
        assert lease.decision.reason is Reason.COLD
    for lease in leases:
        lease.end()
    assert shown(router, group).in_flight == dict.fromkeys(MACHINES, 0)
    router.connect_failed("gpu-2", 0.0, timed_out=False)
    with pytest.raises(NoInstanceError):
        take(router, group.only("gpu-2"))
    with pytest.raises(NoInstanceError):
        take(router, group.only("gone"))


# ------------------------------------------------------------------ another configuration


def test_requests_under_way_count_for_the_group_that_comes_after() -> None:
    router = make_router(2)
    earlier = Group(LeastOutstanding(), ["gpu-0", "gpu-1"], machines=MACHINES)
    under_way = [take(router, earlier) for _ in range(2)]
    waits = router.read(prompt(), group=earlier)

    group = Group(LeastOutstanding(), ["gpu-0", "gpu-1"], machines=MACHINES)
    group.succeeds(earlier)
    assert shown(router, group).in_flight == {"gpu-0": 1, "gpu-1": 1}
    # Who has waited since before is of the group, too.
    late = router.lease(waits, now_s=0.0)
    new = take(router, group)
    assert shown(router, group).in_flight == {"gpu-0": 2, "gpu-1": 2}
    for lease in (*under_way, late, new):
        lease.end()
    assert shown(router, group).in_flight == {"gpu-0": 0, "gpu-1": 0}
    assert shown(router, earlier).in_flight == {"gpu-0": 0, "gpu-1": 0}


def test_who_has_the_name_of_an_instance_that_left_is_not_as_busy_as_that() -> None:
    router = make_router(2)
    group = Group(LeastOutstanding(), ["gpu-0", "gpu-1"], machines=MACHINES)
    under_way = [take(router, group) for _ in range(4)]
    router.remove_instance("gpu-0")
    router.add_instance("gpu-0", "http://10.0.0.9:8000")
    router.fleet.probe_passed("gpu-0")
    assert shown(router, group).in_flight == {"gpu-0": 0, "gpu-1": 2}
    new = take(router, group)
    assert new.instance.url == "http://10.0.0.9:8000"
    for lease in under_way:
        lease.end()
    assert shown(router, group).in_flight == {"gpu-0": 1, "gpu-1": 0}
    new.end()
    assert shown(router, group).in_flight == {"gpu-0": 0, "gpu-1": 0}


# ------------------------------------------------------------------ holding


def long(router: Router, name: str, group: Group | None, n_tokens: int = 20_000) -> Request:
    return Request(Prompt("m", b"", name.encode(), n_tokens, stream=True), [], n_tokens, group=group)


class Waiting:
    """A router that holds requests back, and what it gave to those it held."""

    def __init__(self, n: int = 2, *, holds: bool = True) -> None:
        self.router = make_router(n, ExpectedLatency(), hold=HoldConstants(hold_s=0.3), holds=holds)
        self.granted: dict[str, Lease | None] = {}

    def enter(self, name: str, group: Group | None) -> Lease | Held:
        return self.router.enter(
            long(self.router, name, group), now_s=0.0, grant=lambda lease: self.granted.update({name: lease})
        )

    def take(self, name: str, group: Group | None) -> Lease:
        lease = self.enter(name, group)
        assert isinstance(lease, Lease)
        return lease

    def hold(self, name: str, group: Group | None) -> Held:
        held = self.enter(name, group)
        assert isinstance(held, Held)
        return held


def waiting_group(*members: str, policy: Callable[[], Policy] = ExpectedLatency) -> Group:
    return Group(policy(), members, machines=dict.fromkeys(members, "left"), holds=True)


def test_requests_of_a_group_are_held_only_where_it_says_so() -> None:
    waiting = Waiting(holds=True)
    group = Group(LeastOutstanding(), ["gpu-0"])
    for n in range(5):
        waiting.take(f"{n}", group)
    assert router_holds(waiting.router, group) is False
    waiting.take("ours", None)
    waiting.hold("ours too", None)
    assert router_holds(waiting.router, None) is True


def test_requests_of_a_group_that_says_so_are_held_though_the_router_s_own_are_not() -> None:
    waiting = Waiting(holds=False)
    group = waiting_group("gpu-0")
    for n in range(5):
        waiting.take(f"{n}", None)
    waiting.hold("of the group", group)
    assert (router_holds(waiting.router, group), router_holds(waiting.router, None)) == (True, False)


def router_holds(router: Router, group: Group | None) -> bool:
    return router.explain(prompt(), now_s=0.0, group=group).is_held


def test_a_held_request_counts_on_its_copy_from_when_it_goes() -> None:
    waiting = Waiting()
    group = waiting_group("gpu-0")
    first = waiting.take("first", group)
    waiting.hold("second", group)
    assert shown(waiting.router, group).in_flight == {"gpu-0": 1}
    first.first_byte(1.0, learn=False)
    waiting.router.release(1.0)
    second = waiting.granted["second"]
    assert second is not None
    assert shown(waiting.router, group).in_flight == {"gpu-0": 2}
    first.end()
    second.end()
    assert shown(waiting.router, group).in_flight == {"gpu-0": 0}


def test_a_held_request_that_leaves_never_counted() -> None:
    waiting = Waiting()
    group = waiting_group("gpu-0")
    first = waiting.take("first", group)
    held = waiting.hold("second", group)
    assert waiting.router.held.leave(held)
    first.end()
    waiting.router.release(1.0)
    assert waiting.granted == {}
    assert shown(waiting.router, group).in_flight == {"gpu-0": 0}


def test_room_outside_the_group_is_none_for_its_held_requests() -> None:
    waiting = Waiting(n=2)
    group = waiting_group("gpu-0")
    first = waiting.take("first", group)
    waiting.hold("second", group)
    waiting.router.release(0.1)
    assert waiting.granted == {}
    # Others' requests go where there is room, and past those that wait.
    assert waiting.take("ours", None).instance.name == "gpu-1"
    first.first_byte(1.0, learn=False)
    waiting.router.release(1.0)
    lease = waiting.granted["second"]
    assert lease is not None
    assert lease.instance.name == "gpu-0"


def test_those_who_wait_for_one_group_do_not_hide_those_of_another() -> None:
    waiting = Waiting(n=2)
    waiting.router = make_router(2, ExpectedLatency(), hold=HoldConstants(hold_s=0.3, hold_batch=1))
    one, other = waiting_group("gpu-0"), waiting_group("gpu-1")
    waiting.take("first of one", one)
    first = waiting.take("first of the other", other)
    for n in range(3):
        waiting.hold(f"one {n}", one)
    waiting.hold("other", other)
    first.first_byte(1.0, learn=False)
    # Where gpu-0 is still busy: its oldest request has just begun by this clock.
    waiting.router.release(0.1)
    assert list(waiting.granted) == ["other"]


def test_a_held_request_whose_group_is_gone_is_told_so() -> None:
    waiting = Waiting(n=2)
    group = waiting_group("gpu-0")
    waiting.take("first", group)
    # Nobody has room, in the group or outside it.
    assert waiting.take("ours", None).instance.name == "gpu-1"
    waiting.hold("second", group)
    waiting.hold("ours too", None)
    waiting.router.connect_failed("gpu-0", 0.1, timed_out=False)
    waiting.router.release(0.1)
    assert waiting.granted == {"second": None}
    assert len(waiting.router.held) == 1


def test_when_the_router_s_own_are_held_no_longer_those_of_groups_still_are() -> None:
    waiting = Waiting(n=1)
    group = waiting_group("gpu-0")
    waiting.take("first", group)
    waiting.hold("of the group", group)
    waiting.hold("ours", None)
    router = waiting.router
    router.configure(
        policy=LeastOutstanding(),
        load_constants=LoadConstants(),
        health=HealthConstants(),
        guard=GuardConstants(),
        hold=HoldConstants(hold_s=0.3),
        holds=False,
        sampling=None,
        shadows=None,
        index_bytes=1 << 20,
        default_capacity_tokens=100_000,
    )
    router.release(0.1)
    assert list(waiting.granted) == ["ours"]
