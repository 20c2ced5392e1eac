"""The request's body: read whole for routing, or handed on as it comes."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO

from prefixroute.errors import BodyTooLargeError, RequestError
from prefixroute.http.arrival import Arrival, Body, RequestHead

# Up to this, joining the pieces of a body at its end takes less than growing it with each of them does; above, it would
# stop the event loop: 15 ms for 25 MB, most of which is the system's, which has new pages to give.
_JOINED_BYTES = 1024 * 1024
# Of what is here already, so much is taken in one step: others have a turn then. A piece counts as so much more, as it
# may be thousands of chunks of a byte each, put together.
_AT_ONCE_BYTES = 512 * 1024
_PIECE_BYTES = 128 * 1024
# As many as 64 bits need.
MAX_LENGTH_DIGITS = 19
# A host and a port (RFC 9110, 7.2), both of which may be empty. A comma would be allowed; it is what becomes of two
# Hosts that somebody has joined.
_AUTHORITY = re.compile(rb"(?:\[[0-9A-Za-z:.%~_-]+\]|[0-9A-Za-z._~%!$&'()*+;=-]*)(?::[0-9]{0,5})?")


class FramingError(RequestError):
    """Where the request ends is a matter of opinion: its connection is of no more use."""

    code = "ambiguous_framing"


class MalformedHeadError(FramingError):
    """The head is not valid HTTP, though it could be parsed."""

    code = "malformed_request"


class MalformedBodyError(FramingError):
    """The body's chunks are not valid HTTP."""

    code = "malformed_request"


class SlowBodyError(FramingError):
    """The client took too long over the body. What it may still send is nobody's any more."""

    status = 408
    code = "request_timeout"


class ExpectationError(RequestError):
    """The client demands what cannot be met."""

    status = 417
    code = "expectation_failed"


def check_head(head: RequestHead) -> None:
    """Refuses heads that two servers may read differently. Raises FramingError.

    aiohttp's parser refuses most of them. It lets through: other codings besides chunked, and any on HTTP/1.0; lengths
    of thousands of digits; a Host that names no host; the first lines of HTTP/0.9 and HTTP/2; fragments in targets.
    """
    if "#" in head.target:
        # Some would cut it off there, and see another path (RFC 9112, 3.2).
        raise MalformedHeadError("the request target must have no fragment ('#' is sent as %23)")
    if head.minor not in (0, 1):
        raise FramingError("only HTTP/1.1 and HTTP/1.0 are spoken here")
    declared: bytes | None = None
    codings: list[bytes] = []
    for name, value in head.headers:
        match name.lower():
            case b"transfer-encoding":
                codings.append(value)
            case b"content-length":
                declared = value
                if len(value) > MAX_LENGTH_DIGITS or not value.isdigit():
                    raise FramingError("the request's Content-Length cannot be taken")
            case b"host":
                if not is_authority(value):
                    raise MalformedHeadError("the request's Host names no host")
    if codings and (
        len(codings) > 1 or codings[0].strip().lower() != b"chunked" or head.minor == 0 or declared is not None
    ):
        raise FramingError("the request's Transfer-Encoding cannot be taken (only 'chunked', on HTTP/1.1)")


def is_authority(host: bytes) -> bool:
    """Whether a Host names a host."""
    return _AUTHORITY.fullmatch(host) is not None


def expect_continue(arrival: Arrival) -> None:
    """Tells a client that waits for it to send its body. Raises ExpectationError for any other demand."""
    head = arrival.head
    if b"expect" not in head.index or head.minor == 0:
        return
    if any(demand.strip().lower() != b"100-continue" for demand in head.all_of(b"expect")):
        raise ExpectationError("only 'Expect: 100-continue' can be met")
    transport = arrival.client.transport
    if transport is not None:
        transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How long a body may be, and how long it may be waited for: `timeout_s`, and a second for `bytes_per_s` of it.

    Only waiting counts: a body that the instance is slow to take is nobody's fault here.
    """

    max_bytes: int
    timeout_s: float = 30.0
    bytes_per_s: float = 1024.0


def check_length(arrival: Arrival, limits: BodyLimits) -> None:
    """Raises BodyTooLargeError when the body's length is known to be above its limit."""
    if arrival.length is not None and arrival.length > limits.max_bytes:
        raise _too_large(limits.max_bytes)


async def read_whole(arrival: Arrival, limits: BodyLimits) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to be too long, and SlowBodyError."""
    if arrival.whole is not None:
        return arrival.whole
    content = arrival.content
    if content is None:
        return b""
    incoming = _Incoming(content, limits)
    # Most bodies are here in one piece.
    body = await incoming.piece()
    if content.at_eof():
        return body
    growing = GrowingBytes(arrival.length or 0)
    growing.add(body)
    while piece := await incoming.piece():
        growing.add(piece)
    return growing.whole()


class GrowingBytes:
    """Pieces that become one. No `add` or `whole` costs more than a few pieces, however many there have been.

    `n_bytes`: as many as are expected.
    """

    __slots__ = ("_grown", "_n_bytes", "_n_expected", "_pieces")

    def __init__(self, n_bytes: int = 0) -> None:
        self._n_expected = n_bytes
        self._n_bytes = 0
        self._pieces: list[bytes] = []
        self._grown: BytesIO | None = None

    def add(self, piece: bytes) -> None:
        """A further piece."""
        if self._grown is not None:
            self._grown.write(piece)
            return
        self._pieces.append(piece)
        self._n_bytes += len(piece)
        if self._n_bytes > _JOINED_BYTES:
            # Of zeros that the system makes only when they are written on. Without an expected length it grows by
            # moving pages about, or by copies below the size from which on it has pages of its own.
            self._grown = BytesIO(bytes(self._n_expected))
            self._grown.writelines(self._pieces)
            self._pieces.clear()

    def whole(self) -> bytes:
        """All of it. Nothing more can be added."""
        if self._grown is None:
            return b"".join(self._pieces)
        # No copy: what was written is the object itself, once its length is right.
        self._grown.truncate()
        return self._grown.getvalue()


async def stream(content: Body, limits: BodyLimits) -> AsyncIterator[bytes]:
    """The body as it comes, for an upstream that takes it as fast as it can.

    Raises BodyTooLargeError and SlowBodyError in its course.
    """
    incoming = _Incoming(content, limits)
    while piece := await incoming.piece():
        yield piece


class _Incoming:
    """A body under way."""

    __slots__ = ("_content", "_limits", "_loop", "_n_at_once", "_n_bytes", "_waited_s")

    def __init__(self, content: Body, limits: BodyLimits) -> None:
        self._content = content
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._n_bytes = 0
        self._n_at_once = 0
        """Taken since others last had a turn, as `_AT_ONCE_BYTES` counts."""
        self._waited_s = 0.0

    async def piece(self) -> bytes:
        """What has come, as soon as there is something; empty at the end."""
        content, limits = self._content, self._limits
        if self._n_at_once > _AT_ONCE_BYTES:
            self._n_at_once = 0
            await asyncio.sleep(0)
        if content.total_bytes > self._n_bytes or content.is_eof():
            piece = await content.readany()  # at once
        else:
            began_s = self._loop.time()
            left_s = limits.timeout_s + self._n_bytes / limits.bytes_per_s - self._waited_s
            try:
                async with asyncio.timeout(left_s):
                    piece = await content.readany()
            except TimeoutError:
                raise SlowBodyError(
                    "the body came too slowly (limits.client_body_timeout_s, limits.client_body_bytes_per_s)"
                ) from None
            self._waited_s += self._loop.time() - began_s
            self._n_at_once = 0
        self._n_bytes += len(piece)
        self._n_at_once += len(piece) + _PIECE_BYTES
        if self._n_bytes > limits.max_bytes:
            raise _too_large(limits.max_bytes)
        return piece


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is longer than {max_bytes} bytes (limits.max_body_bytes)")
