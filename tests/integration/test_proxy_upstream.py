"""The upstream side alone: why no connection could be made, and what is kept of those that were."""

import asyncio
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from prefixroute.core.fleet import Instance
from prefixroute.errors import UpstreamBrokenError, UpstreamUnreachableError
from prefixroute.http.upstream import ConnectionLimits, Upstream, UpstreamRequest
from prefixroute.testing import Call, FakeUpstream
from prefixroute.testing.upstream import raw_answer

GET = UpstreamRequest("GET", "/x", [], None)


@asynccontextmanager
async def upstream_of(**settings: float) -> AsyncIterator[Upstream]:
    limits = ConnectionLimits(connect_timeout_s=5, keepalive_s=settings.get("keepalive_s", 4))
    upstream = Upstream(first_byte_timeout_s=None, idle_timeout_s=None, limits=limits)
    try:
        yield upstream
    finally:
        await upstream.close()


async def send(upstream: Upstream, url: str, request: UpstreamRequest = GET) -> bytes:
    answer = await upstream.send(Instance("gpu-0", url, 0), request)
    try:
        return await answer.whole(1_000_000) or b""
    finally:
        answer.close()
        answer.close()  # as often as one likes


class EnoughError(Exception):
    """Nothing more is wanted of an answer."""


def only_one(piece: bytes, is_last: bool) -> None:
    assert (piece, is_last) == (b"x", False)
    raise EnoughError


async def ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def speaks_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    writer.close()


async def test_a_certificate_that_nobody_vouches_for_is_no_connection() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    server = await asyncio.start_server(ends, "127.0.0.1", 0, ssl=context)
    async with upstream_of() as upstream:
        with pytest.raises(UpstreamUnreachableError) as caught:
            await send(upstream, f"https://localhost:{server.sockets[0].getsockname()[1]}")
    server.close()
    assert str(caught.value) == "gpu-0: its certificate was refused (unable to get local issuer certificate)"
    assert caught.value.nothing_sent
    assert not caught.value.timed_out


async def test_a_server_without_tls_is_no_connection() -> None:
    server = await asyncio.start_server(speaks_plainly, "127.0.0.1", 0)
    async with upstream_of() as upstream:
        with pytest.raises(UpstreamUnreachableError, match=r"^gpu-0: no TLS \([A-Z_]+\)$"):
            await send(upstream, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()


async def test_a_refused_connection_says_no_address() -> None:
    async with FakeUpstream() as fake, upstream_of() as upstream:
        await fake.stop()
        with pytest.raises(UpstreamUnreachableError) as caught:
            await send(upstream, fake.url)
    assert str(caught.value) == "gpu-0: Connection refused"


async def test_a_name_that_nobody_knows_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", nobody)
    async with upstream_of() as upstream:
        with pytest.raises(UpstreamUnreachableError, match=r"^gpu-0: Name or service not known$"):
            await send(upstream, "http://nowhere.test")


async def test_connections_that_have_been_idle_too_long_are_not_used() -> None:
    async with FakeUpstream(raw_answer(b"x")) as fake, upstream_of(keepalive_s=0.0) as upstream:
        for _ in range(3):
            assert await send(upstream, fake.url) == b"x"
    assert [call.reused for call in fake.calls] == [False, False, False]


@pytest.mark.parametrize("target", ["/x", "/x?y=z"])
async def test_an_instance_below_a_path_gets_it_in_front(target: str) -> None:
    async with FakeUpstream(raw_answer(b"x")) as fake, upstream_of() as upstream:
        assert await send(upstream, fake.url + "/base", UpstreamRequest("GET", target, [], None)) == b"x"
    assert fake.calls[0].target == "/base" + target


async def test_an_answer_that_is_let_go_early_costs_the_connection() -> None:
    async def streams(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        await call.wait_disconnected()

    async with FakeUpstream(streams) as fake, upstream_of() as upstream:
        answer = await upstream.send(Instance("gpu-0", fake.url, 0), GET)
        with pytest.raises(EnoughError):
            await answer.pour(only_one)
        answer.close()
        await fake.calls[0].wait_disconnected()
        await fake.wait_connections(0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts open files as Linux shows them")
async def test_a_kept_connection_is_held_once_whatever_it_carried() -> None:
    async with FakeUpstream(raw_answer(b"ok")) as fake, upstream_of() as upstream:
        await send(upstream, fake.url)
        n_open = len(list(Path("/proc/self/fd").iterdir()))
        await send(upstream, fake.url, UpstreamRequest("POST", "/x", [], b"x" * 100_000))
        assert fake.calls[1].reused
        assert len(list(Path("/proc/self/fd").iterdir())) == n_open


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts open files as Linux shows them")
async def test_no_socket_is_left_open_whatever_became_of_a_large_body(
    until: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    """Such an attempt holds its socket twice."""

    def n_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def any_end(call: Call) -> None:
        match call.target:
            case "/early":
                await call.read(1000)
                await call.send(b"HTTP/1.1 413 No\r\nContent-Length: 2\r\n\r\nno")
                call.close()
            case "/dies":
                await call.read(1000)
                call.reset()
            case _:
                await call.read_body()
                await raw_answer(b"ok")(call)

    async with FakeUpstream(any_end, by_hand=True) as fake, upstream_of() as upstream:
        await send(upstream, fake.url)  # what the loop opens for itself is open now
    n_before = n_open()
    async with FakeUpstream(any_end, by_hand=True) as fake, upstream_of() as upstream:
        for target in ("/early", "/dies", "/fine", "/early", "/dies", "/fine"):
            request = UpstreamRequest("POST", target, [], b"x" * 3_000_000)
            if target == "/dies":
                with pytest.raises(UpstreamBrokenError):
                    await send(upstream, fake.url, request)
            else:
                assert await send(upstream, fake.url, request) == (b"no" if target == "/early" else b"ok")
    async with asyncio.timeout(10):
        await until(lambda: n_open() == n_before)
