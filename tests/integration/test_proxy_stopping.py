"""A router that stops: what is under way comes to its end, and nothing new begins."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def stoppable(serve: Serve, upstream: FakeUpstream) -> AsyncIterator[tuple[App, Callable[[], None]]]:
    """A router, and what makes it stop."""
    started: asyncio.Future[App] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def life() -> None:
        async with serve(upstream, drain_timeout_s=60.0) as app:
            started.set_result(app)
            await leave.wait()

    living = asyncio.create_task(life())
    try:
        yield await started, leave.set
    finally:
        leave.set()
        await living


async def test_an_upload_that_is_under_way_comes_to_its_end(serve: Serve, until: Until, finished: Finished) -> None:
    async with (
        FakeUpstream() as upstream,
        stoppable(serve, upstream) as (app, stop),
        RawClient(app.url) as client,
        RawClient(app.url) as idle,
    ):
        assert (await idle.request("GET", "/health")).status == 200
        await client.send(head("POST", CHAT, BODY) + BODY[:10])
        await until(lambda: app.proxy.n_active == 1)
        stop()
        # Who asks for nothing is let go at once.
        assert await idle.wait_closed() == b""
        assert app.stopping
        await client.send(BODY[10:])
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (200, "close")
        assert await client.wait_closed() == b""
    assert upstream.bodies == [BODY]
    assert finished()[-1]["outcome"] == "ok"


async def test_a_stream_that_is_under_way_comes_to_its_end_and_is_the_last(
    serve: Serve, until: Until, finished: Finished
) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.send_chunk(b"first")
        await go_on.wait()
        await call.send_chunk(b"last")
        await call.send_chunk(b"")

    go_on = asyncio.Event()
    async with (
        FakeUpstream(script) as upstream,
        stoppable(serve, upstream) as (app, stop),
        RawClient(app.url) as client,
    ):
        await client.send(head("POST", CHAT, BODY) + BODY + head("GET", "/another", None))
        await client.begin()
        assert await client.chunk() == b"first"
        stop()
        await until(lambda: app.stopping)
        go_on.set()
        assert await client.chunk() == b"last"
        assert await client.chunk() == b""
        # The head was gone before the stop, so only the close says that this was all.
        assert await client.wait_closed() == b""
    assert [call.target for call in upstream.calls] == [CHAT]
    assert [line["outcome"] for line in finished()] == ["ok"]
