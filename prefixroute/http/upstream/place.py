"""Where an instance is, and a connection to there."""

import asyncio
import errno
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aiohappyeyeballs import start_connection

from prefixroute.config.url import instance_address
from prefixroute.errors import OWN_FAULTS, UpstreamUnreachableError, UpstreamUntrustedError
from prefixroute.names import Names

# The next of a name's addresses is tried when one has not answered for this long (RFC 8305, 5).
_NEXT_ADDRESS_S = 0.25
# A unix socket whose backlog is full says so at once, where TCP would wait.
_BACKLOG_PAUSE_S = 0.02
# Servers behind sockets have only one, and HTTP wants a Host.
_ANY_NAME = b"localhost"


@dataclass(frozen=True, slots=True)
class Place:
    """Of an instance. `path`: of its unix socket, in place of `host` and `port`. `base`: in front of every target."""

    host: str
    port: int
    path: str | None
    base: bytes
    authority: bytes
    """What the Host header says."""
    tls: ssl.SSLContext | None
    server_name: str | None
    """The name its certificate is checked against."""
    is_literal: bool
    """Whether the host is an address: nothing has to be resolved."""


def place_of(url: str, tls: ssl.SSLContext | None = None, server_name: str | None = None) -> Place:
    """`url`: as the configuration spells it. `tls`: for https; None: the machine's own authorities, verified."""
    if url.startswith("unix:"):
        return Place("", 0, url.removeprefix("unix:"), b"", _ANY_NAME, None, None, True)
    parts = urlsplit(url)
    authority, base = authority_and_base(url)
    host, port = instance_address(url)
    tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
    return Place(
        host,
        port,
        None,
        base,
        authority,
        tls,
        (server_name or host) if tls is not None else None,
        _is_literal(host),
    )


def authority_and_base(url: str) -> tuple[bytes, bytes]:
    """What requests to an instance name as Host, and what they have in front of every path."""
    if url.startswith("unix:"):
        return _ANY_NAME, b""
    parts = urlsplit(url)
    return parts.netloc.encode("ascii"), parts.path.encode("ascii")


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Connector:
    """Makes connections to one place."""

    def __init__(self, name: str, place: Place, timeout_s: float, names: Names) -> None:
        self._name = name
        self._place = place
        self._timeout_s = timeout_s
        self._names = names

    async def connect(self, make: Callable[[], asyncio.Protocol]) -> None:
        """A connection for the protocol that `make` makes. Raises UpstreamUnreachableError."""
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                await self._connect(make)
        except (OSError, ssl.CertificateError) as error:
            self._names.doubt(self._place.host, self._place.port)
            if isinstance(error, TimeoutError) and limit.expired():
                raise UpstreamUnreachableError(
                    f"{self._name}: no connection within connect_timeout_s ({self._timeout_s:g} s)", timed_out=True
                ) from error
            if isinstance(error, ssl.SSLError):
                raise UpstreamUntrustedError(f"{self._name}: {_cause(error)}") from error
            raise UpstreamUnreachableError(
                f"{self._name}: {_cause(error)}",
                timed_out=error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH),
                own_fault=error.errno in OWN_FAULTS,
            ) from error

    async def _connect(self, make: Callable[[], asyncio.Protocol]) -> None:
        loop, place = asyncio.get_running_loop(), self._place
        tls: dict[str, Any] = {}
        if place.tls is not None:
            tls = {"ssl": place.tls, "server_hostname": place.server_name}
        if place.path is not None:
            await self._connect_unix(make, place.path)
        elif place.is_literal:
            await loop.create_connection(make, place.host, place.port, **tls)
        else:
            addresses = await self._names.addresses(place.host, place.port)
            sock = await start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_S, interleave=1)
            try:
                await loop.create_connection(make, sock=sock, **tls)
            except BaseException:
                sock.close()
                raise

    @staticmethod
    async def _connect_unix(make: Callable[[], asyncio.Protocol], path: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.create_unix_connection(make, path)
            except BlockingIOError:
                await asyncio.sleep(_BACKLOG_PAUSE_S)
            else:
                return


def _cause(error: OSError) -> str:
    # The error's own text holds the address, which is no client's business; the operating system's word is enough.
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"no TLS ({error.reason})"
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or type(error).__name__
    return os.strerror(error.errno)
