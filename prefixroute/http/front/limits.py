"""What a client may take, in bytes and seconds, and who answers it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prefixroute.http.arrival import Arrival
from prefixroute.http.response import RawResponse

LINGER_S = 2.0
"""How long a client that was answered before it had sent everything may take to read that answer."""

Handler = Callable[[Arrival], Awaitable[RawResponse]]
"""Answers one request. The answer is written, or broken off, when it returns."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """`max_header_bytes`: of the request line and of each header; `head_timeout_s`: for a head to arrive;
    `idle_timeout_s`: between two requests; `stall_timeout_s`: for any byte of an answer to be taken."""

    max_header_bytes: int = 65_536
    head_timeout_s: float = 30.0
    idle_timeout_s: float = 90.0
    stall_timeout_s: float = 300.0
