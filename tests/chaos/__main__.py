"""`python -m tests.chaos [--fault NAME …] [--seconds 60] [--rate 200]`: each fault under load, and what became of it.

Exits with 1 when a request was lost or delivered twice against the rules, or a victim did not come back.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.faults import FAULTS, Outcome, run

_HEAD = (
    "fault",
    "asked",
    "answered",
    "lost, allowed",
    "lost, forbidden",
    "second, allowed",
    "back",
    "p95 elsewhere, ms",
)


def row(outcome: Outcome) -> str:
    verdict = outcome.verdict
    n_forbidden = len(verdict.forbidden) + len(outcome.faults)
    cells = (
        outcome.fault, verdict.n_asked, verdict.n_answered, verdict.n_lost, n_forbidden, verdict.n_second,
        "yes" if outcome.recovered else "NO", f"{outcome.calm_p95_ms:.0f} → {verdict.p95_ms():.0f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


async def run_all(arguments: argparse.Namespace) -> int:
    print("| " + " | ".join(_HEAD) + " |\n|" + " --- |" * len(_HEAD), flush=True)
    bad: list[Outcome] = []
    for name in arguments.fault or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            outcome = await run(
                FAULTS[name],
                Path(folder),
                per_second=arguments.rate,
                fault_s=arguments.seconds * 0.6,
                calm_s=arguments.seconds * 0.2,
            )
        print(row(outcome), flush=True)
        if not outcome.is_good:
            bad.append(outcome)
    for outcome in bad:
        for line in [*outcome.faults, *outcome.verdict.forbidden][:20]:
            print(f"{outcome.fault}: {line}")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Faults under load.")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="may be repeated; default: all")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of each fault, calm included; default: %(default)g"
    )
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second; default: %(default)g")
    return asyncio.run(run_all(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
