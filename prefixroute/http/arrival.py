"""A request as it came to the data port or the admin port, on whichever lane: its head, its body, its connection."""

import asyncio
from typing import Protocol

from prefixroute.http.headers import CREDENTIALS, RawHeaders, all_of, fit_request_id, forwarded, rendered
from prefixroute.http.routes import Route, is_engine_control, origin_form, plain_path, route_of


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
    that nobody could read in two ways; then it may be of an earlier request like this one, whose Content-Length and
    X-Request-Id are the only differences (`Arrival` has this one's).
    """

    __slots__ = (
        *("_around_id", "_has_credentials", "admitted", "headers", "index", "is_engine_control", "is_plain"),
        *("is_repeated", "method", "minor", "origin", "path", "request_id", "route", "target"),
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
        self.origin = origin_form(target)
        """The target as an instance takes it; None: it names no resource of an instance."""
        self.is_engine_control = is_engine_control(method, self.path)
        sent = self.index.get(b"x-request-id")
        if sent is not None and self.is_repeated and len(all_of(headers, b"x-request-id")) > 1:
            sent = None
        self.request_id = None if sent is None else fit_request_id(sent)
        """The client's own, when there is one that is fit to be logged and echoed."""
        self._around_id: tuple[bytes, bytes] | None = None
        self._has_credentials = False
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
    def is_multipart(self) -> bool:
        """Whether the body comes in parts (RFC 2046)."""
        kind = self.index.get(b"content-type")
        return kind is not None and kind.lstrip().lower().startswith(b"multipart/")

    def fields_for(self, request_id: str) -> tuple[bytes, bool]:
        """The lines of the headers that go on to an instance, with this request id and no other; and whether a client's
        credential is among them."""
        before, after = self._around_id or self._split()
        return b"%s%s%s" % (before, request_id.encode("ascii"), after), self._has_credentials

    def _split(self) -> tuple[bytes, bytes]:
        before: list[tuple[bytes, bytes]] = []
        after: list[tuple[bytes, bytes]] = []
        name = b"x-request-id"
        lines = before
        for header in forwarded(self.headers):
            key = header[0].lower()
            if key != b"x-request-id":
                lines.append(header)
                self._has_credentials = self._has_credentials or key in CREDENTIALS
            elif self.request_id is not None:
                # One that is fit stays in its place.
                name, lines = header[0], after
        around = self._around_id = b"%s%s: " % (rendered(before), name), b"\r\n%s" % rendered(after)
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

    __slots__ = ("_n_taken", "client", "content", "head", "keep_alive", "lane", "length", "request_id", "whole")

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
        self._n_taken = 0
        self.content = content
        self.length = length

    @property
    def is_unread(self) -> bool:
        """Whether some of the body was not read, so that it stands before the next request."""
        return self.content is not None and not self.content.at_eof()

    @property
    def n_received(self) -> int:
        """Bytes of the body that have come."""
        if self.content is not None:
            return self.content.total_bytes
        return self._n_taken if self.whole is None else len(self.whole)

    def take_whole(self) -> bytes:
        """The whole body, which is from now on who takes it has."""
        whole, self.whole = self.whole or b"", None
        self._n_taken = len(whole)
        return whole
