"""Servers as processes: started on free ports, watched until they are ready, gone when this process is."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

# Three servers at once take two minutes on two cores.
READY_S = 600.0
STOP_S = 20.0
_POLL_S = 0.1
_LOG_TAIL_LINES = 15

# Kills the process groups it was told of, when whoever told it is gone, however that went.
_KEEPER = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    number = int(line)
    groups.add(number) if number > 0 else groups.discard(-number)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class Keeper:
    """Sees to it that no server outlives this process, even one that was killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _KEEPER], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def keep(self, group: int) -> None:
        self._tell(group)

    def forget(self, group: int) -> None:
        self._tell(-group)

    def close(self) -> None:
        """Kills what is still kept."""
        self._process.communicate()

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()


class ServerProcess:
    """A server in a process group of its own, at one address for all of its starts.

    All methods block: call them from a thread where a loop runs.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        keeper: Keeper,
        folder: Path,
        environ: Mapping[str, str] | None = None,
        health_path: str = "/health",
    ) -> None:
        """`command` makes it listen on `port` of 127.0.0.1; what it writes goes to a file in `folder`."""
        self.name = name
        self.port = port
        self.log = folder / f"{name}-{port}.log"
        self._command = command
        # Ours are settings to our command: it refuses those of this suite, and would obey those of whoever runs it.
        others = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXROUTE_")}
        self._environ = {**others, **(environ or {})}
        self._keeper = keeper
        self._health_path = health_path
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Begins to; see `wait_ready`."""
        assert self._process is None, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["nice", "-n", "5", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )
        self._keeper.keep(self._process.pid)

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until it says that it is well. Raises RuntimeError with the end of its log when it does not."""
        until_s = time.monotonic() + timeout_s
        while not self.is_well():
            if not self.running or time.monotonic() > until_s:
                why = "did not become ready" if self.running else "ended"
                raise RuntimeError(f"{self.name} {why} ({self.log}):\n{self._log_tail()}")
            time.sleep(_POLL_S)

    def signal(self, number: signal.Signals) -> None:
        """To the server itself, not its helpers."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait_ended(self, timeout_s: float = STOP_S) -> None:
        """Until it is gone, with all of its group; what has not ended by then is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        # Its helpers, and itself if need be.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._keeper.forget(process.pid)

    def stop(self) -> None:
        if self.running:
            self.signal(signal.SIGTERM)
        self.wait_ended()

    def kill(self) -> None:
        """Ends it with no warning, helpers too."""
        self.wait_ended(timeout_s=0.0)

    def restart(self) -> None:
        """Another process at the same address, once it is ready."""
        self.kill()
        self.start()
        self.wait_ready()

    def is_well(self) -> bool:
        """Whether it answers its health check."""
        if not self.running:
            return False
        try:
            with urllib.request.urlopen(f"{self.url}{self._health_path}", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])


def free_ports(n: int) -> list[int]:
    """All different. Below those that the system gives away by itself: a server takes a minute until it listens."""
    ports: list[int] = []
    for port in Random().sample(range(20_000, 30_000), 10_000):
        if len(ports) == n:
            return ports
        with suppress(OSError), socket.create_server(("", port)):
            ports.append(port)
    raise RuntimeError(f"there are no {n} free ports from 20000 to 29999")
