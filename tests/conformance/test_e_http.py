"""Section E of the failure cases: HTTP details. O43 is in `test_e_smuggling`."""

import asyncio
import json
from contextlib import suppress

import pytest

from prefixroute.testing import Call, FakeUpstream, RawAnswer, RawClient
from prefixroute.testing.client import Headers, head
from prefixroute.testing.upstream import Script, json_answer, raw_answer
from tests.conformance.harness import CHAT, OK, SSE_HEAD, Finished, Serve, answers, chat, event, silent, sse

# ---------------------------------------------------------------------- O38: Host and X-Forwarded-*

FORWARDED = [
    ("X-Forwarded-For", "1.2.3.4"),
    ("X-Forwarded-For", "5.6.7.8, 9.9.9.9"),
    ("x-forwarded-proto", "https"),
    ("X-Forwarded-Host", "public.test"),
    ("X-Real-IP", "1.2.3.4"),
    ("Forwarded", 'for=1.2.3.4;host="public.test"'),
    ("Via", "1.1 front"),
]


async def test_o38_what_the_client_says_of_its_way_goes_on_as_sent_and_nothing_is_added(serve: Serve) -> None:
    async with FakeUpstream(answers(OK)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for headers in (FORWARDED, []):
            await client.request(body=chat(), headers=headers)
        own = {"host", "content-length", "x-request-id"}
        for call, sent in zip(upstream.calls, (FORWARDED, []), strict=True):
            assert [one for one in call.headers if one[0].lower() not in own] == sent


@pytest.mark.parametrize(
    "claim",
    [
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Real-IP", "127.0.0.1"),
        ("Forwarded", "for=127.0.0.1"),
        ("X-Original-URL", "/health"),
        ("X-Rewrite-URL", "/health"),
        ("X-HTTP-Method-Override", "GET"),
        ("X-Forwarded-Prefix", "/admin"),
        ("X-Forwarded-Uri", "/health"),
        ("Host", "localhost"),
    ],
)
async def test_o38_it_opens_nothing(serve: Serve, claim: tuple[str, str]) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        host = "" if claim[0] == "Host" else "Host: a\r\n"
        await client.send(f"POST /sleep HTTP/1.1\r\n{host}{claim[0]}: {claim[1]}\r\n\r\n".encode())
        assert (await client.answer()).status == 403
        assert upstream.calls == []


@pytest.mark.parametrize("claim", ["Host: {}\r\n", "Host: a\r\nX-Forwarded-Host: {}\r\n", "Host: a\r\nX-Host: {}\r\n"])
@pytest.mark.parametrize("target", ["/x", "http://{}/x", "//{}/x", "/http://{}/x", "/x?url=http://{}/"])
async def test_o38_nothing_that_a_client_sends_chooses_where_it_goes(serve: Serve, claim: str, target: str) -> None:
    async with FakeUpstream() as elsewhere, FakeUpstream() as upstream, serve(upstream) as app:
        where = f"127.0.0.1:{elsewhere.port}"
        async with RawClient(app.url) as client:
            await client.send(f"GET {target} HTTP/1.1\r\n{claim}\r\n".replace("{}", where).encode())
            assert (await client.answer()).status == 200
        assert elsewhere.n_connections_ever == 0
        assert [call.all_headers("host") for call in upstream.calls] == [[f"127.0.0.1:{upstream.port}"]]


async def test_o38_a_name_based_upstream_is_called_by_its_name(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(f"http://localhost:{upstream.port}/base") as app:
        async with RawClient(app.url) as client:
            assert (await client.request("GET", "/x", headers=[("X-Forwarded-Host", "a")])).status == 200
        # Probes are below the base as well.
        call = next(call for call in upstream.calls if call.target == "/base/x")
        assert call.all_headers("host") == [f"localhost:{upstream.port}"]


# ---------------------------------------------------------------------- O39: trailing slashes


@pytest.mark.parametrize(
    "target",
    [
        *("/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions//"),
        *("/v1/./chat/completions", "/v1/x/../chat/completions", "/V1/Chat/Completions", "/v1/models/", "/docs", "/v1"),
        *("/v1/messages/", "/v1/messages/?beta=true", "/invocations/", "/", "//"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_o39_no_path_is_tidied_up_by_a_redirect(serve: Serve, target: str, method: str) -> None:
    script = json_answer({}, status=404)
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(method, target, chat() if method == "POST" else None)
        assert (answer.status, answer.header("location")) == (404, None)
        assert [call.target for call in upstream.calls] == [target]


@pytest.mark.parametrize("target", ["/v1/chat/completions/", "//v1/chat/completions", "/v1/chat%2Fcompletions"])
async def test_o39_it_is_still_understood(serve: Serve, finished: Finished, target: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.request("POST", target, chat())
    assert finished()[0]["route"] == CHAT


@pytest.mark.parametrize("target", ["/sleep/", "//sleep", "/./sleep", "/x/../sleep", "/%73leep", "/sleep?level=1"])
async def test_o39_spelling_opens_nothing(serve: Serve, target: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request("POST", target, b"")).status == 403
        assert upstream.calls == []


@pytest.mark.parametrize("target", ["/health/", "//health", "/ping/"])
async def test_o39_health_answers_by_any_spelling(serve: Serve, target: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request("GET", target)).status == 200
        assert upstream.calls == []


# ---------------------------------------------------------------------- O40: CORS

ORIGIN = ("Origin", "https://chat.example")
PREFLIGHT = [
    ORIGIN,
    ("Access-Control-Request-Method", "POST"),
    ("Access-Control-Request-Headers", "authorization, content-type, x-stainless-lang"),
]
CORS = {"listen": {"port": 0, "cors": {"allow_origins": ["https://chat.example"]}}}
# What an instance says by itself, as vLLM does: it must not be said twice.
OWN = "access-control-allow-origin: *\r\naccess-control-allow-credentials: true\r\n"


async def test_o40_without_settings_it_is_the_instances_to_say(serve: Serve) -> None:
    async with FakeUpstream(json_answer({}, headers=OWN)) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            answer = await client.request("OPTIONS", CHAT, headers=PREFLIGHT)
            assert answer.all_headers("access-control-allow-origin") == ["*"]
        call = upstream.calls[0]
        assert (call.method, call.target) == ("OPTIONS", CHAT)
        assert call.header("access-control-request-headers") == PREFLIGHT[2][1]


async def test_o40_a_preflight_is_answered_without_a_key_and_without_an_instance(serve: Serve, keys_file: str) -> None:
    listen = {**CORS["listen"], "api_keys_file": keys_file}
    async with FakeUpstream() as upstream, serve(upstream, listen=listen) as app, RawClient(app.url) as client:
        answer = await client.request("OPTIONS", CHAT, headers=PREFLIGHT)
        assert answer.status in (200, 204)
        assert answer.all_headers("access-control-allow-origin") == [ORIGIN[1]]
        allowed = (answer.header("access-control-allow-headers") or "").lower()
        assert {"authorization", "content-type", "x-stainless-lang"} <= {name.strip() for name in allowed.split(",")}
        assert "POST" in (answer.header("access-control-allow-methods") or "")
        assert "origin" in [value.lower() for value in answer.all_headers("vary")]
        assert upstream.calls == []
        # What is no preflight is a request like any other.
        assert (await client.request("OPTIONS", CHAT)).status == 401


async def dies(call: Call) -> None:
    call.reset()


PAGES: dict[str, tuple[Script, str, Headers, int]] = {
    "an answer": (json_answer({}, headers=OWN), CHAT, [], 200),
    "a stream": (sse(event("a"), event("b")), CHAT, [], 200),
    "an instance's error": (json_answer({}, status=400, headers=OWN), CHAT, [], 400),
    "an error of the router's own": (dies, CHAT, [], 502),
    "a closed path": (silent, "/sleep", [], 403),
    "a body too large": (silent, CHAT, [("X-Large", "1")], 413),
    "health": (silent, "/health", [], 200),
    "a wrong key": (silent, CHAT, [("Authorization", "Bearer wrong")], 401),
}


@pytest.fixture
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("alice: sk-alice-0123456789\nbob: sk-bob-0123456789abc\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("name", PAGES)
async def test_o40_every_answer_says_it_exactly_once(serve: Serve, name: str, keys_file: str) -> None:
    script, target, headers, status = PAGES[name]
    listen = {**CORS["listen"], "api_keys_file": keys_file}
    key = [] if name == "a wrong key" else [("Authorization", "Bearer sk-alice-0123456789")]
    body = chat("x" * 20_000) if ("X-Large", "1") in headers else chat()
    async with (
        FakeUpstream(script) as upstream,
        serve(upstream, listen=listen, limits={"max_body_bytes": 10_000}) as app,
        RawClient(app.url) as client,
    ):
        method = "GET" if target == "/health" else "POST"
        answer = await client.request(method, target, body, [ORIGIN, *headers, *key])
        assert answer.status == status
        assert answer.all_headers("access-control-allow-origin") == [ORIGIN[1]]
        assert len(answer.all_headers("access-control-allow-credentials")) == 0


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://chat.example.evil.test", "null", "https://CHAT.example", "*"]
)
@pytest.mark.parametrize("method", ["OPTIONS", "POST"])
async def test_o40_another_page_is_allowed_nothing(serve: Serve, origin: str, method: str) -> None:
    async with (
        FakeUpstream(json_answer({}, headers=OWN)) as upstream,
        serve(upstream, **CORS) as app,
        RawClient(app.url) as client,
    ):
        headers = [("Origin", origin), *(PREFLIGHT[1:] if method == "OPTIONS" else [])]
        answer = await client.request(method, CHAT, chat(), headers)
        assert answer.all_headers("access-control-allow-origin") == []


# ---------------------------------------------------------------------- O41: WebSocket

OFFER = [
    ("Connection", "keep-alive, Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ("Sec-WebSocket-Protocol", "realtime, openai-beta.realtime-v1"),
    ("Sec-WebSocket-Extensions", "permessage-deflate"),
]
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Protocol: realtime\r\n\r\n"
)
# Masked, binary, with bytes that mean something to HTTP; a ping; a close with its code.
FRAMES = b"\x82\x85abcd\r\n\r\n\x00" + b"\x89\x80abcd" + b"\x88\x82abcd\x62\x0b"


async def echoes(call: Call) -> None:
    await call.send(SWITCH)
    while (byte := await call.read(1)) != b"!":
        await call.send(byte)
    call.close()


@pytest.mark.parametrize("target", ["/v1/realtime?model=m", "/v1/responses", "/any/path"])
async def test_o41_a_websocket_is_relayed_whole(serve: Serve, finished: Finished, target: str) -> None:
    async with FakeUpstream(echoes, by_hand=True) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            await client.send(head("GET", target, None, OFFER))
            answer = await client.begin()
            assert (answer.status, answer.header("upgrade")) == (101, "websocket")
            assert answer.all_headers("connection") == ["Upgrade"]
            assert answer.header("sec-websocket-protocol") == "realtime"
            assert answer.header("sec-websocket-accept") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
            await client.send(FRAMES + b"!")
            assert await client.wait_closed() == FRAMES
        call = upstream.calls[0]
        assert call.target == target
        for name, value in OFFER[2:]:
            assert call.all_headers(name) == [value]
    assert [(line["status"], line["outcome"]) for line in finished()] == [(101, "ok")]


@pytest.mark.parametrize("status", [400, 403, 404, 426, 500])
async def test_o41_a_refusal_is_passed_on(serve: Serve, status: int) -> None:
    script = json_answer({}, status=status)
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request("GET", "/v1/realtime", headers=OFFER)).status == status
        assert (await client.request("GET", "/health")).status == 200


async def test_o41_without_an_instance_it_is_refused_as_anything_else(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, limits={"wait_for_instance_s": 0.0}) as app:
        await upstream.stop()
        async with RawClient(app.url) as client:
            answer = await client.request("GET", "/v1/realtime", headers=OFFER)
            assert (answer.status, answer.header("retry-after")) == (503, "1")


@pytest.mark.parametrize("goes", ["client", "instance"])
async def test_o41_either_side_that_goes_takes_the_other_along(serve: Serve, goes: str) -> None:
    async def switches(call: Call) -> None:
        await call.send(SWITCH)
        await call.read(1)
        if goes == "instance":
            call.reset()
            return
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await call.read(1)
        call.close()

    async with FakeUpstream(switches, by_hand=True) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            await client.send(head("GET", "/v1/realtime", None, OFFER))
            await client.begin()
            await client.send(b"x")
            if goes == "client":
                client.reset()
            else:
                assert await client.wait_closed() == b""
        await upstream.wait_connections(0)


# ---------------------------------------------------------------------- O42: slow clients

SLOW = {"client_head_timeout_s": 0.2, "client_body_timeout_s": 0.2, "client_body_bytes_per_s": 1000}


@pytest.mark.parametrize("target", [CHAT, "/v1/messages", "/x"])
@pytest.mark.parametrize("n_sent", [1, 20, 40])
async def test_o42_a_head_that_does_not_come_is_not_waited_for(serve: Serve, target: str, n_sent: int) -> None:
    async with FakeUpstream() as upstream, serve(upstream, limits=SLOW) as app, RawClient(app.url) as client:
        await client.send(head("POST", target, chat())[:n_sent])
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (408, "close")
        assert await client.wait_closed() == b""
        assert upstream.calls == []


async def test_o42_a_connection_that_asks_nothing_is_closed(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, limits=SLOW) as app, RawClient(app.url) as client:
        assert await client.wait_closed() == b""


@pytest.mark.parametrize("target", [CHAT, "/v1/messages", "/v1/audio/transcriptions"])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_o42_a_body_that_does_not_come_is_not_waited_for(
    serve: Serve, finished: Finished, target: str, is_chunked: bool
) -> None:
    async with FakeUpstream() as upstream, serve(upstream, limits=SLOW) as app, RawClient(app.url) as client:
        coding = [("Transfer-Encoding", "chunked")] if is_chunked else [("Content-Length", "500")]
        await client.send(head("POST", target, None, coding) + (b"5\r\nabc" if is_chunked else b"abc"))
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (408, "close")
        assert await client.wait_closed() == b""
        # Nobody was given half a body for a whole one.
        assert upstream.calls == []
    assert [(line["status"], line["outcome"]) for line in finished()] == [(408, "refused")]


@pytest.mark.parametrize("endless", [b"2;" + b"a" * 1000, b"0" * 1000])
async def test_o42_what_is_no_payload_does_not_pay_for_more_time(serve: Serve, endless: bytes) -> None:
    """Bytes come all the time, and none of them is of the body."""
    async with FakeUpstream() as upstream, serve(upstream, limits=SLOW) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, None, [("Transfer-Encoding", "chunked")]) + endless)
        answering = asyncio.create_task(client.answer())
        while not answering.done():
            with suppress(ConnectionError, RuntimeError):
                await client.send(endless[2:])
            await asyncio.sleep(0.01)
        assert answering.result().status in (400, 408)
        assert upstream.calls == []


async def test_o42_it_never_touches_answers(serve: Serve) -> None:
    """A prefill of a minute, a slow stream, a client that reads slowly: none of it is a slow request."""
    go_on = asyncio.Event()

    async def takes_its_time(call: Call) -> None:
        await go_on.wait()
        await call.send(SSE_HEAD)
        for i in range(3):
            await call.send_chunk(event(str(i)))
            await asyncio.sleep(0.3)
        await call.send_chunk(b"")

    async with (
        FakeUpstream(takes_its_time) as upstream,
        serve(upstream, limits=SLOW) as app,
        RawClient(app.url) as client,
    ):
        await client.send(head("POST", CHAT, chat()) + chat())
        await asyncio.sleep(0.5)
        go_on.set()
        answer = await client.answer()
        assert (answer.status, answer.complete) == (200, True)


async def test_o42_a_crowd_of_them_holds_up_nobody(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        crowd = [RawClient(app.url) for _ in range(200)]
        for one in crowd:
            await one.__aenter__()
            await one.send(head("POST", CHAT, chat())[:30])
        async with RawClient(app.url) as client:
            assert (await client.request(body=chat())).status == 200
        for one in crowd:
            await one.send(head("POST", CHAT, chat())[30:] + chat())
            assert (await one.answer()).status == 200
            await one.__aexit__(None, None, None)
        assert len(upstream.calls) == 201


# ---------------------------------------------------------------------- O44: large response headers


@pytest.mark.parametrize(
    "lines",
    [
        b"X: %s\r\n" % (b"x" * 9_000),
        b"X: %s\r\n" % (b"x" * 60_000),
        b"%s: y\r\n" % (b"x" * 9_000),
        b"Set-Cookie: %s\r\n" % (b"x" * 4_000) * 40,
        b"".join(b"X-%d: y\r\n" % i for i in range(200)),
        b"Content-Security-Policy: %s\r\n" % (b"a; " * 3_000),
    ],
)
async def test_o44_large_headers_of_an_answer_are_relayed(serve: Serve, lines: bytes) -> None:
    sent = b"HTTP/1.1 200 OK\r\n" + lines + b"Content-Length: 2\r\n\r\nok"
    async with FakeUpstream(answers(sent)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for _ in range(2):
            answer = await client.request(body=chat())
            assert (answer.status, answer.body) == (200, b"ok")
            assert lines.strip(b"\r\n ") in answer.raw.replace(b" \r\n", b"\r\n")
        assert upstream.calls[1].reused


@pytest.mark.parametrize(
    "lines",
    [
        b"X: %s\r\n" % (b"x" * 70_000),
        b"X: y\r\n" * 1_000,
        b"".join(b"X-%d: %s\r\n" % (i, b"y" * 60_000) for i in range(20)),
        b"X: %s" % (b"x" * 1_000_000),
    ],
)
async def test_o44_beyond_the_limit_it_is_a_bad_gateway(serve: Serve, finished: Finished, lines: bytes) -> None:
    sent = b"HTTP/1.1 200 OK\r\n" + lines + b"Content-Length: 2\r\n\r\nok"
    async with FakeUpstream(answers(sent)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=chat())
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (502, "upstream_broken")
        assert (await client.request("GET", "/health")).status == 200
    assert finished()[0]["outcome"] == "broken"


# ---------------------------------------------------------------------- O45: errors that SDKs read

ROUTES = [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens", "/x"]
# By cause: what the instance does, settings, body; status, code, whether to come back.
CAUSES: dict[str, tuple[Script, dict[str, object], bytes, int, str]] = {
    "the instance died": (dies, {}, chat(), 502, "upstream_broken"),
    "the instance talked nonsense": (answers(b"nonsense\r\n\r\n"), {}, chat(), 502, "upstream_broken"),
    "silence": (silent, {"upstream": {"first_byte_timeout_s": 0.05}}, chat(), 504, "upstream_timeout"),
    "a body too large": (silent, {"limits": {"max_body_bytes": 1024}}, b"x" * 2000, 413, "body_too_large"),
}


def check_error(answer: RawAnswer, target: str, code: str) -> None:
    assert answer.header("content-type") == "application/json"
    document = json.loads(answer.body)
    if target.startswith("/v1/messages"):
        assert set(document) == {"type", "error"}
        assert document["type"] == "error"
        assert set(document["error"]) == {"type", "message"}
    else:
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
        assert document["error"]["code"] == code
    assert document["error"]["message"]


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("target", ROUTES)
async def test_o45_an_error_of_ours_is_what_the_routes_clients_read(serve: Serve, name: str, target: str) -> None:
    script, settings, body, status, code = CAUSES[name]
    async with FakeUpstream(script) as upstream, serve(upstream, **settings) as app, RawClient(app.url) as client:
        answer = await client.request("POST", target, body)
        assert (answer.status, answer.header("retry-after")) == (status, None)
        check_error(answer, target, code)


@pytest.mark.parametrize("target", ROUTES)
async def test_o45_who_finds_nobody_is_told_when_to_come_back(serve: Serve, target: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream, limits={"wait_for_instance_s": 0.0}) as app:
        await upstream.stop()
        async with RawClient(app.url) as client:
            answer = await client.request("POST", target, chat())
            assert answer.status == 503
            assert int(answer.header("retry-after") or 0) >= 1
            check_error(answer, target, "no_instance")


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503, 529])
async def test_o45_an_instances_own_error_is_passed_on_as_it_is(serve: Serve, status: int) -> None:
    body = b'{"object":"error","detail":[{"loc":["body"]}]}'
    script = raw_answer(body, status=status, headers="content-type: application/problem+json\r\nretry-after: 7\r\n")
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for target in (CHAT, "/v1/messages"):
            answer = await client.request("POST", target, chat())
            assert (answer.status, answer.body, answer.header("retry-after")) == (status, body, "7")
            assert answer.header("content-type") == "application/problem+json"


async def test_o45_a_method_that_has_no_body_to_read_gets_its_error_too(serve: Serve) -> None:
    async with FakeUpstream(dies) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request("HEAD", "/x")
        assert (answer.status, answer.body) == (502, b"")
        assert (await client.request("GET", "/health")).status == 200
