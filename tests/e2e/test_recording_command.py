"""`serve --record` as an operator runs it, and `replay` of what it left."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from prefixroute.sim.traces import read_trace

pytestmark = pytest.mark.e2e

STORY = "The heron PLANTED its feet and waited. " * 40


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """URL of a simulated server, a thousand times faster than life."""
    arguments = ("demo-server", "--port", "0", "--speed", "1000", "--model", "sim")
    process = subprocess.Popen([sys.executable, "-m", "prefixroute", *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = re.search(r"ready at (http://\S+) ", process.stdout.readline())
    assert ready is not None
    yield ready[1]
    process.send_signal(signal.SIGTERM)
    process.communicate()


@contextmanager
def serving(server: str, home: Path, *arguments: str, end: int = signal.SIGTERM) -> Iterator[str]:
    """URL of a router in a process of its own, which `end` ends."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PREFIXROUTE_")}
    process = subprocess.Popen(
        [
            *(sys.executable, "-W", "always::ResourceWarning", "-m", "prefixroute", "serve", server),
            *("--port", "0", "--admin-port", "0", "--log-format", "json", *arguments),
        ],
        stderr=subprocess.PIPE,
        text=True,
        cwd=home,
        env={**environ, "PREFIXROUTE_RECORDING__BLOCK_TOKENS": "32"},
    )
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if (url := json.loads(line).get("requests")) is not None:
            break
    else:
        pytest.fail("".join(lines))
    try:
        yield url
    finally:
        process.send_signal(end)
        _, rest = process.communicate()
    assert "Warning" not in rest
    assert "PLANTED" not in rest
    assert process.returncode == (0 if end == signal.SIGTERM else -end)


def chat(url: str, text: str, **fields: object) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 3, "ignore_eos": True}
    request = Request(f"{url}/v1/chat/completions", json.dumps({**body, **fields}).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urlopen(request) as answer:
        assert answer.status == 200
        answer.read()


def wait_growth(path: Path, n_bytes: int) -> None:
    while path.stat().st_size <= n_bytes:
        os.sched_yield()


def test_recorded_traffic_is_joined_over_runs_and_replayed(server: str, tmp_path: Path) -> None:
    path = tmp_path / "rec.jsonl"
    with serving(server, tmp_path, "--record", "rec.jsonl") as url:
        chat(url, STORY)
        chat(url, STORY + "Then it flew.", stream=True)
    # A run that is killed in the middle of a line.
    n_bytes = path.stat().st_size
    with serving(server, tmp_path, "--record", "rec.jsonl", end=signal.SIGKILL) as url:
        chat(url, STORY)
        wait_growth(path, n_bytes)
    with path.open("ab") as file:
        file.write(b'{"timestamp": 17')
    assert [note.partition(": ")[2] for note in read_trace(path).notes] == ["cut short, left out"]
    with serving(server, tmp_path, "--record", "rec.jsonl") as url:
        chat(url, STORY + "Then it flew away.")

    assert sorted(os.listdir(tmp_path)) == ["rec.jsonl", "rec.jsonl.key"]
    content = path.read_bytes()
    for word in (b"PLANTED", b"heron", b"content", b"messages"):
        assert word not in content
    trace = read_trace(path)
    assert (len(trace.requests), trace.block_tokens, trace.notes) == (4, 32, ())
    assert {request.output_tokens for request in trace.requests} <= {3, 4, 5, 6}
    n_shared = len(STORY) // 4 // 32
    assert {request.hash_ids[:n_shared] for request in trace.requests} == {trace.requests[0].hash_ids[:n_shared]}

    results = tmp_path / "replay.json"
    arguments = ("--trace", path, "--target", server, "--speed", 1000, "--concurrency", 1, "--json", results)
    done = subprocess.run(
        [sys.executable, "-m", "prefixroute", "replay", *map(str, arguments)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(results.read_text())
    assert (figures["n_requests"], figures["n_errors"]) == (4, 0)
    assert figures["prompt_tokens"] == sum(request.input_tokens for request in trace.requests)
    # All but the first find the story in the cache.
    assert figures["cached_tokens"] >= 3 * n_shared * 32


def test_a_key_that_others_can_read_stops_the_start(server: str, tmp_path: Path) -> None:
    (tmp_path / "rec.jsonl.key").write_text("00" * 32)
    (tmp_path / "rec.jsonl.key").chmod(0o644)
    arguments = ("serve", server, "--port", "0", "--admin-port", "0", "--record", "rec.jsonl")
    done = subprocess.run(
        [sys.executable, "-m", "prefixroute", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("prefixroute: recording.key_file: rec.jsonl.key: others than its owner have access")
    assert len(done.stderr.splitlines()) == 1
