"""Ports: opened, or told why not; and who calls, let in.

Everybody who waits is let in at once. An event loop on libuv lets in one in a turn, and a turn of a busy loop takes
tens of milliseconds: the last of many who come together would wait for seconds.
"""

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from prefixroute.config.tls import ServerTls
from prefixroute.errors import OWN_FAULTS, ListenError

_log = logging.getLogger(__name__)

_BACKLOG = 2048
_HANDSHAKE_S = 10.0
# So many in a turn, that those who are in get on as well.
_AT_ONCE = 256
# When the machine has run out of something (descriptors, mostly), nobody is let in for a while: it would fail again.
_PAUSE_S = 1.0


class Listener:
    """Lets in who calls at `sockets`, each with a protocol of `factory`. Made by `listen`."""

    def __init__(
        self, sockets: Sequence[socket.socket], factory: Callable[[], asyncio.Protocol], tls: ServerTls | None
    ) -> None:
        self.port: int = sockets[0].getsockname()[1]
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._factory = factory
        self._options: dict[str, Any] = {}
        if tls is not None:
            self._options = {"ssl": tls.context, "ssl_handshake_timeout": _HANDSHAKE_S}
        self._coming: set[asyncio.Task[None]] = set()
        self._pauses: set[asyncio.TimerHandle] = set()
        for one in self._sockets:
            self._loop.add_reader(one.fileno(), self._accept, one)

    def close(self) -> None:
        """Nobody new. Who is in stays, and who is about to be. Twice does nothing more."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            self._loop.remove_reader(one.fileno())
            one.close()
        for timer in self._pauses:
            timer.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in OWN_FAULTS:
                    raise
                _log.error("nobody is let in for %g s: %s", _PAUSE_S, os.strerror(error.errno or 0))
                self._loop.remove_reader(listening.fileno())
                self._pauses.add(self._loop.call_later(_PAUSE_S, self._go_on, listening))
                return
            client.setblocking(False)
            task = self._loop.create_task(self._let_in(client))
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)

    def _go_on(self, listening: socket.socket) -> None:
        self._pauses = {timer for timer in self._pauses if timer.when() > self._loop.time()}
        self._loop.add_reader(listening.fileno(), self._accept, listening)

    async def _let_in(self, client: socket.socket) -> None:
        # Handshakes that fail are counted where they do (`ServerTls`); who has gone again is nobody's fault.
        with suppress(OSError, ssl.SSLError):
            await self._loop.connect_accepted_socket(self._factory, client, **self._options)


async def listen(
    factory: Callable[[], asyncio.Protocol], host: str, port: int, tls: ServerTls | None = None
) -> Listener:
    """Listens on `host` and `port` (0: any free one). Raises ListenError."""
    sockets: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _name, where in dict.fromkeys(found):
            sockets.append(_bound(family, kind, protocol, where))
    except OSError as error:
        for one in sockets:
            one.close()
        raise ListenError(f"cannot listen on {address(host, port)}: {_why(error)}") from error
    return Listener(sockets, factory, tls)


def _bound(family: int, kind: int, protocol: int, where: Any) -> socket.socket:
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setblocking(False)
        # Not REUSEPORT: a second process on the same port is refused rather than given half of the clients.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(where)
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def address(host: str, port: int) -> str:
    """host:port, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process listens there (stop it, or choose another port)"
    if error.errno == errno.EACCES:
        return "not permitted (ports below 1024 need privileges)"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "this machine has no such address"
    return os.strerror(error.errno) if error.errno else str(error)
