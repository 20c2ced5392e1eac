"""A long body becomes one without being copied as a whole."""

import tracemalloc

import pytest

from prefixroute.http.body import GrowingBytes
from prefixroute.http.front.coming import ComingBody

PIECE = bytes(range(256)) * 1024


@pytest.mark.parametrize("n_pieces", [0, 1, 3, 4, 5, 40])
@pytest.mark.parametrize("expected", [0, 1, 5 * len(PIECE), 40 * len(PIECE), 41 * len(PIECE)])
def test_all_of_it_comes_out(n_pieces: int, expected: int) -> None:
    growing = GrowingBytes(expected)
    for _ in range(n_pieces):
        growing.add(PIECE)
    assert growing.whole() == PIECE * n_pieces


def test_at_the_end_nothing_is_copied() -> None:
    growing = GrowingBytes(80 * len(PIECE))
    for _ in range(80):
        growing.add(PIECE)
    tracemalloc.start()
    try:
        body = growing.whole()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(body) == 80 * len(PIECE)
    assert peak_bytes < len(PIECE)


async def test_what_came_in_many_large_pieces_is_read_in_several() -> None:
    coming = ComingBody(40 * len(PIECE))
    for _ in range(40):
        coming.feed(PIECE)
    read = []
    while piece := await coming.readany():
        read.append(piece)
    assert b"".join(read) == PIECE * 40
    assert max(map(len, read)) < 2 * len(PIECE)
    assert coming.at_eof()
