"""The command as a process, for tests that run it as an operator does."""

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Any

# A line that never comes: uvloop does not let pytest-timeout's signal through.
_PATIENCE_S = 30


class Command:
    """The command in a process of its own, and everything it has written to standard error so far."""

    def __init__(self, process: Process) -> None:
        self.lines: list[str] = []
        self.url = ""
        self.admin_url = ""
        self._process = process
        self._grown = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> str:
        return "".join(self.lines)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def wait_line(self, pattern: str, *, since: int = 0) -> re.Match[str]:
        """The first line of standard error in which `pattern` is found, from the start or line `since`."""
        n_seen = since
        while True:
            for line in self.lines[n_seen:]:
                if (match := re.search(pattern, line)) is not None:
                    return match
            n_seen = len(self.lines)
            assert not self._reading.done(), f"ended without a line like {pattern!r}:\n{self.stderr}"
            self._grown.clear()
            await self._grown.wait()

    async def wait_serving(self) -> None:
        """Until it has said where it listens."""
        self.url = (await self.wait_line(r'^  requests  (\S+)|"requests":"([^"]+)"')).expand(r"\1\2")
        self.admin_url = (await self.wait_line(r'^  metrics   (\S+)/metrics|"metrics":"([^"]+)/metrics"')).expand(
            r"\1\2"
        )

    async def wait_exit(self) -> tuple[int, str]:
        """Exit code (minus the signal if one ended it) and standard output."""
        assert self._process.stdout is not None
        out = await self._process.stdout.read()
        await self._reading
        return await self._process.wait(), out.decode()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self.wait_exit()

    async def _read(self) -> None:
        if self._process.stderr is not None:
            async for line in self._process.stderr:
                self.lines.append(line.decode())
                self._grown.set()
        self._grown.set()


class Commands:
    """Starts commands in an empty directory, with an environment that sets nothing but `environ`."""

    def __init__(self, home: Path, environ: dict[str, str] | None = None) -> None:
        self.home = home
        self._environ = environ or {}
        self._started: list[Command] = []

    async def start(
        self,
        *arguments: str,
        environ: dict[str, str] | None = None,
        before: tuple[str, ...] = (),
        stderr: int = PIPE,
    ) -> Command:
        """`before`: a command that ours is the arguments of. `stderr`: where to, if it is not to be read here."""
        settings = ("PREFIXROUTE_", "SAGEMAKER_")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(settings)}
        process = await asyncio.create_subprocess_exec(
            *before,
            # What is not closed says so at the end.
            *(sys.executable, "-W", "always::ResourceWarning", "-m", "prefixroute", *arguments),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=stderr,
            cwd=self.home,
            env={**inherited, "COLUMNS": "120", **self._environ, **(environ or {})},
        )
        command = Command(process)
        self._started.append(command)
        return command

    async def serve(self, *arguments: str, **settings: Any) -> Command:
        """`prefixroute serve` on free ports, once it listens."""
        command = await self.start("serve", "--port", "0", "--admin-port", "0", *arguments, **settings)
        await command.wait_serving()
        return command

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command that ends by itself."""
        command = await self.start(*arguments)
        code, out = await command.wait_exit()
        return code, out, command.stderr

    async def end(self) -> None:
        for command in self._started:
            await command.kill()
        for command in self._started:
            assert "ResourceWarning" not in command.stderr
            assert "Traceback" not in command.stderr
