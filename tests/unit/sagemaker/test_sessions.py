"""Which sessions are remembered, and for how long."""

from prefixroute.sagemaker.sessions import Home, Sessions

HERE, THERE = Home("gpu-a", "all", None), Home("gpu-b", "all", "lora")


def test_a_session_lives_until_it_ends_expires_or_its_instance_leaves() -> None:
    sessions = Sessions(10)
    sessions.opened("e", "one", HERE, None)
    sessions.opened("e", "two", HERE, 5.0)
    sessions.opened("f", "one", THERE, None)
    assert [sessions.home("e", "one", 1e9), sessions.home("e", "two", 4.9), sessions.home("f", "one", 0)] == [
        HERE, HERE, THERE,
    ]  # fmt: skip
    assert sessions.home("e", "two", 5.0) is None
    sessions.closed("e", "one")
    sessions.closed("e", "one")
    assert (sessions.home("e", "one", 0), len(sessions)) == (None, 1)
    sessions.forget("gpu-b")
    sessions.forget("gpu-b")
    assert len(sessions) == 0


def test_a_session_that_is_opened_anew_elsewhere_has_left_its_instance() -> None:
    sessions = Sessions(10)
    sessions.opened("e", "one", HERE, None)
    sessions.opened("e", "one", THERE, None)
    sessions.forget("gpu-a")
    assert sessions.home("e", "one", 0) == THERE


def test_the_least_used_goes_first() -> None:
    sessions = Sessions(2)
    sessions.opened("e", "one", HERE, None)
    sessions.opened("e", "two", THERE, None)
    sessions.home("e", "one", 0)
    sessions.home("e", "two", 0, touch=False)
    sessions.opened("e", "three", HERE, None)
    assert [sessions.home("e", name, 0) for name in ("one", "two", "three")] == [HERE, None, HERE]
    sessions.configure(1)
    assert len(sessions) == 1
    sessions.forget("gpu-b")
    assert sessions.home("e", "three", 0) == HERE


def test_who_only_looks_changes_nothing() -> None:
    sessions = Sessions(2)
    sessions.opened("e", "one", HERE, 5.0)
    assert sessions.home("e", "one", 9.0, touch=False) is None
    assert sessions.home("e", "one", 4.0) == HERE
