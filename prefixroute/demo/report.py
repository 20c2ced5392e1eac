"""From samples to figures, table and JSON."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import floor
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from prefixroute.demo.client import Sample
from prefixroute.errors import ConfigError

# Of the median TTFT: one request in ten left later than that, and what it measured says more of the machine. An idle
# machine at the demo's own speed has half of it.
_TOLERATED_DELAY_RATIO = 0.2


@dataclass(frozen=True, slots=True)
class StrategyReport:
    """What one strategy made of the workload. Times in seconds of the simulated servers; None: nothing to tell.

    `recomputed_tokens`: prompt tokens that no cache served. `load_imbalance`: prompt tokens computed by the
    instance that computed most, over the mean of all instances; 1 is even. Failed requests count in `n_errors` and,
    by kind, in `errors` only. `send_delay_p90_s`: nine of ten requests were sent at most so much later than their time.
    """

    cached_ratio: float | None
    recomputed_tokens: int
    prompt_tokens: int
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    e2e_mean_s: float | None
    load_imbalance: float | None
    n_requests: int
    n_errors: int
    errors: Mapping[str, int]
    send_delay_p90_s: float | None = None

    @property
    def lagged(self) -> bool:
        """Whether requests were sent so late that times must be read with that in mind."""
        if self.send_delay_p90_s is None or self.ttft_p50_s is None:
            return False
        return self.send_delay_p90_s > _TOLERATED_DELAY_RATIO * self.ttft_p50_s


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Of one run of the demo: strategies in the order in which they ran, the first one being what others are held
    against. `new_tokens`: prompt tokens that come up for the first time, so that nobody can have them cached."""

    strategies: Mapping[str, StrategyReport]
    speed: float
    seed: int
    n_instances: int
    kv_tokens: int
    n_conversations: int
    new_tokens: int

    def ratios(self) -> dict[str, dict[str, float | None]]:
        """By strategy but the first: each figure over the first strategy's."""
        (_, base), *others = self.strategies.items()
        return {name: {key: _ratio(report, base, key) for key in _COMPARED} for name, report in others}

    def to_json(self) -> dict[str, Any]:
        return {
            "strategies": {name: asdict(report) for name, report in self.strategies.items()},
            "ratios": self.ratios(),
            "speed": self.speed,
            "seed": self.seed,
            "n_instances": self.n_instances,
            "kv_tokens": self.kv_tokens,
            "n_conversations": self.n_conversations,
            "new_tokens": self.new_tokens,
        }


_COMPARED = (
    *("cached_ratio", "recomputed_tokens", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "e2e_mean_s"),
    "load_imbalance",
)


def summarise(samples: Sequence[Sample], *, n_instances: int, speed: float) -> StrategyReport:
    """`speed`: how much faster than life the samples were taken; their times are multiplied by it."""
    sound = [sample for sample in samples if sample.error is None]
    ttfts_s = sorted(sample.ttft_s * speed for sample in sound if sample.ttft_s is not None)
    prompt_tokens = sum(sample.prompt_tokens or 0 for sample in sound)
    recomputed: dict[str | None, int] = {}
    for sample in sound:
        n_computed = (sample.prompt_tokens or 0) - (sample.cached_tokens or 0)
        recomputed[sample.instance] = recomputed.get(sample.instance, 0) + n_computed
    total = sum(recomputed.values())
    return StrategyReport(
        cached_ratio=1 - total / prompt_tokens if prompt_tokens else None,
        recomputed_tokens=total,
        prompt_tokens=prompt_tokens,
        ttft_p50_s=percentile(ttfts_s, 0.50),
        ttft_p90_s=percentile(ttfts_s, 0.90),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        e2e_mean_s=sum(sample.duration_s for sample in sound) * speed / len(sound) if sound else None,
        load_imbalance=max(recomputed.values()) * n_instances / total if total and None not in recomputed else None,
        n_requests=len(samples),
        n_errors=len(samples) - len(sound),
        errors=count_errors(samples),
        send_delay_p90_s=percentile(sorted(sample.send_delay_s * speed for sample in samples), 0.90),
    )


def count_errors(samples: Sequence[Sample]) -> dict[str, int]:
    """Failures by kind, the most frequent first."""
    return dict(Counter(sample.error for sample in samples if sample.error is not None).most_common())


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which `share` (0 … 1) of `ordered` lies, between neighbours by proportion; None of nothing."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def show_s(value_s: float | None) -> str:
    """A time for people: milliseconds below ten seconds."""
    if value_s is None:
        return "–"
    return f"{value_s * 1000:,.0f} ms" if value_s < 10 else f"{value_s:,.1f} s"


def show_percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1%}"


def show_errors(figures: StrategyReport) -> str:
    return ", ".join(f"{kind}: {n:,}" for kind, n in figures.errors.items())


def check_writable(path: Path) -> None:
    """Raises ConfigError if a result could not be written there: better before a minute of work than after."""
    directory = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a directory")
    if not directory.is_dir():
        raise ConfigError(f"cannot write {path}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Raises ConfigError if it cannot be written."""
    try:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def demo_table(report: DemoReport) -> Table:
    """A row for each strategy, then what the others gain over the first: at most 80 columns wide."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    # Long names fold, figures never.
    table.add_column("", overflow="fold")
    for heading in (
        "from\ncache",
        "tokens re-\ncomputed",
        "TTFT\np50 ms",
        "\np90 ms",
        "\np99 ms",
        "end to\nend ms",
        "imba-\nlance",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, figures in report.strategies.items():
        table.add_row(
            name,
            show_percent(figures.cached_ratio),
            f"{figures.recomputed_tokens:,}",
            *map(_show_ms, (figures.ttft_p50_s, figures.ttft_p90_s, figures.ttft_p99_s, figures.e2e_mean_s)),
            _show_number(figures.load_imbalance),
        )
    ratios_by_name = report.ratios()
    if ratios_by_name:
        table.add_section()
    for name, ratios in ratios_by_name.items():
        label = "ratio" if len(report.strategies) == 2 else f"ratio {name}"
        table.add_row(label, *(_show_ratio(ratios[key]) for key in _COMPARED), style="bold")
    return table


def notes(report: DemoReport) -> list[str]:
    """What a reader of the table must know, line by line."""
    n_requests = max(figures.n_requests for figures in report.strategies.values())
    prompt_tokens = max(figures.prompt_tokens for figures in report.strategies.values())
    lines = [
        f"{n_requests:,} requests with {prompt_tokens:,} prompt tokens, in {report.n_conversations:,} conversations;",
        f"{report.n_instances} simulated servers with {report.kv_tokens:,} tokens of KV each; seed {report.seed}.",
        f"All ran {report.speed:g} times faster than life; times are scaled back (measured × {report.speed:g}).",
        f"Recomputed: prompt tokens not from cache; {report.new_tokens:,} came up for the first time.",
        "Imbalance: tokens recomputed by the busiest server, over the mean of all.",
    ]
    for name, figures in report.strategies.items():
        if figures.n_errors:
            lines.append(
                f"{figures.n_errors:,} requests failed under {name} and are left out ({show_errors(figures)})."
            )
    delays_s = [figures.send_delay_p90_s or 0.0 for figures in report.strategies.values() if figures.lagged]
    if delays_s:
        lines += [
            f"This machine could not keep pace: a tenth of the requests went out {show_s(max(delays_s))}",
            "late or more. Times are longer for it; a lower --speed helps.",
        ]
    return lines


def _ratio(report: StrategyReport, base: StrategyReport, key: str) -> float | None:
    ours, theirs = getattr(report, key), getattr(base, key)
    return ours / theirs if ours is not None and theirs else None


def _show_ms(value_s: float | None) -> str:
    return "–" if value_s is None else f"{value_s * 1000:,.0f}"


def _show_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _show_ratio(ratio: float | None) -> str:
    """What is smaller is told as a division: ÷4.0 says more than ×0.25."""
    if not ratio:
        return "–"
    return f"×{ratio:.2f}" if ratio >= 1 else f"÷{1 / ratio:.2f}"
