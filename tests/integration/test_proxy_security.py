"""Who is let in, what web pages may do, whose prompts match whose, and what a client cannot bring about."""

import asyncio
import gzip
import json
import logging
import resource
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.config import Settings
from prefixroute.errors import ConfigError
from prefixroute.explain import ask_ladder
from prefixroute.logs import JsonFormatter, TextFormatter
from prefixroute.testing import Call, FakeUpstream, RawAnswer, RawClient
from prefixroute.testing.client import Headers, head
from prefixroute.testing.upstream import json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]

KEY = "sk-alice-0123456789abcdef"
OTHER = "sk-bob-0123456789abcdef"
CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
AUTH: Headers = [("Authorization", f"Bearer {KEY}")]
ORIGIN = "https://chat.example"
PREFLIGHT: Headers = [
    ("Origin", ORIGIN),
    ("Access-Control-Request-Method", "POST"),
    ("Access-Control-Request-Headers", "authorization,content-type,x-stainless-os"),
]
CORS = {"allow_origins": [ORIGIN]}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"alice: {KEY}\nbob: {OTHER}\n")
    return path


def listening(**settings: Any) -> dict[str, Any]:
    return {"port": 0, **settings}


def with_keys(path: Path, **settings: Any) -> dict[str, Any]:
    return listening(api_keys_file=str(path), **settings)


def error_of(answer: RawAnswer) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.body)["error"]
    return error


# Keys


@pytest.mark.parametrize("name", ["Authorization", "x-api-key", "api-key", "X-API-Key"])
async def test_a_key_opens_the_port_and_stays_here(serve: Serve, keys: Path, name: str) -> None:
    value = f"Bearer {KEY}" if name == "Authorization" else KEY
    async with FakeUpstream() as upstream, serve(upstream, listen=with_keys(keys)) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY, headers=[(name, value), ("X-Kept", "1")])
        assert answer.status == 200
        (call,) = upstream.calls
        assert call.header(name) is None
        assert KEY not in str(call.headers)
        assert (call.header("x-kept"), call.body) == ("1", BODY)


@pytest.mark.parametrize(
    ("method", "target", "body", "headers"),
    [
        ("GET", "/v1/models", None, []),
        ("GET", "/metrics", None, []),
        ("DELETE", "/v1/responses/resp_1", None, []),
        ("POST", "/v1/audio/transcriptions", b"--b--", [("Content-Type", "multipart/form-data; boundary=b")]),
        ("POST", "/v1/embeddings", b'{"input":"x"}', []),
    ],
)
async def test_keys_of_ours_stay_here_on_every_route(
    serve: Serve, keys: Path, method: str, target: str, body: bytes | None, headers: Headers
) -> None:
    listed = json_answer({"object": "list", "data": []})
    async with (
        FakeUpstream(listed) as one,
        FakeUpstream(listed) as two,
        serve(one, two, listen=with_keys(keys)) as app,
        RawClient(app.url) as client,
    ):
        mine: Headers = [("Authorization", "Bearer sk-of-the-instance"), ("x-api-key", KEY)]
        assert (await client.request(method, target, body, [*headers, *mine])).status == 200
        calls = one.calls + two.calls
        assert calls
        for call in calls:
            assert KEY not in str(call.headers)
            assert call.header("authorization") == "Bearer sk-of-the-instance"


async def test_the_instances_own_key_stands_in_for_ours(serve: Serve, keys: Path, tmp_path: Path) -> None:
    file = tmp_path / "instance.key"
    file.write_text("sk-own\n")
    async with (
        FakeUpstream() as upstream,
        serve(upstream, listen=with_keys(keys), instance={"api_key_file": str(file)}) as app,
        RawClient(app.url) as client,
    ):
        await client.request(body=BODY, headers=AUTH)
        assert upstream.calls[0].all_headers("authorization") == ["Bearer sk-own"]


async def test_without_a_key_file_credentials_pass_as_they_are(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.request(body=BODY, headers=[*AUTH, ("x-api-key", "a"), ("api-key", "b")])
        (call,) = upstream.calls
        assert [call.header(n) for n in ("authorization", "x-api-key", "api-key")] == [f"Bearer {KEY}", "a", "b"]


@pytest.mark.parametrize("headers", [[], [("Authorization", "Bearer wrong-key")], [("x-api-key", "")]])
async def test_without_a_valid_key_nothing_goes_on(
    serve: Serve, keys: Path, headers: Headers, finished: Callable[[], list[dict[str, Any]]]
) -> None:
    async with FakeUpstream() as upstream, serve(upstream, listen=with_keys(keys)) as app:
        for method, target, body in (
            ("POST", CHAT, BODY),
            ("POST", "/anything", b"x" * 200_000),
            ("POST", "/health", BODY),
            ("GET", "/v1/models", None),
            ("GET", "/metrics", None),
            ("OPTIONS", CHAT, None),
            ("POST", "/sleep", b""),
            ("GET", "http://elsewhere.test/v1/models", None),
        ):
            async with RawClient(app.url) as client:
                answer = await client.request(method, target, body, headers)
                assert (answer.status, answer.complete) == (401, True), target
                assert answer.header("www-authenticate") == "Bearer"
                assert error_of(answer)["code"] == "invalid_api_key"
                assert b"wrong-key" not in answer.raw
        assert upstream.calls == []
        assert {(line["outcome"], line["error"]) for line in finished()} == {("refused", "invalid_api_key")}


@pytest.mark.parametrize("arrives", ["with its head", "behind its head"])
async def test_a_short_body_that_is_refused_unread_leaves_the_connection_open(
    serve: Serve, keys: Path, arrives: str
) -> None:
    limits = {"per_key_requests_per_minute": 2}
    async with (
        FakeUpstream() as upstream,
        serve(upstream, listen=with_keys(keys), limits=limits) as app,
        RawClient(app.url) as client,
    ):

        async def ask(target: str, headers: Headers, body: bytes = BODY) -> RawAnswer:
            sent = head("POST", target, body, headers)
            if arrives == "with its head":
                await client.send(sent + body)
                return await client.answer()
            await client.send(sent)
            answer = await client.answer()
            await client.send(body)
            return answer

        for target, headers, status in (
            (CHAT, [], 401),
            ("/sleep", AUTH, 403),
            (CHAT, AUTH, 200),
            (CHAT, AUTH, 429),
        ):
            if status == 200:
                assert (await client.request("POST", target, BODY, headers)).status == status
                continue
            answer = await ask(target, headers)
            assert (answer.status, answer.header("connection")) == (status, None)
        assert (await client.request(body=BODY, headers=[("x-api-key", OTHER)])).status == 200
        assert [call.body for call in upstream.calls] == [BODY, BODY]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([("Transfer-Encoding", "chunked")], b""),
        ([("Content-Length", "65537")], b""),
        ([("Content-Length", "4"), ("Expect", "100-continue")], b""),
    ],
)
async def test_any_other_body_that_is_refused_unread_costs_the_connection(
    serve: Serve, keys: Path, headers: Headers, body: bytes
) -> None:
    async with FakeUpstream() as upstream, serve(upstream, listen=with_keys(keys)) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, None, headers) + body)
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (401, "close")
        assert await client.wait_closed() == b""
        assert upstream.calls == []


async def test_a_401_speaks_the_dialect_of_its_route(serve: Serve, keys: Path) -> None:
    async with FakeUpstream() as upstream, serve(upstream, listen=with_keys(keys)) as app, RawClient(app.url) as client:
        answer = await client.request("POST", "/v1/messages", b"")
        assert json.loads(answer.body)["type"] == "error"
        assert error_of(answer)["type"] == "authentication_error"


@pytest.mark.parametrize("target", ["/health", "/ping", "//health/", "/%68ealth?x=1"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_needs_no_key(serve: Serve, keys: Path, method: str, target: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream, listen=with_keys(keys)) as app, RawClient(app.url) as client:
        assert (await client.request(method, target)).status == 200
        assert upstream.calls == []


async def test_the_log_names_the_key_and_never_shows_it(
    serve: Serve, keys: Path, finished: Callable[[], list[dict[str, Any]]]
) -> None:
    async with FakeUpstream() as upstream, serve(upstream, listen=with_keys(keys)) as app, RawClient(app.url) as client:
        await client.request(body=BODY, headers=AUTH)
        await client.request(body=BODY, headers=[("x-api-key", OTHER)])
        await client.request("GET", "/health")
    assert [line["key"] for line in finished()] == ["alice", "bob", None]


async def test_other_keys_are_taken_up_whole_or_not_at_all(serve: Serve, keys: Path) -> None:
    async with FakeUpstream() as upstream, serve(upstream, listen=with_keys(keys)) as app, RawClient(app.url) as client:
        keys.write_text(f"bob: {OTHER}\nal ice: {KEY}\n")
        with pytest.raises(ConfigError, match=f"{keys}: line 2"):
            app.security.reload()
        assert (await client.request(body=BODY, headers=AUTH)).status == 200
        keys.write_text(f"bob: {OTHER}\n")
        app.security.reload()
        assert (await client.request(body=BODY, headers=[("x-api-key", OTHER)])).status == 200
        assert (await client.request(body=BODY, headers=AUTH)).status == 401


def changed(app: App, **tables: dict[str, Any]) -> Settings:
    """The settings of `app` with these of tables instead."""
    table = app.settings.model_dump()
    for name, settings in tables.items():
        table[name] |= settings
    return Settings.model_validate(table)


async def test_another_configuration_opens_closes_and_allows_at_once(
    serve: Serve, keys: Path, tmp_path: Path, finished: Callable[[], list[dict[str, Any]]]
) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        get: Headers = [("Origin", ORIGIN), *AUTH]
        assert (await client.request("GET", "/x")).status == 200
        change = app.apply(changed(app, listen={"api_keys_file": str(keys), "cors": CORS}))
        assert set(change.changed) == {"listen.api_keys_file", "listen.cors", "API keys"}
        assert (await client.request("GET", "/x")).status == 401
        answer = await client.request("GET", "/x", headers=get)
        assert (answer.status, allowed(answer)) == (200, [ORIGIN])
        # The same settings, other keys in the file; then settings that cannot be.
        keys.write_text(f"bob: {OTHER}\n")
        assert app.apply(app.settings).changed == ("API keys",)
        assert (await client.request("GET", "/x", headers=get)).status == 401
        keys.write_text("")
        with pytest.raises(ConfigError):
            app.apply(changed(app, listen={"cors": None}))
        answer = await client.request("GET", "/x", headers=[("Origin", ORIGIN), ("x-api-key", OTHER)])
        assert (answer.status, allowed(answer)) == (200, [ORIGIN])
        app.apply(changed(app, listen={"api_keys_file": None, "cors": None}))
        answer = await client.request("GET", "/x", headers=[("Origin", ORIGIN)])
        assert (answer.status, allowed(answer)) == (200, [])


async def test_a_session_may_be_told_by_a_key_of_ours(
    serve: Serve, keys: Path, finished: Callable[[], list[dict[str, Any]]]
) -> None:
    routing = {"strategy": "session", "session": {"header": "x-api-key"}}
    async with (
        FakeUpstream() as one,
        FakeUpstream() as two,
        serve(one, two, listen=with_keys(keys), routing=routing) as app,
        RawClient(app.url) as client,
    ):
        for _ in range(4):
            assert (await client.request(body=BODY, headers=[("x-api-key", KEY)])).status == 200
    assert len({line["upstream"] for line in finished()}) == 1


# Limits of a key


async def test_a_key_has_only_so_many_requests_under_way_however_they_end(
    serve: Serve, keys: Path, until: Callable[..., Any]
) -> None:
    async def stalls(call: Call) -> None:
        if call.target == "/whole":
            await json_answer({})(call)
            return
        await call.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await call.send_chunk(b"x")
        if call.target == "/breaks":
            call.reset()
        else:
            await call.wait_disconnected()

    limits = {"per_key_in_flight": 2}
    async with (
        FakeUpstream(stalls) as upstream,
        serve(upstream, listen=with_keys(keys), limits=limits) as app,
        AsyncExitStack() as stack,
        RawClient(app.url) as client,
    ):
        api_keys = app.security.gate.api_keys
        assert api_keys is not None
        stalled = [await stack.enter_async_context(RawClient(app.url)) for _ in range(2)]
        for one in stalled:
            await one.send(head("GET", "/stalls", None, AUTH))
            await one.begin()
        refused = await client.request("GET", "/whole", headers=AUTH)
        assert (refused.status, error_of(refused)["code"]) == (429, "key_limit_exceeded")
        assert int(refused.header("retry-after") or 0) >= 1
        assert len(upstream.calls) == 2
        # Another key is not held up, nor is health.
        assert (await client.request("GET", "/whole", headers=[("x-api-key", OTHER)])).status == 200
        assert (await client.request("GET", "/health")).status == 200
        # One client leaves; the other's answer breaks off.
        stalled[0].reset()
        await until(lambda: api_keys.in_flight("alice") == 1)
        async with RawClient(app.url) as broken:
            assert not (await broken.request("GET", "/breaks", headers=AUTH)).complete
        await until(lambda: api_keys.in_flight("alice") == 1)
        assert (await client.request("GET", "/whole", headers=AUTH)).status == 200
        # Refused for what it asks.
        assert (await client.request("POST", "/sleep", headers=AUTH)).status == 403
        stalled[1].close()
        await until(lambda: api_keys.in_flight("alice") == 0)


async def test_a_key_has_only_so_many_requests_in_a_minute(
    serve: Serve, keys: Path, finished: Callable[[], list[dict[str, Any]]]
) -> None:
    now_s = 5000.0

    async with (
        FakeUpstream() as upstream,
        serve(
            upstream,
            clock=lambda: now_s,
            listen=with_keys(keys),
            limits={"per_key_requests_per_minute": 2},
        ) as app,
        RawClient(app.url) as client,
    ):
        for _ in range(2):
            assert (await client.request("GET", "/x", headers=AUTH)).status == 200
        refused = await client.request("GET", "/x", headers=AUTH)
        assert (refused.status, refused.header("retry-after")) == (429, "30")
        assert "2 requests in a minute" in error_of(refused)["message"]
        line = finished()[-1]
        assert (line["key"], line["error"], line["outcome"]) == ("alice", "key_limit_exceeded", "refused")
        anthropic = await client.request("GET", "/v1/messages", headers=AUTH)
        assert error_of(anthropic)["type"] == "rate_limit_error"
        now_s += 30
        assert (await client.request("GET", "/x", headers=AUTH)).status == 200
        assert (await client.request("GET", "/x", headers=AUTH)).status == 429


async def test_a_key_file_that_others_can_read_is_warned_of_once(
    serve: Serve, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys.chmod(0o644)
    async with serve("http://127.0.0.1:9", listen=with_keys(keys)) as app:
        app.apply(app.settings)
        app.apply(app.settings)
    assert sum("is open to other users of this machine" in record.getMessage() for record in caplog.records) == 1


async def test_clients_addresses_are_logged_only_where_that_is_asked_for(
    serve: Serve, keys: Path, finished: Callable[[], list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    def refused_unread() -> list[dict[str, Any]]:
        return [r.__dict__.get("fields", {}) for r in caplog.records if "refused before it was one" in r.getMessage()]

    async with FakeUpstream() as upstream, serve(upstream, listen=with_keys(keys)) as app:
        for asked_for in (False, True):
            settings = app.settings.model_copy(
                update={"log": app.settings.log.model_copy(update={"client_address": asked_for})}
            )
            app.apply(settings)
            client = {"client": "127.0.0.1"} if asked_for else {}
            async with RawClient(app.url) as one:
                assert (await one.request("GET", "/x", headers=AUTH)).status == 200
                assert (await one.request("GET", "/x")).status == 401
                await one.send(b"no HTTP\r\n\r\n")
                assert (await one.answer()).status == 400
            served, unknown = finished()[-2:]
            for line in (served, unknown):
                # What the access log makes of it is tested with the log.
                assert {key: line[key] for key in line if key == "client"} == client
            assert refused_unread()[-1] == client


# Web pages (O40)


def allowed(answer: RawAnswer) -> list[str]:
    return answer.all_headers("access-control-allow-origin")


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_preflight_is_answered_here_without_a_key(serve: Serve, keys: Path, has_keys: bool) -> None:
    listen = with_keys(keys, cors=CORS) if has_keys else listening(cors=CORS)
    async with FakeUpstream() as upstream, serve(upstream, listen=listen) as app, RawClient(app.url) as client:
        answer = await client.request("OPTIONS", CHAT, headers=PREFLIGHT)
        assert (answer.status, answer.body, answer.header("content-length")) == (204, b"", None)
        assert allowed(answer) == [ORIGIN]
        assert answer.header("access-control-allow-methods") == "GET, POST, DELETE"
        assert answer.header("access-control-allow-headers") == "authorization,content-type,x-stainless-os"
        assert answer.header("access-control-max-age") == "600"
        assert "Origin" in answer.all_headers("vary")
        assert answer.header("access-control-allow-credentials") is None
        assert upstream.calls == []


async def test_a_page_of_elsewhere_is_allowed_nothing(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, listen=listening(cors=CORS)) as app:
        for origin in ("https://evil.example", "https://chat.example.evil.example", "null", "https://chat.example:444"):
            async with RawClient(app.url) as client:
                answer = await client.request("OPTIONS", CHAT, headers=[("Origin", origin), *PREFLIGHT[1:]])
                assert (answer.status, allowed(answer)) == (204, [])
                answer = await client.request(body=BODY, headers=[("Origin", origin)])
                assert (answer.status, allowed(answer), answer.header("vary")) == (200, [], "Origin")


async def test_every_answer_has_one_permission_errors_and_streams_too(serve: Serve, keys: Path) -> None:
    async def streams(call: Call) -> None:
        if call.target == "/breaks":
            call.reset()
            return
        own = b"Access-Control-Allow-Origin: *\r\naccess-control-allow-credentials: true\r\nVary: Accept\r\n"
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + own)
        await call.send(b"transfer-encoding: chunked\r\n\r\n")
        await call.send_chunk(b"data: [DONE]\n\n")
        await call.send_chunk(b"")

    listen = with_keys(keys, cors=CORS)
    async with FakeUpstream(streams) as upstream, serve(upstream, listen=listen) as app:
        for target, headers, status in (
            (CHAT, AUTH, 200),
            (CHAT, [], 401),
            ("/sleep", AUTH, 403),
            ("ftp://x/y", AUTH, 400),
            ("/breaks", AUTH, 502),
        ):
            async with RawClient(app.url) as client:
                answer = await client.request("POST", target, BODY, [("Origin", ORIGIN), *headers])
                assert (answer.status, allowed(answer)) == (status, [ORIGIN]), target
                assert answer.all_headers("access-control-allow-credentials") == []
                assert answer.header("access-control-expose-headers") == "x-request-id, retry-after"
                assert answer.all_headers("vary") == (["Accept", "Origin"] if status == 200 else ["Origin"])
        async with RawClient(app.url) as client:
            answer = await client.request("GET", "/health", headers=[("Origin", ORIGIN)])
            assert allowed(answer) == [ORIGIN]


async def test_a_page_that_is_not_allowed_opens_no_websocket(serve: Serve) -> None:
    upgrade: Headers = [("Connection", "Upgrade"), ("Upgrade", "websocket")]
    async with FakeUpstream() as upstream, serve(upstream, listen=listening(cors=CORS)) as app:
        for origin, status in (("https://evil.example", 403), (ORIGIN, 200), (None, 200)):
            async with RawClient(app.url) as client:
                headers = upgrade if origin is None else [*upgrade, ("Origin", origin)]
                assert (await client.request("GET", "/v1/realtime", headers=headers)).status == status
        assert len(upstream.calls) == 2


async def test_every_page_may_be_allowed(serve: Serve) -> None:
    listen = listening(cors={"allow_origins": ["*"], "allow_headers": ["content-type"]})
    async with FakeUpstream() as upstream, serve(upstream, listen=listen) as app, RawClient(app.url) as client:
        answer = await client.request("OPTIONS", CHAT, headers=PREFLIGHT)
        assert (allowed(answer), answer.header("access-control-allow-headers")) == (["*"], "content-type")
        assert allowed(await client.request(body=BODY)) == ["*"]


async def test_cookies_may_be_allowed_to_pages_that_are_named(serve: Serve) -> None:
    listen = listening(cors={**CORS, "allow_credentials": True})
    async with FakeUpstream() as upstream, serve(upstream, listen=listen) as app, RawClient(app.url) as client:
        for answer in (
            await client.request("OPTIONS", CHAT, headers=PREFLIGHT),
            await client.request(body=BODY, headers=[("Origin", ORIGIN)]),
        ):
            assert answer.header("access-control-allow-credentials") == "true"


async def test_without_settings_pages_are_the_instances_business(serve: Serve) -> None:
    upstream = FakeUpstream(json_answer({}, headers="Access-Control-Allow-Origin: *\r\n"))
    async with upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert allowed(await client.request("OPTIONS", CHAT, headers=PREFLIGHT)) == ["*"]
        assert upstream.calls[0].header("access-control-request-method") == "POST"
        assert allowed(await client.request(body=BODY)) == ["*"]


async def test_without_settings_but_with_keys_a_preflight_goes_nowhere_and_allows_nothing(
    serve: Serve, keys: Path
) -> None:
    async with FakeUpstream() as upstream, serve(upstream, listen=with_keys(keys)) as app, RawClient(app.url) as client:
        answer = await client.request("OPTIONS", CHAT, headers=PREFLIGHT)
        assert (answer.status, allowed(answer)) == (204, [])
        assert upstream.calls == []


# Whose prompts match whose (O53)

LONG = "a prompt that is long enough for a few blocks of the index. " * 100


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": LONG}], **fields}).encode()


@pytest.mark.parametrize(
    ("isolate_by", "has_keys", "matches"),
    [("none", True, True), ("api_key", True, False), ("none", False, True), ("api_key", False, False)],
)
async def test_prompts_of_other_keys_match_unless_they_are_kept_apart(
    serve: Serve,
    keys: Path,
    finished: Callable[[], list[dict[str, Any]]],
    isolate_by: str,
    has_keys: bool,
    matches: bool,
) -> None:
    listen = with_keys(keys) if has_keys else listening()
    routing = {"strategy": "expected_latency", "isolate_by": isolate_by}
    async with (
        FakeUpstream() as upstream,
        serve(upstream, listen=listen, routing=routing) as app,
        RawClient(app.url) as client,
    ):
        for key in (KEY, KEY, OTHER):
            assert (await client.request(body=chat(), headers=[("x-api-key", key)])).status == 200
        assert upstream.bodies == [chat()] * 3
    first, again, other = (line["matched_tokens"] for line in finished())
    assert first == 0
    assert again > 1000
    assert (other > 1000) is matches


async def test_prefix_aware_keeps_tenants_apart_too(serve: Serve, finished: Callable[[], list[dict[str, Any]]]) -> None:
    routing = {"strategy": "prefix_aware", "isolate_by": "api_key"}
    async with (
        FakeUpstream() as one,
        FakeUpstream() as two,
        serve(one, two, routing=routing) as app,
        RawClient(app.url) as client,
    ):
        for key in (KEY, KEY, OTHER):
            await client.request(body=chat(), headers=[("x-api-key", key)])
    assert [line["reason"] for line in finished()] == ["cold", "affinity", "cold"]


# What a client cannot bring about


async def test_nothing_in_a_request_chooses_where_it_goes(serve: Serve) -> None:
    async with FakeUpstream() as upstream, FakeUpstream() as elsewhere, serve(upstream) as app:
        at = f"127.0.0.1:{elsewhere.port}"
        for target, headers in (
            (f"http://{at}/v1/models", []),
            (f"HTTP://user:pass@{at}/v1/models", []),
            (f"//{at}/v1/models", []),
            (f"/{at}", []),
            (f"/v1/models?url=http://{at}/", []),
            ("/v1/models", [("X-Forwarded-Host", at), ("X-Forwarded-For", at), ("Forwarded", f"host={at}")]),
            ("/v1/models", [("X-Original-URL", f"http://{at}/"), ("X-Rewrite-URL", f"http://{at}/")]),
            ("/v1/models", [("x-prefixroute-instance", at), ("x-gateway-destination-endpoint", at)]),
        ):
            async with RawClient(app.url) as client:
                assert (await client.request("GET", target, headers=headers)).status == 200, target
        async with RawClient(app.url) as client:
            await client.send(f"GET /v1/models HTTP/1.1\r\nHost: {at}\r\n\r\n".encode())
            assert (await client.answer("GET")).status == 200
        for refused in (f"CONNECT {at} HTTP/1.1", f"GET {at} HTTP/1.1", "GET file:///etc/passwd HTTP/1.1"):
            async with RawClient(app.url) as client:
                await client.send(f"{refused}\r\nHost: {at}\r\n\r\n".encode())
                assert (await client.answer("GET")).status == 400
        assert elsewhere.n_connections_ever == 0
        assert {call.header("host") for call in upstream.calls} == {f"127.0.0.1:{upstream.port}"}
        assert all(call.target.startswith("/") for call in upstream.calls)


async def test_a_redirect_is_handed_back_and_not_followed(serve: Serve) -> None:
    async with FakeUpstream() as elsewhere:
        upstream = FakeUpstream(json_answer({}, status=307, headers=f"Location: {elsewhere.url}/\r\n"))
        async with upstream, serve(upstream) as app, RawClient(app.url) as client:
            assert (await client.request(body=BODY)).header("location") == f"{elsewhere.url}/"
            assert elsewhere.n_connections_ever == 0


async def test_a_bomb_is_passed_on_as_it_is_and_never_inflated(serve: Serve) -> None:
    bomb = gzip.compress(bytes(256 * 2**20), compresslevel=9)
    async with FakeUpstream() as upstream, serve(upstream) as app:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for coding in ("gzip", "gzip, gzip", "deflate", "br", "zstd"):
            async with RawClient(app.url) as client:
                answer = await client.request(body=bomb, headers=[("Content-Encoding", coding)])
                assert answer.status == 200
        # In kilobytes: far from what it would be inflated.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
        assert upstream.bodies == [bomb] * 5


async def test_nothing_a_client_sends_gets_into_the_log(
    serve: Serve, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planted = "planted-secret-0123456789"

    async def breaks(call: Call) -> None:
        call.reset() if "breaks" in call.target else await json_answer({})(call)

    async with (
        FakeUpstream(breaks) as upstream,
        serve(upstream, listen=with_keys(keys, cors=CORS), log={"level": "debug"}) as app,
    ):
        body = json.dumps({"model": planted, "messages": [{"role": "user", "content": planted}]}).encode()
        headers: Headers = [
            *((name, planted) for name in ("Cookie", "X-Custom", "User-Agent", "Origin", "x-session-id")),
            ("X-Request-Id", f'{planted}"'),
            ("Authorization", f"Bearer {planted}"),
        ]
        for extra in ([("x-api-key", KEY)], []):
            for target in (CHAT, f"/{planted}", f"/breaks?key={planted}", "/sleep", f"/v1/responses/{planted}"):
                async with RawClient(app.url) as client:
                    await client.request("POST", f"{target}?api_key={planted}", body, [*headers, *extra])
        async with RawClient(app.url) as client:
            await client.send(f"GET / HTTP/1.1\r\nAuthorization : {planted}\r\n\r\n".encode())
            await client.answer("GET")
    assert upstream.calls
    for formatter in (TextFormatter(), JsonFormatter()):
        lines = "".join(formatter.format(record) for record in caplog.records)
        assert lines
        for secret in (planted, KEY, OTHER):
            assert secret not in lines
        assert not any(ord(char) < 32 and char != "\n" for char in lines)


async def test_answers_tell_nothing_of_the_decision_unless_asked_to(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY)
        assert not [name for name, _ in answer.headers if "prefixroute" in name.lower()]


async def test_a_port_that_others_reach_without_keys_is_warned_of_once(
    serve: Serve, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def n_warnings() -> int:
        return sum("may use the instances" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)

    async with FakeUpstream() as upstream:
        async with serve(upstream):
            assert n_warnings() == 0
        async with serve(upstream, listen=with_keys(keys, host="0.0.0.0")):
            assert n_warnings() == 0
        async with serve(upstream, listen=listening(host="0.0.0.0")) as app:
            app.apply(app.settings)
            assert n_warnings() == 1


# The admin port


async def test_the_admin_port_wants_its_token(serve: Serve, keys: Path) -> None:
    admin = {"host": "0.0.0.0", "port": 0, "token_env": "ADMIN_TOKEN"}
    environ = {"ADMIN_TOKEN": "t0ken-of-the-admin"}
    async with (
        FakeUpstream() as upstream,
        serve(upstream, admin=admin, environ=environ, listen=with_keys(keys)) as app,
    ):
        assert app.admin_url is not None
        bearer: Headers = [("Authorization", "Bearer t0ken-of-the-admin")]
        wrong: list[Headers] = [[], [("Authorization", "Bearer t0ken")], AUTH, [("Authorization", "Basic dDp0")]]
        for headers in wrong:
            for method, target in (
                *(("GET", path) for path in ("/", "/metrics", "/instances", "/ladder", "/decisions/x", "/nothing")),
                *(("POST", path) for path in ("/explain", "/instances/gpu-0/drain", "/livez/../instances/gpu-0/drain")),
            ):
                async with RawClient(app.admin_url) as client:
                    answer = await client.request(method, target, BODY if method == "POST" else None, headers)
                    assert (answer.status, answer.header("www-authenticate")) == (401, "Bearer"), target
                    assert b"gpu-0" not in answer.raw
        async with RawClient(app.admin_url) as client:
            assert (await client.request("GET", "/livez")).status == 200
            ready = await client.request("GET", "/readyz")
            assert (ready.status, json.loads(ready.body)) == (200, {"ready": True, "reasons": []})
            ready = await client.request("GET", "/readyz", headers=bearer)
            assert "gpu-0" in json.loads(ready.body)["instances"]
            assert (await client.request("GET", "/metrics", headers=bearer)).status == 200
            drained = await client.request("POST", "/instances/gpu-0/drain", b"", bearer)
            assert drained.status == 200
        ladder = await asyncio.to_thread(ask_ladder, app.admin_url.replace("0.0.0.0", "127.0.0.1"), dict(bearer))
        assert "gaps" in ladder
        # The token of the one port is nothing on the other.
        async with RawClient(app.url) as client:
            assert (await client.request(body=BODY, headers=bearer)).status == 401
