"""How late the loop is."""

import asyncio
import time

from prefixroute.metrics.loop_lag import LoopLag


async def test_a_step_that_takes_long_makes_timers_late() -> None:
    lag = LoopLag(interval_s=0.001)
    watching = asyncio.create_task(lag.run())
    await asyncio.sleep(0)  # it waits for its timer from here on
    time.sleep(0.06)  # the step
    while not sum(lag.lags.counts):
        await asyncio.sleep(0)
    watching.cancel()
    await asyncio.wait([watching])

    assert lag.lags.total > 0.05
    # Above the bound of 50 ms.
    assert sum(lag.lags.counts[6:]) == 1
