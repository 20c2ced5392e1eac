"""After a 101: bytes both ways between two connections, until both are closed. Nobody reads them."""

import asyncio
from typing import cast

# How long one side may take for what the other said last, once that one has gone.
_LINGER_S = 5.0
# As much as transports take before they ask for a pause.
_MAX_UNSENT_BYTES = 65_536


class Tunnel:
    """Joins two connections: `join` once, then `wait`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ends: list[_End] = []
        self._done: asyncio.Future[None] = loop.create_future()
        self.relayed_bytes = 0
        """Sent to the client so far."""

    def join(self, client: asyncio.Transport, client_rest: bytes, upstream: asyncio.Transport, rest: bytes) -> None:
        """`client_rest`, `rest`: what either side has said already. Both transports are read from now on."""
        here, there = _End(self, client), _End(self, upstream)
        here.other, there.other = there, here
        self._ends = [here, there]
        for end in self._ends:
            end.transport.set_protocol(end)
        for end, said in ((here, client_rest), (there, rest)):
            if said:
                end.data_received(said)
        for end in self._ends:
            if end.transport.is_closing():
                # Its end was told to its former protocol.
                end.connection_lost(None)
            elif end.other.transport.get_write_buffer_size() <= _MAX_UNSENT_BYTES:
                end.transport.resume_reading()
            else:
                # It may have been told so before it had this protocol. `resume_writing` comes in any case.
                end.transport.pause_reading()

    async def wait(self) -> None:
        """Until both sides are closed. Cancelled, it closes them."""
        try:
            await self._done
        finally:
            for end in self._ends:
                end.transport.abort()

    def received(self, end: "_End", n_bytes: int) -> None:
        if end is self._ends[1]:
            self.relayed_bytes += n_bytes

    def linger(self, end: "_End") -> None:
        self._loop.call_later(_LINGER_S, end.transport.abort)

    def lost(self) -> None:
        if all(end.is_lost for end in self._ends) and not self._done.done():
            self._done.set_result(None)


class _End(asyncio.Protocol):
    """One side."""

    def __init__(self, tunnel: Tunnel, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.other = cast(_End, None)
        self.is_lost = False
        self._tunnel = tunnel

    def data_received(self, data: bytes) -> None:
        if not self.other.transport.is_closing():
            self._tunnel.received(self, len(data))
            self.other.transport.write(data)

    def eof_received(self) -> None:
        """Who closes its sending side has left: the transport closes, and takes the other along."""

    def pause_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        other = self.other
        if not other.is_lost:
            # `close` waits until the other has taken what is written; one that takes nothing is not waited for.
            other.transport.close()
            self._tunnel.linger(other)
        self._tunnel.lost()
