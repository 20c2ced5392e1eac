"""The command's answers that need no running router: help, checks, and one clear line for whatever is wrong.

In this process; what takes a process of its own is in tests/e2e.
"""

import errno
import io
import json
import os
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, get_args

import pytest
from rich.console import Console

from prefixroute import __version__, cli
from prefixroute.config import Strategy
from prefixroute.exact_tokens import setup
from prefixroute.explain import show, show_ladder

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")
STRATEGIES = ", ".join(get_args(Strategy))
SECRET = "sk-1234567890abcdef"


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a command."""

    code: int
    out: str
    err: str


class Shell:
    """Runs commands, in an environment and a directory of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path) -> None:
        self.monkeypatch = monkeypatch
        self.home = home
        self._capsys = capsys

    def run(self, *arguments: str, stdin: bytes = b"") -> Ran:
        self.monkeypatch.setattr(sys, "argv", ["prefixroute", *arguments])
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert isinstance(code, int)
        written = self._capsys.readouterr()
        return Ran(code, written.out, written.err)

    def file(self, text: str | bytes, name: str = "config.yaml") -> str:
        """The path of a new file, from where commands run."""
        path = self.home / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return name


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    for name in os.environ:
        if name.startswith(("PREFIXROUTE_", "SAGEMAKER_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    # Help is laid out for a terminal of this width.
    monkeypatch.setenv("COLUMNS", "120")
    return Shell(monkeypatch, capsys, tmp_path)


# Help


def test_the_version(shell: Shell) -> None:
    assert shell.run("--version") == Ran(0, f"prefixroute {__version__}\n", "")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(shell: Shell, flag: str) -> None:
    ran = shell.run(flag)
    assert (ran.code, ran.err) == (0, "")
    for command in ("serve", "check", "explain"):
        assert f" {command} " in ran.out


def test_what_a_terminal_cannot_show_is_replaced(shell: Shell) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    shell.monkeypatch.setattr(sys, "stdout", terminal)
    assert shell.run("--version").code == 0
    assert terminal.errors == "replace"


def test_it_works_with_closed_streams(shell: Shell) -> None:
    for name in ("stdout", "stderr"):
        shell.monkeypatch.setattr(sys, name, None)
    assert shell.run("check").code == 2
    assert shell.run("check", URLS[0]).code == 0
    for stream in (sys.stdout, sys.stderr):
        stream.close()


def test_without_a_command_there_is_help_and_a_code_that_scripts_notice(shell: Shell) -> None:
    ran = shell.run()
    assert ran.code == 2
    assert "serve" in ran.out + ran.err


@pytest.mark.parametrize("command", ["serve", "check", "explain"])
def test_each_command_has_help(shell: Shell, command: str) -> None:
    ran = shell.run(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert command in ran.out


def test_a_call_that_makes_no_sense_is_two_and_no_traceback(shell: Shell) -> None:
    for arguments in (("serves",), ("serve", "--port", "http"), ("serve", "--prot", "1"), ("explain",)):
        ran = shell.run(*arguments)
        assert ran.code == 2
        assert "Traceback" not in ran.err


# Configuration: `serve` and `check` say the same


@pytest.fixture(params=["serve", "check"])
def command(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def refused(ran: Ran, line: str) -> None:
    assert ran == Ran(2, "", f"prefixroute: {line}\n")


def test_a_check_says_which_endpoints_there_are(shell: Shell) -> None:
    config = shell.file(
        """
fleet: {instances: [{url: 'http://10.0.0.1:1', name: gpu-a}, {url: 'http://10.0.0.1:2', name: gpu-b}]}
sagemaker:
  endpoints:
    - EndpointName: bot
      ProductionVariants: [{VariantName: all}, {VariantName: one, Instances: [gpu-b]}]
      InferenceComponents: [{InferenceComponentName: lora, VariantName: all, Copies: [{Instance: m, Server: gpu-a}]}]
"""
    )
    said = shell.run("check", "--config", config)
    assert said == Ran(
        0,
        "ok: expected_latency over 2 instances\n"
        "    endpoint bot, all: RANDOM over all instances\n"
        "    endpoint bot, one: RANDOM over gpu-b\n"
        "    endpoint bot, lora: on gpu-a\n",
        "",
    )


def test_a_check_says_what_would_run(shell: Shell) -> None:
    assert shell.run("check", URLS[0]) == Ran(0, "ok: expected_latency over 1 instance\n", "")
    config = shell.file(
        f"fleet: {{instances: [{{url: '{URLS[0]}'}}, {{url: '{URLS[1]}'}}]}}\nrouting: {{strategy: random}}"
    )
    assert shell.run("check", "--config", config) == Ran(0, "ok: random over 2 instances\n", "")
    assert shell.run("check", "-c", config, URLS[0]) == Ran(0, "ok: random over 1 instance\n", "")
    shell.monkeypatch.setenv("PREFIXROUTE_ROUTING__STRATEGY", "session")
    assert shell.run("check", "-c", config) == Ran(0, "ok: session over 2 instances\n", "")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("routing: {stratgy: random}", "routing.stratgy: unknown setting; did you mean 'strategy'?"),
        (
            "routing: {strategy: expected_latncy}",
            f"routing.strategy: must be one of {STRATEGIES}, not 'expected_latncy'; did you mean 'expected_latency'?",
        ),
        ("listen: {port: 9190}", "admin.port: 9190 is also listen.port (choose another, or admin: null)"),
        ("listen: [1]", "listen: must be a table of settings, not a list"),
        ("- 1", "config.yaml: must be a table of settings such as 'listen: {port: 8080}', not a list"),
        (b"\xff\xfe", "config.yaml: is not UTF-8 text (byte 0)"),
    ],
)
def test_a_wrong_file_is_one_line(shell: Shell, command: str, text: str | bytes, line: str) -> None:
    refused(shell.run(command, URLS[0], "--config", shell.file(text)), line)


def test_a_broken_file_is_one_line_with_the_place(shell: Shell, command: str) -> None:
    ran = shell.run(command, "--config", shell.file("listen:\n  port: [1"))
    assert ran.code == 2
    (line,) = ran.err.splitlines()
    assert line.startswith("prefixroute: config.yaml: line ")


def test_a_file_that_cannot_be_read_is_one_line(shell: Shell, command: str) -> None:
    (shell.home / "loop").symlink_to("loop")
    for path, problem in (
        ("none.yaml", f"no such file in the working directory, {shell.home}"),
        (".", "is a directory (name the file in it)"),
        ("loop", f"cannot be read: {os.strerror(errno.ELOOP)}"),
        (f"{shell.file('', 'plain')}/config.yaml", "cannot be read: Not a directory"),
    ):
        refused(shell.run(command, "--config", path), f"{path}: {problem}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_one_line(shell: Shell, command: str) -> None:
    path = shell.file("")
    (shell.home / path).chmod(0)
    refused(shell.run(command, "--config", path), f"{path}: cannot be read: Permission denied")


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("gpu-a:8000", "gpu-a:8000: has no scheme (write http://gpu-a:8000)"),
        ("ftp://gpu-a", "ftp://gpu-a: must begin with http:// or https://"),
        ("http://gpu-a:99999", "http://gpu-a:99999: has a bad port (a number from 1 to 65535)"),
        (
            "http://gpu-a:8000/v1",
            "http://gpu-a:8000/v1: ends in /v1, which the paths of requests bring along (leave it out)",
        ),
        (
            URLS[0],
            f"fleet.instances[1].url: {URLS[0]} is also the url of fleet.instances[0] (list each server once)",
        ),
    ],
)
def test_a_wrong_url_is_one_line(shell: Shell, command: str, url: str, line: str) -> None:
    refused(shell.run(command, URLS[0], url), line)


def test_a_password_in_a_url_is_not_repeated(shell: Shell, command: str) -> None:
    ran = shell.run(command, URLS[0], f"http://user:{SECRET}@gpu-a:8000")
    assert ran.code == 2
    assert ran.err.startswith("prefixroute: URL 2: holds a user name or password")
    assert SECRET not in ran.err


def test_no_instance_is_one_line(shell: Shell, command: str) -> None:
    ran = shell.run(command)
    assert ran.code == 2
    assert ran.err.startswith("prefixroute: fleet.instances: no instance to route to (")
    assert ran.err.count("\n") == 1


def test_all_problems_are_told_at_once(shell: Shell, command: str) -> None:
    ran = shell.run(command, "--config", shell.file("listen: {prt: 1}\nadmn: null\nlimits: {max_waiting: -1}"))
    assert ran == Ran(
        2,
        "",
        "prefixroute: listen.prt: unknown setting; did you mean 'port'?\n"
        "             limits.max_waiting: must be at least 0, not -1\n"
        "             admn: unknown setting; did you mean 'admin'?\n",
    )


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        (
            "PREFIXROUTE_ROUTING__STRATGY",
            "random",
            "PREFIXROUTE_ROUTING__STRATGY: unknown setting; did you mean PREFIXROUTE_ROUTING__STRATEGY?",
        ),
        (
            "PREFIXROUTE_LISTEN__PORT",
            "high",
            "listen.port (from PREFIXROUTE_LISTEN__PORT): must be a whole number, not 'high'",
        ),
    ],
)
def test_the_environment_is_checked_too(shell: Shell, command: str, variable: str, value: str, line: str) -> None:
    shell.monkeypatch.setenv(variable, value)
    refused(shell.run(command, URLS[0]), line)


def test_a_containers_port_is_checked_too(shell: Shell, command: str) -> None:
    shell.monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "http")
    refused(shell.run(command, URLS[0]), "SAGEMAKER_BIND_TO_PORT: must be a port from 1 to 65535, not http")
    # Checked as it would listen.
    shell.monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "9190")
    refused(shell.run(command, URLS[0]), "admin.port: 9190 is also listen.port (choose another, or admin: null)")


def test_a_variable_names_the_file_and_the_option_goes_before_it(shell: Shell, command: str) -> None:
    shell.monkeypatch.setenv("PREFIXROUTE_CONFIG", shell.file("listen: {prot: 1}", "variable.yaml"))
    refused(shell.run(command, URLS[0]), "listen.prot: unknown setting; did you mean 'port'?")
    refused(
        shell.run(command, URLS[0], "--config", shell.file("log: {levl: info}")),
        "log.levl: unknown setting; did you mean 'level'?",
    )
    shell.monkeypatch.setenv("PREFIXROUTE_CONFIG", "nowhere.yaml")
    refused(shell.run(command), f"nowhere.yaml: no such file in the working directory, {shell.home}")


def test_an_empty_variable_names_no_file(shell: Shell) -> None:
    shell.monkeypatch.setenv("PREFIXROUTE_CONFIG", "")
    assert shell.run("check", URLS[0]).code == 0


def test_options_are_checked_like_settings(shell: Shell) -> None:
    for option, value, problem in (
        ("--strategy", "randon", "routing.strategy: must be one of "),
        ("--port", "70000", "listen.port: must be at most 65535, not 70000"),
        ("--admin-port", "-1", "admin.port: must be at least 0, not -1"),
        ("--host", "a b", "listen.host: must be an address or a host name"),
        ("--log-format", "jsn", "log.format: must be one of text, json, not 'jsn'; did you mean 'json'?"),
        ("--log-level", "loud", "log.level: must be one of debug, info, warning, error, not 'loud'"),
    ):
        ran = shell.run("serve", URLS[0], option, value)
        assert ran.code == 2
        assert ran.err.startswith(f"prefixroute: {problem}")
        assert ran.err.count("\n") == 1


def test_a_check_makes_the_custom_policy(shell: Shell) -> None:
    config = shell.file("routing: {strategy: custom, custom: {factory: 'no_such_module_anywhere:make'}}")
    refused(
        shell.run("check", URLS[0], "--config", config),
        "routing.custom.factory: no_such_module_anywhere:make failed: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    )


def test_a_check_reads_the_tokenizer(shell: Shell) -> None:
    config = shell.file("tokenizer: {kind: huggingface, path: nowhere}")
    refused(
        shell.run("check", URLS[0], "--config", config),
        f"tokenizer.path: there is no {shell.home}/nowhere (a tokenizer.json, or the directory that has it)",
    )
    shell.file("{", "tokenizer.json")
    config = shell.file("tokenizer: {kind: huggingface, path: tokenizer.json}")
    ran = shell.run("check", URLS[0], "--config", config)
    assert ran.code == 2
    assert ran.err.startswith("prefixroute: tokenizer.path: no tokenizer can be made of tokenizer.json")


@pytest.mark.parametrize(
    ("config", "missing", "line"),
    [
        (
            "tokenizer: {kind: huggingface, path: .}",
            "jinja2",
            "tokenizer.kind: huggingface needs jinja2 (pip install 'prefixroute[tokenizers]')",
        ),
        (
            "fleet: {instances: [{url: 'http://127.0.0.1:1', kv_events: auto}]}",
            "zmq",
            "fleet.instances: kv_events needs zmq, which is not installed (pip install 'prefixroute[kv-events]')",
        ),
    ],
)
def test_a_check_names_an_extra_that_is_missing(shell: Shell, config: str, missing: str, line: str) -> None:
    shell.monkeypatch.setattr(setup, "find_spec", lambda name: None if name == missing else find_spec(name))
    for name in list(sys.modules):
        if name.startswith("prefixroute.kv_events"):
            shell.monkeypatch.delitem(sys.modules, name)
    shell.monkeypatch.setitem(sys.modules, missing, None)
    file = shell.file(config if "fleet" in config else f"{config}\nfleet: {{instances: [{{url: '{URLS[0]}'}}]}}")
    refused(shell.run("check", "--config", file), line)


# explain, as far as nothing answers


def test_a_body_that_cannot_be_read_is_one_line(shell: Shell) -> None:
    refused(shell.run("explain", "none.json"), "none.json: cannot be read: No such file or directory")
    refused(shell.run("explain", "."), ".: cannot be read: Is a directory")
    refused(
        shell.run("explain", "--ladder", "--token-file", "sk-x"),
        "there is no file where token_file says (write the file's path there, and the secret into the file; a relative "
        "path in a configuration file counts from where that file is)",
    )


@pytest.mark.parametrize("header", ["x-session-id", ": 7", "x id: 7", "x-session-id: 7\r\nHost: a", "x-session-id: é"])
def test_a_header_that_is_none_is_one_line(shell: Shell, header: str) -> None:
    ran = shell.run("explain", "-", "--header", header)
    refused(ran, "--header: must be written 'name: value', in ASCII")


@pytest.mark.parametrize(
    "admin", ["127.0.0.1:9190", "http://", "http://[", "http://a:b", "http://a:99999", "file:///x"]
)
def test_an_admin_url_that_is_none_is_one_line(shell: Shell, admin: str) -> None:
    ran = shell.run("explain", "-", "--admin", admin)
    assert ran.code == 1
    assert ran.err == (f"prefixroute: {admin}: not a URL of an admin port (it looks like http://127.0.0.1:9190)\n")


def test_a_router_that_does_not_run_is_one_line(shell: Shell) -> None:
    ran = shell.run("explain", "-", "--admin", URLS[0])
    problem = f"no router answers at {URLS[0]}: Connection refused (--admin says where it is)"
    assert ran == Ran(1, "", f"prefixroute: {problem}\n")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}", "answered 404: no explanation given"),
        (b'HTTP/1.0 403 No\r\n\r\n{"error": {"message": "not from here"}}', "answered 403: not from here"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "is not the admin port of a PrefixRoute router"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "is not the admin port of a PrefixRoute router"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "is not the admin port of a PrefixRoute router"),
    ],
)
def test_something_else_that_answers_is_one_line(shell: Shell, answer: bytes, problem: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def say() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass

        speaker = Thread(target=say)
        speaker.start()
        ran = shell.run("explain", "-", "--admin", url, stdin=b"{}")
        speaker.join()
    assert ran == Ran(1, "", f"prefixroute: {url} {problem}\n")


def explanation(*candidates: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt_tokens": 1_200,
        "blocks": 4,
        "no_key": None,
        "strategy": "expected_latency",
        "candidates": candidates,
        "chosen": None,
        "reason": "no_instance",
        **changed,
    }


def candidate(name: str, **changed: Any) -> dict[str, Any]:
    return {
        "instance": name,
        "state": "up",
        "matched_tokens": 0,
        "in_flight": 0,
        "pending_prefill_tokens": 0,
        "held_prefill_tokens": 0,
        "cost_s": None,
        **changed,
    }


def shown(answer: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=100)
    show(json.loads(json.dumps(answer)), console)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def test_an_explanation_shows_the_chosen_one_first_and_the_others_by_cost() -> None:
    text = shown(
        explanation(
            candidate("gpu-a", cost_s=0.5),
            candidate(
                "gpu-b",
                cost_s=0.25,
                matched_tokens=1_024,
                in_flight=3,
                pending_prefill_tokens=77,
                held_prefill_tokens=9,
            ),
            candidate("gpu-c", cost_s=0.1),
            chosen="gpu-b",
            reason="affinity",
            held=True,
        )
    )
    assert text.startswith("model m: 1200 tokens in 4 blocks; strategy expected_latency\n")
    assert text.endswith("→ gpu-b (affinity, held first: it is busy)\n")
    assert text.index("gpu-b") < text.index("gpu-c") < text.index("gpu-a")
    (line,) = [line for line in text.splitlines() if line.startswith("  gpu-b")]
    assert line.split() == ["gpu-b", "up", "1024", "3", "77", "9", "250.0", "ms"]


def test_an_explanation_says_what_is_exact() -> None:
    text = shown({**explanation(candidate("a", exact=True), candidate("b", exact=False)), "exact_tokens": True})
    assert text.startswith("model m: 1200 tokens (exact) in 4 blocks; ")
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "(exact)" in rows["a"]
    assert "(exact)" not in rows["b"]


def test_an_explanation_takes_names_as_they_are() -> None:
    text = shown(explanation(candidate("[red]"), candidate("[::1]:8000"), model="[bold]", no_key="not_json"))
    assert "[red]" in text
    assert "[::1]:8000" in text
    assert text.startswith("model [bold]: 1200 tokens in 4 blocks, no key (not_json)")


def test_an_explanation_without_candidates_has_no_table() -> None:
    assert shown(explanation(model=None)) == (
        "model -: 1200 tokens in 4 blocks; strategy expected_latency\n→ nobody (no_instance)\n"
    )


# explain --ladder


def ladder(*rungs: int, unreported: int = 0) -> dict[str, Any]:
    names = ("prompt", "ideal", "pooled", "reachable", "chosen", "reported")
    tokens = dict(zip(names, rungs or (0,) * 6, strict=True))
    steps = list(tokens.values())
    gaps = ("workload", "capacity", "spread", "spill", "engine")
    lost = zip(gaps, steps, steps[1:], strict=False)
    return {
        "requests": 12,
        "tokens": tokens,
        "gaps": {gap: max(0, above - below) / steps[0] for gap, above, below in lost} if rungs else {},
        "unreported": {"requests": unreported, "tokens": {}},
        "sampling": 1,
    }


def shown_ladder(answer: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160)
    show_ladder(json.loads(json.dumps(answer)), console)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def test_the_ladder_shows_each_rung_and_what_is_lost_above_it() -> None:
    text = shown_ladder(ladder(1000, 800, 700, 650, 600, 300))
    rows = [line.split() for line in text.splitlines() if "%" in line][:6]
    assert [row[-2:] for row in rows[1:]] == [
        ["%", gap] for gap in ("workload", "capacity", "spread", "spill", "engine")
    ]
    assert [row[-6:-2] for row in rows[1:]] == [
        ["800", "80.0", "%", "20.0"],
        ["700", "70.0", "%", "10.0"],
        ["650", "65.0", "%", "5.0"],
        ["600", "60.0", "%", "5.0"],
        ["300", "30.0", "%", "30.0"],
    ]
    assert "of 12 requests" in text


@pytest.mark.parametrize(
    ("rungs", "first", "second"),
    [
        ((1000, 800, 700, 650, 600, 300), "30.0 % – The engine", None),
        ((1000, 300, 200, 200, 200, 200), "70.0 % – The workload", "10.0 % – Capacity"),
        ((1000, 900, 500, 400, 400, 400), "40.0 % – Capacity", None),
        ((1000, 900, 900, 400, 400, 400), "50.0 % – Routing: prefixes are spread", None),
        ((1000, 900, 900, 900, 400, 400), "50.0 % – Routing: requests go past", None),
        ((1000, 300, 299, 299, 299, 299), "70.0 % – The workload", None),
        ((1000, 1000, 1000, 1000, 1000, 1000), None, None),
    ],
)
def test_the_ladder_says_what_to_do_about_the_largest_gap(
    rungs: tuple[int, ...], first: str | None, second: str | None
) -> None:
    sentences = [line for line in shown_ladder(ladder(*rungs)).splitlines() if " – " in line]
    assert [sentence[: len(words)] for sentence, words in zip(sentences, (first, second), strict=False) if words] == [
        words for words in (first, second) if words
    ]
    assert len(sentences) == (first is not None) + (second is not None)


def test_instances_that_report_nothing_are_no_gap() -> None:
    text = shown_ladder(ladder(unreported=7))
    assert text.startswith("7 more requests are not in it")
    assert "%" not in text
    assert "nothing to tell yet" in shown_ladder(ladder())


def test_explain_takes_a_body_or_the_ladder(shell: Shell) -> None:
    refused(
        shell.run("explain"),
        "explain needs a request body: a file, or - for standard input "
        "(or --ladder, which takes none and says why so little is cached)",
    )
    refused(shell.run("explain", "body.json", "--ladder"), "explain takes a request body or --ladder, not both")
