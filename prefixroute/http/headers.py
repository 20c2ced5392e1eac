"""Which headers pass, and the few that the router reads.

Everything passes in the order, case and repetition in which it came, except what belongs to one connection (RFC 9110,
7.6.1) and what frames the message, which each side computes for itself. `Host` names the instance, as servers behind
names expect. Added is only an `x-request-id` where there is none, and an instance's own key where one is configured and
the client brings none. An `X-Forwarded-For` of the client's goes on as sent, and is trusted for nothing.
"""

from collections.abc import Sequence
from os import urandom
from re import compile as re_compile

RawHeaders = Sequence[tuple[bytes, bytes]]

# In one message, either way. aiohttp's default of 128 is little behind gateways that all add theirs.
MAX_HEADERS = 256
# How many of the largest size may come together.
MAX_FULL_HEADERS = 4

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Who brings one of these is not lent an instance's own key: OpenAI's, Anthropic's, Azure's.
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key"})
# Trailers of requests do not go on: what a Trailer announces would not come.
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"trailer"}
_CONDITIONS = frozenset(
    {
        b"accept-encoding",
        b"if-match",
        b"if-modified-since",
        b"if-none-match",
        b"if-range",
        b"if-unmodified-since",
        b"range",
    }
)
HOP_BY_HOP_OR_LENGTH = HOP_BY_HOP | {b"content-length"}

# Printable ASCII without space, quotes and backslash: safe in a log line and in a header.
_REQUEST_ID = re_compile(rb"[!#-&(-\[\]-~]{1,128}")
_PREFIX_AWARE_ID = re_compile(rb"[!-~][ -~]{0,63}")
# What clients take for a host, though it looks like a path.
_OTHER_HOST = re_compile(rb"/[\x00-\x20]*[/\\]")
_SHORT_TEXT = re_compile(rb"[\x20-\x7e]{1,256}")


def forwarded(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Request headers that go on to an instance. Host and framing are the sender's to add."""
    return _without(headers, _NOT_FORWARDED)


def asking(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Headers of a request of the router's own, on a client's behalf: nothing that would make the answer a part of one,
    or one that cannot be read."""
    return _without(headers, _NOT_FORWARDED | _CONDITIONS)


def relayed(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Response headers that go back to the client; a Content-Length only where it is the framing."""
    chunked = first(headers, b"transfer-encoding") is not None
    return _without(headers, HOP_BY_HOP_OR_LENGTH if chunked else HOP_BY_HOP)


def switching(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """As `forwarded`, of a request that asks for a WebSocket."""
    return [*forwarded(headers), (b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]


def switched(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """As `relayed`, of a 101: which protocol it is goes along."""
    protocol = first(headers, b"upgrade") or b"websocket"
    return [*_without(headers, HOP_BY_HOP_OR_LENGTH), (b"Connection", b"Upgrade"), (b"Upgrade", protocol)]


def asks_for_websocket(headers: RawHeaders) -> bool:
    """Whether a request asks for one, in a way that counts (RFC 9110, 7.8)."""
    return (first(headers, b"upgrade") or b"").strip().lower() == b"websocket" and any(
        token.strip().lower() == b"upgrade" for value in all_of(headers, b"connection") for token in value.split(b",")
    )


def local_location(value: bytes, authority: bytes, base: bytes, prefix: bytes = b"") -> bytes:
    """A Location as the client can follow it: one at the instance itself becomes a path, which leads through here.

    `authority`: as its requests name it; `base`: what they have in front of every path; `prefix`: what the client's
    have there instead.
    """
    scheme, separator, rest = value.partition(b"://")
    is_path = value.startswith(b"/")
    if is_path:
        path = value
    elif separator and scheme.lower() in (b"http", b"https") and rest.lower().startswith(authority.lower()):
        path = rest[len(authority) :]
    else:
        return value
    if path[:1] not in (b"", b"/", b"?", b"#"):
        return value  # a longer host, or another port
    if base:
        if not path.startswith(base) or path[len(base) : len(base) + 1] not in (b"", b"/", b"?", b"#"):
            return value  # where no request of ours leads
        path = path[len(base) :]
    if _OTHER_HOST.match(path):
        return value
    return prefix + (path if path.startswith(b"/") else b"/" + path)


def first(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first value of a header; `name` in lower case."""
    for key, value in headers:
        if key.lower() == name:
            return value
    return None


def all_of(headers: RawHeaders, name: bytes) -> list[bytes]:
    """Every value of a header; `name` in lower case."""
    return [value for key, value in headers if key.lower() == name]


def new_request_id() -> str:
    return urandom(16).hex()


def fit_request_id(sent: bytes) -> str | None:
    """A client's `x-request-id`, if it is fit to be logged and echoed."""
    return sent.decode("ascii") if _REQUEST_ID.fullmatch(sent) else None


def identified(headers: RawHeaders, request_id: str) -> list[tuple[bytes, bytes]]:
    """Headers with this request id and no other. One that is there already stays in its place."""
    sent = request_id.encode("ascii")
    if all_of(headers, b"x-request-id") == [sent]:
        return list(headers)
    return [*(header for header in headers if header[0].lower() != b"x-request-id"), (b"x-request-id", sent)]


def short_text(value: bytes | None) -> str | None:
    """A header that identifies a session or an application: 1 to 256 printable characters, else None."""
    return None if value is None or not _SHORT_TEXT.fullmatch(value) else value.decode("ascii")


def prefix_aware_id(value: bytes | None) -> str | None:
    """SageMaker's id of an application: 1 to 64 printable characters, the first one no space; else None."""
    return None if value is None or not _PREFIX_AWARE_ID.fullmatch(value) else value.decode("ascii")


def is_encoded(headers: RawHeaders) -> bool:
    """Whether the body is coded (gzip, say), so that it cannot be read as it stands."""
    return any(
        key.lower() == b"content-encoding" and value.strip().lower() not in (b"", b"identity") for key, value in headers
    )


def rendered(headers: RawHeaders) -> bytes:
    """Headers as lines, each with its end."""
    return b"".join([b"%s: %s\r\n" % header for header in headers])


def _without(headers: RawHeaders, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    kept = []
    named: set[bytes] = set()
    for header in headers:
        key = header[0].lower()
        if key == b"connection":
            # What the Connection header names belongs to the connection too.
            named.update(token.strip().lower() for token in header[1].split(b","))
        if key not in dropped:
            kept.append(header)
    if named - {b"close", b"keep-alive"}:
        kept = [header for header in kept if header[0].lower() not in named]
    return kept
