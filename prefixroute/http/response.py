"""Writing answers to the client: heads byte for byte, one valid framing, a broken stream for a broken answer.

Nothing is added to what an instance answers, and nothing re-encoded. Answers that the router makes itself have a Date
(RFC 9110, 6.6.1); those of instances have theirs, or none.
"""

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from prefixroute.http.arrival import Arrival, Source
from prefixroute.http.cors import replaced
from prefixroute.http.headers import RawHeaders, first, relayed, rendered
from prefixroute.http.tunnel import Tunnel

_LAST_CHUNK = b"0\r\n\r\n"
_NOTHING: frozenset[bytes] = frozenset()
_NO_TRAILERS = frozenset({b"trailer"})
_NO_TRAILERS_NO_LENGTH = frozenset({b"trailer", b"content-length"})
_NO_BODY = (204, 304)
_RESET = struct.pack("ii", 1, 0)


class RawResponse:
    """The answer to `arrival`, under way: `start`, then `put` for each piece, then `finish` or `abort`."""

    # What most answers leave as it is, until they begin.
    _close = False
    _keep_alive = False
    _chunked = False
    _bodiless = False
    _ends_with_connection = False
    _unsent = b""
    """The head, while it waits for what comes with it."""
    started = False
    sent_bytes = 0
    permissions: RawHeaders | None = None
    """What the head tells browsers (CORS), in place of what it would; None: as it is."""
    last_words: Callable[[Exception], bytes] | None = None
    """How an answer under way says, in its own form, that it cannot go on; None: it breaks off."""

    def __init__(self, arrival: Arrival, *, close: bool = False) -> None:
        """`close`: the connection is of no use after this answer."""
        self._arrival = arrival
        self._client = arrival.client
        if close:
            self._close = True

    @property
    def keep_alive(self) -> bool:
        """Once it is over: whether another request may come on its connection."""
        return self._keep_alive and not self._client.is_ending

    def start(self, status: int, reason: bytes, headers: RawHeaders, *, with_next: bool = False) -> None:
        """Writes the head, as `start_lines` does. `headers` may hold one Content-Length."""
        if self.permissions is not None:
            headers = replaced(headers, self.permissions)
        is_framed = first(headers, b"content-length") is not None
        # A 204 has no length to tell, and without chunks there will be no trailers.
        untrue = _NO_TRAILERS if status != 204 else _NO_TRAILERS_NO_LENGTH
        if self._will_be_chunked(status, is_framed):
            untrue = _NOTHING
        lines = [header for header in headers if header[0].lower() not in untrue]
        self.start_lines(status, reason, rendered(lines), is_framed=is_framed, with_next=with_next)

    def start_lines(
        self, status: int, reason: bytes, lines: bytes, *, is_framed: bool, with_next: bool = False
    ) -> None:
        """Writes the head. `lines`: its headers, each with its line end; `is_framed`: a Content-Length is among them.

        Any other framing is decided here: without a length the body is chunked, or ends with the connection for
        HTTP/1.0 clients. `with_next`: only together with the first piece, or the end, which is here already.
        """
        arrival = self._arrival
        self.started = True
        keep_alive = arrival.keep_alive and not self._close and not self._client.is_ending
        is_old = arrival.head.minor <= 0
        framing = connection = b""
        if self._will_be_chunked(status, is_framed):
            self._chunked = True
            framing = b"Transfer-Encoding: chunked\r\n"
        elif arrival.head.method == "HEAD" or status in _NO_BODY:
            self._bodiless = True
        elif not is_framed:
            self._ends_with_connection = True
            keep_alive = False
        if not keep_alive:
            connection = b"Connection: close\r\n"
        elif is_old:
            connection = b"Connection: keep-alive\r\n"
        self._keep_alive = keep_alive
        head = b"HTTP/1.1 %d %s\r\n%s%s%s\r\n" % (status, reason, lines, framing, connection)
        if with_next:
            self._unsent = head
        else:
            self._write(head)

    def _will_be_chunked(self, status: int, is_framed: bool) -> bool:
        head = self._arrival.head
        return not (is_framed or head.minor <= 0 or head.method == "HEAD" or status in _NO_BODY)

    def interim(self, status: int, reason: bytes, headers: RawHeaders) -> None:
        """Writes a 1xx before the answer. 100 is this side's own to say, and HTTP/1.0 knows none of them."""
        if self.started or status == HTTPStatus.CONTINUE or self._arrival.head.minor <= 0:
            return
        head = [b"HTTP/1.1 %d %s\r\n" % (status, reason)]
        # It frames nothing and decides nothing about this connection.
        if self.permissions is not None:
            headers = replaced(headers, self.permissions)
        head += [b"%s: %s\r\n" % header for header in relayed(headers) if header[0].lower() != b"content-length"]
        self._write(b"%s\r\n" % b"".join(head))

    async def switch(self, reason: bytes, headers: RawHeaders, upstream: asyncio.Transport, said: bytes) -> None:
        """Writes a 101, and lets the client talk to `upstream`, until both are gone. `said`: by it, so far.

        `upstream` is closed in the end, whatever happens. Raises ConnectionResetError when the client has gone before.
        """
        connection = self._client
        try:
            self.started = True
            self._keep_alive = False
            self._write(b"HTTP/1.1 101 %s\r\n%s\r\n" % (reason, rendered(headers)))
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

    def pace(self, source: Source | None) -> None:
        """`source` is held back from now on whenever the client is slower than it; None: nobody is."""
        self._client.pace(source)

    def put(self, piece: bytes, chunks: bytes | None = None) -> None:
        """Writes a piece of the body. `chunks`: the same as chunks, if they are at hand.

        Raises ConnectionResetError when the client has gone.
        """
        if self._bodiless or not piece:
            return
        self.sent_bytes += len(piece)
        if self._chunked:
            self._write(chunks or b"%x\r\n%s\r\n" % (len(piece), piece))
        else:
            self._write(piece)

    def finish(self, piece: bytes = b"", trailers: RawHeaders = (), chunks: bytes | None = None) -> None:
        """The body is complete, with `piece` as its last. Trailers go only where chunks do.

        `chunks`: the piece, and the end of the body without trailers, as chunks, if they are at hand.
        """
        if not self._chunked:
            if piece and not self._bodiless:
                self.put(piece)
            elif self._unsent:
                self._write(b"")
            return
        self.sent_bytes += len(piece)
        if chunks is None or trailers:
            chunks = b"%x\r\n%s\r\n" % (len(piece), piece) if piece else b""
            chunks += b"0\r\n%s\r\n" % rendered(trailers) if trailers else _LAST_CHUNK
        self._write(chunks)

    async def taken(self) -> None:
        """Until the client has taken nearly all of what was written: the next answer is not piled upon it."""
        await self._client.drained()

    def fail(self, error: Exception) -> None:
        """The answer cannot go on: its last words say so, or it breaks off."""
        if self.last_words is None:
            self.abort()
        else:
            self.finish(self.last_words(error))

    def abort(self) -> None:
        """The body will never be complete: the client sees the connection close before its end."""
        self._keep_alive = False
        transport = self._client.transport
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
        """After the whole answer: what is left of the request is not waited for."""
        self._keep_alive = False
        transport = self._client.transport
        if transport is not None:
            transport.close()

    def whole_now(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """A whole answer of the router's own, which tells its time: short, so it is not waited for."""
        headers = [*headers, (b"Content-Length", b"%d" % len(body))]
        if first(headers, b"date") is None:
            headers.append((b"Date", _date(int(time.time()))))
        self.start(status, _reason(status), headers, with_next=True)
        self.finish(body)

    def _write(self, data: bytes) -> None:
        transport = self._client.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has gone")
        if self._unsent:
            # One piece: asyncio's writelines of some 3.12 and 3.13 does not hold back when the buffer is full.
            data, self._unsent = self._unsent + data, b""
        transport.write(data)


@lru_cache(maxsize=1)
def _date(at_s: int) -> bytes:
    return formatdate(at_s, usegmt=True).encode("ascii")


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode("ascii")
    except ValueError:
        return b""
