"""Bytes pass through: what a client sends arrives as sent, and what an instance answers comes back as answered."""

import asyncio
import gzip
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import Headers, chunked, head
from prefixroute.testing.upstream import raw_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"
# What a router may add to a request: who it is for, how it is framed, what it is called.
OWN_REQUEST_HEADERS = {"host", "content-length", "transfer-encoding", "x-request-id"}


def passed(headers: Headers, own: set[str] = OWN_REQUEST_HEADERS) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in own]


# ---------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1//chat///completions",
        "/v1/chat%2Fcompletions",
        "/v1/ch%61t/completions",
        "/%e2%82%ac/%E2%82%AC?q=%e2%82%ac",
        "/a%20b+c?x=%20+y&x=&=z&&",
        "/a/./b/../c/%2e%2e/d",
        "/%",
        "/%zz?%",
        "/a;b=c/d,e:f@g!$&'()*+=~",
        '/quotes"<>|^`{}\\',
        "/v1/files?limit=1&limit=2&order=",
        "/a?b?c=/d//e",
        "/x://y/z",
        "/" + "a" * 8000,
    ],
)
async def test_a_target_arrives_as_sent(serve: Serve, target: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(f"POST {target} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert (await client.answer()).status == 200
        assert upstream.calls[0].target.encode("latin-1").decode() == target
        assert upstream.calls[0].body == b"{}"


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        ("http://somewhere.test/v1/files?x=1", "/v1/files?x=1"),
        ("HTTP://somewhere.test:81//v1/files", "//v1/files"),
        ("https://somewhere.test", "/"),
        ("http://somewhere.test?x=1", "/?x=1"),
    ],
)
async def test_an_absolute_target_is_forwarded_in_origin_form(serve: Serve, target: str, origin: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request("GET", target)).status == 200
        assert upstream.calls[0].target == origin
        assert upstream.calls[0].all_headers("host") == [upstream.url.removeprefix("http://")]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "LOCK", "PROPFIND", "QUERY"])
@pytest.mark.parametrize("body", [None, b"", b"some bytes \x00\xff"])
async def test_any_method_passes_with_its_body(serve: Serve, method: str, body: bytes | None) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request(method, "/anything", body)).status == 200
        call = upstream.calls[0]
        assert (call.method, call.body) == (method, body or b"")
        assert call.header("transfer-encoding") is None


async def test_headers_keep_order_case_and_repetition(serve: Serve) -> None:
    sent = [
        ("aUTHorization", "Bearer sk-1"),
        ("X-B", "1"),
        ("x-a", "2"),
        ("X-B", "3"),
        ("x-b", ""),
        ("Accept", "text/event-stream"),
        ("accept-ENCODING", "gzip;q=0, br"),
        ("Cookie", "a=1; b=2"),
        ("cookie", "c=3"),
        ("api-key", "k"),
        ("X-API-Key", "l"),
        ("User-Agent", "me/1"),
        ("CONTENT-TYPE", "application/json; charset=utf-8"),
        ("x_underscore", "4"),
        ("X-Forwarded-For", "1.2.3.4"),
        ("Date", "today"),
        ("X-Utf8", "caf\u00c3\u00a9"),  # é in UTF-8, as latin-1 shows it
        ("X-Spaces", "a  b\tc"),
        ("Via", "1.1 someone"),
    ]
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.request(body=BODY, headers=sent)
        assert passed(upstream.calls[0].headers) == sent


async def test_nothing_is_invented_either_way(serve: Serve) -> None:
    async def bare(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with FakeUpstream(bare) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY)
        assert passed(upstream.calls[0].headers) == []
        # A request id is the one thing that is added: without it nobody finds the line in the log.
        request_id = upstream.calls[0].header("x-request-id")
        assert answer.headers == [("content-length", "2"), ("x-request-id", request_id)]


async def test_a_header_that_is_no_utf8_arrives_as_sent(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.request(body=BODY, headers=[("X-Name", "J\u00fcrgen")])
        assert upstream.calls[0].header("x-name") == "J\u00fcrgen"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b","messages":[],"unknown":{"z":1,"a":[1.0,1e400,-0]}}',
        b'{ "model" : "m" , "mod\\u0065l":"x","messages":[{"role":"user","content":"\\ud83d\\ude00 \xc3\xa9"}] }\r\n',
        b'{"model":"m","messages":[{"role":"user","content":"hi","extra":[]}],"logprobs":true,"tools":[{}]}',
        b"\xef\xbb\xbf" + BODY,
        BODY + b"\n\n",
        b'{"n":' + b"1" * 400 + b"}",
    ],
)
async def test_a_json_body_arrives_as_sent(serve: Serve, body: bytes) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for sent in (body, body):
            assert (await client.request(body=sent, headers=[("Content-Type", "application/json")])).status == 200
        await client.send(head("POST", CHAT, None, [("Transfer-Encoding", "chunked")]) + chunked(body[:7], body[7:]))
        assert (await client.answer()).status == 200
        assert upstream.bodies == [body] * 3


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"]
)
async def test_a_content_type_is_forwarded_as_sent_and_the_prompt_still_seen(
    serve: Serve, content_type: str | None
) -> None:
    headers = [] if content_type is None else [("Content-Type", content_type)]
    async with (
        FakeUpstream() as upstream,
        serve(upstream, response_headers=True) as app,
        RawClient(app.url) as client,
    ):
        long = json.dumps({"model": "m", "prompt": "a long prompt " * 400}).encode()
        await client.request(target="/v1/completions", body=long, headers=headers)
        again = await client.request(target="/v1/completions", body=long, headers=headers)
        assert passed(upstream.calls[1].headers) == headers
        assert int(again.header("x-prefixroute-matched-tokens") or 0) > 0


async def test_a_compressed_body_goes_up_and_down_untouched(serve: Serve) -> None:
    packed = gzip.compress(BODY, mtime=0)
    answered = gzip.compress(gzip.compress(b"answer", mtime=0), mtime=0)
    script = raw_answer(answered, headers="Content-Encoding: gzip, gzip\r\nVary: accept-encoding\r\n")
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=packed, headers=[("Content-Encoding", "gzip"), ("Accept-Encoding", "gzip")])
        call = upstream.calls[0]
        assert (call.body, call.header("content-encoding")) == (packed, "gzip")
        assert answer.body == answered
        assert answer.headers[:2] == [("Content-Encoding", "gzip, gzip"), ("Vary", "accept-encoding")]
        assert answer.header("content-length") == str(len(answered))


async def test_a_compressed_body_is_never_expanded(serve: Serve) -> None:
    bomb = gzip.compress(bytes(200_000_000), 1, mtime=0)
    async with (
        FakeUpstream() as upstream,
        serve(upstream, limits={"max_body_bytes": len(bomb)}) as app,
        RawClient(app.url) as client,
    ):
        assert (await client.request(body=bomb, headers=[("Content-Encoding", "gzip")])).status == 200
        assert upstream.bodies == [bomb]


async def test_cookies_of_one_client_never_reach_anothers_request(serve: Serve) -> None:
    script = raw_answer(b"", headers="Set-Cookie: session=secret; Path=/\r\nSet-Cookie: b=2\r\n")
    async with FakeUpstream(script) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as first:
            answer = await first.request(body=BODY, headers=[("Cookie", "mine=1")])
            assert answer.all_headers("set-cookie") == ["session=secret; Path=/", "b=2"]
            await first.request(body=BODY)
        async with RawClient(app.url) as second:
            await second.request(body=BODY)
        assert [call.all_headers("cookie") for call in upstream.calls] == [["mine=1"], [], []]


async def test_what_belongs_to_the_connection_stays_on_it(serve: Serve) -> None:
    dropped = [
        ("Connection", "keep-alive, X-Per-Hop ,x-another"),
        ("X-Per-Hop", "1"),
        ("X-ANOTHER", "2"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Connection", "keep-alive"),
        ("Proxy-Authorization", "Basic x"),
        ("Proxy-Authenticate", "Basic"),
        ("TE", "trailers"),
        ("Trailer", "X-T"),
        ("Upgrade", "h2c"),
    ]
    down = "".join(f"{name}: {value}\r\n" for name, value in dropped)
    script = raw_answer(b"body", headers=f"{down}X-Kept: 1\r\n")
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY, headers=[*dropped, ("X-Kept", "1")])
        assert passed(upstream.calls[0].headers) == [("X-Kept", "1")]
        assert passed(answer.headers) == [("X-Kept", "1")]
        # The client's connection goes on, whatever the instance said of its own.
        assert (await client.request(body=BODY)).status == 200


async def test_an_upgrade_that_is_not_taken_loses_no_byte(serve: Serve) -> None:
    """Java's client offers h2c with the first request of each connection."""
    offer = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAEAAEAAAAIAAAAB")]
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request(body=BODY, headers=offer)).status == 200
        await client.send(head("POST", CHAT, BODY, [*offer, ("Expect", "100-continue")]))
        assert await client.read(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(BODY)
        assert (await client.answer()).status == 200
        assert (await client.request("GET", "/x", headers=offer)).status == 200
        assert (await client.request(body=BODY)).status == 200
        assert upstream.bodies == [BODY, BODY, b"", BODY]


async def test_proxy_variables_are_ignored(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeUpstream() as proxy, FakeUpstream() as upstream:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        async with serve(upstream) as app, RawClient(app.url) as client:
            assert (await client.request(body=BODY)).status == 200
        assert proxy.n_connections_ever == 0


@pytest.mark.parametrize("sent", ["abc-123", "!#$%&()*+,-./:;<=>?@[]^_`{|}~", "x" * 128])
async def test_a_safe_request_id_is_kept(serve: Serve, sent: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY, headers=[("X-Request-ID", sent)])
        assert upstream.calls[0].headers.count(("X-Request-ID", sent)) == 1
        assert len(upstream.calls[0].all_headers("x-request-id")) == 1
        assert answer.all_headers("x-request-id") == [sent]


@pytest.mark.parametrize("sent", [[], [""], ["a b"], ['a"b'], ["a'b"], ["a\\b"], ["x" * 129], ["\u00e9"], ["a b", "c"]])
@pytest.mark.parametrize("target", [CHAT, "/v1/models"])
async def test_a_request_id_is_made_where_there_is_no_safe_one(serve: Serve, sent: list[str], target: str) -> None:
    method = "POST" if target == CHAT else "GET"
    async with FakeUpstream() as one, FakeUpstream() as other, serve(one, other) as app, RawClient(app.url) as client:
        answer = await client.request(method, target, headers=[("X-Request-ID", value) for value in sent])
        (made,) = answer.all_headers("x-request-id")
        assert made.isalnum()
        assert len(made) == 32
        for call in one.calls + other.calls:
            assert call.all_headers("x-request-id") == [made]


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    "status", [200, 201, 206, 299, 301, 302, 303, 307, 308, 400, 401, 404, 418, 451, 500, 502, 599]
)
async def test_any_status_comes_back_as_it_is(serve: Serve, status: int) -> None:
    script = raw_answer(b"a body", status=status, headers="Location: /elsewhere\r\nWWW-Authenticate: Bearer\r\n")
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY)
        assert (answer.status, answer.reason, answer.body) == (status, "Status", b"a body")
        assert answer.header("location") == "/elsewhere"
        assert len(upstream.calls) == 1


async def test_answer_headers_keep_order_case_and_repetition(serve: Serve) -> None:
    sent = [
        ("SERVER", "me"),
        ("x-b", "1"),
        ("X-A", "2"),
        ("X-b", "3"),
        ("Date", "yesterday"),
        ("Cache-Control", "no-cache"),
        ("X-Accel-Buffering", "no"),
        ("Access-Control-Allow-Origin", "*"),
        ("X-Latin", "J\u00fcrgen"),
        ("X-Request-Id", "the instance's"),
        ("X-Empty", ""),
    ]
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent)
    async with (
        FakeUpstream(raw_answer(b"x", headers=lines)) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request(body=BODY)
        assert passed(answer.headers, {"content-length"}) == sent


@pytest.mark.parametrize("reason", ["", "Very Fine", "caf\u00c3\u00a9"])
async def test_a_reason_phrase_comes_back_as_it_is(serve: Serve, reason: str) -> None:
    async def script(call: Call) -> None:
        await call.send(f"HTTP/1.1 200 {reason}\r\nContent-Length: 0\r\n\r\n".encode("latin-1"))

    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request(body=BODY)).reason == reason


async def test_large_answer_headers_are_relayed(serve: Serve) -> None:
    big = "v" * 9_216
    async with (
        FakeUpstream(raw_answer(b"x", headers=f"X-Big: {big}\r\nX-Bigger: {big * 4}\r\n")) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request(body=BODY)
        assert (answer.header("x-big"), answer.header("x-bigger")) == (big, big * 4)


async def test_an_error_before_the_first_token_is_no_stream(serve: Serve) -> None:
    body = b'{"error":{"message":"no such thing"}}'
    script = raw_answer(body, status=400, headers="content-type: application/json\r\n")
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY[:-1] + b',"stream":true}')
        assert (answer.status, answer.header("content-type"), answer.body) == (400, "application/json", body)


async def test_response_headers_tell_the_decision_when_asked_for(serve: Serve) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, response_headers=True) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request(body=BODY)
        told = {name: value for name, value in answer.headers if name.startswith("x-prefixroute-")}
        assert told == {
            "x-prefixroute-instance": "gpu-0",
            "x-prefixroute-matched-tokens": "0",
            "x-prefixroute-reason": "turn",
        }


# ---------------------------------------------------------------------- streams


async def test_each_event_is_relayed_before_the_next_is_sent(serve: Serve) -> None:
    seen = asyncio.Event()
    events = [b"data: %d\n\n" % i for i in range(20)]

    async def lockstep(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await seen.wait()
        for event in events:
            seen.clear()
            await call.send_chunk(event)
            await seen.wait()
        await call.send_chunk(b"")

    async with FakeUpstream(lockstep) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, BODY, [("Accept-Encoding", "gzip")]) + BODY)
        begun = await client.begin()  # the head, before anything of the body
        assert begun.header("content-encoding") is None
        seen.set()
        for event in events:
            assert await client.chunk() == event
            seen.set()
        assert await client.chunk() == b""


@pytest.mark.parametrize(
    "first", [b"data: " + b"x" * 2_000_000 + b"\n\n", b"data: " + b"y" * 40_000 + b"\n\n"], ids=["2 MB", "40 KB"]
)
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_a_long_line_comes_whole(serve: Serve, first: bytes, framing: str) -> None:
    events = [first, b": comment\n\n", b"data: {", b"}\n", b"\n", b"data: [DONE]\n\n"]

    async def script(call: Call) -> None:
        line = {
            "chunked": b"transfer-encoding: chunked\r\n",
            "length": b"content-length: %d\r\n" % sum(map(len, events)),
            "close": b"",
        }[framing]
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + line + b"\r\n")
        for event in events:
            await (call.send_chunk if framing == "chunked" else call.send)(event)
        if framing == "chunked":
            await call.send_chunk(b"")
        elif framing == "close":
            call.close()

    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY)
        assert answer.complete
        assert answer.body == b"".join(events)
