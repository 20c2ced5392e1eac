"""When an attempt is repeated, where, and when never: rules (a) to (d)."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import Script, json_answer, raw_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"
MULTIPART = [("Content-Type", "multipart/form-data; boundary=x")]


async def dies(call: Call) -> None:
    call.reset()


async def leaves(call: Call) -> None:
    call.close()


def busy(status: int, name: str) -> Script:
    return json_answer({"busy": name}, status=status, headers=f"X-From: {name}\r\nRetry-After: 7\r\n")


async def good_once(call: Call) -> None:
    """Answers, and resets the connection when it is used again."""
    if not call.reused:
        await json_answer({"ok": True})(call)
        call.reset_at_next()


def error_of(body: bytes) -> dict[str, str]:
    error = json.loads(body)["error"]
    assert isinstance(error, dict)
    return error


# ---------------------------------------------------------------------- (a) no connection


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("POST", CHAT, []),
        ("POST", "/v1/responses", []),
        ("DELETE", "/v1/files/1", []),
        ("POST", "/v1/audio/transcriptions", MULTIPART),
        ("PUT", "/unknown", []),
    ],
)
async def test_a_refused_connection_sends_the_request_to_the_next_instance(
    serve: Serve, finished: Finished, method: str, target: str, headers: list[tuple[str, str]]
) -> None:
    async with FakeUpstream() as dead, FakeUpstream() as alive, serve(dead, alive) as app:
        await dead.stop()
        async with RawClient(app.url) as client:
            # Longer than any buffer on the way: a stream that was begun could not be begun again.
            body = b"x" * 3_000_000
            assert (await client.request(method, target, body, headers)).status == 200
        assert alive.bodies == [body]
        assert finished()[0]["attempts"] == "unreachable,answered"
        assert finished()[0]["upstream"] == "gpu-1"


async def test_refusals_end_with_the_attempts(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream() as a, FakeUpstream() as b, FakeUpstream() as c:
        async with serve(a, b, c, retry={"max_attempts": 2}) as app:
            await a.stop()
            await b.stop()
            async with RawClient(app.url) as client:
                answer = await client.request(body=BODY)
                assert (answer.status, error_of(answer.body)["code"]) == (502, "upstream_unreachable")
                assert "gpu-1" in error_of(answer.body)["message"]
        assert c.calls == []
        assert finished()[0]["attempts"] == "unreachable,unreachable"


async def test_a_fleet_that_restarts_is_waited_for_through_kept_connections(serve: Serve, finished: Finished) -> None:
    """Each instance first breaks a kept connection, then refuses: that is one attempt, and the whole fleet is asked."""

    async def once(call: Call) -> None:
        await json_answer({})(call)
        call.reset_at_next()

    async with FakeUpstream(once) as a, FakeUpstream(once) as b, FakeUpstream(once) as c:
        async with serve(a, b, c, routing={"strategy": "round_robin"}) as app, RawClient(app.url) as client:
            for _ in range(3):
                await client.request(body=BODY)
            for upstream in (a, b, c):
                upstream.refuse()
            asking = asyncio.create_task(client.request(body=BODY))
            while not app.waiting:
                await asyncio.sleep(0)
            for upstream in (a, b, c):
                await upstream.start()
            assert (await asking).status == 200
        attempts = finished()[-1]["attempts"].split(",")
        assert attempts[0] == "stale"
        assert attempts.count("unreachable") >= 3


async def test_nobody_is_tried_twice(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream() as dead, FakeUpstream(busy(503, "b")) as b, FakeUpstream(busy(429, "c")) as c:
        async with serve(dead, b, c, retry={"max_attempts": 10}) as app:
            await dead.stop()
            async with RawClient(app.url) as client:
                answer = await client.request(body=BODY)
        assert answer.status == 429
        assert (len(b.calls), len(c.calls)) == (1, 1)
        assert finished()[0]["attempts"] == "unreachable,busy,answered"


# ---------------------------------------------------------------------- (b) a reused connection


@pytest.mark.parametrize(
    ("method", "target"), [("POST", CHAT), ("POST", "/v1/responses"), ("GET", "/x"), ("DELETE", "/x")]
)
async def test_a_reused_connection_that_closes_is_made_anew(
    serve: Serve, finished: Finished, method: str, target: str
) -> None:
    body = BODY if method == "POST" else None
    async with FakeUpstream(good_once) as upstream, FakeUpstream() as other, serve(upstream, other) as app:
        async with RawClient(app.url) as client:
            await client.request(method, target, body)
            await client.request(method, target, body)  # the other's turn
            assert (await client.request(method, target, body)).status == 200
        # One delivery of it, on a fresh connection to the same instance.
        assert [call.reused for call in upstream.calls] == [False, False]
        assert len(other.calls) == 1
        assert finished()[2]["attempts"] == "stale,answered"


async def test_a_reused_connection_is_made_anew_once(serve: Serve, finished: Finished) -> None:
    async def script(call: Call) -> None:
        if len(upstream.calls) == 1:
            await json_answer({})(call)
            call.reset_at_next()
        else:
            call.reset()

    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.request(body=BODY)
        assert (await client.request(body=BODY)).status == 502
        assert len(upstream.calls) == 2
        assert finished()[1]["attempts"] == "stale,unanswered"


async def test_a_stale_connection_casts_doubt_on_all_that_are_kept(serve: Serve, finished: Finished) -> None:
    async def script(call: Call) -> None:
        await together.wait()
        await json_answer({})(call)
        call.reset_at_next()

    together = asyncio.Event()
    async with FakeUpstream(script) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client, RawClient(app.url) as other:
            for one in (client, other):
                await one.send(head("POST", CHAT, BODY) + BODY)
            await upstream.wait_calls(2)
            together.set()
            await client.answer()
            await other.answer()
            assert (await client.request(body=BODY)).status == 200
        assert len(upstream.calls) == 3
        assert finished()[2]["attempts"] == "stale,answered"


async def test_a_streamed_body_never_meets_a_connection_that_is_closing(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream(good_once) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for _ in range(3):
            assert (await client.request("POST", "/v1/audio/transcriptions", b"x", MULTIPART)).status == 200
        assert (await client.request(body=BODY)).status == 200
        assert (await client.request("POST", "/v1/audio/transcriptions", b"x", MULTIPART)).status == 200
        assert [line["attempts"] for line in finished()] == [*["answered"] * 3, "stale,answered", "answered"]


async def test_an_answer_that_began_on_a_reused_connection_is_not_asked_for_again(
    serve: Serve, finished: Finished
) -> None:
    async def script(call: Call) -> None:
        if call.reused:
            await call.send(b"HTTP/1.1 200 OK\r\nContent-")
            call.close()
        else:
            await json_answer({})(call)

    async with FakeUpstream(script) as upstream, serve(upstream, retry={"unanswered": "inference"}) as app:
        async with RawClient(app.url) as client:
            await client.request(body=BODY)
            assert (await client.request(body=BODY)).status == 502
        assert len(upstream.calls) == 2
        assert finished()[1]["attempts"] == "broken"


# ---------------------------------------------------------------------- (c) a fresh connection that dies


@pytest.mark.parametrize("script", [dies, leaves])
@pytest.mark.parametrize(("method", "target"), [("POST", CHAT), ("GET", "/x"), ("PUT", "/x"), ("DELETE", "/x")])
async def test_a_request_that_died_unanswered_is_delivered_once(
    serve: Serve, finished: Finished, script: Script, method: str, target: str
) -> None:
    async with FakeUpstream(script) as upstream, FakeUpstream() as other, serve(upstream, other) as app:
        async with RawClient(app.url) as client:
            answer = await client.request(method, target, BODY if method == "POST" else None)
        assert (answer.status, error_of(answer.body)["code"]) == (502, "upstream_broken")
        assert (len(upstream.calls), len(other.calls)) == (1, 0)
        assert (finished()[0]["attempts"], finished()[0]["outcome"]) == ("unanswered", "broken")


@pytest.mark.parametrize(
    ("target", "n"),
    [
        (CHAT, 2),
        ("/v1/completions", 2),
        ("/v1/messages", 2),
        ("/v1/embeddings", 2),
        ("/v2/rerank", 2),
        ("/invocations", 2),
        ("/v1/responses", 1),
        ("/v1/files", 1),
        ("/v1/audio/transcriptions", 1),
    ],
)
async def test_inference_may_be_repeated_once_where_asked_for(serve: Serve, target: str, n: int) -> None:
    async with FakeUpstream(dies) as one, FakeUpstream(dies) as other, FakeUpstream() as third:
        async with (
            serve(one, other, third, retry={"unanswered": "inference"}) as app,
            RawClient(app.url) as client,
        ):
            answer = await client.request("POST", target, BODY)
        # Once only: two deaths of the same request are likely its own doing.
        assert answer.status == 502
        assert [len(upstream.calls) for upstream in (one, other, third)] == [1, n - 1, 0]


async def test_a_repeat_goes_to_another_instance_where_there_is_one(serve: Serve, finished: Finished) -> None:
    async def dies_once(call: Call) -> None:
        await (dies if len(alone.calls) == 1 else json_answer({}))(call)

    retry = {"unanswered": "inference"}
    async with FakeUpstream(dies) as one, FakeUpstream() as other, serve(one, other, retry=retry) as app:
        async with RawClient(app.url) as client:
            assert (await client.request(body=BODY)).status == 200
        assert (len(one.calls), len(other.calls)) == (1, 1)
    async with FakeUpstream(dies_once) as alone, serve(alone, retry=retry) as app, RawClient(app.url) as client:
        assert (await client.request(body=BODY)).status == 200
        assert len(alone.calls) == 2
    assert [line["attempts"] for line in finished()] == ["unanswered,answered"] * 2


# ---------------------------------------------------------------------- (d) busy


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_instance_sends_the_request_to_the_next(serve: Serve, finished: Finished, status: int) -> None:
    async with FakeUpstream(busy(status, "a")) as a, FakeUpstream() as b, serve(a, b) as app:
        async with RawClient(app.url) as client:
            assert (await client.request(body=BODY)).status == 200
        assert a.bodies == b.bodies == [BODY]
        assert finished()[0]["attempts"] == "busy,answered"
        # Busy is not dead.
        assert app.router.fleet.state("gpu-0").state.value == "up"


async def test_when_all_are_busy_the_last_answer_is_the_clients(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream(busy(503, "a")) as a, FakeUpstream(busy(429, "b")) as b, FakeUpstream(busy(503, "c")) as c:
        async with serve(a, b, c) as app, RawClient(app.url) as client:
            answer = await client.request(body=BODY)
            assert (answer.status, answer.header("x-from"), answer.header("retry-after")) == (503, "c", "7")
            assert json.loads(answer.body) == {"busy": "c"}
        assert [len(one.calls) for one in (a, b, c)] == [1, 1, 1]
        assert (finished()[0]["outcome"], finished()[0]["upstream"]) == ("server_error", "gpu-2")


async def test_a_held_answer_is_passed_on_when_the_others_are_gone(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream(busy(429, "a")) as a, FakeUpstream() as b, serve(a, b) as app:
        await b.stop()
        async with RawClient(app.url) as client:
            answer = await client.request(body=BODY)
            assert (answer.status, json.loads(answer.body), answer.complete) == (429, {"busy": "a"}, True)
        assert (finished()[0]["attempts"], finished()[0]["upstream"]) == ("busy,unreachable", "gpu-0")


async def test_a_stale_connection_does_not_use_up_the_last_attempt(serve: Serve, finished: Finished) -> None:
    async def stale(call: Call) -> None:
        await raw_answer(b"ok", headers="x-from: b\r\n")(call)
        call.reset_at_next()

    async with FakeUpstream(busy(503, "a")) as a, FakeUpstream(stale) as b:
        async with serve(a, b, retry={"max_attempts": 2}) as app, RawClient(app.url) as client:
            for _ in range(2):
                assert (await client.request(body=BODY)).header("x-from") == "b"
        assert [line["attempts"] for line in finished()] == ["busy,answered", "busy,stale,answered"]


async def test_a_held_answer_is_let_go_once_another_begins(serve: Serve) -> None:
    async def slow_refusal(call: Call) -> None:
        await call.send(b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nthe rest never comes")
        await call.wait_disconnected()
        let_go.set()

    async def streams(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await let_go.wait()
        await call.send_chunk(b"")

    let_go = asyncio.Event()
    async with (
        FakeUpstream(slow_refusal) as a,
        FakeUpstream(streams) as b,
        serve(a, b) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request(body=BODY)
        assert (answer.status, answer.complete) == (200, True)


async def test_attempts_are_bounded(serve: Serve) -> None:
    async with FakeUpstream(busy(503, "a")) as a, FakeUpstream(busy(503, "b")) as b, FakeUpstream() as c:
        async with serve(a, b, c, retry={"max_attempts": 2}) as app, RawClient(app.url) as client:
            assert (await client.request(body=BODY)).header("x-from") == "b"
        assert c.calls == []
        async with serve(a, b, c, retry={"max_attempts": 1}) as app, RawClient(app.url) as client:
            assert (await client.request(body=BODY)).header("x-from") == "a"


async def test_repeats_are_a_share_of_recent_requests(serve: Serve) -> None:
    async with FakeUpstream(busy(503, "a")) as a, FakeUpstream(busy(503, "b")) as b:
        async with serve(a, b, retry={"budget_ratio": 0.5}) as app, RawClient(app.url) as client:
            for _ in range(100):
                assert (await client.request(body=BODY)).status == 503
        n_repeats = len(a.calls) + len(b.calls) - 100
        # Ten in reserve, and one for every two requests.
        assert 50 <= n_repeats <= 60
        async with serve(a, b, retry={"budget_ratio": 0.0}) as app, RawClient(app.url) as client:
            await client.request(body=BODY)
        assert len(a.calls) + len(b.calls) - 100 - n_repeats == 1


async def test_a_streamed_body_is_not_sent_twice(serve: Serve) -> None:
    async with FakeUpstream(busy(503, "a")) as a, FakeUpstream() as b, serve(a, b) as app:
        async with RawClient(app.url) as client:
            answer = await client.request("POST", "/v1/audio/transcriptions", b"x", MULTIPART)
            assert (answer.status, answer.header("x-from")) == (503, "a")
        assert b.calls == []


# ---------------------------------------------------------------------- never


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 422, 500, 501, 502, 504, 529])
async def test_any_other_status_is_the_clients_answer(serve: Serve, status: int) -> None:
    script = raw_answer(b"as it is", status=status)
    async with FakeUpstream(script) as a, FakeUpstream() as b, serve(a, b) as app, RawClient(app.url) as client:
        answer = await client.request(body=BODY)
        assert (answer.status, answer.body) == (status, b"as it is")
        assert (len(a.calls), len(b.calls)) == (1, 0)


HEAD = b"HTTP/1.1 200 OK\r\n"
CUT: dict[str, bytes] = {
    "length, nothing": HEAD + b"Content-Length: 100\r\n\r\n",
    "length, half": HEAD + b"Content-Length: 100\r\n\r\nhalf",
    "chunked, nothing": HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    "chunked, between": HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    "chunked, within": HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\nhalf",
    "chunked, in a size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nf",
    "chunked, before the last line": HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n0\r\n",
    "garbage for a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nzz\r\n",
    "garbage behind a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalfway\r\n0\r\n\r\n",
}


# An instance that says something wrong need not end for it to be so.
ENDS = [(name, end) for name in CUT for end in ("close", "reset", "stay") if end != "stay" or "garbage" in name]


@pytest.mark.parametrize(("name", "end"), ENDS)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_begun_answer_that_breaks_off_is_seen_to(
    serve: Serve, finished: Finished, name: str, end: str, version: str
) -> None:
    """No clean end, and no second attempt: what the client has got cannot be taken back."""

    async def script(call: Call) -> None:
        at = sent.index(b"\r\n\r\n") + 4
        await call.send(sent[:at])
        await begun.wait()
        await call.send(sent[at:])
        if has_half:
            await read_half.wait()
        if end != "stay":
            getattr(call, end)()

    sent = CUT[name]
    has_half = "half" in sent.decode() and "garbage" not in name
    begun, read_half = asyncio.Event(), asyncio.Event()
    async with FakeUpstream(script) as upstream, FakeUpstream() as other, serve(upstream, other) as app:
        async with RawClient(app.url) as client:
            await client.send(head("POST", CHAT, BODY).replace(b"1.1", version.encode()) + BODY)
            await client.begin()
            begun.set()
            seen = b""
            if has_half:
                while b"half" not in seen:
                    seen += await client.read(1)
            read_half.set()
            rest, was_reset = await read_to_end(client)
            assert not (seen + rest).endswith(b"0\r\n\r\n")
            if version == "1.0" and b"chunked" in sent:
                # A body that ends with its connection: only a reset says that it is cut.
                assert was_reset
        assert (len(upstream.calls), len(other.calls)) == (1, 0)
        assert (finished()[0]["outcome"], finished()[0]["status"], finished()[0]["attempts"]) == (
            "broken",
            200,
            "broken",
        )


async def test_a_body_that_ends_with_its_connection_is_cut_by_a_reset(serve: Serve, finished: Finished) -> None:
    async def script(call: Call) -> None:
        await call.send(HEAD + b"\r\nhalf")
        await read_half.wait()
        call.reset()

    read_half = asyncio.Event()
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, BODY) + BODY)
        await client.begin()
        assert await client.chunk() == b"half"
        read_half.set()
        assert (await read_to_end(client))[0] == b""
        assert finished()[0]["outcome"] == "broken"


async def read_to_end(client: RawClient) -> tuple[bytes, bool]:
    """What still comes, and whether the connection was reset after it."""
    rest = bytearray()
    try:
        while piece := await client.reader.read(65_536):
            rest += piece
    except ConnectionResetError:
        return bytes(rest), True
    return bytes(rest), False
