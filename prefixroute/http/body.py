"""The request's body: read whole for routing, or handed on as it comes."""

from collections.abc import AsyncIterator

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web

from prefixroute.errors import BodyTooLargeError, RequestError
from prefixroute.http.headers import all_of, first

# `web.BaseRequest` is used for its parsed head and its reader only; its own limits and helpers are not.


class FramingError(RequestError):
    """Where the request ends is a matter of opinion: its connection is of no more use."""

    code = "ambiguous_framing"


class MalformedBodyError(FramingError):
    """The body's chunks are not valid HTTP."""

    code = "malformed_request"


class ExpectationError(RequestError):
    """The client demands what cannot be met."""

    status = 417
    code = "expectation_failed"


def length(request: web.BaseRequest) -> int | None:
    """The declared length of the body, bytes; None when it is chunked or absent."""
    declared = first(request.raw_headers, b"content-length")
    return int(declared) if declared is not None else None


def check_framing(request: web.BaseRequest) -> None:
    """Refuses framings that two servers may read differently. Raises FramingError.

    aiohttp's parser refuses most of them; it lets through other codings besides chunked, any on HTTP/1.0, and the
    first lines of HTTP/0.9 and HTTP/2.
    """
    if request.version not in (HttpVersion10, HttpVersion11):
        raise FramingError("only HTTP/1.1 and HTTP/1.0 are spoken here")
    codings = all_of(request.raw_headers, b"transfer-encoding")
    if codings and (
        len(codings) > 1
        or codings[0].strip().lower() != b"chunked"
        or request.version < HttpVersion11
        or first(request.raw_headers, b"content-length") is not None
    ):
        raise FramingError("the request's Transfer-Encoding cannot be taken (only 'chunked', on HTTP/1.1)")


def expect_continue(request: web.BaseRequest) -> None:
    """Tells a client that waits for it to send its body. Raises ExpectationError for any other demand."""
    demand = first(request.raw_headers, b"expect")
    if demand is None or request.version.minor == 0:
        return
    if demand.strip().lower() != b"100-continue":
        raise ExpectationError("only 'Expect: 100-continue' can be met")
    transport = request.transport
    if transport is not None:
        transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def check_length(request: web.BaseRequest, max_bytes: int) -> int | None:
    """The declared length, as `length`. Raises BodyTooLargeError when it passes `max_bytes`."""
    declared = length(request)
    if declared is not None and declared > max_bytes:
        raise _too_large(max_bytes)
    return declared


async def read_whole(request: web.BaseRequest, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to pass `max_bytes`."""
    content = request.content
    # Most bodies are here in one piece.
    body = await content.readany()
    if len(body) <= max_bytes and content.at_eof():
        return body
    whole = bytearray(body)
    while len(whole) <= max_bytes:
        piece = await content.readany()
        if not piece:
            return bytes(whole)
        whole += piece
    raise _too_large(max_bytes)


async def stream(content: StreamReader, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it comes, for an upstream that takes it as fast as it can. Raises BodyTooLargeError in its course."""
    n_bytes = 0
    while piece := await content.readany():
        n_bytes += len(piece)
        if n_bytes > max_bytes:
            raise _too_large(max_bytes)
        yield piece


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is longer than {max_bytes} bytes (limits.max_body_bytes)")
