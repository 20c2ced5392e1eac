"""One connection to an instance: one request at a time, its answer handed on as it comes.

States: idle (kept, or new) → head (asked; the answer's head is waited for) → body → idle again, or gone. After a 101
it is a tunnel and no longer this module's.
"""

import asyncio
import select
import socket
import sys
from enum import Enum
from typing import Protocol

from prefixroute.errors import UpstreamBrokenError, UpstreamError, UpstreamTimeoutError, UpstreamUnreachableError
from prefixroute.http.patience import Patience
from prefixroute.http.upstream.answer import Answer, GarbledAnswerError, Interim
from prefixroute.http.upstream.request import UpstreamRequest
from prefixroute.http.upstream.sending import Sending
from prefixroute.http.wire.bodies import BodyReader, answer_body
from prefixroute.http.wire.heads import AnswerHead, MalformedError
from prefixroute.http.wire.reading import NOT_KEPT, HeadReader, keeping

# An instance that goes on with interim answers for longer than this makes work for nothing.
_MAX_INTERIM = 64
_MAX_INTERIM_BYTES = 262_144
# A machine that vanishes says nothing, and a prefill may be silent for minutes. Its kernel answers for it meanwhile.
_KEEP_ALIVE: tuple[tuple[tuple[int, int], int], ...] = ()
if sys.platform == "linux":
    _KEEP_ALIVE = (
        ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
        ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 30),
        ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 10),
        ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 3),
    )
_SWITCHING = 101
_REFUSED = 400


class _State(Enum):
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    GONE = "gone"


# As an enum's members are looked up, they would cost more than what is done with them.
_IDLE, _HEAD, _BODY, _GONE = _State.IDLE, _State.HEAD, _State.BODY, _State.GONE


class Keeper(Protocol):
    """Whose connection it is."""

    def release(self, link: "Link") -> None:
        """Its answer is complete, and it can take another request."""
        ...

    def lost(self, link: "Link") -> None:
        """It is closed."""
        ...


class Link(asyncio.Protocol):
    """Made by a pool. `name`: of the instance, for messages."""

    __slots__ = (
        "_answer",
        "_body",
        "_has_body",
        "_heard",
        "_idle_timeout_s",
        "_is_reading_paused",
        "_is_uploading",
        "_keeper",
        "_method",
        "_n_interim",
        "_n_interim_bytes",
        "_on_interim",
        "_poll",
        "_reader",
        "_rest",
        "_state",
        "_switches",
        "_unfed",
        "_upload",
        "_waiter",
        "_was_kept",
        "idle_until_s",
        "keeping",
        "loop",
        "n_requests",
        "name",
        "patience",
        "sending",
        "transport",
    )

    def __init__(self, name: str, keeper: Keeper, loop: asyncio.AbstractEventLoop, max_header_bytes: int) -> None:
        self.name = name
        self.loop = loop
        self.n_requests = 0
        """Sent on it so far, the one under way included."""
        self.idle_until_s = 0.0
        """While it is kept: when it is no longer to be used."""
        self.keeping = NOT_KEPT
        """What the server said of it last."""
        self.patience = Patience(loop, self._overdue)
        """With the instance, while its answer is waited for or goes on."""
        self.sending = Sending(loop)
        """What goes to the instance."""
        self.transport: asyncio.Transport | None = None
        self._keeper = keeper
        self._reader = HeadReader(max_header_bytes)
        self._state: _State = _IDLE
        self._method = b""
        self._rest = b""
        """What came behind a 101."""
        self._n_interim = self._n_interim_bytes = 0
        self._heard = False
        self._was_kept = False
        self._has_body = False
        self._on_interim: Interim | None = None
        self._idle_timeout_s: float | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._answer: Answer | None = None
        self._body: BodyReader | None = None
        self._is_uploading = False
        self._upload: asyncio.Task[None] | None = None
        self._switches = False
        self._is_reading_paused = False
        self._poll: select.poll | None = None
        self._unfed = b""
        """What came of an answer and waits for its turn to be read."""

    # ------------------------------------------------------------------ asking

    def ask(
        self, request: UpstreamRequest, is_kept: bool, on_interim: Interim | None, idle_timeout_s: float | None
    ) -> asyncio.Future[Answer]:
        """To be called right before `request` is written. The future gets the answer once its head is here.

        `is_kept`: the connection was not made for this request. A body that is no bytes is written piece by piece,
        until `uploaded`.
        """
        if self._state is not _IDLE:
            raise RuntimeError("the connection is in use")
        self._state = _HEAD
        self.n_requests += 1
        self._method = request.method
        self._n_interim = self._n_interim_bytes = 0
        self._heard = False
        self._was_kept = is_kept
        self._has_body = bool(request.body)
        self._on_interim = on_interim
        self._idle_timeout_s = idle_timeout_s
        self._is_uploading = callable(request.body)
        self._switches = request.switches
        self._waiter = waiter = self.loop.create_future()
        return waiter

    def await_head(self, limit_s: float | None, text: str = "") -> None:
        """From now on the instance has so long to begin its answer; None: any time. `text`: as of `Patience.wait`.

        Where it has begun, or nobody waits for it any more, this means nothing.
        """
        if self._waiter is not None and not self._waiter.done():
            self.patience.wait(limit_s, text)

    def uploads_by(self, task: asyncio.Task[None]) -> None:
        """`task` writes the body. It is cancelled when there is nobody left to write to."""
        self._upload = task

    def uploaded(self) -> None:
        """All of the request has been written."""
        self._is_uploading = False
        self._upload = None

    def give_up(self, fault: BaseException) -> None:
        """Ends what is under way with `fault`, and the connection."""
        self._stop_upload()
        self._tell(fault)
        self.abort()

    def doubt(self, limit_s: float | None) -> None:
        """Nothing listens where the instance was: an answer under way goes on only if it is heard of. None: it does."""
        # One that has not begun says nothing, however well it is: it may be computed to its end before.
        if self._answer is not None and not self._is_uploading:
            self._answer.doubt(limit_s)

    def is_fit(self, now_s: float) -> bool:
        """Whether an idle connection may be used again: in time, and nothing came that nobody asked for."""
        transport = self.transport
        if transport is None or transport.is_closing() or now_s >= self.idle_until_s:
            return False
        # A close that has come, but that the loop has not told us of yet.
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not self._poll.poll(0)

    def abort(self) -> None:
        """Closes it at once. Nothing more of what the instance says is of interest."""
        self.sending.stop()
        if self.transport is not None:
            self.transport.abort()

    def pause_reading(self) -> None:
        if not self._is_reading_paused and self.transport is not None and not self.transport.is_closing():
            self._is_reading_paused = True
            if not self._unfed:
                self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_reading_paused and self.transport is not None:
            self._is_reading_paused = False
            if not self._unfed and not self.transport.is_closing():
                self.transport.resume_reading()

    def detach(self) -> tuple[asyncio.Transport, bytes]:
        """After a 101: the transport, not being read, and what came behind the head. Both are the caller's now."""
        transport, rest = self.transport, self._rest
        if transport is None:
            raise UpstreamBrokenError(f"{self.name}: connection lost")
        self.transport = None
        self._gone()
        return transport, rest

    # ------------------------------------------------------------------ by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # of a stream, it is one
        self.sending.begins(transport)  # type: ignore[arg-type]
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            for option, value in _KEEP_ALIVE:
                raw.setsockopt(*option, value)

    def data_received(self, data: bytes) -> None:
        state = self._state
        try:
            if state is _BODY:
                self._feed(data)
            elif state is _HEAD:
                self._heard = True
                self._read_head(data)
            elif state is _IDLE:
                # Nobody asked: a goodbye (408), say. It would be taken for the answer to the next request.
                self.abort()
        except MalformedError as error:
            self.give_up(GarbledAnswerError(f"{self.name}: the answer is not valid HTTP ({error})"))

    def eof_received(self) -> None:
        """The instance has nothing more to say: the transport closes, and `connection_lost` follows.

        But not before it has taken what is written, and it may never.
        """
        transport = self.transport
        if transport is not None and self.sending.has_unsent:
            self._end_of_answers(None)
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.sending.read_spare(self.data_received)
        self._end_of_answers(exc)
        self.transport = None
        self._gone()

    def _end_of_answers(self, exc: BaseException | None) -> None:
        while self._unfed:
            self._feed_on()
        if self._state is _BODY and self._body is not None and exc is None and self._body.end_of_connection():
            self._complete(b"", None)
        else:
            self._stop_upload()
            self._tell(self._loss(exc))

    def pause_writing(self) -> None:
        self.sending.paused()

    def resume_writing(self) -> None:
        self.sending.resumed()

    # ------------------------------------------------------------------ reading

    def _read_head(self, data: bytes) -> None:
        while (read := self._reader.feed(data)) is not None:
            head, data = read
            if head.status >= 200 or head.status == _SWITCHING:
                self._begin(head, data)
                return
            self._n_interim += 1
            self._n_interim_bytes += sum(len(name) + len(value) for name, value in head.headers)
            if self._n_interim > _MAX_INTERIM or self._n_interim_bytes > _MAX_INTERIM_BYTES:
                raise MalformedError("too many interim answers")
            if self._on_interim is not None:
                try:
                    self._on_interim(head.status, head.reason, head.headers)
                except ConnectionError as fault:
                    # Its own reader has gone, which is not this connection's loss.
                    self.give_up(fault)
                    return

    def _begin(self, head: AnswerHead, rest: bytes) -> None:
        self.patience.rest()
        body: BodyReader | None = None
        if head.status == _SWITCHING:
            if not self._switches:
                raise MalformedError("switched to a protocol that was not asked for")
            # A tunnel: what follows is not ours to read.
            self._rest = rest
            self.pause_reading()
        else:
            body = answer_body(head, self._method)
            # Who refuses a request may not have read its body, and take it for the next one: nobody can tell.
            self.keeping = NOT_KEPT if self._has_body and head.status >= _REFUSED else keeping(head)
        self._state = _BODY
        self._body = body
        self._answer = answer = Answer(self, head, self._idle_timeout_s)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)
        if body is None:
            return
        if body.is_done:
            body.rest = rest
            self._complete(b"", None)
        elif rest:
            self._feed(rest)

    def _feed(self, data: bytes) -> None:
        body, answer = self._body, self._answer
        if body is None or answer is None:
            return
        if self._unfed:
            self._unfed += data
            return
        piece = body.feed(data)
        if body.unfed:
            self._feed_later(body.unfed)
        if body.is_done:
            self._complete(piece, body.chunks)
        elif piece:
            self.patience.heard_s = self.loop.time()
            answer.put(piece, body.chunks)

    def _feed_later(self, data: bytes) -> None:
        """Very many chunks in few bytes: others have a turn before the rest of them is read."""
        if self.transport is not None and not self._is_reading_paused and not self.transport.is_closing():
            self.transport.pause_reading()
        self._unfed = data
        self.loop.call_soon(self._feed_on)

    def _feed_on(self) -> None:
        data, self._unfed = self._unfed, b""
        if not data or self._state is not _BODY:
            return
        transport = self.transport
        if transport is not None and not self._is_reading_paused and not transport.is_closing():
            transport.resume_reading()
        self.data_received(data)

    def _complete(self, piece: bytes, chunks: bytes | None) -> None:
        body, answer = self._body, self._answer
        self._body = self._answer = None
        self._state = _IDLE
        self._on_interim = None  # it holds the client's request, and the body in it
        self.patience.rest()
        if self.sending.has_spare:
            self.sending.drop_spare()
        if body is None or answer is None:
            return
        if self._upload is not None:
            self._stop_upload()
        answer.end(piece, chunks, body.trailers)
        transport = self.transport
        if transport is None:
            return
        # An instance that answered before it had all of the request may never read the rest.
        is_all_sent = not self._is_uploading and not self.sending.has_unsent
        if self.keeping.is_kept and is_all_sent and not body.rest and not transport.is_closing():
            if self._is_reading_paused:
                self.resume_reading()
            self._keeper.release(self)
        else:
            transport.abort()

    def _overdue(self, text: str) -> None:
        self.give_up(UpstreamTimeoutError(f"{self.name}: {text}"))

    def _loss(self, exc: BaseException | None) -> UpstreamError:
        kind = "closed" if exc is None else type(exc).__name__
        if self._state is _BODY:
            return UpstreamBrokenError(f"{self.name}: answer broke off ({kind})")
        if self._heard:
            return GarbledAnswerError(f"{self.name}: the head of the answer broke off ({kind})")
        if not self.sending.has_begun and not self._was_kept:
            return UpstreamUnreachableError(f"{self.name}: closed at once")
        return UpstreamBrokenError(f"{self.name}: connection lost before an answer ({kind})", reused=self._was_kept)

    def _tell(self, fault: BaseException) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(fault)
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.fail(fault)
        self._body = None

    def _gone(self) -> None:
        self._state = _GONE
        self._unfed = b""
        self.patience.close()
        self.sending.ended()
        self._stop_upload()
        self._keeper.lost(self)

    def _stop_upload(self) -> None:
        # Before who waits for the answer goes on: the rest of the client's body has another reader then.
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.cancel()
