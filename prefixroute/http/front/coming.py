"""A body of known length that comes in pieces."""

import asyncio
from collections import deque
from collections.abc import Callable

# A loop may hand over eight megabytes before anybody has a turn. Pieces are joined up to about this.
_JOINED_BYTES = 262_144


class ComingBody:
    """Of `n_bytes`. Who reads it waits in `readany`, as `arrival.Body` has it; whose connection it is feeds it.

    `on_wait`: called whenever more is waited for.
    """

    __slots__ = ("_is_dropped", "_n_left", "_on_wait", "_pieces", "_waiter", "total_bytes")

    def __init__(self, n_bytes: int, on_wait: Callable[[], None] = lambda: None) -> None:
        self.total_bytes = 0
        self._n_left = n_bytes
        self._pieces: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_dropped = False
        self._on_wait = on_wait

    def feed(self, data: bytes) -> bytes:
        """More of the connection's bytes. Returns what is behind the body's end."""
        n_left = self._n_left - len(data)
        rest = b""
        if n_left < 0:
            data, rest = data[:n_left], data[n_left:]
            n_left = 0
        self._n_left = n_left
        self.total_bytes += len(data)
        if not self._is_dropped:
            self._pieces.append(data)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return rest

    def is_eof(self) -> bool:
        """Whether all of it has come."""
        return not self._n_left

    def at_eof(self) -> bool:
        """Whether all of it has been read."""
        return not self._n_left and not self._pieces

    async def readany(self) -> bytes:
        """What has come and was not read yet, or the beginning of it when that is much, as soon as there is something;
        empty at the end."""
        pieces = self._pieces
        if not pieces and self._n_left:
            await self._more()
        if not pieces:
            return b""
        piece = pieces.popleft()
        if not pieces:
            return piece
        taken, n_bytes = [piece], len(piece)
        while pieces and n_bytes < _JOINED_BYTES:
            taken.append(pieces.popleft())
            n_bytes += len(taken[-1])
        return b"".join(taken)

    async def drop(self) -> None:
        """What is left of it is of no interest. Until all of it has come."""
        self._is_dropped = True
        self._pieces.clear()
        while self._n_left:
            await self._more()

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        self._on_wait()
        await self._waiter
