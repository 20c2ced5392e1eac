"""`prefixroute demo`: the same workload through the real router, once for each strategy, each on a fresh fleet.

Three processes, as in life: the simulated servers, `prefixroute serve` before them, and this one, which drives
and measures.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prefixroute.config import Strategy
from prefixroute.demo.chart import check_chart_path, draw_chart
from prefixroute.demo.client import MeasuringClient
from prefixroute.demo.drive import drive
from prefixroute.demo.processes import while_alive
from prefixroute.demo.report import (
    DemoReport,
    StrategyReport,
    check_writable,
    demo_table,
    notes,
    show_errors,
    summarise,
    write_json,
)
from prefixroute.demo.signals import run_until_signal
from prefixroute.demo.stand import KV_TOKENS, MODEL, N_SERVERS, Stand, running_stand
from prefixroute.demo.workload import WorkloadShape, make_workload, n_new_tokens, n_requests
from prefixroute.errors import ConfigError, PrefixRouteError

BASE_STRATEGY = "random"
KEPT_STRATEGY = "expected_latency"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """`speed`: how much faster than life everything goes. `keep`: leave fleet and router up until a signal comes."""

    strategies: Sequence[str] = (BASE_STRATEGY, KEPT_STRATEGY)
    seed: int = 1
    # Twice the workload in a minute, while two cores still have time to spare.
    speed: float = 5.0
    n_conversations: int = 200
    json_path: Path | None = None
    chart_path: Path | None = None
    keep: bool = False


class DemoError(PrefixRouteError):
    """The demo ran and has nothing to show."""

    code = "demo_failed"


def parse_strategies(text: str) -> list[str]:
    """Names between commas. Raises ConfigError unless they are strategies, each once."""
    known = [name for name in get_args(Strategy) if name != "custom"]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--strategies: {name or 'an empty name'} is no strategy (known: {', '.join(known)})")
    if len(set(names)) < len(names):
        raise ConfigError("--strategies: a strategy is named twice")
    return names


def run_demo(options: DemoOptions) -> int:
    """The exit code: 0, or 128 and the number of the signal that cut the demo short.

    Raises ConfigError for options that cannot be met, ChildError if a process fails, DemoError if all requests do.
    """
    if options.json_path is not None:
        check_writable(options.json_path)
    if options.chart_path is not None:
        check_writable(options.chart_path)
        check_chart_path(options.chart_path)
    demo = _Demo(options)
    number = run_until_signal(demo.run)
    return 128 + number if number is not None and not demo.finished else 0


class _Demo:
    def __init__(self, options: DemoOptions) -> None:
        self.finished = False
        self._options = options
        self._out = Console(highlight=False)
        self._err = Console(stderr=True, highlight=False)
        self._workload = make_workload(WorkloadShape(n_conversations=options.n_conversations), options.seed)

    async def run(self) -> None:
        options = self._options
        reports: dict[str, StrategyReport] = {}
        kept_stand: Stand | None = None
        async with AsyncExitStack() as kept:
            with self._progress() as progress:
                for strategy in options.strategies:
                    # The last fleet may stay; what is kept has seen the whole workload then.
                    stays = options.keep and strategy == KEPT_STRATEGY and strategy == options.strategies[-1]
                    bar = progress.add_task(strategy, total=n_requests(self._workload))
                    async with AsyncExitStack() as stack:
                        stand = await stack.enter_async_context(running_stand(strategy, options.speed))
                        if progress.disable:
                            self._err.print(f"{strategy}: {n_requests(self._workload):,} requests to {stand.url}")
                        reports[strategy] = await self._measure(stand, partial(progress.advance, bar))
                        if reports[strategy].n_errors == reports[strategy].n_requests:
                            raise DemoError(f"every request failed under {strategy} ({show_errors(reports[strategy])})")
                        if stays:
                            kept.push_async_exit(stack.pop_all())
                            kept_stand = stand
            self._tell(reports)
            self.finished = True
            if options.keep:
                if kept_stand is None:
                    kept_stand = await kept.enter_async_context(running_stand(KEPT_STRATEGY, options.speed))
                await self._keep(kept_stand)

    async def _measure(self, stand: Stand, on_turns: Callable[[int], object]) -> StrategyReport:
        speed = self._options.speed
        async with MeasuringClient(stand.url) as client:
            samples = await while_alive(
                drive(self._workload, client, model=MODEL, speed=speed, on_turns=on_turns), stand.children
            )
        return summarise(samples, n_instances=N_SERVERS, speed=speed)

    def _tell(self, reports: dict[str, StrategyReport]) -> None:
        options = self._options
        report = DemoReport(
            strategies=reports,
            speed=options.speed,
            seed=options.seed,
            n_instances=N_SERVERS,
            kv_tokens=KV_TOKENS,
            n_conversations=len(self._workload),
            new_tokens=n_new_tokens(self._workload),
        )
        self._out.print(demo_table(report), "")
        for line in notes(report):
            self._out.print(line)
        if options.json_path is not None:
            write_json(options.json_path, report.to_json())
        if options.chart_path is not None:
            draw_chart(report, options.chart_path)

    async def _keep(self, stand: Stand) -> None:
        self._out.print(
            "\nThe fleet and the router stay up until Ctrl-C. Try:\n\n"
            f"  curl {stand.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}]}}\' -i\n\n'
            f"Metrics: {stand.metrics_url}",
            soft_wrap=True,
            markup=False,
        )
        await while_alive(asyncio.Event().wait(), stand.children)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            console=self._err,
            disable=not self._err.is_terminal,
            # Drawing takes time from what is measured.
            refresh_per_second=4,
        )
