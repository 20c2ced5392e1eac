"""The workload as it is played: each request says how late it was sent."""

import time
from collections.abc import Mapping
from typing import Any

from prefixroute.demo.client import MeasuringClient, Sample
from prefixroute.demo.drive import drive
from prefixroute.demo.workload import Conversation, Turn

BUSY_S = 0.05


class Client(MeasuringClient):
    """Answers at once, for which it keeps the processor."""

    def __init__(self, busy_s: float) -> None:
        super().__init__("http://127.0.0.1:1")
        self._busy_s = busy_s

    async def stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Sample:
        time.sleep(self._busy_s)
        return Sample(duration_s=self._busy_s, text="yes")


def conversation(arrival_s: float, n_turns: int = 1) -> Conversation:
    return Conversation(arrival_s, "You help.", tuple(Turn("and?", 1, 0.0) for _ in range(n_turns)))


async def test_a_machine_that_is_busy_sends_late_and_tells() -> None:
    samples = await drive([conversation(0.0) for _ in range(3)], Client(BUSY_S), model="m", speed=1.0)
    delays_s = [sample.send_delay_s for sample in samples]
    assert delays_s[1] - delays_s[0] >= BUSY_S
    assert delays_s[2] - delays_s[1] >= BUSY_S


async def test_waiting_for_an_answer_is_not_late() -> None:
    (_, second) = await drive([conversation(0.0, n_turns=2)], Client(BUSY_S), model="m", speed=1.0)
    assert second.send_delay_s < BUSY_S
