"""What a request costs besides being moved and decided: `python -m benchmarks.after --help`.

Its record, the counters, the line in the access log, and the watchers of its answer: one document of some 600 bytes, as
chats without a stream have it, or 100 events of some 190 bytes. `all threads` has the thread that writes lines in it.
Steps run in batches, with the garbage collector off; the lowest figure of all batches counts, because whatever else
runs on the machine only ever adds to it.

`--against FOLDER` measures another `prefixroute` (the folder that holds it) in turns with this one.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import orjson

from benchmarks.tables import markdown
from prefixroute.app import App
from prefixroute.config.settings import Settings
from prefixroute.core.policy import Candidate, Decision, Reason
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.http.transcript import Transcript
from prefixroute.http.usage import UsageWatch
from prefixroute.logs import LineHandler, configure_logs
from prefixroute.metrics import Metrics
from prefixroute.record import AttemptOutcome, Decided, Outcome, RequestRecord
from prefixroute.systemd import Notifier

BATCH = 500
MODEL = "meta-llama/Llama-3.1-8B"
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
USAGE = {"prompt_tokens": 900, "total_tokens": 920, "completion_tokens": 20}
DOCUMENT = orjson.dumps(
    {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion", "created": 1753900000,
        "model": MODEL,
        "choices": [{
            "index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None,
            "message": {"role": "assistant", "content": "word " * 40, "refusal": None, "tool_calls": []},
        }],
        "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 640}}, "prompt_logprobs": None,
    }
)  # fmt: skip


def event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1753900000, "model": MODEL}
    return b"data: %b\n\n" % orjson.dumps({**head, "choices": [choice]})


EVENTS = [*(event({"content": f" word{n}"}) for n in range(98)), event({}, "stop"), b"data: [DONE]\n\n"]
PROMPT = read_prompt(Api.CHAT, orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Why? " * 700}]}))


def a_record(number: int, decided: Decided) -> RequestRecord:
    """Made and filled in as the proxy does it."""
    record = RequestRecord(f"{number:032x}", "POST", "/v1/chat/completions", "aiohttp", 1000.0 + number)
    record.model = MODEL
    record.prompt_tokens = 900 + number
    record.decision_s = 0.000_031
    record.reason = Reason.AFFINITY
    record.upstream = "gpu-2:8000"
    record.matched_tokens = 640
    record.decisions.append(decided)
    record.status = 200
    record.ttft_s = 0.0213 + number * 1e-5
    record.attempts.append(AttemptOutcome.ANSWERED)
    record.answer_bytes = 632
    record.completion_tokens, record.n_events = 20, 0
    record.cached_tokens, record.reported_prompt_tokens = 640, 900
    record.outcome = Outcome.OK
    record.duration_s = 0.123_456 + number * 1e-5
    record.is_over = True
    record.body_bytes = 4000 + number
    return record


def batch_us(step: Callable[[int], object], clock: Callable[[], int] = time.thread_time_ns, n: int = BATCH) -> float:
    began_ns = clock()
    for number in range(n):
        step(number)
    return (clock() - began_ns) / n / 1000


class Bench:
    """A router that is never started, its log open on `/dev/null`."""

    def __init__(self) -> None:
        instances = [{"url": f"http://gpu-{n}:8000", "models": [MODEL]} for n in range(8)]
        settings = Settings.model_validate({"fleet": {"instances": instances}})
        self.app = App(settings, {}, time.monotonic, None, Notifier(None))
        for instance in self.app.router.fleet.instances:
            self.app.router.fleet.probe_passed(instance.name)
        self.metrics: Metrics = self.app.metrics
        request = self.app.router.read(PROMPT)
        with self.app.router.lease(request, now_s=0.0) as lease:
            candidates: Sequence[Candidate] = lease.candidates
            decision: Decision = lease.decision
        self.decided = Decided(0.0001, candidates, decision)
        self.records = [a_record(number, self.decided) for number in range(BATCH)]
        self.sink = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open while the handler is

    def measured_us(self) -> dict[str, float]:
        """One batch of each step; of the watchers a fifth of it."""
        records, metrics = self.records, self.metrics
        figures = {"record": batch_us(lambda number: a_record(number, self.decided))}
        figures["metrics"] = batch_us(lambda number: metrics.record(records[number]))
        log_formats: tuple[Literal["text", "json"], ...] = ("text", "json")
        for log_format in log_formats:
            handler = configure_logs(log_format, "info", self.sink)
            step = f"over, {log_format} (counters, line, the rest)"
            figures[step] = batch_us(lambda number: self.app._on_record(records[number]))
            handler.flush()
            figures[f"{step}, all threads"] = self._written_us(handler)
        few = BATCH // 5
        figures["usage of a document"] = batch_us(lambda _: watched([DOCUMENT]), n=few)
        figures["usage of a stream, an event"] = batch_us(lambda _: watched(EVENTS), n=few) / len(EVENTS)
        figures["transcript of a document"] = batch_us(lambda _: transcribed([DOCUMENT], JSON), n=few)
        figures["transcript of a stream, an event"] = batch_us(lambda _: transcribed(EVENTS, SSE), n=few) / len(EVENTS)
        return figures

    def _written_us(self, handler: LineHandler) -> float:
        def all_of_them(_: int) -> None:
            for record in self.records:
                self.app._on_record(record)
            handler.flush()

        return batch_us(all_of_them, time.process_time_ns, n=1) / BATCH


def watched(pieces: Sequence[bytes]) -> object:
    watch = UsageWatch()
    for piece in pieces:
        watch.see(piece)
    return watch.completion_tokens(), watch.n_events, watch.usage()


def transcribed(pieces: Sequence[bytes], headers: list[tuple[bytes, bytes]]) -> object:
    transcript = Transcript.of(PROMPT, headers)
    assert transcript is not None
    for piece in pieces:
        transcript.see(piece)
    return transcript.material()


def lowest(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {step: min(one[step] for one in rounds) for step in rounds[0]}


def elsewhere(folder: Path, n_rounds: int) -> dict[str, float]:
    """The same by the `prefixroute` in `folder`."""
    here = Path(__file__).resolve().parents[1]
    environ = {**os.environ, "PYTHONPATH": f"{folder.resolve()}:{here}"}
    command = [sys.executable, "-P", "-m", "benchmarks.after", "--rounds", str(n_rounds), "--json"]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.after", description="Record, counters, line, watchers.")
    parser.add_argument("--rounds", type=int, default=60, help="batches of each step (default %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="of both, with --against (default %(default)s)")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="folder with another prefixroute in it")
    parser.add_argument("--json", action="store_true", help="figures only, for programs")
    options = parser.parse_args(arguments)
    if options.against is not None:
        folders = (options.against, Path(__file__).resolve().parents[1])
        rounds = [[elsewhere(folder, options.rounds) for folder in folders] for _ in range(options.turns)]
        other, own = (lowest(list(figures)) for figures in zip(*rounds, strict=True))
        rows = [[step, f"{other[step]:.2f}", f"{own[step]:.2f}"] for step in own]
        print(markdown(("step", "other, µs", "this, µs"), rows))
        return
    bench = Bench()
    gc.collect()
    gc.disable()
    figures = lowest([bench.measured_us() for _ in range(options.rounds)])
    if options.json:
        print(json.dumps(figures))
    else:
        print(markdown(("step", "µs"), [[step, f"{figure:.2f}"] for step, figure in figures.items()]))


if __name__ == "__main__":
    main()
