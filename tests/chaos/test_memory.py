"""Memory of the real process under clients that are many, slow or mean; `make soak` takes longer."""

import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos import memory, soak
from tests.chaos.stand import Stand

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

MB = 2**20


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand(tmp_path, soak.SETTINGS) as stand:
        yield stand


async def test_a_slow_reader_of_a_long_stream_costs_at_most_a_megabyte(stand: Stand) -> None:
    assert await memory.slow_readers(stand, n=10, n_bytes=100 * MB) <= MB


async def test_bodies_under_way_cost_little_more_than_their_bytes(stand: Stand) -> None:
    assert await memory.trickled_uploads(stand, n=10, n_bytes=16 * MB) <= 1.5


async def test_many_streams_at_a_time_come_whole(stand: Stand) -> None:
    assert await memory.many_streams(stand, 200) == (200, 200)


async def test_unique_requests_do_not_add_up(stand: Stand) -> None:
    report = await soak.soak(stand, 1_500, time.monotonic() + 30)

    # Its tables are not full yet after so few: memory is the long form's.
    assert report.n_lost == 0
    assert report.n_series <= soak.MAX_SERIES
    assert report.index_bytes <= soak.INDEX_BYTES


def test_growth_is_a_fault() -> None:
    report = soak.Report(samples=[(0.0, 0, 50 * MB), (1.0, 10, 100 * MB), (2.0, 20, 200 * MB)])

    assert report.faults() == ["memory grew from 52,428,800 to 209,715,200 bytes"]
