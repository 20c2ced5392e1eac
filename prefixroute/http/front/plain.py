"""The plain case, stated once: what the fast lane takes itself. Everything else is in doubt, and goes to aiohttp.

    POST READ-PATH [ "?" *256( ALPHA / DIGIT / one of ._~=&,:/- ) ] HTTP/1.1 CRLF
    1*256( token ":" [ws] *text [ws] CRLF )    every name once; text: no control characters but tabs
    CRLF
    exactly Content-Length bytes, not more than the limit on bodies

The whole head is not longer than the limit on one header. READ-PATH is a path whose body is read for routing, as
`routes` writes it, of at most 256 characters. Among the headers are one Host that names a host, one Content-Length of
1 to 9 digits without a sign or leading zeros, and none of `_IN_DOUBT`; Connection says `keep-alive` if it is there, and
Content-Type no multipart.

Who sends the same head again on a connection, but for its Content-Length and X-Request-Id, is recognised by comparing
bytes, if it is of 8 KB at most: so much is kept of the last one.
"""

import re

from prefixroute.http.arrival import RequestHead
from prefixroute.http.body import is_authority
from prefixroute.http.headers import MAX_HEADERS, fit_request_id
from prefixroute.http.routes import READ_PATHS, is_read_of_endpoint

_HEAD = re.compile(
    rb"POST (/[0-9A-Za-z/_-]{1,255})(\?[0-9A-Za-z._~=&,:/-]{0,256})? HTTP/1\.1\r\n"
    rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n)+"
    rb"\r\n"
)
_METHOD = b"POST "
_VERSION = b" HTTP/1.1\r"
_FIELD = re.compile(rb"([^:\r\n]+):[ \t]*([^\r\n]*)\r\n")
# What is another's with every request of a client.
_VARYING = re.compile(rb"\r\n(content-length|x-request-id): ([^\r\n]{1,128})(?=\r\n)", re.IGNORECASE)
_DIGITS = re.compile(rb"[1-9][0-9]{0,8}")
_MAX_VALUE_BYTES = 130
_MAX_KEPT_BYTES = 8_192
# What frames, negotiates or belongs to the connection; bodies that are coded or come in parts.
_IN_DOUBT = frozenset(
    {
        b"content-encoding",
        b"expect",
        b"http2-settings",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


Plain = tuple[RequestHead, str | None, int, int]
"""A plain request's head, its request id if it brings one that is fit, and the bytes of its head and of its body."""


class PlainHead:
    """A head that is plain, and what of it is the same when it is sent again."""

    __slots__ = ("_head", "_n_body", "_parts")

    def __init__(self, head: RequestHead, data: bytes, n_body: int) -> None:
        """`data`: its bytes; `n_body`: the length that it states."""
        self._head = head
        self._n_body = n_body
        self._parts: list[tuple[int, int, bytes, bool]] = []
        """What is around the values that vary: size, hash, bytes, and whether a length comes behind it."""
        at = 0
        for found in _VARYING.finditer(data):
            self._keep(data[at : found.start(2)], found[1].lower() == b"content-length")
            at = found.end()
        self._keep(data[at:], False)

    def _keep(self, part: bytes, is_before_length: bool) -> None:
        self._parts.append((len(part), hash(part), part, is_before_length))

    def again(self, data: bytes) -> Plain | None:
        """As `read_plain`, if `data` begins with this head, but for its length and request id; else None."""
        # As they were, where they are written so that they count as part of what is compared.
        at, n_body, request_id = 0, self._n_body, self._head.request_id
        left = len(self._parts)
        for size, hashed, part, is_before_length in self._parts:
            end = at + size
            found = data[at:end]
            # By a keyed hash first: how much of another's head, or key, was met must make no difference in time.
            if hash(found) != hashed or found != part:
                return None
            at = end
            left -= 1
            if left:
                at = data.find(b"\r", end, end + _MAX_VALUE_BYTES)
                value = data[end:at]
                if is_before_length:
                    if at < 0 or _DIGITS.fullmatch(value) is None:
                        return None
                    n_body = int(value)
                elif at < 0 or (request_id := fit_request_id(value)) is None:
                    return None
        return self._head, request_id, at, n_body


def read_plain(data: bytes, max_header_bytes: int) -> tuple[Plain, PlainHead | None] | None:
    """What `data` begins with, and what its head is recognised by; None: not plain, or its head is not all here."""
    found = _HEAD.match(data)
    if found is None or found.end() > max_header_bytes:
        return None
    if found[1] not in READ_PATHS and not is_read_of_endpoint(found[1]):
        return None
    line_end = data.index(b"\n")
    target = data[len(_METHOD) : line_end - len(_VERSION)].decode("ascii")
    headers: list[tuple[bytes, bytes]] = _FIELD.findall(data, line_end + 1, found.end())
    if b" \r\n" in found[0] or b"\t\r\n" in found[0]:
        headers = [(name, value.rstrip(b" \t")) for name, value in headers]
    head = RequestHead("POST", target, 1, headers, is_plain=True)
    index = head.index
    if head.is_repeated or len(headers) > MAX_HEADERS or not _IN_DOUBT.isdisjoint(index):
        return None
    length = index.get(b"content-length")
    if length is None or _DIGITS.fullmatch(length) is None:
        return None
    host = index.get(b"host")
    if host is None or not is_authority(host):
        return None
    if index.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    if head.is_multipart:
        return None
    n_body = int(length)
    # An id that is replaced stands elsewhere in what is sent on than one that is kept.
    is_alike = found.end() <= _MAX_KEPT_BYTES and (head.request_id is not None or b"x-request-id" not in index)
    return (head, head.request_id, found.end(), n_body), PlainHead(head, found[0], n_body) if is_alike else None
