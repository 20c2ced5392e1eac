"""Writing answers to the client: heads byte for byte, one valid framing, a broken stream for a broken answer.

aiohttp's own response adds headers (Date, Server, a Content-Type) and re-encodes values. A proxy must not: this one
writes to the connection itself and only tells aiohttp whether the connection may be used again. Answers that the router
makes itself have a Date (RFC 9110, 6.6.1); those of instances have theirs, or none.
"""

import asyncio
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol, cast

from aiohttp import HttpVersion10, web
from aiohttp.abc import AbstractStreamWriter

from prefixroute.http.cors import replaced
from prefixroute.http.headers import RawHeaders, first, relayed
from prefixroute.http.tunnel import Tunnel

_LAST_CHUNK = b"0\r\n\r\n"
_NOTHING: frozenset[bytes] = frozenset()
_NO_TRAILERS = frozenset({b"trailer"})
_NO_TRAILERS_NO_LENGTH = frozenset({b"trailer", b"content-length"})
_RESET = struct.pack("ii", 1, 0)


class Source(Protocol):
    """Where the pieces of an answer come from."""

    def pause(self) -> None:
        """The client is slower than it: nothing more for now."""
        ...

    def resume(self) -> None:
        """Takes `pause` back."""
        ...


class Switchable(Protocol):
    """A client's connection that can be given away."""

    def let_go(self) -> tuple[asyncio.Transport, bytes]:
        """Its transport, and what came behind the last request."""
        ...

    def over(self) -> None:
        """The transport is closed."""
        ...


class RawResponse(web.StreamResponse):
    """An answer under way on `request`'s connection: `start`, then `put` for each piece, then `finish` or `abort`."""

    def __init__(self, request: web.BaseRequest, *, close: bool = False) -> None:
        """`close`: the connection is of no use after this answer."""
        super().__init__()
        self._request = request
        self._close = close
        self._chunked = False
        self._bodiless = False
        self._ends_with_connection = False
        self._unsent: list[bytes] = []
        """Of the head, while it waits for what comes with it."""
        self.started = False
        self.sent_bytes = 0
        self.permissions: RawHeaders | None = None
        """What the head tells browsers (CORS), in place of what it would; None: as it is."""

    def start(self, status: int, reason: bytes, headers: RawHeaders, *, with_next: bool = False) -> None:
        """Writes the head. `headers` may hold one Content-Length; any other framing is decided here.

        `with_next`: only together with the first piece, or the end, which is here already. Without a length the body is
        chunked, or ends with the connection for HTTP/1.0 clients.
        """
        request = self._request
        self.set_status(status)
        self.started = True
        if self.permissions is not None:
            headers = replaced(headers, self.permissions)
        keep_alive = request.keep_alive and not self._close and not self._is_last()
        old = request.version <= HttpVersion10
        self._bodiless = request.method == "HEAD" or status in (204, 304)
        if not self._bodiless and first(headers, b"content-length") is None:
            self._chunked = not old
            self._ends_with_connection = old
            keep_alive = keep_alive and not old
        # A 204 has no length to tell, and without chunks there will be no trailers.
        untrue = _NO_TRAILERS if status != 204 else _NO_TRAILERS_NO_LENGTH
        if self._chunked:
            untrue = _NOTHING
        head = [b"HTTP/1.1 %d %s\r\n" % (status, reason)]
        head += [b"%s: %s\r\n" % header for header in headers if header[0].lower() not in untrue]
        if self._chunked:
            head.append(b"Transfer-Encoding: chunked\r\n")
        if not keep_alive:
            head.append(b"Connection: close\r\n")
        elif old:
            head.append(b"Connection: keep-alive\r\n")
        head.append(b"\r\n")
        self._keep_alive = keep_alive
        if with_next:
            self._unsent = head
        else:
            self._write(head)

    def interim(self, status: int, reason: bytes, headers: RawHeaders) -> None:
        """Writes a 1xx before the answer. 100 is this side's own to say, and HTTP/1.0 knows none of them."""
        if self.started or status == HTTPStatus.CONTINUE or self._request.version <= HttpVersion10:
            return
        head = [b"HTTP/1.1 %d %s\r\n" % (status, reason)]
        # It frames nothing and decides nothing about this connection.
        if self.permissions is not None:
            headers = replaced(headers, self.permissions)
        head += [b"%s: %s\r\n" % header for header in relayed(headers) if header[0].lower() != b"content-length"]
        self._write([*head, b"\r\n"])

    async def switch(self, reason: bytes, headers: RawHeaders, upstream: asyncio.Transport, said: bytes) -> None:
        """Writes a 101, and lets the client talk to `upstream`, until both are gone. `said`: by it, so far.

        `upstream` is closed in the end, whatever happens. Raises ConnectionResetError when the client has gone before.
        """
        connection = cast(Switchable, self._request.protocol)
        try:
            self.set_status(HTTPStatus.SWITCHING_PROTOCOLS)
            self.started = True
            self._keep_alive = False
            self._write([b"HTTP/1.1 101 %s\r\n" % reason, *(b"%s: %s\r\n" % h for h in headers), b"\r\n"])
            client, client_said = connection.let_go()
        except BaseException:
            upstream.abort()
            raise
        tunnel = Tunnel(asyncio.get_running_loop())
        tunnel.join(client, client_said, upstream, said)
        try:
            await tunnel.wait()
        finally:
            self.sent_bytes += tunnel.relayed_bytes
            connection.over()

    @contextmanager
    def paces(self, source: Source) -> Iterator[None]:
        """While this is open, `source` is held back whenever the client is slower than it."""
        connection = self._request.protocol
        pace = getattr(connection, "pace", None)
        if pace is None:
            yield
            return
        pace(source)
        try:
            yield
        finally:
            pace(None)

    def put(self, piece: bytes) -> None:
        """Writes a piece of the body. Raises ConnectionResetError when the client has gone."""
        if self._bodiless or not piece:
            return
        self.sent_bytes += len(piece)
        self._write([b"%x\r\n" % len(piece), piece, b"\r\n"] if self._chunked else [piece])

    def finish(self, piece: bytes = b"", trailers: RawHeaders = ()) -> None:
        """The body is complete, with `piece` as its last. Trailers go only where chunks do."""
        if not self._chunked:
            self.put(piece)
            if self._unsent:
                self._write([])
            return
        parts = []
        if piece:
            self.sent_bytes += len(piece)
            parts = [b"%x\r\n" % len(piece), piece, b"\r\n"]
        if trailers:
            parts += [b"0\r\n", *(b"%s: %s\r\n" % field for field in trailers), b"\r\n"]
        else:
            parts.append(_LAST_CHUNK)
        self._write(parts)

    async def taken(self) -> None:
        """Until the client has taken nearly all of what was written: the next answer is not piled upon it."""
        await self._request.writer.drain()

    def abort(self) -> None:
        """The body will never be complete: the client sees the connection close before its end."""
        self._keep_alive = False
        transport = self._request.transport
        if transport is None:
            return
        if self._ends_with_connection:
            # Here an orderly close would be the end of the body: only a reset says that it is not.
            raw = transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()
        else:
            transport.close()

    def hang_up(self) -> None:
        """After the whole answer: what is left of the request is not waited for. aiohttp would, for ten seconds."""
        self._keep_alive = False
        if self._request.transport is not None:
            self._request.transport.close()

    def whole_now(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """A whole answer of the router's own, which tells its time: short, so it is not waited for."""
        headers = [*headers, (b"Content-Length", b"%d" % len(body))]
        if first(headers, b"date") is None:
            headers.append((b"Date", _date(int(time.time()))))
        self.start(status, _reason(status), headers, with_next=True)
        self.finish(body)

    def _is_last(self) -> bool:
        # The server's own connections tell when they are to end.
        return bool(getattr(self._request.protocol, "is_ending", False))

    def _write(self, parts: Sequence[bytes]) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has gone")
        if self._unsent:
            parts, self._unsent = [*self._unsent, *parts], []
        # One piece: asyncio's writelines of some 3.12 and 3.13 does not hold back when the buffer is full.
        transport.write(b"".join(parts))

    # What aiohttp's server calls on the response it is handed: there is nothing left to do.

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: Any = b"") -> None:
        if self._is_last():
            self._keep_alive = False


@lru_cache(maxsize=1)
def _date(at_s: int) -> bytes:
    return formatdate(at_s, usegmt=True).encode("ascii")


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode("ascii")
    except ValueError:
        return b""
