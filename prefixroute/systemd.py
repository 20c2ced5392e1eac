"""Tells systemd, or whoever else sets NOTIFY_SOCKET, how the service is: sd_notify(3), which is a datagram.

`Type=notify` and `Type=notify-reload` units are served, `WatchdogSec=` as well. Without the variable nothing is sent.
Nothing here can fail the service: who does not listen is not told.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping

_log = logging.getLogger(__name__)


class Notifier:
    """Sends to the socket that the environment names. `address` None: nowhere."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        self._address = address
        self.watchdog_s = watchdog_s
        """How long without a sign of life until systemd ends the service; None: it may take any time."""
        self._told = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Notifier":
        address = environ.get("NOTIFY_SOCKET", "")
        if address[:1] not in ("/", "@"):
            return cls(None)
        # An abstract address begins with a NUL, which a variable cannot hold.
        return cls("\0" + address[1:] if address.startswith("@") else address, _watchdog_s(environ))

    def ready(self, status: str) -> None:
        """It listens; also after each reload, whatever came of it."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        # By this time systemd tells which of several reloads is over.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    async def watch(self) -> None:
        """Signs of life until cancelled, twice as often as they are wanted; from the loop, because that must turn."""
        while self.watchdog_s is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                # Rather not told than waited for.
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._told:
                self._told = True
                _log.warning("NOTIFY_SOCKET cannot be told: %s", os.strerror(error.errno) if error.errno else error)


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """What systemd asks of this process; it may have been meant for the one that started us."""
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or not int(usec) or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1_000_000
