"""The processes of a run: the command before three instances, and what is read of each."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefixroute.testing import RawClient
from tests.chaos.instance import Mode
from tests.chaos.judge import Delivery

NAMES = ("gpu-a", "gpu-b", "gpu-c")
# Guards against a run that never ends; nothing is measured by them.
PATIENCE_S = 45.0
_SAMPLE = re.compile(r"^prefixroute_(\w+?)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class InstanceProcess:
    """One instance, which can be killed, stopped and started again at the same address."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.port = _free_port()
        self.journal = folder / f"{name}.journal"
        self._process: Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.instance", str(self.port), str(self.journal)), stdin=PIPE, stdout=PIPE
        )
        await self._line()

    async def enter(self, mode: Mode) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{mode.value}\n".encode())
        await self._line()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            # Its pipes, too.
            await process.communicate()

    async def _line(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert await self._process.stdout.readline(), f"{self.name} has ended"


class Stand:
    """`settings` go into the router's configuration. Use as an async context manager."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.instances = [InstanceProcess(name, folder) for name in NAMES]
        self.url = ""
        self.pid = 0
        self._admin_url = ""
        self._settings = settings
        self._config = folder / "config.json"
        self._log = folder / "router.log"
        self._process: Process | None = None

    def __getitem__(self, name: str) -> InstanceProcess:
        return self.instances[NAMES.index(name)]

    async def __aenter__(self) -> Self:
        try:
            for one in self.instances:
                await one.start()
            await self._serve()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end()

    async def _serve(self) -> None:
        instances = [{"url": f"http://127.0.0.1:{one.port}", "name": one.name} for one in self.instances]
        health = {"interval_s": 0.2, "timeout_s": 1.0, "fall": 2, "rise": 2, "eject_s": 0.2, "eject_max_s": 1.0}
        settings = {"fleet": {"instances": instances, "health": health}, "log": {"format": "json"}, **self._settings}
        self._config.write_text(json.dumps(settings), encoding="utf-8")
        command = (sys.executable, "-m", "prefixroute", "serve", "--config", str(self._config))
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(*command, "--port", "0", "--admin-port", "0"), stdin=DEVNULL, stdout=DEVNULL, stderr=log
            )
        self.pid = self._process.pid
        async with asyncio.timeout(PATIENCE_S):
            while not self.url:
                await asyncio.sleep(0.02)
                assert self._process.returncode is None, self._log.read_text(encoding="utf-8")
                for line in self._lines():
                    if "requests" in line and "metrics" in line:
                        self.url, self._admin_url = line["requests"], line["metrics"].removesuffix("/metrics")
        await self.wait_up(NAMES)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        for one in self.instances:
            await one.kill()

    async def stop_router(self) -> int:
        """Ends the router as a user does, so that its log is whole. Returns its exit code."""
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            return await process.wait()

    # ------------------------------------------------------------------ what is read

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """By name and label values, in the order of the labels' names."""
        async with RawClient(self._admin_url) as client:
            answer = await client.request("GET", "/metrics")
        return {
            (name, *(value for _, value in _LABEL.findall(labels))): float(number)
            for name, labels, number in _SAMPLE.findall(answer.body.decode())
        }

    async def wait_up(self, names: Sequence[str]) -> None:
        """Until the router says of all of them that they are up."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                metrics = await self.metrics()
                if all(metrics.get(("upstream_state", "up", name)) for name in names):
                    return
                await asyncio.sleep(0.05)

    async def wait_out(self, name: str) -> None:
        """Until the router has taken it out."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                metrics = await self.metrics()
                if any(metrics.get(("upstream_state", state, name)) for state in ("down", "ejected")):
                    return
                await asyncio.sleep(0.05)

    def deliveries(self) -> dict[str, list[Delivery]]:
        """What the instances counted, by marker, in the order of time."""
        seen: dict[str, list[Delivery]] = {}
        for one in self.instances:
            for line in one.journal.read_text(encoding="utf-8").splitlines() if one.journal.exists() else ():
                kind, marker, *rest = line.split()
                if kind == "got":
                    reused, mode, at_ns = rest
                    seen.setdefault(marker, []).append(Delivery(one.name, reused == "reused", mode, int(at_ns)))
                else:
                    seen[marker][-1].began = True
        for of in seen.values():
            of.sort(key=lambda delivery: delivery.at_ns)
        return seen

    def records(self) -> dict[str, dict[str, Any]]:
        """The router's access log, by marker."""
        return {line["request_id"]: line for line in self._lines() if line.get("logger") == "prefixroute.access"}

    def errors(self) -> list[str]:
        """What the router logged as an error, and what is no line of a log."""
        text = self._log.read_text(encoding="utf-8")
        strays = [line for line in text.splitlines() if not line.startswith("{")]
        return strays + [str(line["message"]) for line in self._lines() if line.get("level") in ("error", "critical")]

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        for line in self._log.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
        return lines


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rss_bytes(pid: int) -> int:
    """Memory of a process, as the kernel counts it."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
