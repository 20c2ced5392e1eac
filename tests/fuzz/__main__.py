"""Fuzzes for some minutes, and says what it did: `python -m tests.fuzz --minutes 10 [--target NAME …] [--seed N]`.

Each target gets an equal share of the time. A finding is made small and kept in `tests/fuzz/found/`, from where the
ordinary tests repeat it. Exits with 1 if there is one.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import uvloop

from tests.fuzz import lanes, targets, wire
from tests.fuzz.case import Case, Finding, cases, shrunk
from tests.fuzz.targets import Target

FOUND = Path(__file__).parent / "found"
TARGETS: Mapping[str, Callable[[], Target]] = {**targets.PLAIN, **wire.TARGETS, **lanes.TARGETS}
# Cases between two looks at whether anything is left over, and how many of them run side by side.
_BATCH = 256
_SIDE_BY_SIDE = 8
_MAX_FINDINGS = 10


@dataclass(slots=True)
class Tally:
    """What was done to one target."""

    n_cases: int = 0
    n_bytes: int = 0
    took_s: float = 0.0
    findings: dict[str, Case] = field(default_factory=dict)
    """By what they violate."""


async def fuzz(make: Callable[[], Target], rng: Random, until_s: float) -> Tally:
    """Cases until the monotonic clock says `until_s`, or there are too many findings."""
    tally = Tally()
    began_s = time.monotonic()
    source: Iterator[Case] | None = None
    failed: list[tuple[Case, str]] = []
    while time.monotonic() < until_s and len(tally.findings) < _MAX_FINDINGS:
        async with make() as target:
            source = source or cases(rng, target.corpus, target.words)
            while time.monotonic() < until_s:
                batch = list(itertools.islice(source, _BATCH))
                failed = await _run(target, batch)
                tally.n_cases += len(batch)
                tally.n_bytes += sum(len(case.data) for case in batch)
                if failed:
                    break
        # A target that failed may be spoilt: each case is judged in one of its own.
        for case, what in failed:
            if what not in tally.findings:
                tally.findings[what] = await shrunk(case, lambda candidate: _fails(make, candidate))
    tally.took_s = time.monotonic() - began_s
    return tally


async def _run(target: Target, batch: list[Case]) -> list[tuple[Case, str]]:
    """Cases that failed, and how. Something left over that no single case leaves is told by an empty case."""
    failed: list[tuple[Case, str]] = []
    waiting = iter(batch)

    async def work() -> None:
        for case in waiting:
            if (what := await _judged(target, case)) is not None:
                failed.append((case, what))
                return

    await asyncio.gather(*(work() for _ in range(_SIDE_BY_SIDE)))
    if not failed and await _left_over(target) is not None:
        for case in batch:
            async with type(target)() as alone:
                if (what := await _judged(alone, case) or await _left_over(alone)) is not None:
                    failed.append((case, what))
                    break
        else:
            failed.append((Case(b""), "something is left over that no case alone leaves"))
    return failed


async def _fails(make: Callable[[], Target], case: Case) -> bool:
    async with make() as target:
        return (await _judged(target, case) or await _left_over(target)) is not None


async def _judged(target: Target, case: Case) -> str | None:
    try:
        await target.run(case)
    except Finding as finding:
        return str(finding)
    except Exception as fault:  # noqa: BLE001  whatever comes out is the finding
        return f"{type(fault).__name__} at {traceback.extract_tb(fault.__traceback__)[-1]}"
    return None


async def _left_over(target: Target) -> str | None:
    try:
        await target.rest()
    except Finding as finding:
        return str(finding)
    return None


def keep(target: str, what: str, case: Case) -> Path:
    """Writes the case where the tests find it."""
    FOUND.mkdir(exist_ok=True)
    path = FOUND / f"{target}-{hashlib.sha256(case.data).hexdigest()[:12]}.json"
    path.write_text(json.dumps({"what": what, **case.to_json()}, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the router for some minutes.")
    parser.add_argument("--minutes", type=float, default=10.0, help="in all; default: %(default)g")
    parser.add_argument("--target", choices=TARGETS, action="append", help="may be repeated; default: all")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="default: a new one, which is told")
    arguments = parser.parse_args()
    names = arguments.target or list(TARGETS)
    print(f"seed {arguments.seed}; {arguments.minutes:g} minutes over {', '.join(names)}", flush=True)
    print(f"{'target':10} {'cases':>9} {'bytes':>12} {'seconds':>8} {'findings':>8}", flush=True)
    n_findings = 0
    for name in names:
        until_s = time.monotonic() + arguments.minutes * 60 / len(names)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            tally = runner.run(fuzz(TARGETS[name], Random(f"{arguments.seed} {name}"), until_s))
        print(
            f"{name:10} {tally.n_cases:9,} {tally.n_bytes:12,} {tally.took_s:8.0f} {len(tally.findings):8}", flush=True
        )
        for what, case in tally.findings.items():
            print(f"  {what}\n    {case.data[:200]!r}\n    kept in {keep(name, what, case)}", flush=True)
        n_findings += len(tally.findings)
    return 1 if n_findings else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
