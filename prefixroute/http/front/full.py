"""A client's connection that takes all of HTTP/1: aiohttp's, with the router's own words for what is no request.

What cannot be parsed is answered in a dialect clients read, and repeats nothing of it: the offending line may hold a
credential, so it goes into no answer and no log.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from prefixroute.http.arrival import Source
from prefixroute.http.body import MalformedBodyError
from prefixroute.http.dialects import error_body, error_headers
from prefixroute.http.front.adapter import Refusal, Written
from prefixroute.http.front.limits import ClientLimits
from prefixroute.http.front.malformed import malformed_text
from prefixroute.http.front.pacing import Pacing
from prefixroute.http.front.parser_gaps import Next, ParserGaps
from prefixroute.http.front.presence import has_gone, is_unproven
from prefixroute.http.headers import MAX_FULL_HEADERS, new_request_id
from prefixroute.http.peer import client_address
from prefixroute.http.response import RawResponse
from prefixroute.http.routes import dialect_of

_log = logging.getLogger(__name__)

# Of a head that is no good: enough for its request line, which tells in whose words to refuse it.
_START_BYTES = 2048
_END_OF_HEAD = b"\r\n\r\n"


class _HeadTooLargeError(Exception):
    """All headers together are too large."""


class _HeadTooSlowError(Exception):
    """The head did not arrive in time."""


class FullConnection(RequestHandler):
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
        "_is_parked",
        "_max_head_bytes",
        "_names_clients",
        "_on_unread",
        "_pacing",
        "_reading",
        "_start",
        "on_over",
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
        self._pacing = Pacing(self._loop, limits.stall_timeout_s)
        self._is_ending = False
        self._is_parked = False
        self.on_over: Callable[[BaseException | None], None] = self.connection_lost
        """Who is to be told of the end of a transport that was let go."""

    @property
    def is_ending(self) -> bool:
        """Whether the answer under way is the last one here.

        Also when more has come behind an offer of WebSockets: if it is declined, that would go to the parser past us.
        """
        return self._is_ending or (self._upgraded and bool(self._message_tail))

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, of which nothing has come, and may take one."""
        return (
            self._waiter is not None
            and not self._messages
            and not self._head_bytes
            and not (self._is_garbled or self._is_ending or self._upgraded or self._buffer_paused)
            and (self._reading is None or self._reading.is_eof())
            and not self._gaps.is_watching
        )

    def park(self) -> None:
        """Somebody else has the connection until bytes come here again."""
        self._is_parked = True
        self._head_began_s = None
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
            self._keepalive_handle = None

    def pace(self, source: Source | None) -> None:
        """As `Client` has it."""
        self._pacing.pace(source)

    async def drained(self) -> None:
        """As `Client` has it."""
        if self._paused and self.transport is not None:
            await self._drain_helper()

    def let_go(self) -> tuple[asyncio.Transport, bytes]:
        """For a tunnel: the transport, and what the client said behind its request."""
        transport = self.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        tail, self._message_tail = self._message_tail, b""
        return transport, tail

    def over(self) -> None:
        """The transport, once let go, is closed. Nobody but its new owner was told so."""
        asyncio.get_running_loop().call_soon(self.on_over, None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pacing.paused(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._pacing.resumed()

    def _process_keepalive(self) -> None:
        if self._head_bytes or self._is_parked:
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
        if is_unproven(transport):
            self.force_close()
            return
        self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._pacing.forget()
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def await_head(self, since_s: float) -> None:
        """The head that is to come has been waited for since then, by the loop's clock."""
        self._head_began_s = since_s
        if self._head_timer is not None:
            self._head_timer.cancel()
        left_s = since_s + self._head_timeout_s - self._loop.time()
        self._head_timer = self._loop.call_later(max(0.0, left_s), self._check_head)

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
        self._is_parked = False
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
        if has_gone(transport):
            transport.abort()

    async def finish_response(self, request: Any, resp: Any, start_time: float | None) -> Any:
        """The answer is over; aiohttp would go on with what came behind an offer that was declined."""
        if self.is_ending:
            self._is_ending = True
            self._message_tail = b""
        return await super().finish_response(request, resp, start_time)

    def end(self) -> None:
        """Closes the connection: at once when it is idle, else after the answer under way."""
        self._is_ending = True
        # While it is parked, who has the connection closes it.
        if self._waiter is not None and not self._is_parked:
            # aiohttp's `close` would leave it open, and deaf.
            self.force_close()

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """aiohttp's own words for faults: their text and traceback may hold what the client sent."""
        fault = kwargs.get("exc_info")
        # Who sends rubbish and leaves is told nothing, and is no fault of ours.
        if not isinstance(fault, MalformedBodyError | ConnectionError):
            _log.error("a connection was closed over a fault: %s", type(fault).__name__)

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answers what could not be parsed. The handler answers everything else itself."""
        response = RawResponse(request, close=True)
        if not isinstance(exc, HttpProcessingError | _HeadTooLargeError | _HeadTooSlowError):
            self.log_exception(exc_info=exc)
            response.abort()
            return cast(web.StreamResponse, Written(response))
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
        dialect = dialect_of(self._start)
        response.whole_now(status, error_headers(dialect, status, name), error_body(dialect, status, code, text))
        return cast(web.StreamResponse, Refusal(response, self))
