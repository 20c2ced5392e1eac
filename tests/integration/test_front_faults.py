"""Both lanes, with handlers of the tests' own: one that fails, and one that is never waited for."""

import asyncio
import logging
import socket
from collections.abc import Callable

import pytest

from prefixroute.http.arrival import Arrival
from prefixroute.http.front import ClientLimits, FrontServer, listen
from prefixroute.http.response import RawResponse
from prefixroute.testing import RawClient

PLAIN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\nsecret"


@pytest.mark.parametrize("max_fast_bytes", [0, 1_000_000])
@pytest.mark.parametrize("fault", [asyncio.CancelledError, RuntimeError, ConnectionResetError])
async def test_a_handler_that_fails_costs_the_connection(
    caplog: pytest.LogCaptureFixture, max_fast_bytes: int, fault: Callable[[str], BaseException]
) -> None:
    async def handler(_arrival: Arrival) -> RawResponse:
        raise fault("secret")

    front = FrontServer(handler, ClientLimits(), max_fast_bytes=lambda: max_fast_bytes)
    listener = await listen(front, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(20), RawClient(f"http://127.0.0.1:{listener.port}") as client:
            await client.send(PLAIN)
            assert await client.wait_closed() == b""
    finally:
        listener.close()
        await front.shutdown(0.1)
    assert [one for one in caplog.records if "secret" in one.getMessage() or one.exc_info] == []
    assert len([one for one in caplog.records if one.levelno >= logging.ERROR]) == (fault is RuntimeError)


@pytest.mark.parametrize("max_fast_bytes", [0, 1_000_000])
async def test_many_requests_at_once_leave_others_their_turn(max_fast_bytes: int) -> None:
    handled: list[str | None] = []
    other = socket.socket()

    async def handler(arrival: Arrival) -> RawResponse:
        if not handled:
            other.send(PLAIN.replace(b"Host: a", b"Host: a\r\nX-Request-Id: other"))
        handled.append(arrival.request_id)
        response = RawResponse(arrival)
        response.whole_now(401, (), b"")
        return response

    front = FrontServer(handler, ClientLimits(), max_fast_bytes=lambda: max_fast_bytes)
    listener = await listen(front, "127.0.0.1", 0)
    try:
        other.connect(("127.0.0.1", listener.port))
        async with asyncio.timeout(20), RawClient(f"http://127.0.0.1:{listener.port}") as client:
            await client.send(PLAIN * 300)
            while len(handled) < 301:
                await asyncio.sleep(0.005)
    finally:
        other.close()
        listener.close()
        await front.shutdown(0.1)
    assert handled.index("other") < 150
