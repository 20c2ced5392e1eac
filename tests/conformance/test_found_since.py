"""O72–O75: what was found by trying. O74 is in `test_e_smuggling`."""

import json

import pytest

from prefixroute.testing import Call, FakeUpstream, RawAnswer, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import json_answer
from tests.conformance.harness import CHAT, OK, Serve, answers, chat

SECRET = "sk-planted-1234567890"

# ---------------------------------------------------------------------- O72: cookies


@pytest.mark.parametrize("attributes", ["", "; Path=/; Domain=127.0.0.1; Max-Age=9999"])
async def test_o72_a_cookie_is_between_one_client_and_its_instance(serve: Serve, attributes: str) -> None:
    script = json_answer({}, headers=f"set-cookie: session=alice{attributes}\r\nset-cookie: other=1\r\n")
    async with FakeUpstream(script) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            answer = await client.request(body=chat())
            assert answer.all_headers("set-cookie") == [f"session=alice{attributes}", "other=1"]
            # On the same connections, here and there.
            await client.request(body=chat())
        async with RawClient(app.url) as client:
            await client.request(body=chat())
            await client.request(body=chat(), headers=[("Cookie", "session=bob"), ("Cookie", "theme=dark")])
            await client.request("GET", "/x")
        cookies = [call.all_headers("cookie") for call in upstream.calls]
        assert cookies == [[], [], [], ["session=bob", "theme=dark"], []]


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_o72_a_redirect_is_the_clients_to_follow(serve: Serve, status: int) -> None:
    """Siblings of the jar: what else a client library does unasked."""
    async with FakeUpstream() as other:
        script = json_answer({}, status=status, headers=f"location: {other.url}/y\r\n")
        async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
            answer = await client.request(body=chat())
            assert (answer.status, answer.header("location")) == (status, f"{other.url}/y")
            assert (len(upstream.calls), other.calls) == (1, [])


@pytest.mark.parametrize("status", [201, 301, 307])
async def test_a_redirect_to_the_instance_itself_leads_through_the_router(serve: Serve, status: int) -> None:
    """vLLM answers a path with a slash at its end so, with the Host that it was asked by."""

    async def script(call: Call) -> None:
        location = f"http://{call.header('host')}{call.target.rstrip('/')}"
        await json_answer({}, status=status, headers=f"Location: {location}\r\nX-Own: {location}\r\n")(call)

    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request("GET", "/v1/models/")
        assert (answer.status, answer.header("location")) == (status, "/v1/models")
        assert answer.header("x-own") == f"{upstream.url}/v1/models"


async def test_o72_what_an_environment_says_of_proxies_and_passwords_is_not_obeyed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    netrc = tmp_path_factory.mktemp("home") / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login a password {SECRET}\n")
    async with FakeUpstream() as proxy, FakeUpstream() as upstream:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("NETRC", str(netrc))
        async with serve(upstream) as app, RawClient(app.url) as client:
            assert (await client.request(body=chat())).status == 200
        assert proxy.n_connections_ever == 0
        assert upstream.calls[0].header("authorization") is None


async def test_o72_nothing_is_invented_on_the_way(serve: Serve) -> None:
    """No User-Agent, no Accept, no Accept-Encoding, no Date, no Server."""
    async with FakeUpstream(answers(OK)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=chat())
        assert [name.lower() for name, _ in answer.headers] == ["content-type", "content-length", "x-request-id"]
        names = [name.lower() for name, _ in upstream.calls[0].headers]
        assert sorted(names) == ["content-length", "host", "x-request-id"]


# ---------------------------------------------------------------------- O73: parse errors

BROKEN_HEADS = {
    "a space before the colon": "Authorization : Bearer {}\r\n\r\n",
    "a bare LF": "Authorization: Bearer {}\n\r\n",
    "a NUL": "Authorization: Bearer {}\x00\r\n\r\n",
    "no colon": "Bearer {}\r\n\r\n",
    "folded": "Authorization:\r\n Bearer {}\r\n\r\n",
    "two lengths": "X: {}\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a length of no number": "Content-Length: {}\r\n\r\n",
    "a coding that nobody knows": "Transfer-Encoding: {}\r\n\r\n",
    "a Host that is none": "X: y\r\nhost: {} b\r\n\r\n",
    "too long": "Authorization: Bearer {}" + "x" * 100_000 + "\r\n\r\n",
    "too many": "X: {}\r\n" * 1000 + "\r\n",
}


def check_dialect(answer: RawAnswer, target: str) -> None:
    assert answer.header("content-type") == "application/json"
    assert answer.header("x-request-id")
    document = json.loads(answer.body)
    if target.startswith("/v1/messages"):
        assert document["type"] == "error"
        assert set(document["error"]) == {"type", "message"}
    else:
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("lines", BROKEN_HEADS.values(), ids=BROKEN_HEADS)
@pytest.mark.parametrize("target", [CHAT, "/v1/messages", "/v1/messages/count_tokens?beta=true", "/x"])
@pytest.mark.parametrize("n_pieces", [1, 3])
async def test_o73_a_parse_error_speaks_the_routes_dialect_and_repeats_nothing(
    serve: Serve, lines: str, target: str, n_pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    host = "" if "host:" in lines else "Host: a\r\n"
    sent = f"POST {target} HTTP/1.1\r\n{host}{lines.replace('{}', SECRET)}".encode("latin-1")
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for i in range(n_pieces):
            await client.send(sent[len(sent) * i // n_pieces : len(sent) * (i + 1) // n_pieces])
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (431 if "too" in answer.body.decode() else 400, "close")
        check_dialect(answer, target)
        assert SECRET.encode() not in answer.raw
        assert upstream.calls == []
    said = caplog.text + "".join(repr(vars(record)) for record in caplog.records)
    assert SECRET not in said


@pytest.mark.parametrize(
    ("start", "target"),
    [
        (b"POST http://a/v1/messages HTTP/1.1\r\nX : y\r\n\r\n", "/v1/messages"),
        (b"POST //v1//messages/ HTTP/1.1\r\nX : y\r\n\r\n", "/v1/messages"),
        (b"POST /v1/%6Dessages HTTP/1.1\r\nX : y\r\n\r\n", "/v1/messages"),
        (b"\r\nPOST /v1/messages HTTP/1.1\r\nX : y\r\n\r\n", "/v1/messages"),
        (b"POST /v1/messages HTTP/1.9\r\nHost: a\r\n\r\n", "/v1/messages"),
        (b"post /v1/messages HTTP/1.1\r\nHost: a\r\n\r\n", "/v1/messages"),
        # Where it cannot be known, OpenAI's.
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 /v1/messages \r\n", "?"),
        (b"/v1/messages\r\n\r\n", "?"),
        (b"X: /v1/messages\r\n\r\n", "?"),
    ],
)
async def test_o73_the_route_is_known_from_as_little_as_its_target(serve: Serve, start: bytes, target: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(start)
        answer = await client.answer()
        assert answer.status == 400
        check_dialect(answer, target)


async def test_o73_a_request_before_does_not_lend_its_dialect(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request("POST", "/v1/messages", chat())).status == 200
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nX : y\r\n\r\n")
        check_dialect(await client.answer(), CHAT)


# ---------------------------------------------------------------------- O75: target, trailers, 1xx

TARGETS = [
    *("/x?", "/x??", "/x?a=&b", "/x?a=b&a=c", "/x?a=%20+%2B", "/x?%C3%A9", "/x?a=[b]", "/x?q=a|b", "/x?/../y"),
    *("/", "//", "//x", "/x/", "/x//y", "/./x", "/x/../y", "/%2e%2e/x", "/x%2Fy", "/x%2fy", "/%7Ex", "/~x", "/x%00"),
    *("/x;a=b", "/x:y", "/x@y", "/x=y", "/x'y", '/x"y', "/x\\y", "/x^y", "/x{y}", "/x`y", "/<x>", "/x%zz", "/x%"),
    *("/*", "/x?http://elsewhere/", "/http://elsewhere/", "/v1/models/org%2Fmodel:tag", "/v1/models/org/model:tag"),
    "/x?" + "a" * 30_000,
]


async def test_o75_a_target_goes_on_as_sent(serve: Serve) -> None:
    async with FakeUpstream(answers(OK)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for target in TARGETS:
            assert (await client.request("GET", target)).status == 200
        assert [call.target for call in upstream.calls] == TARGETS


@pytest.mark.parametrize("base", ["/base", "/a/b"])
async def test_o75_also_behind_an_instances_base_path(serve: Serve, base: str) -> None:
    async with FakeUpstream(answers(OK)) as upstream, serve(upstream.url + base) as app, RawClient(app.url) as client:
        for target in TARGETS[:20]:
            assert (await client.request("GET", target)).status == 200
        got = [call.target for call in upstream.calls if call.header("x-request-id")]
        assert got == [base + target for target in TARGETS[:20]]


async def test_o75_trailers_of_an_answer_are_relayed(serve: Serve) -> None:
    sent = b"HTTP/1.1 200 OK\r\nTrailer: X-Sum, X-Two\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"
    lines = b"X-Sum: 1\r\nx-two: 2\r\nX-Sum: 3\r\nContent-Length: 9\r\nSet-Cookie: a=b\r\nAuthorization: x\r\n\r\n"
    async with FakeUpstream(answers(sent + lines)) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            for _ in range(2):
                answer = await client.request(body=chat())
                assert (answer.body, answer.complete) == (b"hi", True)
                assert answer.header("trailer") == "X-Sum, X-Two"
                # But for those that frame, route or authorise.
                assert answer.trailers == [("X-Sum", "1"), ("x-two", "2"), ("X-Sum", "3")]
        async with RawClient(app.url) as client:
            await client.send(b"GET /x HTTP/1.0\r\n\r\n")
            old = await client.answer()
            assert (old.body, b"X-Sum: 1" in old.raw) == (b"hi", False)


async def test_o75_interim_answers_are_relayed_in_order(serve: Serve) -> None:
    hints = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\nLink: </b>\r\n\r\n"
    async with FakeUpstream(answers(hints, OK)) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            answer = await client.request(body=chat())
            assert [one.status for one in answer.interim] == [102, 103]
            assert answer.interim[1].all_headers("link") == ["</a>", "</b>"]
            assert (answer.status, answer.body) == (200, b'{"ok":true}')
        async with RawClient(app.url) as client:
            await client.send(b"GET /x HTTP/1.0\r\n\r\n")
            assert (await client.answer()).interim == ()


async def test_o75_a_hundred_is_not_said_twice(serve: Serve) -> None:
    """The instance's `100 Continue` answers our side of the request; the client has had its own."""

    async def continues(call: Call) -> None:
        await call.send(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)

    async with FakeUpstream(continues) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, chat(), [("Expect", "100-continue")]))
        assert await client.read(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(chat())
        answer = await client.answer()
        assert (answer.status, answer.interim) == (200, ())
        assert upstream.calls[0].header("expect") is None
