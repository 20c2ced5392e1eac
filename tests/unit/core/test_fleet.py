"""Which events move an instance from state to state, and who may take requests then."""

import pytest

from prefixroute.core.fleet import Fleet, HealthConstants, Instance, ProbeFailure, State

NAMES = ("a", "b", "c")
LATER_S = 1_000.0
"""When every pause is over."""

REFUSED, TIMEOUT, STATUS, UNTRUSTED = ProbeFailure


def make_fleet(*models: frozenset[str] | None, n: int = 3, health: HealthConstants | None = None) -> Fleet:
    lists = models or (None,) * n
    return Fleet(
        [Instance(name, f"http://{name}", slot, lists[slot]) for slot, name in enumerate(NAMES[: len(lists)])], health
    )


def candidates(fleet: Fleet, model: str | None = None, now_s: float = 0.0, without: tuple[str, ...] = ()) -> str:
    return "".join(instance.name for instance in fleet.candidates(model, now_s, without))


def fail(fleet: Fleet, name: str, failure: ProbeFailure, times: int = 3) -> list[bool]:
    return [fleet.probe_failed(name, failure) for _ in range(times)]


def up(fleet: Fleet, *names: str) -> Fleet:
    for name in names or NAMES:
        fleet.probe_passed(name)
    return fleet


def in_state(state: State, failure: ProbeFailure | None = None, *, was_up: bool = True) -> Fleet:
    """A fleet whose instance "a" is in `state`; the others are up."""
    fleet = up(make_fleet(), "b", "c")
    if was_up and state is not State.STARTING:
        up(fleet, "a")
    match state:
        case State.DOWN:
            fail(fleet, "a", failure or REFUSED)
        case State.EJECTED:
            fleet.connect_failed("a", 0.0)
        case State.HALF_OPEN:
            fleet.connect_failed("a", 0.0)
            fleet.taken("a")
        case _:
            pass
    assert fleet.state("a").state is state
    return fleet


def happen(fleet: Fleet, event: str) -> None:
    match event:
        case "probe passed":
            fleet.probe_passed("a")
        case "2 probes passed":
            fleet.probe_passed("a")
            fleet.probe_passed("a")
        case "probe refused" | "probe timeout" | "probe status" | "probe untrusted":
            fleet.probe_failed("a", ProbeFailure(event.removeprefix("probe ")))
        case "3 probes refused" | "3 probes timeout" | "3 probes status" | "3 probes untrusted":
            fail(fleet, "a", ProbeFailure(event.removeprefix("3 probes ")))
        case "answered":
            fleet.answered("a")
        case "connect failed":
            fleet.connect_failed("a", LATER_S)
        case "taken":
            fleet.taken("a")
        case "released":
            fleet.released("a", fleet.taken("a"))
        case _:
            raise AssertionError(event)


STARTING, UP, HALF_OPEN, DOWN, EJECTED = State
BEFORE = (STARTING, UP, DOWN, EJECTED, HALF_OPEN)
# One refusal takes an instance down that was never up, on either side: it is not there yet, and there is no blip to sit
# out.
# Ejected, the pause says more than a failed probe.
TRANSITIONS = {
    "probe passed": (UP, UP, DOWN, HALF_OPEN, HALF_OPEN),
    "2 probes passed": (UP, UP, UP, UP, UP),
    "probe refused": (DOWN, UP, DOWN, EJECTED, HALF_OPEN),
    "3 probes refused": (DOWN, DOWN, DOWN, EJECTED, DOWN),
    "probe timeout": (STARTING, UP, DOWN, EJECTED, HALF_OPEN),
    "3 probes timeout": (DOWN, DOWN, DOWN, EJECTED, DOWN),
    "probe status": (STARTING, UP, DOWN, EJECTED, HALF_OPEN),
    "3 probes status": (DOWN, DOWN, DOWN, EJECTED, DOWN),
    "probe untrusted": (DOWN, UP, DOWN, EJECTED, HALF_OPEN),
    "3 probes untrusted": (DOWN, DOWN, DOWN, EJECTED, DOWN),
    "answered": (UP, UP, UP, UP, UP),
    "connect failed": (EJECTED, EJECTED, EJECTED, EJECTED, EJECTED),
    "taken": (STARTING, UP, DOWN, HALF_OPEN, HALF_OPEN),
    "released": (STARTING, UP, DOWN, HALF_OPEN, HALF_OPEN),
}


@pytest.mark.parametrize(
    ("state", "event", "then"),
    [(state, event, then) for event, row in TRANSITIONS.items() for state, then in zip(BEFORE, row, strict=True)],
)
def test_events_move_states(state: State, event: str, then: State) -> None:
    fleet = in_state(state)
    happen(fleet, event)
    assert fleet.state("a").state is then
    assert all(fleet.state(name).state is State.UP for name in "bc"), "nobody else's business"


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", TRANSITIONS)
def test_draining_is_intent_and_outlasts_every_event(state: State, event: str) -> None:
    fleet = in_state(state)
    fleet.drain("a")
    happen(fleet, event)
    assert candidates(fleet, now_s=LATER_S * 2) == "bc"
    fleet.undrain("a")
    assert not fleet.state("a").draining


@pytest.mark.parametrize(
    ("state", "may"),
    [
        (State.STARTING, True),
        (State.UP, True),
        (State.DOWN, False),
        (State.EJECTED, False),
        (State.HALF_OPEN, False),  # its trial is under way
    ],
)
def test_who_may_take_requests_beside_others_that_are_up(state: State, may: bool) -> None:
    assert candidates(in_state(state)) == ("abc" if may else "bc")


def test_instances_keep_their_order_and_can_be_asked_for() -> None:
    fleet = make_fleet()
    assert [instance.name for instance in fleet.instances] == ["a", "b", "c"]
    assert [state.instance.name for state in fleet.states()] == ["a", "b", "c"]
    with pytest.raises(KeyError):
        fleet.state("d")


def test_events_of_instances_that_left_are_no_error() -> None:
    fleet = make_fleet()
    fleet.answered("gone")
    fleet.connect_failed("gone", 0.0)
    fleet.released("gone", 1)


def test_who_has_been_tried_is_left_out() -> None:
    fleet = up(make_fleet())
    assert candidates(fleet, without=("b",)) == "ac"
    assert candidates(fleet, without=NAMES) == ""


# ------------------------------------------------------------------ rise and fall


def test_fall_counts_failures_in_a_row() -> None:
    fleet = up(make_fleet(health=HealthConstants(fall=3)))
    fail(fleet, "a", STATUS, times=2)
    fleet.probe_passed("a")
    fail(fleet, "a", STATUS, times=2)
    assert fleet.state("a").state is State.UP
    fleet.answered("a")  # an answer is evidence of life, too
    fail(fleet, "a", STATUS, times=2)
    assert fleet.state("a").state is State.UP
    fail(fleet, "a", STATUS, times=1)
    assert fleet.state("a").state is State.DOWN


def test_rise_counts_passes_in_a_row() -> None:
    fleet = up(make_fleet(health=HealthConstants(fall=1, rise=3)))
    fail(fleet, "a", STATUS, times=1)
    for passed in (True, True, False, True, True):
        assert fleet.state("a").state is State.DOWN
        if passed:
            fleet.probe_passed("a")
        else:
            fleet.probe_failed("a", STATUS)
    fleet.probe_passed("a")
    assert fleet.state("a").state is State.UP


def test_who_was_never_up_comes_up_with_one_good_probe() -> None:
    fleet = make_fleet(health=HealthConstants(rise=5))
    fleet.probe_failed("a", REFUSED)
    assert fleet.state("a").state is State.DOWN
    fleet.probe_passed("a")
    assert fleet.state("a").state is State.UP


def test_an_answer_does_not_overrule_a_health_check_that_answers_otherwise() -> None:
    for failure in (STATUS, UNTRUSTED):
        fleet = in_state(State.DOWN, failure)
        fleet.answered("a")
        assert fleet.state("a").state is State.DOWN
    fleet = in_state(State.DOWN, TIMEOUT)
    fleet.answered("a")
    assert fleet.state("a").state is State.UP
    assert fleet.state("a").failure is None


@pytest.mark.parametrize(("failure", "lost"), [(REFUSED, True), (STATUS, True), (TIMEOUT, False), (UNTRUSTED, True)])
def test_going_down_tells_whether_the_cache_is_lost(failure: ProbeFailure, lost: bool) -> None:
    fleet = up(make_fleet())
    assert fail(fleet, "a", failure, times=4) == [False, False, lost, False]
    assert fleet.state("a").failure is failure


def test_a_silent_instance_that_refuses_later_has_died() -> None:
    fleet = in_state(State.DOWN, TIMEOUT)
    assert fail(fleet, "a", REFUSED, times=2) == [True, False]


def test_an_ejected_instance_that_refuses_has_died() -> None:
    """Its connection may have failed by silence, which keeps the map."""
    fleet = in_state(State.EJECTED)
    assert fail(fleet, "a", TIMEOUT) == [False] * 3
    assert fail(fleet, "a", REFUSED) == [True, False, False]


def test_an_answer_does_not_overrule_the_health_check_of_an_ejected_instance_either() -> None:
    fleet = in_state(State.EJECTED)
    fleet.probe_failed("a", STATUS)
    fleet.taken("a")
    fleet.answered("a")
    assert fleet.state("a").state is State.HALF_OPEN
    fleet.connect_failed("a", 0.0)
    fleet.probe_passed("a")
    fleet.answered("a")
    assert fleet.state("a").state is State.UP


# ------------------------------------------------------------------ fail open


def test_when_nobody_is_up_everybody_who_does_not_refuse_may_be_tried() -> None:
    fleet = up(make_fleet())
    for name, failure in (("a", STATUS), ("b", REFUSED), ("c", TIMEOUT)):
        fail(fleet, name, failure)
    assert candidates(fleet) == "ac"
    assert fleet.can_serve(0.0)
    fleet.drain("a")
    assert candidates(fleet, without=("c",)) == ""
    up(fleet, "b", "b")
    assert candidates(fleet) == "b"


def test_when_all_refuse_nobody_may() -> None:
    fleet = up(make_fleet())
    for name in NAMES:
        fail(fleet, name, REFUSED)
    assert candidates(fleet) == ""
    assert not fleet.can_serve(LATER_S)


def test_probes_that_time_out_while_others_do_too_are_not_believed() -> None:
    fleet = up(make_fleet())
    for _ in range(10):
        for name in NAMES:
            fleet.probe_failed(name, TIMEOUT)
    assert [state.state for state in fleet.states()] == [State.UP] * 3


def test_a_probe_that_times_out_alone_is_believed() -> None:
    fleet = up(make_fleet())
    for _ in range(3):
        fleet.probe_failed("a", TIMEOUT)
        up(fleet, "b", "c")
    assert candidates(fleet) == "bc"


def test_refusals_are_believed_even_if_all_refuse() -> None:
    fleet = up(make_fleet())
    for name in NAMES:
        assert fail(fleet, name, REFUSED) == [False, False, True]


def test_of_a_fleet_of_one_a_timeout_is_believed_and_it_may_be_tried_all_the_same() -> None:
    fleet = up(make_fleet(n=1), "a")
    fail(fleet, "a", TIMEOUT)
    assert fleet.state("a").state is State.DOWN
    assert candidates(fleet) == "a"


# ------------------------------------------------------------------ eject and readmit


def test_an_ejected_instance_may_be_tried_when_its_pause_is_over() -> None:
    fleet = up(make_fleet())
    fleet.connect_failed("a", 10.0)
    assert fleet.next_return_s() == 11.0
    assert candidates(fleet, now_s=10.9) == "bc"
    assert candidates(fleet, now_s=11.0) == "abc"
    assert fleet.state("a").state is State.EJECTED, "asking changes nothing"


def test_beside_others_an_ejected_instance_is_not_tried_while_its_probes_fail() -> None:
    fleet = in_state(State.EJECTED)
    fail(fleet, "a", TIMEOUT, times=1)
    assert candidates(fleet, now_s=LATER_S) == "bc"
    assert candidates(fleet, now_s=LATER_S, without=("b", "c")) == "a"
    up(fleet, "a")
    assert candidates(fleet, now_s=LATER_S) == "abc"


def test_a_half_open_instance_takes_one_request_at_a_time() -> None:
    fleet = up(make_fleet())
    fleet.connect_failed("a", 0.0)
    trial = fleet.taken("a")
    assert trial
    assert candidates(fleet, now_s=5.0) == "bc"
    fleet.released("a", trial)  # its client left: nothing is known
    assert candidates(fleet, now_s=5.0) == "abc"
    assert fleet.taken("a") not in (0, trial)
    fleet.answered("a")
    assert candidates(fleet, now_s=5.0) == "abc"


def test_the_end_of_another_request_does_not_make_room_for_a_second_trial() -> None:
    fleet = up(make_fleet())
    before = fleet.taken("a")
    fleet.connect_failed("a", 0.0)
    fleet.taken("a")
    fleet.released("a", before)
    assert candidates(fleet, now_s=5.0) == "bc"


def test_an_older_trial_that_ends_late_does_not_make_room_either() -> None:
    fleet = up(make_fleet())
    fleet.connect_failed("a", 0.0)
    older = fleet.taken("a")
    fleet.connect_failed("a", 5.0)
    fleet.taken("a")
    fleet.released("a", older)
    assert candidates(fleet, now_s=50.0) == "bc"


def test_the_pause_doubles_up_to_its_maximum_and_an_answer_resets_it() -> None:
    fleet = up(make_fleet(health=HealthConstants(eject_s=1, eject_max_s=6)))
    now_s, pauses = 0.0, []
    for _ in range(5):
        fleet.connect_failed("a", now_s)
        back_s = fleet.next_return_s()
        assert back_s is not None
        pauses.append(back_s - now_s)
        now_s = back_s
        fleet.taken("a")
    assert pauses == [1, 2, 4, 6, 6]
    fleet.answered("a")
    fleet.connect_failed("a", now_s)
    assert fleet.next_return_s() == now_s + 1


def test_connections_that_fail_together_count_once() -> None:
    fleet = up(make_fleet())
    for _ in range(20):
        fleet.connect_failed("a", 0.5)
    assert fleet.next_return_s() == 1.5


def test_the_first_of_several_to_return_is_told_and_who_drains_never_will() -> None:
    fleet = up(make_fleet())
    assert fleet.next_return_s() is None
    fleet.connect_failed("b", 3.0)
    fleet.connect_failed("a", 1.0)
    assert fleet.next_return_s() == 2.0
    fleet.drain("a")
    assert fleet.next_return_s() == 4.0
    fleet.drain("b")
    assert fleet.next_return_s() is None


def test_a_good_probe_ends_the_pause_early() -> None:
    fleet = in_state(State.EJECTED)
    fleet.probe_passed("a")
    assert candidates(fleet) == "abc"
    fleet.taken("a")
    assert candidates(fleet) == "bc"


@pytest.mark.parametrize(
    ("state", "can"),
    [
        (State.STARTING, False),  # unready until one answers
        (State.UP, True),
        (State.DOWN, False),
        (State.HALF_OPEN, True),
    ],
)
def test_whether_anyone_can_serve(state: State, can: bool) -> None:
    fleet = in_state(state)
    fleet.drain("b")
    fleet.drain("c")
    assert fleet.can_serve(0.0) is can
    fleet.drain("a")
    assert not fleet.can_serve(0.0)


def test_an_ejected_fleet_can_serve_again_when_the_first_pause_is_over() -> None:
    fleet = up(make_fleet())
    for name in NAMES:
        fleet.connect_failed(name, 0.0)
    assert not fleet.can_serve(0.9)
    assert fleet.can_serve(1.0)
    assert fleet.state("a").state is State.EJECTED, "asking changes nothing"


def test_an_ejected_fleet_cannot_serve_while_its_probes_are_refused() -> None:
    fleet = up(make_fleet(n=1), "a")
    fleet.connect_failed("a", 0.0)
    fleet.probe_failed("a", REFUSED)
    assert not fleet.can_serve(LATER_S)
    assert candidates(fleet, now_s=LATER_S) == "a", "a request may find out sooner than the next probe"
    fleet.probe_passed("a")
    assert fleet.can_serve(LATER_S)


def test_an_instance_that_is_not_trusted_never_counts_as_one_that_can_serve() -> None:
    fleet = make_fleet(n=1)
    for _ in range(10):
        fleet.probe_failed("a", UNTRUSTED, "its certificate was refused")
        assert not fleet.can_serve(LATER_S)
    assert fleet.state("a").reason == "its certificate was refused"
    assert candidates(fleet) == "a", "the attempt tells the client why"
    fleet.probe_passed("a")
    assert fleet.can_serve(0.0)
    fail(fleet, "a", UNTRUSTED)
    fleet.connect_failed("a", 0.0)
    assert not fleet.can_serve(LATER_S)
    fleet.taken("a")
    assert fleet.state("a").state is State.HALF_OPEN
    assert not fleet.can_serve(LATER_S)


# ------------------------------------------------------------------ models


def test_who_lists_the_model_serves_it_and_who_lists_nothing_may() -> None:
    fleet = make_fleet(frozenset({"llama"}), frozenset({"qwen", "org/base:tag"}), None)
    assert candidates(fleet, "llama") == "ac"
    assert candidates(fleet, "org/base:tag") == "bc"


def test_a_model_that_nobody_lists_goes_to_everybody() -> None:
    """The server's own 404 is a better answer than ours."""
    assert candidates(make_fleet(frozenset({"llama"}), frozenset({"qwen"})), "unknown") == "ab"


def test_a_request_without_a_model_goes_to_everybody() -> None:
    assert candidates(make_fleet(frozenset({"llama"}), frozenset({"qwen"}))) == "ab"


def test_learned_models_count_from_now_on() -> None:
    fleet = make_fleet()
    assert candidates(fleet, "llama") == "abc"
    fleet.learned_models("a", frozenset({"llama"}))
    fleet.learned_models("b", frozenset({"qwen"}))
    assert candidates(fleet, "llama") == "ac"
    assert candidates(fleet, "qwen") == "bc"
    fleet.learned_models("b", frozenset({"llama"}))
    assert candidates(fleet, "llama") == "abc"
    assert fleet.knows_model("llama")
    assert not fleet.knows_model("qwen")


def test_a_configured_list_stays() -> None:
    fleet = make_fleet(frozenset({"llama"}), None)
    fleet.learned_models("a", frozenset({"qwen"}))
    assert fleet.state("a").models == frozenset({"llama"})


def test_health_counts_among_those_that_have_the_model() -> None:
    fleet = make_fleet(frozenset({"llama"}), frozenset({"qwen"}))
    up(fleet, "a", "b")
    fail(fleet, "a", STATUS)
    assert candidates(fleet, "llama") == "a", "unwell, but the only one that has it"
    fleet.connect_failed("a", 0.0)
    assert candidates(fleet, "llama") == ""


def test_a_fleet_of_nobody_has_no_candidates() -> None:
    fleet = Fleet([])
    assert candidates(fleet) == candidates(fleet, "llama") == ""
    assert not fleet.can_serve(0.0)


# Coming and going


def test_who_joins_gets_nothing_before_a_probe_has_passed() -> None:
    fleet = up(make_fleet())
    joined = fleet.add("d", "http://d")
    assert (joined.slot, fleet.state("d").state) == (3, State.STARTING)
    assert candidates(fleet) == "abc"
    fleet.probe_passed("d")
    assert candidates(fleet) == "abcd"


def test_who_joins_is_tried_when_nobody_else_could_be() -> None:
    fleet = up(make_fleet(n=1), "a")
    fleet.add("b", "http://b")
    assert candidates(fleet, without=("a",)) == "b"
    fail(fleet, "a", REFUSED)
    assert candidates(fleet) == "b"
    fleet.answered("b")
    assert fleet.state("b").state is State.UP


def test_who_joins_and_refuses_is_no_candidate() -> None:
    fleet = up(make_fleet(n=1), "a")
    fleet.add("b", "http://b")
    fail(fleet, "b", REFUSED, times=1)
    assert (fleet.state("b").state, candidates(fleet, without=("a",))) == (State.DOWN, "")


def test_a_slot_is_never_given_twice() -> None:
    fleet = make_fleet()
    removed = fleet.remove("c")
    again = fleet.add("c", "http://c")
    assert (removed.slot, again.slot) == (2, 3)
    assert (fleet.has(removed), fleet.has(again)) == (False, True)
    # What is still under way on the old one comes to its end.
    fleet.released("c", 0)


def test_a_name_is_in_a_fleet_once() -> None:
    fleet = make_fleet()
    with pytest.raises(ValueError, match="a is in the fleet already"):
        fleet.add("a", "http://elsewhere")
    with pytest.raises(KeyError):
        fleet.remove("d")


def test_models_follow_who_is_there_and_what_is_configured() -> None:
    fleet = up(make_fleet(frozenset({"m"}), frozenset({"n"})), "a", "b")
    fleet.remove("a")
    assert not fleet.knows_model("m")
    fleet.set_models("b", frozenset({"m", "o"}))
    assert (candidates(fleet, "m"), fleet.knows_model("n")) == ("b", False)
    # No longer configured: what was known stands until it is learned.
    fleet.set_models("b", None)
    assert fleet.knows_model("o")
    fleet.learned_models("b", frozenset({"p"}))
    assert (fleet.knows_model("o"), fleet.knows_model("p")) == (False, True)


def test_other_constants_hold_from_now_on() -> None:
    fleet = up(make_fleet())
    fleet.configure(HealthConstants(fall=1, eject_s=5))
    fail(fleet, "a", STATUS, times=1)
    assert fleet.state("a").state is State.DOWN


def test_who_is_drained_and_undrained_between_two_requests_is_gone_and_back() -> None:
    fleet = up(make_fleet())
    assert candidates(fleet) == "abc"
    fleet.drain("b")
    assert candidates(fleet) == "ac"
    fleet.undrain("b")
    assert candidates(fleet) == "abc"
