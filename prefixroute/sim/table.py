"""Results for people and for programs: a table for each setting, and rows of JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from prefixroute.demo.report import show_percent, show_s
from prefixroute.sim.cell import Cell
from prefixroute.sim.report import Figures, mean_of


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy in one setting: the mean of its seeds. `cell` is that of the first seed."""

    cell: Cell
    seeds: Sequence[int]
    figures: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {**_head(self.cell), "seeds": list(self.seeds), **self.figures}


def rows_of(results: Sequence[tuple[Cell, Figures]]) -> list[Row]:
    """In the order of the results."""
    by_cell: dict[Cell, list[tuple[Cell, Figures]]] = {}
    for cell, figures in results:
        by_cell.setdefault(replace(cell, seed=0), []).append((cell, figures))
    return [
        Row(runs[0][0], [cell.seed for cell, _ in runs], mean_of([figures for _, figures in runs]))
        for runs in by_cell.values()
    ]


def settings_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that differ in their strategy only, together: these can be compared."""
    settings: dict[Cell, list[Row]] = {}
    for row in rows:
        settings.setdefault(replace(row.cell, strategy=""), []).append(row)
    return list(settings.values())


def reference(rows: Sequence[Row]) -> Row:
    """Whom the others are held against: `expected_latency`, or the first."""
    return next((row for row in rows if row.cell.strategy.partition(":")[0] == "expected_latency"), rows[0])


def to_json(results: Sequence[tuple[Cell, Figures]]) -> dict[str, Any]:
    """`rows`: means over seeds; `runs`: the same of each seed."""
    return {
        "rows": [row.to_json() for row in rows_of(results)],
        "runs": [{**_head(cell), "seed": cell.seed, **asdict(figures)} for cell, figures in results],
    }


def title(cell: Cell) -> str:
    """The setting of a cell, without strategy and seed."""
    rate = f"{cell.rate or 0:.3g} requests/s"
    at = rate if cell.load is None else f"load {cell.load:g} ({rate})"
    return ", ".join(filter(None, [cell.source.name, at, f"{cell.n_instances} instances", str(cell.variant)]))


def table_of(rows: Sequence[Row]) -> Table:
    """Of one setting: at most 80 columns wide."""
    table = Table(
        title=title(rows[0].cell),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    # Long names fold, figures never.
    table.add_column("", overflow="fold")
    for heading in ("from\ncache", "TTFT\nmean", "\n×", "\np99", "end to end\nmean", "imba-\nlance"):
        table.add_column(heading, justify="right", no_wrap=True)
    base = reference(rows)
    for row in rows:
        of = row.figures
        table.add_row(
            row.cell.strategy,
            show_percent(of["cached_ratio"]),
            show_s(of["ttft_mean_s"]),
            f"{of['ttft_mean_s'] / base.figures['ttft_mean_s']:.2f}",
            *(show_s(of[name]) for name in ("ttft_p99_s", "e2e_mean_s")),
            f"{of['imbalance']:.2f}",
            style="bold" if row is base and len(rows) > 1 else "",
        )
    return table


def note(rows: Sequence[Row]) -> str:
    """What a reader of the table must know."""
    of, n_seeds = reference(rows).figures, len(rows[0].seeds)
    left_out = f" {of['n_left_out']:,} were too long for a server and are left out." if of["n_left_out"] else ""
    seeds = f"; means of {n_seeds} seeds" if n_seeds > 1 else f"; seed {rows[0].seeds[0]}"
    return (
        f"{of['n']:,} requests of {of['input_tokens'] / of['n']:,.0f} prompt tokens in the mean{seeds}.{left_out}"
        f" One cache as large as all together would serve {show_percent(of['pooled_ratio'])} of these tokens,"
        f" an endless one {show_percent(of['ideal_ratio'])}. ×: mean TTFT over that of {reference(rows).cell.strategy}."
    )


def _head(cell: Cell) -> dict[str, Any]:
    return {
        "trace": cell.source.name,
        "strategy": cell.strategy,
        "load": cell.load,
        "rate": cell.rate,
        "instances": cell.n_instances,
        "variant": str(cell.variant),
        "kv_tokens": cell.engine.kv_tokens,
    }
