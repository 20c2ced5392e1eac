"""`python -m tests.chaos.soak [--requests 1000000] [--minutes 30]`: nothing grows, whatever clients think of.

Every request has another prompt, model, path, session and headers. Once the bounded tables are full, memory must stay:
exits with 1 when it grows by more than a tenth (and 16 MB) after the first fifth, when a bound is passed, or when a
request is lost.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefixroute.testing import RawClient
from tests.chaos.stand import Stand, rss_bytes

# Small, so that they are full soon: what comes after that is what counts.
INDEX_BYTES = 4 * 2**20
SETTINGS: dict[str, Any] = {
    "limits": {"index_bytes": INDEX_BYTES, "max_stored_responses": 1_000, "max_decisions": 200},
    "log": {"format": "json", "access": False},
}
_N_CLIENTS = 16
_SAMPLE_S = 2.0
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/odd/{n}",
    "/v1/embeddings?n={n}",
)
# Series that do not depend on what clients send: the fleet's, histograms, all outcomes.
MAX_SERIES = 2_000
_MAX_GROWTH = 1.1
_MAX_GROWTH_BYTES = 16 * 2**20


@dataclass(slots=True)
class Report:
    n_requests: int = 0
    n_lost: int = 0
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds, requests so far, memory in bytes."""
    n_series: int = 0
    index_bytes: int = 0

    def faults(self) -> list[str]:
        told = []
        warm = self.samples[len(self.samples) // 5][2]
        last = self.samples[-1][2]
        if last > warm * _MAX_GROWTH + _MAX_GROWTH_BYTES:
            told.append(f"memory grew from {warm:,} to {last:,} bytes")
        if self.n_series > MAX_SERIES:
            told.append(f"{self.n_series} series")
        if self.index_bytes > INDEX_BYTES:
            told.append(f"the index has {self.index_bytes:,} bytes")
        if self.n_lost:
            told.append(f"{self.n_lost} requests were lost")
        return told


async def soak(stand: Stand, n_requests: int, until_s: float) -> Report:
    """Requests until there were so many, or the monotonic clock says `until_s`."""
    report = Report()
    began_s = time.monotonic()

    async def client() -> None:
        async with RawClient(stand.url) as connection:
            while report.n_requests < n_requests and time.monotonic() < until_s:
                report.n_requests += 1
                n = report.n_requests
                answer = await connection.request("POST", _PATHS[n % len(_PATHS)].format(n=n), _body(n), _headers(n))
                report.n_lost += answer.status != 200 or not answer.complete

    tasks = [asyncio.create_task(client()) for _ in range(_N_CLIENTS)]
    while not all(task.done() for task in tasks):
        report.samples.append((time.monotonic() - began_s, report.n_requests, rss_bytes(stand.pid)))
        await asyncio.wait(tasks, timeout=_SAMPLE_S)
    await asyncio.gather(*tasks)
    report.samples.append((time.monotonic() - began_s, report.n_requests, rss_bytes(stand.pid)))
    metrics = await stand.metrics()
    report.n_series = len(metrics)
    report.index_bytes = int(metrics["index_bytes",])
    return report


def _body(n: int) -> bytes:
    text = f"prompt {n} " * 200
    body = {
        "model": f"model-{n}",
        "cache_salt": f"salt-{n}",
        "previous_response_id": f"resp_{n}",
        "lora_path": f"l-{n}",
    }
    content = {"prompt": text, "input": text, "messages": [{"role": "user", "content": text}]}
    return json.dumps({**body, **content}).encode()


def _headers(n: int) -> list[tuple[str, str]]:
    fields = [("Content-Type", "application/json"), ("x-request-id", f"soak-{n}"), ("x-session-id", f"session-{n}")]
    return [*fields, (f"X-Unknown-{n}", str(n)), ("User-Agent", f"agent/{n}")]


async def run(n_requests: int, minutes: float) -> int:
    with tempfile.TemporaryDirectory() as folder:
        async with Stand(Path(folder), SETTINGS) as stand:
            report = await soak(stand, n_requests, time.monotonic() + minutes * 60)
    step = max(1, len(report.samples) // 20)
    print("| seconds | requests | RSS, MB |\n| --: | --: | --: |")
    for at_s, n, n_bytes in [*report.samples[:-1:step], report.samples[-1]]:
        print(f"| {at_s:.0f} | {n:,} | {n_bytes / 2**20:.1f} |")
    print(f"{report.n_series} series, index {report.index_bytes:,} bytes, {report.n_lost} lost")
    for told in report.faults():
        print(f"FAULT: {told}")
    return 1 if report.faults() else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description="Many requests, no two alike.")
    parser.add_argument("--requests", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=30.0, help="at most; default: %(default)g")
    arguments = parser.parse_args()
    return asyncio.run(run(arguments.requests, arguments.minutes))


if __name__ == "__main__":
    sys.exit(main())
