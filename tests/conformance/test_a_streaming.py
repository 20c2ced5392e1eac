"""Section A of the failure cases: what a stream must not lose, gain or wait for."""

import asyncio
import random

import pytest

from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import chunked
from prefixroute.testing.upstream import Script, raw_answer
from tests.conformance import fast_time
from tests.conformance.harness import CHAT, SSE_HEAD, Finished, Serve, answers, chat, event, payload, post, sse

STREAMING_ROUTES = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/generate_stream", "/some/other/path"]
SSE_LINES = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


# ---------------------------------------------------------------------- O01: buffered stream

# An event of the size that the reports name; one cut in the middle of a line, of a character; single bytes.
LOCKSTEP = {
    "events": [event("x" * 140) for _ in range(5)],
    "half_events": [b'data: {"a"', b":1}\n", b"\n", "data: é\n\n".encode()[:7], "data: é\n\n".encode()[7:]],
    "bytes": [b"%c" % byte for byte in b"data: 1\n\n"],
    "lines_of_json": [b'{"response":"a","done":false}\n', b'{"response":"b","done":true}\n'],
    "crlf_events": [b"event: ping\r\ndata: {}\r\n\r\n", b": comment\r\n\r\n"],
}


@pytest.mark.parametrize("pieces", LOCKSTEP.values(), ids=LOCKSTEP)
@pytest.mark.parametrize("framing", ["chunked", "counted", "close"])
async def test_o01_each_piece_is_with_the_client_before_the_next_is_sent(
    serve: Serve, pieces: list[bytes], framing: str
) -> None:
    go_on = asyncio.Queue[None]()
    lines = {
        "chunked": b"transfer-encoding: chunked\r\n",
        "counted": b"content-length: %d\r\n" % sum(map(len, pieces)),
        "close": b"",
    }[framing]

    async def script(call: Call) -> None:
        await call.send(SSE_LINES + lines + b"\r\n")
        for piece in pieces:
            await go_on.get()
            await (call.send_chunk(piece) if framing == "chunked" else call.send(piece))
        await go_on.get()
        if framing == "chunked":
            await call.send_chunk(b"")
        elif framing == "close":
            call.close()

    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await post(client, chat(stream=True))
        # The head does not wait for a body, either.
        answer = await client.begin()
        assert answer.status == 200
        for piece in pieces:
            go_on.put_nowait(None)
            read = client.read if framing == "counted" else lambda n: payload(client, n)
            assert await read(len(piece)) == piece
        go_on.put_nowait(None)
        assert framing == "counted" or await client.chunk() == b""


@pytest.mark.parametrize("target", STREAMING_ROUTES)
async def test_o01_on_every_route_with_every_feature(serve: Serve, target: str, features: dict[str, object]) -> None:
    go_on = asyncio.Queue[None]()
    pieces = [event(str(i)) for i in range(4)]

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD)
        for piece in pieces:
            await go_on.get()
            await call.send_chunk(piece)
        await call.send_chunk(b"")

    async with FakeUpstream(script) as upstream, serve(upstream, **features) as app, RawClient(app.url) as client:
        await post(client, chat(stream=True), target)
        await client.begin()
        for piece in pieces:
            go_on.put_nowait(None)
            assert await client.chunk() == piece
        assert await client.chunk() == b""


async def test_o01_nothing_is_compressed_and_what_stops_others_from_buffering_survives(serve: Serve) -> None:
    lines = b"X-Accel-Buffering: no\r\nCache-Control: no-cache, no-transform\r\nConnection: keep-alive\r\n"
    answer = SSE_LINES + lines + b"transfer-encoding: chunked\r\n\r\n" + chunked(event("a"), event("b"))
    async with FakeUpstream(answers(answer)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        got = await client.request(body=chat(stream=True), headers=[("Accept-Encoding", "gzip, br, zstd")])
        assert got.body == event("a") + event("b")
        assert got.header("x-accel-buffering") == "no"
        assert got.all_headers("cache-control") == ["no-cache, no-transform"]
        assert got.all_headers("content-type") == ["text/event-stream"]
        assert got.header("content-encoding") is None
        assert upstream.calls[0].all_headers("accept-encoding") == ["gzip, br, zstd"]


# ---------------------------------------------------------------------- O02: very long line

LONG = {
    "sse_line": b"data: " + b"x" * 2_000_000 + b"\n\ndata: [DONE]\n\n",
    "sse_line_without_end": b"data: " + b"x" * 2_000_000,
    "no_line_end_at_all": b"y" * 2_000_000,
    "only_line_ends": b"\n" * 500_000,
    "long_field_name": b"z" * 700_000 + b": 1\n\n",
    "json": b'{"id":"resp_1","output":"' + b"x" * 2_000_000 + b'"}',
}


@pytest.mark.parametrize("body", LONG.values(), ids=LONG)
@pytest.mark.parametrize("target", [CHAT, "/v1/responses", "/v1/messages"])
async def test_o02_a_long_line_arrives_byte_for_byte(
    serve: Serve, finished: Finished, body: bytes, target: str
) -> None:
    script = sse(*(body[i : i + 90_001] for i in range(0, len(body), 90_001)))
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request("POST", target, chat(stream=True))
        assert answer.complete
        assert answer.body == body
        assert finished()[-1]["answer_bytes"] == len(body)


@pytest.mark.parametrize("framing", ["one_chunk", "counted", "close"])
async def test_o02_however_it_is_framed(serve: Serve, framing: str) -> None:
    body = LONG["sse_line"]
    script = {
        "one_chunk": sse(body),
        "counted": raw_answer(body, headers="content-type: text/event-stream\r\n"),
        "close": _until_close(body),
    }[framing]
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request(body=chat(stream=True))
        assert (answer.complete, answer.body == body) == (True, True)


# ---------------------------------------------------------------------- O03: peek buffers

# Around sizes that buffers, sockets and whoever peeks might have, and the case's own 40 KB.
SIZES = [n + d for n in (4_096, 16_384, 32_768, 65_536, 262_144) for d in (-1, 0, 1)] + [40_000, 1_000_000]


@pytest.mark.parametrize("n_bytes", SIZES)
async def test_o03_a_long_beginning_leaves_no_gap(serve: Serve, n_bytes: int) -> None:
    noise = random.Random(n_bytes)
    first = b"data: " + bytes(noise.choices(b'abcdefgh\\"{}[]:, ', k=n_bytes - 8)) + b"\n\n"
    pieces = [first, event("b"), event("c"), event("d")]
    async with FakeUpstream(sse(*pieces)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for target in (CHAT, "/v1/responses"):
            answer = await client.request("POST", target, chat(stream=True))
            assert answer.body == b"".join(pieces)


async def test_o03_however_the_bytes_are_cut(serve: Serve, features: dict[str, object]) -> None:
    """Cuts within chunk sizes, line ends and characters; head and body in one packet or in many."""
    async with FakeUpstream() as upstream, serve(upstream, **features) as app, RawClient(app.url) as client:
        for seed in range(20):
            noise = random.Random(seed)
            body = b"".join(event("é\r\n" * noise.randrange(400), index=i) for i in range(8)) + b"data: [DONE]\n\n"
            upstream.script = answers(*_cut(SSE_HEAD + chunked(*_cut(body, 12, noise)), 30, noise))
            answer = await client.request(body=chat(stream=True))
            assert (answer.complete, answer.body == body) == (True, True), seed


def _cut(whole: bytes, n: int, noise: random.Random) -> list[bytes]:
    at = sorted(noise.sample(range(1, len(whole)), n))
    return [whole[i:j] for i, j in zip([0, *at], [*at, len(whole)], strict=True)]


# ---------------------------------------------------------------------- O04: errors before the first token


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429, 500, 502, 503, 529])
@pytest.mark.parametrize("target", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("framing", ["counted", "chunked", "close"])
async def test_o04_a_refused_stream_is_the_refusal(serve: Serve, status: int, target: str, framing: str) -> None:
    body = b'{"error":{"message":"no","type":"BadRequest","code":%d}}' % status
    lines = b"HTTP/1.1 %d Because\r\nContent-Type: application/json\r\nRetry-After: 7\r\nX-Why: it\r\n" % status
    script = {
        "counted": answers(lines + b"Content-Length: %d\r\n\r\n" % len(body) + body),
        "chunked": answers(lines + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body)),
        "close": _until_close(body, lines),
    }[framing]
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request("POST", target, chat(stream=True), [("Accept", "text/event-stream")])
        assert (answer.status, answer.reason, answer.body, answer.complete) == (status, "Because", body, True)
        assert answer.all_headers("content-type") == ["application/json"]
        assert (answer.header("retry-after"), answer.header("x-why")) == ("7", "it")
        assert len(upstream.calls) == 1


# ---------------------------------------------------------------------- O05: half events

HALF = event("whole") + b'data: {"par'


def _breaks(beginning: bytes, end: str) -> Script:
    async def script(call: Call) -> None:
        await call.send(beginning)
        getattr(call, end)()

    return script


BEGINNINGS = {
    "chunked": SSE_HEAD + b"%x\r\n%s\r\n" % (len(HALF), HALF),
    "within_a_chunk": SSE_HEAD + b"%x\r\n%s" % (len(HALF) + 9, HALF),
    "within_a_size": SSE_HEAD + b"%x\r\n%s\r\n1" % (len(HALF), HALF),
    "before_the_last_line_end": SSE_HEAD + b"%x\r\n%s\r\n0\r\n" % (len(HALF), HALF),
    "counted": SSE_LINES + b"content-length: 5000\r\n\r\n" + HALF,
}


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
@pytest.mark.parametrize("target", [CHAT, "/v1/responses", "/v1/messages"])
async def test_o05_a_broken_stream_is_seen_to_be_broken_and_nothing_is_made_up(
    serve: Serve, finished: Finished, beginning: bytes, end: str, target: str
) -> None:
    async with FakeUpstream(_breaks(beginning, end)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await post(client, chat(stream=True), target)
        answer = await client.answer()
        assert answer.status == 200
        assert not answer.complete
        # A reset may overtake what was said before it; nothing may come instead.
        assert HALF.startswith(answer.body)
        if end == "close":
            assert answer.body == HALF
        assert (finished()[-1]["outcome"], finished()[-1]["status"]) == ("broken", 200)
        assert len(upstream.calls) == 1


async def test_o05_garbage_between_chunks_ends_the_stream_visibly(serve: Serve, finished: Finished) -> None:
    beginning = BEGINNINGS["chunked"] + b"no size\r\n"
    async with FakeUpstream(answers(beginning)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await post(client, chat(stream=True))
        answer = await client.answer()
        assert (answer.complete, HALF.startswith(answer.body)) == (False, True)
        assert finished()[-1]["outcome"] == "broken"


async def test_o05_a_stream_that_ends_with_its_connection_breaks_by_a_reset_only(serve: Serve) -> None:
    for end, complete in (("close", True), ("reset", False)):
        script = _breaks(SSE_LINES + b"\r\n" + HALF, end)
        async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
            await post(client, chat(stream=True))
            assert (await client.answer()).complete is complete


async def test_o05_an_old_client_sees_it_too(serve: Serve) -> None:
    """HTTP/1.0 has no chunks: an orderly close would be a clean end, so it is a reset."""
    script = _breaks(BEGINNINGS["chunked"], "close")
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        body = chat(stream=True)
        await client.send(b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
        assert not (await client.answer()).complete


# ---------------------------------------------------------------------- O06, O07: comments of somebody else's


async def test_o06_a_silent_stream_gets_nothing_of_the_routers_by_default_in_fast_time(serve: Serve) -> None:
    """30 s of silence on a loop whose clock runs faster (see `fast_time`)."""

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD)
        await asyncio.sleep(30)
        await call.send_chunk(event("late"))
        await call.send_chunk(b"")

    table = {**fast_time.SETTINGS, "patience_s": 10_000}
    async with FakeUpstream(script) as upstream, serve(upstream, **table) as app, RawClient(app.url) as client:
        await post(client, chat(stream=True))
        await client.begin()
        assert await client.chunk() == event("late")
        assert await client.chunk() == b""


async def test_o06_an_error_after_silence_can_still_be_said_in_fast_time(serve: Serve) -> None:
    """Silence before the head is the instance's to break: no head was made up for it."""

    async def script(call: Call) -> None:
        await asyncio.sleep(30)
        await raw_answer(b'{"error":{}}', status=400)(call)

    table = {**fast_time.SETTINGS, "patience_s": 10_000}
    async with FakeUpstream(script) as upstream, serve(upstream, **table) as app, RawClient(app.url) as client:
        answer = await client.request(body=chat(stream=True))
        assert (answer.status, answer.body) == (400, b'{"error":{}}')


async def test_o06_comments_that_are_asked_for_stand_between_complete_events_in_fast_time(serve: Serve) -> None:
    """Silence behind an event gets some, silence within one gets none, and an end that breaks is still broken."""
    half = event("b")[:9]

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD)
        for piece in (event("a"), half, event("b")[9:], half):
            await call.send_chunk(piece)
            await asyncio.sleep(60)
        call.close()

    table = {**fast_time.SETTINGS, "patience_s": 10_000}
    table["upstream"] = {**table["upstream"], "sse_comment_s": 15.0}
    async with FakeUpstream(script) as upstream, serve(upstream, **table) as app, RawClient(app.url) as client:
        answer = await client.request(body=chat(stream=True))
    comment = b": keep-alive\n\n"
    assert (answer.complete, answer.body.replace(comment, b"")) == (False, event("a") + event("b") + half)
    *commented, _ = answer.body.split(comment)
    so_far = b""
    for part in commented:
        so_far += part
        assert so_far in (event("a"), event("a") + event("b"))
    assert commented


BODIES = {
    "json": ("application/json", [b'{"choices":[', b'{"message":{"content":"hi"}}', b"]}"]),
    "ndjson": ("application/x-ndjson", [b'{"a":1}\n', b'{"a":2}\n']),
    "sagemaker_frames": ("application/vnd.amazon.eventstream", [b"\x00\x00\x00\x5d", b"\x00\xff" * 40]),
    "audio": ("audio/mpeg", [b"\xff\xfb", b"\x00" * 1000]),
    "text": ("text/plain", [b"", b"a", b"b"]),
    "nameless": (None, [b"{", b"}"]),
    "sse": ("text/event-stream", [b"data: {\n", b"data: }\n\n", b": theirs\n\n"]),
}


async def test_o07_nothing_is_inserted_into_any_body(serve: Serve, features: dict[str, object]) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **features) as app, RawClient(app.url) as client:
        for kind, pieces in BODIES.values():
            upstream.script = _slowly(kind, pieces)
            answer = await client.request(body=chat(stream=True))
            assert answer.body == b"".join(pieces)
            assert answer.all_headers("content-type") == ([] if kind is None else [kind])


async def test_o07_comments_that_are_asked_for_are_for_event_streams_only(serve: Serve) -> None:
    """Though they would be due several times in every silence."""
    table = {"upstream": {"sse_comment_s": 0.005}}
    async with FakeUpstream() as upstream, serve(upstream, **table) as app, RawClient(app.url) as client:
        for name, (kind, pieces) in BODIES.items():
            if name != "sse":
                upstream.script = _slowly(kind, pieces)
                assert (await client.request(body=chat(stream=True))).body == b"".join(pieces)


def _slowly(kind: str | None, pieces: list[bytes]) -> Script:
    async def script(call: Call) -> None:
        kinds = b"" if kind is None else b"content-type: %s\r\n" % kind.encode()
        await call.send(b"HTTP/1.1 200 OK\r\n" + kinds + b"transfer-encoding: chunked\r\n\r\n")
        for piece in filter(None, pieces):
            await call.send_chunk(piece)
            await asyncio.sleep(0.02)
        await call.send_chunk(b"")

    return script


# ---------------------------------------------------------------------- O08: requests and answers edited for accounting

REQUESTS = {
    "without_stream_options": chat(stream=True),
    "include_usage_false": chat(stream=True, stream_options={"include_usage": False}),
    "include_usage_true": chat(stream=True, stream_options={"include_usage": True}),
    "stream_options_null": chat(stream=True, stream_options=None),
    "stream_options_without_stream": chat(stream_options={"include_usage": True}),
    "n": chat(stream=True, n=3),
    "odd_spelling": b' \n{"stream" :true,"model":"m" , "messages":[ {"content":"\\u0068i"}],"seed":1e2}\r\n',
    "large_numbers": b'{"model":"m","messages":[],"stream":true,"seed":123456789012345678901234567890,"t":0.10}',
    "twice": b'{"model":"m","stream":false,"messages":[],"stream":true}',
}


async def test_o08_requests_arrive_as_sent(serve: Serve, features: dict[str, object]) -> None:
    script = sse(event("a"))
    async with FakeUpstream(script) as upstream, serve(upstream, **features) as app, RawClient(app.url) as client:
        for body in REQUESTS.values():
            assert (await client.request(body=body)).body == event("a")
            assert upstream.bodies[-1] == body
            assert upstream.calls[-1].all_headers("content-length") == [str(len(body))]


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}}\n\n'
ANSWERS = {
    "interleaved": [event(f"{i}", index=i % 3) for i in (0, 2, 1, 2, 0, 1, 1)],
    "usage_chunk": [event("a"), USAGE, b"data: [DONE]\n\n"],
    "usage_in_each": [event("a"), USAGE, event("b"), USAGE],
    "after_done": [b"data: [DONE]\n\n", event("late")],
    "no_done": [event("a")],
    "finish_and_usage_at_once": [event("a", finish_reason="stop") + USAGE + b"data: [DONE]\n\n"],
    "broken_json": [b"data: {\n\n", b"data: \xff\xfe\n\n", b"data:\n\n"],
}


async def test_o08_answers_arrive_as_sent(serve: Serve, features: dict[str, object]) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **features) as app, RawClient(app.url) as client:
        for pieces in ANSWERS.values():
            upstream.script = sse(*pieces)
            answer = await client.request(body=chat(stream=True, n=3))
            assert (answer.complete, answer.body) == (True, b"".join(pieces))


def _until_close(body: bytes, lines: bytes = SSE_LINES) -> Script:
    async def script(call: Call) -> None:
        await call.send(lines + b"\r\n" + body)
        call.close()

    return script
