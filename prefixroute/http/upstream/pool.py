"""An instance's connections: those in use, and those kept for the next request."""

import asyncio
import logging
from dataclasses import dataclass

from prefixroute.errors import UpstreamUnreachableError
from prefixroute.http.upstream.link import Link
from prefixroute.http.upstream.place import Connector, Place
from prefixroute.names import Names

_log = logging.getLogger(__name__)

# A server that says how long it keeps a connection closes it then; a request must not cross that.
_KEEP_ALIVE_MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds on connections; each is the setting of the same name."""

    connect_timeout_s: float = 3.0
    keepalive_s: float = 4.0
    max_requests: int | None = None
    n_warm: int = 0
    max_header_bytes: int = 65_536


class Pool:
    """Of one instance. The newest kept connection is taken first, so those that are not needed grow old and close.

    There is no cap: a request never waits for another's connection.
    """

    def __init__(self, name: str, url: str, place: Place, limits: ConnectionLimits, names: Names) -> None:
        self.name = name
        self.url = url
        self.place = place
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._connector = Connector(name, place, limits.connect_timeout_s, names)
        self._idle: list[Link] = []
        """Longest kept first."""
        self._links: set[Link] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._sweeps_s = 0.0
        """When the sweeper is due."""
        self._warming: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._is_doubted = False

    def take(self) -> Link | None:
        """A kept connection, if there is one that is still good."""
        idle = self._idle
        now_s = self._loop.time()
        found = None
        while idle and found is None:
            link = idle.pop()
            if link.is_fit(now_s):
                found = link
            else:
                link.abort()
        if self._limits.n_warm:
            for _ in range(self._limits.n_warm - len(idle) - len(self._warming)):
                self._warm()
        return found

    async def connect(self) -> Link:
        """A new connection. Raises UpstreamUnreachableError."""
        made: list[Link] = []

        def make() -> Link:
            link = Link(self.name, self, self._loop, self._limits.max_header_bytes)
            made.append(link)
            return link

        await self._connector.connect(make)
        link = made[-1]
        if link.transport is None or link.transport.is_closing():
            link.abort()
            # It was lost while the loop was still telling us of it.
            raise UpstreamUnreachableError(f"{self.name}: closed at once")
        self._links.add(link)
        return link

    def release(self, link: Link) -> None:
        limits = self._limits
        if (
            self._is_closed
            or (limits.max_requests is not None and link.n_requests >= limits.max_requests)
            or (link.keeping.n_left is not None and link.keeping.n_left <= 0)
        ):
            link.abort()
            return
        keep_s = limits.keepalive_s
        if link.keeping.timeout_s is not None:
            keep_s = min(keep_s, link.keeping.timeout_s - _KEEP_ALIVE_MARGIN_S)
        self._keep(link, keep_s)

    def doubt(self, limit_s: float | None) -> None:
        """Nothing listens at the instance's address: answers under way may be silent for so long. None: it does."""
        if limit_s is None and not self._is_doubted:
            return
        self._is_doubted = limit_s is not None
        for link in self._links:
            link.doubt(limit_s)

    def lost(self, link: Link) -> None:
        self._links.discard(link)
        if link in self._idle:
            self._idle.remove(link)

    def retire(self) -> None:
        """Closes kept connections; those in use close after their answers."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._warming:
            task.cancel()
        for link in tuple(self._idle):
            link.abort()

    async def close(self) -> None:
        """Closes all connections."""
        self.retire()
        for link in tuple(self._links):
            link.abort()
        if self._warming:
            await asyncio.wait(self._warming)
        # What was aborted is told so in the loop's next turn.
        await asyncio.sleep(0)

    def _keep(self, link: Link, keep_s: float) -> None:
        if keep_s <= 0:
            link.abort()
            return
        link.idle_until_s = until_s = self._loop.time() + keep_s
        self._idle.append(link)
        if self._sweeper is None or until_s < self._sweeps_s:
            self._sweep_in(until_s, keep_s)

    def _sweep_in(self, until_s: float, delay_s: float) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._sweeps_s = until_s
        self._sweeper = self._loop.call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        """Closes what was kept for too long. Timed by the earliest end there is, so it runs rarely."""
        self._sweeper = None
        now_s = self._loop.time()
        for link in [link for link in self._idle if now_s >= link.idle_until_s]:
            self._idle.remove(link)
            link.abort()
        if self._idle:
            next_s = min(link.idle_until_s for link in self._idle)
            self._sweep_in(next_s, max(0.0, next_s - now_s))

    def _warm(self) -> None:
        task = self._loop.create_task(self._connect_ahead())
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    async def _connect_ahead(self) -> None:
        try:
            link = await self.connect()
        except UpstreamUnreachableError as error:
            # The request that needs a connection will find out by itself, and say so.
            _log.debug("no connection ahead: %s", error)
            return
        if self._is_closed:
            link.abort()
        else:
            self._keep(link, self._limits.keepalive_s)
