"""Variables that are not ours by name: where a container's requests come, and where the file is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from prefixroute.config.live import change
from prefixroute.config.load import load_settings
from prefixroute.config.settings import Settings
from prefixroute.errors import ConfigError


def address(settings: Settings) -> tuple[str, int]:
    return settings.listen.host, settings.listen.port


@pytest.mark.parametrize(("text", "port"), [("1", 1), ("8081", 8081), (" 65535\n", 65_535), ("08080", 8080)])
def test_a_containers_port_is_listened_on_at_every_address(text: str, port: int) -> None:
    assert address(load_settings(None, environ={"SAGEMAKER_BIND_TO_PORT": text})) == ("0.0.0.0", port)


def test_it_wins_over_file_and_variables_and_the_command_line_over_it(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("listen: {host: 10.0.0.1, port: 1, api_keys_file: null}\nadmin: {port: 4}")
    environ = {
        "SAGEMAKER_BIND_TO_PORT": "3",
        "PREFIXROUTE_LISTEN__PORT": "2",
        "PREFIXROUTE_LISTEN": "{host: 10.0.0.2}",
    }
    settings = load_settings(path, environ=environ)
    assert address(settings) == ("0.0.0.0", 3)
    # The admin port is not what the container is asked on.
    assert settings.admin is not None
    assert (settings.admin.host, settings.admin.port) == ("127.0.0.1", 4)
    assert address(load_settings(path, environ=environ, overrides={"listen": {"port": 5}})) == ("0.0.0.0", 5)
    assert address(load_settings(path, environ=environ, overrides={"listen": {"host": "::1"}})) == ("::1", 3)


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_one_counts_as_unset(text: str) -> None:
    assert load_settings(None, environ={"SAGEMAKER_BIND_TO_PORT": text}) == Settings()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((text, text) for text in ("0", "65536", "99999999", "-1", "+1", "80.0", "1e3", "0x50", "http", "null", "٣")),
        ("tcp://10.0.0.1:80", "tcp://10.0.0.1:80"),
        ("80 81", "'80 81'"),
        ("x" * 99, "x" * 60 + "…"),
    ],
)
def test_one_that_is_no_port_is_named(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, environ={"SAGEMAKER_BIND_TO_PORT": text})
    assert str(caught.value) == f"SAGEMAKER_BIND_TO_PORT: must be a port from 1 to 65535, not {told}"


def test_it_is_told_beside_other_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, environ={"SAGEMAKER_BIND_TO_PORT": "x", "PREFIXROUTE_RETRY__MAX_ATTEMPTS": "0"})
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "SAGEMAKER_BIND_TO_PORT",
        "retry.max_attempts (from PREFIXROUTE_RETRY__MAX_ATTEMPTS)",
    ]


def test_where_a_file_listens_needs_no_restart_while_the_container_says_it(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    read: Callable[[], Settings] = lambda: load_settings(path, environ={"SAGEMAKER_BIND_TO_PORT": "8080"})  # noqa: E731
    path.write_text("listen: {port: 1}\nlog: {access: true}")
    old = read()
    path.write_text("listen: {host: '::', port: 2}\nlog: {access: false}")
    made = change(old, read())
    assert (made.changed, made.needs_restart) == (("log.access",), ())
    assert address(made.settings) == ("0.0.0.0", 8080)


def test_the_variable_that_names_the_file_is_no_setting() -> None:
    """The command reads it. Who loads settings names the file."""
    assert load_settings(None, environ={"PREFIXROUTE_CONFIG": "/nowhere.yaml"}) == Settings()


def test_items_that_are_wrong_do_not_make_a_list_empty() -> None:
    """Each has its line; that nothing is left without them is no other fault."""
    with pytest.raises(ConfigError) as caught:
        load_settings(None, environ={}, overrides={"listen": {"cors": {"allow_origins": [1]}}})
    assert str(caught.value) == "listen.cors.allow_origins[0]: must be text (put it in quotes), not a number"


def test_a_list_that_is_too_long_is_told_in_our_words() -> None:
    names = ["random", "session", "round_robin", "prefix_aware", "kv_aware"]
    with pytest.raises(ConfigError, match=r"^routing\.shadow: must be a list of at most 4$"):
        load_settings(None, environ={}, overrides={"routing": {"shadow": names}})
