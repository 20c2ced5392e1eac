"""The comparison as one picture: how long people wait, by strategy and setting."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any

from prefixroute.demo.chart import SUFFIXES
from prefixroute.demo.report import show_s
from prefixroute.errors import ConfigError
from prefixroute.sim.table import Row, reference, title

# Okabe and Ito's blue for whom the others are held against, grey for those.
_OURS, _OTHERS = "#0072B2", "#999999"
_TEXT = "#333333"
_PANEL_INCHES = 5.4
_BAR_INCHES = 0.27
# Longer bars are cut: a strategy that collapses must not make all others look the same.
_MAX_RATIO = 4.0


def check_chart_path(path: Path) -> None:
    """Raises ConfigError if no chart can be drawn to `path`."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"cannot draw {path}: its name must end in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--chart needs matplotlib: pip install 'prefixroute[charts]'")


def draw_chart(settings: Sequence[Sequence[Row]], path: Path) -> None:
    """A panel for each setting: mean TTFT of its strategies over that of the reference, and what came from cache.

    The same figures give the same file.
    """
    # Without pyplot: no windows, no state of the process.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 10,
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "axes.edgecolor": _TEXT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        "svg.hashsalt": "prefixroute",
    }
    n_columns = min(2, len(settings))
    n_rows = ceil(len(settings) / n_columns)
    n_bars = max(len(rows) for rows in settings)
    with mpl.rc_context(style):
        size = (max(7, n_columns * _PANEL_INCHES), n_rows * (n_bars * _BAR_INCHES + 1.0) + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(n_rows, n_columns, squeeze=False).flat
        for axes, rows in zip_longest(panels, settings):
            if rows is None:
                axes.set_visible(False)
            else:
                _draw(axes, rows)
        figure.supxlabel(
            "Bars: mean time to first token (×: over the blue one). Right: share of prompt tokens from cache.",
            fontsize=9,
        )
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None, facecolor="white")


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    base = reference(rows)
    # The best on top.
    ordered = sorted(rows, key=lambda row: -row.figures["ttft_mean_s"])
    ratios = [row.figures["ttft_mean_s"] / base.figures["ttft_mean_s"] for row in ordered]
    end = min(max(ratios), _MAX_RATIO)
    bars = axes.barh(
        # Parameters below their name: the bars need the room.
        [row.cell.strategy.replace(":", "\n", 1) for row in ordered],
        [min(ratio, end) for ratio in ratios],
        0.72,
        color=[_OURS if row is base else _OTHERS for row in ordered],
    )
    labels = [
        show_s(row.figures["ttft_mean_s"]) if row is base else f"{'→ ' if ratio > end else ''}×{_show(ratio)}"
        for row, ratio in zip(ordered, ratios, strict=True)
    ]
    axes.bar_label(bars, labels, padding=3, fontsize=9)
    for place, row in enumerate(ordered):
        axes.text(end * 1.85, place, f"{row.figures['cached_ratio']:.0%}", ha="right", va="center", fontsize=9)
    axes.set_xlim(0, end * 1.86)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.axvline(1.0, color=_TEXT, linewidth=0.8, linestyle=":")
    axes.set_title(title(base.cell).replace(", ", "\n", 1), loc="left", fontsize=10, fontweight="bold")
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.xaxis.set_visible(False)


def _show(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"
