"""The picture of a comparison: a file that shows the figures, or one clear line."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from prefixroute.errors import ConfigError
from prefixroute.sim import chart
from prefixroute.sim.cell import Cell
from prefixroute.sim.chart import check_chart_path, draw_chart
from prefixroute.sim.sources import Generated
from prefixroute.sim.table import Row

pytest.importorskip("matplotlib")


def row(name: str, trace: str, ttft_s: float) -> Row:
    return Row(Cell(Generated(trace), name, rate=3.0), [0], {"ttft_mean_s": ttft_s, "cached_ratio": 0.5})


SETTINGS = [
    [row("random", trace, 900.0), row("expected_latency", trace, 1.0), row("preble", trace, 1.1)]
    for trace in ("chat", "rag", "noshare")
]


def test_the_same_figures_give_the_same_svg(tmp_path: Path) -> None:
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    draw_chart(SETTINGS, first)
    draw_chart(SETTINGS, second)
    assert ElementTree.parse(first).getroot().tag.endswith("svg")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("n", [1, 2])
def test_a_png(tmp_path: Path, n: int) -> None:
    path = tmp_path / "chart.png"
    draw_chart([rows[:n] for rows in SETTINGS[:n]], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_other_kinds_of_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must end in \.svg or \.png"):
        check_chart_path(Path("chart.gif"))


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'prefixroute\[charts\]'"):
        check_chart_path(Path("chart.svg"))
