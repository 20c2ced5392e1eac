"""What operators may write, what it means, and what they are told when it is wrong."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import trustme
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from prefixroute.config.file import MAX_FILE_BYTES, parse_json, parse_yaml
from prefixroute.config.load import MAX_PROBLEMS, instances_from_urls, load_settings, require_instances
from prefixroute.config.routing import Strategy
from prefixroute.config.secrets import admin_token, api_key
from prefixroute.config.settings import InstanceSettings, KvEventsSettings, Settings
from prefixroute.config.tables import Table, fields_by_key, is_path, table_in
from prefixroute.config.url import instance_name, instance_url
from prefixroute.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "config.example.yaml"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def from_table(table: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    return load_settings(None, overrides=table, environ=environ or {})


def from_environ(**variables: str) -> Settings:
    return load_settings(None, environ=variables)


def problems_of(load: Callable[[], object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load()
    return str(caught.value).splitlines()


def problem(table: Mapping[str, Any]) -> str:
    (line,) = problems_of(lambda: from_table(table))
    return line


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    table: dict[str, Any] = value
    return table


def fields(table: type[Table], above: str = "") -> Iterator[tuple[str, type[Table]]]:
    """Every field by its path, below lists too, with the table that declares it."""
    for key, field in fields_by_key(table).items():
        yield above + key, table
        inner = table_in(field.annotation)
        if inner is not None:
            yield from fields(inner, f"{above}{key}.")


# Defaults and the example


def test_nothing_at_all_gives_the_defaults() -> None:
    assert load_settings(None, environ={}) == Settings()


def test_defaults_are_as_documented() -> None:
    settings = Settings()
    assert (settings.listen.host, settings.listen.port) == ("127.0.0.1", 8080)
    assert settings.admin is not None
    assert (settings.admin.host, settings.admin.port) == ("127.0.0.1", 9190)
    assert settings.fleet.instances == ()
    assert settings.routing.strategy == "expected_latency"
    assert settings.engine_control == "deny"
    assert settings.retry.unanswered == "never"
    assert settings.limits.max_body_bytes == 67_108_864
    assert settings.limits.index_bytes == 268_435_456


def test_the_example_is_the_defaults_apart_from_its_instances() -> None:
    loaded = load_settings(EXAMPLE, environ={})
    assert [instance.name for instance in loaded.fleet.instances] == ["gpu-a", "127.0.0.1:8002"]
    without = loaded.fleet.model_copy(update={"instances": ()})
    assert loaded.model_copy(update={"fleet": without}) == Settings()


def test_the_example_has_every_setting() -> None:
    data = parse_yaml(EXAMPLE.read_text())
    for path, _ in fields(Settings):
        here = data
        for key in path.split("."):
            here = here[0] if isinstance(here, list) and here else here
            if here in (None, "off", []):  # off by default: its settings are shown in comments
                shown = re.search(rf"^ *# {{5,}}(- )?({{.*)?\b{key}:( |$)", EXAMPLE.read_text(), re.MULTILINE)
                assert shown, f"{path} is missing from config.example.yaml"
                break
            assert key in here, f"{path} is missing from config.example.yaml"
            here = here[key]


def test_the_example_means_the_same_to_other_yaml_readers() -> None:
    text = EXAMPLE.read_text()
    assert parse_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(("path", "table"), [*fields(Settings)])
def test_every_setting_is_described(path: str, table: type[Table]) -> None:
    description = fields_by_key(table)[path.rpartition(".")[2]].description
    assert description is not None
    assert description.endswith(".")
    assert "\n" not in description


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("off", "off"),
        ("auto", "auto"),
        ("tcp://gpu-a:5557", KvEventsSettings(endpoint="tcp://gpu-a:5557")),
        ("ipc:///run/vllm/kv", KvEventsSettings(endpoint="ipc:///run/vllm/kv")),
        ({"endpoint": "tcp://*:5557", "bind": True}, KvEventsSettings(endpoint="tcp://*:5557", bind=True)),
    ],
)
def test_kv_events_are_off_auto_or_an_endpoint(value: object, expected: object) -> None:
    assert InstanceSettings.model_validate({"url": "http://a", "kv_events": value}).kv_events == expected


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("aut", "kv_events.endpoint: must be off, auto, tcp://HOST:PORT or ipc:///PATH"),
        ("inproc://a", "kv_events.endpoint: must be off, auto, tcp://HOST:PORT or ipc:///PATH"),
        ("tcp://gpu-a:70000", "kv_events.endpoint: must be off, auto, tcp://HOST:PORT or ipc:///PATH"),
        (
            "tcp://*:5557",
            "kv_events.endpoint: must name a host, not * (or set bind, where the instance connects to us)",
        ),
        (
            {"endpoint": "tcp://*:5557", "bind": True, "replay_endpoint": "tcp://*:5558"},
            "kv_events.replay_endpoint: must name a host, not * (or set bind, where the instance connects to us)",
        ),
        ({}, "kv_events.endpoint: is required"),
        (True, "kv_events: must be off, auto, an endpoint, or a table with an endpoint"),
        ({"endpoint": "tcp://a:1", "topics": ""}, "kv_events.topics: unknown setting; did you mean 'topic'?"),
    ],
)
def test_kv_events_that_cannot_be_are_told_in_one_line(value: object, line: str) -> None:
    assert problem({"fleet": {"instances": [{"url": "http://a", "kv_events": value}]}}) == f"fleet.instances[0].{line}"


def test_a_path_alone_turns_recording_on() -> None:
    recording = from_environ(PREFIXROUTE_RECORDING__PATH="rec.jsonl").recording
    assert recording is not None
    assert (recording.path, recording.key_file) == ("rec.jsonl", None)
    assert (recording.max_file_bytes, recording.n_files, recording.block_tokens) == (67_108_864, 8, 128)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({}, "recording.path: is required"),
        ({"path": "rec/"}, "recording.path: must be the path of a file"),
        ({"path": "rec\n"}, "recording.path: must be the path of a file"),
        ({"path": "rec", "key_file": "rec"}, "recording.key_file: must be another file than path"),
        ({"path": "rec", "n_files": 1}, "recording.n_files: must be at least 2, not 1"),
        ({"path": "rec", "max_file_bytes": 1000}, "recording.max_file_bytes: must be at least 1048576, not 1000"),
        ({"path": "rec", "block_tokens": 8}, "recording.block_tokens: must be at least 16, not 8"),
    ],
)
def test_what_is_wrong_with_a_recording_is_told(table: dict[str, Any], problem: str) -> None:
    assert problems_of(lambda: from_table({"recording": table})) == [problem]


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().listen.port = 1  # type: ignore[misc]


# Precedence


def test_command_line_beats_environment_beats_file_beats_defaults(write: Write) -> None:
    path = write("retry: {max_attempts: 4, budget_ratio: 0.4}\nlimits: {max_waiting: 4}\ndrain_timeout_s: 4\n")
    settings = load_settings(
        path,
        environ={"PREFIXROUTE_RETRY__MAX_ATTEMPTS": "5", "PREFIXROUTE_LIMITS__MAX_WAITING": "5"},
        overrides={"retry": {"max_attempts": 6}},
    )
    assert settings.retry.max_attempts == 6
    assert settings.limits.max_waiting == 5
    assert settings.retry.budget_ratio == 0.4
    assert settings.drain_timeout_s == 4
    assert settings.limits.wait_for_instance_s == 5


def test_lists_replace_and_do_not_merge(write: Write) -> None:
    path = write("fleet: {instances: [{url: 'http://a:1'}, {url: 'http://b:1'}], health: {fall: 9}}")
    settings = load_settings(path, environ={}, overrides={"fleet": {"instances": [{"url": "http://c:1"}]}})
    assert [instance.url for instance in settings.fleet.instances] == ["http://c:1"]
    assert settings.fleet.health.fall == 9


def test_admin_can_be_turned_off_and_on_again(write: Write) -> None:
    path = write("admin: null")
    assert load_settings(path, environ={}).admin is None
    admin = load_settings(path, environ={}, overrides={"admin": {"port": 9191}}).admin
    assert admin is not None
    assert (admin.host, admin.port) == ("127.0.0.1", 9191)
    assert from_environ(PREFIXROUTE_ADMIN="null").admin is None


def test_a_table_with_nothing_in_it_means_its_defaults() -> None:
    assert from_table(parse_yaml("routing:\nlimits:\nlog: {}\n")) == Settings()


def test_the_processs_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXROUTE_LISTEN__PORT", "1234")
    assert load_settings(None).listen.port == 1234


# Environment


def test_environment_sets_every_kind_of_value() -> None:
    settings = from_environ(
        PREFIXROUTE_LISTEN__HOST="::",
        PREFIXROUTE_ROUTING__STRATEGY=" session ",
        PREFIXROUTE_ROUTING__SESSION__HEADER="123",
        PREFIXROUTE_ROUTING__CUSTOM__OPTIONS='{"a": [1, {"b": null}]}',
        PREFIXROUTE_UPSTREAM__IDLE_TIMEOUT_S="null",
        PREFIXROUTE_RESPONSE_HEADERS="true",
        PREFIXROUTE_FLEET__INSTANCES='[{url: "http://a:1"}]',
        PREFIXROUTE_DRAIN_TIMEOUT_S="1e1",
        OTHER="x",
    )
    assert settings.listen.host == "::"
    assert settings.routing.strategy == "session"
    assert settings.routing.session.header == "123"
    assert settings.routing.custom.options == {"a": [1, {"b": None}]}
    assert settings.upstream.idle_timeout_s is None
    assert settings.response_headers is True
    assert settings.fleet.instances[0].url == "http://a:1"
    assert settings.drain_timeout_s == 10


def test_the_deeper_variable_wins_over_a_whole_table() -> None:
    limits = from_environ(
        PREFIXROUTE_LIMITS__MAX_WAITING="2", PREFIXROUTE_LIMITS="{max_waiting: 1, wait_for_instance_s: 1}"
    ).limits
    assert (limits.max_waiting, limits.wait_for_instance_s) == (2, 1)


def test_an_empty_variable_counts_as_unset() -> None:
    assert from_environ(PREFIXROUTE_ADMIN="", PREFIXROUTE_LISTEN__PORT=" ", PREFIXROUTE_TYPO="") == Settings()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PREFIXROUTE_LISTEN_PORT", "PREFIXROUTE_LISTEN__PORT"),
        ("PREFIXROUTE_ROUTNG__STRATEGY", "PREFIXROUTE_ROUTING__STRATEGY"),
        ("PREFIXROUTE_listen__port", None),
        ("PREFIXROUTE_FLEET__INSTANCES__0__URL", "PREFIXROUTE_FLEET__INSTANCES"),
        ("PREFIXROUTE_", None),
        ("PREFIXROUTE_XYZ", None),
    ],
)
def test_an_unknown_variable_is_an_error(name: str, meant: str | None) -> None:
    (line,) = problems_of(lambda: from_environ(**{name: "1"}))
    assert line.startswith(f"{name}: unknown setting; ")
    if meant is not None:
        assert line.endswith(f"did you mean {meant}?")


def test_what_kubernetes_adds_for_a_service_called_prefixroute_is_ignored() -> None:
    settings = from_environ(
        PREFIXROUTE_SERVICE_HOST="10.0.0.1",
        PREFIXROUTE_SERVICE_PORT="80",
        PREFIXROUTE_SERVICE_PORT_HTTP="80",
        PREFIXROUTE_PORT="tcp://10.0.0.1:80",
        PREFIXROUTE_PORT_80_TCP="tcp://10.0.0.1:80",
        PREFIXROUTE_PORT_80_TCP_PROTO="tcp",
        PREFIXROUTE_PORT_80_TCP_PORT="80",
        PREFIXROUTE_PORT_80_TCP_ADDR="10.0.0.1",
        PREFIXROUTE_ADMIN_SERVICE_HOST="10.0.0.2",
        PREFIXROUTE_ADMIN_PORT="tcp://10.0.0.2:80",
    )
    assert settings == Settings()


def test_a_problem_names_the_variable_it_came_from_and_no_other(write: Write) -> None:
    path = write("limits: {index_bytes: 1}")
    lines = problems_of(
        lambda: load_settings(
            path,
            environ={
                "PREFIXROUTE_LIMITS": "{max_waiting: -1}",
                "PREFIXROUTE_LISTEN__PORT": "eighty",
                "PREFIXROUTE_FLEET__INSTANCES": "[{url: x}]",
                "PREFIXROUTE_RETRY__MAX_ATTEMPTS": "0",
            },
            overrides={"retry": {"max_attempts": 11}},
        )
    )
    assert lines == [
        "listen.port (from PREFIXROUTE_LISTEN__PORT): must be a whole number, not 'eighty'",
        "fleet.instances[0].url (from PREFIXROUTE_FLEET__INSTANCES): has no scheme (write http://x)",
        "retry.max_attempts: must be at most 10, not 11",
        "limits.index_bytes: must be at least 1048576, not 1",
        "limits.max_waiting (from PREFIXROUTE_LIMITS): must be at least 0, not -1",
    ]


def test_a_variable_that_is_not_yaml_is_named() -> None:
    (line,) = problems_of(lambda: from_environ(PREFIXROUTE_LIMITS="{a: ["))
    assert line.startswith("PREFIXROUTE_LIMITS: line 1, column ")


# Files


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "\ufeff", "null\n"])
def test_an_empty_file_is_all_defaults(write: Write, text: str) -> None:
    assert load_settings(write(text), environ={}) == Settings()
    assert load_settings(write("", "config.json"), environ={}) == Settings()


def test_yaml_and_json_mean_the_same(write: Write) -> None:
    table = {"listen": {"port": 1}, "fleet": {"instances": [{"url": "http://a:1", "models": ["m"]}]}, "admin": None}
    text = json.dumps(table, indent="\t")
    from_json = load_settings(write(text, "config.JSON"), environ={})
    assert from_json == load_settings(write(yaml.safe_dump(table)), environ={})
    assert from_json.fleet.instances[0].models == ("m",)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("08080", 8080),
        ("0x1F", 31),
        ("0o17", 15),
        ("-5", -5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'true'", "true"),
        ("true", True),
        ("~", None),
        (".nan", ".nan"),
        ("|\n  12\n", "12\n"),
        ("[1, a, {b: c}]", [1, "a", {"b": "c"}]),
        ("<<: 1", {"<<": 1}),
        ("", None),
    ],
)
def test_yaml_is_read_as_yaml_1_2(text: str, value: object) -> None:
    read = parse_yaml(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "listen:\n  port: [1\nadmin: 2\n", "line 3, column 6: not YAML: "),
        ("a.yaml", "listen:\n\tport: 1\n", "line 2, column 1: not YAML: "),
        ("a.yaml", "a: 1\nb: 2\na: 3\n", "line 3, column 1: 'a' is set twice (keep one)"),
        ("a.yaml", "a: {b: 1, 'b': 2}", "line 1, column 11: 'b' is set twice (keep one)"),
        ("a.yaml", "a: &x [1]\nb: *x\n", "line 2, column 4: alias *x is not supported (write the value out)"),
        ("a.yaml", "a: !!int 3", "line 1, column 4: tags (words that begin with !) are not supported"),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]", "line 1, column 4: tags "),
        ("a.yaml", "a: 1\n---\nb: 1\n", "line 2, column 1: a second document begins (keep one)"),
        ("a.yaml", "1: 2", "line 1, column 1: a key must be text (put it in quotes)"),
        ("a.yaml", "? [a]\n: 1", "line 1, column 3: a key must be text"),
        ("a.yaml", "a: 1e999", "line 1, column 4: has a number too large to hold"),
        ("a.yaml", "a: " + "9" * 5000, "line 1, column 4: has a whole number of more than 100 digits"),
        ("a.yaml", "a: 0x" + "f" * 5000, "line 1, column 4: has a whole number of more than 100 digits"),
        ("a.yaml", "a: 1\nb: \x00", "line 2: not text: it has the character U+0000"),
        ("a.yaml", 'a: "\\UFFFFFFFF"', "not YAML: it has an escape for a character that does not exist"),
        ("a.yaml", "[" * 20_000, "line 1, column 66: is nested too deeply"),
        ("a.yaml", "- a", "must be a table of settings such as 'listen: {port: 8080}', not a list"),
        ("a.yaml", "text", "must be a table of settings such as 'listen: {port: 8080}', not a single value"),
        ("a.json", '{"a": 1\n"b": 2}', "line 2, column 1: not JSON: "),
        ("a.json", '{"a": 1, "a": 2}', "'a' is set twice in one object (keep one)"),
        ("a.json", '{"a": NaN}', "has NaN for a number"),
        ("a.json", '{"a": 1e999}', "has a number too large to hold"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "has a whole number of more than 100 digits"),
        ("a.json", "[" * 200_000, "is nested too deeply"),
        ("a.json", "[]", "must be a table of settings"),
        ("a.yaml", b"\x7fELF\xff\xfe", "is not UTF-8 text (byte 4)"),
        ("a.yaml", b"#" * (MAX_FILE_BYTES + 1), "is longer than 1 MiB"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_one_line(
    write: Write, name: str, text: str | bytes, message: str
) -> None:
    path = write(text, name)
    (line,) = problems_of(lambda: load_settings(path, environ={}))
    assert line.startswith(f"{path}: {message}")


def test_a_file_of_the_largest_size_is_read(write: Write) -> None:
    assert load_settings(write(b"#" * MAX_FILE_BYTES), environ={}) == Settings()


def test_a_small_file_cannot_grow_large(write: Write) -> None:
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    (line,) = problems_of(lambda: load_settings(write("\n".join(lines)), environ={}))
    assert "alias *a0 is not supported" in line


def test_files_that_are_no_files(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    assert problems_of(lambda: load_settings(missing, environ={})) == [f"{missing}: no such file"]
    assert problems_of(lambda: load_settings(tmp_path, environ={})) == [
        f"{tmp_path}: is a directory (name the file in it)"
    ]
    (line,) = problems_of(lambda: load_settings(EXAMPLE / "below", environ={}))
    assert "cannot be read: Not a directory" in line
    (line,) = problems_of(lambda: load_settings(tmp_path / "a\x00b", environ={}))
    assert "cannot be read: " in line


# Wrong settings


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"routing": {"stratgy": "x"}}, "routing.stratgy: unknown setting; did you mean 'strategy'?"),
        ({"Listen": {}}, "Listen: unknown setting; did you mean 'listen'?"),
        ({"tls": {}}, f"tls: unknown setting (known here: {', '.join(Settings.model_fields)})"),
        ({"log": {"x\ny": 1}}, r"log.'x\ny': unknown setting (known here: format, level, access, client_address)"),
        (
            {"listen": {"x" * 99: 1}},
            f"listen.{'x' * 60}…: unknown setting (known here: host, port, tls, api_keys_file, cors)",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a", "weights": 1}]}},
            (
                "fleet.instances[0].weights: unknown setting "
                "(known here: url, name, models, api_key_env, api_key_file, tls, capacity_tokens, kv_events)"
            ),
        ),
        (
            {"routing": {"strategy": "round-robin"}},
            (
                "routing.strategy: must be one of random, round_robin, least_outstanding_requests, prefix_aware, "
                "session, kv_aware, expected_latency, custom, not 'round-robin'; did you mean 'round_robin'?"
            ),
        ),
        (
            {"log": {"level": "INFO"}},
            "log.level: must be one of debug, info, warning, error, not 'INFO'; did you mean 'info'?",
        ),
        ({"log": {"format": 1}}, "log.format: must be one of text, json, not 1"),
        ({"log": {"format": None}}, "log.format: must be one of text, json, not null (leave it out for the default)"),
        ({"log": {"access": "no"}}, "log.access: must be true or false, not 'no'"),
        ({"log": {"access": 1}}, "log.access: must be true or false, not 1"),
        ({"listen": {"port": "8080"}}, "listen.port: must be a whole number, not '8080'"),
        ({"listen": {"port": True}}, "listen.port: must be a whole number, not true"),
        ({"listen": {"port": 80.5}}, "listen.port: must be a whole number, not 80.5"),
        ({"listen": {"port": 65_536}}, "listen.port: must be at most 65535, not 65536"),
        ({"listen": {"port": None}}, "listen.port: must be a whole number, not null (leave it out for the default)"),
        ({"listen": {"port": 10**5000}}, "listen.port: must be at most 65535, not a number"),
        ({"listen": 8080}, "listen: must be a table of settings, not a number"),
        ({"fleet": {"instances": object()}}, "fleet.instances: must be a list, not something else"),
        ({"fleet": {"instances": {"url": "x"}}}, "fleet.instances: must be a list, not a table"),
        ({"fleet": {"instances": [["x"]]}}, "fleet.instances[0]: must be a table of settings, not a list"),
        ({"fleet": {"instances": [{}]}}, "fleet.instances[0].url: is required"),
        ({"drain_timeout_s": True}, "drain_timeout_s: must be a number, not true"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s: must be a finite number"),
        ({"drain_timeout_s": float("inf")}, "drain_timeout_s: must be a finite number"),
        ({"drain_timeout_s": -1}, "drain_timeout_s: must be at least 0, not -1"),
        ({"upstream": {"connect_timeout_s": 0}}, "upstream.connect_timeout_s: must be more than 0, not 0"),
        ({"routing": {"hash_seed": 2**64}}, f"routing.hash_seed: must be at most {2**64 - 1}, not {2**64}"),
        ({"routing": {"custom": {"options": []}}}, "routing.custom.options: must be a table, not a list"),
        (
            {"routing": {"custom": {"factory": "make"}}},
            "routing.custom.factory: must be written package.module:make",
        ),
        (
            {"routing": {"shadow": ["session", "custom"]}},
            "routing.custom.factory: is required when routing.shadow names custom (write package.module:make)",
        ),
        (
            {"routing": {"shadow": ["session", "expected_latency"]}},
            "routing.shadow[1]: is routing.strategy itself (name another one)",
        ),
        ({"routing": {"shadow": ["random", "random"]}}, "routing.shadow[1]: is there twice"),
        (
            {"routing": {"strategy": "custom"}},
            "routing.custom.factory: is required when routing.strategy is custom (write package.module:make)",
        ),
        (
            {"fleet": {"health": {"eject_s": 60}}},
            "fleet.health.eject_max_s: must be at least eject_s, which is 60",
        ),
        (
            {"listen": {"port": 9190}},
            "admin.port: 9190 is also listen.port (choose another, or admin: null)",
        ),
        (
            {"listen": {"host": "0.0.0.0", "port": 9190}},
            "admin.port: 9190 is also listen.port (choose another, or admin: null)",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a", "models": []}]}},
            "fleet.instances[0].models: must not be an empty list (leave it out for the default)",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a", "models": ["m", " "]}]}},
            "fleet.instances[0].models[1]: must not be empty",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a", "name": 1}]}},
            "fleet.instances[0].name: must be text (put it in quotes), not a number",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a", "name": "a b"}]}},
            "fleet.instances[0].name: must be 1 to 64 characters out of A-Z a-z 0-9 . _ : - [ ]",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a", "name": "none"}]}},
            "fleet.instances[0].name: must not be none or other, which mean something else in metrics",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a", "name": "other"}]}},
            "fleet.instances[0].name: must not be none or other, which mean something else in metrics",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a:1"}, {"url": "http://localhost:8080"}]}},
            "fleet.instances[1].url: is this router itself (listen.port is 8080; change one of them)",
        ),
        (
            {"listen": {"host": "::"}, "fleet": {"instances": [{"url": "http://[::1]:8080"}]}},
            "fleet.instances[0].url: is this router itself (listen.port is 8080; change one of them)",
        ),
        (
            {"fleet": {"instances": [{"url": "http://127.0.0.1:9190"}]}},
            "fleet.instances[0].url: is this router itself (admin.port is 9190; change one of them)",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a:1"}, {"url": "http://b:1"}, {"url": "HTTP://A:1/"}]}},
            "fleet.instances[2].url: http://a:1 is also the url of fleet.instances[0] (list each server once)",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a:1"}, {"url": "http://b:1", "name": "a:1"}]}},
            "fleet.instances[1].name: 'a:1' is also the name of fleet.instances[0] (give each its own name)",
        ),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(table: dict[str, Any], line: str) -> None:
    assert problem(table) == line


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("listen.host", ""),
        ("listen.host", "a b"),
        ("listen.host", "[::1]"),
        ("listen.host", "localhost:80"),
        ("fleet.health.path", "health"),
        ("fleet.health.path", "/a b"),
        ("fleet.health.path", "/a#b"),
        ("fleet.health.fall", 0),
        ("fleet.health.interval_s", 0),
        ("routing.block_tokens", 15),
        ("routing.block_tokens", 4097),
        ("routing.hash_seed", -1),
        ("routing.default_capacity_tokens", 0),
        ("routing.expected_latency.position_scale_tokens", 0),
        ("routing.expected_latency.rate_decay", 1.1),
        ("routing.expected_latency.rate_weight_s", 0),
        ("routing.expected_latency.head_progress_cap", 1.1),
        ("routing.prefix_aware.prefix_length", 1023),
        ("routing.prefix_aware.prefix_length", 65_537),
        ("routing.prefix_aware.concurrency_threshold", 0),
        ("routing.prefix_aware.concurrency_threshold", 1025),
        ("routing.kv_aware.concurrency_threshold", 0),
        ("routing.session.header", "x session"),
        ("routing.session.bounded_load", 0.9),
        ("routing.custom.factory", "a-b:make"),
        ("routing.custom.factory", "a.b:make()"),
        ("tokenizer.kind", "sentencepiece"),
        ("retry.max_attempts", 0),
        ("retry.budget_ratio", 1.1),
        ("retry.unanswered", "always"),
        ("limits.max_body_bytes", 0),
        ("limits.wait_for_instance_s", 1e300),
        ("engine_control", True),
        ("response_headers", "true"),
    ],
)
def test_values_out_of_bounds_are_refused_where_they_are(path: str, value: object) -> None:
    assert problem(nested(path, value)).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("listen.host", "0.0.0.0"),
        ("listen.host", "::"),
        ("listen.host", "router.internal"),
        ("listen.port", 0),
        ("fleet.health.path", "/healthz?deep=1"),
        ("routing.hash_seed", 2**64 - 1),
        ("routing.custom.factory", "package.sub_module:make"),
        ("upstream.idle_timeout_s", None),
        ("limits.wait_for_instance_s", 0),
        ("limits.max_waiting", 0),
        ("retry.budget_ratio", 1),
        ("drain_timeout_s", 0),
    ],
)
def test_values_at_the_edge_are_taken(path: str, value: object) -> None:
    here: Any = from_table(nested(path, value))
    for key in path.split("."):
        here = getattr(here, key)
    assert here == value


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_every_strategy_can_be_named(strategy: str) -> None:
    table = {"routing": {"strategy": strategy, "custom": {"factory": "a:b"}}}
    assert from_table(table).routing.strategy == strategy


def test_both_planes_may_take_a_free_port_or_one_port_on_different_addresses() -> None:
    from_table({"listen": {"port": 0}, "admin": {"port": 0}})
    from_table({"listen": {"port": 1, "host": "10.0.0.1"}, "admin": {"port": 1}})
    from_table({"listen": {"port": 9190}, "admin": None})


def test_all_problems_are_told_at_once_up_to_a_bound() -> None:
    lines = problems_of(lambda: from_table({"listen": {"port": -1}, "retry": {"max_attempts": 0}, "x": 1}))
    assert len(lines) == 3
    lines = problems_of(lambda: from_table(dict.fromkeys(map(str, range(1000)), 1)))
    assert len(lines) == MAX_PROBLEMS + 1
    assert lines[-1] == f"and {1000 - MAX_PROBLEMS} more problems"


def test_header_names_have_no_case() -> None:
    assert from_table(nested("routing.session.header", "X-Chat-ID")).routing.session.header == "x-chat-id"


# Instances


@pytest.mark.parametrize(
    ("text", "url", "name"),
    [
        ("http://gpu-a:8000", "http://gpu-a:8000", "gpu-a:8000"),
        ("http://gpu-a:8000/", "http://gpu-a:8000", "gpu-a:8000"),
        ("HTTP://GPU-A:08000//", "http://gpu-a:8000", "gpu-a:8000"),
        ("http://gpu-a", "http://gpu-a", "gpu-a:80"),
        ("http://gpu-a:80", "http://gpu-a", "gpu-a:80"),
        ("https://gpu-a:443/base/", "https://gpu-a/base", "gpu-a:443"),
        ("https://gpu-a:80", "https://gpu-a:80", "gpu-a:80"),
        ("http://model_server_1:8000", "http://model_server_1:8000", "model_server_1:8000"),
        ("http://10.0.0.1:1", "http://10.0.0.1:1", "10.0.0.1:1"),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:8000"),
        ("http://[0:0::1]", "http://[::1]", "[::1]:80"),
        ("http://a.b.svc.cluster.local.:1/A%20b", "http://a.b.svc.cluster.local.:1/A%20b", "a.b.svc.cluster.local.:1"),
        (f"http://{'a' * 60}.example:8000", f"http://{'a' * 60}.example:8000", "a" * 59 + ":8000"),
        ("unix:/run/vllm.sock", "unix:/run/vllm.sock", "unix:vllm.sock"),
        ("UNIX:///run/v@1.sock", "unix:/run/v@1.sock", "unix:v-1.sock"),
        (f"unix:/{'a' * 99}", f"unix:/{'a' * 99}", f"unix:{'a' * 59}"),
    ],
)
def test_urls_have_one_spelling_and_give_a_name(text: str, url: str, name: str) -> None:
    settings = from_table({"fleet": {"instances": [{"url": text}]}})
    (instance,) = settings.fleet.instances
    assert (instance.url, instance.name) == (url, name)
    assert instances_from_urls([text]) == [{"url": url}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu-a:8000", "has no scheme (write http://gpu-a:8000)"),
        ("gpu-a", "has no scheme (write http://gpu-a)"),
        ("10.0.0.1:8000/base", "has no scheme (write http://10.0.0.1:8000/base)"),
        ("http:/gpu-a", "has no scheme (write http://HOST:PORT)"),
        ("", "has no scheme (write http://HOST:PORT)"),
        ("grpc://gpu-a", "must begin with http:// or https://"),
        ("http://", "has no host (write http://HOST:PORT)"),
        ("http://:8000", "has no host (write http://HOST:PORT)"),
        ("http:///base", "has no host (write http://HOST:PORT)"),
        ("http://::1:8000", "has a malformed host (an IPv6 address goes in brackets: http://[::1]:8000)"),
        ("http://[::1", "has a malformed host"),
        ("http://[::g]", "has no valid IPv6 address in its brackets"),
        ("http://[fe80::1%eth0]", "has an IPv6 address with a zone"),
        ("http://10.0.0.256", "has no valid IPv4 address"),
        ("http://8000", "has no valid IPv4 address"),
        ("http://gpu a", "has a host name with characters that host names do not have"),
        ("http://gpü", "has a host name with characters that host names do not have"),
        ("http://a..b", "has a host name with characters that host names do not have"),
        ("http://a,http://b", "has a host name with characters"),
        ("http://gpu-a:", "has a bad port (a number from 1 to 65535)"),
        ("http://gpu-a:0", "has a bad port (a number from 1 to 65535)"),
        ("http://gpu-a:65536", "has a bad port (a number from 1 to 65535)"),
        ("http://gpu-a:٣", "has a bad port (a number from 1 to 65535)"),
        ("http://gpu-a:80\n", "has a bad port (a number from 1 to 65535)"),
        ("http://gpu-a/?x=1", "has a query or fragment (remove it, from ? or # on)"),
        ("http://gpu-a#x", "has a query or fragment (remove it, from ? or # on)"),
        ("http://gpu-a/a b", "has a malformed path"),
        ("http://gpu-a/a//b", "has a malformed path"),
        ("http://gpu-a/../b", "has a malformed path"),
        ("http://gpu-a:8000/v1", "ends in /v1, which the paths of requests bring along (leave it out)"),
        ("http://gpu-a:8000/base/v1/", "ends in /v1"),
        ("unix:vllm.sock", "has no absolute path of a socket (write unix:/run/vllm.sock)"),
        ("unix://run/vllm.sock", "has no absolute path of a socket"),
        ("unix:/", "has no absolute path of a socket"),
        ("unix:/run/a b", "has no absolute path of a socket"),
        (f"unix:/{'a' * 107}", "has a path of more than 107 bytes, which sockets cannot have"),
    ],
)
def test_a_bad_url_is_told_what_to_do(text: str, message: str) -> None:
    assert problem({"fleet": {"instances": [{"url": text}]}}).startswith(f"fleet.instances[0].url: {message}")
    (line,) = problems_of(lambda: instances_from_urls(["http://fine", text]))
    assert f": {message}" in line


@pytest.mark.parametrize(
    "table",
    [
        {"fleet": {"instances": [{"url": "http://me:hunter2@gpu-a"}]}},
        {"fleet": {"instances": [{"url": "me:hunter2@gpu-a:8000"}]}},
        {"fleet": {"instances": [{"url": "http://gpu-a/?key=hunter2"}]}},
        {"fleet": {"instances": [{"url": "http://a:hunter2@gpu-a", "name": "hunter2 "}]}},
        {"fleet": {"instances": ["http://me:hunter2@gpu-a"]}},
        {"fleet": {"instances": "http://me:hunter2@gpu-a"}},
        {"fleet": "http://me:hunter2@gpu-a"},
        {"fleet": {"instances": [{"url": "http://gpu-a", "api_key": "hunter2"}]}},
        {"fleet": {"instances": [{"url": "http://gpu-a", "api_key_env": "hunter2"}]}},
        {"fleet": {"instances": [{"url": "http://gpu-a", "api_key_env": ["hunter2"]}]}},
        {"fleet": {"instances": [{"url": "http://gpu-a", "api_key_file": "hunter2"}]}},
        {"fleet": {"instances": [{"url": "http://gpu-a", "api_key_file": "-----BEGIN\nhunter2"}]}},
        {"listen": {"api_keys_file": "hunter2"}},
        {"admin": {"token_env": "hunter2"}},
        {"admin": {"token_file": "hunter2"}},
        {"admin": {"token": "hunter2"}},
    ],
)
def test_secrets_in_the_wrong_place_are_not_repeated(table: dict[str, Any]) -> None:
    assert "hunter2" not in "\n".join(problems_of(lambda: from_table(table)))


def test_a_password_on_the_command_line_is_not_repeated() -> None:
    lines = problems_of(lambda: instances_from_urls(["http://a", "http://me:hunter2@b", "c:1"]))
    assert lines[0].startswith("URL 2: holds a user name or password (remove it; put the key ")
    assert lines[1] == "c:1: has no scheme (write http://c:1)"
    assert "hunter2" not in "".join(lines)


def with_key(name: str) -> dict[str, Any]:
    return {"fleet": {"instances": [{"url": "http://a"}, {"url": "http://b", "api_key_env": name}]}}


def test_keys_come_from_the_environment_and_stay_out_of_settings() -> None:
    environ = {"VLLM_KEY": "hunter2\n"}
    settings = from_table(with_key("VLLM_KEY"), environ)
    assert [api_key(instance, environ) for instance in settings.fleet.instances] == [None, "hunter2"]
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in settings.model_dump_json()


@pytest.mark.parametrize("environ", [{}, {"VLLM_KEY": ""}, {"VLLM_KEY": " \n"}])
def test_a_key_that_is_not_set_names_its_variable(environ: dict[str, str]) -> None:
    assert problems_of(lambda: from_table(with_key("VLLM_KEY"), environ)) == [
        (
            "fleet.instances[1].api_key_env: the environment variable VLLM_KEY is not set "
            "(set it to the key, or leave api_key_env out)"
        )
    ]


@pytest.mark.parametrize("key", ["hunter2\nx-evil: 1", "hünter2", "hunter\x002"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key: str) -> None:
    (line,) = problems_of(lambda: from_table(with_key("VLLM_KEY"), {"VLLM_KEY": key}))
    assert line == (
        "fleet.instances[1].api_key_env: the environment variable VLLM_KEY has characters that a header cannot carry"
    )


@pytest.mark.parametrize("name", ["lower", "A-B", "1A", "", "A" * 129, "PREFIXROUTE_KEY"])
def test_names_of_key_variables_are_checked(name: str) -> None:
    assert problem(with_key(name)).startswith("fleet.instances[1].api_key_env: must ")


def test_serving_needs_an_instance() -> None:
    (line,) = problems_of(lambda: require_instances(Settings()))
    assert line.startswith("fleet.instances: no instance to route to (list at least one")
    require_instances(from_table({"fleet": {"instances": instances_from_urls(["http://a:1"])}}))


def test_config_errors_end_the_command_with_2() -> None:
    with pytest.raises(ConfigError) as caught:
        from_table({"x": 1})
    assert caught.value.exit_code == 2


# Anything at all

KEYS = st.sampled_from(sorted({path.rpartition(".")[2] for path, _ in fields(Settings)})) | st.text(max_size=5)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=0).map(lambda n: 10 ** (n % 400))
    | st.floats()
    | st.text()
    | st.sampled_from([*get_args(Strategy), "auto", "http://a:1", "http://u:p@a", "A_KEY", "package.module:make"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=20
)


def table_of(model: type[Table]) -> st.SearchStrategy[dict[str, Any]]:
    """Tables with the right keys, and now and then a right shape below them."""
    shapes: dict[str, st.SearchStrategy[Any]] = {}
    for key, field in fields_by_key(model).items():
        inner = table_in(field.annotation)
        shape = st.just({}) if inner is None else table_of(inner)
        shapes[key] = VALUES | (st.lists(shape, max_size=3) if get_origin(field.annotation) is tuple else shape)
    return st.fixed_dictionaries({}, optional=shapes)


def is_loaded_or_refused(load: Callable[[], Settings]) -> None:
    try:
        settings = load()
    except ConfigError as error:
        lines = str(error).split("\n")
        assert 0 < len(lines) <= MAX_PROBLEMS + 1
        assert all(line.strip() and line.isprintable() for line in lines)
        str(error).encode()
    else:
        assert isinstance(settings, Settings)


@given(st.dictionaries(KEYS, VALUES) | table_of(Settings))
def test_any_table_is_loaded_or_refused(table: dict[str, Any]) -> None:
    is_loaded_or_refused(lambda: from_table(table))


@given(VALUES | table_of(Settings))
def test_any_json_file_is_loaded_or_refused(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    for name in ("config.json", "config.yaml"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_text(json.dumps(value))
        is_loaded_or_refused(lambda path=path: load_settings(path, environ={}))  # type: ignore[misc]


YAML_WORDS = ["- ", ": ", "\n", "  ", "[", "]", "{", "}", "'", '"', "&a ", "*a", "!!str ", "|", ">", "? ", "%", "#"]


@given(
    st.binary()
    | st.text().map(str.encode)
    | st.lists(st.sampled_from(YAML_WORDS) | KEYS | st.text("019eE.-+_xo~\\uUx", max_size=4)).map(
        lambda words: "".join(words).encode()
    )
)
def test_any_file_is_loaded_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    for name in ("config.json", "config.yaml"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(data)
        is_loaded_or_refused(lambda path=path: load_settings(path, environ={}))  # type: ignore[misc]


VARIABLES = st.sampled_from(["PREFIXROUTE_" + path.upper().replace(".", "__") for path, _ in fields(Settings)])


@given(
    st.dictionaries(
        VARIABLES | st.text().map("PREFIXROUTE_".__add__),
        st.text() | SCALARS.map(str) | st.lists(st.sampled_from(YAML_WORDS)).map("".join),
    )
)
def test_any_environment_is_loaded_or_refused(environ: dict[str, str]) -> None:
    is_loaded_or_refused(lambda: load_settings(None, environ=environ))


FINITE_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**90), 10**90)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    # YAML allows a key 1024 characters, as they are escaped.
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=50), inner),
    max_leaves=10,
)


@given(FINITE_JSON)
def test_what_json_means_yaml_means_too(value: object) -> None:
    text = json.dumps(value)
    assert parse_json(text) == value
    assert parse_yaml(text) == value


@given(st.text() | st.from_regex(r"https?://[a-z0-9.\[\]:@_-]{1,20}(/[a-z0-9./?#%]*)?", fullmatch=True))
def test_a_url_is_refused_or_has_a_spelling_that_stays(text: str) -> None:
    try:
        url = instance_url(text)
    except ValueError:
        return
    assert instance_url(url) == url
    assert re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,64}", instance_name(url))
    assert InstanceSettings(url=text).name == instance_name(url)


# Security


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_the_admin_plane_on_this_machine_needs_no_token(host: str) -> None:
    from_table({"admin": {"host": host}})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "router.internal"])
def test_the_admin_plane_for_other_machines_needs_a_token(host: str) -> None:
    assert problem({"admin": {"host": host}}) == (
        f"admin.host: {host} can be reached from other machines, which needs a token "
        "(set admin.token_env or admin.token_file; or 127.0.0.1, or admin: null)"
    )
    environ = {"TOKEN": "t0ken\n"}
    admin = from_table({"admin": {"host": host, "token_env": "TOKEN"}}, environ).admin
    assert admin is not None
    assert admin_token(admin, environ) == "t0ken"


def test_secrets_come_from_files_too(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2\n")
    settings = from_table(
        {
            "admin": {"token_file": str(file)},
            "fleet": {"instances": [{"url": "http://a", "api_key_file": str(file)}]},
        }
    )
    assert settings.admin is not None
    assert admin_token(settings.admin, {}) == api_key(settings.fleet.instances[0], {}) == "hunter2"
    assert "hunter2" not in repr(settings)
    file.write_text(" \n")
    assert problems_of(lambda: from_table({"admin": {"token_file": str(file)}})) == [
        f"admin.token_file: the file {file} is empty (write the token into it)"
    ]


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            {"fleet": {"instances": [{"url": "http://a", "api_key_env": "K", "api_key_file": "k"}]}},
            "fleet.instances[0].api_key_file: is set beside api_key_env (keep one of them)",
        ),
        (
            {"admin": {"token_env": "K", "token_file": "k"}},
            "admin.token_file: is set beside token_env (keep one of them)",
        ),
        (
            {"fleet": {"instances": [{"url": "http://a", "tls": {}}]}},
            "fleet.instances[0].tls: is for a url that begins with https:// (change the url, or leave tls out)",
        ),
        (
            {"fleet": {"instances": [{"url": "https://a", "tls": {"key_file": "k"}}]}},
            "fleet.instances[0].tls.key_file: needs cert_file, whose key it is",
        ),
        (
            {"fleet": {"instances": [{"url": "https://a", "tls": {"server_name": "a b"}}]}},
            "fleet.instances[0].tls.server_name: must be a host name",
        ),
        ({"listen": {"tls": {"cert_file": "c"}}}, "listen.tls.key_file: is required"),
        ({"listen": {"cors": {}}}, "listen.cors.allow_origins: is required"),
        (
            {"listen": {"cors": {"allow_origins": ["https://a/"]}}},
            "listen.cors.allow_origins[0]: must be SCHEME://HOST[:PORT] in lower case, without a path, or '*'",
        ),
        (
            {"listen": {"cors": {"allow_origins": ["*", "https://a"]}}},
            "listen.cors.allow_origins: has '*', which is every page, and others (keep one or the other)",
        ),
        (
            {"listen": {"cors": {"allow_origins": ["*"], "allow_credentials": True}}},
            "listen.cors.allow_credentials: needs the origins named in allow_origins, not '*'",
        ),
        (
            {"listen": {"cors": {"allow_origins": ["*"], "allow_headers": ["a: b"]}}},
            "listen.cors.allow_headers[0]: must be a name such as content-type",
        ),
        (
            {"limits": {"per_key_in_flight": 1}},
            (
                "limits.per_key_in_flight: needs listen.api_keys_file or sagemaker.access_keys_file, "
                "which say what keys there are"
            ),
        ),
        (
            {"routing": {"isolate_by": "api_key"}, "fleet": {"instances": [{"url": "http://a", "kv_events": "auto"}]}},
            (
                "routing.isolate_by: cannot be api_key while an instance has kv_events "
                "(turn them off, or have clients send a cache_salt and leave this out)"
            ),
        ),
    ],
)
def test_a_wrong_setting_of_security_is_told_in_one_line(table: dict[str, Any], line: str) -> None:
    assert problem(table) == line


class Certificates:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ca = trustme.CA()
        one, other = ca.issue_cert("a"), ca.issue_cert("b")
        self.cert = self.write("cert.pem", one.cert_chain_pems[0].bytes())
        self.key = self.write("key.pem", one.private_key_pem.bytes())
        self.other_key = self.write("other.pem", other.private_key_pem.bytes())
        self.ca = self.write("ca.pem", ca.cert_pem.bytes())
        self.rubbish = self.write("rubbish.pem", b"hunter2")
        self.broken = self.write("broken.pem", b"-----BEGIN CERTIFICATE-----\nhunter2\n-----END CERTIFICATE-----\n")
        self.encrypted = self.write("encrypted.pem", b"")
        run = ["openssl", "pkey", "-in", self.key, "-aes256", "-passout", "pass:x", "-out", self.encrypted]
        subprocess.run(run, check=True, capture_output=True)

    def write(self, name: str, content: bytes) -> str:
        path = self.folder / name
        path.write_bytes(content)
        return str(path)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def test_good_certificates_are_taken(certificates: Certificates) -> None:
    c = certificates
    tls = {"cert_file": c.cert, "key_file": c.key, "client_ca_file": c.ca}
    instance_tls = {"cert_file": c.cert, "key_file": c.key, "ca_file": c.ca}
    from_table(
        {
            "listen": {"tls": tls},
            "admin": {"tls": tls},
            "fleet": {"instances": [{"url": "https://a", "tls": instance_tls}]},
        }
    )


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"cert_file": "nowhere"}, "cert_file: nowhere: no such file"),
        ({"cert_file": "{rubbish}"}, "cert_file: {rubbish}: holds no certificate (PEM)"),
        ({"cert_file": "{key}"}, "cert_file: {key}: holds no certificate (PEM)"),
        ({"key_file": "{cert}"}, "key_file: {cert}: holds no private key (PEM)"),
        ({"key_file": "{other_key}"}, "key_file: {other_key}: is not the key of {cert}"),
        ({"key_file": "{encrypted}"}, "key_file: {encrypted}: is encrypted (write it out without a password)"),
        ({"client_ca_file": "{rubbish}"}, "client_ca_file: {rubbish}: holds no certificate (PEM)"),
        ({"client_ca_file": "{broken}"}, "client_ca_file: {broken}: cannot be used ("),
        ({"cert_file": "{folder}"}, "cert_file: {folder}: is a directory (name the file in it)"),
    ],
)
def test_a_bad_certificate_is_told_in_one_line(certificates: Certificates, files: dict[str, str], line: str) -> None:
    names = {name: str(value) for name, value in vars(certificates).items()}
    tls = {"cert_file": certificates.cert, "key_file": certificates.key}
    tls |= {name: path.format(**names) for name, path in files.items()}
    assert problem({"listen": {"tls": tls}}).startswith(f"listen.tls.{line.format(**names)}")


# Paths


def test_every_path_of_a_file_counts_from_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of variables and of the command line from the working directory, as everywhere."""
    home = tmp_path / "etc"
    home.mkdir()
    (home / "keys").write_text("sk-0123456789abcdef\n")
    (home / "token").write_text("t0ken")
    monkeypatch.chdir(tmp_path)
    Path("env-token").write_text("t0ken")
    path = Path("etc", "router.json")
    path.write_text(
        json.dumps(
            {
                "listen": {"api_keys_file": "keys"},
                "admin": {"token_file": f"{home}/token"},
                "fleet": {"instances": [{"url": "http://a", "api_key_file": "../etc/token"}]},
                "tokenizer": {"path": "model", "chat_template": "chat.jinja"},
                "recording": {"path": "rec.jsonl", "key_file": "rec.key"},
            }
        )
    )
    settings = load_settings(path, environ={})
    assert settings.listen.api_keys_file == f"{home}/keys"
    assert settings.admin is not None
    assert settings.admin.token_file == f"{home}/token"
    assert settings.fleet.instances[0].api_key_file == f"{home}/../etc/token"
    assert (settings.tokenizer.path, settings.tokenizer.chat_template) == (f"{home}/model", f"{home}/chat.jinja")
    assert settings.recording is not None
    assert (settings.recording.path, settings.recording.key_file) == (f"{home}/rec.jsonl", f"{home}/rec.key")
    settings = load_settings(
        path,
        environ={"PREFIXROUTE_ADMIN__TOKEN_FILE": "env-token"},
        overrides={"recording": {"path": "rec.jsonl"}},
    )
    assert settings.admin is not None
    assert settings.admin.token_file == "env-token"
    assert settings.recording is not None
    assert (settings.recording.path, settings.recording.key_file) == ("rec.jsonl", f"{home}/rec.key")


def test_no_setting_that_is_a_path_is_left_out() -> None:
    """By their names: whoever adds one of them marks it as a path."""

    def fields(table: type[Table], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
        for name, field in table.model_fields.items():
            yield f"{above}{name}", field
            if (inner := table_in(field.annotation)) is not None:
                yield from fields(inner, f"{above}{name}.")

    named = {where for where, _ in fields(Settings) if where.endswith(("_file", ".path", ".chat_template"))}
    assert {where for where, field in fields(Settings) if is_path(field)} == named - {"fleet.health.path"}


def test_a_file_that_is_not_there_is_told_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "etc.yaml"
    path.write_text("listen: {tls: {cert_file: a.pem, key_file: a.key}}")
    (problem,) = problems_of(lambda: load_settings(path, environ={}))
    assert problem == f"listen.tls.cert_file: {tmp_path}/a.pem: no such file"
    variables = {"PREFIXROUTE_LISTEN__TLS__CERT_FILE": "a.pem", "PREFIXROUTE_LISTEN__TLS__KEY_FILE": "a.key"}
    (problem,) = problems_of(lambda: load_settings(None, environ=variables))
    assert problem == f"listen.tls.cert_file: a.pem: no such file in the working directory, {tmp_path}"
    # What is wrong as written stays wrong.
    path.write_text("listen: {tls: {cert_file: folder/, key_file: ''}}")
    assert problems_of(lambda: load_settings(path, environ={})) == [
        "listen.tls.cert_file: must be the path of a file",
        "listen.tls.key_file: must be the path of a file",
    ]
