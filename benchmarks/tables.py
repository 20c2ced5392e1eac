"""From measurements to figures, and from figures to markdown.

A figure is the median over the rounds. Its ratio to nginx is the median of each round's own ratio: what slows
the machine down for a while slows both, so the ratio holds where the figure does not.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.load import WORKLOADS, Quantiles, Sample

REFERENCE = "nginx"
BASELINE = "direct"
# From here on the load generator is what limits the rate.
SATURATED_RATIO = 0.95
# From here on a run says that other programs wanted its cores too.
DISTURBED_RATIO = 0.1
NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one workload against one peer."""

    peer: str
    workload: str
    round: int
    sample: Sample
    peak_rss_bytes: int
    waited_ratio: float
    """Of the run's time: how long the process that was worst off waited for its core, with work to do."""


def cpu_us_per_request(sample: Sample) -> float | None:
    if sample.proxy_cpu_s is None or sample.requests == 0:
        return None
    return sample.proxy_cpu_s / sample.requests * 1e6


def cpu_us_per_chunk(sample: Sample) -> float | None:
    if sample.proxy_cpu_s is None or sample.chunks == 0:
        return None
    return sample.proxy_cpu_s / sample.chunks * 1e6


def answer_p50_us(sample: Sample) -> float | None:
    return sample.answer_us.p50 if sample.answer_us else None


def slowest_ms(sample: Sample) -> float | None:
    return sample.answer_us.max / 1000 if sample.answer_us else None


def idle_percent(sample: Sample) -> float | None:
    """Of a core."""
    return None if sample.proxy_cpu_s is None else 100 * sample.proxy_cpu_s / sample.measured_s


def answer_p99_ms(sample: Sample) -> float | None:
    return sample.answer_us.p99 / 1000 if sample.answer_us else None


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of the summary: `value` of the samples of `workload`, less the baseline's when `added`."""

    heading: str
    workload: str
    value: Callable[[Sample], float | None]
    decimals: int
    added: bool = False


COLUMNS = (
    Column("CPU µs/request", "c32", cpu_us_per_request, 1),
    Column("32 KB", "c32-32k", cpu_us_per_request, 1),
    Column("500 KB", "c8-500k", cpu_us_per_request, 0),
    Column("CPU µs/chunk", "lock", cpu_us_per_chunk, 1),
    Column("TTFT added, p50 µs", "ttft", answer_p50_us, 0, added=True),
    Column("p99 at 256 clients, ms", "c256", answer_p99_ms, 1),
    Column("slowest of 256 at once, ms", "burst", slowest_ms, 1),
    Column("1,000 idle streams, % of a core", "idle", idle_percent, 2),
)


class Results:
    """Measurements, asked by peer and workload."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self.measurements = list(measurements)
        self._samples = {(m.peer, m.workload, m.round): m.sample for m in self.measurements}
        self.peers = list(dict.fromkeys(m.peer for m in self.measurements))
        measured = {m.workload for m in self.measurements}
        self.workloads = [name for name in WORKLOADS if name in measured]
        self._rounds = sorted({m.round for m in self.measurements})

    @property
    def n_rounds(self) -> int:
        return len(self._rounds)

    def samples(self, peer: str, workload: str) -> list[Sample]:
        return [m.sample for m in self.measurements if (m.peer, m.workload) == (peer, workload)]

    def waited_ratios(self, peer: str, workload: str) -> list[float]:
        return [m.waited_ratio for m in self.measurements if (m.peer, m.workload) == (peer, workload)]

    def by_round(self, peer: str, workload: str, value: Callable[[Sample], float | None]) -> dict[int, float]:
        values = {}
        for number in self._rounds:
            sample = self._samples.get((peer, workload, number))
            figure = value(sample) if sample else None
            if figure is not None:
                values[number] = figure
        return values

    def column(self, peer: str, column: Column) -> dict[int, float]:
        """The column's figure of each round that has it."""
        values = self.by_round(peer, column.workload, column.value)
        if not column.added:
            return values
        if peer == BASELINE:
            return {}
        baseline = self.by_round(BASELINE, column.workload, column.value)
        return {number: values[number] - baseline[number] for number in values.keys() & baseline.keys()}

    def peak_rss_bytes(self, peer: str, workload: str | None = None) -> int | None:
        """The highest of all rounds; of all workloads, if none is named."""
        found = (m.peak_rss_bytes for m in self.measurements if m.peer == peer and workload in (None, m.workload))
        return max(found, default=None)

    def failed(self, peer: str) -> int:
        return sum(m.sample.failed for m in self.measurements if m.peer == peer)


def peak_rss_mb(results: Results, peer: str, workload: str | None = None) -> float | None:
    found = results.peak_rss_bytes(peer, workload)
    return None if found is None else found / 1e6


def ratios(values: dict[int, float], reference: dict[int, float]) -> list[float]:
    """Round by round, for the rounds that both have."""
    return [values[n] / reference[n] for n in sorted(values.keys() & reference.keys()) if reference[n] > 0]


def number(value: float | None, decimals: int = 0) -> str:
    return NOTHING if value is None else f"{value:,.{decimals}f}"


def with_ratio(values: dict[int, float], reference: dict[int, float], decimals: int) -> str:
    if not values:
        return NOTHING
    text = number(statistics.median(values.values()), decimals)
    found = ratios(values, reference)
    return f"{text} ({statistics.median(found):.2f}×)" if found else text


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], n_text_columns: int = 1) -> str:
    """A table whose first columns are text and whose others are numbers."""
    rule = [":--" if column < n_text_columns else "--:" for column in range(len(headings))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def summary_table(results: Results) -> str:
    """One row a peer; in parentheses the ratio to the reference, if that was measured."""
    columns = [column for column in COLUMNS if column.workload in results.workloads]
    rows = []
    for peer in results.peers:
        cells = [
            with_ratio(results.column(peer, column), results.column(REFERENCE, column), column.decimals)
            for column in columns
        ]
        rss_mb = [peak_rss_mb(results, one) for one in (peer, REFERENCE)]
        own_mb, reference_mb = ({0: mb} if mb is not None else {} for mb in rss_mb)
        cells += [with_ratio(own_mb, reference_mb, 1), number(results.failed(peer))]
        rows.append([peer, *cells])
    name = f"proxy (× {REFERENCE})" if REFERENCE in results.peers else "proxy"
    headings = [name, *(column.heading for column in columns), "peak RSS, MB", "errors"]
    return markdown(headings, rows)


def detail_table(results: Results) -> str:
    """One row for each workload and peer."""
    headings = (
        *("test", "proxy", "rate, 1/s", "answer p50, µs", "p99", "chunk p50, µs", "p99", "CPU, µs", f"× {REFERENCE}"),
        *("proxy core, %", "load core, %", "waited, %", "errors"),
    )
    rows = [
        detail_row(results, workload, peer)
        for workload in results.workloads
        for peer in results.peers
        if results.samples(peer, workload)
    ]
    return markdown(headings, rows, n_text_columns=2)


def detail_row(results: Results, workload: str, peer: str) -> list[str]:
    samples = results.samples(peer, workload)
    by_chunk = WORKLOADS[workload].counts_chunks
    cpu_us = cpu_us_per_chunk if by_chunk else cpu_us_per_request
    cpu_by_round = results.by_round(peer, workload, cpu_us)
    cpu_ratios = ratios(cpu_by_round, results.by_round(REFERENCE, workload, cpu_us))
    answers = [sample.answer_us for sample in samples]
    chunks = [sample.chunk_us for sample in samples]

    def quantile(found: list[Quantiles | None], value: Callable[[Quantiles], float]) -> str:
        return median(value(quantiles) for quantiles in found if quantiles is not None)

    return [
        f"{workload}, per {'chunk' if by_chunk else 'request'}",
        peer,
        median((sample.chunks if by_chunk else sample.requests) / sample.measured_s for sample in samples),
        quantile(answers, lambda quantiles: quantiles.p50),
        quantile(answers, lambda quantiles: quantiles.p99),
        quantile(chunks, lambda quantiles: quantiles.p50),
        quantile(chunks, lambda quantiles: quantiles.p99),
        median(cpu_by_round.values(), decimals=1),
        spread(cpu_ratios),
        median(100 * sample.proxy_cpu_s / sample.measured_s for sample in samples if sample.proxy_cpu_s is not None),
        median(100 * load_ratio(sample) for sample in samples),
        median(100 * ratio for ratio in results.waited_ratios(peer, workload)),
        number(sum(sample.failed for sample in samples)),
    ]


def median(values: Iterable[float], decimals: int = 0) -> str:
    found = list(values)
    return number(statistics.median(found) if found else None, decimals)


def spread(values: list[float]) -> str:
    """Median, and in parentheses the lowest and highest round."""
    if not values:
        return NOTHING
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def load_ratio(sample: Sample) -> float:
    return sample.load_cpu_s / sample.measured_s


def notes(results: Results, *, one_core: bool) -> list[str]:
    """What the tables do not say, an entry each."""
    found = []
    saturated = []
    for workload in results.workloads:
        for peer in results.peers:
            samples = results.samples(peer, workload)
            stalls = sum(sample.stalls for sample in samples)
            unanswered = sum(sample.unanswered for sample in samples)
            if stalls:
                found.append(f"{peer} held back a chunk for 100 ms {stalls:,} times in {workload}.")
            slow = sum(sample.slow for sample in samples) if workload == "burst" else 0
            if slow:
                asked = sum(sample.requests for sample in samples)
                found.append(f"{peer} answered {slow:,} of {asked:,} requests of {workload} later than 250 ms.")
            if unanswered:
                found.append(f"{peer} left {unanswered:,} requests of {workload} unanswered.")
            if samples and statistics.median(map(load_ratio, samples)) >= SATURATED_RATIO:
                saturated.append(f"{workload} {peer}")
    if saturated:
        found.append(
            "The load core was the limit, so rate and times are the harness's own and only CPU is the "
            f"proxy's: {', '.join(saturated)}."
        )
    if any(results.failed(peer) for peer in results.peers):
        found.append("The first failures of each run are in .work/logs/load.log.")
    n_disturbed = sum(m.waited_ratio > DISTURBED_RATIO for m in results.measurements)
    if n_disturbed and not one_core:
        found.append(
            f"Other programs were running: in {n_disturbed} of {len(results.measurements)} runs a process "
            f"waited for its core for more than {DISTURBED_RATIO:.0%} of the time. Times and rates suffer first."
        )
    if REFERENCE not in results.peers:
        found.append(f"No ratios: {REFERENCE} was not measured.")
    return found
