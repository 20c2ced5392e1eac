"""Odd and hostile requests: refused in words that repeat nothing, or passed on as they are. Never a 500."""

import asyncio
import json
import logging
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawAnswer, RawClient
from prefixroute.testing.client import chunked, head

Serve = Callable[..., AbstractAsyncContextManager[App]]

SECRET = "sk-1234567890abcdef"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"
HOST = b"Host: router.test\r\n"


def lines(caplog: pytest.LogCaptureFixture) -> str:
    """All that was logged, tracebacks and fields included."""
    formatter = logging.Formatter()
    return "\n".join(formatter.format(record) + repr(vars(record)) for record in caplog.records)


def check_repeats_nothing(answer: RawAnswer, caplog: pytest.LogCaptureFixture) -> None:
    assert SECRET.encode() not in answer.raw
    assert SECRET not in lines(caplog)
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert answer.header("content-type") == "application/json"
    assert answer.header("x-request-id")
    assert (answer.header("date") or "").endswith(" GMT")


MALFORMED = {
    "space before colon": b"POST /x HTTP/1.1\r\n" + HOST + b"Authorization : Bearer %s\r\n\r\n",
    "space in name": b"POST /x HTTP/1.1\r\n" + HOST + b"Author ization: Bearer %s\r\n\r\n",
    "no colon": b"POST /x HTTP/1.1\r\n" + HOST + b"Bearer %s\r\n\r\n",
    "name is empty": b"POST /x HTTP/1.1\r\n" + HOST + b": Bearer %s\r\n\r\n",
    "name is no token": b"POST /x HTTP/1.1\r\n" + HOST + b"X(%s): y\r\n\r\n",
    "NUL in value": b"POST /x HTTP/1.1\r\n" + HOST + b"X: \x00%s\r\n\r\n",
    "control in value": b"POST /x HTTP/1.1\r\n" + HOST + b"X: \x01%s\r\n\r\n",
    "bare CR in value": b"POST /x HTTP/1.1\r\n" + HOST + b"X: a\rY: %s\r\n\r\n",
    "bare LF": b"POST /x HTTP/1.1\nX: %s\n\n",
    "folded header": b"POST /x HTTP/1.1\r\n" + HOST + b"X: a\r\n %s\r\n\r\n",
    "folded first header": b"POST /x HTTP/1.1\r\n X: %s\r\n\r\n",
    "no Host": b"POST /x HTTP/1.1\r\nX: %s\r\n\r\n",
    "two Hosts": b"POST /x HTTP/1.1\r\nHost: %s\r\nHost: b\r\n\r\n",
    "NUL in target": b"GET /\x00%s HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in target": b"GET /a %s HTTP/1.1\r\n" + HOST + b"\r\n",
    "target is no UTF-8": b"GET /\xff%s HTTP/1.1\r\n" + HOST + b"\r\n",
    "target is no ASCII": b"GET /\xc3\xa9%s HTTP/1.1\r\n" + HOST + b"\r\n",
    "no target": b"GET HTTP/1.1\r\nX: %s\r\n\r\n",
    "target is a word": b"GET %s HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute without host": b"GET http:///%s HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute, bad port": b"GET http://a:b%s/x HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute, bad bracket": b"GET http://[%s/x HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute, another scheme": b"GET ftp://%s/x HTTP/1.1\r\n" + HOST + b"\r\n",
    "asterisk for GET": b"GET * HTTP/1.1\r\n" + HOST + b"X: %s\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\n" + HOST + b"X: %s\r\n\r\n",
    "CONNECT": b"CONNECT %s:443 HTTP/1.1\r\n" + HOST + b"\r\n",
    "unknown method": b"FROBNICATE /%s HTTP/1.1\r\n" + HOST + b"\r\n",
    "lower-case method": b"post /%s HTTP/1.1\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /%s\r\n\r\n",
    "HTTP/1.2": b"GET /%s HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/2": b"GET /%s HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n%s",
    "HTTP/1.1 misspelt": b"GET /%s HTTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03%s",
    "SSH": b"SSH-2.0-%s\r\n",
    "NULs": b"\x00" * 100 + b"%s\r\n\r\n",
    "words": b"hello %s\r\n\r\n",
    "an answer": b"HTTP/1.1 200 OK\r\nX: %s\r\n\r\n",
    "negative length": b"POST /x HTTP/1.1\r\n" + HOST + b"X: %s\r\nContent-Length: -1\r\n\r\n",
    "signed length": b"POST /x HTTP/1.1\r\n" + HOST + b"X: %s\r\nContent-Length: +1\r\n\r\n",
    "hexadecimal length": b"POST /x HTTP/1.1\r\n" + HOST + b"X: %s\r\nContent-Length: 0x1\r\n\r\n",
    "empty length": b"POST /x HTTP/1.1\r\n" + HOST + b"X: %s\r\nContent-Length:\r\n\r\n",
    "list of lengths": b"POST /x HTTP/1.1\r\n" + HOST + b"X: %s\r\nContent-Length: 1, 1\r\n\r\n",
    "two lengths": b"POST /x HTTP/1.1\r\n" + HOST + b"X: %s\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
    "endless length": b"POST /x HTTP/1.1\r\n" + HOST + b"X: %s\r\nContent-Length: " + b"9" * 40 + b"\r\n\r\n",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_http_is_refused_and_repeated_nowhere(
    serve: Serve, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(sent.replace(b"%s", SECRET.encode()))
        answer = await client.answer()
        assert answer.status == 400
        check_repeats_nothing(answer, caplog)
        assert upstream.calls == []
        async with RawClient(app.url) as other:
            assert (await other.request(body=BODY)).status == 200


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ("two lengths", "more than one Content-Length"),
        ("two Hosts", "more than one Host"),
        ("no Host", "no Host"),
        ("unknown method", "method"),
        ("lower-case method", "method"),
        ("name is no token", "a header's name or the end of its line"),
        ("no colon", "a header's name or the end of its line"),
        ("control in value", "a header's value"),
        ("negative length", "Content-Length"),
        ("HTTP/1.2", "version"),
        ("HTTP/1.1 misspelt", "version"),
        ("target is a word", "target"),
        ("NUL in target", "target"),
        ("TLS", "TLS"),
    ],
)
async def test_a_refusal_says_which_part_was_wrong(
    serve: Serve, sample: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(MALFORMED[sample].replace(b"%s", SECRET.encode()))
        answer = await client.answer()
        check_repeats_nothing(answer, caplog)
        message = json.loads(answer.body)["error"]["message"]
        assert message.startswith("the request is not valid HTTP: ")
        assert reason in message
        assert message in lines(caplog)


@pytest.mark.parametrize(
    "codings",
    [
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked, gzip\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked, chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n",
        b"Transfer-Encoding:\r\n chunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b'Transfer-Encoding: "chunked"\r\n',
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked;q=1\r\n",
        b"Transfer-Encoding: chunked,\r\n",
        b"Transfer-Encoding:\r\n",
    ],
)
@pytest.mark.parametrize("line", [b"POST /v1/chat/completions HTTP/1.1", b"POST /x HTTP/1.1", b"GET /health HTTP/1.1"])
async def test_a_doubtful_transfer_encoding_is_refused_and_nothing_goes_on(
    serve: Serve, codings: bytes, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    smuggled = head("GET", "/smuggled", None)
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(line + b"\r\n" + HOST + codings + b"X: " + SECRET.encode() + b"\r\n\r\n0\r\n\r\n" + smuggled)
        answer = await client.answer()
        assert answer.status == 400
        assert answer.header("connection") == "close"
        check_repeats_nothing(answer, caplog)
        assert await client.wait_closed() == b""
        assert upstream.calls == []


@pytest.mark.parametrize("codings", [b"chunked", b"gzip, chunked", b"identity"])
async def test_an_old_client_has_no_transfer_encodings(serve: Serve, codings: bytes) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(b"POST /x HTTP/1.0\r\nTransfer-Encoding: " + codings + b"\r\n\r\n0\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (400, "close")
        assert await client.wait_closed() == b""
        assert upstream.calls == []


BAD_CHUNKS = [
    b"zz\r\nhello\r\n",
    b"5\r\nhelloworld\r\n",
    b"-5\r\nhello\r\n",
    b"0x5\r\nhello\r\n",
    b"5 \r\nhello\r\n0\r\n\r\n",
    b"\r\n5\r\nhello\r\n",
    b"5\nhello\r\n",
    b"5\r\nhello\n",
    b"ffffffffffffffffff\r\n",
    b"5;a\nb\r\nhello\r\n",
]


@pytest.mark.parametrize("bad", BAD_CHUNKS)
@pytest.mark.parametrize("target", [CHAT, "/v1/audio/transcriptions"])
@pytest.mark.parametrize("apart", [False, True])
async def test_a_malformed_chunk_is_refused(
    serve: Serve, bad: bytes, target: str, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    start = head("POST", target, None, [("Transfer-Encoding", "chunked"), ("X", SECRET), ("Expect", "100-continue")])

    async def takes_it_in(call: Call) -> None:
        await call.read_body()

    async with (
        FakeUpstream(takes_it_in, by_hand=True) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        if apart:
            await client.send(start)
            assert await client.read(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"3\r\nabc\r\n")
        await client.send((b"" if apart else start) + bad + SECRET.encode())
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (400, "close")
        check_repeats_nothing(answer, caplog)
        assert await client.wait_closed() == b""


TOO_LARGE = {
    "one header": [(b"X", b"x" * 70_000)],
    "a name": [(b"x" * 70_000, b"y")],
    "many headers": [(b"X-%d" % i, b"y") for i in range(2000)],
    "much in all": [(b"X-%d" % i, b"y" * 60_000) for i in range(200)],
}


@pytest.mark.parametrize("headers", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_headers_too_large_are_refused(
    serve: Serve, headers: list[tuple[bytes, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        sent = b"".join(b"%s: %s\r\n" % header for header in headers)
        await client.send(b"GET /x HTTP/1.1\r\n" + HOST + b"Z: " + SECRET.encode() + b"\r\n" + sent + b"\r\n")
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (431, "close")
        check_repeats_nothing(answer, caplog)
        assert upstream.calls == []


async def test_a_refusal_reaches_a_client_that_is_still_sending(serve: Serve) -> None:
    """A connection closed over unread bytes is reset, and the reset overtakes the answer."""
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        sending = asyncio.create_task(client.send(b"GET /x HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 8_000_000))
        assert (await client.answer()).status == 431
        # The router says at once that it is done, and only then stops reading.
        assert await client.wait_closed() == b""
        client.close()
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_long_request_line_is_refused(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n")
        answer = await client.answer()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (431, "headers_too_large")


DEEP = b'{"model":"m","messages":' + b"[" * 15_000 + b"]" * 15_000 + b"}"


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b"{", "not_json"),
        (b"", "not_json"),
        (b"\xff\xfe", "not_json"),
        (b"null", "not_an_object"),
        (b"[]", "not_an_object"),
        (b'"x"', "not_an_object"),
        (b"{}", "no_prompt"),
        (b'{"model":5,"messages":{}}', "no_prompt"),
        (b'{"model":"m","messages":[null,1,"x",[],{"role":{},"content":[[],{"type":5}]}]}', None),
        (b'{"model":"m\\ud800","messages":[{"role":"user","content":"\\udfff"}]}', None),
        (DEEP, "not_json"),
        (b'{"model":"m","messages":' + b"[" * 500 + b"]" * 500 + b"}", None),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "no_prompt"),
        (b"\x00" * 2_000_000, None),
        (b"[" * 2_000_000, None),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else str(value),
)
async def test_a_body_that_cannot_be_understood_goes_on_untouched(
    serve: Serve, body: bytes, cause: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=body)
        assert answer.status == 200
        assert upstream.bodies == [body]
        text = app.metrics.exposition()[0].decode()
        counted = re.findall(r'prompts_without_key_total\{cause="(\w+)"\} 1.0', text)
        assert counted == [cause] if cause is not None else len(counted) <= 1


@pytest.mark.parametrize("place", ["value", "name", "target", "query", "method", "version", "chunk extension"])
async def test_every_byte_anywhere_passes_or_is_refused(serve: Serve, place: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        client = RawClient(app.url)
        await client.__aenter__()
        for code in range(256):
            byte = bytes([code])
            parts = dict.fromkeys(["value", "name", "target", "query", "method", "version", "chunk extension"], b"")
            parts[place] = byte
            await client.send(
                b"POST%(method)s /x%(target)sy?a%(query)sb HTTP/1.1%(version)s\r\nHost: a\r\n"
                b"X%(name)sY: a%(value)sb\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"2;e=%(chunk extension)s\r\nhi\r\n0\r\n\r\n" % {key.encode(): value for key, value in parts.items()}
            )
            answer = await client.answer()
            assert answer.status in (200, 400), byte
            if answer.status == 200:
                assert upstream.calls[-1].body == b"hi"
            if answer.header("connection") == "close":
                client.close()
                await client.__aenter__()
        client.close()
        assert (len(upstream.calls) > 0) == (place != "version")


async def test_a_stray_line_end_between_requests_is_nothing(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, BODY) + BODY + b"\r\n")
        assert (await client.answer()).status == 200
        await client.send(head("POST", CHAT, None, [("Transfer-Encoding", "chunked")]) + chunked(BODY))
        assert (await client.answer()).status == 200


async def test_tunnels_are_not_made(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request("CONNECT", "/v1/x")
        assert (answer.status, answer.header("connection")) == (400, "close")
        assert upstream.calls == []


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        (b"nonsense\r\n\r\n", "malformed_request"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", "headers_too_large"),
    ],
)
async def test_what_cannot_be_read_is_counted(serve: Serve, sent: bytes, cause: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(sent)
        await client.wait_closed()
        assert f'prefixroute_unread_requests_total{{cause="{cause}"}} 1.0'.encode() in app.metrics.exposition()[0]
