"""Where aiohttp's parser goes wrong about what comes behind a request. The connection then ends with that request.

- A trailer of a chunked body is kept, and becomes the first header of the next request: another client's, where a
  proxy in front shares the connection.
- Behind an offer of another protocol that is declined (`Upgrade: h2c`), the rest of what was read is thrown away: the
  next request is lost, or read from its middle.
"""

import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

from aiohttp import StreamReader

from prefixroute.http.body import MAX_LENGTH_DIGITS
from prefixroute.http.headers import asks_for_websocket

# How the bytes of a body end that has no trailers: with the last chunk and an empty line, and behind it at most the
# beginning of another head. An empty line later on would be the end of trailers, or of that head. An extension has a
# semicolon, which no trailer's name can have.
_NO_TRAILERS = re.compile(rb"\n0+(?:;[^\r\n]*)?\r\n\r\n(?:[^\r\n]+\r\n)*[^\r\n]*\r?\Z")
# What of the last bytes is looked at. An extension or half a head that is longer costs the connection, nothing else.
_LAST_BYTES = 4096


class Next(Enum):
    """What may come next on the connection."""

    REQUEST = "request"
    BODY = "body"
    """The rest of the request that is under way; then nothing."""
    NOTHING = "nothing"


class ParserGaps:
    """Of one connection. `look` follows all that the parser is fed."""

    __slots__ = ("_chunked", "_doomed", "_last", "_offer_left_bytes")

    def __init__(self) -> None:
        self._chunked: StreamReader | None = None
        """The body under way, where it is chunked."""
        self._last = b""
        """The last bytes of it so far."""
        self._offer_left_bytes = 0
        """What is still to come of a request with a declined offer."""
        self._doomed: StreamReader | None = None
        """The body of such a request, where nobody can tell how much is still to come."""

    @property
    def is_watching(self) -> bool:
        """Whether what comes may matter, though no request begins in it."""
        return self._chunked is not None or self._doomed is not None or self._offer_left_bytes > 0

    def look(self, data: bytes, messages: Sequence[tuple[Any, StreamReader]], *, at_head: bool) -> Next:
        """`messages`: what the parser made of `data`. `at_head`: `data` begins where a request does."""
        if self._offer_left_bytes:
            self._offer_left_bytes -= len(data)
            if self._offer_left_bytes < 0:
                return Next.NOTHING
        for message, body in messages:
            # The one before is complete, as another has begun.
            if self._chunked is not None and not _begins_in(data, message):
                return Next.NOTHING
            self._chunked = body if message.chunked else None
            if message.upgrade and (message.chunked or not asks_for_websocket(message.raw_headers)):
                left_bytes = _left_bytes(data, message) if at_head and len(messages) == 1 else None
                if left_bytes is None:
                    self._doomed = body
                elif left_bytes < 0:
                    return Next.NOTHING
                else:
                    self._offer_left_bytes = left_bytes
        if self._doomed is not None:
            return Next.NOTHING if self._doomed.is_eof() else Next.BODY
        if self._chunked is None:
            return Next.REQUEST
        last, self._last = (self._last + data[-_LAST_BYTES:])[-_LAST_BYTES:], b""
        if not self._chunked.is_eof():
            self._last = last
            return Next.REQUEST
        self._chunked = None
        return Next.REQUEST if _NO_TRAILERS.search(last) else Next.NOTHING


def _begins_in(data: bytes, message: Any) -> bool:
    """Whether the first header that the parser gives to a request is the one behind its request line.

    Who sends both requests in one piece can make it seem so, and harm nobody else.
    """
    line = f"{message.method} {message.path} HTTP/1.{message.version.minor}\r\n".encode("utf-8", "surrogateescape")
    name = message.raw_headers[0][0] + b":" if message.raw_headers else b"\r\n"
    return line + name in data


def _left_bytes(data: bytes, message: Any) -> int | None:
    """How much of a request is still to come that begins with `data`; negative: more has come. None: unknown."""
    length = message.headers.get("Content-Length", "0")
    if message.chunked or len(length) > MAX_LENGTH_DIGITS:
        return None
    return data.find(b"\r\n\r\n") + 4 + int(length) - len(data)
