"""Error bodies that the clients of a route can read: OpenAI's, Anthropic's, SageMaker's."""

from collections.abc import Mapping
from typing import assert_never

import orjson

from prefixroute.errors import MethodError, NoInstanceError, PrefixRouteError, TooManyRequestsError, UnauthorizedError
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
# AWS's: those of the service, and of all its services.
_SAGEMAKER_TYPES = {
    401: "AccessDeniedException",
    403: "AccessDeniedException",
    424: "ModelError",
    429: "ThrottlingException",
    503: "ServiceUnavailable",
    530: "InternalDependencyException",
}


def error_body(
    dialect: Dialect, status: int, code: str, message: str, details: Mapping[str, object] | None = None
) -> bytes:
    """The JSON body of an error answer. `details`: further fields; only SageMaker's errors have any."""
    match dialect:
        case Dialect.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
            body: dict[str, object] = {"type": "error", "error": {"type": kind, "message": message}}
        case Dialect.OPENAI:
            kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
            body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        case Dialect.SAGEMAKER:
            body = {"Message": message, **(details or {})}
        case _:
            assert_never(dialect)
    return orjson.dumps(body)


def error_headers(
    dialect: Dialect, status: int, request_id: str, error: PrefixRouteError | None = None
) -> list[tuple[bytes, bytes]]:
    """Headers of an error answer: its type, whose it is, and what to do about it where that is known."""
    sent = request_id.encode("ascii")
    headers = [(b"Content-Type", b"application/json"), (b"x-request-id", sent)]
    if dialect is Dialect.SAGEMAKER:
        kind = _SAGEMAKER_TYPES.get(status, "ValidationError" if status < 500 else "InternalFailure")
        if error is not None and error.aws_type is not None:
            kind = error.aws_type
        headers += [(b"x-amzn-ErrorType", kind.encode("ascii")), (b"x-amzn-RequestId", sent)]
    if isinstance(error, NoInstanceError | TooManyRequestsError):
        headers.append((b"Retry-After", b"%d" % error.retry_after_s))
    elif isinstance(error, UnauthorizedError):
        headers.append((b"WWW-Authenticate", b"Bearer"))
    elif isinstance(error, MethodError):
        headers.append((b"Allow", error.allowed.encode("ascii")))
    return headers
