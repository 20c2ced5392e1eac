"""`prefixroute replay`: a trace over HTTP, against any OpenAI-compatible server.

Requests go to `/v1/completions`, not to chat: no template puts anything before or between, so two prompts share
exactly the blocks that the trace says they share, and are exactly as long. Each hash id becomes a fixed text of a
block of words, four bytes and (nearly always) one token each; what no id covers becomes a text of its own. The loop
is open: a request is sent when its time has come, however slow the answers are.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prefixroute.config.url import http_url
from prefixroute.demo.client import MeasuringClient, Sample, TargetError, sleep_until
from prefixroute.demo.report import check_writable, count_errors, percentile, show_percent, show_s, write_json
from prefixroute.demo.signals import run_until_signal
from prefixroute.demo.words import WORD_BYTES, spelled, text
from prefixroute.errors import ConfigError
from prefixroute.sim.traces import Trace, TraceRequest, read_trace

_ID_WORDS = 8
# 2 KiB each with Mooncake's blocks.
_KEPT_TEXTS = 8_192
# What a client may be late with a request before its figures deserve a warning.
_TOLERATED_DELAY_S = 0.25


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """`traces`: files of one trace. `speed`: its times are divided by it.

    `model` None: the first one that the target lists. `max_in_flight` None: no cap. `api_key_env`: environment
    variable that holds the target's key.
    """

    traces: Sequence[Path]
    target: str
    n_requests: int | None = None
    speed: float = 1.0
    model: str | None = None
    json_path: Path | None = None
    max_in_flight: int | None = None
    timeout_s: float = 600.0
    api_key_env: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Figures of the requests that succeeded, and how many failed by kind. Times in seconds as measured.

    `cached_ratio`: share of the prompt tokens served from cache; None if the target does not report any.
    `max_send_delay_s`: the most that a request was sent later than the trace says.
    """

    n_requests: int
    n_errors: int
    errors: dict[str, int]
    cached_ratio: float | None
    cached_tokens: int | None
    prompt_tokens: int
    output_tokens: int
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    e2e_mean_s: float | None
    e2e_p50_s: float | None
    e2e_p99_s: float | None
    duration_s: float
    max_send_delay_s: float


def run_replay(options: ReplayOptions) -> int:
    """The exit code: 0; 1 if every request failed; 128 and its number for a signal.

    Raises ConfigError for options or a trace that cannot be used, TargetError if the target cannot.
    """
    try:
        target = http_url(options.target)
    except ValueError as error:
        raise ConfigError(f"--target: the URL {error}") from None
    api_key = os.environ.get(options.api_key_env, "").strip() if options.api_key_env is not None else None
    if api_key == "":
        raise ConfigError(f"--api-key-env: the environment variable {options.api_key_env} is not set")
    if options.json_path is not None:
        check_writable(options.json_path)
    trace = read_trace(options.traces, options.n_requests)
    name = options.traces[0].name
    reports: list[ReplayReport] = []

    async def work() -> None:
        async with MeasuringClient(target, timeout_s=options.timeout_s, api_key=api_key) as client:
            models = await client.models()
            model = options.model or next(iter(models), None)
            if model is None:
                raise TargetError(f"{target} lists no model at /v1/models: name one with --model")
            with _progress() as progress:
                bar = progress.add_task(f"{name} to {model}", total=len(trace.requests))
                report = await replay(
                    trace,
                    client,
                    model=model,
                    speed=options.speed,
                    max_in_flight=options.max_in_flight,
                    on_sample=lambda: progress.advance(bar),
                )
        reports.append(report)
        _tell(report, trace.notes)
        if options.json_path is not None:
            head = {"trace": name, "target": target, "model": model, "speed": options.speed}
            write_json(options.json_path, {**head, **asdict(report)})

    number = run_until_signal(work)
    if number is not None:
        return 128 + number
    return int(all(report.n_errors == report.n_requests for report in reports))


async def replay(
    trace: Trace,
    client: MeasuringClient,
    *,
    model: str,
    speed: float = 1.0,
    max_in_flight: int | None = None,
    on_sample: Callable[[], object] = lambda: None,
) -> ReplayReport:
    """Send each request when its time has come, and read all answers. `on_sample` is called at the end of each."""
    places = nullcontext() if max_in_flight is None else asyncio.Semaphore(max_in_flight)
    samples: list[Sample] = []
    max_delay_s = 0.0
    began_s = time.perf_counter()

    async def send(body: dict[str, Any]) -> None:
        async with places:
            samples.append(await client.stream("/v1/completions", body))
        on_sample()

    async with asyncio.TaskGroup() as tasks:
        for place, request in enumerate(trace.requests):
            due_s = began_s + request.arrival_s / speed
            body = completion_body(request, model, prompt_text(request, trace.block_tokens, place))
            await sleep_until(due_s)
            max_delay_s = max(max_delay_s, time.perf_counter() - due_s)
            tasks.create_task(send(body))
    return summarise(samples, duration_s=time.perf_counter() - began_s, max_send_delay_s=max_delay_s)


def completion_body(request: TraceRequest, model: str, prompt: str) -> dict[str, Any]:
    """Asks for an answer of exactly the length in the trace, which takes vLLM's (and SGLang's) `ignore_eos`."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def prompt_text(request: TraceRequest, block_tokens: int, place: int) -> str:
    """Four ASCII bytes for each token: the texts of its blocks, the last one cut to length, then what is only its own.

    `place`: of the request in the trace, which makes that rest differ from all others.
    """
    covered = "".join([block_text(hash_id, block_tokens) for hash_id in request.hash_ids])
    n_rest = request.input_tokens - len(covered) // WORD_BYTES
    if n_rest > 0:
        covered += _named(place, f"rest of {place}", n_rest)
    return covered[: request.input_tokens * WORD_BYTES]


@lru_cache(maxsize=_KEPT_TEXTS)
def block_text(hash_id: int, block_tokens: int) -> str:
    """The one text of `hash_id`. It begins with the id itself, so that two ids differ from their first words on."""
    return _named(hash_id, f"block {hash_id}", block_tokens)


def _named(number: int, name: str, n_words: int) -> str:
    return (spelled(number, _ID_WORDS) + text(name, max(0, n_words - _ID_WORDS)))[: n_words * WORD_BYTES]


def summarise(samples: Sequence[Sample], *, duration_s: float, max_send_delay_s: float) -> ReplayReport:
    sound = [sample for sample in samples if sample.error is None]
    ttfts_s = sorted(sample.ttft_s for sample in sound if sample.ttft_s is not None)
    durations_s = sorted(sample.duration_s for sample in sound)
    told = [sample for sample in sound if sample.cached_tokens is not None and sample.prompt_tokens]
    told_tokens = sum(sample.prompt_tokens or 0 for sample in told)
    cached_tokens = sum(sample.cached_tokens or 0 for sample in told)
    return ReplayReport(
        n_requests=len(samples),
        n_errors=len(samples) - len(sound),
        errors=count_errors(samples),
        cached_ratio=cached_tokens / told_tokens if told else None,
        cached_tokens=cached_tokens if told else None,
        prompt_tokens=sum(sample.prompt_tokens or 0 for sample in sound),
        output_tokens=sum(sample.output_tokens or 0 for sample in sound),
        ttft_mean_s=_mean(ttfts_s),
        ttft_p50_s=percentile(ttfts_s, 0.50),
        ttft_p90_s=percentile(ttfts_s, 0.90),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        e2e_mean_s=_mean(durations_s),
        e2e_p50_s=percentile(durations_s, 0.50),
        e2e_p99_s=percentile(durations_s, 0.99),
        duration_s=duration_s,
        max_send_delay_s=max_send_delay_s,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _tell(report: ReplayReport, notes: Sequence[str]) -> None:
    out = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "requests": f"{report.n_requests:,}",
        "prompt tokens": f"{report.prompt_tokens:,}",
        "from cache": show_percent(report.cached_ratio) if report.cached_ratio is not None else "not reported",
        "answer tokens": f"{report.output_tokens:,}",
        "TTFT p50": show_s(report.ttft_p50_s),
        "TTFT p90": show_s(report.ttft_p90_s),
        "TTFT p99": show_s(report.ttft_p99_s),
        "end to end mean": show_s(report.e2e_mean_s),
        "end to end p50": show_s(report.e2e_p50_s),
        "end to end p99": show_s(report.e2e_p99_s),
        "errors": f"{report.n_errors:,}",
        **{f"  {kind}": f"{n:,}" for kind, n in report.errors.items()},
        "took": show_s(report.duration_s),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    out.print(table)
    for note in notes:
        out.print(note, markup=False)
    if report.max_send_delay_s > _TOLERATED_DELAY_S:
        out.print(
            f"Some requests went out up to {show_s(report.max_send_delay_s)} late: this machine could not keep pace."
        )


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=4,
    )
