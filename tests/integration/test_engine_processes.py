"""What starts the servers of tests/engines, with one that is there in no time; and what is said where there is none."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import install
from tests.engines.install import CannotInstall, Environment
from tests.engines.processes import Keeper, ServerProcess, free_ports

# Files, among them one called health.
SERVER = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory")
# Starts such a server, says its group, and stays.
STARTER = """
import sys, time
from pathlib import Path
from tests.integration.test_engine_processes import make_server
from tests.engines.processes import Keeper
server = make_server(Keeper(), Path(sys.argv[1]))
server.start()
server.wait_ready(60.0)
print(server.port, flush=True)
time.sleep(600)
"""


def make_server(keeper: Keeper, folder: Path) -> ServerProcess:
    (folder / "health").touch()
    (port,) = free_ports(1)
    return ServerProcess("files", [*SERVER, str(folder), str(port)], port=port, keeper=keeper, folder=folder)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


def test_a_server_starts_ends_and_starts_again(keeper: Keeper, tmp_path: Path) -> None:
    server = make_server(keeper, tmp_path)
    assert not server.is_well()
    server.start()
    server.wait_ready(60.0)
    server.restart()
    assert server.is_well()
    server.stop()
    assert not server.running
    assert not server.is_well()


def test_a_server_that_ends_says_why(keeper: Keeper, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    server = ServerProcess("failing", command, port=free_ports(1)[0], keeper=keeper, folder=tmp_path)
    server.start()
    with pytest.raises(RuntimeError, match=r"failing ended .*\n(.*\n)*no such model"):
        server.wait_ready(60.0)
    server.kill()


def test_a_server_is_not_told_of_this_suites_own_variables(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command `prefixroute` is one such server, and refuses what is no setting."""
    monkeypatch.setenv("PREFIXROUTE_TEST_ENGINES", "1")
    code = "import os, sys; sys.exit(f'told: {[name for name in os.environ if name.startswith(\"PREFIXROUTE\")]}')"
    server = ServerProcess("told", [sys.executable, "-c", code], port=free_ports(1)[0], keeper=keeper, folder=tmp_path)
    server.start()
    with pytest.raises(RuntimeError, match=r"told: \[\]"):
        server.wait_ready(60.0)
    server.kill()


def test_no_server_outlives_who_started_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        port = int(starter.stdout.readline())
        starter.send_signal(signal.SIGKILL)
    while answers(port):
        time.sleep(0.05)


def answers(port: int) -> bool:
    command = [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}))"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_what_is_missing_is_said_and_then_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "CACHE", tmp_path)
    environment = Environment("peers", "nothing", 0, lambda: "there is no compiler", lambda _: None)
    assert environment.missing() == "peers is not installed: python -m tests.engines.install peers"
    with pytest.raises(CannotInstall):
        environment.install()
    assert environment.missing() == "peers cannot be installed: there is no compiler"


def test_a_command_that_fails_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "CACHE", tmp_path)
    environment = Environment("peers", "nothing", 0, lambda: None, lambda _: None)
    with pytest.raises(CannotInstall, match=r"failed \(.*peers\.log\):\n  no network"):
        environment.run([sys.executable, "-c", "import sys; sys.exit('no network')"])


def test_unknown_names_are_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert install.main(["cuda"]) == 2
    assert "vllm" in capsys.readouterr().err
