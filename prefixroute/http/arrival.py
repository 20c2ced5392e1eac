"""A request as it came to the data port or the admin port, on whichever lane: its head, its body, its connection."""

import asyncio
from typing import Protocol

from prefixroute.http.headers import RawHeaders, all_of, fit_request_id, forwarded, rendered
from prefixroute.http.routes import Route, plain_path, route_of


class Source(Protocol):
    """Where the pieces of an answer come from."""

    def pause(self) -> None:
        """The client is slower than it: nothing more for now."""
        ...

    def resume(self) -> None:
        """Takes `pause` back."""
        ...


class Client(Protocol):
    """The connection that a request came on."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """None: it is gone."""
        ...

    @property
    def is_ending(self) -> bool:
        """Whether the answer under way is the last one here."""
        ...

    def pace(self, source: Source | None) -> None:
        """`source` is held back from now on whenever the client is slower than it; None: nobody is."""
        ...

    async def drained(self) -> None:
        """Until the client has taken nearly all of what was written."""
        ...

    def let_go(self) -> tuple[asyncio.Transport, bytes]:
        """For a tunnel: the transport, and what the client said behind its request.

        Raises ConnectionResetError when it is gone.
        """
        ...

    def over(self) -> None:
        """The transport, once let go, is closed. Nobody but its new owner was told so."""
        ...


class Body(Protocol):
    """A request's body, of which more may be to come."""

    total_bytes: int
    """So many have come."""

    def is_eof(self) -> bool:
        """Whether all of it has come."""
        ...

    def at_eof(self) -> bool:
        """Whether all of it has been read."""
        ...

    async def readany(self) -> bytes:
        """What has come and was not read yet, as soon as there is something; empty at the end."""
        ...


class RequestHead:
    """What a request begins with. It never changes, so what is made of it is made once.

    `target` as sent. `minor`: of the version, HTTP/1.`minor`; -1 for any other. `is_plain`: it was recognised as one
    that nobody could read in two ways.
    """

    __slots__ = (
        *("_fields", "admitted"),
        *("headers", "index", "is_plain", "is_repeated", "method", "minor", "path", "request_id", "route", "target"),
    )

    def __init__(self, method: str, target: str, minor: int, headers: RawHeaders, *, is_plain: bool = False) -> None:
        self.method = method
        self.target = target
        self.minor = minor
        self.headers = headers
        self.is_plain = is_plain
        self.index: dict[bytes, bytes] = {}
        """The first value of each header, by its name in lower case."""
        for name, value in headers:
            self.index.setdefault(name.lower(), value)
        self.is_repeated = len(self.index) != len(headers)
        """Whether a header is there twice."""
        self.path = plain_path(target)
        self.route: Route = route_of(self.path)
        sent = self.index.get(b"x-request-id")
        if sent is not None and self.is_repeated and len(all_of(headers, b"x-request-id")) > 1:
            sent = None
        self.request_id = None if sent is None else fit_request_id(sent)
        """The client's own, when there is one that is fit to be logged and echoed."""
        self._fields: tuple[bytes, bytes] | None = None
        self.admitted: object = None
        """What `auth` found out about its key."""

    def first(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        return self.index.get(name)

    def all_of(self, name: bytes) -> list[bytes]:
        """Every value of a header; `name` in lower case."""
        if not self.is_repeated:
            value = self.index.get(name)
            return [] if value is None else [value]
        return all_of(self.headers, name)

    @property
    def has_credentials(self) -> bool:
        """Whether it brings a key."""
        index = self.index
        return b"authorization" in index or b"x-api-key" in index or b"api-key" in index

    def fields_for(self, request_id: str) -> bytes:
        """The lines of the headers that go on to an instance, with this request id and no other."""
        before, after = self._fields or self._around_id()
        return b"%s%s%s" % (before, request_id.encode("ascii"), after)

    def _around_id(self) -> tuple[bytes, bytes]:
        before: list[tuple[bytes, bytes]] = []
        after: list[tuple[bytes, bytes]] = []
        name = b"x-request-id"
        lines = before
        for header in forwarded(self.headers):
            if header[0].lower() != b"x-request-id":
                lines.append(header)
            elif self.request_id is not None:
                # One that is fit stays in its place.
                name, lines = header[0], after
        around = self._fields = b"%s%s: " % (rendered(before), name), b"\r\n%s" % rendered(after)
        return around

    def without(self, headers: RawHeaders) -> "RequestHead":
        """The same head with only these of its headers."""
        return RequestHead(self.method, self.target, self.minor, headers, is_plain=self.is_plain)


class Arrival:
    """One request. `whole`: its body, when all of it is here; else `content`, which it comes in; neither: it has none.

    `length`: as declared, in bytes; None: chunked, or nothing declared. `keep_alive`: the client wants its connection
    kept. `request_id`: the client's own, when there is one that is fit to be logged and echoed; it counts where `head`,
    of an earlier request like this one, says another.
    """

    __slots__ = ("client", "content", "head", "keep_alive", "lane", "length", "request_id", "whole")

    def __init__(
        self,
        head: RequestHead,
        request_id: str | None,
        client: Client,
        lane: str,
        *,
        keep_alive: bool,
        whole: bytes | None = None,
        content: Body | None = None,
        length: int | None = None,
    ) -> None:
        self.head = head
        self.request_id = request_id
        self.client = client
        self.lane = lane
        self.keep_alive = keep_alive
        self.whole = whole
        self.content = content
        self.length = length

    @property
    def has_body(self) -> bool:
        """Whether it has one, maybe an empty one."""
        return self.whole is not None or self.content is not None

    @property
    def is_unread(self) -> bool:
        """Whether some of the body was not read, so that it stands before the next request."""
        return self.content is not None and not self.content.at_eof()

    @property
    def n_received(self) -> int:
        """Bytes of the body that have come."""
        if self.whole is not None:
            return len(self.whole)
        return 0 if self.content is None else self.content.total_bytes
