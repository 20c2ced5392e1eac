"""Each message has exactly one framing, this hop's own: in answers, in requests, on one connection in a row."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import chunked, head
from prefixroute.testing.upstream import Script, raw_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"


def written(data: bytes, *, close: bool = False) -> Script:
    """A script that writes these bytes, whatever it is asked."""

    async def script(call: Call) -> None:
        await call.send(data)
        if close:
            call.close()

    return script


# ---------------------------------------------------------------------- answers

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;ext=1\r\nhe\r\n3\r\nllo\r\n0\r\nX-Trailer: 1\r\n\r\n"
CLOSED = b"HTTP/1.1 200 OK\r\n\r\nhello"
OLD = b"HTTP/1.0 200 OK\r\n\r\nhello"
OLD_LENGTH = b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize(
    ("sent", "close", "header"),
    [
        (LENGTH, False, ("Content-Length", "5")),
        (LENGTH, True, ("Content-Length", "5")),
        (CHUNKED, False, ("Transfer-Encoding", "chunked")),
        (CHUNKED, True, ("Transfer-Encoding", "chunked")),
        (CLOSED, True, ("Transfer-Encoding", "chunked")),
        (OLD, True, ("Transfer-Encoding", "chunked")),
        (OLD_LENGTH, True, ("Content-Length", "5")),
    ],
)
async def test_an_answer_is_framed_once_and_the_connection_goes_on(
    serve: Serve, sent: bytes, close: bool, header: tuple[str, str]
) -> None:
    async with (
        FakeUpstream(written(sent, close=close)) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        for _ in range(2):
            answer = await client.request(body=BODY)
            assert (answer.body, answer.complete) == (b"hello", True)
            assert header in answer.headers
            assert answer.header("connection") is None


@pytest.mark.parametrize("sent", [LENGTH, CHUNKED, CLOSED, OLD, OLD_LENGTH])
@pytest.mark.parametrize("keep", [False, True])
async def test_an_old_client_gets_what_it_understands(serve: Serve, sent: bytes, keep: bool) -> None:
    async with (
        FakeUpstream(written(sent, close=True)) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        line = b"Connection: keep-alive\r\n" if keep else b""
        await client.send(b"GET /x HTTP/1.0\r\n" + line + b"\r\n")
        answer = await client.answer()
        assert (answer.body, answer.complete) == (b"hello", True)
        assert answer.header("transfer-encoding") is None
        has_length = b"Content-Length" in sent
        assert answer.header("content-length") == ("5" if has_length else None)
        assert answer.header("connection") == ("keep-alive" if keep and has_length else "close")
        if keep and has_length:
            await client.send(b"GET /y HTTP/1.0\r\n\r\n")
            assert (await client.answer()).body == b"hello"
        assert await client.wait_closed() == b""
        assert upstream.calls[0].header("host") == upstream.url.removeprefix("http://")


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("lines", ["", "Content-Length: 0\r\n", "Content-Length: 5\r\nETag: x\r\n"])
async def test_a_status_without_body_has_none(serve: Serve, status: int, lines: str) -> None:
    sent = f"HTTP/1.1 {status} Fine\r\n{lines}\r\n".encode()
    async with FakeUpstream(written(sent)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for _ in range(2):
            answer = await client.request(body=BODY)
            assert (answer.status, answer.body) == (status, b"")
            assert answer.header("transfer-encoding") is None
            # A 304 may tell the length of what it stands for; a 204 must not.
            length = "5" if "5" in lines else "0" if "0" in lines else None
            assert answer.header("content-length") == (None if status == 204 else length)
            assert answer.header("etag") == ("x" if "ETag" in lines else None)


@pytest.mark.parametrize("lines", ["Content-Length: 12345\r\n", "Transfer-Encoding: chunked\r\n", ""])
async def test_an_answer_to_head_has_no_body(serve: Serve, lines: str) -> None:
    sent = f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode()
    async with FakeUpstream(written(sent)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for _ in range(2):
            answer = await client.request("HEAD", "/x")
            assert (answer.status, answer.body) == (200, b"")
            assert answer.header("content-length") == ("12345" if "Length" in lines else None)
        # Nothing of a body came either: the next answer begins right behind.
        assert (await client.request("HEAD", "/health")).status == 200


@pytest.mark.parametrize("lines", ["", "Content-Length: 0\r\n"])
async def test_an_empty_answer_is_an_answer(serve: Serve, lines: str) -> None:
    script = written(f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode(), close=True)
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY)
        assert (answer.status, answer.body, answer.complete) == (200, b"", True)


async def test_interim_answers_are_not_taken_for_the_answer(serve: Serve) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    async with (
        FakeUpstream(written(interim + LENGTH)) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request(body=BODY)
        assert (answer.status, answer.body) == (200, b"hello")


async def test_early_hints_pass_before_the_answer(serve: Serve) -> None:
    interim = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\nlink: </y>\r\n"
        b"Connection: close, X-Hop\r\n"
        b"X-Hop: 1\r\nKeep-Alive: timeout=1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
    )
    async with FakeUpstream(written(interim + LENGTH)) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            await client.send(head("POST", CHAT, BODY, None) + BODY)
            hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nlink: </y>\r\n\r\n"
            assert await client.read(len(hints)) == hints
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"hello")
        async with RawClient(app.url) as old:
            await old.send(b"POST /x HTTP/1.0\r\nContent-Length: 1\r\n\r\nx")
            assert (await old.wait_closed()).count(b"HTTP/1.1 ") == 1


async def test_trailers_pass_where_chunks_do(serve: Serve) -> None:
    sent = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"
        b"5\r\nhello\r\n0\r\nX-Sum: 1\r\nContent-Length: 7\r\nx-sum: 2\r\n\r\n"
    )
    async with FakeUpstream(written(sent)) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            answer = await client.request(body=BODY)
            assert (answer.header("trailer"), answer.body) == ("X-Sum", b"hello")
            assert answer.raw.endswith(b"\r\n0\r\nX-Sum: 1\r\nx-sum: 2\r\n\r\n")
            assert (await client.request(body=BODY)).status == 200
        async with RawClient(app.url) as old:
            await old.send(b"POST /x HTTP/1.0\r\nContent-Length: 1\r\n\r\nx")
            raw = await old.wait_closed()
            assert raw.endswith(b"\r\n\r\nhello")
            # Nor are any announced.
            assert b"trailer" not in raw.lower()
        async with RawClient(app.url) as client:
            assert (await client.request("HEAD")).header("trailer") is None


async def test_where_no_chunks_go_no_trailers_are_announced(serve: Serve) -> None:
    sent = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTrailer: X-Sum\r\nX-Kept: 1\r\n\r\nhello"
    async with FakeUpstream(written(sent)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY)
        assert (answer.header("trailer"), answer.header("x-kept"), answer.body) == (None, "1", b"hello")


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\nhello",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nhello",
        b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"garbage\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"HTTP/1.1 200 OK\r\nX-Nul: a\x00b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Big: " + b"x" * 100_000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"Content-Length: 0\r\n\r\n",
    ],
)
async def test_an_answer_that_is_no_http_is_a_bad_gateway(
    serve: Serve, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeUpstream(written(sent, close=True)) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            answer = await client.request(body=BODY)
            assert (answer.status, answer.complete) == (502, True)
            assert b"gpu-0" in answer.body
            assert (await client.request("GET", "/health")).status == 200
        assert len(upstream.calls) == 1


@pytest.mark.parametrize(
    "line", [b"X-Folded: a\r\n b", b"X-Cr: a\rX-Smuggled: b", b"X-Tab:\ta\tb\t", b"X-Ctl: a\x01\x7fb"]
)
async def test_an_odd_header_cannot_become_two(serve: Serve, line: bytes) -> None:
    sent = b"HTTP/1.1 200 OK\r\n" + line + b"\r\nContent-Length: 5\r\n\r\nhello"
    async with (
        FakeUpstream(written(sent, close=True)) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request(body=BODY)
        assert answer.status in (200, 502)
        assert answer.header("x-smuggled") is None
        assert b"\r" not in answer.raw.replace(b"\r\n", b"")
        assert len([name for name, _ in answer.headers if name.startswith("X-")]) <= 1


async def test_what_an_instance_says_unasked_is_no_answer(serve: Serve) -> None:
    """A server that says 408 on an idle connection must not answer the next client with it."""
    spoken = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(LENGTH)
        if call.target == "/first":
            await asked.wait()
            await call.send(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            spoken.set()

    asked = asyncio.Event()
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request("GET", "/first")).status == 200
        asked.set()
        await spoken.wait()
        # Another exchange over the same loop: by its end what was spoken has arrived.
        assert (await client.request("GET", "/health")).status == 200
        for _ in range(2):
            answer = await client.request("GET", "/second")
            assert (answer.status, answer.body) == (200, b"hello")


async def test_bytes_behind_an_answer_do_not_reach_the_next_client(serve: Serve) -> None:
    async with (
        FakeUpstream(written(LENGTH + LENGTH.replace(b"hello", b"other"))) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        for _ in range(3):
            answer = await client.request("GET", "/x")
            assert answer.body == b"hello"


# ---------------------------------------------------------------------- requests


async def test_requests_sent_ahead_are_answered_in_order(serve: Serve) -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        if call.target == "/0":
            await release.wait()
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.send_chunk(call.target.encode() + call.body)
        await call.send_chunk(b"")

    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        requests = [head("POST", f"/{i}", b"body") + b"body" for i in range(60)]
        requests[1] = head("POST", "/1", None, [("Transfer-Encoding", "chunked")]) + chunked(b"bo", b"dy")
        await client.send(b"".join(requests))
        await upstream.wait_calls(1)
        assert len(upstream.calls) == 1
        release.set()
        for i in range(60):
            assert (await client.answer()).body == b"/%dbody" % i


async def test_a_bad_request_behind_a_good_one_does_not_spoil_it(serve: Serve) -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await call.send(LENGTH)

    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("GET", "/x", None))
        await upstream.wait_calls(1)
        await client.send(b"nonsense\r\n\r\n")
        release.set()
        assert (await client.answer()).body == b"hello"
        assert (await client.answer()).status == 400
        assert await client.wait_closed() == b""


async def test_a_client_that_says_close_is_closed(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY, headers=[("Connection", "close")])
        assert answer.header("connection") == "close"
        assert await client.wait_closed() == b""
        assert upstream.calls[0].header("connection") is None


@pytest.mark.parametrize("target", [CHAT, "/v1/audio/transcriptions"])
async def test_a_client_that_waits_for_continue_is_told(serve: Serve, target: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", target, BODY, [("Expect", "100-Continue")]))
        assert await client.read(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(BODY)
        answer = await client.answer()
        assert answer.status == 200
        assert upstream.bodies == [BODY]
        assert upstream.calls[0].header("expect") is None
        # Exactly one final answer: the next one belongs to the next request.
        assert (await client.request("GET", "/health")).status == 200


async def test_a_client_that_waits_for_continue_in_vain_is_told_why(serve: Serve) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, limits={"max_body_bytes": 1024}) as app,
        RawClient(app.url) as client,
    ):
        await client.send(head("POST", CHAT, b"x" * 1025, [("Expect", "100-continue")]))
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (413, "close")
        assert answer.raw.startswith(b"HTTP/1.1 413")
        assert upstream.calls == []


async def test_another_expectation_cannot_be_met(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request(body=BODY, headers=[("Expect", "a-miracle")])).status == 417
        assert upstream.calls == []


async def test_a_body_that_nobody_read_does_not_become_the_next_request(serve: Serve) -> None:
    """`GET /health` answers at once; the body it came with is not another request."""
    smuggled = head("GET", "/smuggled", None)
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for target in ("/health", "/sleep"):
            await client.send(head("GET", target, smuggled) + smuggled)
            await client.answer()
            async with RawClient(app.url) as other:
                assert (await other.request("GET", "/x")).status == 200
        assert [call.target for call in upstream.calls] == ["/x", "/x"]


async def test_trailers_of_a_request_are_taken_off(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        for target in (CHAT, "/unknown"):
            for sent in (b"4;name=value\r\nbody\r\n0\r\nX-Trailer: 1\r\n\r\n", b"4\r\nbody\r\n000\r\n\r\n"):
                async with RawClient(app.url) as client:
                    await client.send(
                        head("POST", target, None, [("Transfer-Encoding", "Chunked"), ("Trailer", "X-Trailer")])
                    )
                    await client.send(sent)
                    assert (await client.answer()).status == 200
        assert upstream.bodies == [b"body"] * 4
        assert {call.header("trailer") for call in upstream.calls} == {None}


async def test_a_connection_is_used_again_upstream(serve: Serve) -> None:
    async with FakeUpstream(raw_answer(b"x")) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for _ in range(5):
            await client.request(body=BODY)
        assert [call.reused for call in upstream.calls] == [False, True, True, True, True]
