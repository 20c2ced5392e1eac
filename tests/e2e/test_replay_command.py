"""`demo-server` and `replay` as a user starts them: the one plays a trace against the other."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "prefixroute", *map(str, arguments)]


def replay(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("replay", *arguments), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    """URLs of two simulated servers, a thousand times faster than life."""
    process = subprocess.Popen(
        command("demo-server", "--servers", 2, "--port", 0, "--speed", 1000, "--kv-tokens", 20_000, "--model", "sim"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = [re.search(r"ready at (http://\S+) \(model sim\)", process.stdout.readline()) for _ in range(2)]
    yield [match[1] for match in ready if match is not None]
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests: the second shares one block with the first, the third is longer than the servers can take."""
    rows = [(0, 1_024, [1, 2]), (0, 700, [1, 3]), (3_000, 30_000, list(range(59)))]
    path = tmp_path / "trace.jsonl"
    fields = ("timestamp", "input_length", "hash_ids")
    lines = [json.dumps({**dict(zip(fields, row, strict=True)), "output_length": 4}) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_replay_reports_what_came_of_a_trace(servers: list[str], trace: Path, tmp_path: Path) -> None:
    results = tmp_path / "replay.json"
    done = replay(
        "--trace", trace, "--target", servers[0] + "/", "--speed", 1000, "--concurrency", 1, "--json", results
    )
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(results.read_text(encoding="utf-8"))
    assert (data["n_requests"], data["errors"]) == (3, {"HTTP 400": 1})
    assert (data["prompt_tokens"], data["cached_tokens"], data["output_tokens"]) == (1_724, 512, 8)
    assert (data["model"], data["trace"]) == ("sim", "trace.jsonl")
    for shown in ("TTFT p50", "29.7%", "HTTP 400"):
        assert shown in done.stdout


def test_replay_plays_only_so_many(servers: list[str], trace: Path) -> None:
    done = replay("--trace", trace, "--target", servers[1], "--speed", 1000, "--requests", 2)
    assert done.returncode == 0
    assert "HTTP 400" not in done.stdout


def test_a_replay_in_which_everything_fails_has_failed(servers: list[str], trace: Path) -> None:
    done = replay("--trace", trace, "--target", servers[0], "--speed", 1000, "--model", "other")
    assert done.returncode == 1
    assert "HTTP 404" in done.stdout


def test_a_target_that_is_not_there_is_told_before_anything_is_sent(trace: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    done = replay("--trace", trace, "--target", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"prefixroute: {url} cannot be reached: Connection refused\n"


def test_a_broken_line_is_told_before_anything_is_sent(trace: Path) -> None:
    with trace.open("a", encoding="utf-8") as file:
        file.write('\n{"timestamp": 4000, "input_length": "long"}\n')
    done = replay("--trace", trace, "--target", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"prefixroute: {trace}, line 4: output_length is missing\n"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gpu-a:8000", "--target: the URL has no scheme (write http://gpu-a:8000)"),
        ("http://gpu-a:8000/v1", "--target: the URL ends in /v1, which the paths of requests bring along"),
    ],
)
def test_a_bad_url_is_told(trace: Path, target: str, message: str) -> None:
    done = replay("--trace", trace, "--target", target)
    assert done.returncode == 2
    assert done.stderr.startswith(f"prefixroute: {message}")


def test_a_taken_port_is_told(servers: list[str]) -> None:
    port = servers[0].rpartition(":")[2]
    done = subprocess.run(command("demo-server", "--port", port), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"prefixroute: cannot listen on 127.0.0.1:{port}: ")
    assert len(done.stderr.splitlines()) == 1
