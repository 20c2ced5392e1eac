"""The chart: a file that shows the figures, or one clear line."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from prefixroute.demo import chart
from prefixroute.demo.chart import check_chart_path, draw_chart
from prefixroute.demo.report import DemoReport, StrategyReport
from prefixroute.errors import ConfigError

pytest.importorskip("matplotlib")

SLOW = StrategyReport(0.474, 2_415_531, 4_570_523, 0.326, 2.693, 6.601, 4.424, 1.06, 986, 0, {})
FAST = StrategyReport(0.865, 622_666, 4_570_523, 0.044, 0.229, 0.404, 2.116, 1.33, 986, 0, {})
NOTHING = StrategyReport(None, 0, 0, None, None, None, None, None, 0, 0, {})
REPORT = DemoReport({"random": SLOW, "expected_latency": FAST}, 6.0, 1, 4, 50_000, 200, 250_000)


def test_the_same_figures_give_the_same_svg(tmp_path: Path) -> None:
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    draw_chart(REPORT, first)
    draw_chart(REPORT, second)
    assert ElementTree.parse(first).getroot().tag.endswith("svg")
    assert first.read_bytes() == second.read_bytes()


def test_a_png(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    draw_chart(REPORT, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_unknown_figures_do_not_stop_it(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    draw_chart(DemoReport({"random": NOTHING}, 6.0, 1, 4, 50_000, 1, 1), path)
    assert path.exists()


def test_other_kinds_of_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must end in \.svg or \.png"):
        check_chart_path(Path("chart.gif"))


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'prefixroute\[charts\]'"):
        check_chart_path(Path("chart.svg"))
