"""A streamed body on its way: whose silence counts, and which limit it was that ran out."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from prefixroute.errors import BodyTooLargeError
from prefixroute.http.body import Upload

# Longer than any test; and over before the loop turns.
LONG_S, NO_S = 3600.0, 0.0


async def two_pieces() -> AsyncIterator[bytes]:
    yield b"one"
    yield b"two"


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_limits_follow_whoever_is_waited_for() -> None:
    limit = asyncio.timeout(LONG_S)
    upload = Upload(two_pieces, limit, 2 * LONG_S, LONG_S)
    loop = asyncio.get_running_loop()
    async with limit:
        pieces = upload.pieces()
        for piece in (b"one", b"two"):
            assert await anext(pieces) == piece
            # The instance has it to take.
            deadline_s = limit.when()
            assert upload.is_handing_over
            assert deadline_s is not None
            assert deadline_s <= loop.time() + LONG_S
        assert [piece async for piece in pieces] == []
        # Now it has everything, and its answer is waited for.
        deadline_s = limit.when()
        assert not upload.is_handing_over
        assert deadline_s is not None
        assert deadline_s > loop.time() + LONG_S


async def test_nothing_runs_while_the_client_is_waited_for() -> None:
    async def slow() -> AsyncIterator[bytes]:
        seen.append(limit.when())
        yield b""
        seen.append(limit.when())

    seen: list[float | None] = []
    limit = asyncio.timeout(LONG_S)
    async with limit:
        assert [piece async for piece in Upload(slow, limit, LONG_S, LONG_S).pieces()] == [b""]
    assert seen == [None, None]


async def test_a_limit_that_has_run_out_keeps_its_name() -> None:
    """The body may go on by one step before the attempt is cancelled."""

    async def runs_out() -> None:
        async with limit:
            await anext(pieces)
            await forever()

    limit = asyncio.timeout(None)
    upload = Upload(two_pieces, limit, None, NO_S)
    pieces = upload.pieces()
    with pytest.raises(TimeoutError):
        await runs_out()
    await anext(pieces)
    assert [piece async for piece in pieces] == []
    assert upload.is_handing_over


async def test_an_answer_ends_the_limits() -> None:
    limit = asyncio.timeout(LONG_S)
    upload = Upload(two_pieces, limit, LONG_S, LONG_S)
    async with limit:
        pass
    upload.is_limited = False
    assert [piece async for piece in upload.pieces()] == [b"one", b"two"]


async def test_what_the_stream_raises_is_kept() -> None:
    async def too_large() -> AsyncIterator[bytes]:
        yield b"one"
        raise BodyTooLargeError("too large")

    limit = asyncio.timeout(None)
    upload = Upload(too_large, limit, None, None)
    async with limit:
        with pytest.raises(BodyTooLargeError) as caught:
            assert [piece async for piece in upload.pieces()] == []
    assert upload.fault is caught.value
