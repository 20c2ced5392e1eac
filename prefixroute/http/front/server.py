"""The front server: makes a connection of its lane for each client, and ends them all."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp.http_parser
from aiohttp import StreamReader, web

from prefixroute.http.front.adapter import FullArrival, for_aiohttp
from prefixroute.http.front.fast import FastConnection
from prefixroute.http.front.full import FullConnection
from prefixroute.http.front.limits import LINGER_S, ClientLimits, Handler
from prefixroute.http.headers import MAX_HEADERS

# How often it is looked whether clients are there that are not being read.
_LOOK_EVERY_S = 1.0


class FrontServer(web.Server):
    """Accepts connections on sockets it is given.

    `on_unread`: gets the code of each answer to what is no request. `names_clients`: whether such lines tell addresses.
    `max_fast_bytes`: of a body, up to which plain requests are taken without aiohttp; 0: none is.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ClientLimits,
        on_unread: Callable[[str], None] = lambda _code: None,
        *,
        names_clients: Callable[[], bool] = lambda: False,
        max_fast_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(
            for_aiohttp(handler),
            request_factory=self._request,
            # Without it a client that leaves during a silent answer keeps its place until the next write.
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            max_headers=MAX_HEADERS,
            lingering_time=LINGER_S,
            keepalive_timeout=limits.idle_timeout_s,
        )
        self._handler = handler
        self._looker: asyncio.TimerHandle | None = None
        self._limits = limits
        self._on_unread = on_unread
        self._names_clients = names_clients
        self._max_fast_bytes = max_fast_bytes
        self._fast: set[FastConnection] = set()
        self._is_ending = False

    def __call__(self) -> asyncio.Protocol:  # type: ignore[override]  # a handler of its own, or one that may make one
        loop = asyncio.get_running_loop()
        if self._looker is None:
            self._looker = loop.call_later(_LOOK_EVERY_S, self._look_for_gone)
        if not self._max_fast_bytes():
            return self._full()
        connection = FastConnection(
            self._handler,
            self._limits,
            loop,
            make_full=self._full,
            max_bytes=self._max_fast_bytes,
            connections=self._fast,
        )
        connection.is_ending = self._is_ending  # who is let in a moment too late
        return connection

    def transports(self) -> list[asyncio.Transport]:
        """Of all connections."""
        return list({one.transport: None for one in self._all() if one.transport is not None})

    async def shutdown(self, timeout: float | None = None) -> None:
        """Closes all connections; answers under way may take `timeout` seconds more."""
        await asyncio.gather(super().shutdown(timeout), *(one.shutdown(timeout) for one in tuple(self._fast)))
        if self._looker is not None:
            self._looker.cancel()

    def pre_shutdown(self) -> None:
        """No new requests on the connections there are, and none on others."""
        self._is_ending = True
        for connection in self._all():
            connection.end()

    def _full(self) -> FullConnection:
        return FullConnection(
            self,
            loop=asyncio.get_running_loop(),
            limits=self._limits,
            on_unread=self._on_unread,
            names_clients=self._names_clients,
            **self._kwargs,
        )

    def _all(self) -> list[FullConnection | FastConnection]:
        full: Iterable[Any] = self.connections
        return [*self._fast, *full]

    def _look_for_gone(self) -> None:
        connections = self._all()
        for connection in connections:
            connection.look_whether_gone()
        self._looker = None
        if connections:
            self._looker = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_for_gone)

    @staticmethod
    def _request(message: Any, body: StreamReader, connection: Any, _writer: Any, _task: Any) -> Any:
        connection.take_in(body)
        return FullArrival(message, body, connection)


def has_fast_parser() -> bool:
    """Whether aiohttp's compiled HTTP parser is there. Its stand-in in Python is slower, and refuses less."""
    return aiohttp.http_parser.HttpRequestParser is not aiohttp.http_parser.HttpRequestParserPy
