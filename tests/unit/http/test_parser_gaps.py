"""Behind trailers, and behind a declined offer, nothing is read from its middle, however the bytes are cut."""

import asyncio
import fcntl
import itertools
import random
import socket
import sys
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from prefixroute.http.arrival import Arrival
from prefixroute.http.body import BodyLimits, read_whole
from prefixroute.http.front import ClientLimits, FrontServer
from prefixroute.http.response import RawResponse

HEAD = b"POST /first HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel\r\n\r\n"  # its body looks like an end of chunks
PLAIN_CHUNKS = CHUNKED + b"0\r\n\r\n"
EXTENDED_CHUNKS = CHUNKED + b"000;a=b\r\n\r\n"
TRAILERS = CHUNKED + b"0\r\nX-Trailer: 1\r\nAuthorization: Bearer key\r\n\r\n"
OFFER = HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 7\r\n\r\nhel\r\n\r\n"
HALF_OFFER = HEAD + b"Upgrade: websocket\r\nContent-Length: 7\r\n\r\nhel\r\n\r\n"
CHUNKED_OFFER = CHUNKED.replace(b"Transfer", b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer") + b"0\r\n\r\n"
NEXT = b"POST /next HTTP/1.1\r\nHost: a\r\nX-Own: 1\r\nContent-Length: 5\r\n\r\nworld"
NEXT_HEADERS = [(b"Host", b"a"), (b"X-Own", b"1"), (b"Content-Length", b"5")]

_FIRST = ("/first", b"hel\r\n")
_SECOND = ("/next", b"world")


class Connection:
    """To a server that takes all of HTTP/1 and tells what it was asked. Pieces are read one by one."""

    def __init__(self, raw: socket.socket) -> None:
        self._raw = raw
        self.asked: list[tuple[str, bytes]] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []

    async def handle(self, arrival: Arrival) -> RawResponse:
        """The server's handler."""
        body = await read_whole(arrival, BodyLimits(1_000))
        self.asked.append((arrival.head.target, body))
        self.headers.append(list(arrival.head.headers))
        response = RawResponse(arrival)
        response.whole_now(200, [], b"answer to " + arrival.head.target.encode())
        return response

    async def send(self, piece: bytes) -> None:
        """Until it has been read, and answered as far as it can be. No error if the server has closed."""
        try:
            self._raw.send(piece)
            while int.from_bytes(fcntl.ioctl(self._raw, termios.TIOCOUTQ, bytes(4)), sys.byteorder):
                await asyncio.sleep(0)
        except OSError:
            return
        for _ in range(12):
            await asyncio.sleep(0)

    def said(self) -> tuple[bytes, bool]:
        """All answers so far, and whether the server has closed."""
        got = b""
        try:
            while piece := self._raw.recv(65_536):
                got += piece
        except BlockingIOError:
            return got, False
        except ConnectionError:
            pass
        return got, True


@asynccontextmanager
async def connection() -> AsyncIterator[Connection]:
    ours, its = socket.socketpair()
    ours.setblocking(False)
    one = Connection(ours)
    front = FrontServer(one.handle, ClientLimits())
    await asyncio.get_running_loop().connect_accepted_socket(front, its)
    try:
        yield one
    finally:
        ours.close()
        await front.shutdown(0)


def _cut(data: bytes, *cuts: int) -> list[bytes]:
    ends = sorted({0, len(data), *cuts})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def _segmentations(data: bytes) -> Iterator[list[bytes]]:
    """Whole, byte by byte, cut at each byte, and at two at random."""
    yield [data]
    yield _cut(data, *range(len(data)))
    for at in range(1, len(data)):
        yield _cut(data, at)
    rng = random.Random(0)
    for _ in range(100):
        yield _cut(data, *rng.sample(range(1, len(data)), 2))


async def _each(data: bytes, check: Callable[[Connection, list[bytes]], Awaitable[None]]) -> None:
    for pieces in _segmentations(data):
        async with connection() as one:
            for piece in pieces:
                await one.send(piece)
            await check(one, pieces)


@pytest.mark.parametrize("first", [PLAIN_CHUNKS, EXTENDED_CHUNKS])
async def test_behind_chunks_without_trailers_the_next_request_is_answered(first: bytes) -> None:
    async def check(one: Connection, pieces: list[bytes]) -> None:
        said, closed = one.said()
        assert one.asked == [_FIRST, _SECOND], pieces
        assert one.headers[1] == NEXT_HEADERS
        assert (said.count(b"HTTP/1.1 200 OK"), b"Connection: close" in said, closed) == (2, False, False), pieces

    await _each(first + NEXT, check)


async def test_behind_trailers_the_connection_ends() -> None:
    async def check(one: Connection, pieces: list[bytes]) -> None:
        said, closed = one.said()
        assert one.asked == [_FIRST], pieces
        assert (said.count(b"HTTP/1.1 200 OK"), closed) == (1, True), pieces
        assert said.endswith(b"answer to /first")

    await _each(TRAILERS + NEXT, check)


async def test_trailers_alone_end_the_connection_too() -> None:
    """Who comes next on it may be another client of a proxy in front."""

    async def check(one: Connection, pieces: list[bytes]) -> None:
        await one.send(NEXT)
        said, closed = one.said()
        assert one.asked == [_FIRST], pieces
        assert (said.count(b"HTTP/1.1 200 OK"), closed) == (1, True), pieces

    await _each(TRAILERS, check)


@pytest.mark.parametrize("first", [OFFER, HALF_OFFER, CHUNKED_OFFER])
async def test_behind_a_declined_offer_the_next_request_is_whole_or_none(first: bytes) -> None:
    async def check(one: Connection, pieces: list[bytes]) -> None:
        said, closed = one.said()
        expected = (_FIRST[0], b"hel\r\n\r\n") if first is not CHUNKED_OFFER else _FIRST
        assert one.asked in ([expected], [expected, _SECOND]), pieces
        assert one.headers[1:] in ([], [NEXT_HEADERS]), pieces
        n_answers = len(one.asked)
        assert said.count(b"HTTP/1.1 200 OK") == n_answers, pieces
        # Who is not answered is told so: by the end of the connection, and not by an error of somebody else's.
        assert closed is (n_answers == 1), pieces
        assert b"HTTP/1.1 4" not in said

    await _each(first + NEXT, check)


async def test_behind_a_declined_offer_that_came_alone_the_connection_goes_on() -> None:
    """If its head came in one piece, so that it is known where it ends."""
    n_head = OFFER.index(b"\r\n\r\n") + 4
    for at in range(n_head, len(OFFER) + 1):
        async with connection() as one:
            for piece in (*_cut(OFFER, at), NEXT):
                await one.send(piece)
            assert [target for target, _ in one.asked] == ["/first", "/next"], at
            assert one.headers[1] == NEXT_HEADERS
            assert not one.said()[1], at
