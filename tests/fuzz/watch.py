"""What must hold whatever the bytes: nothing reaches the top, and everything that was opened or taken is given back."""

import asyncio
import gc
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tests.fuzz.case import Finding

# A hang guard, no measure of speed: machines are busy.
PATIENCE_S = 20.0


class Watch(logging.Handler):
    """While it is open, notes what is logged as an error and what the loop could give to nobody."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.faults: list[str] = []
        self._n_fds = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        gc.collect()
        self._n_fds = n_open_files()
        self._tasks = asyncio.all_tasks()
        logging.getLogger().addHandler(self)
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().set_exception_handler(None)
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.faults.append(f"logged as an error: {record.getMessage()} {record.exc_text or ''}".strip())

    def check(self) -> None:
        """Raises Finding when something reached the top since the last time."""
        if self.faults:
            fault, self.faults = self.faults[0], []
            raise Finding(fault)

    async def wait_rest(self) -> None:
        """Until no more is open than in the beginning. Raises Finding when that does not come about."""
        await wait_until(lambda: not self._strays(), lambda: f"tasks stay: {self._strays()[:3]}")
        await wait_until(
            lambda: n_open_files() <= self._n_fds, lambda: f"{n_open_files() - self._n_fds} files stay open"
        )
        # Exceptions of tasks that nobody asked for are told when those are freed.
        gc.collect()
        await asyncio.sleep(0)
        self.check()

    def _strays(self) -> list[str]:
        # Whoever asks may be another task than who opened it.
        strays = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        return [task.get_name() for task in strays]

    def _unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"reached the loop: {context.get('message')}: {context.get('exception')!r}")


async def wait_until(holds: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Raises Finding, with what `otherwise` says, when it never `holds`."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise Finding(otherwise()) from None


def n_open_files() -> int:
    return len(os.listdir("/dev/fd"))
