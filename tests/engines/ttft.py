"""Time to the first token of a real vLLM server, cold and warm, direct and through the router.

`python -m tests.engines.ttft [--rounds N]` prints the table of docs/engines.md. Prompts of token ids, each new to the
server; asked twice, so that all but the last block is cached the second time. Ways take turns: whatever else the
machine does meets both. The router is the command in a process of its own, with default settings.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from statistics import median

import aiohttp

from tests.engines.install import VLLM
from tests.engines.load import client
from tests.engines.processes import Keeper, ServerProcess, free_ports
from tests.engines.servers import VllmServer, start_fleet
from tests.engines.tiny_model import NAME

LENGTHS = (1_024, 4_096, 8_192)
ROUNDS = 25
WAYS = ("direct", "router")
STATES = ("cold", "warm")

Times = dict[tuple[str, str, int], list[float]]


def serve(server: VllmServer, keeper: Keeper, folder: Path) -> ServerProcess:
    """The command before one server."""
    port, admin_port = free_ports(2)
    ports = ("--port", str(port), "--admin-port", str(admin_port))
    command = (sys.executable, "-m", "prefixroute", "serve", server.url, *ports)
    return ServerProcess("router", command, port=port, keeper=keeper, folder=folder)


async def ttft_s(session: aiohttp.ClientSession, url: str, prompt: Sequence[int]) -> float:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    begun_s = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200
        await response.content.readuntil(b"\n\n")
        took_s = time.perf_counter() - begun_s
        await response.read()
    return took_s


async def measure(urls: dict[str, str], n_rounds: int) -> Times:
    rng = Random(1)
    times: Times = {}
    async with client() as session:
        for url in urls.values():  # connections, and code that is read once
            await ttft_s(session, url, [1, 2, 3])
        for turn, length in product(range(n_rounds), LENGTHS):
            for way in WAYS if turn % 2 else reversed(WAYS):
                prompt = [rng.randrange(100, 8_000) for _ in range(length)]
                for state in STATES:
                    took_s = await ttft_s(session, urls[way], prompt)
                    times.setdefault((way, state, length), []).append(took_s)
    return times


def table(times: Times) -> str:
    """Medians in milliseconds, as Markdown."""
    head = [f"{state}, {way}" for state, way in product(STATES, WAYS)]
    lines = [f"| prompt | {' | '.join(head)} |", "|---|" + "---|" * len(head)]
    for length in LENGTHS:
        cells = [f"{median(times[way, state, length]) * 1e3:.1f} ms" for state, way in product(STATES, WAYS)]
        lines.append(f"| {length:,} tokens | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.ttft")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"prompts of each length and way ({ROUNDS})")
    n_rounds: int = parser.parse_args().rounds
    if why := VLLM.missing():
        sys.exit(why)
    keeper = Keeper()
    with tempfile.TemporaryDirectory() as folder:
        server = VllmServer("vllm", keeper, Path(folder))
        router = serve(server, keeper, Path(folder))
        try:
            start_fleet([server])
            start_fleet([router])
            times = asyncio.run(measure({"direct": server.url, "router": router.url}, n_rounds))
        finally:
            router.stop()
            server.stop()
            keeper.close()
    print(table(times))


if __name__ == "__main__":
    main()
