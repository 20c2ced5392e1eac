"""Connections that plain requests come on: which lane takes what, and that its states let go of nothing."""

import asyncio
import gc
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from prefixroute.app import App
from prefixroute.http.arrival import Arrival
from prefixroute.testing import Call, FakeUpstream, RawAnswer, RawClient
from prefixroute.testing.client import chunked, head
from prefixroute.testing.upstream import json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Finished = Callable[[], list[dict[str, Any]]]

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
PLAIN = head("POST", CHAT, BODY) + BODY
MODELS = head("GET", "/v1/models", None)
WAYS = ["close", "reset", "half_close"]
# Beyond any test, where it must not matter.
LONG_S = 3600.0


def lanes(finished: Finished) -> list[str]:
    """Of the requests that are over, in order."""
    return [line["lane"] for line in finished()]


def plain(name: str, body: bytes = BODY) -> bytes:
    """A plain request with this id."""
    return head("POST", CHAT, body, [("x-request-id", name)]) + body


async def silent(call: Call) -> None:
    await call.wait_disconnected()


def after(event: asyncio.Event) -> Callable[[Call], Awaitable[None]]:
    """A script that answers once `event` is set."""

    async def script(call: Call) -> None:
        await event.wait()
        await json_answer({"id": call.header("x-request-id")})(call)

    return script


async def turns(app: App, n: int = 20) -> None:
    """Lets the router do what it can: so many requests of somebody else are answered meanwhile."""
    async with RawClient(app.url) as other:
        for _ in range(n):
            assert (await other.request("GET", "/health")).status == 200


async def said(client: RawClient, data: bytes, method: str = "POST") -> RawAnswer:
    await client.send(data)
    return await client.answer(method)


async def counted(app: App) -> dict[str, int]:
    """Requests by lane, as `/metrics` has them."""
    assert app.admin_url is not None
    async with RawClient(app.admin_url) as client:
        text = (await client.request("GET", "/metrics")).body.decode()
    found: dict[str, int] = {}
    for lane, n in re.findall(r'^prefixroute_requests_total\{.*lane="([^"]*)".*\} (\S+)$', text, re.MULTILINE):
        found[lane] = found.get(lane, 0) + int(float(n))
    return found


# Which lane takes what


@pytest.mark.parametrize(
    ("data", "lane"),
    [
        (PLAIN, "fast"),
        (plain("an-id"), "fast"),
        (PLAIN.replace(CHAT.encode(), b"/v1/completions"), "fast"),
        (PLAIN.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer k\r\nContent-Type: application/json\r\n\r\n"), "fast"),
        (PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"), "aiohttp"),
        (PLAIN.replace(b" HTTP/1.1", b"?beta=true HTTP/1.1"), "fast"),
        (PLAIN.replace(b" HTTP/1.1", b"?a=%20b HTTP/1.1"), "aiohttp"),
        (PLAIN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), "aiohttp"),
        (PLAIN.replace(b"\r\n\r\n", b"\r\nX-Twice: a\r\nX-Twice: b\r\n\r\n"), "aiohttp"),
        (head("POST", CHAT, None, [("Transfer-Encoding", "chunked")]) + chunked(BODY), "aiohttp"),
        (head("POST", "/v1/audio/transcriptions", BODY) + BODY, "aiohttp"),
        (head("POST", "/v1/any", BODY) + BODY, "aiohttp"),
        (MODELS, "aiohttp"),
        (head("GET", "/health", None), "aiohttp"),
    ],
)
async def test_requests_are_counted_by_lane(serve: Serve, data: bytes, lane: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream, admin={"port": 0}) as app:
        async with RawClient(app.url) as client:
            assert (await said(client, data, data.split(b" ")[0].decode())).status == 200
        assert await counted(app) == {lane: 1}


async def test_one_lane_turns_the_fast_one_off(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, admin={"port": 0}, lane="aiohttp") as app:
        async with RawClient(app.url) as client:
            assert (await said(client, PLAIN)).status == 200
        assert await counted(app) == {"aiohttp": 1}


async def test_a_connection_goes_from_lane_to_lane_and_back(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for n in range(3):
            assert (await said(client, plain(f"a{n}"))).header("x-request-id") == f"a{n}"
            assert (await said(client, MODELS, "GET")).status == 200
            assert (await said(client, head("GET", "/health", None), "GET")).status == 200
        assert (await said(client, PLAIN)).status == 200
        assert lanes(finished) == [*(["fast", "aiohttp", "aiohttp"] * 3), "fast"]


async def test_a_head_in_pieces_is_read_by_aiohttp_and_the_next_one_is_plain_again(
    serve: Serve, until: Until, finished: Finished
) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(PLAIN[:50])
        await turns(app)
        assert (await said(client, PLAIN[50:])).status == 200
        assert (await said(client, PLAIN)).status == 200
        assert upstream.bodies == [BODY, BODY]
        assert [line["lane"] for line in finished() if line["route"] == CHAT] == ["aiohttp", "fast"]


async def test_an_idle_connection_keeps_nothing_of_its_last_request(serve: Serve) -> None:
    soon = {"keepalive_s": 0.05}
    async with FakeUpstream() as upstream, serve(upstream, upstream=soon) as app, RawClient(app.url) as client:
        assert (await said(client, plain("a"))).status == 200
        assert (await said(client, plain("b"))).status == 200
        # This is about the client's connection only.
        await upstream.wait_connections(0)
        await turns(app)
        gc.collect()
        assert [one for one in gc.get_objects() if isinstance(one, Arrival) and one.request_id in ("a", "b")] == []


async def test_a_reload_applies_to_open_connections(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await said(client, PLAIN)).status == 200
        app.apply(app.settings.model_copy(update={"lane": "aiohttp"}))
        assert (await said(client, PLAIN)).status == 200
        assert (await said(client, PLAIN)).status == 200
        app.apply(app.settings.model_copy(update={"lane": "auto"}))
        assert (await said(client, PLAIN)).status == 200
        assert lanes(finished) == ["fast", "aiohttp", "aiohttp", "fast"]


@pytest.mark.parametrize("n_bytes", [1024, 1025])
async def test_a_body_above_its_limit_is_refused_as_ever(serve: Serve, finished: Finished, n_bytes: int) -> None:
    body = b"x" * n_bytes
    limits = {"max_body_bytes": 1024}
    async with FakeUpstream() as upstream, serve(upstream, limits=limits) as app, RawClient(app.url) as client:
        answer = await said(client, head("POST", CHAT, body) + body)
        assert (answer.status, answer.header("connection")) == ((200, None) if n_bytes == 1024 else (413, "close"))
        assert lanes(finished) == ["fast" if n_bytes == 1024 else "aiohttp"]


async def test_a_unix_socket_behind_it(serve: Serve, until: Until, finished: Finished, tmp_path: Path) -> None:
    got = b""
    n_open = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got, n_open
        n_open += 1
        with suppress(asyncio.IncompleteReadError):
            while data := await reader.readuntil(b"\r\n\r\n"):
                if data.startswith(b"POST "):
                    got += data + await reader.readexactly(len(BODY))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()
        n_open -= 1

    # Within the length that sockets' paths may have.
    path = Path(f"/tmp/prefixroute-fast-{tmp_path.name[-20:]}.sock")
    async with await asyncio.start_unix_server(answer, path):
        try:
            async with serve(f"unix:{path}") as app, RawClient(app.url) as client:
                assert (await said(client, plain("an-id"))).body == b"{}"
            await until(lambda: not n_open)
        finally:
            path.unlink(missing_ok=True)
    assert got == (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nx-request-id: an-id\r\nContent-Length: %d\r\n\r\n%s"
        % (len(BODY), BODY)
    )
    assert lanes(finished) == ["fast"]


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls(serve: Serve, finished: Finished, tmp_path: Path, mutual: bool) -> None:
    ca = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(ca.cert_pem.bytes())
    own = ca.issue_cert("127.0.0.1")
    (tmp_path / "own.pem").write_bytes(b"".join(blob.bytes() for blob in own.cert_chain_pems))
    (tmp_path / "own.key").write_bytes(own.private_key_pem.bytes())
    tls = {"cert_file": str(tmp_path / "own.pem"), "key_file": str(tmp_path / "own.key")}
    if mutual:
        tls["client_ca_file"] = str(tmp_path / "ca.pem")
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    if mutual:
        context.load_cert_chain(tls["cert_file"], tls["key_file"])
    async with FakeUpstream() as upstream, serve(upstream, listen={"port": 0, "tls": tls}) as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port, ssl=context)
        long = BODY + b" " * 1_500_000
        for data in (PLAIN, MODELS, plain("long", long), PLAIN):
            writer.write(data)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            length = re.search(rb"\r\ncontent-length: (\d+)", answer, re.IGNORECASE)
            assert length is not None
            await reader.readexactly(int(length[1]))
        writer.close()
        with suppress(ssl.SSLError, ConnectionError):
            await writer.wait_closed()
    assert lanes(finished) == ["fast", "aiohttp", "fast", "fast"]
    assert [call.body for call in upstream.calls if call.method == "POST"] == [BODY, long, BODY]


# Several requests at once


async def test_pipelined_requests_are_answered_one_after_another_in_order(
    serve: Serve, until: Until, finished: Finished
) -> None:
    names = [f"r{n}" for n in range(8)]
    first = asyncio.Event()
    async with FakeUpstream(after(first)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(b"".join(map(plain, names)))
        await upstream.wait_calls(1)
        await turns(app)
        assert len(upstream.calls) == 1
        first.set()
        for name in names:
            answer = await client.answer()
            assert (answer.status, json.loads(answer.body)) == (200, {"id": name})
        assert [line["request_id"] for line in finished() if line["route"] == CHAT] == names
        assert {line["lane"] for line in finished() if line["route"] == CHAT} == {"fast"}


async def test_pipelined_requests_of_both_lanes_are_answered_in_order(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream(json_answer({"a": 1})) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(plain("r0") + plain("r1") + MODELS + plain("r2"))
        for name in ("r0", "r1", None, "r2"):
            answer = await client.answer()
            assert answer.status == 200
            assert name is None or answer.header("x-request-id") == name
        # What has come with a request that aiohttp reads is read by it.
        assert lanes(finished) == ["fast", "fast", "aiohttp", "aiohttp"]
        assert (await said(client, PLAIN)).status == 200
        assert lanes(finished)[-1] == "fast"


async def test_what_is_no_request_behind_plain_ones_is_refused_after_their_answers(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(PLAIN + PLAIN + b"rubbish\r\n\r\n")
        assert [(await client.answer()).status for _ in range(3)] == [200, 200, 400]
        assert await client.wait_closed() == b""
        assert upstream.bodies == [BODY, BODY]


async def test_much_behind_a_request_under_way_is_left_in_the_socket(serve: Serve) -> None:
    n_requests, body = 1_500, BODY + b" " * 2_000
    held = asyncio.Event()
    async with FakeUpstream(after(held)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        transport = client.writer.transport
        transport.set_write_buffer_limits(high=2**24)
        # Else the kernel would take it all.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        client.writer.write(b"".join(plain(f"r{n}", body) for n in range(n_requests)))
        await upstream.wait_calls(1)
        before = -1
        while transport.get_write_buffer_size() != before:
            before = transport.get_write_buffer_size()
            await turns(app)
        # Else all of it would be in the router's memory by now.
        assert before > 0
        held.set()
        for n in range(n_requests):
            assert json.loads((await client.answer()).body) == {"id": f"r{n}"}
        assert transport.get_write_buffer_size() == 0
        assert len(upstream.calls) == n_requests


# Clients that leave


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", [b"", PLAIN, MODELS])
async def test_a_client_that_leaves_during_a_silent_answer(
    serve: Serve, until: Until, finished: Finished, way: str, before: bytes
) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        if before:
            assert (await said(client, before, before.split(b" ")[0].decode())).status == 200
        upstream.script = silent
        n_before = len(upstream.calls)
        await client.send(PLAIN)
        call = (await upstream.wait_calls(n_before + 1))[-1]
        getattr(client, way)()
        await call.wait_disconnected()
        await until(lambda: not app.proxy.n_active)
        line = finished()[-1]
        assert (line["lane"], line["outcome"], line["status"]) == ("fast", "client_gone", None)


@pytest.mark.parametrize("way", WAYS)
async def test_a_client_that_leaves_while_its_body_is_still_coming(
    serve: Serve, until: Until, finished: Finished, way: str
) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(PLAIN[:-10])
        await until(lambda: app.proxy.n_active == 1)
        getattr(client, way)()
        await until(lambda: not app.proxy.n_active)
        (line,) = finished()
        assert (line["lane"], line["outcome"], line["body_bytes"]) == ("fast", "client_gone", len(BODY) - 10)
        assert upstream.calls == []


@pytest.mark.parametrize("way", WAYS)
async def test_a_client_that_leaves_while_it_is_not_being_read(
    serve: Serve, until: Until, finished: Finished, way: str
) -> None:
    """Nobody is told of that, so it is looked for: more came behind its request than is kept."""
    async with FakeUpstream(silent) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        client.writer.write(PLAIN + b"x" * 100_000)
        call = (await upstream.wait_calls(1))[0]
        await until(lambda: client.writer.transport.get_write_buffer_size() == 0)
        await turns(app)
        getattr(client, way)()
        await call.wait_disconnected()
        await until(lambda: not app.proxy.n_active)
        assert [line["outcome"] for line in finished() if line["route"] == CHAT] == ["client_gone"]


# Time


@pytest.mark.parametrize("behind", [b"", b"\r\n", b"\r\n\r\n"])
@pytest.mark.parametrize("before", [[PLAIN], [MODELS], [PLAIN, MODELS], [MODELS, PLAIN], [PLAIN, PLAIN]])
async def test_an_idle_connection_is_closed_whoever_answered_last(
    serve: Serve, before: list[bytes], behind: bytes
) -> None:
    limits = {"client_idle_timeout_s": 0.2, "client_head_timeout_s": LONG_S}
    async with FakeUpstream() as upstream, serve(upstream, limits=limits) as app, RawClient(app.url) as client:
        for data in before:
            assert (await said(client, data, data.split(b" ")[0].decode())).status == 200
        # Empty lines are no request, and no beginning of one.
        await client.send(behind)
        assert await client.wait_closed() == b""


async def test_the_first_head_has_its_time_since_the_client_came(serve: Serve) -> None:
    limits = {"client_head_timeout_s": 1.0}
    async with FakeUpstream() as upstream, serve(upstream, limits=limits) as app, RawClient(app.url) as client:
        await asyncio.sleep(0.7)
        # By then it would have begun anew.
        later = asyncio.create_task(asyncio.sleep(0.9))
        answer = await said(client, b"P")
        assert answer.status == 408
        assert not later.done()
        later.cancel()


@pytest.mark.parametrize("begun", [b"", b"P", PLAIN[:60]])
@pytest.mark.parametrize("before", [[], [PLAIN], [MODELS], [MODELS, PLAIN]])
async def test_a_head_has_to_arrive_in_time(serve: Serve, begun: bytes, before: list[bytes]) -> None:
    limits = {"client_head_timeout_s": 0.2, "client_idle_timeout_s": LONG_S}
    async with FakeUpstream() as upstream, serve(upstream, limits=limits) as app, RawClient(app.url) as client:
        for data in before:
            assert (await said(client, data, data.split(b" ")[0].decode())).status == 200
        if begun:
            answer = await said(client, begun)
            assert (answer.status, answer.header("connection")) == (408, "close")
        elif before:
            # Not until it has asked nothing for as long as an idle one may.
            await asyncio.sleep(0.5)
            assert (await said(client, PLAIN)).status == 200
            return
        assert await client.wait_closed() == b""


@pytest.mark.parametrize("first", [PLAIN, MODELS])
async def test_no_limit_of_an_idle_connection_counts_while_an_answer_is_under_way(serve: Serve, first: bytes) -> None:
    limits = {"client_head_timeout_s": 0.2, "client_idle_timeout_s": 0.2}

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.6)
        await json_answer({"ok": True})(call)

    async with FakeUpstream() as upstream, serve(upstream, limits=limits) as app, RawClient(app.url) as client:
        assert (await said(client, first, first.split(b" ")[0].decode())).status == 200
        upstream.script = slow
        assert (await said(client, PLAIN)).status == 200
        assert (await said(client, PLAIN)).header("connection") is None


# The end of the router


@asynccontextmanager
async def stoppable(serve: Serve, upstream: FakeUpstream, **tables: Any) -> AsyncIterator[tuple[App, asyncio.Event]]:
    """A router that stops once the event is set."""
    started: asyncio.Future[App] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def life() -> None:
        async with serve(upstream, **tables) as app:
            started.set_result(app)
            await leave.wait()

    living = asyncio.create_task(life())
    try:
        yield await started, leave
    finally:
        leave.set()
        await living


@pytest.mark.parametrize("before", [PLAIN, MODELS])
async def test_a_request_under_way_comes_to_its_end_when_the_router_stops(
    serve: Serve, until: Until, finished: Finished, before: bytes
) -> None:
    held = asyncio.Event()
    async with (
        FakeUpstream() as upstream,
        stoppable(serve, upstream, drain_timeout_s=LONG_S) as (app, leave),
        RawClient(app.url) as client,
        RawClient(app.url) as idle,
        RawClient(app.url) as new,
    ):
        for one in (client, idle):
            assert (await said(one, before, before.split(b" ")[0].decode())).status == 200
        upstream.script = after(held)
        n_before = len(upstream.calls)
        await client.send(PLAIN + PLAIN)
        await upstream.wait_calls(n_before + 1)
        leave.set()
        assert await idle.wait_closed() == b""
        assert await new.wait_closed() == b""
        held.set()
        answer = await client.answer()
        assert (answer.status, answer.header("connection"), answer.complete) == (200, "close", True)
        # The one behind it was not begun, so it may be sent again elsewhere.
        assert await client.wait_closed() == b""
        assert len(upstream.calls) == n_before + 1
    assert (finished()[-1]["lane"], finished()[-1]["outcome"]) == ("fast", "ok")


@pytest.mark.parametrize("data", [PLAIN, PLAIN[:-10]])
async def test_what_does_not_end_in_time_is_cut_off(
    serve: Serve, until: Until, finished: Finished, data: bytes
) -> None:
    async with (
        FakeUpstream(silent) as upstream,
        stoppable(serve, upstream, drain_timeout_s=0.1) as (app, leave),
        RawClient(app.url) as client,
    ):
        await client.send(data)
        await until(lambda: app.proxy.n_active == 1)
        leave.set()
        assert await client.wait_closed() == b""
    assert (finished()[-1]["lane"], finished()[-1]["outcome"]) == ("fast", "cut_off")


# Answers before the body is here


@pytest.fixture
def guarded(tmp_path: Path) -> dict[str, Any]:
    """Settings of a port that wants a key."""
    keys = tmp_path / "keys"
    keys.write_text("alice: key-of-alice-0123456789\n")
    keys.chmod(0o600)
    return {"listen": {"port": 0, "api_keys_file": str(keys)}}


async def test_a_refusal_before_a_short_body_is_here_keeps_the_connection(
    serve: Serve, finished: Finished, guarded: dict[str, Any]
) -> None:
    key = [("Authorization", "Bearer key-of-alice-0123456789")]
    async with FakeUpstream() as upstream, serve(upstream, **guarded) as app, RawClient(app.url) as client:
        answer = await said(client, PLAIN[:-10])
        assert (answer.status, answer.header("connection")) == (401, None)
        # In two pieces, and the next request with the last of them.
        await client.send(PLAIN[-10:-5])
        await turns(app)
        answer = await said(client, PLAIN[-5:] + head("POST", CHAT, BODY, key) + BODY)
        assert answer.status == 200
        assert upstream.bodies == [BODY]
        assert [line["lane"] for line in finished() if line["route"] == CHAT] == ["fast", "fast"]


async def test_a_refusal_before_a_long_body_is_here_ends_the_connection(
    serve: Serve, finished: Finished, guarded: dict[str, Any]
) -> None:
    body = BODY + b" " * 100_000
    async with FakeUpstream() as upstream, serve(upstream, **guarded) as app, RawClient(app.url) as client:
        answer = await said(client, head("POST", CHAT, body) + body[:100])
        assert (answer.status, answer.header("connection")) == (401, "close")
        # It is told before it has sent the rest, and can send it: a reset would overtake the answer.
        client.writer.write(body[100:])
        assert await client.wait_closed() == b""
        assert upstream.calls == []
        assert lanes(finished) == ["fast"]


async def test_a_body_that_never_comes_ends_the_connection_after_the_refusal(
    serve: Serve, finished: Finished, guarded: dict[str, Any]
) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **guarded) as app, RawClient(app.url) as client:
        assert (await said(client, PLAIN[:-10])).status == 401
        assert await client.wait_closed() == b""
        assert lanes(finished) == ["fast"]


async def test_a_body_that_is_too_long_is_refused_before_it_is_here(serve: Serve, finished: Finished) -> None:
    limits = {"max_body_bytes": 1024}
    async with FakeUpstream() as upstream, serve(upstream, limits=limits) as app, RawClient(app.url) as client:
        answer = await said(client, head("POST", CHAT, b"x" * 2_000) + b"x" * 10)
        assert (answer.status, answer.header("connection")) == (413, "close")
        client.writer.write(b"x" * 1_990)
        assert await client.wait_closed() == b""
        assert lanes(finished) == ["aiohttp"]


@pytest.mark.parametrize("n_bytes", [100_000, 3_000_000])
async def test_a_long_body_comes_whole_with_another_request_right_behind_it(
    serve: Serve, finished: Finished, n_bytes: int
) -> None:
    body = BODY + bytes(range(1, 251)) * (n_bytes // 250)
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for name in ("r0", "r1"):
            client.writer.write(plain(name, body) + PLAIN)
            assert (await client.answer()).header("x-request-id") == name
            assert (await client.answer()).status == 200
        assert upstream.bodies == [body, BODY, body, BODY]
        assert lanes(finished) == ["fast"] * 4


async def test_a_body_that_comes_in_pieces_is_sent_on_as_one(serve: Serve, until: Until, finished: Finished) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(PLAIN[: -len(BODY)])
        await until(lambda: app.proxy.n_active == 1)
        for byte in BODY[:-1]:
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert upstream.calls == []
        answer = await said(client, BODY[-1:] + PLAIN)
        assert answer.status == 200
        assert (await client.answer()).status == 200
        assert (upstream.bodies, lanes(finished)) == ([BODY, BODY], ["fast", "fast"])
        assert [call.header("transfer-encoding") for call in upstream.calls] == [None, None]
