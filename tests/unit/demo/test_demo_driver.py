"""The driver on a timeline that the test moves."""

from collections.abc import Callable, Sequence

import pytest

from prefixroute.demo.engine import Engine, EngineConfig
from prefixroute.demo.engine.request import EngineRequest
from prefixroute.demo.server.driver import MAX_LAG_S, EngineDriver

# Each step takes exactly a millisecond and a quarter.
STEP_S = 0.00125
CONFIG = EngineConfig(step_s=STEP_S, step_per_sequence_s=0.0, step_per_token_s=0.0, prefill_tokens_per_s=float("inf"))


class ManualTimer:
    def __init__(self, when: float, callback: Callable[[], object]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualLoop:
    """Runs the one timer that is set, `lag_s` late."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timer: ManualTimer | None = None

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[], object], /) -> ManualTimer:
        self.timer = ManualTimer(when, callback)
        return self.timer

    def fire(self, lag_s: float = 0.0) -> bool:
        timer, self.timer = self.timer, None
        if timer is None or timer.cancelled:
            return False
        self.now_s = max(self.now_s, timer.when) + lag_s
        timer.callback()
        return True


class Rig:
    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.engine: Engine[EngineRequest] = Engine(CONFIG)
        self.delivered: list[Sequence[EngineRequest]] = []
        self.driver = EngineDriver(self.engine, self.delivered.append, self.loop)

    def add(self, n_output: int) -> EngineRequest:
        one = EngineRequest(10, n_output, [])
        self.engine.add(one, self.loop.now_s)
        self.driver.wake()
        return one


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_late_callbacks_do_not_add_up(rig: Rig) -> None:
    one = rig.add(100)
    while rig.loop.fire(lag_s=0.0007):
        pass
    assert len(rig.delivered) == 100
    assert one.finished_s == pytest.approx(100.0 + 100 * STEP_S)


def test_a_stall_is_not_caught_up_with(rig: Rig) -> None:
    one = rig.add(2)
    rig.loop.fire(lag_s=2 * MAX_LAG_S)
    assert one.first_token_s == rig.loop.now_s
    rig.loop.fire()
    assert one.finished_s == pytest.approx(100.0 + 2 * STEP_S + 2 * MAX_LAG_S)


def test_a_request_is_not_computed_before_it_came(rig: Rig) -> None:
    rig.add(1)
    rig.loop.now_s += 0.01  # the step is overdue
    late = rig.add(1)
    rig.loop.fire()
    rig.loop.fire()
    assert late.first_token_s == pytest.approx(100.01 + STEP_S)


def test_an_idle_driver_sets_no_timer_and_wakes_up_again(rig: Rig) -> None:
    rig.add(1)
    rig.loop.fire()
    assert rig.loop.timer is None
    rig.add(1)
    assert rig.loop.timer is not None


def test_paused_it_begins_nothing(rig: Rig) -> None:
    rig.driver.pause()
    one = rig.add(1)
    assert rig.loop.timer is None
    rig.driver.resume()
    rig.loop.fire()
    assert one.finish_reason is not None


def test_closed_it_stops_in_the_middle_of_a_step(rig: Rig) -> None:
    rig.add(1)
    rig.driver.close()
    assert not rig.loop.fire()
    assert rig.delivered == []
