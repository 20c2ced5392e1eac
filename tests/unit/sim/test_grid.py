"""Many cells: in order, the same in one process and in several, and clear about what went wrong where."""

from dataclasses import replace
from pathlib import Path

import pytest

from prefixroute.errors import ConfigError
from prefixroute.sim import strategies
from prefixroute.sim.calibration import Calibration
from prefixroute.sim.cell import Cell, Variant, measure
from prefixroute.sim.grid import CellError, run_grid
from prefixroute.sim.run import Outage
from prefixroute.sim.sources import FromTrace, Generated
from prefixroute.sim.strategies import Strategy, strategy

CELL = Cell(Generated("rag"), "random", n_requests=200, n_instances=2, load=None, rate=3.0)


class Counted:
    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.n_steps = 0

    def stage(self, name: str, n_steps: int) -> None:
        self.stages.append((name, n_steps))

    def step(self) -> None:
        self.n_steps += 1


def test_several_processes_give_what_one_gives() -> None:
    cells = [replace(CELL, strategy=name, seed=seed) for name in ("random", "expected_latency") for seed in (0, 1)]
    here = run_grid(cells)
    assert [cell for cell, _ in here] == cells
    assert run_grid(cells, n_processes=2) == here


def test_load_one_is_found_once_for_all_that_share_it(tmp_path: Path) -> None:
    calibration, progress = Calibration(), Counted()
    cells = [replace(CELL, load=load, rate=None, seed=seed) for load in (0.5, 1.0) for seed in (0, 1)]
    results = run_grid(cells, calibration=calibration, progress=progress)
    full = calibration.known(CELL.setting())
    assert full is not None
    assert [cell.rate for cell, _ in results] == [0.5 * full, 0.5 * full, full, full]
    assert progress.stages == [("finding load 1.0", 1), ("simulating", 4)]
    assert progress.n_steps == 5
    assert results[0][1].ttft_mean_s < results[2][1].ttft_mean_s


def test_variants_change_what_they_say() -> None:
    slow = replace(CELL, variant=Variant(slow=((0, 0.3),)))
    dead = replace(CELL, variant=Variant(outages=(Outage(0, 10.0, 20.0),)))
    sound, slowed, killed = (figures for _, figures in run_grid([CELL, slow, dead]))
    assert slowed.ttft_mean_s > 1.5 * sound.ttft_mean_s
    assert killed.n_attempts > killed.n == sound.n_attempts


def test_requests_that_fit_into_no_server_are_counted() -> None:
    engine = replace(CELL.engine, kv_tokens=8_000)
    ((_, figures),) = run_grid([replace(CELL, engine=engine)])
    assert figures.n_left_out > 0
    assert figures.n + figures.n_left_out == 200


def test_an_unknown_strategy_is_told_before_anything_is_run() -> None:
    progress = Counted()
    with pytest.raises(ConfigError, match="did you mean 'random'"):
        run_grid([CELL, replace(CELL, strategy="randon")], progress=progress)
    assert progress.stages == []


def test_a_mistake_names_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str) -> Strategy:
        def make(sim: object) -> object:
            raise ZeroDivisionError("by nothing")

        return Strategy(text, make)  # type: ignore[arg-type]  # never gets that far

    monkeypatch.setattr(strategies, "strategy", broken)
    with pytest.raises(CellError, match=r"^rag, random, 3 requests/s, .* seed 0: ZeroDivisionError: by nothing$"):
        run_grid([CELL])


def test_what_goes_wrong_in_a_worker_is_told_as_here(tmp_path: Path) -> None:
    """The file goes away after the options have been looked at."""
    missing = replace(CELL, source=FromTrace((tmp_path / "gone.jsonl",)))
    with pytest.raises(ConfigError, match=r"gone\.jsonl: No such file"):
        run_grid([missing, CELL], n_processes=2)


def test_a_strategy_of_ones_own() -> None:
    own = strategy("round_robin")
    assert measure(CELL, own) == measure(replace(CELL, strategy="round_robin"), own)
    with pytest.raises(ConfigError, match="rate is not known"):
        measure(replace(CELL, rate=None, load=1.0), own)
