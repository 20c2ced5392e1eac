"""The demo's figures as one picture."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefixroute.demo.report import DemoReport
from prefixroute.errors import ConfigError

SUFFIXES = (".svg", ".png")
# Okabe and Ito's palette: told apart with every kind of colour vision, and by lightness in grey.
_COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
_TEXT = "#333333"


def check_chart_path(path: Path) -> None:
    """Raises ConfigError if no chart can be drawn to `path`."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"cannot draw {path}: its name must end in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("charts need matplotlib: pip install 'prefixroute[charts]'")


def draw_chart(report: DemoReport, path: Path) -> None:
    """Time to first token and prompt tokens recomputed, by strategy."""
    # Without pyplot: no windows, no state of the process.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 11,
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "axes.edgecolor": _TEXT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        # The same figures give the same file.
        "svg.hashsalt": "prefixroute",
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(9, 4), layout="constrained")
        times, tokens = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_times(times, report)
        _draw_tokens(tokens, report)
        n_requests = max(figures.n_requests for figures in report.strategies.values())
        setting = (
            f"{report.n_instances} simulated servers with {report.kv_tokens:,} tokens of KV each,"
            f" {n_requests:,} chat requests in {report.n_conversations:,} conversations;"
            f" run at {report.speed:g} times real speed, times scaled back"
        )
        figure.supxlabel(setting, fontsize=9)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None, facecolor="white")


def _draw_times(axes: Any, report: DemoReport) -> None:
    width = 0.8 / len(report.strategies)
    for place, (name, figures) in enumerate(report.strategies.items()):
        values_ms = [
            (value_s or 0.0) * 1000 for value_s in (figures.ttft_p50_s, figures.ttft_p90_s, figures.ttft_p99_s)
        ]
        at = [group - 0.4 + width * (place + 0.5) for group in range(3)]
        bars = axes.bar(at, values_ms, width * 0.92, color=_colour(place), label=name)
        axes.bar_label(bars, [f"{value_ms:,.0f}" for value_ms in values_ms], padding=2, fontsize=9)
    axes.set_xticks(range(3), ["p50", "p90", "p99"])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("milliseconds")
    axes.set_title("Time to first token (less is better)", loc="left")
    axes.legend(frameon=False, loc="upper left")
    _plain(axes)


def _draw_tokens(axes: Any, report: DemoReport) -> None:
    names = list(report.strategies)
    millions = [figures.recomputed_tokens / 1e6 for figures in report.strategies.values()]
    bars = axes.bar(names, millions, 0.7, color=[_colour(place) for place in range(len(names))])
    labels = [
        f"{value:.2f}\n({1 - (figures.cached_ratio or 0.0):.0%} of all)"
        for value, figures in zip(millions, report.strategies.values(), strict=True)
    ]
    axes.bar_label(bars, labels, padding=2, fontsize=9)
    axes.set_ylabel("million tokens")
    axes.set_title("Prompt tokens computed, not from cache", loc="left")
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    # Room for the numbers on the bars.
    axes.margins(y=0.18)
    axes.set_ylim(bottom=0)


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]
