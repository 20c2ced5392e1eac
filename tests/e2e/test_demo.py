"""The demo as a user starts it: results, a clean end by signal, and nobody left behind."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from aiohttp import ClientSession

pytestmark = pytest.mark.e2e

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")

Demo = Callable[..., subprocess.Popen[str]]


class Family:
    """Processes that descend from a test, known by a mark in their environment."""

    def __init__(self) -> None:
        self.environ = {**os.environ, "TEST_FAMILY": uuid4().hex}

    def pids(self) -> list[int]:
        mark = f"TEST_FAMILY={self.environ['TEST_FAMILY']}".encode()
        return [
            int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and mark in _environ(entry)
        ]


def _environ(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return []


@pytest.fixture
def family() -> Family:
    return Family()


@pytest.fixture
def demo(family: Family, tmp_path: Path) -> Iterator[Demo]:
    """Starts `prefixroute demo` with further arguments; whatever is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefixroute", "demo", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Killed, it cannot clear away what it keeps in files.
            env={**family.environ, "TMPDIR": str(tmp_path)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for pid in family.pids():
        os.kill(pid, signal.SIGKILL)


@needs_proc
def test_the_demo_compares_two_strategies_and_leaves_nothing_running(
    demo: Demo, family: Family, tmp_path: Path
) -> None:
    results, chart = tmp_path / "demo.json", tmp_path / "demo.svg"
    process = demo("--conversations", 12, "--speed", 40, "--json", results, "--chart", chart)
    out, err = process.communicate()

    assert process.returncode == 0, err
    assert family.pids() == []
    data = json.loads(results.read_text(encoding="utf-8"))
    assert list(data["strategies"]) == ["random", "expected_latency"]
    for figures in data["strategies"].values():
        assert figures["n_errors"] == 0
        assert figures["n_requests"] == data["strategies"]["random"]["n_requests"] > 12
        assert 0 < figures["ttft_p50_s"] <= figures["ttft_p90_s"] <= figures["ttft_p99_s"]
        assert 1 <= figures["load_imbalance"] <= data["n_instances"]
    # The same prompts, to the token.
    random, ours = data["strategies"].values()
    assert random["prompt_tokens"] == ours["prompt_tokens"]
    # Twelve conversations fit the caches: only where they go makes a difference, not how fast.
    assert ours["cached_ratio"] > random["cached_ratio"]
    assert chart.read_bytes().startswith(b"<?xml")
    assert "expected_latency" in out
    assert "ratio" in out
    # No terminal, no bar: one line for each strategy.
    assert len(err.splitlines()) == 2


@needs_proc
async def test_keep_leaves_a_fleet_to_try_until_ctrl_c(demo: Demo, family: Family) -> None:
    process = demo("--conversations", 1, "--speed", 100, "--strategies", "expected_latency", "--keep")
    assert process.stdout is not None
    shown = ""
    while "Metrics: " not in shown:
        line = process.stdout.readline()
        assert line, process.communicate()
        shown += line
    curl = re.search(r"curl (\S+) -H '(Content-Type): (\S+)' \\\n\s+-d '(.*)' -i", shown)
    metrics = re.search(r"Metrics: (\S+)", shown)
    assert curl is not None
    assert metrics is not None
    async with ClientSession() as session:
        async with session.post(curl[1], headers={curl[2]: curl[3]}, data=curl[4]) as response:
            assert response.status == 200
            assert response.headers["x-prefixroute-instance"].startswith("sim-")
        async with session.get(metrics[1]) as response:
            assert "prefixroute_requests_total" in await response.text()

    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in err
    assert family.pids() == []


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_stops_everything(demo: Demo, family: Family, number: signal.Signals) -> None:
    process = demo("--speed", 1)
    assert process.stderr is not None
    # Said when fleet and router are up.
    assert process.stderr.readline().startswith("random: ")
    assert len(family.pids()) == 3

    process.send_signal(number)
    assert process.communicate() == ("", "")
    assert process.returncode == 128 + number
    assert family.pids() == []


@needs_proc
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes that are not children")
def test_children_end_even_if_the_demo_is_killed(demo: Demo, family: Family) -> None:
    process = demo("--speed", 1)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("random: ")
    ends = [os.pidfd_open(pid) for pid in family.pids() if pid != process.pid]
    assert len(ends) == 2

    process.kill()
    for end in ends:
        assert select.select([end], [], [], 20) == ([end], [], [])
        os.close(end)


@needs_proc
def test_a_child_that_dies_is_one_clear_line(demo: Demo, family: Family) -> None:
    process = demo("--speed", 1)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("random: ")
    (router,) = [pid for pid in family.pids() if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]

    os.kill(router, signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err == "prefixroute: the router ended unexpectedly (signal 9)\n"
    assert family.pids() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategies", "random,sticky"), "--strategies: sticky is no strategy (known: random, round_robin,"),
        (("--strategies", "random,random"), "--strategies: a strategy is named twice"),
        (("--json", "missing/demo.json"), "cannot write missing/demo.json: there is no directory missing"),
        (("--chart", "demo.gif"), "cannot draw demo.gif: its name must end in .svg or .png"),
    ],
)
def test_what_cannot_be_done_is_told_at_once(demo: Demo, arguments: tuple[str, str], message: str) -> None:
    process = demo(*arguments)
    out, err = process.communicate()
    assert process.returncode == 2
    assert out == ""
    assert err.startswith(f"prefixroute: {message}")
    assert len(err.splitlines()) == 1
