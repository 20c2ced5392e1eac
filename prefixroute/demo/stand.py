"""A fleet of simulated servers and the real router before it, each in a process of its own."""

import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from re import compile as re_compile
from typing import Any

from prefixroute.config import ExpectedLatencySettings
from prefixroute.demo.processes import Child, running_child

N_SERVERS = 4
# Small against the workload, so that eviction matters, as it does on real fleets.
KV_TOKENS = 50_000
MODEL = "demo-model"
# Tokens in one event of a stream. With one each, two cores would be busy relaying events.
STREAM_INTERVAL = 8

_SERVER_READY = re_compile(r"ready at (http://\S+)")
_ROUTER_URL = re_compile(r"^\s+(requests|metrics)\s+(http://\S+)")


@dataclass(frozen=True, slots=True)
class Stand:
    """Ready for requests at `url`, a base URL."""

    url: str
    metrics_url: str
    children: Sequence[Child]


@asynccontextmanager
async def running_stand(strategy: str, speed: float) -> AsyncIterator[Stand]:
    """Fresh servers with empty caches, and `prefixroute serve` before them. Raises ChildError if one fails."""
    with tempfile.TemporaryDirectory(prefix="prefixroute-demo-") as directory:
        async with running_child("the simulated fleet", _fleet_arguments(speed)) as fleet:
            ready = await fleet.wait_lines(_SERVER_READY, N_SERVERS)
            config = Path(directory) / "router.json"
            settings = _router_config(strategy, speed, [match[1] for match in ready])
            config.write_text(json.dumps(settings), encoding="utf-8")
            async with running_child("the router", ["serve", "--config", str(config)]) as router:
                found = await router.wait_lines(_ROUTER_URL, 2)
                urls = {match[1]: match[2] for match in found}
                yield Stand(urls["requests"], urls["metrics"], [fleet, router])


def _fleet_arguments(speed: float) -> list[str]:
    return [
        "demo-server",
        *("--servers", str(N_SERVERS)),
        *("--port", "0"),
        *("--model", MODEL),
        *("--kv-tokens", str(KV_TOKENS)),
        *("--stream-interval", str(STREAM_INTERVAL)),
        *("--speed", repr(speed)),
    ]


def _router_config(strategy: str, speed: float, urls: Sequence[str]) -> dict[str, Any]:
    """The defaults, at the speed of the servers, and what a demo on one machine needs: free ports, a calm log,
    answers that say who gave them."""
    k = ExpectedLatencySettings()
    return {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "fleet": {"instances": [{"url": url, "name": f"sim-{n}"} for n, url in enumerate(urls, start=1)]},
        "routing": {
            "strategy": strategy,
            # What is counted in seconds passes faster here, for the router as for everybody.
            "expected_latency": {
                "kv_read_s": k.kv_read_s / speed,
                "prior_prefill_tokens_per_s": k.prior_prefill_tokens_per_s * speed,
                "prior_weight_s": k.prior_weight_s / speed,
                "rate_weight_s": k.rate_weight_s / speed,
            },
        },
        "log": {"level": "warning", "access": False},
        "response_headers": True,
        "drain_timeout_s": 1.0,
    }
