"""A client that measures: streams one completion at a time over HTTP and says how it went.

Times are taken with the finest clock there is, not with the event loop's, which may count whole milliseconds.
TTFT is the time from sending the request to the first event that holds text.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from prefixroute.errors import PrefixRouteError

# Below the 5 s after which vLLM's server closes an idle connection: a request sent just then would be lost.
_KEEPALIVE_S = 4.0
_READ_BUFFER_BYTES = 65_536
# An event that does not end is no event stream.
_MAX_EVENT_BYTES = 4 * 1024 * 1024

INSTANCE_HEADER = "x-prefixroute-instance"


class TargetError(PrefixRouteError):
    """The server to be measured cannot be used at all."""

    code = "target_unusable"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. `error`: what kind of failure ended it, None for none; what it did not tell is None as well.

    `send_delay_s`: how much later than its time it was sent, as far as whoever sends it to a time says.
    """

    duration_s: float
    ttft_s: float | None = None
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    instance: str | None = None
    error: str | None = None
    send_delay_s: float = 0.0


class MeasuringClient:
    """An async context manager. `base_url`: scheme, host, port, without the `/v1` of an API base.

    `timeout_s`: for one whole request; None: as long as it takes. No limit on how many are under way.
    """

    def __init__(self, base_url: str, *, timeout_s: float | None = None, api_key: str | None = None) -> None:
        self._base_url = base_url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=timeout_s)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._open_session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._open_session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            skip_auto_headers=("Accept-Encoding",),
            timeout=self._timeout,
            trust_env=False,
            read_bufsize=_READ_BUFFER_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session, self._open_session = self._session, None
        await session.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._open_session is None:
            raise RuntimeError("the client is used outside its context")
        return self._open_session

    async def models(self) -> list[str]:
        """The ids of GET /v1/models; empty if the answer lists none. Raises TargetError if nothing answers."""
        try:
            async with self._session.get(self._base_url + "/v1/models", timeout=_quick(self._timeout)) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TargetError(f"{self._base_url} cannot be reached: {_cause(error)}") from error
        try:
            return [model["id"] for model in orjson.loads(body)["data"] if isinstance(model["id"], str)]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return []

    async def stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Sample:
        """Post `body`, which asks for a stream with usage, and read the answer to its end. Raises nothing of HTTP's."""
        data = orjson.dumps(body)
        watch = _StreamWatch()
        instance: str | None = None
        began_s = time.perf_counter()
        try:
            async with self._session.post(self._base_url + path, data=data, headers=headers) as response:
                instance = response.headers.get(INSTANCE_HEADER)
                if response.status != 200:
                    watch.error = f"HTTP {response.status}"
                    await response.read()
                else:
                    while piece := await response.content.readany():
                        watch.see(piece)
                    watch.end()
        except TimeoutError:
            watch.error = "timeout"
        except (aiohttp.ClientConnectionError, OSError):
            watch.error = "connection"
        except (aiohttp.ClientError, ValueError, TypeError):
            watch.error = "broken answer"
        duration_s = time.perf_counter() - began_s
        return Sample(
            duration_s=duration_s,
            ttft_s=None if watch.first_text_s is None else watch.first_text_s - began_s,
            text="".join(watch.texts),
            prompt_tokens=_count(watch.usage.get("prompt_tokens")),
            cached_tokens=_cached_tokens(watch.usage),
            output_tokens=_count(watch.usage.get("completion_tokens")),
            instance=instance,
            error=watch.error,
        )


class _StreamWatch:
    """Reads the events of one stream as they come. Raises ValueError or TypeError for what is no event stream."""

    __slots__ = ("_done", "_rest", "error", "first_text_s", "texts", "usage")

    def __init__(self) -> None:
        self.error: str | None = None
        self.first_text_s: float | None = None
        self.texts: list[str] = []
        self.usage: dict[str, Any] = {}
        self._rest = b""
        self._done = False

    def see(self, piece: bytes) -> None:
        for data in self._complete(piece):
            if data == b"[DONE]":
                self._done = True
                continue
            event = orjson.loads(data)
            if not isinstance(event, dict):
                raise TypeError("an event is no object")
            if event.get("usage"):
                self.usage = event["usage"]
            if "error" in event:
                self.error = "error in the stream"
            for choice in event.get("choices") or ():
                if not isinstance(choice, dict):
                    raise TypeError("a choice is no object")
                text = choice.get("text") or (choice.get("delta") or {}).get("content")
                if text:
                    if self.first_text_s is None:
                        self.first_text_s = time.perf_counter()
                    self.texts.append(text)

    def end(self) -> None:
        if not self._done and self.error is None:
            self.error = "broken answer"

    def _complete(self, piece: bytes) -> Iterator[bytes]:
        """Data of the lines that `piece` completes. One line is one event: nobody splits JSON over lines."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise ValueError("an event does not end")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _cached_tokens(usage: Mapping[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _quick(timeout: aiohttp.ClientTimeout) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=min(timeout.total or 10.0, 10.0))


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError):
        # asyncio puts the address into `strerror`; a name that cannot be resolved has a number that is no errno.
        return os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror or type(cause).__name__
    return str(cause) or type(cause).__name__


async def sleep_until(due_s: float) -> None:
    """Sleep to a moment of `time.perf_counter`; not at all if it has passed."""
    await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
