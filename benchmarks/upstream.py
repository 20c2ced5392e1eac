"""What the upstream client alone costs, a request and a chunk: CPU time of a process that does nothing else.

    python -m benchmarks.upstream [--against FOLDER] [--rounds 7] [--port 22000]

It talks to the mock of the load generator (`loadgen/`), as a proxy would. `FOLDER` holds another version of the package
(`git worktree add FOLDER …`); both are measured in turn, in processes of their own. `bare` is a protocol that only
writes what it is given and counts bytes: what the loop and the kernel take, which no client can go below.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.load import build_programs
from benchmarks.processes import BenchmarkError, pinned, require_free_port, stop_group
from prefixroute.core.fleet import Instance
from prefixroute.http.upstream import ConnectionLimits, Upstream, UpstreamRequest

_ROOT = Path(__file__).parents[1]
_BIN = Path(__file__).parent / ".work" / "bin"
_BARE = "bare"
# How the mock is told how long a stream is, and how fast: loadgen/wire.h.
_SEED_BASE, _SEED_CLIENTS, _SEED_INTERVAL_US = 1_000_000_000, 10_000, 100


@dataclass(frozen=True, slots=True)
class Work:
    """`n_clients` that ask one after the other, in all `n_requests`; streams are of `n_chunks`, `interval_us` apart."""

    n_clients: int
    n_requests: int
    body_bytes: int
    n_chunks: int = 0
    interval_us: int = 0

    def body(self) -> bytes:
        text = "x" * self.body_bytes
        asked: dict[str, object] = {"model": "mock-model", "messages": [{"role": "user", "content": text}]}
        if self.n_chunks:
            seed = _SEED_BASE + _SEED_CLIENTS * (1 + self.interval_us // _SEED_INTERVAL_US)
            asked |= {"stream": True, "max_tokens": self.n_chunks, "seed": seed}
        return json.dumps(asked).encode()

    @property
    def n_counted(self) -> int:
        """Of what the figures are per: requests, or chunks."""
        return self.n_requests * (self.n_chunks or 1)


# Chunks must come one by one: a client that is late finds several in one read, and looks cheap.
WORKS = {
    "request, 4 KB": Work(16, 20_000, 4096),
    "request, 32 KB": Work(16, 8_000, 32_768),
    "request, 500 KB": Work(4, 600, 512_000),
    "chunk": Work(64, 256, 4096, n_chunks=100, interval_us=4_000),
}

_HEADERS = [
    (b"Content-Type", b"application/json"),
    (b"Accept", b"*/*"),
    (b"User-Agent", b"benchmark/1.0"),
    (b"x-request-id", b"0123456789abcdef0123456789abcdef"),
]


async def drive(work: Work, ask: Callable[[], Awaitable[None]], n_requests: int) -> None:
    n_left = n_requests

    async def client() -> None:
        nonlocal n_left
        while n_left > 0:
            n_left -= 1
            await ask()

    await asyncio.gather(*(client() for _ in range(work.n_clients)))


async def measured_us(work: Work, ask: Callable[[], Awaitable[None]]) -> float:
    await drive(work, ask, max(work.n_clients, work.n_requests // 10))
    began_s = time.process_time()
    await drive(work, ask, work.n_requests)
    return (time.process_time() - began_s) * 1e6 / work.n_counted


async def measure_client(work: Work, port: int) -> float:
    upstream = Upstream(first_byte_timeout_s=None, idle_timeout_s=600.0, limits=ConnectionLimits())
    instance = Instance("gpu-0", f"http://127.0.0.1:{port}", 0)
    # As it was made in versions that are worth comparing with.
    make: Callable[..., UpstreamRequest] = getattr(UpstreamRequest, "of", UpstreamRequest)
    request = make("POST", "/v1/chat/completions", _HEADERS, work.body())

    def take(_piece: bytes, _is_last: bool, _chunks: bytes | None = None) -> None:
        pass

    async def ask() -> None:
        answer = await upstream.send(instance, request)
        try:
            await answer.pour(take)
        finally:
            answer.close()

    us = await measured_us(work, ask)
    await upstream.close()
    return us


class _Bare(asyncio.Protocol):
    def __init__(self, is_end: Callable[[bytes], bool]) -> None:
        self._is_end = is_end
        self.end: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        if self._is_end(data) and self.end is not None:
            self.end.set_result(None)


async def measure_bare(work: Work, port: int) -> float:
    loop = asyncio.get_running_loop()
    body = work.body()
    sent = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    kept: list[tuple[asyncio.Transport, _Bare]] = []

    async def ask() -> None:
        if kept:
            transport, protocol = kept.pop()
        else:
            is_end = (lambda data: data.endswith(b"\r\n0\r\n\r\n")) if work.n_chunks else bool
            transport, protocol = await loop.create_connection(lambda: _Bare(is_end), "127.0.0.1", port)
        protocol.end = loop.create_future()
        transport.write(sent)
        await protocol.end
        kept.append((transport, protocol))

    us = await measured_us(work, ask)
    for transport, _ in kept:
        transport.abort()
    return us


def run_worker(name: str, work: Work, port: int) -> None:
    measure = measure_bare if name == _BARE else measure_client
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(runner.run(measure(work, port)))


def measure_apart(name: str, folder: Path, work: str, port: int) -> float:
    """In a process of its own, which sees the package in `folder` and nothing of the working directory."""
    command = [sys.executable, "-P", "-m", "benchmarks.upstream", "--worker", name, "--work", work, "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": f"{folder}:{_ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise BenchmarkError(f"{name} failed at {work}:\n{done.stderr}")
    return float(done.stdout)


def measure_all(trees: dict[str, Path], works: list[str], rounds: int, port: int) -> dict[tuple[str, str], list[float]]:
    require_free_port(port)
    build_programs(_BIN)
    cores = sorted(os.sched_getaffinity(0))
    figures: dict[tuple[str, str], list[float]] = {}
    with pinned(cores[-1]):
        mock = subprocess.Popen([_BIN / "lb", "--mock", str(port)], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert mock.stdout is not None
        mock.stdout.readline()
        with pinned(cores[0]):
            for number in range(rounds):
                for work in works:
                    for name in list(trees) if number % 2 == 0 else reversed(trees):
                        figures.setdefault((work, name), []).append(measure_apart(name, trees[name], work, port))
    finally:
        stop_group(mock)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another version, to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--port", type=int, default=22000, help="for the mock")
    parser.add_argument("--work", choices=WORKS, action="append", help="default: all")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    works = options.work or list(WORKS)
    if options.worker is not None:
        run_worker(options.worker, WORKS[works[0]], options.port)
        return 0
    trees = {_BARE: _ROOT, "this": _ROOT}
    if options.against is not None:
        trees["against"] = options.against.resolve()
    try:
        figures = measure_all(trees, works, options.rounds, options.port)
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    print(f"CPU µs, least / median of {options.rounds}")
    for (work, name), values in figures.items():
        print(f"{work:16} {name:8} {min(values):7.2f} / {median(values):7.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
