"""`simulate` as a user starts it: a table, figures in JSON, one line for what is wrong, and an end when told to."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

SMALL = ("--requests", 150, "--instances", 2, "--strategies", "random,expected_latency")
# Six rates to be found, of which the first one soon.
GRID = ("rag", "chat", "toolagent", *SMALL, "--requests", 60, "--instances", "1,2", "--jobs", 2)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "prefixroute", "simulate", *map(str, arguments)]


def simulate(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def wait_for_file(path: Path, process: subprocess.Popen[Any]) -> None:
    while not path.exists():
        assert process.poll() is None, f"{path.name} was never written"
        sleep(0.02)


def wait_gone(group: int, limit_s: float = 10.0) -> None:
    """Until no process of the group is left."""
    end_s = monotonic() + limit_s
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert monotonic() < end_s, "processes are left over"
        sleep(0.02)


@contextmanager
def killed_at_last(group: int) -> Iterator[None]:
    """Whatever fails, no process of the group is left to disturb other tests."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def test_the_same_command_gives_the_same_figures_whatever_the_processes(tmp_path: Path) -> None:
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    for file, jobs, hash_seed in zip(files, (1, 2), ("1", "2"), strict=True):
        done = simulate(
            "rag", *SMALL, "--seeds", "0-1", "--load", "0.5,1", "--jobs", jobs, "--json", file, PYTHONHASHSEED=hash_seed
        )
        assert (done.returncode, done.stderr) == (0, "")
        for shown in ("rag, load 0.5", "rag, load 1 (", "expected_latency", "150 requests", "means of 2 seeds"):
            assert shown in done.stdout
    assert files[0].read_bytes() == files[1].read_bytes()
    rows = json.loads(files[0].read_text(encoding="utf-8"))["rows"]
    assert [(row["trace"], row["load"], row["strategy"]) for row in rows] == [
        ("rag", load, name) for load in (0.5, 1.0) for name in ("random", "expected_latency")
    ]
    for row in rows:
        assert 0 < row["cached_ratio"] <= row["ideal_ratio"] < 1
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"]
        assert row["ttft_mean_s"] < row["e2e_mean_s"]
        assert row["imbalance"] >= 1


def test_a_trace_with_a_slow_instance_and_one_that_dies(tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    lines = [
        {"timestamp": 1_000 * n, "input_length": 1_030, "output_length": 20, "hash_ids": [n % 3, 100 + n, 200 + n]}
        for n in range(60)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    results = tmp_path / "results.json"
    done = simulate(trace, *SMALL, "--rate", 5, "--slow", 0.5, "--kill", "i1@3:2", "--json", results)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mine, 5 requests/s, 2 instances, i0 at 0.5, i1 dies at 3 s for 2 s" in " ".join(done.stdout.split())
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    assert [(row["trace"], row["load"], row["rate"], row["n"]) for row in rows] == [("mine", None, 5.0, 150)] * 2


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "broken.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 1}\n')
    done = simulate(trace)
    assert done.returncode == 2
    assert done.stderr == f"prefixroute: {trace}, line 2: input_length is missing\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chatt"], "'chatt' is no file and no generated workload; did you mean 'chat'?"),
        (["chat", "--strategies", "randon"], "strategy 'randon' is unknown; did you mean 'random'?"),
        (["chat", "--kill", "i9@3"], "--kill: 'i9' is none of the instances i0 to i7"),
        (["chat", "--chart", "chart.gif"], "its name must end in .svg or .png"),
        (["chat", "--json", "nowhere/x.json"], "there is no directory nowhere"),
    ],
)
def test_one_line_says_what_is_wrong(arguments: Sequence[str], message: str) -> None:
    done = simulate(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("prefixroute: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_its_workers(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """In the middle of a grid that would take longer: as soon as the first of its rates is known."""
    rates = tmp_path / "rates.json"
    # Where tests run in the background of a shell they ignore it, and so would the command.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command(*GRID, "--calibration", rates),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process, killed_at_last(process.pid):
        wait_for_file(rates, process)
        # Ctrl-C goes to all processes of a terminal, SIGTERM to one.
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        out, err = process.communicate()
        assert (process.returncode, out, err) == (code, "", "")
        wait_gone(process.pid)


def test_its_workers_end_with_it_when_it_is_killed(tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    process = subprocess.Popen(
        command(*GRID, "--calibration", rates),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with killed_at_last(process.pid):
        wait_for_file(rates, process)
        process.kill()
        process.wait()
        wait_gone(process.pid)
