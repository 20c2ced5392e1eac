"""Which settings a running router takes up. One that is added must be named here, on the one side or the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixroute.config.live import LIVE, change, files_named
from prefixroute.config.settings import Settings
from prefixroute.config.tables import Table, table_in
from prefixroute.errors import ConfigError

# All of what is below a table that is named here.
NEEDS_RESTART = {
    *("listen.host", "listen.port", "listen.tls.client_ca_file"),
    *("admin.host", "admin.port", "admin.tls.client_ca_file"),
    *("routing.hash_seed", "routing.block_tokens"),
    "tokenizer",
    *("limits.max_header_bytes", "limits.client_head_timeout_s", "limits.client_idle_timeout_s"),
    "limits.client_stall_timeout_s",
    "limits.exact_index_bytes",
    "log.format",
    "recording",
}


def paths(table: type[Table], above: str = "") -> Iterator[str]:
    for name, field in table.model_fields.items():
        path = f"{above}{name}"
        inner = table_in(field.annotation)
        if inner is None or path in LIVE | NEEDS_RESTART:
            yield path
        else:
            yield from paths(inner, f"{path}.")


def is_below(path: str, names: set[str] | frozenset[str]) -> bool:
    return path in names or path.rpartition(".")[0] in names


def settings(*urls: str, **tables: Any) -> Settings:
    return Settings.model_validate({"fleet": {"instances": [{"url": url} for url in urls]}, **tables})


def test_every_setting_is_live_or_needs_a_restart() -> None:
    for path in paths(Settings):
        assert is_below(path, LIVE) != is_below(path, NEEDS_RESTART), path


def test_nothing_is_named_that_is_no_setting() -> None:
    known = set(paths(Settings))
    assert {*LIVE, *NEEDS_RESTART} <= known | {path.rpartition(".")[0] for path in known}


def test_the_same_is_no_change() -> None:
    old, new = settings("http://a"), settings("http://a", log={"level": "info"}, retry={})
    made = change(old, new)
    assert (made.settings, made.changed, made.needs_restart) == (old, (), ())


def test_what_can_be_taken_up_is_and_the_rest_stays() -> None:
    old = settings("http://a")
    new = settings(
        "http://b",
        listen={"host": "0.0.0.0", "port": 1234},
        admin=None,
        routing={"strategy": "session", "session": {"header": "x-user"}, "block_tokens": 64},
        limits={"max_waiting": 1, "max_header_bytes": 2048},
        upstream={"idle_timeout_s": 1.0},
        recording={"path": "rec.jsonl"},
    )
    made = change(old, new)
    assert made.changed == (
        *("fleet.instances", "routing.strategy", "routing.session.header"),
        *("upstream.idle_timeout_s", "limits.max_waiting"),
    )
    assert made.needs_restart == (
        *("listen.host", "listen.port", "admin", "routing.block_tokens", "limits.max_header_bytes", "recording"),
    )
    in_force = made.settings
    assert in_force.fleet == new.fleet
    assert (in_force.listen, in_force.admin, in_force.recording) == (old.listen, old.admin, None)
    assert (in_force.routing.strategy, in_force.routing.block_tokens) == ("session", 256)
    # As long as it has not restarted, it is told again.
    again = change(in_force, new)
    assert (again.changed, again.needs_restart) == ((), made.needs_restart)


def test_a_mixture_that_is_wrong_is_refused_whole() -> None:
    """The new file is right. With the old port in force, the router would send requests to itself."""
    new = settings("http://127.0.0.1:8080", listen={"port": 8081})
    with pytest.raises(
        ConfigError, match=r"^needs a restart \(listen.port cannot change before\): .*this router itself"
    ):
        change(settings("http://a"), new)


def test_events_of_instances_cannot_begin_later() -> None:
    with_events = {"url": "http://b", "name": "b", "kv_events": "auto"}
    plain = Settings.model_validate({"fleet": {"instances": [{"url": "http://a"}]}})
    new = Settings.model_validate({"fleet": {"instances": [{"url": "http://a"}, with_events]}})
    made = change(plain, new)
    assert made.changed == ("fleet.instances",)
    assert made.needs_restart == ("fleet.instances[1].kv_events",)
    assert [i.kv_events for i in made.settings.fleet.instances] == ["off", "off"]
    # Where some are followed, others are as well.
    first = Settings.model_validate({"fleet": {"instances": [with_events]}})
    assert change(first, new).needs_restart == ()


def test_files_that_settings_name() -> None:
    named = Settings.model_validate(
        {
            "listen": {"tls": {"cert_file": "c", "key_file": "k"}, "api_keys_file": "keys"},
            "admin": {"token_file": "token"},
            "fleet": {"instances": [{"url": "https://a", "api_key_file": "a", "tls": {"ca_file": "ca"}}]},
            "recording": {"path": "rec", "key_file": "made-when-it-starts"},
        }
    )
    assert set(files_named(named)) == {Path(name) for name in ("c", "k", "keys", "token", "a", "ca")}
