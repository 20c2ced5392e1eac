"""A body of known length, however it comes and whenever it is read."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from prefixroute.http.front.coming import ComingBody

BODY = b"abcdef"
BEHIND = b"XY"


def segmentations(data: bytes) -> Iterator[list[bytes]]:
    """Every way to cut it into pieces."""
    for cuts in itertools.product((False, True), repeat=len(data) - 1):
        ends = [0, *(at for at, is_cut in enumerate(cuts, 1) if is_cut), len(data)]
        yield [data[a:b] for a, b in itertools.pairwise(ends)]


def fed(body: ComingBody, pieces: Sequence[bytes]) -> bytes:
    """What is left over of these pieces, as a connection would keep it."""
    rest = b""
    for piece in pieces:
        rest += piece if body.is_eof() else body.feed(piece)
    return rest


async def read(body: ComingBody) -> list[bytes]:
    pieces = []
    while piece := await body.readany():
        pieces.append(piece)
    return pieces


@pytest.mark.parametrize("behind", [b"", BEHIND])
async def test_what_came_before_anybody_reads_is_read_at_once(behind: bytes) -> None:
    for pieces in segmentations(BODY + behind):
        body = ComingBody(len(BODY))
        assert fed(body, pieces) == behind
        assert (body.is_eof(), body.at_eof(), body.total_bytes) == (True, False, len(BODY))
        assert await read(body) == [BODY]
        assert body.at_eof()
        assert await body.readany() == b""


@pytest.mark.parametrize("behind", [b"", BEHIND])
async def test_a_reader_that_waits_gets_each_piece_as_it_comes(behind: bytes) -> None:
    for pieces in segmentations(BODY + behind):
        body = ComingBody(len(BODY))
        reader = asyncio.create_task(read(body))
        rest = b""
        for piece in pieces:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            rest += fed(body, [piece])
        got = await reader
        assert (b"".join(got), rest) == (BODY, behind)
        assert got == [piece for piece in _within(pieces) if piece]
        assert body.at_eof()


def _within(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """The pieces, as far as they are the body's."""
    left = len(BODY)
    for piece in pieces:
        yield piece[:left]
        left -= min(len(piece), left)


async def test_reading_between_pieces_loses_and_repeats_nothing() -> None:
    for pieces in segmentations(BODY):
        for reads in itertools.product((False, True), repeat=len(pieces)):
            body = ComingBody(len(BODY))
            got = b""
            for piece, is_read in zip(pieces, reads, strict=True):
                assert body.feed(piece) == b""
                if is_read:
                    got += await body.readany()
                    assert body.at_eof() is (got == BODY)
            assert got + b"".join(await read(body)) == BODY


async def test_bytes_count_as_they_come() -> None:
    body = ComingBody(6)
    for n, piece in ((2, b"ab"), (5, b"cde"), (6, b"fXYZ")):
        body.feed(piece)
        assert (body.total_bytes, body.is_eof()) == (n, n == 6)


async def test_a_dropped_body_is_waited_for_and_kept_nowhere() -> None:
    for pieces in segmentations(BODY + BEHIND):
        for n_before in range(len(pieces)):
            body = ComingBody(len(BODY))
            rest = fed(body, pieces[:n_before])
            drop = asyncio.create_task(body.drop())
            for piece in pieces[n_before:]:
                await asyncio.sleep(0)
                assert drop.done() is body.is_eof()
                rest += fed(body, [piece])
            await drop
            assert (rest, body.total_bytes) == (BEHIND, len(BODY))
            assert body.at_eof()
            assert await body.readany() == b""


async def test_who_gives_up_waiting_leaves_the_body_as_it_is() -> None:
    body = ComingBody(len(BODY))
    reader = asyncio.create_task(body.readany())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    assert body.feed(BODY) == b""
    assert await read(body) == [BODY]


async def test_it_is_told_whenever_more_is_waited_for() -> None:
    for pieces in segmentations(BODY):
        told: list[None] = []
        body = ComingBody(len(BODY), partial(told.append, None))
        reader = asyncio.create_task(read(body))
        for n, piece in enumerate(pieces, 1):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(told) == n
            body.feed(piece)
        await reader
        assert len(told) == len(pieces)


async def test_much_that_has_come_is_read_bit_by_bit() -> None:
    """One reading of it takes little time, however much it is."""
    pieces = [bytes([n]) * 100_000 for n in range(50)]
    body = ComingBody(5_000_000)
    fed(body, pieces)
    got = await read(body)
    assert b"".join(got) == b"".join(pieces)
    assert max(map(len, got)) < 500_000
