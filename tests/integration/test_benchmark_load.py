"""The load generator of the benchmarks, before servers that answer, dawdle or stay silent."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bodies import CHAT_2K_8K, write_bodies
from benchmarks.load import LoadGenerator, Workload, build_programs

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="it is compiled by gcc")

# Later than what counts as slow.
DAWDLING_S = 0.3
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "logs").mkdir()
    write_bodies(folder / "bodies")
    build_programs(folder / "bin")
    return folder


@pytest.fixture
def port() -> int:
    """Of the mock; free when it was looked for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@pytest.fixture(params=[False, True], ids=["sleeps", "spins"])
def load(request: pytest.FixtureRequest, work: Path, port: int) -> Iterator[LoadGenerator]:
    core = min(os.sched_getaffinity(0))
    with LoadGenerator(work, core, spins=request.param, ports=[port]) as running:
        yield running


def burst(clients: int, bursts: int, run_s: float = 20) -> Workload:
    return Workload("burst", CHAT_2K_8K, clients=clients, warm_s=0, run_s=run_s, bursts=bursts)


def test_each_request_of_a_burst_has_a_connection_of_its_own(load: LoadGenerator, port: int) -> None:
    sample = load.run(burst(20, 3), port, [os.getpid()])

    assert (sample.requests, sample.failed, sample.slow) == (60, 0, 0)
    assert sample.answer_us is not None
    assert sample.answer_us.n == 60
    assert sample.answer_us.max >= sample.answer_us.p50
    assert sample.proxy_cpu_s is not None


def test_a_late_answer_to_a_burst_is_counted_as_slow(load: LoadGenerator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_late() -> None:
            connection, _ = server.accept()
            with connection:
                while b"}" not in connection.recv(65536)[-1:]:
                    continue
                time.sleep(DAWDLING_S)
                connection.sendall(ANSWER)

        answering = threading.Thread(target=answer_late)
        answering.start()
        sample = load.run(burst(1, 1), server.getsockname()[1], [])
        answering.join()

    assert (sample.requests, sample.slow, sample.failed) == (1, 1, 0)
    assert sample.answer_us is not None
    assert sample.answer_us.max > DAWDLING_S * 1e6 * 0.9


def test_a_burst_that_is_never_answered_ends(load: LoadGenerator) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        sample = load.run(burst(20, 3, run_s=0.2), silent.getsockname()[1], [])

    assert (sample.requests, sample.unanswered) == (0, 20)


def test_idle_streams_are_measured_when_all_are_open_and_then_left(load: LoadGenerator, port: int) -> None:
    workload = Workload(
        "idle", CHAT_2K_8K, clients=50, warm_s=0.1, run_s=0.5, chunks=1000, interval_us=100_000, idle=True
    )
    sample = load.run(workload, port, [])

    # 50 streams of 10 chunks a second, for half a second or more.
    assert sample.chunks >= 200
    assert (sample.requests, sample.failed) == (0, 0)
    # It is free for the next run.
    assert load.run(burst(5, 1), port, []).requests == 5
