"""PrefixRoute's targets, each beside what was measured: reached or not.

A figure is compared round by round, and the median of the comparisons is judged; where single rounds judge
otherwise, the table says so. A figure whose workload had failed requests is not reached.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.load import WORKLOADS, Sample
from benchmarks.tables import (
    BASELINE,
    NOTHING,
    REFERENCE,
    Results,
    answer_p50_us,
    cpu_us_per_chunk,
    cpu_us_per_request,
    idle_percent,
    markdown,
    number,
    peak_rss_mb,
    slowest_ms,
)

ROUTER = "prefixroute"
ROUTER_AIOHTTP = "prefixroute-aiohttp"
RUST_ROUTER = "vllm-router"
# A round in which nginx itself was slower says nothing about a burst.
REFERENCE_BURST_MS = 100.0

ByRound = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of a round's figure with the other proxy's in the same round."""

    of: Callable[[float, float], float]
    text: Callable[[float], str]


RATIO = Comparison(lambda value, other: value / other, lambda found: f"{found:.2f}×")
DIFFERENCE = Comparison(lambda value, other: value - other, lambda found: f"{found:+.2f}")


@dataclass(frozen=True, slots=True)
class Target:
    """What `peer` must not exceed in `workload`, compared with `against`."""

    figure: str
    workload: str
    value: Callable[[Sample], float | None]
    limit: float
    comparison: Comparison = RATIO
    peer: str = ROUTER
    against: str = REFERENCE
    decimals: int = 1
    added: bool = False
    """Less the baseline's figure of the same round."""
    below: bool = False
    """The limit itself is too much."""

    @property
    def rule(self) -> str:
        return f"{'<' if self.below else '≤'} {self.comparison.text(self.limit)}"

    def holds(self, found: float) -> bool:
        return found < self.limit if self.below else found <= self.limit

    def by_round(self, results: Results, peer: str) -> dict[int, float]:
        values = results.by_round(peer, self.workload, self.value)
        if not self.added:
            return values
        baseline = results.by_round(BASELINE, self.workload, self.value)
        return {n: values[n] - baseline[n] for n in values.keys() & baseline.keys()}

    def row(self, results: Results) -> list[str]:
        values, others = self.by_round(results, self.peer), self.by_round(results, self.against)
        found = [
            self.comparison.of(values[n], others[n]) for n in sorted(values.keys() & others.keys()) if others[n] > 0
        ]
        cells = [self.figure, self.peer, middle(values, self.decimals), self.against, middle(others, self.decimals)]
        if not found:
            return [*cells, NOTHING, self.rule, "not measured"]
        text = self.comparison.text
        spread = f"{text(statistics.median(found))} ({text(min(found))} … {text(max(found))})"
        n_failed = sum(sample.failed for sample in results.samples(self.peer, self.workload))
        return [
            *cells,
            spread,
            self.rule,
            verdict([self.holds(one) for one in found], self.holds(statistics.median(found)), n_failed),
        ]


TARGETS = (
    Target("CPU µs a request, 2–8 KB", "c32", cpu_us_per_request, 2.5),
    Target("CPU µs a request, 2–8 KB", "c32", cpu_us_per_request, 1.0, against=RUST_ROUTER, below=True),
    Target("CPU µs a request, 32 KB", "c32-32k", cpu_us_per_request, 3.0),
    Target("CPU µs a request, 500 KB", "c8-500k", cpu_us_per_request, 2.0),
    Target("CPU µs a chunk", "lock", cpu_us_per_chunk, 1.3),
    Target("TTFT added at one client, p50 µs", "ttft", answer_p50_us, 2.0, added=True, decimals=0),
    Target("1,000 idle streams, % of a core", "idle", idle_percent, 3.0, DIFFERENCE, decimals=2, below=True),
    Target("CPU µs a request, 2–8 KB", "c32", cpu_us_per_request, 4.0, peer=ROUTER_AIOHTTP),
)
SLOW_MS = 250
MAX_RSS_MB = 100.0


def verdict(by_round: list[bool], reached: bool, n_failed: int) -> str:
    if n_failed:
        return f"**no**: {n_failed:,} requests failed"
    n_agree = by_round.count(reached)
    doubt = "" if n_agree == len(by_round) else f" ({n_agree} of {len(by_round)} rounds)"
    return f"{'yes' if reached else '**no**'}{doubt}"


def middle(values: ByRound, decimals: int) -> str:
    return number(statistics.median(values.values()) if values else None, decimals)


def burst_row(results: Results) -> list[str]:
    """No request of a burst is slow, in the rounds in which the reference had none that took long."""
    slowest, others = (results.by_round(peer, "burst", slowest_ms) for peer in (ROUTER, REFERENCE))
    n_slow = results.by_round(ROUTER, "burst", lambda sample: float(sample.slow))
    judged = [n_slow[n] for n in sorted(n_slow.keys() & others.keys()) if others[n] < REFERENCE_BURST_MS]
    n_clients = WORKLOADS["burst"].clients
    cells = [
        f"{n_clients} connections at once, slowest request, ms",
        ROUTER,
        number(max(slowest.values(), default=None), 1),
        REFERENCE,
        number(max(others.values(), default=None), 1),
    ]
    rule = f"0 above {SLOW_MS} ms"
    if not judged:
        why = f"not judged: {REFERENCE} took {REFERENCE_BURST_MS:.0f} ms or more" if others else "not measured"
        return [*cells, NOTHING, rule, why]
    n_failed = sum(sample.failed for sample in results.samples(ROUTER, "burst"))
    text = f"{sum(judged):,.0f} above {SLOW_MS} ms"
    return [*cells, text, rule, verdict([n == 0 for n in judged], sum(judged) == 0, n_failed)]


def rss_row(results: Results, figure: str, workload: str | None) -> list[str]:
    """The highest peak of all rounds: of one workload, or of all."""
    own_mb, reference_mb = (peak_rss_mb(results, peer, workload) for peer in (ROUTER, REFERENCE))
    cells = [figure, ROUTER, number(own_mb, 1), REFERENCE, number(reference_mb, 1)]
    rule = f"≤ {MAX_RSS_MB:.0f} MB"
    if own_mb is None:
        return [*cells, NOTHING, rule, "not measured"]
    return [*cells, f"{own_mb:.1f} MB", rule, "yes" if own_mb <= MAX_RSS_MB else "**no**"]


def verdict_table(results: Results) -> str:
    rows = [target.row(results) for target in TARGETS]
    # In the order of a reader: what a request costs, then what many connections do, then the other lane.
    idle_rss = rss_row(results, "1,000 idle streams, peak RSS, MB", "idle")
    rows = [
        *rows[:-2],
        burst_row(results),
        rows[-2],
        idle_rss,
        rss_row(results, "all tests, peak RSS, MB", None),
        rows[-1],
    ]
    headings = (
        "figure",
        "proxy",
        "its figure",
        "compared with",
        "its figure",
        "comparison (rounds)",
        "target",
        "reached",
    )
    return markdown(headings, rows, n_text_columns=2)
