"""The command in processes of its own, and a simulated server for it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prefixroute.demo.server import SimulatedServer
from tests.command import Commands
from tests.e2e.harness import FAST


@pytest.fixture
async def commands(tmp_path: Path) -> AsyncIterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    await commands.end()


@pytest.fixture
async def server() -> AsyncIterator[SimulatedServer]:
    async with SimulatedServer(FAST) as server:
        yield server
