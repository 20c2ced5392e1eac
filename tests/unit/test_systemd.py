"""What systemd is told, and what of its variables is heeded."""

import asyncio
import logging
import os
import socket
from pathlib import Path

import pytest

from prefixroute.systemd import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> socket.socket:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.setblocking(False)
    return manager


def test_states_are_datagrams(manager: socket.socket) -> None:
    with manager:
        notifier = Notifier.of({"NOTIFY_SOCKET": manager.getsockname()})
        notifier.ready("random over 2 instances")
        notifier.reloading()
        notifier.stopping()
        assert manager.recv(4096) == b"READY=1\nSTATUS=random over 2 instances"
        assert manager.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert manager.recv(4096) == b"STOPPING=1"


@pytest.mark.parametrize("address", [None, "", "relative/path", "vsock:2:1234"])
def test_nobody_is_told_where_there_is_no_such_socket(address: str | None, caplog: pytest.LogCaptureFixture) -> None:
    Notifier.of({} if address is None else {"NOTIFY_SOCKET": address}).ready("")
    assert caplog.records == []


def test_a_socket_that_nobody_reads_is_complained_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    notifier = Notifier.of({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    notifier.ready("")
    notifier.stopping()
    assert len(caplog.records) == 1


def test_a_full_socket_keeps_nobody_waiting(manager: socket.socket) -> None:
    with manager:
        notifier = Notifier.of({"NOTIFY_SOCKET": manager.getsockname()})
        for _ in range(1000):
            notifier.ready("x" * 1000)


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_ours_or_nobodys(variables: dict[str, str], watchdog_s: float | None) -> None:
    assert Notifier.of({"NOTIFY_SOCKET": "/run/notify", **variables}).watchdog_s == watchdog_s


async def test_without_a_watchdog_there_is_nothing_to_do() -> None:
    async with asyncio.timeout(20):
        await Notifier(None).watch()
