"""What recording costs: on the event loop, in the recorder's thread, and on disk.

    python -m benchmarks.recording [--tokens 8000] [--rate 200] [--seconds 5]

Requests come at a steady rate on an event loop, which also asks to be woken every millisecond. How late it is, with
recording and without, is what recording costs everybody else.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

import uvloop

from prefixroute.config.settings import RecordingSettings
from prefixroute.core.policy import Reason
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.record import Outcome, RequestRecord
from prefixroute.recording.recorder import start_recorder

_TICK_S = 0.001


def a_record() -> RequestRecord:
    return RequestRecord(
        "req-1", "POST", "/v1/completions", "aiohttp", time.monotonic(),
        model="llama", outcome=Outcome.OK, status=200, streamed=True, duration_s=2.0, ttft_s=0.2,
        reason=Reason.AFFINITY, upstream="gpu-a", matched_tokens=4096, completion_tokens=300,
    )  # fmt: skip


def prompts(n_tokens: int, n: int) -> list[Prompt]:
    text = b"once upon a time there was a router that " * (n_tokens // 10)
    return [
        read_prompt(Api.COMPLETIONS, b'{"model": "llama", "prompt": "%d %s"}' % (number, text[: 4 * n_tokens]))
        for number in range(n)
    ]


async def run(
    asked: list[Prompt], rate: float, seconds: float, note: Callable[[RequestRecord, Prompt], None]
) -> tuple[list[float], list[float]]:
    """Seconds that each note took, and by how much each wake-up was late."""
    notes_s: list[float] = []
    late_s: list[float] = []
    begin_s = time.perf_counter()
    n_noted = 0
    while (now_s := time.perf_counter()) < begin_s + seconds:
        while n_noted < (now_s - begin_s) * rate:
            record = a_record()
            before_s = time.perf_counter()
            note(record, asked[n_noted % len(asked)])
            notes_s.append(time.perf_counter() - before_s)
            n_noted += 1
        due_s = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        late_s.append(time.perf_counter() - due_s)
    return notes_s, late_s


def told(values_s: list[float]) -> str:
    cuts = quantiles(values_s, n=1000)
    return f"p50 {cuts[499] * 1e6:6.1f}  p99 {cuts[989] * 1e6:7.1f}  p99.9 {cuts[998] * 1e6:7.1f} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    asked = prompts(options.tokens, 64)

    def measure(note: Callable[[RequestRecord, Prompt], None]) -> tuple[list[float], list[float], float]:
        cpu_s = time.process_time()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            notes_s, late_s = runner.run(run(asked, options.rate, options.seconds, note))
        return notes_s, late_s, time.process_time() - cpu_s

    _, late_without_s, cpu_without_s = measure(lambda *_: None)
    with TemporaryDirectory() as folder:
        path = Path(folder, "rec.jsonl")
        settings = RecordingSettings.model_validate({"path": str(path)})
        recorder = start_recorder(settings, clock=time.monotonic, knows_model=lambda _: True)
        notes_s, late_s, cpu_s = measure(recorder.record)
        recorder.close()
        counts = recorder.counts()
        n_bytes = sum(one.stat().st_size for one in Path(folder).iterdir())
    print(f"{len(notes_s)} requests of {options.tokens} tokens at {options.rate:g} a second: {counts}")
    print(f"on the loop, each request      {told(notes_s)}")
    print(f"wake-ups late, without         {told(late_without_s)}")
    print(f"wake-ups late, with recording  {told(late_s)}")
    print(f"processor, each request        {(cpu_s - cpu_without_s) / len(notes_s) * 1e6:.0f} µs, thread included")
    print(f"on disk, each request          {n_bytes / len(notes_s):.0f} bytes")


if __name__ == "__main__":
    main()
