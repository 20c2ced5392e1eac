"""Bodies on their way up: large, streamed, refused, answered early."""

import asyncio
import gc
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from random import Random
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import chunked, head
from prefixroute.testing.upstream import json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"
UPLOAD = "/v1/audio/transcriptions"
MULTIPART = [("Content-Type", "multipart/form-data; boundary=x")]
CHUNKED = [("Transfer-Encoding", "chunked")]


async def test_a_large_json_body_is_taken(serve: Serve, finished: Finished) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 6_500_000}}]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    assert len(body) > 25_000_000
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request(body=body)).status == 200
        assert upstream.bodies == [body]
        assert upstream.calls[0].header("content-length") == str(len(body))
        assert finished()[0]["body_bytes"] == len(body)


@pytest.mark.parametrize("declared", [True, False])
async def test_an_upload_is_streamed_at_the_pace_of_the_instance(serve: Serve, declared: bool) -> None:
    """20 MB go up, and while the instance takes nothing the client is held up, not the router's memory filled."""
    body = Random(1).randbytes(20_000_000)
    sent = 0

    async def script(call: Call) -> None:
        await go.wait()
        assert await call.read_body() == body
        await json_answer({"ok": True})(call)

    async def upload(client: RawClient) -> None:
        nonlocal sent
        await client.send(head("POST", UPLOAD, body if declared else None, MULTIPART + ([] if declared else CHUNKED)))
        for at in range(0, len(body), 100_000):
            piece = body[at : at + 100_000]
            await client.send(piece if declared else b"%x\r\n%s\r\n" % (len(piece), piece))
            sent += len(piece)
        if not declared:
            await client.send(b"0\r\n\r\n")

    go = asyncio.Event()
    async with FakeUpstream(script, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        uploading = asyncio.create_task(upload(client))
        # The call is there long before its body is.
        await upstream.wait_calls(1)
        async with RawClient(app.url) as other:
            before = -1
            # What sockets and buffers of a fixed size hold has gone; then nothing moves.
            while sent != before:
                before = sent
                for _ in range(50):
                    assert (await other.request("GET", "/health")).status == 200
        assert sent < 15_000_000
        go.set()
        await uploading
        assert (await client.answer()).status == 200
        assert (await client.request("GET", "/health")).status == 200


async def test_multipart_is_streamed_whatever_the_route(serve: Serve) -> None:
    async def script(call: Call) -> None:
        assert await call.read(4) == b"half"
        taken.set()
        await call.read(4)
        await json_answer({"ok": True})(call)

    taken = asyncio.Event()
    async with FakeUpstream(script, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, b"halfhalf", MULTIPART) + b"half")
        await taken.wait()
        await client.send(b"half")
        assert (await client.answer()).status == 200


async def test_each_piece_of_an_upload_goes_up_before_the_next_is_sent(serve: Serve) -> None:
    async def script(call: Call) -> None:
        for i in range(10):
            assert await call.read(6) == b"1\r\n%d\r\n" % i
            taken.set()
        assert await call.read(5) == b"0\r\n\r\n"
        await json_answer({"ok": True})(call)

    taken = asyncio.Event()
    async with FakeUpstream(script, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", "/unknown", None, CHUNKED))
        for i in range(10):
            await client.send(b"1\r\n%d\r\n" % i)
            await taken.wait()
            taken.clear()
        await client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 200


# ---------------------------------------------------------------------- too large


@pytest.mark.parametrize("target", [CHAT, "/v1/messages", UPLOAD, "/unknown"])
async def test_a_body_that_says_that_it_is_too_large_is_refused(serve: Serve, finished: Finished, target: str) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, limits={"max_body_bytes": 2000}) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request("POST", target, b"x" * 2001)
        assert (answer.status, answer.header("connection")) == (413, "close")
        document = json.loads(answer.body)
        if target == "/v1/messages":
            assert document["error"]["type"] == "request_too_large"
        else:
            assert (document["error"]["code"], document["error"]["type"]) == ("body_too_large", "invalid_request_error")
        assert "2000" in document["error"]["message"]
        assert upstream.calls == []
        assert (finished()[0]["outcome"], finished()[0]["error"]) == ("refused", "body_too_large")
        async with RawClient(app.url) as other:
            assert (await other.request("POST", target, b"x" * 2000)).status == 200


@pytest.mark.parametrize("target", [CHAT, UPLOAD])
async def test_a_body_that_turns_out_too_large_is_refused(serve: Serve, finished: Finished, target: str) -> None:
    async def script(call: Call) -> None:
        await call.read_body()
        pytest.fail("the body came to an end")

    async with (
        FakeUpstream(script, by_hand=True) as upstream,
        serve(upstream, limits={"max_body_bytes": 1_000_000}) as app,
        RawClient(app.url) as client,
    ):
        with suppress(ConnectionError):
            await client.send(head("POST", target, None, CHUNKED) + chunked(*[b"x" * 100_000] * 11))
        answer = await client.answer()
        assert answer.status == 413
        await upstream.wait_connections(0)
        assert (finished()[0]["outcome"], finished()[0]["error"]) == ("refused", "body_too_large")
        # It was not the instance's fault.
        assert app.router.fleet.state("gpu-0").state.value == "up"
        assert finished()[0]["attempts"] == (None if target == CHAT else "abandoned")


# ---------------------------------------------------------------------- answers that come before the body's end

HEADS = {
    "length": b"HTTP/1.1 401 No\r\nContent-Length: 12\r\n\r\nwho are you?",
    "close": b"HTTP/1.1 413 No\r\nConnection: close\r\nContent-Length: 12\r\n\r\nwho are you?",
    "chunked": b"HTTP/1.1 401 No\r\nTransfer-Encoding: chunked\r\n\r\nc\r\nwho are you?\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("said", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("target", [CHAT, UPLOAD])
@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("declared", [True, False])
async def test_an_early_answer_reaches_a_client_that_is_still_sending(
    serve: Serve, finished: Finished, said: bytes, target: str, closes: bool, declared: bool
) -> None:
    async def script(call: Call) -> None:
        if call.reused or call.target == "/x":
            await json_answer({"ok": True})(call)
            return
        await call.read(64_000)
        await call.send(said)
        if closes:
            call.close()
        else:
            # The connection is of no use to anybody: the router lets go of it in the middle of the body.
            await call.read(len(body))

    body = b"x" * 20_000_000
    async with FakeUpstream(script, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        if declared:
            request = head("POST", target, body) + body
        else:
            request = head("POST", target, None, CHUNKED) + chunked(body[:500_000], body[500_000:])
        sending = asyncio.create_task(client.send(request))
        answer = await client.answer()
        assert (answer.status, answer.body) == (int(said[9:12]), b"who are you?")
        assert answer.complete
        await sending
        # What was not read of the body is no request, neither here nor there.
        assert (await client.request("GET", "/x")).status == 200
        assert [call.target for call in upstream.calls] == [target, "/x"]
        assert not upstream.calls[1].reused
        assert finished()[0]["outcome"] == "client_error"


async def test_an_early_answer_goes_on_while_the_body_does(serve: Serve) -> None:
    """Both ways at once: what an instance makes of the first half is there before the second."""

    async def script(call: Call) -> None:
        await call.read(4)
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.send_chunk(b"HALF")
        await call.read(4)
        await call.send_chunk(b"half")
        await call.send_chunk(b"")

    async with FakeUpstream(script, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", UPLOAD, b"halfhalf") + b"half")
        await client.begin()
        assert await client.chunk() == b"HALF"
        await client.send(b"half")
        assert await client.chunk() == b"half"
        assert await client.chunk() == b""


async def test_an_instance_that_leaves_before_the_last_chunk_is_no_fault_of_the_routers(
    serve: Serve, finished: Finished
) -> None:
    """What cannot be written then is nobody's news: neither a line in the log nor a warning at the end."""

    async def script(call: Call) -> None:
        await call.read(9)
        await call.send(HEADS["close"])
        call.close()

    async with FakeUpstream(script, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", UPLOAD, None, CHUNKED) + b"4\r\nhalf\r\n")
        assert (await client.answer()).status == 413
        await upstream.wait_connections(0)
        await client.send(b"0\r\n\r\n")
        assert (await client.request("GET", "/health")).status == 200
        gc.collect()


async def test_a_client_that_stops_sending_still_gets_the_early_answer(serve: Serve) -> None:
    async def script(call: Call) -> None:
        await call.read(4)
        await call.send(HEADS["length"])
        call.close()

    async with FakeUpstream(script, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", UPLOAD, b"x" * 1_000_000) + b"half")
        answer = await client.answer()
        assert (answer.status, answer.body) == (401, b"who are you?")
