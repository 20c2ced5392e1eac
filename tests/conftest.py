"""For all tests: a router in this process, before upstreams whose every byte is the test's."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from prefixroute.testing import FakeUpstream

if TYPE_CHECKING:
    from prefixroute.app import App

# Machines are busy: an example may take as long as it takes.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")

Serve = Callable[..., AbstractAsyncContextManager["App"]]

# A test that waits for what never comes fails after so long: uvloop does not let pytest-timeout's signal through.
PATIENCE_S = 20


@pytest.fixture
def finished(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """What the access log says of the requests that are over, in order."""
    return lambda: [record.__dict__["fields"] for record in caplog.records if record.name == "prefixroute.access"]


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """`await until(condition)`: lets the loop turn until it holds, where nothing tells of the change."""

    async def turn(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0)

    return turn


@pytest.fixture
def expected_errors() -> list[str]:
    """Words of what a test expects to be logged as an error."""
    return []


@pytest.fixture
def serve(caplog: pytest.LogCaptureFixture, expected_errors: list[str]) -> Iterator[Serve]:
    """`serve(upstream, …, clock=, environ=, table={…}, …)`: a running router. Settings are given by table.

    Instances are named gpu-0, gpu-1, … and take turns in this order, gpu-0 first. All have been found well when it
    begins, and are not probed again. However a test ends, no place may stay taken, and nothing is logged as an error.
    """
    caplog.set_level(logging.DEBUG)
    yield _serve
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [error for error in errors if not any(words in error for words in expected_errors)] == []


@asynccontextmanager
async def _serve(
    *upstreams: FakeUpstream | str,
    clock: Callable[[], float] = time.monotonic,
    patience_s: float = PATIENCE_S,
    environ: Mapping[str, str] | None = None,
    instance: Mapping[str, Any] | None = None,
    health: Mapping[str, Any] | None = None,
    **tables: Any,
) -> AsyncIterator["App"]:
    # Here, because tests of one part need not import all of them.
    from prefixroute.app import running
    from prefixroute.config import Settings

    fakes = [upstream for upstream in upstreams if isinstance(upstream, FakeUpstream)]
    urls = [upstream if isinstance(upstream, str) else upstream.url for upstream in upstreams]
    configured = Settings.model_validate(
        {
            "listen": {"port": 0},
            "admin": None,
            "fleet": {
                "instances": [{"url": url, "name": f"gpu-{i}", **(instance or {})} for i, url in enumerate(urls)],
                "health": {"interval_s": 3600.0, **(health or {})},
            },
            "routing": {"strategy": "round_robin"},
            "drain_timeout_s": 0.0,
            **tables,
        }
    )
    async with asyncio.timeout(patience_s), running(configured, clock=clock, environ=environ or {}) as app:
        for fake in fakes:
            await fake.wait_probed()
        yield app
    for one in app.router.fleet.instances:
        load = app.router.load.of(one.slot)
        assert (load.in_flight, load.in_flight_tokens, load.pending_work) == (0, 0, 0.0), one.name
    assert app.proxy.n_active == 0
