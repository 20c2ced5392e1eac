"""The simulated server that other tests and the demonstration use answers as the real one does."""

from collections.abc import Callable

from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer
from tests.engines.answers import ask
from tests.engines.load import client
from tests.engines.servers import MODEL_TOKENS, VllmServer
from tests.engines.shapes import IMITATED, differences
from tests.engines.tiny_model import NAME


async def test_the_simulated_server_answers_in_the_same_shape(
    vllm: list[VllmServer], tell: Callable[[str], None]
) -> None:
    config = ServerConfig(EngineConfig(speed=1_000.0, kv_tokens=MODEL_TOKENS), model=NAME)
    differing = []
    async with SimulatedServer(config) as simulated, client(reuses_connections=False) as session:
        for case in IMITATED:
            real, ours = await ask(session, vllm[0].url, case), await ask(session, simulated.url, case)
            differing += differences(case, real, ours)
    tell(f"the simulated server answers {len(IMITATED)} requests as the real one: {len(differing)} differences (none)")
    assert not differing, "\n".join(differing)
