"""An instance's answer: its head is here, its body comes as the connection hands it over."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from prefixroute.errors import UpstreamBrokenError
from prefixroute.http.headers import RawHeaders
from prefixroute.http.wire.heads import AnswerHead

if TYPE_CHECKING:
    from prefixroute.http.upstream.link import Link

Consume = Callable[[bytes, bool, bytes | None], None]
"""Takes the next piece of a body, whether it is the last, and its chunks.

The last piece may be empty. The chunks, if there are any, are exactly the piece as a chunked body on the wire has it,
the end of that body included with the last piece: to be written as they are, or not looked at.
"""
Interim = Callable[[int, bytes, RawHeaders], None]
"""Takes a 1xx: status, reason, headers."""

# Pieces that nobody asks for yet are kept up to this much; then the connection is read no further.
_MAX_KEPT_BYTES = 65_536


class GarbledAnswerError(UpstreamBrokenError):
    """An answer began, and is none that could be passed on."""


class Answer:
    """Of one request, on its connection. Close it, whatever happens."""

    __slots__ = (
        "_consume",
        "_end",
        "_fault",
        "_idle_timeout_s",
        "_is_ended",
        "_kept",
        "_link",
        "_n_kept",
        "head",
        "is_paused",
        "status",
        "trailers",
    )

    def __init__(self, link: "Link", head: AnswerHead, idle_timeout_s: float | None) -> None:
        self._link: Link | None = link
        self._idle_timeout_s = idle_timeout_s
        self._consume: Consume | None = None
        self._kept: list[bytes] = []
        self._n_kept = 0
        self._is_ended = False
        self.is_paused = False
        """Whether who consumes it is slower than it comes."""
        self._fault: BaseException | None = None
        self._end: asyncio.Future[None] | None = None
        self.head = head
        self.status = head.status
        """At least 200, or 101."""
        self.trailers: RawHeaders = ()
        """Once the body has ended."""

    @property
    def reason(self) -> bytes:
        return self.head.reason

    @property
    def headers(self) -> RawHeaders:
        """As received, hop-by-hop headers included."""
        return self.head.headers

    @property
    def has_more(self) -> bool:
        """Whether `pour` has something to hand over at once."""
        return bool(self._kept) or self._is_ended

    async def pour(self, consume: Consume) -> None:
        """Hands the body to `consume`, each piece as it comes. Returns after the last.

        Raises UpstreamTimeoutError after `idle_timeout_s` of silence, UpstreamBrokenError when it breaks off, and
        what `consume` raises.
        """
        kept, self._kept = self._kept, []
        if self._is_ended:
            consume(b"".join(kept), True, None)
            return
        if kept:
            consume(b"".join(kept), False, None)
        if self._fault is not None:
            raise self._fault
        link = self._link
        if link is None:
            raise RuntimeError("the answer has been closed")
        self._consume = consume
        self._end = link.loop.create_future()
        if not self.is_paused:
            if self._n_kept > _MAX_KEPT_BYTES:
                link.resume_reading()
            self._wait(link)
        try:
            await self._end
        finally:
            self._consume = None
            if self._link is not None:
                self._link.patience.rest()

    async def whole(self, max_bytes: int) -> bytes | None:
        """The whole body, read as `pour` does; None when it is longer than `max_bytes`."""
        start = await self.start(max_bytes + 1)
        return start if len(start) <= max_bytes else None

    async def start(self, max_bytes: int) -> bytes:
        """As much of the body, read as `pour` does."""
        pieces: list[bytes] = []
        n_bytes = 0

        def take(piece: bytes, is_last: bool, _chunks: bytes | None) -> None:
            nonlocal n_bytes
            n_bytes += len(piece)
            pieces.append(piece)
            if n_bytes >= max_bytes and not is_last:
                raise _EnoughError

        with suppress(_EnoughError):
            await self.pour(take)
        return b"".join(pieces)[:max_bytes]

    def pause(self) -> None:
        """Who consumes is slow: nothing more for now. That is not the instance's silence."""
        if not self.is_paused:
            self.is_paused = True
            if self._link is not None:
                self._link.patience.rest()
                self._link.pause_reading()

    def resume(self) -> None:
        """Takes `pause` back."""
        if self.is_paused:
            self.is_paused = False
            if self._link is not None:
                if self._consume is not None:
                    self._wait(self._link)
                self._link.resume_reading()

    def doubt(self, limit_s: float | None) -> None:
        """From now on it may be silent no longer than this; None: for as long as at first."""
        link = self._link
        if link is None or self._consume is None or self.is_paused:
            return
        if limit_s is None:
            self._wait(link)
        else:
            link.patience.hurry(limit_s, "silent for gone_timeout_s ({:g} s), and nothing listens there any more")

    def close(self) -> None:
        """Lets go of it: an answer that was not received to its end costs the connection. Twice does nothing more."""
        link, self._link = self._link, None
        if link is not None:
            link.abort()

    def detach(self) -> tuple[asyncio.Transport, bytes]:
        """After a 101: the connection, not being read, and what came behind the head. Both are the caller's now.

        Raises UpstreamBrokenError when it is lost already.
        """
        link, self._link = self._link, None
        if link is None:
            raise RuntimeError("the answer has been closed")
        return link.detach()

    # ------------------------------------------------------------------ by the connection

    def put(self, piece: bytes, chunks: bytes | None) -> None:
        """More of the body."""
        consume = self._consume
        if consume is None:
            self._kept.append(piece)
            self._n_kept += len(piece)
            if self._n_kept > _MAX_KEPT_BYTES and self._link is not None:
                self._link.pause_reading()
            return
        try:
            consume(piece, False, chunks)
        except Exception as fault:  # noqa: BLE001  it is raised again where the body was asked for
            self._refused(fault)

    def end(self, piece: bytes, chunks: bytes | None, trailers: RawHeaders) -> None:
        """The last of the body."""
        if trailers:
            self.trailers = trailers
        self._is_ended = True
        self._link = None  # it may carry another's answer from now on
        consume = self._consume
        if consume is None:
            self._kept.append(piece)
            return
        try:
            consume(piece, True, chunks)
        except Exception as fault:  # noqa: BLE001  as above
            self._refused(fault)
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def fail(self, fault: BaseException) -> None:
        """There will be no more of the body."""
        if self._is_ended or self._fault is not None:
            return
        self._fault = fault
        if self._end is not None and not self._end.done():
            self._end.set_exception(fault)

    def _refused(self, fault: Exception) -> None:
        self._consume = None
        self._fault = fault
        if self._end is not None and not self._end.done():
            self._end.set_exception(fault)

    def _wait(self, link: "Link") -> None:
        link.patience.wait(self._idle_timeout_s, "silent for idle_timeout_s ({:g} s)")


class _EnoughError(Exception):
    """More of the body than is wanted."""
