"""Exact tokens: what they cost the event loop, and how long a request waits for them.

    python -m benchmarks.tokenize MODEL_DIR [--library auto|tokenizers] [--rounds N]

A conversation of so many tokens (natural English and code of the standard library, in messages of about a thousand
tokens) is asked for cold, warm, and with one more turn each time. The loop's longest gap is taken while nothing else
runs on it but a task that wakes as often as it can; a gap that is there without any tokenizing is the machine's.
"""

import argparse
import asyncio
import sys
import sysconfig
import time
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import uvloop

from prefixroute.config.settings import TokenizerSettings
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.errors import ConfigError
from prefixroute.exact_tokens.options import Options
from prefixroute.exact_tokens.service import ExactTokens
from prefixroute.exact_tokens.setup import check_files

SIZES = (2_000, 8_000, 100_000)
CHARS_PER_MESSAGE = 3_600


def corpus() -> str:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "".join(file.read_text(errors="ignore") for file in files)


class Loop:
    """The longest turn of the loop: as the clock sees it, and as work of this thread.

    On a busy machine the clock also shows when others had the core, and, were there threads, the interpreter lock.
    """

    def __init__(self) -> None:
        self.gap_ms = self.work_ms = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        last_s, last_work_s = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s, work_s = time.perf_counter(), time.thread_time()
            self.gap_ms = max(self.gap_ms, (now_s - last_s) * 1e3)
            self.work_ms = max(self.work_ms, (work_s - last_work_s) * 1e3)
            last_s, last_work_s = now_s, work_s

    def stop(self) -> str:
        self._task.cancel()
        return f"longest turn {self.gap_ms:.2f} ms, of work {self.work_ms:.2f} ms"


def body_of(messages: list[dict[str, Any]]) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages})


async def measure(tokens: ExactTokens, text: str, n_tokens: int, rounds: int) -> None:
    n_messages = max(2, n_tokens // 1_000)
    for name, n_known in (("cold", 0), ("warm", n_messages), ("one more turn", n_messages - 1)):
        times, n_ids = [], 0
        gap_ms = work_ms = 0.0
        for i in range(rounds):
            messages = conversation(text, f"{n_tokens} {name} {i}", n_messages)
            if n_known:
                await tokens.of(Api.CHAT, read_prompt(Api.CHAT, body_of(messages[:n_known])))
            prompt = read_prompt(Api.CHAT, body_of(messages))
            loop = Loop()
            await asyncio.sleep(0)
            began_s = time.perf_counter()
            ids = await tokens.of(Api.CHAT, prompt)
            times.append((time.perf_counter() - began_s) * 1e3)
            loop.stop()
            gap_ms, work_ms, n_ids = max(gap_ms, loop.gap_ms), max(work_ms, loop.work_ms), len(ids or b"") // 4
        print(
            f"{n_ids:>7} tokens  {name:14} {median(times):7.2f} ms (max {max(times):7.2f})   "
            f"longest turn of the loop {gap_ms:5.2f} ms, of work {work_ms:4.2f} ms"
        )


def conversation(text: str, mark: str, n_messages: int) -> list[dict[str, Any]]:
    """Messages of about a thousand tokens; `mark` makes them such as have not been seen before."""
    size = CHARS_PER_MESSAGE
    starts = [(hash(mark) + j * 3 * size) % (len(text) - size) for j in range(n_messages)]
    return [
        {"role": ("user", "assistant")[j % 2], "content": f"{mark} {j} {text[start : start + size]}"}
        for j, start in enumerate(starts)
    ]


async def idle() -> str:
    loop = Loop()
    await asyncio.sleep(1.0)
    return loop.stop()


async def throughput(tokens: ExactTokens, text: str, n: int = 400) -> None:
    prompts = [
        read_prompt(Api.CHAT, body_of([{"role": "user", "content": f"t{i} {text[i * 3600 : i * 3600 + 3600]}"}]))
        for i in range(n)
    ]
    for name in ("cold", "warm"):
        began_s = time.perf_counter()
        for start in range(0, n, 8):  # as many as wait for a worker without being turned away
            await asyncio.gather(*(tokens.of(Api.CHAT, prompt) for prompt in prompts[start : start + 8]))
        print(f"{name}: {n / (time.perf_counter() - began_s):,.0f} prompts/s of about 1,000 tokens, one process")


async def main(directory: str, library: str, rounds: int) -> None:
    tokens = ExactTokens(Options(directory, library=library), verify=False, budget_s=60.0)
    loaded = asyncio.Event()
    tokens.on_loaded = loaded.set
    text = corpus()
    began_s = time.perf_counter()
    task = asyncio.create_task(tokens.run())
    loop = Loop()
    await loaded.wait()
    print(f"ready after {time.perf_counter() - began_s:.2f} s, meanwhile {loop.stop()}")
    print(f"an idle second: {await idle()}")
    for n_tokens in SIZES:
        await measure(tokens, text, n_tokens, rounds)
    await throughput(tokens, text)
    print({outcome.value: n for outcome, n in tokens.outcomes.items() if n}, "checks", tokens.n_checks)
    task.cancel()
    await asyncio.wait([task])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir")
    parser.add_argument("--library", choices=("auto", "tokenizers"), default="auto")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    try:
        # A router goes on without files that it cannot use and tries again; here nothing is left to be measured.
        check_files(TokenizerSettings(kind="huggingface", path=arguments.model_dir))
    except ConfigError as error:
        sys.exit(f"benchmarks.tokenize: {str(error).removeprefix('tokenizer.path: ')}")
    uvloop.run(main(arguments.model_dir, arguments.library, arguments.rounds))
