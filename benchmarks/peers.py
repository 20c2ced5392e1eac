"""The proxies that can be measured, and how each is started, paused, resumed and stopped."""

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bodies import CHAT_2K_8K
from benchmarks.load import UPSTREAM_PORTS
from benchmarks.processes import (
    BenchmarkError,
    group_pids,
    pinned,
    require_free_port,
    signal_group,
    stop_group,
)
from benchmarks.venvs import CHECKOUT, python_of, require_package

UPSTREAM_URLS = tuple(f"http://127.0.0.1:{port}" for port in UPSTREAM_PORTS)
START_S = 30.0
# A proxy that was paused catches up with its timers before it is measured.
RESUME_S = 0.2
LOG_TAIL_LINES = 12
# From a peer's port to the port of its metrics.
METRICS_PORT_OFFSET = 90


@dataclass(frozen=True, slots=True)
class Peer:
    """A proxy: how to start it, and the port where it listens on the loopback."""

    name: str
    port: int
    command: tuple[str, ...]
    lockstep_port: int | None = None
    """Where its lockstep streams are asked for, if not from `port`."""
    environment: tuple[tuple[str, str], ...] = ()
    """Besides the benchmark's own."""
    install: str = ""
    """How to get its program."""
    package: tuple[str, Path] | None = None
    """What is installed from the package registry, and the virtual environment where."""

    def require_installed(self) -> None:
        """Gets what can be got. Raises `BenchmarkError` when there is no such program."""
        if self.package is not None:
            try:
                require_package(*self.package)
            except BenchmarkError as error:
                raise BenchmarkError(f"{error}\nGo without it: leave {self.name} out of --peers") from None
        program = self.command[0]
        if shutil.which(program) is None:
            raise BenchmarkError(f"{program} is missing" + (f": {self.install}" if self.install else ""))


def known_peers(work: Path, python: str = sys.executable) -> dict[str, Peer]:
    """Every peer by name; PrefixRoute is run by `python`. Writes what they read at their start into `work`."""
    write_configuration(work, "nginx.conf", 9001, "server 127.0.0.1:{port};")
    write_configuration(work, "haproxy.cfg", 9006, "server instance-{port} 127.0.0.1:{port}")
    upstream_ports = ",".join(map(str, UPSTREAM_PORTS))
    (work / "nginx-temp").mkdir(parents=True, exist_ok=True)
    peers = (
        # In lockstep, mock and clients must be one process: the load generator talks to itself.
        Peer("direct", 8111, (str(work / "bin" / "lb"), "--mock", "8111"), lockstep_port=UPSTREAM_PORTS[0]),
        Peer("relay", 9000, (str(work / "bin" / "relay"), "9000", upstream_ports)),
        Peer(
            "nginx",
            9001,
            ("nginx", "-p", f"{work}/", "-e", "stderr", "-c", "nginx.conf"),
            install="apt-get install nginx",
        ),
        prefixroute("prefixroute", 9002, python, lane="auto"),
        prefixroute("prefixroute-aiohttp", 9003, python, lane="aiohttp"),
        vllm_router("vllm-router", 9004, work, policy="round_robin"),
        vllm_router("vllm-router-cache", 9005, work, policy="cache_aware"),
        Peer("haproxy", 9006, ("haproxy", "-db", "-f", f"{work}/haproxy.cfg"), install="apt-get install haproxy"),
    )
    return {peer.name: peer for peer in peers}


def prefixroute(name: str, port: int, python: str, *, lane: str) -> Peer:
    """As a user starts it: all settings but the lane are the default ones."""
    return Peer(
        name,
        port,
        (
            *(python, "-m", "prefixroute", "serve", *UPSTREAM_URLS),
            *("--port", str(port), "--admin-port", str(port + METRICS_PORT_OFFSET)),
        ),
        environment=(("PREFIXROUTE_LANE", lane),),
    )


def vllm_router(name: str, port: int, work: Path, *, policy: str) -> Peer:
    folder = work / "venvs" / "vllm-router"
    return Peer(
        name,
        port,
        (
            *(str(python_of(folder)), "-m", "vllm_router.launch_router", "--worker-urls", *UPSTREAM_URLS),
            *("--policy", policy, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
            # Its own default turns requests away that others take.
            *("--prometheus-port", str(port + METRICS_PORT_OFFSET), "--max-concurrent-requests", "4096"),
        ),
        package=("vllm-router", folder),
    )


def write_configuration(work: Path, name: str, port: int, server: str) -> None:
    """Fill in `name` and write it into `work`; a line `server` stands there for each upstream."""
    text = (Path(__file__).parent / name).read_text(encoding="ascii")
    indentation = next(line.partition("@")[0] for line in text.splitlines() if line.strip() == "@UPSTREAMS@")
    servers = f"\n{indentation}".join(server.format(port=upstream) for upstream in UPSTREAM_PORTS)
    text = text.replace("@PORT@", str(port)).replace("@UPSTREAMS@", servers)
    (work / name).write_text(text, encoding="ascii")


class RunningPeer:
    """A started peer. Paused, except inside `resumed`."""

    def __init__(self, peer: Peer, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.peer = peer
        self._process = process
        self._log_path = log_path

    @contextlib.contextmanager
    def resumed(self) -> Iterator[list[int]]:
        """Gives the peer's process ids."""
        signal_group(self._process.pid, signal.SIGCONT)
        time.sleep(RESUME_S)
        yield group_pids(self._process.pid)
        self.pause()

    def pause(self) -> None:
        signal_group(self._process.pid, signal.SIGSTOP)

    def check_alive(self) -> None:
        """Raises `BenchmarkError` with the end of its log when the peer has exited."""
        if self._process.poll() is not None:
            raise self._failure(f"has exited with code {self._process.returncode}")

    def wait_ready(self, body: bytes) -> None:
        """Until it answers `body` with 200."""
        deadline_s = time.monotonic() + START_S
        while not answers(self.peer.port, body):
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise self._failure(f"does not answer with 200 on port {self.peer.port}")
            time.sleep(0.1)
        self.check_alive()

    def _failure(self, what: str) -> BenchmarkError:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return BenchmarkError("\n".join([f"{self.peer.name} {what}; the end of {self._log_path}:", *lines]))


def answers(port: int, body: bytes) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def started(peer: Peer, work: Path, core: int) -> Iterator[RunningPeer]:
    """Start a peer on `core`, wait until it answers, pause it; stop it at the end."""
    require_free_port(peer.port)
    log_path = work / "logs" / f"{peer.name}.log"
    with log_path.open("wb") as log, pinned(core):
        process = subprocess.Popen(
            peer.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=CHECKOUT,
            env=os.environ | dict(peer.environment),
            start_new_session=True,
        )
    try:
        running = RunningPeer(peer, process, log_path)
        with (work / "bodies" / CHAT_2K_8K.name).open("rb") as bodies:
            running.wait_ready(bodies.readline())
        running.pause()
        yield running
    finally:
        stop_group(process)
