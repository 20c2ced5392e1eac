"""An answer is written no faster than its client takes it, and a client that takes nothing for long has left."""

import asyncio
import fcntl
import sys
import termios
from contextlib import suppress

from prefixroute.http.arrival import Source


class Pacing:
    """Of one connection. Whose protocol it is tells it of `paused` and `resumed`, and of the end by `forget`."""

    __slots__ = ("_loop", "_source", "_stall_timeout_s", "_timer", "_transport", "is_paused")

    def __init__(self, loop: asyncio.AbstractEventLoop, stall_timeout_s: float) -> None:
        self._loop = loop
        self._stall_timeout_s = stall_timeout_s
        self._source: Source | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_paused = False
        """Whether more was written than the client has taken."""

    def pace(self, source: Source | None) -> None:
        """`source` is held back from now on whenever the client is slower than it; None: nobody is."""
        self._source = source
        if source is not None and self.is_paused:
            source.pause()

    def paused(self, transport: asyncio.Transport | None) -> None:
        """The transport wants no more for now."""
        self.is_paused = True
        if self._source is not None:
            self._source.pause()
        if transport is not None:
            self._transport = transport
            self._watch(transport)

    def resumed(self) -> None:
        """The transport has room again."""
        self.is_paused = False
        if self._source is not None:
            self._source.resume()
        self.forget()

    def forget(self) -> None:
        """Nobody is timed any more."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self, transport: asyncio.Transport) -> None:
        self._timer = self._loop.call_later(self._stall_timeout_s, self._check, _n_untaken(transport))

    def _check(self, n_before: int) -> None:
        self._timer = None
        transport = self._transport
        if transport is None:
            return
        if _n_untaken(transport) >= n_before:
            transport.abort()
        else:
            self._watch(transport)


def _n_untaken(transport: asyncio.Transport) -> int:
    """Bytes written that the client's machine has not acknowledged, in our buffer and in the kernel's."""
    n_bytes = transport.get_write_buffer_size()
    with suppress(OSError, AttributeError):  # the kernel's: where it tells
        count = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        n_bytes += int.from_bytes(count, sys.byteorder)
    return n_bytes
