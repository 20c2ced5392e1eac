"""The simulated server against what a real vLLM 0.32 answered, as captured. tests/engines asks live ones."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession

from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer
from tests.engines.answers import ask
from tests.engines.capture import read_captured
from tests.engines.cases import Case
from tests.engines.shapes import IMITATED, differences

CAPTURED = read_captured()


@pytest.fixture
async def server() -> AsyncIterator[SimulatedServer]:
    async with SimulatedServer(ServerConfig(EngineConfig(speed=1_000.0, kv_tokens=16_384), model="tiny")) as running:
        yield running


@pytest.mark.parametrize("case", IMITATED, ids=lambda case: case.name)
async def test_it_answers_in_the_shape_of_the_real_one(case: Case, server: SimulatedServer) -> None:
    async with ClientSession() as session:
        assert differences(case, CAPTURED[case.name], await ask(session, server.url, case)) == []
