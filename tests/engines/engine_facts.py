"""What an engine says of itself, asked directly."""

import re

import aiohttp

from tests.engines.processes import ServerProcess

_SAMPLE = r"^{}(?:{{[^}}]*}})? (\S+)$"


async def gauge(session: aiohttp.ClientSession, server: ServerProcess, name: str) -> float:
    """The sum of a metric over its labels."""
    async with session.get(f"{server.url}/metrics") as response:
        page = await response.text()
    values = re.findall(_SAMPLE.format(re.escape(name)), page, re.MULTILINE)
    assert values, f"{server.name} has no {name}"
    return sum(map(float, values))


async def n_running(session: aiohttp.ClientSession, server: ServerProcess) -> int:
    """Requests that it works on."""
    return round(await gauge(session, server, "vllm:num_requests_running"))
