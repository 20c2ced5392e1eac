"""The router's own errors: in the dialect of the route, with a request id, silent about everything else."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.http.proxy import Proxy
from prefixroute.testing import Call, FakeUpstream, RawAnswer, RawClient
from prefixroute.testing.client import Headers
from prefixroute.testing.upstream import Script

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
SECRET = "sk-1234567890abcdef"


async def dies(call: Call) -> None:
    call.reset()


async def silent(call: Call) -> None:
    await call.wait_disconnected()


EXPECT = [("Content-Length", "1"), ("Expect", SECRET)]
INVALID = "invalid_request_error"

# How to get each: what the instance does, the headers to send; status, OpenAI's type and code, Anthropic's type.
ERRORS: dict[str, tuple[Script, Headers, int, str, str, str]] = {
    "broken": (dies, [], 502, "server_error", "upstream_broken", "api_error"),
    "timeout": (silent, [], 504, "server_error", "upstream_timeout", "api_error"),
    "too large": (silent, [("Content-Length", "9999999")], 413, INVALID, "body_too_large", "request_too_large"),
    "expectation": (silent, EXPECT, 417, INVALID, "expectation_failed", INVALID),
    "framing": (silent, [("Transfer-Encoding", "gzip, chunked")], 400, INVALID, "ambiguous_framing", INVALID),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/unknown"])
async def test_an_error_speaks_the_dialect_of_the_route(
    serve: Serve, finished: Finished, caplog: pytest.LogCaptureFixture, name: str, target: str
) -> None:
    script, headers, status, kind, code, anthropic_kind = ERRORS[name]
    settings = {"upstream": {"first_byte_timeout_s": 0.05}, "limits": {"max_body_bytes": 100_000}}
    sent = [*headers, ("Authorization", f"Bearer {SECRET}"), ("X-Request-Id", "mine")]
    async with FakeUpstream(script) as upstream, serve(upstream, **settings) as app, RawClient(app.url) as client:
        answer = await client.request("POST", f"{target}?key={SECRET}", None, sent)
    assert answer.status == status
    assert (answer.header("content-type"), answer.header("x-request-id")) == ("application/json", "mine")
    assert answer.header("retry-after") is None
    assert parsedate_to_datetime(answer.header("date") or "").year > 2000
    document = json.loads(answer.body)
    if target.startswith("/v1/messages"):
        assert document["type"] == "error"
        assert set(document["error"]) == {"type", "message"}
        assert document["error"]["type"] == anthropic_kind
    else:
        assert set(document) == {"error"}
        assert document["error"] == {"message": document["error"]["message"], "type": kind, "param": None, "code": code}
    assert (finished()[0]["status"], finished()[0]["error"], finished()[0]["request_id"]) == (status, code, "mine")
    check_silent_about(SECRET, answer, caplog)


def check_silent_about(secret: str, answer: RawAnswer, caplog: pytest.LogCaptureFixture) -> None:
    assert secret.encode() not in answer.raw
    assert secret not in caplog.text
    assert not any(secret in repr(vars(record)) for record in caplog.records)


async def test_an_error_tells_no_client_where_instances_are(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        FakeUpstream() as one,
        FakeUpstream() as two,
        serve(one, two, retry={"max_attempts": 1}) as app,
        RawClient(app.url) as client,
    ):
        await one.stop()
        answer = await client.request("POST", "/v1/completions", BODY)
        assert answer.status == 502
        assert json.loads(answer.body)["error"]["message"] == "gpu-0: Connection refused"
        assert str(one.port) not in "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_fault_of_the_router_is_a_500_that_says_nothing(
    serve: Serve,
    finished: Finished,
    expected_errors: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    begun: bool,
) -> None:
    async def serves(self: Proxy, request: object, response: Any, *rest: object) -> None:
        if begun:
            response.start(200, b"OK", [])
        raise KeyError(SECRET)

    expected_errors.append("fault in the router: KeyError")
    monkeypatch.setattr(Proxy, "_ask", serves)
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request("POST", "/v1/messages", BODY)
        if begun:
            assert (answer.status, answer.complete) == (200, False)
        else:
            assert (answer.status, json.loads(answer.body)["error"]["message"]) == (500, "internal error")
        assert (finished()[0]["outcome"], finished()[0]["error"]) == ("fault", "internal_error")
        check_silent_about(SECRET, answer, caplog)


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_a_fault_outside_the_handler_cuts_the_connection_and_says_nothing(
    serve: Serve,
    expected_errors: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: str,
) -> None:
    """A 500 behind an answer that has been written would be taken for the answer to the next request."""
    original = Proxy.handle

    async def handle(self: Proxy, request: Any) -> Any:
        if fails == "after":
            await original(self, request)
        raise ValueError(SECRET)

    expected_errors.append("closed over a fault: ValueError")
    monkeypatch.setattr(Proxy, "handle", handle)
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
        rest = await client.wait_closed()
        assert rest.count(b"HTTP/1.1") == (1 if fails == "after" else 0)
        assert SECRET not in caplog.text


async def test_the_instances_key_is_sent_for_clients_that_bring_none(serve: Serve) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, instance={"api_key_env": "GPU_KEY"}, environ={"GPU_KEY": "sk-gpu"}) as app,
        RawClient(app.url) as client,
    ):
        for headers in ([], [("AUTHORIZATION", "Bearer mine")], [("X-Api-Key", "mine")]):
            await client.request("POST", "/v1/completions", BODY, headers)
    assert [call.all_headers("authorization") for call in upstream.calls] == [["Bearer sk-gpu"], ["Bearer mine"], []]
