"""Runs work that a signal may end."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any


def run_until_signal(work: Callable[[], Coroutine[Any, Any, None]]) -> int | None:
    """Run `work()` to its end, or to the first SIGINT or SIGTERM, which cancels it: then the signal's number.

    Later signals are ignored: what is cancelled has its own limits on how long it takes to stop.
    """
    received: list[int] = []

    async def main() -> None:
        task = asyncio.create_task(work())
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if not received:
                received.append(number)
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    with asyncio.Runner() as runner:
        runner.run(main())
    return received[0] if received else None
