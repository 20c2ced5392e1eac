"""Long bodies and very many chunks are work for several turns of the event loop: others have theirs in between."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import orjson
import pytest

from prefixroute.core.fleet import Instance
from prefixroute.core.prompt import MAX_PARSED_BYTES
from prefixroute.http.arrival import Arrival, RequestHead
from prefixroute.http.ask import fields_in_steps
from prefixroute.http.body import BodyLimits, read_whole
from prefixroute.http.front.coming import ComingBody
from prefixroute.http.models import joined_models
from prefixroute.http.upstream import ConnectionLimits, Upstream, UpstreamRequest
from prefixroute.http.upstream.link import Link
from prefixroute.testing import Call, FakeUpstream
from prefixroute.testing.upstream import Script, json_answer

MB = 1 << 20
PIECE = bytes(range(256)) * 1024  # what is read from a socket at a time
GET = UpstreamRequest.of("GET", "/x", [], None)


class Turns:
    """How often others had one."""

    def __init__(self) -> None:
        self.n = 0
        self.is_over = False

    def take(self) -> None:
        self.n += 1
        if not self.is_over:
            asyncio.get_running_loop().call_soon(self.take)


@contextmanager
def counted_turns() -> Iterator[Turns]:
    turns = Turns()
    asyncio.get_running_loop().call_soon(turns.take)
    yield turns
    turns.is_over = True


class NoKeeper:
    def release(self, link: Link) -> None: ...

    def lost(self, link: Link) -> None: ...


def sending(data: bytes) -> Script:
    async def script(call: Call) -> None:
        await call.send(data)
        if b"Connection: close" in data:
            call.close()

    return script


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    client = Upstream(first_byte_timeout_s=None, idle_timeout_s=None, limits=ConnectionLimits())
    try:
        async with asyncio.timeout(30):
            yield client
    finally:
        await client.close()


async def pieces_of(url: str) -> list[bytes]:
    pieces: list[bytes] = []
    async with upstream() as client:
        answer = await client.send(Instance("gpu-0", url, 0), GET)
        try:
            await answer.pour(lambda piece, _is_last, _chunks: pieces.append(piece))
        finally:
            answer.close()
    return pieces


@pytest.mark.parametrize("declared", [True, False])
async def test_a_long_body_that_is_here_already_is_taken_in_many_turns(declared: bool) -> None:
    content = ComingBody(32 * len(PIECE))
    for _ in range(32):
        content.feed(PIECE)
    head = RequestHead("POST", "/v1/chat/completions", 1, [])
    length = 32 * len(PIECE) if declared else None
    arrival = Arrival(head, None, None, "fast", keep_alive=True, content=content, length=length)  # type: ignore[arg-type]
    with counted_turns() as turns:
        body = await read_whole(arrival, BodyLimits(64 * MB))
    assert body == PIECE * 32
    assert turns.n >= 10


async def test_reading_fields_is_a_turn_of_its_own() -> None:
    body = orjson.dumps({"messages": [{"role": "user", "content": "x" * 100_000}]})
    with counted_turns() as turns:
        fields, no_key, parsed = await fields_in_steps(body, encoded=False)
    assert (len(fields), no_key, parsed) == (1, None, True)
    assert turns.n == 2


async def test_a_long_body_is_given_to_the_loop_slice_by_slice() -> None:
    ours, theirs = socket.socketpair()
    body = PIECE * 64
    loop = asyncio.get_running_loop()
    with theirs:
        _, link = await loop.create_connection(lambda: Link("gpu-0", NoKeeper(), loop, 65_536), sock=ours)
        link.ask(UpstreamRequest.of("POST", "/x", [], body), False, None, None)
        link.sending.write_large(b"HEAD", body)
        assert link.transport is not None
        theirs.setblocking(False)
        got = bytearray()
        async with asyncio.timeout(30):
            while len(got) < len(body) + 4:
                assert link.transport.get_write_buffer_size() <= MB
                got += await loop.sock_recv(theirs, MB)
        assert got == b"HEAD" + body
        link.abort()
        await asyncio.sleep(0)


async def test_an_early_answer_to_a_long_body_costs_the_connection() -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await call.read(256 * len(PIECE))

    async with FakeUpstream(script, by_hand=True, script_all=True) as instance, upstream() as client:
        answer = await client.send(
            Instance("gpu-0", instance.url, 0), UpstreamRequest.of("POST", "/x", [], PIECE * 128)
        )
        assert await answer.whole(10) == b"ok"
        # Else what is left of it would be taken for the next request.
        await instance.wait_connections(0)


@pytest.mark.parametrize("ending", [b"", b"Connection: close\r\n"])
async def test_very_many_chunks_are_handed_on_in_many_turns(ending: bytes) -> None:
    n = 40_000
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n%s\r\n" % ending + b"1\r\nx\r\n" * n + b"0\r\n\r\n"
    async with FakeUpstream(sending(data), script_all=True) as instance:
        pieces = await pieces_of(instance.url)
    assert b"".join(pieces) == b"x" * n
    # A size may stand between two of them that the limit on one step parts.
    assert max(map(len, pieces)) <= 2_049


async def test_very_many_chunks_that_are_cut_off_are_handed_on_before_that_is_told() -> None:
    n = 20_000

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * n)
        call.close()

    seen: list[bytes] = []
    async with FakeUpstream(script, script_all=True) as instance, upstream() as client:
        answer = await client.send(Instance("gpu-0", instance.url, 0), GET)
        with pytest.raises(Exception, match="broke off"):
            await answer.pour(lambda piece, _is_last, _chunks: seen.append(piece))
        answer.close()
    assert b"".join(seen) == b"x" * n


async def test_a_list_of_models_that_would_take_long_to_read_is_none() -> None:
    many = b'{"data":[' + b'{"id":"m"},' * 20_000 + b'{"id":"m"}]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(many)
    assert len(many) < MAX_PARSED_BYTES
    async with (
        FakeUpstream(sending(head + many), script_all=True) as one,
        FakeUpstream(json_answer({"data": [{"id": "a"}]}), script_all=True) as other,
        upstream() as client,
    ):
        instances = [Instance("one", one.url, 0), Instance("other", other.url, 1)]
        answer = await joined_models(client, instances, GET)
    assert orjson.loads(answer.body)["data"] == [{"id": "a"}]
