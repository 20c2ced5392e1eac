"""The upstream side alone: why no connection could be made, and what is kept of those that were."""

import asyncio
import errno
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from prefixroute.core.fleet import Instance
from prefixroute.errors import UpstreamBrokenError, UpstreamUnreachableError
from prefixroute.http.upstream import ConnectionLimits, Upstream, UpstreamRequest
from prefixroute.http.upstream.place import place_of
from prefixroute.http.upstream.pool import Pool
from prefixroute.names import Names
from prefixroute.testing import Call, FakeUpstream
from prefixroute.testing.upstream import raw_answer

NAME = "gpu.test"
GET = UpstreamRequest.of("GET", "/x", [], None)


@asynccontextmanager
async def upstream_of(
    *, keepalive_s: float = 4.0, max_requests: int | None = None, n_warm: int = 0
) -> AsyncIterator[Upstream]:
    limits = ConnectionLimits(5.0, keepalive_s, max_requests, n_warm)
    upstream = Upstream(first_byte_timeout_s=None, idle_timeout_s=None, limits=limits)
    try:
        async with asyncio.timeout(20):
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


def only_one(piece: bytes, is_last: bool, chunks: bytes | None) -> None:
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
        assert await send(upstream, fake.url + "/base", UpstreamRequest.of("GET", target, [], None)) == b"x"
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
        await send(upstream, fake.url, UpstreamRequest.of("POST", "/x", [], b"x" * 12_000_000))
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
            request = UpstreamRequest.of("POST", target, [], b"x" * 3_000_000)
            if target == "/dies":
                with pytest.raises(UpstreamBrokenError):
                    await send(upstream, fake.url, request)
            else:
                assert await send(upstream, fake.url, request) == (b"no" if target == "/early" else b"ok")
    async with asyncio.timeout(10):
        await until(lambda: n_open() == n_before)


def answering(head: bytes) -> Callable[[Call], Awaitable[None]]:
    async def answer(call: Call) -> None:
        await call.send(head + b"\r\n\r\nok")

    return answer


KEPT = b"HTTP/1.1 200 OK\r\nContent-Length: 2"


@pytest.mark.parametrize(
    ("head", "is_reused"),
    [
        (KEPT, True),
        (KEPT + b"\r\nConnection: Keep-Alive", True),
        (KEPT + b"\r\nConnection: close", False),
        (KEPT + b"\r\nconnection: x, CLOSE", False),
        (KEPT.replace(b"1.1", b"1.0"), False),
        (KEPT.replace(b"1.1", b"1.0") + b"\r\nConnection: keep-alive", True),
        (KEPT + b"\r\nKeep-Alive: timeout=5, max=100", True),
        (KEPT + b"\r\nKeep-Alive: max=0", False),
        (KEPT + b"\r\nKeep-Alive: timeout=1", False),  # too close to be of use
        (KEPT + b"\r\nKeep-Alive: timeout=x, max=, =, ;", True),
        (KEPT + b"\r\nKeep-Alive: timeout=99999999999999999999", True),
        (KEPT.replace(b": 2", b": 1"), False),  # more than it said
    ],
)
async def test_a_connection_is_used_again_if_the_server_keeps_it(head: bytes, is_reused: bool) -> None:
    async with FakeUpstream(answering(head)) as fake, upstream_of() as upstream:
        for _ in range(2):
            await send(upstream, fake.url)
    assert [call.reused for call in fake.calls] == [False, is_reused]


async def test_a_connection_takes_as_many_requests_as_it_may() -> None:
    async with FakeUpstream(answering(KEPT)) as fake, upstream_of(max_requests=3) as upstream:
        for _ in range(7):
            await send(upstream, fake.url)
    assert [call.reused for call in fake.calls] == [False, True, True] * 2 + [False]


async def test_the_instance_says_how_many_more_it_takes() -> None:
    """As llama.cpp's server does, which closes after a hundred."""
    n_left = 3

    async def counts(call: Call) -> None:
        nonlocal n_left
        n_left -= 1
        await call.send(KEPT + b"\r\nKeep-Alive: timeout=5, max=%d\r\n\r\nok" % n_left)

    async with FakeUpstream(counts) as fake, upstream_of() as upstream:
        for _ in range(4):
            await send(upstream, fake.url)
    assert [call.reused for call in fake.calls] == [False, True, True, False]


async def test_a_connection_that_the_instance_has_closed_is_not_used() -> None:
    """The close is here, but the loop has not been told of it yet."""

    async def leaves(call: Call) -> None:
        await call.send(KEPT + b"\r\n\r\nok")
        call.close()

    async with FakeUpstream(leaves) as fake, upstream_of() as upstream:
        await send(upstream, fake.url)
        await fake.wait_connections(0)
        answer = upstream.send(Instance("gpu-0", fake.url, 0), GET)
        (await answer).close()
    assert [call.reused for call in fake.calls] == [False, False]


async def test_kept_connections_are_closed_in_time() -> None:
    async with FakeUpstream(answering(KEPT)) as fake, upstream_of(keepalive_s=0.05) as upstream:
        await asyncio.gather(*(send(upstream, fake.url) for _ in range(3)))
        await fake.wait_connections(0)


async def test_connections_are_kept_ready_where_there_is_traffic() -> None:
    async with FakeUpstream(answering(KEPT)) as fake, upstream_of(n_warm=3) as upstream:
        assert fake.n_connections_ever == 0
        await send(upstream, fake.url)
        await fake.wait_connections(4)
        await asyncio.gather(*(send(upstream, fake.url) for _ in range(4)))
        assert fake.n_connections_ever <= 7
    assert fake.n_connections == 0


async def test_an_instance_that_is_gone_leaves_no_connection() -> None:
    async with FakeUpstream(answering(KEPT)) as fake, upstream_of(n_warm=2) as upstream:
        await send(upstream, fake.url)
        await fake.wait_connections(3)
        upstream.forget("gpu-0")
        await fake.wait_connections(0)
        assert await send(upstream, fake.url) == b"ok"


async def test_an_answer_outlives_its_instance() -> None:
    async def slow(call: Call) -> None:
        await call.send(KEPT + b"\r\n\r\no")
        await asyncio.sleep(0.1)
        await call.send(b"k")

    async with FakeUpstream(slow) as fake, upstream_of() as upstream:
        answer = await upstream.send(Instance("gpu-0", fake.url, 0), GET)
        upstream.forget("gpu-0")
        assert await answer.whole(10) == b"ok"
        await fake.wait_connections(0)


async def test_another_url_under_the_same_name_is_another_server() -> None:
    async with FakeUpstream(answering(KEPT)) as one, FakeUpstream(answering(KEPT)) as two, upstream_of() as upstream:
        for fake in (one, two):
            await send(upstream, fake.url)
        assert (len(one.calls), len(two.calls)) == (1, 1)
        await one.wait_connections(0)


async def test_an_ipv6_instance_is_reached_and_named_in_brackets() -> None:
    hosts = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hosts.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[1])
        writer.write(KEPT + b"\r\n\r\nok")
        writer.close()

    try:
        server = await asyncio.start_server(serve, "::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    port = server.sockets[0].getsockname()[1]
    async with upstream_of() as upstream:
        assert await send(upstream, f"http://[::1]:{port}") == b"ok"
    server.close()
    assert hosts == [b"Host: [::1]:%d" % port]


async def test_the_next_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that listens on IPv4 only, whose name has an IPv6 address in front."""
    n_asked = 0

    async def two(host: str, port: int, **options: Any) -> list[Any]:
        nonlocal n_asked
        if host != NAME:
            return list(await resolve(host, port, **options))
        n_asked += 1
        stream = socket.SOCK_STREAM
        return [
            (socket.AF_INET6, stream, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, stream, 6, "", ("127.0.0.1", port)),
        ]

    resolve = asyncio.get_running_loop().getaddrinfo
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two)
    async with FakeUpstream(answering(KEPT)) as fake, upstream_of(keepalive_s=0.0) as upstream:
        for _ in range(3):
            assert await send(upstream, f"http://{NAME}:{fake.port}") == b"ok"
    assert n_asked == 1
    assert fake.calls[0].header("host") == f"{NAME}:{fake.port}"


async def test_addresses_are_asked_for_again_when_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["127.0.0.1"]

    async def moved(host: str, port: int, **options: Any) -> list[Any]:
        if host != NAME:
            return list(await resolve(host, port, **options))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses.pop(0), port))]

    resolve = asyncio.get_running_loop().getaddrinfo
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", moved)
    async with FakeUpstream(answering(KEPT)) as fake, upstream_of() as upstream:
        await fake.stop()
        with pytest.raises(UpstreamUnreachableError):
            await send(upstream, f"http://{NAME}:{fake.port}")
        addresses.append("127.0.0.1")
        await fake.start()
        assert await send(upstream, f"http://{NAME}:{fake.port}") == b"ok"


async def test_a_silent_address_is_given_up_on() -> None:
    """A full backlog: the kernel answers nobody."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        limits = ConnectionLimits(connect_timeout_s=0.2)
        upstream = Upstream(first_byte_timeout_s=None, idle_timeout_s=None, limits=limits)
        with pytest.raises(UpstreamUnreachableError) as caught:
            await send(upstream, url)
        await upstream.close()
        for filler in fillers:
            filler.close()
    assert caught.value.timed_out
    assert str(caught.value) == "gpu-0: no connection within connect_timeout_s (0.2 s)"


async def test_no_sockets_left_here_is_no_fault_of_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", full)
    async with upstream_of() as upstream:
        with pytest.raises(UpstreamUnreachableError) as caught:
            await send(upstream, "http://127.0.0.1:9")
    assert caught.value.own_fault


async def test_who_stops_reading_is_not_read_ahead_for() -> None:
    n_sent = 0

    async def floods(call: Call) -> None:
        nonlocal n_sent
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        for _ in range(1000):
            await call.send(b"x" * 100_000)
            n_sent += 100_000

    async with FakeUpstream(floods, by_hand=True) as fake, upstream_of() as upstream:
        answer = await upstream.send(Instance("gpu-0", fake.url, 0), GET)
        n_before = -1
        while n_before != n_sent:
            n_before = n_sent
            await asyncio.sleep(0.05)
        assert n_sent < 20_000_000  # the sockets' buffers
        n_bytes = 0

        def take(piece: bytes, is_last: bool, chunks: bytes | None) -> None:
            nonlocal n_bytes
            n_bytes += len(piece)

        await answer.pour(take)
        assert n_bytes == 100_000_000


async def test_pausing_is_no_silence_of_the_instance() -> None:
    async def two_pieces(call: Call) -> None:
        await call.send(KEPT + b"\r\n\r\no")
        await asyncio.sleep(0.05)
        await call.send(b"k")

    limits = ConnectionLimits()
    upstream = Upstream(first_byte_timeout_s=None, idle_timeout_s=0.2, limits=limits)
    loop = asyncio.get_running_loop()
    async with FakeUpstream(two_pieces) as fake:
        answer = await upstream.send(Instance("gpu-0", fake.url, 0), GET)
        pieces = []

        def take(piece: bytes, is_last: bool, chunks: bytes | None) -> None:
            pieces.append(piece)
            if not is_last:
                answer.pause()
                loop.call_later(0.6, answer.resume)

        await answer.pour(take)
        await upstream.close()
    assert b"".join(pieces) == b"ok"


async def test_whoever_cannot_take_an_early_hint_is_told_as_itself() -> None:
    async def hints(call: Call) -> None:
        await call.send(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await call.wait_disconnected()

    def gone(status: int, reason: bytes, headers: object) -> None:
        raise ConnectionResetError("the client has gone")

    async with FakeUpstream(hints) as fake, upstream_of() as upstream:
        with pytest.raises(ConnectionResetError):
            await upstream.send(Instance("gpu-0", fake.url, 0), GET, on_interim=gone)
        await fake.wait_connections(0)


async def test_who_accepts_and_closes_at_once_was_sent_nothing() -> None:
    """A balancer in front of a server that is gone: the close is known before the request is written."""
    async with FakeUpstream(answering(KEPT)) as fake:
        pool = Pool("gpu-0", fake.url, place_of(fake.url), ConnectionLimits(), Names())
        link = await pool.connect()
        assert link.transport is not None
        link.transport.close()
        waiter = link.ask(GET, False, None, None)
        link.sending.write(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(UpstreamUnreachableError, match="closed at once"):
            await waiter
        await pool.close()
        assert fake.calls == []


async def test_a_connection_kept_ready_may_turn_out_closed_like_any_kept_one() -> None:
    async def closes_idle_ones(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        began_s = asyncio.get_running_loop().time()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                if asyncio.get_running_loop().time() - began_s > 0.1:
                    break
                writer.write(KEPT + b"\r\n\r\nok")
        writer.transport.abort()

    server = await asyncio.start_server(closes_idle_ones, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with upstream_of(n_warm=2) as upstream:
        assert await send(upstream, url) == b"ok"
        await asyncio.sleep(0.3)
        faults = []
        for _ in range(3):
            try:
                await send(upstream, url)
            except UpstreamBrokenError as fault:
                faults.append(fault.reused)
        assert faults
        assert all(faults)
    server.close()


async def test_an_instance_that_stops_in_the_middle_of_a_large_body_ends_the_attempt() -> None:
    """It has said that it will say no more, and takes no more either."""

    async def stops(call: Call) -> None:
        await call.read(1000)
        call.half_close()
        await asyncio.sleep(3600)

    async with FakeUpstream(stops, by_hand=True) as fake, upstream_of() as upstream:
        with pytest.raises(UpstreamBrokenError):
            await send(upstream, fake.url, UpstreamRequest.of("POST", "/x", [], b"x" * 12_000_000))


async def test_an_attempt_that_is_given_up_leaves_the_next_one_on_its_connection_alone() -> None:
    async def answers(call: Call) -> None:
        if call.target == "/hold":
            await asyncio.sleep(0.1)
        await call.send(KEPT + b"\r\n\r\nok")

    async with FakeUpstream(answers) as fake, upstream_of() as upstream:
        instance = Instance("gpu-0", fake.url, 0)
        await send(upstream, fake.url)
        asking = asyncio.create_task(upstream.send(instance, GET))
        link = None
        while link is None or link._waiter is not None:  # until its answer is here, whole
            await asyncio.sleep(0)
            link = next(iter(upstream._pools["gpu-0"]._links), None)
        holding = asyncio.create_task(send(upstream, fake.url, UpstreamRequest.of("GET", "/hold", [], None)))
        asking.cancel()
        assert await holding == b"ok"
        assert len(fake.calls) == 3


async def test_a_body_stops_before_its_attempt_is_over() -> None:
    """Somebody else may read the rest of it then."""
    is_reading = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal is_reading
        is_reading = True
        try:
            yield b"x"
            await asyncio.sleep(3600)
        finally:
            is_reading = False

    async def garbles(call: Call) -> None:
        await call.read(1)
        await call.send(b"HTTP/1.1 200 OK\r\nno field\r\n\r\n")
        await call.wait_disconnected()

    async with FakeUpstream(garbles, by_hand=True) as fake, upstream_of() as upstream:
        with pytest.raises(UpstreamBrokenError, match="not valid HTTP"):
            await upstream.send(Instance("gpu-0", fake.url, 0), UpstreamRequest.of("POST", "/x", [], body, 10))
        assert not is_reading


async def test_whatever_a_body_raises_ends_the_attempt() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        raise RuntimeError("odd")

    async with FakeUpstream(answering(KEPT)) as fake, upstream_of() as upstream:
        with pytest.raises(RuntimeError, match="odd"):
            await upstream.send(Instance("gpu-0", fake.url, 0), UpstreamRequest.of("POST", "/x", [], body, 10))


async def test_no_descriptor_for_a_second_hold_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    n_wanted = 0

    def full(_fd: int) -> int:
        nonlocal n_wanted
        n_wanted += 1
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("os.dup", full)
    async with FakeUpstream(answering(KEPT)) as fake, upstream_of() as upstream:
        request = UpstreamRequest.of("POST", "/x", [], b"x" * 12_000_000)
        assert await send(upstream, fake.url, request) == b"ok"
    assert n_wanted == 1


async def test_what_fits_in_the_buffer_of_a_socket_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_fd: int) -> int:
        raise AssertionError("held twice")

    monkeypatch.setattr("os.dup", never)
    async with FakeUpstream(answering(KEPT)) as fake, upstream_of() as upstream:
        for n_bytes in (1000, 20_000, 40_000):
            request = UpstreamRequest.of("POST", "/x", [], b"x" * n_bytes)
            assert await send(upstream, fake.url, request) == b"ok"
    assert [len(call.body) for call in fake.calls] == [1000, 20_000, 40_000]


async def test_chunks_come_with_the_pieces_as_they_were_sent() -> None:
    begins = asyncio.Event()

    async def streams(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (b"5\r\nhello\r\n", b"1;a\r\n!\r\n", b"1\r\n", b"!\r\n", b"2\r\nok\r\n0\r\n\r\n"):
            await begins.wait()
            begins.clear()
            await call.send(part)

    taken = []

    def take(piece: bytes, is_last: bool, chunks: bytes | None) -> None:
        taken.append((piece, is_last, chunks))
        begins.set()

    async with FakeUpstream(streams) as fake, upstream_of() as upstream:
        answer = await upstream.send(Instance("gpu-0", fake.url, 0), GET)
        begins.set()
        pouring = asyncio.create_task(answer.pour(take))
        while len(taken) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # the beginning of a chunk, which is no piece
        begins.set()
        await pouring
    assert taken == [
        (b"hello", False, b"5\r\nhello\r\n"),
        (b"!", False, None),
        (b"!", False, None),
        (b"ok", True, b"2\r\nok\r\n0\r\n\r\n"),
    ]


async def test_a_limit_that_was_kept_says_nothing_to_what_follows() -> None:
    """One timer serves all that a connection does: that of one request must not end the next, or the rest between."""

    async def slowly(call: Call) -> None:
        if call.target == "/slow":
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n")
            for _ in range(6):
                await asyncio.sleep(0.15)
                await call.send(b"x")
        else:
            await call.send(KEPT + b"\r\n\r\nok")

    upstream = Upstream(first_byte_timeout_s=0.6, idle_timeout_s=0.6, limits=ConnectionLimits())
    async with FakeUpstream(slowly) as fake:
        assert await send(upstream, fake.url) == b"ok"
        await asyncio.sleep(0.9)
        assert await send(upstream, fake.url, UpstreamRequest.of("GET", "/slow", [], None)) == b"xxxxxx"
        assert await send(upstream, fake.url) == b"ok"
        assert [call.reused for call in fake.calls] == [False, True, True]
        await upstream.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as Linux names the options")
async def test_a_machine_that_vanishes_is_noticed_by_the_kernel() -> None:
    async with FakeUpstream(answering(KEPT)) as fake, upstream_of() as upstream:
        await send(upstream, fake.url)
        (link,) = upstream._pools["gpu-0"]._links
        assert link.transport is not None
        raw = link.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


@pytest.mark.parametrize("status", [400, 401, 429, 503])
async def test_who_refuses_a_body_may_not_have_read_it(status: int) -> None:
    """And would take it for the next request: its connection is not used again."""

    async def refuses(call: Call) -> None:
        await call.send(b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\nno" % status)

    async with FakeUpstream(refuses, by_hand=True) as fake, upstream_of() as upstream:
        for request in (UpstreamRequest.of("POST", "/x", [], b"body"), GET, GET):
            assert await send(upstream, fake.url, request) == b"no"
    assert [(call.target, call.reused) for call in fake.calls] == [("/x", False), ("/x", False), ("/x", True)]


async def test_who_leaves_reads_no_more_of_what_floods_in() -> None:
    async def floods(call: Call) -> None:
        await call.read_body()
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                await call.send(bytes(1_000_000))

    taken = 0

    def take(piece: bytes, is_last: bool, chunks: bytes | None) -> None:
        nonlocal taken
        taken += len(piece)

    async with FakeUpstream(floods, by_hand=True) as fake, upstream_of() as upstream:
        answer = await upstream.send(
            Instance("gpu-0", fake.url, 0), UpstreamRequest.of("POST", "/x", [], b"x" * 100_000)
        )
        pouring = asyncio.create_task(answer.pour(take))
        while taken < 3_000_000:
            await asyncio.sleep(0)
        answer.close()
        n_taken = taken
        with pytest.raises(UpstreamBrokenError):
            await pouring
        assert taken == n_taken
        await fake.wait_connections(0)


async def test_interim_answers_are_bounded_in_bytes() -> None:
    async def hints(call: Call) -> None:
        for _ in range(10):
            await call.send(b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 60_000 + b"\r\n\r\n")
        await call.wait_disconnected()

    async with FakeUpstream(hints) as fake, upstream_of() as upstream:
        with pytest.raises(UpstreamBrokenError, match="too many interim answers"):
            await upstream.send(Instance("gpu-0", fake.url, 0), GET, on_interim=lambda *_: None)
