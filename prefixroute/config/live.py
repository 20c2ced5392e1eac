"""Which settings a running router takes up, and which need a restart.

What is not listed here needs one: a setting that is added is told as such until somebody makes it live.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from prefixroute.config.errors import describe
from prefixroute.config.settings import FleetSettings, Settings
from prefixroute.config.tables import Table
from prefixroute.errors import ConfigError

LIVE = frozenset(
    {
        "listen.api_keys_file",
        "listen.cors",
        # Of certificates, which files; whether there are any at all is a matter of the port.
        "listen.tls.cert_file",
        "listen.tls.key_file",
        "admin.token_env",
        "admin.token_file",
        "admin.tls.cert_file",
        "admin.tls.key_file",
        "fleet.instances",
        "fleet.health",
        "routing.strategy",
        "routing.shadow",
        "routing.isolate_by",
        "routing.default_capacity_tokens",
        "routing.expected_latency",
        "routing.prefix_aware",
        "routing.session",
        "routing.kv_aware",
        "routing.custom",
        "upstream",
        "retry",
        "limits.max_body_bytes",
        "limits.client_body_timeout_s",
        "limits.client_body_bytes_per_s",
        "limits.index_bytes",
        "limits.wait_for_instance_s",
        "limits.max_waiting",
        "limits.max_stored_responses",
        "limits.max_decisions",
        "limits.per_key_in_flight",
        "limits.per_key_requests_per_minute",
        "engine_control",
        "sagemaker.endpoints",
        "sagemaker.access_keys_file",
        "sagemaker.max_sessions",
        "lane",
        "log.level",
        "log.access",
        "log.client_address",
        "response_headers",
        "shutdown_delay_s",
        "drain_timeout_s",
        "watch_config",
    }
)
"""Paths of settings and of tables all of whose settings take effect for new requests."""

_T = TypeVar("_T", bound=Table)

# The recorder's key is read, or made, once.
_NOT_WATCHED = frozenset({"recording"})


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a running router's settings. `settings`: those in force from now on."""

    settings: Settings
    changed: tuple[str, ...]
    """Paths of settings that take effect."""
    needs_restart: tuple[str, ...]
    """Paths of settings that are different in the new configuration and stay as they were."""
    joined: tuple[str, ...] = ()
    """Names of instances that are new. One with another address under its old name has left and joined."""
    left: tuple[str, ...] = ()


def change(old: Settings, new: Settings) -> Change:
    """`old` with what can be taken up of `new`. Raises ConfigError when the two do not go together."""
    changed: list[str] = []
    needs_restart: list[str] = []
    merged = _merged(old, new, "", changed, needs_restart)
    if all(i.kv_events == "off" for i in old.fleet.instances):
        merged = _without_events(merged, needs_restart)
    if needs_restart:
        try:
            merged = Settings.model_validate(merged.model_dump())
        except ValidationError as error:
            names = ", ".join(needs_restart)
            raise ConfigError(f"needs a restart ({names} cannot change before): {describe(error, {})[0]}") from None
    before, after = _addresses(old), _addresses(merged)
    return Change(
        merged,
        tuple(changed),
        tuple(needs_restart),
        joined=tuple(name for name, url in after.items() if before.get(name) != url),
        left=tuple(name for name, url in before.items() if after.get(name) != url),
    )


def _addresses(settings: Settings) -> dict[str, str]:
    return {instance.name: instance.url for instance in settings.fleet.instances}


def files_named(settings: Settings) -> Iterator[Path]:
    """Files that settings name and a reload reads again: keys, tokens, certificates."""
    yield from _files(settings)


def _merged(old: _T, new: _T, above: str, changed: list[str], needs_restart: list[str]) -> _T:
    update: dict[str, object] = {}
    for name, field in type(old).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        path = f"{above}{field.alias or name}"
        if isinstance(before, Table) and isinstance(after, Table):
            update[name] = _merged(before, after, f"{path}.", changed, needs_restart)
        elif _is_live(path):
            changed.append(path)
            update[name] = after
        else:
            needs_restart.append(path)
    return old.model_copy(update=update)


def _is_live(path: str) -> bool:
    return path in LIVE or path.rpartition(".")[0] in LIVE


def _without_events(settings: Settings, needs_restart: list[str]) -> Settings:
    """What follows KV events is made at the start, if there are any."""
    instances = []
    for index, instance in enumerate(settings.fleet.instances):
        if instance.kv_events != "off":
            needs_restart.append(f"fleet.instances[{index}].kv_events")
            instance = instance.model_copy(update={"kv_events": "off"})  # noqa: PLW2901  as it will be
        instances.append(instance)
    fleet: FleetSettings = settings.fleet.model_copy(update={"instances": tuple(instances)})
    return settings.model_copy(update={"fleet": fleet})


def _files(value: object) -> Iterator[Path]:
    if isinstance(value, tuple):
        for item in value:
            yield from _files(item)
    elif isinstance(value, Table):
        for name in type(value).model_fields:
            inner = getattr(value, name)
            if name.endswith("_file") and isinstance(inner, str):
                yield Path(inner)
            elif name not in _NOT_WATCHED:
                yield from _files(inner)
