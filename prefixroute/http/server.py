"""The front server: aiohttp's low-level one, with the router's own words for what never becomes a request.

What cannot be parsed is answered in a dialect clients read, and repeats nothing of it: the offending line may hold a
credential, so it goes into no answer and no log.
"""

import asyncio
import errno
import fcntl
import logging
import math
import os
import select
import socket
import ssl
import sys
import termios
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp.http_parser
from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from prefixroute.config.tls import ServerTls
from prefixroute.errors import ListenError
from prefixroute.http.body import MalformedBodyError
from prefixroute.http.dialects import error_body, error_headers
from prefixroute.http.headers import MAX_FULL_HEADERS, MAX_HEADERS, new_request_id
from prefixroute.http.malformed import malformed_text
from prefixroute.http.parser_gaps import Next, ParserGaps
from prefixroute.http.peer import client_address
from prefixroute.http.response import RawResponse, Source
from prefixroute.http.routes import dialect_of

_log = logging.getLogger(__name__)

_BACKLOG = 2048
# How often it is looked whether clients are there that are not being read.
_LOOK_EVERY_S = 1.0
# Told whatever is still to be read.
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
# Of a head that is no good: enough for its request line, which tells in whose words to refuse it.
_START_BYTES = 2048
_END_OF_HEAD = b"\r\n\r\n"
# How long a client that was refused may take to read why.
_LINGER_S = 2.0
_HANDSHAKE_S = 10.0

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What a client may take before it has asked anything. `max_header_bytes`: of the request line and of each header;
    `head_timeout_s`: for a head to arrive; `idle_timeout_s`: between two requests; `stall_timeout_s`: for
    any byte of an answer to be taken."""

    max_header_bytes: int = 65_536
    head_timeout_s: float = 30.0
    idle_timeout_s: float = 90.0
    stall_timeout_s: float = 300.0


class _HeadTooLargeError(Exception):
    """All headers together are too large."""


class _HeadTooSlowError(Exception):
    """The head did not arrive in time."""


class _Refusal(RawResponse):
    """The last answer on a connection whose bytes are no longer understood."""

    def __init__(self, request: web.BaseRequest) -> None:
        super().__init__(request, close=True)

    async def write_eof(self, data: Any = b"") -> None:
        # Closing over bytes that were not read resets the connection, and the reset overtakes the answer. So the
        # client is told that this is all, and until it leaves (which cancels this), what it sends is thrown away.
        transport = self._request.transport
        if transport is not None and transport.can_write_eof():
            transport.write_eof()
            await asyncio.sleep(_LINGER_S)


class _Connection(RequestHandler):
    """One client connection. Nine things are different from aiohttp's.

    - A client that leaves is gone at once, whatever it has not read.
    - An error in a body's chunks is told to who reads that body; aiohttp leaves the reader waiting.
    - Heads are bounded as a whole.
    - A head has to arrive in time.
    - Where its parser would be wrong about the next request, there is none (`parser_gaps`).
    - A connection that is to end takes the rest of a body that is under way.
    - Where an answer comes from is held back at once when the client is slow, without anybody waiting for it.
    - A client that takes nothing at all of an answer for long has left.
    - Who is asked for a certificate is asked on each connection: a resumed session would not be.
    """

    __slots__ = (
        "_body",
        "_gaps",
        "_head_began_s",
        "_head_bytes",
        "_head_timeout_s",
        "_head_timer",
        "_is_ending",
        "_is_garbled",
        "_max_head_bytes",
        "_names_clients",
        "_on_unread",
        "_reading",
        "_source",
        "_stall_timeout_s",
        "_stall_timer",
        "_start",
    )

    def __init__(
        self,
        *args: Any,
        limits: ClientLimits,
        on_unread: Callable[[str], None],
        names_clients: Callable[[], bool],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._on_unread = on_unread
        self._names_clients = names_clients
        self._max_head_bytes = limits.max_header_bytes * MAX_FULL_HEADERS
        self._head_timeout_s = limits.head_timeout_s
        self._head_began_s: float | None = None
        """Since when a head is under way; a connection begins with one. Infinity: an answer has to end first."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._start = b""
        """The first bytes of a head that is not complete, or no good."""
        self._gaps = ParserGaps()
        self._body: StreamReader | None = None
        """Of the request that is being handled."""
        self._reading: StreamReader | None = None
        """The body that came last: when it is at its end, what comes is a head."""
        self._is_garbled = False
        self._source: Source | None = None
        self._stall_timeout_s = limits.stall_timeout_s
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_ending = False

    @property
    def is_ending(self) -> bool:
        """Whether the answer under way is the last one here.

        Also when more has come behind an offer of WebSockets: if it is declined, that would go to the parser past us.
        """
        return self._is_ending or (self._upgraded and bool(self._message_tail))

    def pace(self, source: Source | None) -> None:
        """`source` is held back from now on whenever the client is slower than it; None: nobody is."""
        self._source = source
        if source is not None and self._paused:
            source.pause()

    def let_go(self) -> tuple[asyncio.Transport, bytes]:
        """For a tunnel: the transport, and what the client said behind its request."""
        transport = self.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        tail, self._message_tail = self._message_tail, b""
        return transport, tail

    def over(self) -> None:
        """The transport, once let go, is closed. Nobody but its new owner was told so."""
        asyncio.get_running_loop().call_soon(self.connection_lost, None)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._source is not None:
            self._source.pause()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._source is not None:
            self._source.resume()
        self._forget_stall()

    def _watch_stall(self) -> None:
        if self.transport is not None:
            n_left = _n_untaken(self.transport)
            self._stall_timer = self._loop.call_later(self._stall_timeout_s, self._check_stall, n_left)

    def _check_stall(self, n_before: int) -> None:
        self._stall_timer = None
        transport = self.transport
        if transport is None:
            return
        if _n_untaken(transport) >= n_before:
            transport.abort()
        else:
            self._watch_stall()

    def _forget_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _process_keepalive(self) -> None:
        if self._head_bytes:
            # A head that has begun has a time of its own, and an answer when that is over.
            self._keepalive_handle = None
            return
        transport = self.transport
        super()._process_keepalive()
        if transport is not None and self.transport is None:
            # It was idle for long enough, and yet closing would wait until it takes the rest of its last answer.
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.session_reused and tls.context.verify_mode is ssl.CERT_REQUIRED:
            # TLS 1.2 resumes sessions by their id, which no option turns off.
            self.force_close()
            return
        self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._forget_stall()
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expect_head(self) -> None:
        self._head_began_s = self._loop.time()
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_timeout_s, self._check_head)

    def _check_head(self) -> None:
        # Heads that are in time leave the timer as it is: it looks again when it fires.
        self._head_timer = None
        began_s = self._head_began_s
        if began_s is None or self._is_garbled:
            return
        if self._waiter is None:
            # An answer is under way, and the client may be reading it first.
            began_s = self._head_began_s = math.inf
            self._head_timer = self._loop.call_later(self._head_timeout_s, self._check_head)
            return
        if began_s == math.inf:
            began_s = self._head_began_s = self._loop.time()
        left_s = began_s + self._head_timeout_s - self._loop.time()
        if left_s > 0:
            self._head_timer = self._loop.call_later(left_s, self._check_head)
        elif not self._head_bytes:
            self.force_close()  # it has asked nothing, so there is nothing to answer
        else:
            self._refuse(_ErrInfo(408, _HeadTooSlowError(), ""))

    def _refuse(self, fault: _ErrInfo) -> None:
        """What comes is not read any more; the fault is answered."""
        self._is_garbled = True
        self._messages.append((fault, EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take_in(self, body: StreamReader) -> None:
        """A request is about to be handled."""
        self._body = body

    def data_received(self, data: bytes) -> None:
        if self._is_garbled:
            return
        n_before = len(self._messages)
        at_head = self._reading is None or self._reading.is_eof()
        super().data_received(data)
        has_new = len(self._messages) > n_before
        if has_new or self._gaps.is_watching:
            self._look_behind(data, n_before)
        if has_new:
            message, self._reading = self._messages[-1]
            if isinstance(message, _ErrInfo):
                self._is_garbled = True
                self._start = (self._start + data)[:_START_BYTES]
                self._tell_reader()
                return
            self._start = b""
            self._head_bytes = 0
            self._head_began_s = None
            # Behind a request without a body, the next one's head is easily found.
            end = data.rfind(_END_OF_HEAD) if self._reading is EMPTY_PAYLOAD else -1
            if 0 <= end < len(data) - len(_END_OF_HEAD):
                self._see_head(data[end + len(_END_OF_HEAD) :])
        elif at_head:
            self._see_head(data)

    def _see_head(self, data: bytes) -> None:
        """These are bytes of a head that is not complete."""
        # Those of other protocols are not, nor those that the parser has not looked at yet.
        if self._upgraded or self._buffer_paused:
            return
        # Empty lines in front of a request are nothing (RFC 9112, 2.2).
        if not self._head_bytes and not data.strip(b"\r\n"):
            return
        if self._head_began_s is None:
            self._expect_head()
        if len(self._start) < _START_BYTES:
            self._start += data[:_START_BYTES]
        self._head_bytes += len(data)
        if self._head_bytes > self._max_head_bytes:
            self._refuse(_ErrInfo(400, _HeadTooLargeError(), ""))

    def _look_behind(self, data: bytes, n_before: int) -> None:
        new = [one for one in list(self._messages)[n_before:] if not isinstance(one[0], _ErrInfo)]
        coming = self._gaps.look(data, new, at_head=not (self._start or n_before))
        if coming is not Next.REQUEST:
            self._is_ending = True
        if coming is Next.NOTHING:
            # After the answer, also where it has been told that the connection goes on.
            self.close()

    def _tell_reader(self) -> None:
        body = self._messages[-2][1] if len(self._messages) > 1 else self._body
        if body is not None and not body.is_eof():
            # The request has been taken in, so its own answer is the one that says so.
            self._messages.pop()
            body.set_exception(MalformedBodyError("the body's chunks are not valid HTTP"))

    def eof_received(self) -> None:
        """The client has closed its sending side: it has left."""
        if self._request_in_progress and self.transport is not None:
            # Closing, which comes next, would wait until it takes what is written, and the instance would work on.
            self.transport.abort()

    def look_whether_gone(self) -> None:
        """Nobody is told of the end of a connection that is not being read: because the instance is slow to take an
        upload or what comes through a tunnel, or because more was sent ahead than is of use now."""
        transport = self.transport
        if transport is None or transport.is_closing() or not self._request_in_progress or transport.is_reading():
            return
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), _GONE)
        if poll.poll(0):
            transport.abort()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """The answer is over; aiohttp would go on with what came behind an offer that was declined."""
        if self.is_ending:
            self._is_ending = True
            self._message_tail = b""
        return await super().finish_response(request, resp, start_time)

    def end(self) -> None:
        """Closes the connection: at once when it is idle, else after the answer under way."""
        self._is_ending = True
        if self._waiter is not None:
            # aiohttp's `close` would leave it open, and deaf.
            self.force_close()

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """aiohttp's own words for faults: their text and traceback may hold what the client sent."""
        fault = kwargs.get("exc_info")
        # Who sends rubbish and leaves is told nothing, and is no fault of ours.
        if not isinstance(fault, MalformedBodyError | ConnectionError):
            _log.error("a connection was closed over a fault: %s", type(fault).__name__)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers what could not be parsed. The handler answers everything else itself."""
        if not isinstance(exc, HttpProcessingError | _HeadTooLargeError | _HeadTooSlowError):
            self.log_exception(exc_info=exc)
            broken = RawResponse(request)
            broken.abort()
            return broken
        if isinstance(exc, LineTooLong | _HeadTooLargeError) or "Too many headers" in str(exc):
            status, code, text = 431, "headers_too_large", "the request line or the headers are too long"
        elif isinstance(exc, _HeadTooSlowError):
            status, code, text = 408, "request_timeout", "the head came too slowly (limits.client_head_timeout_s)"
        else:
            status, code, text = 400, "malformed_request", malformed_text(exc)
        name = new_request_id()
        client = client_address(self.transport) if self._names_clients() else None
        fields = {} if client is None else {"client": client}
        _log.info("request %s: refused before it was one: %s", name, text, extra={"fields": fields})
        self._on_unread(code)
        response = _Refusal(request)
        headers = [*error_headers(None), (b"x-request-id", name.encode("ascii"))]
        response.whole_now(status, headers, error_body(dialect_of(self._start), status, code, text))
        return response


def _n_untaken(transport: asyncio.Transport) -> int:
    """Bytes written that the client's machine has not acknowledged, in our buffer and in the kernel's."""
    n_bytes = transport.get_write_buffer_size()
    with suppress(OSError, AttributeError):  # the kernel's: where it tells
        count = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        n_bytes += int.from_bytes(count, sys.byteorder)
    return n_bytes


class FrontServer(web.Server):
    """Accepts connections on sockets it is given.

    `on_unread`: gets the code of each answer to what is no request. `names_clients`: whether such lines tell addresses.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ClientLimits,
        on_unread: Callable[[str], None] = lambda _code: None,
        *,
        names_clients: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(
            handler,
            request_factory=self._request,
            # Without it a client that leaves during a silent answer keeps its place until the next write.
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            max_headers=MAX_HEADERS,
            lingering_time=_LINGER_S,
            keepalive_timeout=limits.idle_timeout_s,
        )
        self._looker: asyncio.TimerHandle | None = None
        self._limits = limits
        self._on_unread = on_unread
        self._names_clients = names_clients

    def __call__(self) -> RequestHandler:
        loop = asyncio.get_running_loop()
        if self._looker is None:
            self._looker = loop.call_later(_LOOK_EVERY_S, self._look_for_gone)
        return _Connection(
            self,
            loop=loop,
            limits=self._limits,
            on_unread=self._on_unread,
            names_clients=self._names_clients,
            **self._kwargs,
        )

    def _look_for_gone(self) -> None:
        connections = self.connections
        for connection in connections:
            if isinstance(connection, _Connection):
                connection.look_whether_gone()
        self._looker = None
        if connections:
            self._looker = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_for_gone)

    async def shutdown(self, timeout: float | None = None) -> None:
        """Closes all connections."""
        await super().shutdown(timeout)
        if self._looker is not None:
            self._looker.cancel()

    def pre_shutdown(self) -> None:
        """No new requests on the connections there are."""
        for connection in self.connections:
            if isinstance(connection, _Connection):
                connection.end()

    @staticmethod
    def _request(message: Any, body: StreamReader, connection: Any, writer: Any, task: Any) -> web.BaseRequest:
        connection.take_in(body)
        return web.BaseRequest(message, body, connection, writer, task, asyncio.get_running_loop())


def has_fast_parser() -> bool:
    """Whether aiohttp's compiled HTTP parser is there. Its stand-in in Python is slower, and refuses less."""
    return aiohttp.http_parser.HttpRequestParser is not aiohttp.http_parser.HttpRequestParserPy


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
