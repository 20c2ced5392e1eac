"""Runs an engine in real time on an event loop.

Steps lie on a timeline of their own: one begins where the one before was due to end, not when the loop got
round to it, so delays do not add up. After a stall of more than `MAX_LAG_S` the timeline moves to the present
instead: what was lost stays lost, and nothing runs faster than it could. (uvloop's clock and timers count
whole milliseconds, which moves single steps by up to one.)
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol

from prefixroute.demo.engine.scheduler import Engine, RequestT

MAX_LAG_S = 0.05


class Timer(Protocol):
    def cancel(self) -> object: ...


class Timeline(Protocol):
    """As much of an event loop as is needed."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer: ...


class EngineDriver(Generic[RequestT]):
    """Calls `deliver(requests)` at the end of each step with the requests that got a token."""

    def __init__(self, engine: Engine[RequestT], deliver: Callable[[Sequence[RequestT]], None], loop: Timeline) -> None:
        self._engine = engine
        self._deliver = deliver
        self._loop = loop
        self._timer: Timer | None = None
        self._due_s = 0.0
        self._woken_s = 0.0
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    def now_s(self) -> float:
        return self._loop.time()

    def wake(self) -> None:
        """Begin a step if none is under way: to be called when requests were added."""
        self._woken_s = self._loop.time()
        if self._timer is None and not self._paused:
            self._begin_step(self._woken_s)

    def pause(self) -> None:
        """Begin no further steps; the present one is finished."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.wake()

    def close(self) -> None:
        """Stop for good, in the middle of a step if need be."""
        self._paused = True
        if self._timer is not None:
            self._timer.cancel()

    def _begin_step(self, now_s: float) -> None:
        duration_s = self._engine.start_step(now_s)
        if duration_s is None:
            self._timer = None
            return
        self._due_s = now_s + duration_s
        self._timer = self._loop.call_at(self._due_s, self._finish_step)

    def _finish_step(self) -> None:
        end_s = self._due_s
        now_s = self._loop.time()
        if now_s - end_s > MAX_LAG_S:
            end_s = now_s
        self._deliver(self._engine.finish_step(end_s))
        self._timer = None
        if not self._paused:
            # A request that came when this step was overdue must not be computed before it came.
            self._begin_step(max(end_s, self._woken_s))
