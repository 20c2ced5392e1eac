"""aiohttp's client, made to send exactly what it is given and to tell what became of it.

Its public surface has no place for either, so these are its own parts, slightly changed. What passes between an attempt
and the parts that aiohttp makes on its way goes through a context variable.
"""

import asyncio
import os
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.helpers import _EXC_SENTINEL, set_exception
from aiohttp.http_exceptions import HttpProcessingError

from prefixroute.http.headers import MAX_HEADERS

_READ_REST_BYTES = 65_536


class Link(ResponseHandler):
    """One connection to an instance."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.n_requests = 0
        """Sent on it so far, the one under way included."""
        self.is_idle = False
        self.heard = False
        """Whether a byte has come since the last request went out."""
        self._spare: int | None = None

    def data_received(self, data: bytes) -> None:
        if self.is_idle:
            # Nobody asked: a goodbye (408), say. It would be taken for the answer to the next request.
            # (Without data: aiohttp looks whether something was left over.)
            if data:
                self.close()
            return
        self.heard = self.heard or bool(data)
        super().data_received(data)
        fault, body = self.exception(), self._payload
        if isinstance(fault, HttpProcessingError) and body is not None and not body.is_eof():
            # aiohttp tells it to who waits for a head, not to who reads the body.
            set_exception(body, aiohttp.ClientPayloadError("malformed"), fault)

    def keep_spare(self) -> None:
        """Keeps a second hold on the socket, so that what the instance said before it closed can still be read.

        An instance that answers before it has all of a body, and closes, resets the connection. The loop that finds
        out by writing drops the socket, and with it an answer that is already there.
        """
        transport = self.transport
        if self._spare is None and transport is not None and transport.get_extra_info("sslcontext") is None:
            self._spare = os.dup(transport.get_extra_info("socket").fileno())

    def drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)

    def set_exception(self, exc: BaseException, exc_cause: BaseException = _EXC_SENTINEL) -> None:
        """Also called by aiohttp when a body cannot be written, maybe before the connection is known to be lost."""
        self._read_rest()
        super().set_exception(exc, exc_cause)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._read_rest()
        super().connection_lost(exc)

    def _read_rest(self) -> None:
        while self._spare is not None:
            try:
                data = os.read(self._spare, _READ_REST_BYTES)
            except OSError:
                data = b""
            if data:
                self.data_received(data)
            else:
                self.drop_spare()


class Attempt:
    """What one attempt sends besides its body, and the connection that it got."""

    __slots__ = ("headers", "is_large", "link")

    def __init__(self, headers: list[tuple[str, str]], *, is_large: bool) -> None:
        self.headers = headers
        self.is_large = is_large
        """Its body does not go out in one go, so an answer may come before its end."""
        self.link: Link | None = None


_attempt: ContextVar[Attempt] = ContextVar("attempt")


class _ExactRequest(aiohttp.ClientRequest):
    """Sends the attempt's headers: aiohttp's way of passing them loses repeats that differ in case."""

    def update_headers(self, headers: Any) -> None:
        super().update_headers(None)
        for name, value in _attempt.get().headers:
            self.headers.add(name, value)


class _Connector(aiohttp.TCPConnector):
    """Tells the attempt which connection it got."""

    def __init__(self, **options: Any) -> None:
        super().__init__(limit=0, **options)
        self._factory = cast("partial[ResponseHandler]", partial(Link, loop=self._loop))

    async def connect(self, *args: Any, **kwargs: Any) -> Connection:
        connection = await super().connect(*args, **kwargs)
        link = connection.protocol
        if isinstance(link, Link):
            link.is_idle = link.heard = False
            link.n_requests += 1
            attempt = _attempt.get()
            attempt.link = link
            if attempt.is_large:
                link.keep_spare()
        return connection

    def _release(self, key: Any, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        super()._release(key, protocol, should_close=should_close)
        if isinstance(protocol, Link):
            protocol.is_idle = True
            protocol.drop_spare()


class ExactSession:
    """One pool of connections. Make it inside the event loop that uses it.

    No cookie jar, no proxy variables, no redirects, no decompression, no header of its own, no repeats, no cap.
    """

    def __init__(self, *, connect_timeout_s: float, max_header_bytes: int, read_bytes: int, **pool: Any) -> None:
        self._session = aiohttp.ClientSession(
            connector=_Connector(**pool),
            request_class=_ExactRequest,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=read_bytes,
            max_line_size=max_header_bytes,
            max_field_size=max_header_bytes,
            max_headers=MAX_HEADERS,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            # No total: answers take as long as they take. Waiting for a connection is connecting: there is no cap.
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s),
        )
        # aiohttp repeats GET, PUT, DELETE and their like by itself, on any connection.
        self._session._retry_connection = False

    async def request(self, attempt: Attempt, method: str, url: Any, body: Any) -> aiohttp.ClientResponse:
        """As aiohttp's, with the attempt's headers."""
        _attempt.set(attempt)
        return await self._session.request(method, url, data=body, allow_redirects=False)

    async def close(self) -> None:
        await self._session.close()


def header_text(raw: bytes) -> str:
    """Bytes of a header as aiohttp wants them, to be sent as UTF-8 again.

    What is no UTF-8 is taken for Latin-1, HTTP's old encoding: aiohttp would drop such bytes without a word.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")
