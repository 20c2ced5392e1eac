"""Comment lines in silent event streams: only where asked for, and only between events."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head

Serve = Callable[..., AbstractAsyncContextManager[App]]

BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"
OFTEN = {"upstream": {"sse_comment_s": 0.05}}
COMMENT = b": keep-alive\n\n"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


async def pauses(call: Call) -> None:
    await call.send(SSE)
    await asyncio.sleep(0.3)
    for piece in (b"data: 1\n", b"\n", b'data: {"par', b'tial"}\r\n\r\n', b"data: [DONE]\n\n"):
        await call.send_chunk(piece)
        await asyncio.sleep(0.3)
    await call.send_chunk(b"")


async def test_comments_stand_between_complete_events_only(serve: Serve) -> None:
    async with FakeUpstream(pauses) as upstream, serve(upstream, **OFTEN) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY)
        assert answer.complete
        events = answer.body.split(COMMENT)
        assert events[0] == b""
        assert b"".join(events) == b'data: 1\n\ndata: {"partial"}\r\n\r\ndata: [DONE]\n\n'
        assert [event for event in events if event] == [
            b"data: 1\n\n",
            b'data: {"partial"}\r\n\r\n',
            b"data: [DONE]\n\n",
        ]
        assert answer.body.endswith(COMMENT)


async def test_without_the_setting_bytes_are_the_instances(serve: Serve) -> None:
    async with FakeUpstream(pauses) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert COMMENT not in (await client.request(body=BODY)).body


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 500 No\r\nContent-Type: text/event-stream\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
async def test_nothing_else_gets_comments(serve: Serve, start: bytes) -> None:
    async def slow(call: Call) -> None:
        await call.send(start)
        await asyncio.sleep(0.3)
        await call.send(b"ok")
        call.close()

    async with FakeUpstream(slow) as upstream, serve(upstream, **OFTEN) as app, RawClient(app.url) as client:
        assert (await client.request(body=BODY)).body == b"ok"


async def test_a_stream_that_breaks_after_a_comment_is_broken(serve: Serve) -> None:
    async def breaks(call: Call) -> None:
        await call.send(SSE)
        await asyncio.sleep(0.3)
        call.reset()

    async with FakeUpstream(breaks) as upstream, serve(upstream, **OFTEN) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY)
        assert not answer.complete
        assert answer.body.replace(COMMENT, b"") == b""


async def test_a_client_that_leaves_during_comments_is_gone(serve: Serve) -> None:
    async def silent(call: Call) -> None:
        await call.send(SSE)
        await call.wait_disconnected()

    async with FakeUpstream(silent) as upstream, serve(upstream, **OFTEN) as app:
        async with RawClient(app.url) as client:
            await client.send(head("POST", CHAT, BODY, None) + BODY)
            await client.begin()
            assert await client.chunk() == COMMENT
            client.reset()
        await upstream.calls[0].wait_disconnected()
        await app.proxy.wait_idle()
