"""An instance's answer: its head is here, its body comes as it is read."""

import asyncio
from typing import Protocol

import aiohttp
from aiohttp.streams import EMPTY_PAYLOAD

from prefixroute.errors import UpstreamBrokenError, UpstreamTimeoutError
from prefixroute.http.aiohttp_client import Attempt
from prefixroute.http.headers import RawHeaders, all_of, first


class GarbledAnswerError(UpstreamBrokenError):
    """An answer began, and is none that could be passed on."""


class Answer(Protocol):
    """An instance's answer, its head received. Close it, whatever happens."""

    @property
    def status(self) -> int:
        """At least 200."""
        ...

    @property
    def reason(self) -> bytes: ...

    @property
    def headers(self) -> RawHeaders:
        """As received, hop-by-hop headers included."""
        ...

    async def read(self) -> bytes:
        """The next piece of the body as soon as there is one; empty at its end.

        Raises UpstreamTimeoutError after `idle_timeout_s` of silence, UpstreamBrokenError when it breaks off.
        """
        ...

    def close(self) -> None:
        """Lets go of it: an answer that was not read to its end costs the connection. The second time does nothing."""
        ...


class AiohttpAnswer:
    """`Answer` over aiohttp's response."""

    __slots__ = (
        "_content",
        "_ends_with_connection",
        "_idle_timeout_s",
        "_link",
        "_loop",
        "_name",
        "_response",
        "_since_s",
        "_timed_out",
        "_timer",
    )

    def __init__(
        self, name: str, attempt: Attempt, response: aiohttp.ClientResponse, idle_timeout_s: float | None
    ) -> None:
        self._name = name
        self._link = attempt.link
        self._response = response
        self._content = response.content
        self._idle_timeout_s = idle_timeout_s
        self._timed_out = False
        self._loop = asyncio.get_running_loop()
        # A body that ends with its connection: aiohttp takes a reset for its end.
        self._ends_with_connection = (
            self._content is not EMPTY_PAYLOAD
            and first(self.headers, b"content-length") is None
            and first(self.headers, b"transfer-encoding") is None
        )
        # Since when a piece is waited for; None while none is: a slow client is not the instance's silence.
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if idle_timeout_s is not None:
            self._timer = self._loop.call_later(idle_timeout_s, self._watch, idle_timeout_s)

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def reason(self) -> bytes:
        return (self._response.reason or "").encode("utf-8", "surrogateescape")

    @property
    def headers(self) -> RawHeaders:
        return self._response.raw_headers

    def check(self) -> None:
        """Raises GarbledAnswerError for what cannot be passed on."""
        codings, lengths = all_of(self.headers, b"transfer-encoding"), all_of(self.headers, b"content-length")
        if self.status < 200 or len(codings) + len(lengths) > 1 or (codings and codings[0].lower() != b"chunked"):
            self.close()
            raise GarbledAnswerError(f"{self._name}: answered in a protocol or framing that was not asked for")

    async def read(self) -> bytes:
        self._since_s = self._loop.time()
        try:
            piece = await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if self._timed_out:
                raise UpstreamTimeoutError(
                    f"{self._name}: silent for idle_timeout_s ({self._idle_timeout_s:g} s)"
                ) from error
            raise UpstreamBrokenError(f"{self._name}: answer broke off ({type(error).__name__})") from error
        finally:
            self._since_s = None
        if not piece and self._ends_with_connection and self._link is not None:
            cut = self._link.exception()
            if isinstance(cut, OSError):
                raise UpstreamBrokenError(f"{self._name}: answer broke off ({type(cut).__name__})")
        return piece

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._content.is_eof():
            self._response.release()
        else:
            self._response.close()

    def _watch(self, limit_s: float) -> None:
        # One timer an answer, set again only when it fires: silence is measured without work for each piece.
        since_s = self._since_s
        left_s = limit_s if since_s is None else since_s + limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._watch, limit_s)
            return
        self._timer = None
        self._timed_out = True
        self._response.close()
