"""What a router reads off its engines' metrics, as old as its polling makes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation


@dataclass(frozen=True, slots=True)
class Gauge:
    """One engine's, as vLLM's metrics of the same names; `queued_tokens`, of prompts waiting, is SGLang's."""

    n_waiting: int
    n_running: int
    kv_usage_ratio: float
    queued_tokens: int


class Gauges:
    """All engines' gauges as of the last poll.

    The poll is made by the first decision that comes when a period has gone by, not on the tick of a clock. Under
    load that is the same, as decisions are many; in a lull the decision after it sees fresher values than a clock's,
    to the good of the baseline.
    """

    __slots__ = ("_period_s", "_polled", "_sim", "polled_s")

    def __init__(self, sim: "Simulation", period_s: float) -> None:
        self._sim = sim
        self._period_s = period_s
        self._polled: Sequence[Gauge] = ()
        self.polled_s = float("-inf")
        """When the last poll was."""

    def read(self, now_s: float) -> Sequence[Gauge]:
        """By slot."""
        if now_s - self.polled_s >= self._period_s:
            self._polled = [
                Gauge(e.n_waiting, e.n_running, e.kv_usage_ratio, sum(r.n_prompt for r in e.requests[e.n_running :]))
                for e in self._sim.engines
            ]
            self.polled_s = now_s
        return self._polled
