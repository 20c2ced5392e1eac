"""Every deliberate error, by whose fault it is.

The class says who is at fault (the operator, the request, the fleet, an upstream), `status` what a
client is told, `code` the stable name in bodies, logs and metrics. Messages name settings and instances,
never a header, a query or a prompt of a request: they end up in logs and in answers.
"""

import errno
from collections.abc import Mapping
from typing import ClassVar

OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Numbers of what this machine has run out of; they say nothing about the instance that was to be reached."""


class PrefixRouteError(Exception):
    """Base of all deliberate errors. `status`: HTTP status that answers it; `code`: stable snake_case name."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    aws_type: ClassVar[str | None] = None
    """What AWS calls it, where `status` does not say so."""
    details: Mapping[str, object] = {}
    """Further fields of its body, where the dialect has any."""


class ConfigError(PrefixRouteError):
    """The operator's configuration cannot be used. The command exits with `exit_code` and the message."""

    code = "invalid_configuration"
    exit_code: ClassVar[int] = 2


class RequestError(PrefixRouteError):
    """The request cannot be taken: the client's fault."""

    status = 400
    code = "invalid_request"


class BodyTooLargeError(RequestError):
    """The body is longer than `limits.max_body_bytes`."""

    status = 413
    code = "body_too_large"


class MethodError(RequestError):
    """The path takes other methods. `allowed`: those that it does, as an Allow header lists them."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class UnauthorizedError(RequestError):
    """The request brings no valid key or token."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The path is closed by configuration, such as engine control."""

    status = 403
    code = "forbidden"


class TooManyRequestsError(RequestError):
    """More requests than there is room for; `retry_after_s` (whole) is when room is expected."""

    status = 429
    code = "too_many_requests"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, retry_after_s)


class NoInstanceError(PrefixRouteError):
    """No instance can take the request; `retry_after_s` seconds (whole) go out as Retry-After."""

    status = 503
    code = "no_instance"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UpstreamError(PrefixRouteError):
    """An instance failed the request.

    `reused`: it happened on a connection that had been kept, after an earlier request or ahead of this one.
    """

    status = 502
    code = "upstream_error"

    def __init__(self, message: str, *, reused: bool = False) -> None:
        super().__init__(message)
        self.reused = reused


class UpstreamUnreachableError(UpstreamError):
    """No byte of the request can have reached the instance, so any other one may be tried.

    `timed_out`: silence rather than a refusal.

    `own_fault`: this machine has no socket or memory left, which says nothing about the instance.
    """

    code = "upstream_unreachable"

    def __init__(self, message: str, *, timed_out: bool = False, own_fault: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.own_fault = own_fault


class UpstreamUntrustedError(UpstreamUnreachableError):
    """Something listens there, but not with a certificate that is trusted, or not with TLS. Waiting changes nothing."""

    code = "upstream_untrusted"


class UpstreamTimeoutError(UpstreamError):
    """The instance was silent for longer than the limit that the message names."""

    status = 504
    code = "upstream_timeout"


class UpstreamBrokenError(UpstreamError):
    """The instance closed, reset or garbled the exchange. After the first relayed byte: recorded, not answered."""

    code = "upstream_broken"


class ListenError(PrefixRouteError):
    """An address to listen on cannot be had. The command exits with `exit_code` and the message."""

    code = "cannot_listen"
    exit_code: ClassVar[int] = 1


def n_requests(n: int) -> str:
    """So many requests, in words for messages."""
    return f"{n} request" if n == 1 else f"{n} requests"
