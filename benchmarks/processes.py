"""Processes under test: pinned, stopped and counted together with their children."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

# From SIGTERM to SIGKILL.
STOP_S = 3.0
OPEN_FILES = 65536
# 1,000 clients and their streams, both in the load generator.
NEEDED_FILES = 2500


class BenchmarkError(Exception):
    """The benchmark cannot go on. The message is for whoever started it."""


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Processes started inside stay on one core: they inherit it."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def require_free_port(port: int) -> None:
    """Raises `BenchmarkError` when something answers there: it would be measured in place of the proxy."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise BenchmarkError(f"port {port} is in use: stop what listens there, it is not the benchmark's")


def raise_open_files_limit() -> None:
    """As far as allowed, for this process and those that it starts. An idle stream takes two files of a proxy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or soft < hard):
        # A limit without end makes some programs reserve memory for each file that there might be.
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < NEEDED_FILES:
        raise BenchmarkError(f"a process may open {hard} files here, {NEEDED_FILES} are needed: ulimit -Hn says no")


def group_pids(group: int) -> list[int]:
    pids = []
    for entry in os.listdir("/proc"):
        # A process may end while it is looked at.
        with contextlib.suppress(ValueError, ProcessLookupError):
            pid = int(entry)
            if os.getpgid(pid) == group:
                pids.append(pid)
    return pids


def reset_peak_rss(pids: list[int]) -> None:
    """Peaks count from now on. Where that is not allowed, they go on counting from each process's start."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def peak_rss_bytes(pids: list[int]) -> int:
    """The sum of the processes' own peaks. Pages they share count for each."""
    total_bytes = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("VmHWM:"):
                    total_bytes += int(line.split()[1]) * 1024
    return total_bytes


def waited_s(pid: int) -> float:
    """How long a process (its main thread) was ready to run while its core had other work, since it began."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # gone, or a kernel that does not count it


def signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def stop_group(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """End a process that leads its own group, and the group with it, also when it is paused."""
    signal_group(process.pid, signal.SIGTERM)
    signal_group(process.pid, signal.SIGCONT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            # Nobody reads any more what may be left to write.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
