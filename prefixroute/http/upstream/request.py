"""What is sent to an instance."""

from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Self

from prefixroute.http.headers import CREDENTIALS, RawHeaders, rendered


class UpstreamRequest(NamedTuple):
    """A request as the client sent it, ready to be written. `target`: starts with a slash.

    `fields`: header lines, each with its CRLF, without Host and framing. `has_credentials`: the client's are among
    them. `body`: bytes, or what gives a stream once a connection is there (`body_bytes`: its length if known), or None.
    `switches`: headers that ask for another protocol are among `fields`.
    """

    method: bytes
    target: bytes
    fields: bytes
    has_credentials: bool
    body: bytes | Callable[[], AsyncIterator[bytes]] | None
    body_bytes: int | None = None
    switches: bool = False

    @classmethod
    def of(
        cls,
        method: str,
        target: str,
        headers: RawHeaders,
        body: bytes | Callable[[], AsyncIterator[bytes]] | None,
        body_bytes: int | None = None,
        switches: bool = False,
    ) -> Self:
        """From a target as aiohttp reads it, and headers that are not rendered yet."""
        return cls(
            method.encode("ascii"),
            target.encode("utf-8", "surrogateescape"),
            rendered(headers),
            any(name.lower() in CREDENTIALS for name, _ in headers),
            body,
            body_bytes,
            switches,
        )

    def framing(self) -> bytes:
        """The line that says where the body ends, with its CRLF; empty without a body."""
        body = self.body
        if isinstance(body, bytes):
            return b"Content-Length: %d\r\n" % len(body)
        if self.body_bytes is not None:
            return b"Content-Length: %d\r\n" % self.body_bytes
        return b"" if body is None else b"Transfer-Encoding: chunked\r\n"
