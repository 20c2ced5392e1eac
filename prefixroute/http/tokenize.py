"""Asks an instance how it tokenises a probe: a POST of the router's own, small and bounded."""

import asyncio

from prefixroute.core.fleet import Instance
from prefixroute.errors import UpstreamError
from prefixroute.http.upstream import Upstream, UpstreamRequest

_ASK_S = 10.0
# A probe has some hundred tokens.
_MAX_BYTES = 1_048_576
_HEADERS = [(b"Content-Type", b"application/json"), (b"Accept-Encoding", b"identity")]


async def post(upstream: Upstream, instance: Instance, path: str, body: bytes) -> tuple[int, bytes] | None:
    """Status and body of the answer; None when there is none, or it is longer than any answer to a probe."""
    request = UpstreamRequest.of("POST", path, _HEADERS, body)
    try:
        async with asyncio.timeout(_ASK_S):
            answer = await upstream.send(instance, request)
            try:
                whole = await answer.whole(_MAX_BYTES)
                return None if whole is None else (answer.status, whole)
            finally:
                answer.close()
    except (UpstreamError, TimeoutError):
        return None
