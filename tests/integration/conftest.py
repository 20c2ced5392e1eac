"""The event loops of these tests, and what several of them stand on.

Tests of the data port run on uvloop, as the command does. Those about connections that end or hold back run on
asyncio's own loop too, which the command falls back to.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import uvloop

from tests.integration.stand import Serve, StandWith, Until, standing

_ON_BOTH_LOOPS = {
    *("kv_events", "leaving", "load", "retries", "security_tls", "stopping", "timeouts", "uploads", "upstream"),
    *("fast_lane", "front_faults", "listening", "sagemaker_stream", "steps", "websocket"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {}
    if item.path.stem.startswith(
        ("test_proxy", "test_kv_events", "test_fast_lane", "test_front", "test_listening", "test_sagemaker")
    ):
        factories["uvloop"] = uvloop.new_event_loop
    if not factories or item.path.stem.removeprefix("test_").removeprefix("proxy_") in _ON_BOTH_LOOPS:
        factories["asyncio"] = asyncio.new_event_loop
    return factories


@pytest.fixture
def stand(serve: Serve, until: Until) -> StandWith:
    """`stand(endpoint, …, n=3)`: a router with these endpoints of SageMaker's before `n` containers."""
    return partial(standing, serve, until)
