"""`prefixroute simulate`: strategies compared on virtual time, as a table, as JSON and as a picture."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from prefixroute.demo.report import check_writable, write_json
from prefixroute.errors import ConfigError
from prefixroute.sim.calibration import Calibration
from prefixroute.sim.cell import Cell
from prefixroute.sim.chart import check_chart_path, draw_chart
from prefixroute.sim.grid import run_grid
from prefixroute.sim.options import SimulateOptions
from prefixroute.sim.report import Figures
from prefixroute.sim.sources import FromTrace
from prefixroute.sim.table import note, rows_of, settings_of, table_of, to_json


def run_simulate(options: SimulateOptions) -> int:
    """The exit code: 0, or 128 and the number of the signal that ended it.

    Raises ConfigError for options and traces that cannot be used, CellError if a run fails.
    """
    cells = options.cells()
    for path in (options.json_path, options.chart_path, options.calibration_path):
        if path is not None:
            check_writable(path)
    if options.chart_path is not None:
        check_chart_path(options.chart_path)
    calibration = Calibration(options.calibration_path)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    for source in dict.fromkeys(cell.source for cell in cells):
        if isinstance(source, FromTrace):
            for text in source.trace().notes:
                err.print(text)
    try:
        with _sigterm_as_exit(), _bar(err) as bar:
            results = run_grid(
                cells,
                n_processes=options.n_processes or os.cpu_count() or 1,
                calibration=calibration,
                progress=bar,
            )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    _tell(results, options, out)
    return 0


def _tell(results: list[tuple[Cell, Figures]], options: SimulateOptions, out: Console) -> None:
    settings = settings_of(rows_of(results))
    # Files first: nobody may be reading.
    if options.json_path is not None:
        write_json(options.json_path, to_json(results))
    if options.chart_path is not None:
        try:
            draw_chart(settings, options.chart_path)
        except OSError as error:
            raise ConfigError(f"cannot write {options.chart_path}: {error.strerror}") from error
    for rows in settings:
        out.print(table_of(rows))
        out.print(note(rows))
        out.print()


class _Bar:
    """One bar on a terminal: what is being done, and how much of it is."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def stage(self, name: str, n_steps: int) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=n_steps)

    def step(self) -> None:
        if self._task is not None:
            self._progress.advance(self._task)


@contextmanager
def _bar(console: Console) -> Iterator[_Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True, refresh_per_second=4
    ) as progress:
        yield _Bar(progress)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """So that the workers do not outlive this process."""

    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
