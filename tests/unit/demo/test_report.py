"""From samples to figures: numbers that can be checked by hand."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from prefixroute.demo.client import Sample
from prefixroute.demo.report import (
    DemoReport,
    StrategyReport,
    check_writable,
    count_errors,
    demo_table,
    notes,
    percentile,
    show_percent,
    show_s,
    summarise,
    write_json,
)
from prefixroute.errors import ConfigError

WIDTH = 80


def sample(
    ttft_s: float, *, cached: int = 0, prompt: int = 100, instance: str | None = "a", duration_s: float = 1.0
) -> Sample:
    return Sample(
        duration_s=duration_s,
        ttft_s=ttft_s,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=10,
        instance=instance,
    )


def report_of(**strategies: StrategyReport) -> DemoReport:
    return DemoReport(
        strategies=strategies,
        speed=6.0,
        seed=1,
        n_instances=4,
        kv_tokens=50_000,
        n_conversations=200,
        new_tokens=250_000,
    )


# As large as figures get, for the width of the table.
SLOW = StrategyReport(0.474, 12_415_531, 24_570_523, 1.326, 12.693, 26.601, 14.424, 1.06, 986, 0, {})
FAST = StrategyReport(0.865, 622_666, 24_570_523, 0.044, 0.229, 0.404, 2.116, 1.33, 986, 2, {"HTTP 503": 2})


@pytest.mark.parametrize(
    ("ordered", "share", "expected"),
    [
        ([], 0.5, None),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([0.0, 10.0], 0.9, 9.0),
        ([float(n) for n in range(101)], 0.99, 99.0),
        ([1.0, 2.0, 3.0], 1.0, 3.0),
        ([1.0, 2.0, 3.0], 0.0, 1.0),
    ],
)
def test_percentile(ordered: list[float], share: float, expected: float | None) -> None:
    assert percentile(ordered, share) == (None if expected is None else pytest.approx(expected))


def test_times_are_scaled_back_to_the_speed_of_life() -> None:
    figures = summarise([sample(0.1, duration_s=0.5), sample(0.3, duration_s=0.7)], n_instances=1, speed=10)
    assert figures.ttft_p50_s == pytest.approx(2.0)
    assert figures.e2e_mean_s == pytest.approx(6.0)


def test_what_was_not_cached_was_recomputed() -> None:
    figures = summarise([sample(0.1, cached=60), sample(0.1, cached=30)], n_instances=1, speed=1)
    assert figures.prompt_tokens == 200
    assert figures.recomputed_tokens == 110
    assert figures.cached_ratio == pytest.approx(0.45)


def test_imbalance_is_the_busiest_over_the_mean_of_all_instances_idle_ones_included() -> None:
    samples = [sample(0.1, instance="a"), sample(0.1, instance="a", cached=50), sample(0.1, instance="b", cached=50)]
    # a computed 150, b 50, two others nothing: the mean is 50.
    assert summarise(samples, n_instances=4, speed=1).load_imbalance == pytest.approx(3.0)


def test_imbalance_is_unknown_when_an_answer_does_not_say_who_gave_it() -> None:
    assert summarise([sample(0.1), sample(0.1, instance=None)], n_instances=2, speed=1).load_imbalance is None


def test_failed_requests_are_counted_by_kind_and_left_out_of_everything_else() -> None:
    failed = [Sample(duration_s=9.0, error=kind) for kind in ("timeout", "HTTP 503", "HTTP 503")]
    figures = summarise([sample(0.1), *failed], n_instances=1, speed=1)
    assert (figures.n_requests, figures.n_errors) == (4, 3)
    assert list(figures.errors.items()) == [("HTTP 503", 2), ("timeout", 1)]
    assert figures.e2e_mean_s == pytest.approx(1.0)
    assert count_errors([sample(0.1)]) == {}


def test_nothing_gives_unknown_figures_rather_than_an_error() -> None:
    figures = summarise([], n_instances=4, speed=1)
    assert figures.cached_ratio is figures.ttft_p50_s is figures.e2e_mean_s is figures.load_imbalance is None
    assert json.loads(json.dumps(report_of(random=figures, other=figures).to_json()))


def test_ratios_are_to_the_first_strategy() -> None:
    ratios = report_of(random=SLOW, expected_latency=FAST).ratios()
    assert list(ratios) == ["expected_latency"]
    assert ratios["expected_latency"]["cached_ratio"] == pytest.approx(0.865 / 0.474)
    assert ratios["expected_latency"]["ttft_p50_s"] == pytest.approx(0.044 / 1.326)


def test_json_holds_what_the_table_shows(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    write_json(path, report_of(random=SLOW, expected_latency=FAST).to_json())
    data = json.loads(path.read_text(encoding="utf-8"))
    assert set(data["strategies"]) == {"random", "expected_latency"}
    assert data["strategies"]["random"]["recomputed_tokens"] == 12_415_531
    assert data["strategies"]["expected_latency"]["ttft_p99_s"] == 0.404
    assert (data["speed"], data["seed"]) == (6.0, 1)


def rendered(report: DemoReport) -> str:
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(demo_table(report))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_table_fits_a_narrow_terminal_with_nothing_cut() -> None:
    shown = rendered(report_of(random=SLOW, expected_latency=FAST))
    assert "…" not in shown
    for figure in ("expected_latency", "47.4%", "12,415,531", "26,601", "14,424", "1.33", "×1.82", "÷19.94"):
        assert figure in shown


def test_each_strategy_but_the_first_has_its_ratios() -> None:
    shown = rendered(report_of(random=SLOW, round_robin=SLOW, expected_latency=FAST))
    assert "ratio round_robin" in shown
    assert shown.count("÷19.94") == 1


def test_one_strategy_alone_has_no_ratios() -> None:
    assert "ratio" not in rendered(report_of(random=SLOW))


def test_notes_state_the_speed_and_the_failures() -> None:
    lines = notes(report_of(random=SLOW, expected_latency=FAST))
    assert all(len(line) <= WIDTH for line in lines)
    assert any("6 times faster" in line for line in lines)
    assert any("2 requests failed under expected_latency" in line and "HTTP 503: 2" in line for line in lines)


def test_notes_say_when_the_machine_could_not_keep_pace() -> None:
    kept = report_of(random=replace(SLOW, send_delay_p90_s=0.2), expected_latency=replace(FAST, send_delay_p90_s=0.008))
    assert not any("pace" in line for line in notes(kept))
    lagged = report_of(random=SLOW, expected_latency=replace(FAST, send_delay_p90_s=9.999))
    lines = notes(lagged)
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[-2:] == [
        "This machine could not keep pace: a tenth of the requests went out 9,999 ms",
        "late or more. Times are longer for it; a lower --speed helps.",
    ]


def test_how_late_requests_were_sent_is_scaled_back_too() -> None:
    samples = [replace(sample(0.1), send_delay_s=late_s) for late_s in (0.0, 0.01, 0.02)]
    assert summarise(samples, n_instances=1, speed=10).send_delay_p90_s == pytest.approx(0.18)
    assert summarise([], n_instances=1, speed=10).send_delay_p90_s is None


def test_figures_for_people() -> None:
    assert show_s(0.0314) == "31 ms"
    assert show_s(12.345) == "12.3 s"
    assert show_s(None) == show_percent(None) == "–"
    assert show_percent(0.4736) == "47.4%"


def test_results_that_could_not_be_written_are_told_beforehand(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    with pytest.raises(ConfigError, match="there is no directory"):
        check_writable(tmp_path / "missing" / "new.json")
    with pytest.raises(ConfigError, match="it is a directory"):
        check_writable(tmp_path)
