"""Many at once, slow readers, and everything mixed: what is bounded, and what is given back."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from random import Random
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.http.arrival import Arrival
from prefixroute.http.proxy import Proxy
from prefixroute.http.response import RawResponse
from prefixroute.testing import Call, FakeUpstream, RawAnswer, RawClient
from prefixroute.testing.client import chunked, head
from prefixroute.testing.upstream import json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Finished = Callable[[], list[dict[str, Any]]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
CHAT = "/v1/chat/completions"


async def test_three_hundred_streams_are_open_at_once(serve: Serve, finished: Finished) -> None:
    n = 300

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.send_chunk(b"data: 1\n\n")
        await release.wait()
        await call.send_chunk(b"data: [DONE]\n\n")
        await call.send_chunk(b"")

    async def stream(client: RawClient) -> bytes:
        await client.send(head("POST", CHAT, BODY) + BODY)
        await client.begin()
        first = await client.chunk()
        begun.append(client)
        rest = b""
        while piece := await client.chunk():
            rest += piece
        return first + rest

    release = asyncio.Event()
    begun: list[RawClient] = []
    async with FakeUpstream(script) as one, FakeUpstream(script) as two, FakeUpstream(script) as three:
        async with serve(one, two, three) as app:
            clients = [RawClient(app.url) for _ in range(n)]
            await asyncio.gather(*(client.__aenter__() for client in clients))
            streams = [asyncio.create_task(stream(client)) for client in clients]
            for fake in (one, two, three):
                await fake.wait_calls(n // 3)
            assert sum(app.router.load.of(slot).in_flight for slot in range(3)) == n
            release.set()
            assert set(await asyncio.gather(*streams)) == {b"data: 1\n\ndata: [DONE]\n\n"}
            assert len(begun) == n
            await asyncio.gather(*(client.__aexit__(None, None, None) for client in clients))
        assert {line["outcome"] for line in finished()} == {"ok"}


@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_a_slow_reader_holds_up_the_instance_not_the_routers_memory(
    serve: Serve, until: Until, framing: str
) -> None:
    size = 50_000_000
    piece = b"x" * 100_000
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        line = b"Transfer-Encoding: chunked" if framing == "chunked" else b"Content-Length: %d" % size
        await call.send(b"HTTP/1.1 200 OK\r\n" + line + b"\r\n\r\n")
        for _ in range(size // len(piece)):
            await (call.send_chunk if framing == "chunked" else call.send)(piece)
            sent += len(piece)
        if framing == "chunked":
            await call.send_chunk(b"")

    async with (
        FakeUpstream(script) as upstream,
        serve(upstream) as app,
        RawClient(app.url, read_bytes=65_536) as client,
        RawClient(app.url) as other,
    ):
        await client.send(head("POST", CHAT, BODY) + BODY)
        await client.begin()
        before = -1
        # What sockets and buffers of a fixed size hold has come; then nothing moves.
        while sent != before:
            before = sent
            for _ in range(50):
                assert (await other.request("GET", "/health")).status == 200
        assert sent < 15_000_000
        n = 0
        while n < size:
            n += len(await client.chunk()) if framing == "chunked" else len(await client.read(1_000_000))
        assert n == size


# ---------------------------------------------------------------------- everything, mixed

KINDS = ["json", "stream", "close", "busy", "error", "dies", "cut", "garbage", "silent", "stale", "early"]


async def any_kind(call: Call) -> None:
    """Does what the request's `x-do` says, and puts its `x-tag` into the answer."""
    tag = (call.header("x-tag") or "").encode()
    kind = call.header("x-do")
    if kind in ("json", "stale", "early"):
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(tag) + tag)
        if kind == "stale":
            call.reset_at_next()
        elif kind == "early":
            call.close()
    elif kind in ("busy", "error"):
        await json_answer({"tag": tag.decode()}, status=503 if kind == "busy" else 500)(call)
    elif kind == "dies":
        call.reset()
    elif kind == "silent":
        await call.wait_disconnected()
    elif kind == "close":
        await call.send(b"HTTP/1.0 200 OK\r\n\r\n" + tag)
        call.close()
    else:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.send_chunk(tag[:3])
        if kind == "stream":
            await call.send_chunk(b"x" * 70_000)
            await call.send_chunk(tag[3:])
            await call.send_chunk(b"")
        elif kind == "cut":
            call.reset()
        else:
            await call.send(b"garbage\r\n")


class Visitor:
    """One client's requests, one after the other, by chance. Counts those that a record must be written for."""

    def __init__(self, url: str, rng: Random, tags: Counter[str]) -> None:
        self._url = url
        self._rng = rng
        self._tags = tags

    async def visit(self, n: int) -> None:
        while n:
            async with RawClient(self._url) as client:
                while n:
                    n -= 1
                    if not await self._once(client):
                        break

    async def _once(self, client: RawClient) -> bool:
        """One request. Whether the connection can be used again."""
        rng = self._rng
        tag = f"tag{sum(self._tags.values())}"
        kind = rng.choice(KINDS)
        way = rng.choice(["", "", "", "leaves", "resets", "half-closes", "malformed", "too large", "bad chunk"])
        target = rng.choice([CHAT, CHAT, "/v1/messages", "/v1/audio/transcriptions", "/unknown"])
        headers = [("X-Do", kind), ("X-Tag", tag)]
        if way == "malformed":
            await client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nbad header : x\r\n\r\n")
            assert (await client.answer()).status == 400
            return False
        self._tags[tag] += 1
        if way == "too large":
            await client.send(head("POST", target, b"x" * 200_001, headers))
            assert (await client.answer()).status == 413
            return False
        body = b'{"model":"m","prompt":"%s"}' % (b"x" * rng.choice([1, 1000, 150_000]))
        if way == "bad chunk":
            start = head("POST", target, None, [*headers, ("Transfer-Encoding", "chunked")])
            await client.send(start + chunked(body)[:-5] + b"zz\r\n")
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await client.answer()
            return False
        if rng.random() < 0.3:
            request = head("POST", target, None, [*headers, ("Transfer-Encoding", "chunked")]) + chunked(body)
        else:
            request = head("POST", target, body, headers) + body
        await client.send(request)
        if kind == "silent" or way in ("leaves", "resets", "half-closes"):
            if rng.random() < 0.5 and kind in ("stream", "cut"):
                with suppress(asyncio.IncompleteReadError, ConnectionError):
                    await client.read(10)
            {"resets": client.reset, "half-closes": client.half_close}.get(way, client.close)()
            return False
        try:
            answer = await client.answer()
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        self._check(kind, tag, answer)
        return answer.complete and answer.header("connection") != "close"

    @staticmethod
    def _check(kind: str, tag: str, answer: RawAnswer) -> None:
        if kind in ("json", "stale", "close", "early"):
            assert (answer.status, answer.body, answer.complete) == (200, tag.encode(), True)
        elif kind == "stream":
            assert (answer.status, answer.complete) == (200, True)
            assert answer.body.replace(b"x" * 70_000, b"") == tag.encode()
        elif kind in ("busy", "error"):
            assert (answer.status, json.loads(answer.body)) == (503 if kind == "busy" else 500, {"tag": tag})
        elif kind == "dies":
            assert answer.status == 502
        else:
            # A reset may overtake the head that was sent before it.
            assert (answer.status, answer.complete) in ((200, False), (502, True))


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_whatever_happens_everything_is_given_back_and_recorded_once(
    serve: Serve, finished: Finished, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    handled: list[str] = []
    handle = Proxy.handle

    async def counts(self: Proxy, request: Arrival) -> RawResponse:
        handled.append(request.head.target)
        return await handle(self, request)

    monkeypatch.setattr(Proxy, "handle", counts)
    tags: Counter[str] = Counter()
    rng = Random(seed)
    async with FakeUpstream(any_kind) as one, FakeUpstream(any_kind) as two, FakeUpstream(any_kind) as three:
        limits = {"max_body_bytes": 200_000}
        async with serve(one, two, three, limits=limits, retry={"unanswered": "inference"}) as app:
            visitors = [Visitor(app.url, Random(rng.random()), tags) for _ in range(20)]
            await asyncio.gather(*(visitor.visit(12) for visitor in visitors))
        assert app.metrics.waiting() == 0
        text = app.metrics.exposition()[0].decode()
        lines = [line for line in text.splitlines() if line.startswith("prefixroute_requests_total{")]
        assert sum(float(line.rpartition(" ")[2]) for line in lines) == len(finished()) == len(handled) > 150
        assert {line["outcome"] for line in finished()} >= {"ok", "client_gone", "refused", "broken", "server_error"}
        assert "fault" not in {line["outcome"] for line in finished()}
