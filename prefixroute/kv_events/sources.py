"""Where the KV events of an instance come from: as configured, or as the instance tells (`GET /kv_event_sources`)."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from prefixroute.config.settings import InstanceSettings, KvEventsSettings
from prefixroute.instance_facts import EventSource

_TCP = re.compile(r"tcp://(.*):([0-9]{1,5})")
# How a server spells the addresses of all its interfaces.
_EVERY_ADDRESS = frozenset({"*", "0.0.0.0", "::", "[::]", ""})


@dataclass(frozen=True, slots=True)
class Address:
    """One publisher. `bind`: it connects to us, who listen on `endpoint`."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    bind: bool = False


def configured(settings: KvEventsSettings) -> Address:
    return Address(settings.endpoint, settings.replay_endpoint, settings.topic, settings.bind)


def addresses_of(instance: InstanceSettings) -> list[Address]:
    """As configured; none where the instance is asked, or has no events."""
    return [configured(instance.kv_events)] if isinstance(instance.kv_events, KvEventsSettings) else []


def discovered(source: EventSource, instance_url: str) -> Address:
    """The address of what an instance told; what it listens on everywhere is reached at its own host."""
    # Who is reached by a socket of this machine is on this machine.
    host = urlsplit(instance_url).hostname or "127.0.0.1"
    replay = source.replay_endpoint
    return Address(_reached(source.endpoint, host), None if replay is None else _reached(replay, host), source.topic)


def _reached(endpoint: str, host: str) -> str:
    parts = _TCP.fullmatch(endpoint)
    if parts is None or parts[1] not in _EVERY_ADDRESS:
        return endpoint
    return f"tcp://[{host}]:{parts[2]}" if ":" in host else f"tcp://{host}:{parts[2]}"
