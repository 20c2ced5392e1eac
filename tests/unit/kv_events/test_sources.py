"""From what is configured or told to what is connected to."""

import pytest

from prefixroute.config.settings import KvEventsSettings
from prefixroute.instance_facts import EventSource
from prefixroute.kv_events.sources import Address, configured, discovered


@pytest.mark.parametrize(
    ("told", "url", "reached"),
    [
        ("tcp://*:5557", "http://gpu-a:8000", "tcp://gpu-a:5557"),
        ("tcp://0.0.0.0:5557", "https://10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://*:5557", "unix:/run/vllm.sock", "tcp://127.0.0.1:5557"),
        ("tcp://[::]:5557", "http://gpu-a:8000", "tcp://gpu-a:5557"),
        ("tcp://:::5557", "http://gpu-a:8000", "tcp://gpu-a:5557"),
        ("tcp://*:5557", "http://[fd00::7]:8000", "tcp://[fd00::7]:5557"),
        ("tcp://10.0.0.9:5557", "http://gpu-a:8000", "tcp://10.0.0.9:5557"),
        ("ipc:///run/kv", "http://localhost:8000", "ipc:///run/kv"),
    ],
)
def test_what_listens_everywhere_is_reached_at_the_instances_host(told: str, url: str, reached: str) -> None:
    assert discovered(EventSource(told), url) == Address(reached)
    assert discovered(EventSource("tcp://a:1", told, "t"), url) == Address("tcp://a:1", reached, "t")


def test_what_is_configured_is_taken_as_it_is() -> None:
    table = KvEventsSettings(endpoint="tcp://*:5557", replay_endpoint="tcp://gpu-a:5558", topic="kv", bind=True)
    assert configured(table) == Address("tcp://*:5557", "tcp://gpu-a:5558", "kv", bind=True)
