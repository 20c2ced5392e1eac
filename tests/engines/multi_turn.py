"""Chats of several turns on three engines, through our router and through others.

`python -m tests.engines.multi_turn [--rounds N]` prints the table of docs/engines.md. Each router is a process of its
own, as it comes, and starts with nothing known before engines with nothing cached. They take turns, in another order in
each round: whatever else the machine does meets all of them.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from tests.engines.conversations import Outcome, make_conversations, play
from tests.engines.install import PEERS, VLLM
from tests.engines.processes import Keeper, ServerProcess, free_ports
from tests.engines.servers import VllmServer, start_fleet

N_ROUNDS = 5
N_ENGINES = 3
OURS = "expected_latency"
WITHOUT_AFFINITY = "round_robin"
# By the names of their packages.
OTHERS = ("sglang-router", "smg")
_MODULES = {"sglang-router": "sglang_router.launch_router", "smg": "smg.launch_router"}

Make = Callable[[Sequence[VllmServer], Keeper, Path], ServerProcess]


def ours(strategy: str) -> Make:
    """The command, with `strategy` and else its defaults."""

    def make(servers: Sequence[VllmServer], keeper: Keeper, folder: Path) -> ServerProcess:
        port, admin_port = free_ports(2)
        command = [
            *(sys.executable, "-m", "prefixroute", "serve", *(server.url for server in servers)),
            *("--strategy", strategy, "--port", str(port), "--admin-port", str(admin_port)),
        ]
        return ServerProcess(strategy, command, port=port, keeper=keeper, folder=folder)

    return make


def other(name: str) -> Make:
    """One of `OTHERS`, with its cache-aware policy and else its defaults."""

    def make(servers: Sequence[VllmServer], keeper: Keeper, folder: Path) -> ServerProcess:
        port, metrics_port = free_ports(2)
        command = [
            *(str(PEERS.python), "-m", _MODULES[name], "--policy", "cache_aware", "--log-level", "warn"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--worker-urls", *(server.url for server in servers)),
        ]
        return ServerProcess(name, command, port=port, keeper=keeper, folder=folder, health_path="/readiness")

    return make


ROUTERS: dict[str, Make] = {
    OURS: ours(OURS),
    WITHOUT_AFFINITY: ours(WITHOUT_AFFINITY),
    **{name: other(name) for name in OTHERS},
}


class Comparison:
    """What each router did in each round, before `servers`, which have no other clients."""

    def __init__(self, servers: Sequence[VllmServer], keeper: Keeper, folder: Path) -> None:
        self.outcomes: dict[str, list[Outcome]] = {name: [] for name in ROUTERS}
        self.n_rounds = 0
        self._servers = servers
        self._keeper = keeper
        self._folder = folder

    async def play_round(self) -> None:
        """All conversations with each router, one after the other; who begins, ends the next round."""
        names = list(self.outcomes)
        first = self.n_rounds % len(names)
        for name in names[first:] + names[:first]:
            self.outcomes[name].append(await self._play(name))
        self.n_rounds += 1

    def cached(self, name: str) -> float:
        """Median of its shares of cached tokens."""
        return median(one.cached for one in self.outcomes[name])

    def wall_ratio(self, name: str, other: str) -> float:
        """Its wall time over another's in the same round, for machines get busier; median."""
        pairs = zip(self.outcomes[name], self.outcomes[other], strict=True)
        return median(mine.wall_s / theirs.wall_s for mine, theirs in pairs)

    def worst_wall_ratio(self, name: str) -> float:
        return max(self.wall_ratio(name, other) for other in self.outcomes if other != name)

    def table(self) -> str:
        """Medians, and extremes in brackets, as Markdown."""
        lines = [f"| router | cached | wall time | `{OURS}` over it | first token, median |", "|---|---|---|---|---|"]
        for name, outcomes in self.outcomes.items():
            cells = (
                _cell([one.cached * 100 for one in outcomes], "%"),
                _cell([one.wall_s for one in outcomes], "s"),
                f"{self.wall_ratio(OURS, name):.2f}",
                _cell([one.median_ttft_s * 1e3 for one in outcomes], "ms", digits=0),
            )
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
        return "\n".join(lines)

    async def _play(self, name: str) -> Outcome:
        """A router that knows nothing, before engines that have nothing cached."""
        for server in self._servers:
            await asyncio.to_thread(server.reset_cache)
        router = ROUTERS[name](self._servers, self._keeper, self._folder)
        try:
            await asyncio.to_thread(start_fleet, [router])
            return await play(router.url, make_conversations())
        finally:
            await asyncio.to_thread(router.stop)


def _cell(values: Sequence[float], unit: str, digits: int = 1) -> str:
    return f"{median(values):.{digits}f} {unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"


async def _play_rounds(comparison: Comparison, n: int) -> None:
    while comparison.n_rounds < n:
        await comparison.play_round()
        print(f"round {comparison.n_rounds} of {n}\n{comparison.table()}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.multi_turn")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS, help=f"runs of each router ({N_ROUNDS})")
    n_rounds: int = parser.parse_args().rounds
    for environment in (VLLM, PEERS):
        if why := environment.missing():
            sys.exit(why)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keeper = Keeper()
        stack.callback(keeper.close)
        servers = [VllmServer(f"vllm-{i}", keeper, folder) for i in range(N_ENGINES)]
        start_fleet(servers)
        comparison = Comparison(servers, keeper, folder)
        asyncio.run(_play_rounds(comparison, n_rounds))
    print(comparison.table())


if __name__ == "__main__":
    main()
