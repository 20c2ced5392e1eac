"""Child processes that are watched while they run and surely ended afterwards."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from re import Match, Pattern
from typing import Any, TypeVar

from prefixroute.config.load import BIND_VARIABLE, ENV_PREFIX
from prefixroute.errors import PrefixRouteError

# Python and its libraries need a second or two on a busy machine.
START_S = 30.0
# From SIGTERM to SIGKILL.
STOP_S = 5.0
_KEPT_LINES = 20
_MAX_LINE_BYTES = 1024 * 1024

T = TypeVar("T")


class ChildError(PrefixRouteError):
    """A process that the demo needs did not start, or ended too early."""

    code = "child_ended"


class Child:
    """A command of ours in a process of its own. Made by `running_child`."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self._process = process
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._changed = asyncio.Event()
        self._readers = [
            asyncio.create_task(self._read(stream)) for stream in (process.stdout, process.stderr) if stream is not None
        ]
        self.ended = asyncio.create_task(self._wait_end(), name=f"end of {name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def error(self) -> ChildError:
        """That it has ended, and its last words. Indented lines are part of something longer: no last words."""
        words = [line for line in self._lines if not line[0].isspace()]
        said = f": {words[-1]}" if words else ""
        return ChildError(f"{self.name} ended unexpectedly ({_how(self._process.returncode)}){said}")

    async def wait_lines(self, pattern: Pattern[str], n: int) -> list[Match[str]]:
        """The first `n` lines that match. It is ready then, and what it has said so far is forgotten.

        Raises ChildError if it ends before, or takes too long.
        """
        try:
            async with asyncio.timeout(START_S):
                while len(found := [m for line in self._lines if (m := pattern.search(line))]) < n:
                    if self.ended.done():
                        raise self.error()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ChildError(f"{self.name} did not start within {START_S:g} s") from None
        self._lines.clear()
        return found[:n]

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.wait([self.ended])
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await asyncio.wait([self.ended])

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._lines.append(text)
                self._changed.set()

    async def _wait_end(self) -> None:
        await asyncio.gather(*self._readers)
        await self._process.wait()
        self._changed.set()


@asynccontextmanager
async def running_child(name: str, arguments: Sequence[str]) -> AsyncIterator[Child]:
    """`prefixroute ARGUMENTS` while the context is open, with default settings but for what `arguments` say."""
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX) and key != BIND_VARIABLE
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "prefixroute.demo.child", *arguments),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=environ,
        limit=_MAX_LINE_BYTES,
        # Ctrl-C is for the parent, which ends its children in order.
        start_new_session=True,
    )
    child = Child(name, process)
    try:
        yield child
    finally:
        await child.stop()


async def while_alive(work: Coroutine[Any, Any, T], children: Sequence[Child]) -> T:
    """What `work` gives. Raises ChildError, and ends `work`, as soon as one of `children` has ended."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task, *(child.ended for child in children)], return_when=asyncio.FIRST_COMPLETED)
        for child in children:
            if child.ended.done():
                raise child.error()
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _how(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"signal {-returncode}"
    return f"exit code {returncode}"
