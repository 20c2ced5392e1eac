"""Error bodies that the clients of a route can read: OpenAI's and Anthropic's."""

from typing import assert_never

import orjson

from prefixroute.errors import NoInstanceError, PrefixRouteError, TooManyRequestsError, UnauthorizedError
from prefixroute.http.headers import RawHeaders
from prefixroute.http.routes import Dialect

# Anthropic's error types by status; OpenAI's likewise. Any other status below 500 is the request's fault, else the
# server's.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
}
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "service_unavailable",
}


def error_body(dialect: Dialect, status: int, code: str, message: str) -> bytes:
    """The JSON body of an error answer."""
    match dialect:
        case Dialect.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
            body: dict[str, object] = {"type": "error", "error": {"type": kind, "message": message}}
        case Dialect.OPENAI:
            kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
            body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        case _:
            assert_never(dialect)
    return orjson.dumps(body)


def error_headers(error: PrefixRouteError | None) -> RawHeaders:
    """Headers of an error answer: its type, and when to come back where that is known."""
    headers = [(b"Content-Type", b"application/json")]
    if isinstance(error, NoInstanceError | TooManyRequestsError):
        headers.append((b"Retry-After", b"%d" % error.retry_after_s))
    elif isinstance(error, UnauthorizedError):
        headers.append((b"WWW-Authenticate", b"Bearer"))
    return headers
