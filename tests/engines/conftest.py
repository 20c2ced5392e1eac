"""Real engines for tests, only where they were asked for: PREFIXROUTE_TEST_ENGINES=1, as set by `make test-engines`.

Servers are started once for all tests, when the first test wants them, and have no other clients. Tests that break one
put it right again. Heavy imports belong into fixtures and tests: `make test` collects this folder too, and skips it.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.install import CACHE, LLAMA, PEERS, VLLM, Environment
from tests.engines.processes import Keeper
from tests.engines.servers import LlamaServer, VllmServer, start_fleet

ASKED_FOR = os.environ.get("PREFIXROUTE_TEST_ENGINES") == "1"
N_SERVERS = 3
# A guard against hanging: the first test also waits until servers are there.
TIMEOUT_S = 1200
KEPT_LOGS_S = 86_400.0

_numbers = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash.setdefault(_numbers, [])
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if not ASKED_FOR:
                item.add_marker(pytest.mark.skip(reason="real engines: make test-engines"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if numbers := config.stash.get(_numbers, []):
        terminalreporter.section("real engines")
        for line in numbers:
            terminalreporter.write_line(line)


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`tell(line)`: a figure that was found, and what it should be, for the summary at the end."""
    return request.config.stash[_numbers].append


@pytest.fixture(scope="session")
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.fixture(scope="session")
def engine_logs() -> Path:
    """Where servers write. Not pytest's folder: other runs of it remove that."""
    folder = CACHE / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for log in folder.iterdir():
        if log.stat().st_mtime < time.time() - KEPT_LOGS_S:
            log.unlink(missing_ok=True)
    return folder


def require(environment: Environment) -> None:
    """Skips the test, with the reason, where it is not installed."""
    if why := environment.missing():
        pytest.skip(why)


@pytest.fixture(scope="session")
def vllm_fleet(keeper: Keeper, engine_logs: Path, request: pytest.FixtureRequest) -> Iterator[list[VllmServer]]:
    """Three vLLM servers of 1,000 blocks of 32 tokens. See `vllm`, which finds them empty."""
    require(VLLM)
    servers = [VllmServer(f"vllm-{i}", keeper, engine_logs) for i in range(N_SERVERS)]
    try:
        took_s = start_fleet(servers)
        request.config.stash[_numbers].append(f"{N_SERVERS} vLLM servers were ready after {took_s:.0f} s")
        yield servers
    finally:
        for server in servers:
            server.kill()


@pytest.fixture
def vllm(vllm_fleet: list[VllmServer]) -> list[VllmServer]:
    """The fleet, all of it up, with nothing cached."""
    for server in vllm_fleet:
        if not server.is_well():
            server.restart()
        server.wake()
        server.reset_cache()
    return vllm_fleet


@pytest.fixture
def direct(vllm: list[VllmServer]) -> str:
    """The URL of the last of them: asked by itself, by tests that route to the others."""
    return vllm[-1].url


@pytest.fixture(scope="session")
def llama(keeper: Keeper, engine_logs: Path) -> Iterator[list[LlamaServer]]:
    """Two llama.cpp servers."""
    require(LLAMA)
    servers = [LlamaServer(f"llama-{i}", keeper, engine_logs) for i in range(2)]
    try:
        start_fleet(servers)
        yield servers
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="session")
def peers() -> Environment:
    """Where other routers are installed."""
    require(PEERS)
    return PEERS
