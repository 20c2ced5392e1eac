"""The load generator: its workloads, what a run of one measures, and the process that runs them.

The work is done in C (`loadgen/`), because a load generator in Python would be slower than the proxies.
"""

import contextlib
import json
import select
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.bodies import CHAT_2K_8K, CHAT_32K, CHAT_500K, BodyFile
from benchmarks.processes import BenchmarkError, pinned, require_free_port, stop_group

SOURCES = Path(__file__).parent / "loadgen"
PROGRAMS = {"lb": ("lb.c", "load.c", "mock.c", "wire.c"), "relay": ("relay.c",)}
UPSTREAM_PORTS = (8101, 8102, 8103, 8104)
LOCKSTEP = -1
# A run ends by the load generator's own clock; this much later it is taken for dead.
GRACE_S = 25.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What one test does: `clients` connections, each sending its next request when the last is answered.

    Streams have `chunks` chunks, `interval_us` apart (0: back to back, LOCKSTEP: when the last one arrived).
    With `bursts`, all clients connect and ask at once, that often; `run_s` is what all of it may take.
    `idle` streams are opened over one interval, measured when every one has had a chunk, and left by their clients.
    """

    name: str
    bodies: BodyFile
    clients: int
    warm_s: float
    run_s: float
    chunks: int = 0
    interval_us: int = 0
    bursts: int = 0
    idle: bool = False

    @property
    def mode(self) -> str:
        if self.bursts:
            return "burst"
        if self.idle:
            return "idle"
        return "stream" if self.streams else "unary"

    @property
    def counts_chunks(self) -> bool:
        """Whether a chunk, not a request, is what its CPU time is divided by."""
        return self.chunks > 10

    @property
    def streams(self) -> bool:
        return self.chunks > 0


WORKLOADS = {
    workload.name: workload
    for workload in (
        # First, when a peer has been paused for longer than it keeps connections: those upstream are made anew too.
        Workload("burst", CHAT_2K_8K, clients=256, warm_s=0, run_s=10, bursts=5),
        Workload("c1", CHAT_2K_8K, clients=1, warm_s=0.3, run_s=1.2),
        Workload("c32", CHAT_2K_8K, clients=32, warm_s=0.4, run_s=1.6),
        Workload("c32-32k", CHAT_32K, clients=32, warm_s=0.3, run_s=1.3),
        Workload("c8-500k", CHAT_500K, clients=8, warm_s=0.4, run_s=1.5),
        Workload("c256", CHAT_2K_8K, clients=256, warm_s=0.6, run_s=1.8),
        Workload("lock", CHAT_2K_8K, clients=64, warm_s=0.5, run_s=1.8, chunks=100, interval_us=LOCKSTEP),
        Workload("paced", CHAT_2K_8K, clients=64, warm_s=1.2, run_s=2.2, chunks=50, interval_us=20_000),
        Workload("ttft", CHAT_2K_8K, clients=1, warm_s=0.3, run_s=1.2, chunks=3),
        Workload("idle", CHAT_2K_8K, clients=1000, warm_s=1.5, run_s=4, chunks=12, interval_us=1_000_000, idle=True),
    )
}


@dataclass(frozen=True, slots=True)
class Quantiles:
    n: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run measured. Errors and stalls count from its first connection on, the rest while measuring."""

    measured_s: float
    requests: int
    chunks: int
    errors: int
    stalls: int
    """Lockstep chunks that the proxy held back for 100 ms, until the next one was sent after them."""
    slow: int
    """Requests answered later than 250 ms (a stream: to its end)."""
    unanswered: int
    """Requests under way when measuring ended that had no whole answer 2 s later."""
    answer_us: Quantiles | None
    """From sending a request to its whole answer; of a stream, to its first chunk."""
    chunk_us: Quantiles | None
    """From the mock's sending of a chunk to the client's reading of it."""
    proxy_cpu_s: float | None
    load_cpu_s: float

    @property
    def failed(self) -> int:
        return self.errors + self.unanswered


def read_sample(line: str) -> Sample:
    fields: dict[str, Any] = json.loads(line)
    for name in ("answer_us", "chunk_us"):
        if fields[name] is not None:
            fields[name] = Quantiles(**fields[name])
    return Sample(**fields)


def build_programs(folder: Path) -> None:
    """Compile the C programs into `folder`."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise BenchmarkError("gcc is missing: apt-get install gcc libc6-dev")
    folder.mkdir(parents=True, exist_ok=True)
    for program, sources in PROGRAMS.items():
        command = [compiler, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-o", str(folder / program), *sources]
        done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchmarkError(f"gcc could not compile {program} (Linux, glibc 2.35 or newer):\n{done.stderr}")


class LoadGenerator:
    """The running process: mock instances on `ports`, and clients when told.

    With `spins` it does not sleep while it measures, so that no proxy has to wake its core: README.md says why.
    """

    def __init__(self, work: Path, core: int, *, spins: bool = False, ports: Sequence[int] = UPSTREAM_PORTS) -> None:
        for port in ports:
            require_free_port(port)
        self._log_path = work / "logs" / "load.log"
        with self._log_path.open("wb") as log, pinned(core):
            self._process = subprocess.Popen(
                [work / "bin" / "lb", *(["--spin"] if spins else []), ",".join(map(str, ports))],
                cwd=work / "bodies",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        self._read_line(GRACE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stop_group(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, workload: Workload, port: int, proxy_pids: Sequence[int]) -> Sample:
        """One run against the proxy on `port`. Takes `warm_s + run_s`, and up to 2 s for the last answers."""
        assert self._process.stdin is not None
        arguments: dict[str, object] = {
            "port": port,
            "bodies": workload.bodies.name,
            "mode": workload.mode,
            "clients": workload.clients,
            "warm_s": workload.warm_s,
            "run_s": workload.run_s,
        }
        if workload.streams:
            arguments |= {"chunks": workload.chunks, "interval_us": workload.interval_us}
        if workload.bursts:
            arguments["bursts"] = workload.bursts
        if proxy_pids:
            arguments["pids"] = ",".join(map(str, proxy_pids))
        # When it is gone, the read says so.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("run " + " ".join(f"{k}={v}" for k, v in arguments.items()) + "\n")
        return read_sample(self._read_line(workload.warm_s + workload.run_s + GRACE_S))

    def _read_line(self, timeout_s: float) -> str:
        """The load generator writes a line at once, so a readable pipe holds a whole one."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            raise BenchmarkError(f"the load generator failed; see {self._log_path}")
        return line
