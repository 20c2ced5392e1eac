"""What goes to an instance on one connection, as fast as it is taken; and a second hold on the socket while it goes."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

# A long body is given to the loop in slices of this size, each in a step of its own: a socket may take all of it as
# fast as it is copied, and asyncio's own transports copy what it does not take.
_SLICE_BYTES = 1_048_576
_READ_REST_BYTES = 65_536
_MAX_REST_BYTES = 1_048_576


class Sending:
    """Of one connection, whose protocol tells it of `paused`, `resumed` and `ended`."""

    __slots__ = (
        "_is_over",
        "_is_writing_on",
        "_loop",
        "_spare",
        "_transport",
        "_unwritten",
        "_writable",
        "has_begun",
        "is_paused",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._unwritten: memoryview | None = None
        """What of a body is still to be given to the loop."""
        self._is_writing_on = False
        """Whether the next slice of it is about to be."""
        self._writable: asyncio.Future[None] | None = None
        self._spare: int | None = None
        self._is_over = False
        self.is_paused = False
        """Whether more was written than the instance has taken."""
        self.has_begun = False
        """Whether any byte of a request was given to the loop."""

    @property
    def has_spare(self) -> bool:
        """Whether there is a second hold on the socket."""
        return self._spare is not None

    @property
    def has_unsent(self) -> bool:
        """Whether the instance has not taken all of what is there to be sent."""
        transport = self._transport
        return self._unwritten is not None or (transport is not None and transport.get_write_buffer_size() > 0)

    def write(self, data: bytes) -> None:
        """Nothing is written on a connection that is gone: who waits for the answer has been told."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self.has_begun = True
            transport.write(data)

    def write_large(self, head: bytes, body: bytes) -> None:
        """As `write`, for more than may fit in the socket's buffer. Nothing is copied that fits, and what is behind a
        slice is written as the instance takes it."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self.has_begun = True
        if len(body) <= _SLICE_BYTES:
            transport.writelines((head, body))
        else:
            view = memoryview(body)
            self._unwritten = view[_SLICE_BYTES:]
            transport.writelines((head, view[:_SLICE_BYTES]))
            self._write_soon()
        if self.has_unsent:
            self.keep_spare()

    async def writable(self) -> None:
        """Until the instance has taken enough of what was written, or is gone."""
        while self.is_paused and not self._is_over:
            if self._writable is None:
                self._writable = self._loop.create_future()
            # Shielded: a second waiter would be cancelled with the first.
            await asyncio.shield(self._writable)

    def stop(self) -> None:
        """The rest of what is being sent is of no interest any more."""
        self._unwritten = None
        self.drop_spare()

    # ------------------------------------------------------------------ by the connection's protocol

    def begins(self, transport: asyncio.Transport) -> None:
        """The connection is made."""
        self._transport = transport

    def paused(self) -> None:
        """The transport wants no more for now."""
        self.is_paused = True

    def resumed(self) -> None:
        """The transport has room again."""
        self.is_paused = False
        self._wake()
        self._write_soon()

    def ended(self) -> None:
        """The connection is gone, or somebody else's."""
        self._is_over = True
        self._transport = None
        self.stop()
        self._wake()

    # ------------------------------------------------------------------ the second hold

    def keep_spare(self) -> None:
        """Keeps a second hold on the socket, so that what the instance said before it closed can still be read.

        An instance that answers before it has all of a body, and closes, resets the connection. The loop that finds
        out by writing drops the socket, and with it an answer that is already there.
        """
        transport = self._transport
        if self._spare is None and transport is not None and transport.get_extra_info("sslcontext") is None:
            with suppress(OSError):  # no descriptor is left: it goes without
                self._spare = os.dup(transport.get_extra_info("socket").fileno())

    def drop_spare(self) -> None:
        """Nothing more will be read by it."""
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)

    def read_spare(self, take: Callable[[bytes], None]) -> None:
        """Gives `take` what the instance has said and the loop has not read, and lets go of the socket."""
        n_left = _MAX_REST_BYTES
        while self._spare is not None:
            # An early answer is short; whoever sends more of it is not read in one go.
            try:
                data = os.read(self._spare, _READ_REST_BYTES) if n_left > 0 else b""
            except OSError:
                data = b""
            if not data:
                self.drop_spare()
                return
            n_left -= len(data)
            take(data)

    # ------------------------------------------------------------------ slices

    def _write_soon(self) -> None:
        """The next slice, unless the instance is slow: then when it has taken what it was given."""
        if self._unwritten is not None and not self.is_paused and not self._is_writing_on:
            self._is_writing_on = True
            self._loop.call_soon(self._write_on)

    def _write_on(self) -> None:
        self._is_writing_on = False
        transport, view = self._transport, self._unwritten
        if view is None or self.is_paused:
            return
        if transport is None or transport.is_closing():
            self._unwritten = None
            return
        self._unwritten = view[_SLICE_BYTES:] if len(view) > _SLICE_BYTES else None
        transport.write(view[:_SLICE_BYTES])
        self._write_soon()

    def _wake(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None
