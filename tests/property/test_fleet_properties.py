"""Who may take a request is the same whether it was asked before or not: what is remembered of it never misleads."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from prefixroute.core.fleet import Fleet, HealthConstants, Instance, ProbeFailure

NAMES = ("a", "b", "c")
MODELS = ("m", "n", "nobody's", None)
names = st.sampled_from(NAMES)
lists = st.none() | st.frozensets(st.sampled_from(["m", "n"]))
events = st.one_of(
    st.tuples(st.just("probe_passed"), names),
    st.tuples(st.just("probe_passed"), names),
    st.tuples(st.just("probe_failed"), names, st.sampled_from(ProbeFailure)),
    st.tuples(st.just("connect_failed"), names),
    st.tuples(st.just("answered"), names),
    st.tuples(st.just("taken"), names),
    st.tuples(st.just("drain"), names),
    st.tuples(st.just("undrain"), names),
    st.tuples(st.just("learned_models"), names, lists.filter(lambda models: models is not None)),
    st.tuples(st.just("set_models"), names, lists),
    st.tuples(st.just("leave and come back"), names),
)


def happen(fleet: Fleet, event: tuple[object, ...], now_s: float) -> None:
    match event:
        case ("connect_failed", str(name)):
            fleet.connect_failed(name, now_s)
        case ("leave and come back", str(name)):
            fleet.remove(name)
            fleet.add(name, f"http://{name}")
        case (str(what), *arguments):
            getattr(fleet, what)(*arguments)
        case _:
            raise AssertionError(event)


def asked(fleet: Fleet, now_s: float) -> list[list[Instance]]:
    return [list(fleet.candidates(model, now_s)) for model in MODELS]


@given(st.lists(lists, min_size=3, max_size=3), st.lists(st.tuples(events, st.floats(0, 3)), max_size=12))
def test_a_fleet_that_is_asked_all_the_time_answers_as_one_that_is_asked_once(
    models: list[frozenset[str] | None], happened: list[tuple[tuple[object, ...], float]]
) -> None:
    def made() -> Fleet:
        fleet = Fleet(
            [Instance(name, f"http://{name}", slot, models[slot]) for slot, name in enumerate(NAMES)],
            HealthConstants(fall=1, rise=2),
        )
        for name in NAMES:  # all up is when most is remembered
            fleet.probe_passed(name)
        return fleet

    fleet = made()
    times_s = list(accumulate((pause_s for _, pause_s in happened), initial=0.0))[1:]
    asked(fleet, 0.0)
    for n, ((event, _), now_s) in enumerate(zip(happened, times_s, strict=True), 1):
        happen(fleet, event, now_s)
        other = made()
        for (earlier, _), at_s in zip(happened[:n], times_s[:n], strict=True):
            happen(other, earlier, at_s)
        assert asked(fleet, now_s) == asked(other, now_s)
