"""From finished requests to figures."""

from dataclasses import asdict

import pytest

from prefixroute.sim.calibration import Setting
from prefixroute.sim.cell import Cell, Variant
from prefixroute.sim.report import Figures, ideal_tokens, mean_of, pooled_tokens, summarise
from prefixroute.sim.run import Done, Outage
from prefixroute.sim.sources import Generated
from prefixroute.sim.table import note, reference, rows_of, settings_of, table_of, title, to_json
from prefixroute.sim.workload import SimRequest, Workload


def ask(ids: list[int], input_tokens: int | None = None) -> SimRequest:
    return SimRequest(0.0, input_tokens or 64 * len(ids), 65, ids)


def figures(ttft_s: float = 1.0) -> Figures:
    workload = Workload("w", 64, [ask([1, 2]), ask([1, 2, 3])])
    done = [
        Done(0.0, 128, 65, 0, 0, 0, ttft_s, ttft_s + 1, 1),
        Done(1.0, 192, 65, 1, 64, 128, 3 * ttft_s, 3 * ttft_s + 1, 2),
    ]
    return summarise(workload, done, n_instances=2, kv_tokens=640, n_left_out=1)


def test_figures_by_hand() -> None:
    of = figures()
    assert (of.n, of.n_left_out, of.n_attempts) == (2, 1, 3)
    assert (of.input_tokens, of.output_tokens, of.computed_tokens) == (320, 130, 256)
    assert of.cached_ratio == 64 / 320
    assert of.matched_ratio == 128 / 320
    assert of.ideal_ratio == of.pooled_ratio == 128 / 320
    assert (of.ttft_mean_s, of.ttft_p50_s, of.ttft_p90_s, of.ttft_p99_s) == pytest.approx((2.0, 2.0, 2.8, 2.98))
    assert (of.e2e_mean_s, of.e2e_p50_s, of.e2e_p99_s) == pytest.approx((3.0, 3.0, 3.98))
    # Both compute 128 tokens, one of them behind 64 others.
    work = 128 * (1 + 64 / 32_000), 128 * (1 + 128 / 32_000)
    assert of.imbalance == pytest.approx(2 * work[1] / sum(work))
    assert of.duration_s == 5.0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    assert ideal_tokens([ask([1, 2]), ask([1, 2])], 64) == 64
    assert ideal_tokens([ask([1, 2]), ask([1, 2], 129)], 64) == 128


def test_a_pool_forgets_the_end_of_what_was_used_least_recently() -> None:
    asked = [ask([1, 2, 3]), ask([4, 5, 6]), ask([1, 2, 3], 200)]
    assert pooled_tokens(asked, 64, 6) == 192
    # The second one takes the places of 3 and 2.
    assert pooled_tokens(asked, 64, 4) == 64
    assert pooled_tokens(asked, 64, 3) == 0


def test_a_pool_without_bound_is_ideal() -> None:
    asked = [ask([n % 3, 10 + n % 5, 100 + n], 190) for n in range(50)]
    assert pooled_tokens(asked, 64, 10_000) == ideal_tokens(asked, 64) > 0


def test_seeds_come_to_a_mean_and_a_spread() -> None:
    of = mean_of([figures(1.0), figures(2.0)])
    assert of["ttft_mean_s"] == 3.0
    assert of["spread"]["ttft_mean_s"] == pytest.approx(1 / 3)
    assert of["spread"]["cached_ratio"] == 0.0
    assert of["n"] == 2


RESULTS = [
    (Cell(Generated("rag"), name, rate=5.0, load=load, seed=seed), figures(1.0 + seed + load))
    for load in (0.5, 1.0)
    for name in ("random", "expected_latency:wait_weight=1", "preble")
    for seed in (0, 1)
]


def test_rows_are_by_setting_and_strategy() -> None:
    rows = rows_of(RESULTS)
    assert [(row.cell.load, row.cell.strategy, row.seeds) for row in rows][:2] == [
        (0.5, "random", [0, 1]),
        (0.5, "expected_latency:wait_weight=1", [0, 1]),
    ]
    settings = settings_of(rows)
    assert [len(of_one) for of_one in settings] == [3, 3]
    assert reference(settings[0]).cell.strategy.startswith("expected_latency")
    assert reference(settings[0][2:]).cell.strategy == "preble"


def test_json_has_rows_and_runs() -> None:
    told = to_json(RESULTS)
    assert len(told["rows"]) == 6
    assert len(told["runs"]) == 12
    row = told["rows"][0]
    assert (row["trace"], row["strategy"], row["load"], row["rate"]) == ("rag", "random", 0.5, 5.0)
    assert set(asdict(figures())) | {"instances", "variant", "seeds", "spread"} <= set(row)
    assert row["ttft_mean_s"] == 4.0
    assert [run["ttft_mean_s"] for run in told["runs"][:2]] == [3.0, 5.0]


def test_table_and_note_say_what_was_run() -> None:
    rows = settings_of(rows_of(RESULTS))[0]
    assert table_of(rows).row_count == 3
    assert title(rows[0].cell) == "rag, load 0.5 (5 requests/s), 8 instances"
    assert "means of 2 seeds" in note(rows)
    assert "1 were too long" in note(rows)


def test_a_cell_says_what_it_is() -> None:
    variant = Variant(((0, 0.4),), (Outage(1, 120.0, 30.0),))
    cell = Cell(Generated("chat"), "random", load=None, rate=3.0, variant=variant)
    assert str(cell) == "chat, random, 3 requests/s, 8 instances, seed 0, i0 at 0.4, i1 dies at 120 s for 30 s"
    assert cell.with_rate(7.0) is cell
    assert Cell(Generated("chat"), "random", load=0.5).with_rate(7.0).rate == 3.5
    assert isinstance(cell.setting(), Setting)
