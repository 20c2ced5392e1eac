"""A body of known length that comes in pieces."""

import asyncio


class ComingBody:
    """Of `n_bytes`. Who reads it waits in `readany`, as `arrival.Body` has it; whose connection it is feeds it."""

    __slots__ = ("_is_dropped", "_n_left", "_pieces", "_waiter", "total_bytes")

    def __init__(self, n_bytes: int) -> None:
        self.total_bytes = 0
        self._n_left = n_bytes
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_dropped = False

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
        """What has come and was not read yet, as soon as there is something; empty at the end."""
        if not self._pieces and self._n_left:
            await self._more()
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def drop(self) -> None:
        """What is left of it is of no interest. Until all of it has come."""
        self._is_dropped = True
        self._pieces.clear()
        while self._n_left:
            await self._more()

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
