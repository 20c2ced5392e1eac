"""Ports: opened, or told why not."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Any

from prefixroute.config.tls import ServerTls
from prefixroute.errors import ListenError

_BACKLOG = 2048
_HANDSHAKE_S = 10.0


async def listen(
    factory: Callable[[], asyncio.Protocol], host: str, port: int, tls: ServerTls | None = None
) -> tuple[asyncio.Server, int]:
    """Listens on `host` and `port` (0: any free one). Returns the server and its port. Raises ListenError."""
    options: dict[str, Any] = {} if tls is None else {"ssl": tls.context, "ssl_handshake_timeout": _HANDSHAKE_S}
    try:
        # Without reuse_port a second process on the same port is refused rather than given half of the clients.
        server = await asyncio.get_running_loop().create_server(factory, host, port, backlog=_BACKLOG, **options)
    except OSError as error:
        raise ListenError(f"cannot listen on {address(host, port)}: {_why(error)}") from error
    return server, server.sockets[0].getsockname()[1]


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
