"""What the cases share. They look at bytes on sockets, at the access log, at `/metrics`, and at counts; never inside.

How a case is written:

- One test (or group) a case, named by its id: `test_o13_…`; siblings beside it, under the same id.
- Upstreams: `FakeUpstream(script)`, clients: `RawClient(app.url)`; both choose every byte and when it goes. Scripts for
  common answers: `sse`, `answers`. Order is held by events (`Call.wait_disconnected`, `FakeUpstream.wait_calls`) and by
  lockstep: what must be there before the next byte is read before it is sent. No stopwatch.
- `serve(upstream, …, table={…})`, a fixture, gives a running router of every lane in `LANES` in turn (more in
  `tests/conftest.py`). A data path to come adds its name to `LANES`, and its setting, and is under the whole suite.
- `finished()`: fields of the access log of requests that are over; `await until(condition)`; `await scrape(app)`:
  `/metrics` as numbers by series; `n_delivered(marker, upstream, …)`: how often a body arrived.
- `features`, a fixture: settings for `serve(upstream, **features)` with nothing optional on, then with everything on.
  A new optional feature that touches requests goes into `FEATURES` in `conftest.py`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import Script
from tests.command import Command

LANES = ["auto", "aiohttp"]
"""Data paths that the suite runs on; values of the setting `lane`."""

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Finished = Callable[[], list[dict[str, Any]]]

CHAT = "/v1/chat/completions"
JSON = ("Content-Type", "application/json")
OK = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"ok":true}'
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chat(content: str = "hi", **fields: Any) -> bytes:
    """A chat request's body. `content` may be a marker that deliveries are counted by."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()


def event(content: str, **fields: Any) -> bytes:
    """An event of a streamed chat answer."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": None, **fields}
    return b"data: %s\n\n" % json.dumps({"object": "chat.completion.chunk", "choices": [choice]}).encode()


def sse(*pieces: bytes) -> Script:
    """A script that streams these pieces, a chunk each, to the end."""

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD)
        for piece in pieces:
            await call.send_chunk(piece)
        await call.send_chunk(b"")

    return script


def answers(*pieces: bytes) -> Script:
    """A script that answers with these bytes as they are, a write each, and leaves the connection open."""

    async def script(call: Call) -> None:
        for piece in pieces:
            await call.send(piece)

    return script


async def silent(call: Call) -> None:
    """A script that says nothing for as long as it is listened to."""
    await call.wait_disconnected()


async def post(client: RawClient, body: bytes, target: str = CHAT, *headers: tuple[str, str]) -> None:
    """Sends a JSON request, without waiting for its answer."""
    await client.send(head("POST", target, body, [JSON, *headers]) + body)


def n_delivered(marker: str, *upstreams: FakeUpstream) -> int:
    """How often bodies with this marker in them arrived, at all of these together."""
    return sum(marker.encode() in call.body for upstream in upstreams for call in upstream.calls)


async def scrape(app: App | Command) -> dict[str, float]:
    """`/metrics` as a scraper sees it: series, as written there, to value."""
    assert app.admin_url is not None
    async with RawClient(app.admin_url) as client:
        answer = await client.request("GET", "/metrics")
    assert answer.status == 200
    lines = (line.rpartition(" ") for line in answer.body.decode().splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in lines}


async def payload(client: RawClient, n_bytes: int) -> bytes:
    """The next `n_bytes` of a chunked answer, however they are cut."""
    got = b""
    while len(got) < n_bytes:
        piece = await client.chunk()
        assert piece, "the answer has ended"
        got += piece
    return got


async def wait_metric(app: App, series: str, holds: Callable[[float], bool]) -> None:
    """Until `/metrics` says so of a series, as it is written there."""
    while not holds((await scrape(app))[series]):
        await asyncio.sleep(0.005)
