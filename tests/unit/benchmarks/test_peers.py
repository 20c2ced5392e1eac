"""The proxies that are compared."""

import platform
import re
import sys
from pathlib import Path

import pytest

from benchmarks.peers import Peer, known_peers
from benchmarks.processes import BenchmarkError
from benchmarks.proxy import argument_parser, choose_peers
from benchmarks.venvs import describe_python


def test_no_two_peers_listen_on_one_port(tmp_path: Path) -> None:
    """Those of their metrics included."""
    ports = []
    for peer in known_peers(tmp_path).values():
        ports.append(peer.port)
        ports += [
            int(value)
            for option, value in zip(peer.command, peer.command[1:], strict=False)
            if option in ("--admin-port", "--prometheus-port")
        ]

    assert len(set(ports)) == len(ports)


def test_configurations_are_filled_in(tmp_path: Path) -> None:
    peers = known_peers(tmp_path)
    for name in ("nginx", "haproxy"):
        (path,) = (path for path in tmp_path.iterdir() if path.name.startswith(name) and path.is_file())
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]

        assert not any(re.search(r"@[A-Z]+@", line) for line in lines)
        assert sum("127.0.0.1:810" in line for line in lines) == 4
        assert any(f"127.0.0.1:{peers[name].port}" in line for line in lines)


def test_both_lanes_are_run_by_the_python_that_was_chosen(tmp_path: Path) -> None:
    peers = known_peers(tmp_path, "/opt/python")

    assert {peers[name].command[0] for name in ("prefixroute", "prefixroute-aiohttp")} == {"/opt/python"}
    assert dict(peers["prefixroute-aiohttp"].environment) == {"PREFIXROUTE_LANE": "aiohttp"}


def test_all_default_peers_are_known(tmp_path: Path) -> None:
    names = argument_parser().parse_args([]).peers

    assert [peer.name for peer in choose_peers(names, [], known_peers(tmp_path))] == names


def test_a_package_that_cannot_be_had_is_a_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    peer = Peer("other", 9, ("other",), package=(str(tmp_path / "nothing-1.0-py3-none-any.whl"), folder))

    for _ in range(2):  # what is left of the first time does not pass for an installation
        with pytest.raises(BenchmarkError, match=r"(?s)cannot be installed.*leave other out of --peers"):
            peer.require_installed()


def test_a_python_that_cannot_run_the_router_is_a_clear_error(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # without site-packages
    bare.chmod(0o755)

    with pytest.raises(BenchmarkError, match=r"cannot run PrefixRoute: ModuleNotFoundError.*\n.*requirements\.txt"):
        describe_python(str(bare))
    with pytest.raises(BenchmarkError, match="there is no program"):
        describe_python(str(tmp_path / "none"))


def test_a_python_is_described_by_version_and_speed() -> None:
    assert describe_python(sys.executable).startswith(f"{platform.python_version()} (")
