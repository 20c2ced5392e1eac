"""Addresses of host names: looked up once for everybody who asks, and kept for a while.

The loop looks names up in a few threads that all of them share. So a name that nobody answers for must not be asked for
again and again, and a burst of requests must not become a burst of look-ups.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
"""As `socket.getaddrinfo` gives them."""

# How long addresses are used before they are asked for again.
KEPT_S = 10.0
# How long after a failed look-up the next one may begin.
_AGAIN_S = 1.0
# How long a new look-up is waited for where old addresses are known.
_PATIENCE_S = 0.5
_MAX_NAMES = 4096


class _Name:
    __slots__ = ("addresses", "fault", "lookup", "until_s")

    def __init__(self) -> None:
        self.addresses: list[AddressInfo] = []
        self.fault: OSError | None = None
        self.until_s = 0.0
        """Until when `addresses`, or `fault`, is the answer."""
        self.lookup: asyncio.Task[None] | None = None


class Names:
    """Of one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._names: dict[tuple[str, int], _Name] = {}

    async def addresses(self, host: str, port: int) -> list[AddressInfo]:
        """Where `host` is, best first. Raises OSError: nobody knows.

        Old addresses are used while a look-up takes long.
        """
        name = self._names.get((host, port))
        if name is None:
            while len(self._names) >= _MAX_NAMES:
                del self._names[next(iter(self._names))]
            name = self._names[host, port] = _Name()
        if self._clock() >= name.until_s:
            if name.lookup is None:
                name.lookup = asyncio.create_task(self._look_up(name, host, port))
            # Shielded: the others wait for it, too.
            patience_s = _PATIENCE_S if name.addresses else None
            await asyncio.wait([name.lookup], timeout=patience_s)
        if name.addresses:
            return name.addresses
        raise name.fault or socket.gaierror(socket.EAI_AGAIN, "Name or service not known")

    def doubt(self, host: str, port: int) -> None:
        """None of its addresses could be reached: they are asked for again before they are used."""
        name = self._names.get((host, port))
        if name is not None and name.addresses:
            name.until_s = 0.0

    async def _look_up(self, name: _Name, host: str, port: int) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            name.addresses, name.fault = [*found], None
            name.until_s = self._clock() + KEPT_S
        except OSError as fault:
            # Whoever has old addresses goes on with them: a name server that fails says nothing about an instance.
            name.fault = fault
            name.until_s = self._clock() + _AGAIN_S
        finally:
            name.lookup = None
