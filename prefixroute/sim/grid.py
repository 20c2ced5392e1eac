"""Many cells, over several processes.

First the rates of load 1.0 are found, each once; then the cells are run. Workloads are made where they are used: what
goes to a worker is a description, what comes back a row of figures.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Protocol, TypeVar

from prefixroute.errors import ConfigError, PrefixRouteError
from prefixroute.sim import strategies
from prefixroute.sim.calibration import Calibration, calibrate
from prefixroute.sim.cell import Cell, run_cell
from prefixroute.sim.report import Figures

T = TypeVar("T")
U = TypeVar("U")


class CellError(PrefixRouteError):
    """A run failed: a fault of a strategy or of the simulation. The message names the cell."""

    code = "simulation_failed"


class Progress(Protocol):
    """Told when a stage begins, with its number of steps, and when a step is done."""

    def stage(self, name: str, n_steps: int) -> None: ...

    def step(self) -> None: ...


class Silent:
    """Progress that nobody sees."""

    def stage(self, name: str, n_steps: int) -> None:
        """Nothing to tell."""

    def step(self) -> None:
        """Nothing to tell."""


def run_grid(
    cells: Sequence[Cell],
    *,
    n_processes: int = 1,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> list[tuple[Cell, Figures]]:
    """Figures of all cells, in their order, each with its rate. One process: this one.

    The first failure ends the grid: CellError, or ConfigError for what cannot be simulated. So does Ctrl-C, as
    KeyboardInterrupt; `calibration` has kept what was found by then. More processes need a main module that can be
    imported again (`if __name__ == "__main__"`).
    """
    for text in dict.fromkeys(cell.strategy for cell in cells):
        strategies.strategy(text)  # better now than after minutes of calibration
    calibration = calibration or Calibration()
    progress = progress or Silent()
    settings = {cell.setting().key(): cell.setting() for cell in cells if cell.load is not None}
    unknown = [setting for setting in settings.values() if calibration.known(setting) is None]
    n_processes = min(n_processes, max(len(cells), len(unknown)))
    with _workers(n_processes) as run:
        if unknown:
            progress.stage("finding load 1.0", len(unknown))
            for place, rate in run(calibrate, unknown):
                calibration.keep(unknown[place], rate)
                progress.step()
        rated = [cell.with_rate(calibration.rate(cell.setting())) if cell.load is not None else cell for cell in cells]
        progress.stage("simulating", len(rated))
        figures: dict[int, Figures] = {}
        for place, of_cell in run(run_cell, rated):
            figures[place] = of_cell
            progress.step()
    return [(cell, figures[place]) for place, cell in enumerate(rated)]


class Run(Protocol):
    """Calls a function with each item, in any order: the item's place and its result, as they come."""

    def __call__(self, function: Callable[[T], U], items: Sequence[T]) -> Iterator[tuple[int, U]]: ...


@contextmanager
def _workers(n_processes: int) -> Iterator[Run]:
    if n_processes <= 1:
        yield _run_here
        return
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        n_processes, mp_context=multiprocessing.get_context("spawn"), initializer=_live_and_die_with_the_parent
    )
    try:
        yield partial(_run_there, pool)
    except BaseException:
        # What is under way is of no use to anybody any more.
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown()


def _run_here(function: Callable[[T], U], items: Sequence[T]) -> Iterator[tuple[int, U]]:
    for place, item in enumerate(items):
        yield place, _named(function, item)


def _run_there(pool: ProcessPoolExecutor, function: Callable[[T], U], items: Sequence[T]) -> Iterator[tuple[int, U]]:
    places: dict[Future[U], int] = {pool.submit(_named, function, item): place for place, item in enumerate(items)}
    for future in as_completed(places):
        try:
            yield places[future], future.result()
        except BrokenProcessPool:
            raise CellError(
                f"{items[places[future]]}: a worker process was killed, perhaps for want of memory"
            ) from None


def _named(function: Callable[[T], U], item: T) -> U:
    """`function(item)`; whatever goes wrong in it is told as a fault of `item`, the mistake being the cause."""
    try:
        return function(item)
    except ConfigError:
        raise
    except Exception as error:
        raise CellError(f"{item}: {type(error).__name__}: {error}") from error


def _live_and_die_with_the_parent() -> None:
    # Its Ctrl-C is ours as well, and it will say when to end: unless it is killed, which no pool tells its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
