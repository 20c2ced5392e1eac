"""What web pages of other origins may do (the Fetch standard's CORS protocol), when the router decides it.

A preflight is answered here, and needs no key: browsers send none. Every answer, an error and a stream too, then has
the router's permissions and no others: an instance's own are taken out, because two contradict each other.
"""

import re

from prefixroute.config.settings import CorsSettings
from prefixroute.http.headers import RawHeaders, first

_PREFIX = b"access-control-"
# What may be repeated: names and commas.
_ASKED = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]{1,4096}")


class Cors:
    """As configured."""

    def __init__(self, settings: CorsSettings) -> None:
        self._any_origin = "*" in settings.allow_origins
        self._origins = frozenset(origin.encode("ascii") for origin in settings.allow_origins)
        self._methods = _joined(settings.allow_methods)
        self._headers = None if "*" in settings.allow_headers else _joined(settings.allow_headers)
        self._max_age = b"%d" % settings.max_age_s
        self._on_answers: list[tuple[bytes, bytes]] = []
        if settings.allow_credentials:
            self._on_answers.append((b"Access-Control-Allow-Credentials", b"true"))
        self._exposed = [(b"Access-Control-Expose-Headers", _joined(settings.expose_headers))]
        if not settings.expose_headers:
            self._exposed.clear()

    def permissions(self, headers: RawHeaders) -> RawHeaders:
        """What an answer to a request with `headers` says; see `replaced`."""
        return [*self._origin(headers), *self._exposed]

    def preflight(self, headers: RawHeaders) -> RawHeaders:
        """What the answer to a preflight says besides `permissions`."""
        asked = first(headers, b"access-control-request-headers")
        allowed = self._headers
        if allowed is None and asked is not None and _ASKED.fullmatch(asked):
            allowed = asked
        answer = [(b"Access-Control-Allow-Methods", self._methods), (b"Access-Control-Max-Age", self._max_age)]
        if allowed is not None:
            answer.append((b"Access-Control-Allow-Headers", allowed))
        answer.append((b"Vary", b"Access-Control-Request-Headers"))
        return answer

    def may_connect(self, headers: RawHeaders) -> bool:
        """Whether who sends these may open a WebSocket: browsers let every page try, and leave it to the server."""
        origin = first(headers, b"origin")
        return origin is None or self._any_origin or origin in self._origins

    def _origin(self, headers: RawHeaders) -> list[tuple[bytes, bytes]]:
        if self._any_origin:
            return [(b"Access-Control-Allow-Origin", b"*")]
        # Caches must not give one page's permission to another.
        vary = (b"Vary", b"Origin")
        origin = first(headers, b"origin")
        if origin is None or origin not in self._origins:
            return [vary]
        return [(b"Access-Control-Allow-Origin", origin), *self._on_answers, vary]


def is_preflight(method: str, headers: RawHeaders) -> bool:
    """Whether a browser asks what a page may do, and nothing else."""
    return (
        method == "OPTIONS"
        and first(headers, b"origin") is not None
        and first(headers, b"access-control-request-method") is not None
    )


def replaced(headers: RawHeaders, permissions: RawHeaders) -> RawHeaders:
    """An answer's headers with these permissions instead of its own."""
    return [*(header for header in headers if not header[0].lower().startswith(_PREFIX)), *permissions]


def _joined(names: tuple[str, ...]) -> bytes:
    return ", ".join(names).encode("ascii")
