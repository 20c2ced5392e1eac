"""The simulated server's metrics against those of a real one."""

from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from prefixroute.demo.server import SimulatedServer

# What a vLLM 0.32 server answered on /metrics.
CAPTURE = Path(__file__).parent.parent / "data" / "vllm_metrics.txt"


def labels_by_name(exposition: str) -> dict[str, set[str]]:
    """Family name → names of the labels that its samples have."""
    return {
        family.name: {label for sample in family.samples for label in sample.labels}
        for family in text_string_to_metric_families(exposition)
        if family.name.startswith("vllm:")
    }


async def test_every_simulated_metric_is_one_of_vllm() -> None:
    async with SimulatedServer() as server, aiohttp.ClientSession() as session:
        body = {"model": "demo-model", "prompt": "Once upon a time", "max_tokens": 1}
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            assert response.status == 200
        async with session.get(f"{server.url}/metrics") as response:
            simulated = labels_by_name(await response.text())

    real = labels_by_name(CAPTURE.read_text())
    assert len(simulated) > 10
    for name, labels in simulated.items():
        assert labels <= real[name], name
