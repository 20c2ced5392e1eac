"""A real Prometheus server scrapes the router for a minute and answers what the documentation asks of it."""

import asyncio
import json
import math
import re
import shutil
import subprocess
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from prefixroute.app import App, running
from prefixroute.config import Settings
from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer
from prefixroute.testing.client import RawClient
from tests.e2e.harness import free_port
from tests.engines.install import PROMETHEUS

# A minute's worth.
N_SCRAPES = 60
# Until so many scrapes are told of; a busy machine may take long.
PATIENCE_S = 240
PAUSE_S = 0.1
ROOT = Path(__file__).parents[2]
UNDER_QUESTION = ("README.md", "docs/observability.md")
# Documented there, and present only where it is configured.
ELSEWHERE = re.compile(r"prefixroute_(kv_events|exact|shadow|config|recorded)")

pytestmark = pytest.mark.timeout(PATIENCE_S + 30)


def executable(name: str) -> str:
    """Of Debian's package, unpacked in the cache folder, or of this machine."""
    unpacked = PROMETHEUS.folder / "usr" / "bin" / name
    found = str(unpacked) if unpacked.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{PROMETHEUS.missing()}, or put {name} on PATH")
    return found


class Prometheus:
    """A server that answers queries at `url`."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log

    async def ask(self, path: str, query: str | None = None) -> Any:
        async with RawClient(self.url) as client:
            answer = await client.request("GET", path if query is None else f"{path}?query={quote(query)}")
        told = json.loads(answer.body)
        assert told["status"] == "success", told
        return told["data"]

    async def values(self, query: str) -> list[float]:
        """What a query's series are now; none where there are none."""
        return [float(one["value"][1]) for one in (await self.ask("/api/v1/query", query))["result"]]

    async def value(self, query: str) -> float:
        (value,) = await self.values(query)
        return value


@asynccontextmanager
async def prometheus_of(admin_url: str, folder: Path) -> AsyncIterator[Prometheus]:
    port = free_port()
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    scraped = {"job_name": "router", "static_configs": [{"targets": [admin_url.removeprefix("http://")]}]}
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scraped]}))
    with log.open("wb") as out:
        server = await asyncio.create_subprocess_exec(
            executable("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'series'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
            stdin=DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        yield Prometheus(f"http://127.0.0.1:{port}", log)
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


@pytest.fixture
async def app() -> AsyncIterator[App]:
    """Before two simulated servers: which engine answers makes no difference to what is scraped."""
    executable("prometheus")
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(SimulatedServer(ServerConfig(EngineConfig(speed=1_000.0))))
            for _ in range(2)
        ]
        instances = [{"url": server.url, "name": f"gpu-{n}"} for n, server in enumerate(servers)]
        settings = {"listen": {"port": 0}, "admin": {"port": 0}, "fleet": {"instances": instances}}
        yield await stack.enter_async_context(running(Settings.model_validate(settings), environ={}))


class Traffic:
    """One client's chats and streams with a few long documents, until it is cancelled, and what came of them."""

    def __init__(self, url: str) -> None:
        self.n_answered = 0
        self.n_cached = 0
        self.n_prompt = 0
        self.longest_s = 0.0
        self._url = url

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        async with RawClient(self._url) as client:
            while True:
                system = f"This is the manual of machine {self.n_answered % 5}. " * 120
                body = {
                    "model": "demo-model",
                    "messages": [{"role": "system", "content": system}, {"role": "user", "content": "How?"}],
                    "max_tokens": 4,
                }
                if self.n_answered % 2:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                began_s = clock()
                answer = await client.request(
                    body=json.dumps(body).encode(), headers=[("Content-Type", "application/json")]
                )
                self.longest_s = max(self.longest_s, clock() - began_s)
                assert answer.status == 200
                self.n_answered += 1
                usage = re.search(rb'"prompt_tokens": ?(\d+).*"cached_tokens": ?(\d+)', answer.body, re.DOTALL)
                assert usage is not None
                self.n_prompt += int(usage[1])
                self.n_cached += int(usage[2])
                await asyncio.sleep(PAUSE_S)


async def test_a_minute_of_scrapes_answers_what_the_documentation_asks(app: App, tmp_path: Path) -> None:
    assert app.admin_url is not None
    traffic = Traffic(app.url)
    async with RawClient(app.url) as client:
        # So that refusals are counted, too.
        assert (await client.request("POST", "/sleep")).status == 403
    async with asyncio.timeout(PATIENCE_S), prometheus_of(app.admin_url, tmp_path) as prometheus:
        sending = asyncio.create_task(traffic.run())
        await wait_scraped(prometheus, "sum_over_time(up[10m])", N_SCRAPES)
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled(), sending.exception()
        # The request that was cut off may have come to its end or not: what it is counted as is not asked.
        answered = 'sum(prefixroute_requests_total{outcome="ok"})'
        await wait_scraped(prometheus, answered, traffic.n_answered)

        await assert_no_scrape_failed(prometheus)
        assert traffic.n_answered <= await prometheus.value(answered) <= traffic.n_answered + 1
        assert await prometheus.value("sum(rate(prefixroute_requests_total[1m]))") > 0
        await assert_latencies_hold(prometheus, traffic.longest_s)
        share = await prometheus.value("prefixroute_cached_tokens_total / prefixroute_reported_prompt_tokens_total")
        assert share == pytest.approx(traffic.n_cached / traffic.n_prompt, abs=0.02)
        assert share > 0.5
        await assert_documented(prometheus)


async def wait_scraped(prometheus: Prometheus, query: str, least: float) -> None:
    """Until it has heard enough; it is asked at the pace of its scrapes, for nothing tells of one."""
    while True:
        try:
            if sum(await prometheus.values(query)) >= least:
                return
        except (ConnectionError, ValueError, AssertionError):
            pass  # still starting, which it says as 503 and text
        await asyncio.sleep(0.5)


async def assert_no_scrape_failed(prometheus: Prometheus) -> None:
    (target,) = (await prometheus.ask("/api/v1/targets"))["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert await prometheus.value("min_over_time(up[10m])") == 1
    assert await prometheus.value("min_over_time(scrape_samples_scraped[10m])") > 100
    assert await prometheus.value("max_over_time(scrape_samples_scraped[10m])") < 2_000, "bounded label sets"
    # Duplicates, disorder and unreadable lines are told there, and dropped.
    assert prometheus.log.read_text() == ""


async def assert_latencies_hold(prometheus: Prometheus, longest_s: float) -> None:
    for name in ("prefixroute_request_duration_seconds", "prefixroute_time_to_first_byte_seconds"):
        rates = f"sum by (le) (rate({name}_bucket[5m]))"
        found = [await prometheus.value(f"histogram_quantile({share}, {rates})") for share in (0.5, 0.95, 0.99)]
        bounds = await prometheus.ask(f"/api/v1/label/le/values?match[]={name}_bucket")
        highest = min(bound for bound in map(float, bounds) if bound >= longest_s)
        assert 0 < found[0] <= found[1] <= found[2] <= highest < math.inf, name


async def assert_documented(prometheus: Prometheus) -> None:
    """Every query in the documentation has an answer, and every metric named there its labels."""
    text = "\n".join((ROOT / page).read_text() for page in UNDER_QUESTION)
    queries = re.findall(r"^    (.*rate\(prefixroute_.*)$", text, re.MULTILINE)
    assert queries
    for query in queries:
        assert 0 <= await prometheus.value(query) <= 1, query
    named = {
        (name, labels)
        for name, labels in re.findall(r"`(prefixroute_[a-z_]+[a-z])(?:\{([a-z_,]+)\})?`", text)
        if not ELSEWHERE.match(name)
    }
    assert len(named) > 15
    missing = []
    for name, labels in sorted(named):
        wanted = ",".join(f'{label}=~".+"' for label in labels.split(",") if label)
        anywhere = f'{{__name__=~"{name}(_count)?"{"," + wanted if wanted else ""}}}'
        if not await prometheus.values(f"count({anywhere})"):
            missing.append(f"{name}{{{labels}}}")
    assert missing == []


async def test_promtool_has_nothing_to_say_of_our_metrics(app: App) -> None:
    assert app.admin_url is not None
    promtool = executable("promtool")
    async with RawClient(app.admin_url) as client:
        page = (await client.request("GET", "/metrics")).body
    checking = await asyncio.create_subprocess_exec(
        promtool, "check", "metrics", stdin=PIPE, stdout=PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await checking.communicate(page)
    assert (checking.returncode, said.decode()) == (0, "")
