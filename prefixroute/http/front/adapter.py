"""Requests and answers as aiohttp's server has to see them: between it, and an `Arrival` and a `RawResponse`."""

import asyncio
from typing import Any

from aiohttp import HttpVersion, StreamReader
from aiohttp.streams import EMPTY_PAYLOAD

from prefixroute.http.arrival import Arrival, Client, RequestHead
from prefixroute.http.body import MAX_LENGTH_DIGITS
from prefixroute.http.front.limits import LINGER_S, Handler
from prefixroute.http.response import RawResponse

_LANE = "aiohttp"


class FullArrival(Arrival):
    """A request as aiohttp parsed it, and what its server calls on one."""

    __slots__ = ("_task",)  # set by aiohttp's server, which thinks that it has to take it away

    def __init__(self, message: Any, content: StreamReader, client: Client) -> None:
        version: HttpVersion = message.version
        minor = version.minor if version.major == 1 and version.minor in (0, 1) else -1
        head = RequestHead(message.method, message.path, minor, message.raw_headers)
        declared = head.first(b"content-length")
        is_number = declared is not None and declared.isdigit() and len(declared) <= MAX_LENGTH_DIGITS
        super().__init__(
            head,
            head.request_id,
            client,
            _LANE,
            keep_alive=not message.should_close,
            content=None if content is EMPTY_PAYLOAD else content,
            length=int(declared) if declared is not None and is_number else None,
        )

    def _cancel(self, fault: BaseException) -> None:
        """The server stops: who reads the body is told so."""
        if isinstance(self.content, StreamReader):
            self.content.set_exception(fault)

    def _finish(self) -> None:
        """Its answer is over."""


class Written:
    """To aiohttp's server, an answer that is written already."""

    __slots__ = ("_response", "keep_alive")

    def __init__(self, response: RawResponse) -> None:
        self._response = response
        self.keep_alive = response.keep_alive

    async def prepare(self, _request: Any) -> None:
        """Nothing is left to do."""

    async def write_eof(self) -> None:
        """It may have become the last one meanwhile."""
        self.keep_alive = self._response.keep_alive


class Refusal(Written):
    """The last answer on a connection whose bytes are no longer understood."""

    __slots__ = ("_client",)

    def __init__(self, response: RawResponse, client: Client) -> None:
        super().__init__(response)
        self._client = client

    async def write_eof(self) -> None:
        # Closing over bytes that were not read resets the connection, and the reset overtakes the answer. So the
        # client is told that this is all, and until it leaves (which cancels this), what it sends is thrown away.
        transport = self._client.transport
        if transport is not None and transport.can_write_eof():
            transport.write_eof()
            await asyncio.sleep(LINGER_S)


def for_aiohttp(handler: Handler) -> Any:
    """`handler` as aiohttp's server calls one."""

    async def handle(arrival: Arrival) -> Written:
        return Written(await handler(arrival))

    return handle
