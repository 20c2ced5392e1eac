"""Section B of the failure cases: clients that leave, requests sent twice or not at all, connections that close."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import chunked, head
from prefixroute.testing.upstream import Script, json_answer, raw_answer
from tests.conformance.harness import (
    CHAT,
    JSON,
    OK,
    SSE_HEAD,
    Finished,
    Serve,
    Until,
    answers,
    chat,
    event,
    n_delivered,
    payload,
    post,
    scrape,
    silent,
    wait_metric,
)

UPLOAD = "/v1/audio/transcriptions"
MULTIPART = ("Content-Type", "multipart/form-data; boundary=b")
CHUNKED = ("Transfer-Encoding", "chunked")
INFERENCE = {"retry": {"unanswered": "inference"}}


@pytest.fixture(params=["close", "reset", "half_close"])
def way(request: pytest.FixtureRequest) -> str:
    """In which a client leaves."""
    return str(request.param)


# ---------------------------------------------------------------------- O09, O10: a client that leaves


async def _begins(call: Call) -> None:
    await call.send(SSE_HEAD)
    await call.wait_disconnected()


async def _streams(call: Call) -> None:
    await call.send(SSE_HEAD)
    for i in range(3):
        await call.send_chunk(event(str(i)))
    await call.wait_disconnected()


async def _half_an_answer(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{")
    await call.wait_disconnected()


async def _half_until_close(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event("0"))
    await call.wait_disconnected()


async def _half_a_head(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-ty")
    await call.wait_disconnected()


async def _interim(call: Call) -> None:
    await call.send(b"HTTP/1.1 102 Processing\r\n\r\n")
    await call.wait_disconnected()


# What the instance does, and how much of the body the client reads before it leaves; None: not even the head.
PHASES: dict[str, tuple[Script, int | None]] = {
    "before_the_head": (silent, None),
    "within_the_head": (_half_a_head, None),
    "after_an_interim_answer": (_interim, None),
    "after_the_head": (_begins, 0),
    "mid_stream": (_streams, 3 * len(event("0"))),
    "mid_answer": (_half_an_answer, 0),
    "mid_answer_that_ends_with_its_connection": (_half_until_close, len(event("0"))),
}


@pytest.mark.parametrize(("script", "n_bytes"), PHASES.values(), ids=PHASES)
async def test_o09_o10_the_instance_is_told_at_once_whatever_is_switched_on(
    serve: Serve,
    finished: Finished,
    until: Until,
    features: dict[str, Any],
    script: Script,
    n_bytes: int | None,
    way: str,
) -> None:
    """The instance is silent when the client leaves: who notices at the next write never would."""
    async with FakeUpstream(script) as upstream, serve(upstream, **features) as app, RawClient(app.url) as client:
        await post(client, chat(stream=True))
        (call,) = await upstream.wait_calls(1)
        if n_bytes is not None:
            await client.begin()
            await payload(client, n_bytes)
        assert (await scrape(app))['prefixroute_in_flight{upstream="gpu-0"}'] == 1
        getattr(client, way)()
        await call.wait_disconnected()
        await until(lambda: len(finished()) == 1)
        assert (finished()[0]["outcome"], finished()[0]["attempts"]) == ("client_gone", "abandoned")
        seen = await scrape(app)
        assert seen['prefixroute_in_flight{upstream="gpu-0"}'] == 0
        assert seen["prefixroute_client_disconnects_total"] == 1


async def test_o10_while_it_still_uploads(
    serve: Serve, finished: Finished, until: Until, features: dict[str, Any], way: str
) -> None:
    async def reads(call: Call) -> None:
        assert await call.read(4) == b"half"
        await call.read(4)

    async with FakeUpstream(reads, by_hand=True) as upstream, serve(upstream, **features) as app:
        async with RawClient(app.url) as client:
            await client.send(head("POST", UPLOAD, b"x" * 8, [MULTIPART]) + b"half")
            await upstream.wait_calls(1)
            getattr(client, way)()
            await upstream.wait_connections(0)
        await until(lambda: len(finished()) == 1)
        assert finished()[0]["outcome"] == "client_gone"


async def test_o10_while_its_body_is_still_being_read_to_be_routed(
    serve: Serve, finished: Finished, until: Until, features: dict[str, Any], way: str
) -> None:
    body = chat("x" * 500)
    async with FakeUpstream() as upstream, serve(upstream, **features) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, body, [JSON]) + body[:100])
        # The router has what was sent when it has answered another client since.
        async with RawClient(app.url) as other:
            assert (await other.request("GET", "/health")).status == 200
        getattr(client, way)()
        await until(lambda: len(finished()) == 2)
        assert (finished()[1]["route"], finished()[1]["outcome"]) == (CHAT, "client_gone")
        assert upstream.calls == []


async def test_o10_while_it_takes_nothing(
    serve: Serve, finished: Finished, until: Until, features: dict[str, Any], way: str
) -> None:
    async def pours(call: Call) -> None:
        await call.send(SSE_HEAD)
        while True:
            await call.send_chunk(b"data: " + b"x" * 65_536 + b"\n\n")

    async with FakeUpstream(pours) as upstream, serve(upstream, **features) as app:
        async with RawClient(app.url, read_bytes=4096) as client:
            await post(client, chat(stream=True))
            await client.begin()
            (call,) = upstream.calls
            getattr(client, way)()
            await call.wait_disconnected()
        await until(lambda: len(finished()) == 1)
        assert finished()[0]["outcome"] == "client_gone"


async def test_o10_with_further_requests_sent_ahead(
    serve: Serve, finished: Finished, until: Until, features: dict[str, Any], way: str
) -> None:
    """Those that were sent behind the one under way reach nobody."""
    async with FakeUpstream(silent) as upstream, serve(upstream, **features) as app, RawClient(app.url) as client:
        for marker in ("FIRST", "SECOND", "THIRD"):
            await post(client, chat(marker))
        (call,) = await upstream.wait_calls(1)
        getattr(client, way)()
        await call.wait_disconnected()
        await until(lambda: len(finished()) >= 1)
        async with RawClient(app.url) as other:
            assert (await other.request("GET", "/health")).status == 200
        assert [n_delivered(marker, upstream) for marker in ("FIRST", "SECOND", "THIRD")] == [1, 0, 0]


# ---------------------------------------------------------------------- O11: the client is gone, failover goes on


async def _busy(call: Call) -> None:
    await json_answer({}, status=503)(call)


async def _too_many(call: Call) -> None:
    await json_answer({}, status=429)(call)


async def _resets(call: Call) -> None:
    call.reset()


async def _closes(call: Call) -> None:
    call.close()


@pytest.mark.parametrize("then", [_busy, _too_many, _resets, _closes])
@pytest.mark.parametrize("body_is", ["whole", "streamed"])
async def test_o11_a_client_that_left_is_tried_nowhere_else(
    serve: Serve, finished: Finished, until: Until, features: dict[str, Any], then: Script, body_is: str
) -> None:
    async def script(call: Call) -> None:
        await call.wait_disconnected()
        await then(call)

    body = chat("MARKER")
    async with (
        FakeUpstream(script) as a,
        FakeUpstream(script) as b,
        FakeUpstream(script) as c,
        serve(a, b, c, **{**features, **INFERENCE}) as app,
        RawClient(app.url) as client,
    ):
        if body_is == "whole":
            await post(client, body)
        else:
            await client.send(head("POST", UPLOAD, body, [MULTIPART]) + body)
        await until(lambda: n_delivered("MARKER", a, b, c) == 1)
        client.close()
        await until(lambda: len(finished()) == 1)
        async with RawClient(app.url) as other:
            assert (await other.request("GET", "/health")).status == 200
        assert n_delivered("MARKER", a, b, c) == 1
        assert (finished()[0]["outcome"], finished()[0]["attempts"]) == ("client_gone", "abandoned")


async def test_o11_a_client_that_leaves_the_waiting_room_is_not_served_later(
    serve: Serve, finished: Finished, until: Until, features: dict[str, Any], way: str
) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **features, health={"interval_s": 0.05}) as app:
        upstream.refuse()
        async with RawClient(app.url) as client:
            await post(client, chat("MARKER"))
            await wait_metric(app, "prefixroute_waiting", lambda n: n == 1)
            getattr(client, way)()
            await until(lambda: any(line["outcome"] == "client_gone" for line in finished()))
        await upstream.start()
        async with RawClient(app.url) as client:
            assert (await client.request(body=chat("LATER"))).status == 200
        assert (n_delivered("MARKER", upstream), n_delivered("LATER", upstream)) == (0, 1)


# ---------------------------------------------------------------------- O12: connection refused

SENT: dict[str, tuple[str, str, bytes | None, list[tuple[str, str]]]] = {
    "chat": ("POST", CHAT, chat("MARKER"), [JSON]),
    "get": ("GET", "/v1/files/MARKER", None, []),
    "head": ("HEAD", "/v1/files/MARKER", None, []),
    "delete": ("DELETE", "/v1/files/MARKER", None, []),
    "put": ("PUT", "/v1/files/MARKER", b"MARKER", []),
    "patch": ("PATCH", "/x", b"MARKER", []),
    "options": ("OPTIONS", "/x", None, []),
    "own_method": ("PROPFIND", "/x", b"MARKER", []),
    "upload": ("POST", UPLOAD, b"MARKER", [MULTIPART]),
    "responses": ("POST", "/v1/responses", b'{"model":"m","input":"MARKER"}', [JSON]),
}


@pytest.mark.parametrize(("method", "target", "body", "headers"), SENT.values(), ids=SENT)
async def test_o12_a_refused_connection_costs_one_attempt_and_no_second_delivery(
    serve: Serve,
    finished: Finished,
    method: str,
    target: str,
    body: bytes | None,
    headers: list[tuple[str, str]],
) -> None:
    async with FakeUpstream() as refuses, FakeUpstream() as takes, serve(refuses, takes) as app:
        await refuses.stop()
        async with RawClient(app.url) as client:
            answer = await client.request(method, target, body, headers)
        assert answer.status == 200
        assert [(call.method, call.target, call.body) for call in takes.calls] == [(method, target, body or b"")]
        assert (finished()[0]["attempts"], finished()[0]["upstream"]) == ("unreachable,answered", "gpu-1")


async def test_o12_a_streamed_body_goes_on_whole(serve: Serve, finished: Finished) -> None:
    """A body of unknown length is not taken from the client before there is a connection to put it on."""
    async with FakeUpstream() as refuses, FakeUpstream() as takes, serve(refuses, takes) as app:
        await refuses.stop()
        async with RawClient(app.url) as client:
            await client.send(head("POST", UPLOAD, None, [MULTIPART, CHUNKED]) + chunked(b"MAR", b"KER" * 100_000))
            assert (await client.answer()).status == 200
        assert takes.bodies == [b"MAR" + b"KER" * 100_000]
        assert finished()[0]["attempts"] == "unreachable,answered"


async def test_o12_affine_requests_too(serve: Serve) -> None:
    """The instance that holds the prefix is gone: the next one serves it."""
    body = chat("once upon a time " * 2_000 + "MARKER")
    async with (
        FakeUpstream() as a,
        FakeUpstream() as b,
        serve(a, b, routing={"strategy": "expected_latency"}) as app,
        RawClient(app.url) as client,
    ):
        for _ in range(3):
            assert (await client.request(body=body)).status == 200
        home, other = (a, b) if a.calls else (b, a)
        assert (len(home.calls), len(other.calls)) == (3, 0)
        await home.stop()
        assert (await client.request(body=body)).status == 200
        assert (len(home.calls), len(other.calls)) == (3, 1)


# ---------------------------------------------------------------------- O13: no retry after output


def _then(beginning: bytes, end: str) -> Script:
    async def script(call: Call) -> None:
        await call.send(beginning)
        getattr(call, end)()

    return script


OUTPUT = {
    "head": SSE_HEAD,
    "one_byte": SSE_HEAD + b"1\r\nd\r\n",
    "events": SSE_HEAD + b"%x\r\n%s\r\n" % (len(event("a")), event("a")),
    "head_with_length": OK[: OK.index(b"{")],
    "half_of_a_body": OK[:-1],
    "busy_half": b"HTTP/1.1 503 Busy\r\ncontent-length: 9\r\n\r\nbus",
    # Nothing of it went to the client, and yet the instance had begun: it is no less ambiguous than an output.
    "half_of_a_head": b"HTTP/1.1 200 O",
    "one_byte_of_a_head": b"H",
    "interim": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n",
}


@pytest.mark.parametrize("beginning", OUTPUT.values(), ids=OUTPUT)
@pytest.mark.parametrize("end", ["close", "reset"])
async def test_o13_what_had_begun_is_not_begun_again(
    serve: Serve, finished: Finished, beginning: bytes, end: str
) -> None:
    script = _then(beginning, end)
    is_busy = beginning.startswith(b"HTTP/1.1 503")
    async with FakeUpstream(script) as a, FakeUpstream(script) as b, serve(a, b, **INFERENCE) as app:
        async with RawClient(app.url) as client:
            await post(client, chat("MARKER", stream=True))
            answer = await client.answer()
        # A busy answer is a refusal by its head: the next instance may be asked.
        assert n_delivered("MARKER", a, b) == (2 if is_busy else 1)
        assert answer.status == 502 or not answer.complete
        assert finished()[0]["outcome"] == "broken"


@pytest.mark.parametrize("status", [*(s for s in range(400, 432) if s != 429), 451, 499, 500, 501, 502, 504, 529, 599])
async def test_o13_an_answer_is_an_answer(serve: Serve, status: int) -> None:
    script = json_answer({"error": {}}, status=status)
    async with FakeUpstream(script) as a, FakeUpstream(script) as b, serve(a, b, **INFERENCE) as app:
        async with RawClient(app.url) as client:
            answer = await client.request(body=chat("MARKER"))
        assert (answer.status, n_delivered("MARKER", a, b)) == (status, 1)


# ---------------------------------------------------------------------- O14: ambiguous death


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_o14_a_request_that_died_unanswered_is_delivered_once(serve: Serve, finished: Finished, end: str) -> None:
    async with (
        FakeUpstream(_then(b"", end)) as a,
        FakeUpstream() as b,
        serve(a, b) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request(body=chat("MARKER"))
        assert (answer.status, n_delivered("MARKER", a, b)) == (502, 1)
        assert finished()[0]["attempts"] == "unanswered"
        assert (await scrape(app))['prefixroute_attempts_total{outcome="unanswered"}'] == 1


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize(
    ("target", "n"), [(CHAT, 2), ("/v1/completions", 2), ("/v1/embeddings", 2), ("/v1/responses", 1), ("/x", 1)]
)
async def test_o14_where_it_is_asked_for_one_replay_of_what_can_be_computed_twice(
    serve: Serve, finished: Finished, end: str, target: str, n: int
) -> None:
    """Both deaths are counted, and the second is the last."""
    script = _then(b"", end)
    async with (
        FakeUpstream(script) as a,
        FakeUpstream(script) as b,
        FakeUpstream() as c,
        serve(a, b, c, **INFERENCE) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request("POST", target, chat("MARKER"))
        assert (answer.status, n_delivered("MARKER", a, b, c)) == (502, n)
        assert finished()[0]["attempts"] == ",".join(["unanswered"] * n)
        assert (await scrape(app))['prefixroute_attempts_total{outcome="unanswered"}'] == n


async def test_o14_a_replay_that_is_answered(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream(_then(b"", "reset")) as a, FakeUpstream() as b, serve(a, b, **INFERENCE) as app:
        async with RawClient(app.url) as client:
            assert (await client.request(body=chat("MARKER"))).status == 200
        assert (n_delivered("MARKER", a), n_delivered("MARKER", b)) == (1, 1)
        assert finished()[0]["attempts"] == "unanswered,answered"


async def test_o14_a_streamed_body_is_never_replayed(serve: Serve) -> None:
    async with FakeUpstream(_then(b"", "reset")) as a, FakeUpstream() as b, serve(a, b, **INFERENCE) as app:
        async with RawClient(app.url) as client:
            answer = await client.request("POST", CHAT, b"MARKER", [MULTIPART])
        assert (answer.status, n_delivered("MARKER", a, b)) == (502, 1)


# ---------------------------------------------------------------------- O15: idle connections


async def test_o15_the_router_closes_first(serve: Serve) -> None:
    """Its limit is below the instance's, which here never closes."""
    async with FakeUpstream() as upstream, serve(upstream, upstream={"keepalive_s": 0.05}) as app:
        async with RawClient(app.url) as client:
            assert (await client.request(body=chat())).status == 200
        await upstream.wait_connections(0)


@pytest.mark.parametrize("said", ["timeout=1", "timeout=1, max=100", "max=5, timeout=0", "timeout=0"])
async def test_o15_an_instance_that_says_how_long_it_waits_is_believed(serve: Serve, said: str) -> None:
    script = raw_answer(b"ok", headers=f"Connection: keep-alive\r\nKeep-Alive: {said}\r\n")
    async with FakeUpstream(script) as upstream, serve(upstream, upstream={"keepalive_s": 3600.0}) as app:
        async with RawClient(app.url) as client:
            assert (await client.request(body=chat())).status == 200
        await upstream.wait_connections(0)


@pytest.mark.parametrize("n", [1, 2, 3])
async def test_o15_an_instance_that_says_how_many_it_takes_gets_no_more(serve: Serve, n: int) -> None:
    left = iter(range(n - 1, -1, -1))

    async def script(call: Call) -> None:
        await raw_answer(b"ok", headers=f"Keep-Alive: timeout=60, max={next(left)}\r\n")(call)

    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for _ in range(n):
            assert (await client.request(body=chat())).status == 200
        await upstream.wait_connections(0)


@pytest.mark.parametrize(
    "answer",
    [
        OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        OK.replace(b"\r\n\r\n", b"\r\nConnection: Keep-Alive, Close\r\n\r\n"),
        OK.replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
)
async def test_o15_a_connection_that_is_to_end_carries_no_further_request(serve: Serve, answer: bytes) -> None:
    """Here the instance does not close it after all, and would wait."""
    async with FakeUpstream(answers(answer)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for _ in range(3):
            assert (await client.request(body=chat())).status == 200
        assert [call.reused for call in upstream.calls] == [False] * 3


@pytest.mark.parametrize("way_out", ["reset_at_next", "close", "reset"])
async def test_o15_a_connection_that_the_instance_closes_costs_no_request(
    serve: Serve, finished: Finished, way_out: str
) -> None:
    """Between two requests, or just as the next one arrives."""

    async def script(call: Call) -> None:
        await call.send(OK)
        getattr(call, way_out)()

    async with FakeUpstream(script) as upstream, serve(upstream, retry={"budget_ratio": 0.0}) as app:
        async with RawClient(app.url) as client:
            for i in range(5):
                answer = await client.request(body=chat(f"MARKER-{i}."))
                # A reset may overtake the answer itself, which is not the case here.
                assert answer.status == 200 or way_out == "reset"
        for i in range(5):
            assert n_delivered(f"MARKER-{i}.", upstream) == 1
        assert all(line["attempts"] in ("answered", "stale,answered") for line in finished()) or way_out == "reset"


async def test_o15_a_burst_after_idling_meets_no_dead_connection(serve: Serve) -> None:
    """What the instance has closed in the meantime is seen before a request is put on it."""
    n = 20
    together = asyncio.Barrier(n)

    async def script(call: Call) -> None:
        await together.wait()
        await call.send(OK)
        call.close()

    async with FakeUpstream(script) as upstream, serve(upstream) as app:

        async def ask(marker: str) -> int:
            async with RawClient(app.url) as client:
                return (await client.request(body=chat(marker))).status

        for turn in range(3):
            markers = [f"MARKER-{turn}-{i}." for i in range(n)]
            assert await asyncio.gather(*map(ask, markers)) == [200] * n
            assert [n_delivered(marker, upstream) for marker in markers] == [1] * n


# ---------------------------------------------------------------------- O16: pool limit


@asynccontextmanager
async def _open_streams(app: App, n: int) -> AsyncIterator[list[RawClient]]:
    clients = [RawClient(app.url) for _ in range(n)]
    try:
        for client in clients:
            await client.__aenter__()
            await post(client, chat(stream=True))
        yield clients
    finally:
        for client in clients:
            await client.__aexit__(None, None, None)


async def test_o16_three_hundred_streams_reach_the_instances_at_once(serve: Serve, finished: Finished) -> None:
    """None is answered before all have arrived."""
    all_here = asyncio.Event()

    async def script(call: Call) -> None:
        await all_here.wait()
        await call.send(SSE_HEAD)
        await call.send_chunk(event("a"))
        await call.send_chunk(b"")

    async with (
        FakeUpstream(script) as a,
        FakeUpstream(script) as b,
        serve(a, b) as app,
        _open_streams(app, 300) as clients,
    ):
        await a.wait_calls(150)
        await b.wait_calls(150)
        seen = await scrape(app)
        assert [seen[f'prefixroute_in_flight{{upstream="gpu-{i}"}}'] for i in (0, 1)] == [150, 150]
        all_here.set()
        for client in clients:
            answer = await client.answer()
            assert (answer.status, answer.complete) == (200, True)
    assert {line["outcome"] for line in finished()} == {"ok"}


async def test_o16_a_limit_is_answered_in_words_and_not_by_silence(serve: Serve, finished: Finished) -> None:
    """One may be held, and one more is told to come back."""
    table = {"strategy": "expected_latency", "expected_latency": {"max_held": 1, "hold_s": 0.0}}
    story = "once upon a time there was a router " * 3_000
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await call.send(OK)

    async with FakeUpstream(script) as upstream, serve(upstream, routing=table) as app:
        async with RawClient(app.url) as first, RawClient(app.url) as held, RawClient(app.url) as told:
            await post(first, chat(story, stream=True))
            await upstream.wait_calls(1)
            await post(held, chat("other " + story, stream=True))
            await wait_metric(app, "prefixroute_held_requests", lambda n: n == 1)
            answer = await told.request(body=chat("third " + story, stream=True))
            assert answer.status == 429
            assert int(answer.header("retry-after") or 0) >= 1
            release.set()
            assert [(await client.answer()).status for client in (first, held)] == [200, 200]
        assert len(upstream.calls) == 2


# ---------------------------------------------------------------------- O17: early answers

EARLY = {
    "401": b"HTTP/1.1 401 No\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    "413": b"HTTP/1.1 413 No\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    "chunked": b"HTTP/1.1 429 No\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"{}"),
    "200": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("said", EARLY.values(), ids=EARLY)
@pytest.mark.parametrize("way_out", ["close", "reset_later", "stay"])
@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "chunked"])
@pytest.mark.parametrize("kind", [MULTIPART, ("Content-Type", "application/octet-stream")])
async def test_o17_an_early_answer_reaches_a_client_in_the_middle_of_its_upload(
    serve: Serve, said: bytes, way_out: str, is_declared: bool, kind: tuple[str, str]
) -> None:
    """The client sends on only once it has the answer, and then something else: no byte of the body is taken for it."""
    body = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n" * 40_000

    async def script(call: Call) -> None:
        if call.target == "/next":
            await call.send(OK)
            return
        await call.read(30_000)
        await call.send(said)
        if way_out == "close":
            call.close()
        elif way_out == "reset_later":
            await call.read(1)
            call.reset()
        else:
            await call.read(len(body))

    if is_declared:
        sent = head("POST", "/upload", body, [kind]) + body
    else:
        sent = head("POST", "/upload", None, [kind, CHUNKED]) + chunked(body[:100_000], body[100_000:])
    async with FakeUpstream(script, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(sent[:65_536])
        answer = await client.answer()
        assert (answer.status, answer.body, answer.complete) == (int(said[9:12]), b"{}", True)
        if answer.header("connection") != "close":
            await client.send(sent[65_536:])
            # By then the router has read it, and nothing but a new head can come.
            async with RawClient(app.url) as other:
                for _ in range(20):
                    await other.request("GET", "/health")
            assert (await client.request("GET", "/next")).body == b'{"ok":true}'
            assert [call.target for call in upstream.calls] == ["/upload", "/next"]
        assert [call.target for call in upstream.calls][:1] == ["/upload"]


@pytest.mark.parametrize("said", EARLY.values(), ids=EARLY)
async def test_o17_an_early_answer_to_a_body_that_was_read_to_be_routed(serve: Serve, said: bytes) -> None:
    """It is sent to the instance whole, which takes 64 KB of it, answers and closes."""

    async def script(call: Call) -> None:
        if call.target == "/next":
            await call.send(OK)
            return
        await call.read(65_536)
        await call.send(said)
        call.close()

    body = chat("x" * 20_000_000)
    async with FakeUpstream(script, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=body)
        assert (answer.status, answer.body, answer.complete) == (int(said[9:12]), b"{}", True)
        assert (await client.request("GET", "/next")).status == 200


# ---------------------------------------------------------------------- O18: Expect


@pytest.mark.parametrize("target", [CHAT, UPLOAD, "/v1/messages", "/x"])
@pytest.mark.parametrize("expected", ["100-continue", "100-Continue"])
@pytest.mark.parametrize("framing", ["declared", "chunked"])
async def test_o18_a_client_that_waits_is_told_to_go_on_and_answered_once(
    serve: Serve, target: str, expected: str, framing: str
) -> None:
    body = chat("MARKER")
    headers = [("Expect", expected), JSON]
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        if framing == "declared":
            await client.send(head("POST", target, body, headers))
        else:
            await client.send(head("POST", target, None, [*headers, CHUNKED]))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body if framing == "declared" else chunked(body))
        answer = await client.answer()
        assert (answer.status, answer.interim) == (200, ())
        (call,) = upstream.calls
        # It has been met on this side; the instance sees a request like any other.
        assert (call.body, call.header("expect")) == (body, None)
        assert (await client.request("GET", "/next")).status == 200


async def test_o18_a_client_that_does_not_wait_is_answered_once(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=chat("MARKER"), headers=[("Expect", "100-continue")])
        assert (answer.status, [one.status for one in answer.interim]) == (200, [100])
        assert n_delivered("MARKER", upstream) == 1


async def test_o18_the_instances_own_100_is_not_a_second_one(serve: Serve) -> None:
    script = answers(b"HTTP/1.1 100 Continue\r\n\r\n", OK)
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=chat(), headers=[("Expect", "100-continue")])
        assert (answer.status, [one.status for one in answer.interim]) == (200, [100])
        # And none for who asked for none.
        assert (await client.request(body=chat())).interim == ()


async def test_o18_what_will_be_refused_is_not_asked_for(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, limits={"max_body_bytes": 1024}) as app:
        for target in (CHAT, UPLOAD):
            async with RawClient(app.url) as client:
                await client.send(head("POST", target, b"x" * 1025, [("Expect", "100-continue")]))
                answer = await client.answer()
                assert (answer.status, answer.interim) == (413, ())
        assert upstream.calls == []


async def test_o18_an_old_client_knows_no_continue(serve: Serve) -> None:
    body = chat()
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(
            b"POST %s HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n%s"
            % (CHAT.encode(), len(body), body)
        )
        answer = await client.answer()
        assert (answer.status, answer.interim, upstream.bodies) == (200, (), [body])


async def test_o18_another_expectation_is_refused_and_its_body_is_no_request(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, chat(), [("Expect", "miracles")]) + chat())
        answer = await client.answer()
        assert answer.status == 417
        assert upstream.calls == []
