"""Ours against every other rule, over many settings: `python -m benchmarks.strategies --help`.

A *cell* is one workload at one load on one fleet, with or without a slow instance or a crash; its figures are geometric
means over seeds. Of each cell the best baseline is taken for each measure by itself: a router that no one has. Said
are each baseline's figures over ours (geometric mean over all cells), and the cells in which somebody beats us.

Virtual time: the same command gives the same figures on any machine. The full grid takes about an hour of two cores.
"""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from benchmarks.tables import markdown
from prefixroute.demo.report import write_json
from prefixroute.sim.calibration import Calibration
from prefixroute.sim.cell import Cell, Variant
from prefixroute.sim.generators import GENERATORS
from prefixroute.sim.grid import run_grid
from prefixroute.sim.options import parse_seeds, parse_source, parse_strategies
from prefixroute.sim.report import Figures
from prefixroute.sim.run import Outage

OURS = "expected_latency"
# Strongest first; the two of dynamo_exact are the least and the most that its weight for overlap makes sense for.
STRONGEST = ("min_ttft", "dynamo_exact:overlap_weight=16", "preble", "llm_d_precise", "smg")
OTHERS = (
    *("llm_d", "sglang", "dynamo_exact", "dynamo", "ray", "aibrix:block_chars=128", "kubeai", "d2lpm"),
    *("prefix_aware", "least_outstanding_requests", "round_robin", "random"),
)
MEASURES = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s")
# Enough that queues and caches settle; a run of one instance's share takes a second or two.
REQUESTS_PER_INSTANCE = 300
MIN_REQUESTS = 1_000
CLOSE = 1.03
BEHIND = 1.10
BEHIND_HITS = 0.01
VARIED_INSTANCES = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """A cell without its strategy and seed."""

    trace: str
    load: float
    n_instances: int
    variant: str

    def __str__(self) -> str:
        return f"{self.trace} {self.load:g} × {self.n_instances}" + (f", {self.variant}" if self.variant else "")


class Results:
    """Figures by setting, strategy and seed."""

    def __init__(self, results: Iterable[tuple[Cell, Figures]]) -> None:
        self.by_cell: dict[tuple[Setting, str], dict[int, Figures]] = {}
        for cell, figures in results:
            setting = Setting(cell.source.name, cell.load or 0.0, cell.n_instances, str(cell.variant))
            self.by_cell.setdefault((setting, cell.strategy), {})[cell.seed] = figures
        self.settings = list(dict.fromkeys(setting for setting, _ in self.by_cell))
        self.strategies = list(dict.fromkeys(name for _, name in self.by_cell))

    def ratio(self, setting: Setting, name: str, measure: str) -> float:
        """Ours over the other's, of the seeds that both have."""
        return geometric_mean(self.ratios(setting, name, measure))

    def ratios(self, setting: Setting, name: str, measure: str) -> list[float]:
        mine, other = self.by_cell[setting, OURS], self.by_cell[setting, name]
        return [getattr(mine[seed], measure) / getattr(other[seed], measure) for seed in mine.keys() & other.keys()]

    def hits_behind(self, setting: Setting, name: str) -> float:
        mine, other = self.by_cell[setting, OURS], self.by_cell[setting, name]
        seeds = mine.keys() & other.keys()
        return sum(other[seed].cached_ratio - mine[seed].cached_ratio for seed in seeds) / len(seeds)

    def baselines(self, setting: Setting) -> list[str]:
        return [name for name in self.strategies if name != OURS and (setting, name) in self.by_cell]


def geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def make_cells(options: argparse.Namespace) -> list[Cell]:
    """Every baseline with the first seed, the strongest and ours with all."""
    seeds = parse_seeds(options.seeds)
    first, *more = seeds
    strategies = parse_strategies(options.strategies) if options.strategies else [OURS, *STRONGEST, *OTHERS]
    often = [name for name in strategies if name in STRONGEST or name.startswith(OURS)]
    fleets = [int(n) for n in options.instances.split(",")]
    loads = [float(load) for load in options.loads.split(",")]
    cells = []
    for source, n, load in product(map(parse_source, options.traces), fleets, loads):
        n_requests = max(MIN_REQUESTS, REQUESTS_PER_INSTANCE * n)
        plain = Cell(source, OURS, n_requests=n_requests, n_instances=n, load=load)
        varied = [plain]
        if n == VARIED_INSTANCES and load == 1.0 and not options.plain:
            varied += [
                replace(plain, variant=Variant(slow=((0, 0.4),))),
                replace(plain, variant=Variant(outages=(Outage(0, 60.0),))),
            ]
        for cell in varied:
            cells += [replace(cell, strategy=name, seed=first) for name in strategies]
            cells += [replace(cell, strategy=name, seed=seed) for seed in more for name in often]
    return cells


def by_baseline(results: Results) -> str:
    """How many times our figure each baseline needs, over all cells."""
    rows = []
    for name in results.strategies:
        settings = [setting for setting in results.settings if (setting, name) in results.by_cell]
        if name == OURS or not settings:
            continue
        worse = [1 / geometric_mean([results.ratio(s, name, m) for s in settings]) for m in MEASURES]
        hits = sum(results.hits_behind(s, name) for s in settings) / len(settings)
        rows.append([name, *(f"{factor:.2f}" for factor in worse), f"{100 * hits:+.1f}"])
    headings = ["× of ours", "TTFT mean", "TTFT p99", "end to end mean", "cached, points"]
    return markdown(headings, rows)


def against_best(results: Results) -> str:
    """Ours over the best baseline of each cell."""
    rows = []
    for measure in MEASURES:
        ratios = [max(results.ratio(s, name, measure) for name in results.baselines(s)) for s in results.settings]
        rows.append(
            [
                measure,
                *(f"{geometric_mean(ratios):.3f}", f"{max(ratios):.2f}"),
                *(str(sum(ratio > limit for ratio in ratios)) for limit in (CLOSE, BEHIND)),
            ]
        )
    behind = [max(results.hits_behind(s, name) for name in results.baselines(s)) for s in results.settings]
    rows.append(
        [
            "cached ratio, points behind",
            *(f"{100 * sum(behind) / len(behind):.2f}", f"{100 * max(behind):.1f}"),
            *("", str(sum(gap > BEHIND_HITS for gap in behind))),
        ]
    )
    n = len(results.settings)
    headings = [f"ours over the best of {n} cells", "mean", "worst", "cells > 3 %", "cells > 10 % (1 point)"]
    return markdown(headings, rows)


def lost_cells(results: Results) -> str:
    """Where somebody is more than 3 % better, or hits more than a point more; with the seeds' range."""
    rows = []
    for setting, measure in product(results.settings, MEASURES):
        best = max(results.baselines(setting), key=lambda name: results.ratio(setting, name, measure))
        ratio = results.ratio(setting, best, measure)
        if ratio > CLOSE:
            seeds = results.ratios(setting, best, measure)
            rows.append([str(setting), measure, best, f"{ratio:.2f}", f"{min(seeds):.2f} to {max(seeds):.2f}"])
    for setting in results.settings:
        best = max(results.baselines(setting), key=lambda name: results.hits_behind(setting, name))
        gap = results.hits_behind(setting, best)
        if gap > BEHIND_HITS:
            rows.append([str(setting), "cached ratio", best, f"{100 * gap:.1f} points", ""])
    return markdown(["cell", "measure", "best baseline", "ours over it", "over seeds"], rows, n_text_columns=3)


def summary(results: Results) -> Mapping[str, object]:
    return {
        "rows": [
            {
                "trace": setting.trace,
                "load": setting.load,
                "instances": setting.n_instances,
                "variant": setting.variant,
                "strategy": name,
                "seed": seed,
                **{field: getattr(figures, field) for field in (*MEASURES, "cached_ratio", "imbalance", "n")},
            }
            for (setting, name), by_seed in results.by_cell.items()
            for seed, figures in by_seed.items()
        ]
    }


class _Progress:
    """On a terminal: what is being done, and how much of it is."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def stage(self, name: str, n_steps: int) -> None:
        self._bar.reset(self._task, total=n_steps, description=name)

    def step(self) -> None:
        self._bar.advance(self._task)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=__doc__)
    generated = [name for name in GENERATORS if name != "heldout"]
    parser.add_argument("traces", nargs="*", default=generated, help="files or generators (default: all generators)")
    parser.add_argument("--instances", default="2,8,32", help="fleets (default %(default)s)")
    parser.add_argument("--loads", default="0.5,1,1.3", help="(default %(default)s)")
    parser.add_argument("--seeds", default="0-2", help="of ours and the strongest five; others run the first only")
    parser.add_argument("--strategies", help="instead of all")
    parser.add_argument("--plain", action="store_true", help="no slow instance, no crash")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--calibration", type=Path, help="keep the rates of load 1.0 there")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args(arguments)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        found = run_grid(
            make_cells(options),
            n_processes=options.jobs,
            calibration=Calibration(options.calibration),
            progress=_Progress(bar),
        )
    results = Results(found)
    if options.json is not None:
        write_json(options.json, summary(results))
    for table in (by_baseline(results), against_best(results), lost_cells(results)):
        print(table, end="\n\n")


if __name__ == "__main__":
    main()
