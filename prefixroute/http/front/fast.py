"""A client's connection that takes plain requests itself (`plain`), and leaves everything else to a full one.

States, and who reads what comes:

    IDLE    nobody asks. What comes is looked at: a plain request is answered here, all else is handed over.
    BUSY    a request is answered, maybe while its body comes. What comes behind it waits; so does the socket, when
            that is much.
    HANDED  the full connection reads. When it is idle again, what comes is looked at as in IDLE.
    CLOSED
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from prefixroute.http.arrival import Arrival, Source
from prefixroute.http.front.coming import ComingBody
from prefixroute.http.front.full import FullConnection
from prefixroute.http.front.limits import LINGER_S, ClientLimits, Handler
from prefixroute.http.front.pacing import Pacing
from prefixroute.http.front.plain import PlainHead, read_plain
from prefixroute.http.front.presence import has_gone, is_unproven
from prefixroute.http.patience import Patience

_log = logging.getLogger(__name__)

_LANE = "fast"
# Behind a request under way, so much is kept before the socket is read no further.
_MAX_AHEAD_BYTES = 65_536


class _State(Enum):
    IDLE = "idle"
    BUSY = "busy"
    HANDED = "handed"
    CLOSED = "closed"


# As an enum's members are looked up, they would cost more than what is done with them.
_IDLE, _BUSY, _HANDED, _CLOSED = _State.IDLE, _State.BUSY, _State.HANDED, _State.CLOSED


class FastConnection(asyncio.Protocol):
    """One client connection. `connections`: where it is to be found while it is open.

    `max_bytes`: of a body; longer ones are in doubt.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ClientLimits,
        loop: asyncio.AbstractEventLoop,
        *,
        make_full: Callable[[], FullConnection],
        max_bytes: Callable[[], int],
        connections: set["FastConnection"],
    ) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_ending = False
        """Whether the answer under way is the last one here."""
        self._handler = handler
        self._limits = limits
        self._loop = loop
        self._make_full = make_full
        self._max_bytes = max_bytes
        self._connections = connections
        self._state: _State = _IDLE
        self._full: FullConnection | None = None
        self._last: PlainHead | None = None
        """The head of the last plain request."""
        self._body: ComingBody | None = None
        """Of the request under way, while some of it is still to come."""
        self._ahead: list[bytes] = []
        """What has come behind the request under way."""
        self._n_ahead = 0
        self._pacing = Pacing(loop, limits.stall_timeout_s)
        self._drained: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._arrival: Arrival | None = None
        """What the task is to answer next."""
        self._asked: asyncio.Future[None] | None = None
        """What the task waits for, when there is nothing to answer."""
        self._made_s = 0.0
        self._patience = Patience(loop, self._overdue)
        """With a client that asks nothing."""

    # ------------------------------------------------------------------ by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # of a stream, it is one
        self._connections.add(self)
        if is_unproven(transport) or self.is_ending:
            transport.close()
            return
        raw = transport.get_extra_info("socket")
        if raw is not None:
            with suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._made_s = self._loop.time()
        self._patience.wait(self._limits.head_timeout_s, "")

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state is _IDLE:
            self._take(data)
        elif state is _HANDED:
            full = self._full
            if full is None:
                return
            if not full.is_idle or not self._take_plain(data):
                full.data_received(data)
        elif state is _BUSY:
            body = self._body
            if body is not None:
                data = body.feed(data)
                if body.is_eof():
                    self._body = None
                elif self.transport is not None:
                    # Else the loop would hand over megabytes before who reads the body has a turn.
                    self.transport.pause_reading()
            if data:
                self._keep_ahead(data)

    def eof_received(self) -> None:
        """The client has closed its sending side: it has left."""
        if self._state is _HANDED and self._full is not None:
            self._full.eof_received()
        elif self._state is _BUSY and self.transport is not None:
            # Closing, which comes next, would wait until it takes what is written, and the instance would work on.
            self.transport.abort()

    def pause_writing(self) -> None:
        if self._state is _HANDED and self._full is not None:
            self._full.pause_writing()
        else:
            self._pacing.paused(self.transport)

    def resume_writing(self) -> None:
        if self._state is _HANDED and self._full is not None:
            self._full.resume_writing()
            return
        self._pacing.resumed()
        self._wake()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.discard(self)
        self._state = _CLOSED
        self.transport = None
        self._ahead.clear()
        self._pacing.forget()
        self._patience.close()
        self._wake()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        full, self._full = self._full, None
        if full is not None:
            full.connection_lost(exc)

    # ------------------------------------------------------------------ requests

    def _take(self, data: bytes) -> None:
        """Bytes that a request begins with."""
        # Empty lines in front of one are nothing (RFC 9112, 2.2), and set no clock.
        if data.strip(b"\r\n") and not self._take_plain(data):
            self._hand_over(data)

    def _take_plain(self, data: bytes) -> bool:
        """Whether they begin with a plain one, which is taken."""
        if self.is_ending:
            return False
        last = self._last
        plain = None if last is None else last.again(data)
        if plain is None:
            read = read_plain(data, self._limits.max_header_bytes)
            if read is None:
                return False
            plain, self._last = read
        head, request_id, n_head, n_body = plain
        if n_body > self._max_bytes():
            return False
        if self._state is _HANDED and self._full is not None:
            self._full.park()
        body = data[n_head:]
        n_more = len(body) - n_body
        if n_more > 0:
            self._keep_ahead(body[n_body:])
            body = body[:n_body]
        self._state = _BUSY
        self._patience.rest()
        arrival = Arrival(head, request_id, self, _LANE, keep_alive=True, length=n_body)
        if n_more >= 0:
            arrival.whole = body
        else:
            arrival.content = self._body = ComingBody(n_body, self._read_on)
            self._body.feed(body)
        self._arrival = arrival
        if self._task is None:
            self._task = self._loop.create_task(self._serve())
        elif self._asked is not None:
            asked, self._asked = self._asked, None
            asked.set_result(None)
        return True

    def _read_on(self) -> None:
        if self.transport is not None:
            self.transport.resume_reading()

    def _keep_ahead(self, data: bytes) -> None:
        self._ahead.append(data)
        self._n_ahead += len(data)
        if self._n_ahead > _MAX_AHEAD_BYTES and self.transport is not None:
            self.transport.pause_reading()

    async def _serve(self) -> None:
        # One task for all requests of a connection: making one costs as much as reading a head.
        try:
            while self._state is not _CLOSED:
                if self._arrival is None:
                    self._asked = self._loop.create_future()
                    await self._asked
                await self._answer()
        except BaseException as fault:
            # Whatever it was, nobody is left to answer here.
            self._state = _CLOSED
            if self.transport is not None:
                self.transport.abort()
            if not isinstance(fault, Exception):
                raise
            if not isinstance(fault, ConnectionError):
                # Its text may hold what the client sent.
                _log.error("a connection was closed over a fault: %s", type(fault).__name__)

    async def _answer(self) -> None:
        # Nobody else holds it, so that an idle connection keeps nothing of its last request.
        arrival, self._arrival = self._arrival, None
        transport = self.transport
        if transport is None or arrival is None:
            return
        response = await self._handler(arrival)
        if self._body is not None:
            await self._drop(self._body)
        if self._ahead:
            # Many that are answered at once, refusals say, must not keep everybody else from having a turn.
            await asyncio.sleep(0)
        if self._body is not None or not response.keep_alive:
            self._state = _CLOSED
            transport.close()
            return
        self._state = _IDLE
        self._patience.wait(self._limits.idle_timeout_s, "")
        if self._ahead:
            data = b"".join(self._ahead)
            self._ahead.clear()
            if self._n_ahead > _MAX_AHEAD_BYTES:
                transport.resume_reading()
            self._n_ahead = 0
            self._take(data)

    async def _drop(self, body: ComingBody) -> None:
        """The answer was given before all of the body was here. Closing over it would reset the connection, and the
        reset could overtake the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await body.drop()

    def _hand_over(self, data: bytes) -> None:
        """The full connection goes on with these bytes, and with what comes."""
        transport = self.transport
        if transport is None:
            return
        self._patience.rest()
        self._state = _HANDED
        full = self._full
        if full is None:
            full = self._full = self._make_full()
            full.on_over = self.connection_lost
            full.connection_made(transport)
            if self._task is None:
                # Nothing was asked before: the time for the first head runs since the client came.
                full.await_head(self._made_s)
        if self.is_ending:
            full.end()
        full.data_received(data)

    # ------------------------------------------------------------------ for the answer

    def pace(self, source: Source | None) -> None:
        """As `Client` has it."""
        self._pacing.pace(source)

    async def drained(self) -> None:
        """As `Client` has it."""
        if self._pacing.is_paused and self.transport is not None:
            self._drained = self._loop.create_future()
            await self._drained

    def let_go(self) -> tuple[asyncio.Transport, bytes]:
        """As `Client` has it. No plain request asks for a tunnel."""
        raise ConnectionResetError("this connection is not for tunnels")

    def over(self) -> None:
        """As `Client` has it."""

    # ------------------------------------------------------------------ time and end

    def look_whether_gone(self) -> None:
        """Nobody is told of the end of a connection that is not being read."""
        transport = self.transport
        if self._state is not _BUSY or transport is None or transport.is_closing() or transport.is_reading():
            return
        if has_gone(transport):
            transport.abort()

    def end(self) -> None:
        """Closes the connection: at once when it is idle, else after the answer under way."""
        self.is_ending = True
        if self._state is _IDLE and self.transport is not None:
            self.transport.close()

    async def shutdown(self, timeout_s: float | None) -> None:
        """Closes the connection; an answer under way may take so much longer. A full one is told by its server."""
        self.is_ending = True
        task = self._task
        if task is not None:
            if self._state is _BUSY:
                await asyncio.wait([task], timeout=timeout_s)
            task.cancel()
        if self.transport is not None and self._state is not _HANDED:
            self.transport.close()

    def _overdue(self, _text: str) -> None:
        if self.transport is not None:
            # Closing would wait until it takes the rest of its last answer.
            self.transport.abort()

    def _wake(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)
