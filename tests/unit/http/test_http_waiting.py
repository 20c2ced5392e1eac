"""The waiting room: bounded in time and number, and woken."""

import asyncio
from random import Random

import pytest

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance
from prefixroute.core.policies.blind import LeastOutstanding
from prefixroute.core.router import Router
from prefixroute.errors import NoInstanceError
from prefixroute.http.waiting import WaitingRoom


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def router() -> Router:
    return Router([Instance("gpu-0", "http://a", 0)], LeastOutstanding(), BlockHasher(256, 1), Random(1))


def room_of(router: Router, clock: Clock, max_waiting: int = 10) -> WaitingRoom:
    return WaitingRoom(router, wait_s=5, max_waiting=max_waiting, clock=clock)


async def waiting(room: WaitingRoom, until_s: float, n: int = 1) -> list[asyncio.Task[None]]:
    before = len(room)
    tasks = [asyncio.create_task(room.wait_change(until_s)) for _ in range(n)]
    while len(room) < before + n:
        await asyncio.sleep(0)
    return tasks


async def test_whoever_waits_is_woken(router: Router, clock: Clock) -> None:
    room = room_of(router, clock)
    tasks = await waiting(room, clock.now_s + 3600, n=3)
    room.wake()
    room.wake()
    await asyncio.gather(*tasks)
    assert len(room) == 0


async def test_the_room_is_left_by_leaving(router: Router, clock: Clock) -> None:
    room = room_of(router, clock)
    (task,) = await waiting(room, clock.now_s + 3600)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(room) == 0


async def test_a_full_room_takes_nobody(router: Router, clock: Clock) -> None:
    room = room_of(router, clock, max_waiting=1)
    (task,) = await waiting(room, clock.now_s + 3600)
    with pytest.raises(NoInstanceError, match="too many requests wait already"):
        await room.wait_change(clock.now_s + 3600)
    room.wake()
    await task


async def test_time_is_up(router: Router, clock: Clock) -> None:
    room = room_of(router, clock)
    with pytest.raises(NoInstanceError) as caught:
        await room.wait_change(clock.now_s)
    assert caught.value.retry_after_s == 1


async def test_the_answer_says_when_the_first_instance_may_be_back(router: Router, clock: Clock) -> None:
    room = room_of(router, clock)
    for _ in range(4):
        router.connect_failed("gpu-0", clock.now_s, timed_out=False)
        clock.now_s += 100
    router.connect_failed("gpu-0", clock.now_s, timed_out=False)
    with pytest.raises(NoInstanceError) as caught:
        await room.wait_change(clock.now_s)
    assert caught.value.retry_after_s == 16


async def test_it_is_worth_asking_again_when_an_instance_may_be_tried(router: Router, clock: Clock) -> None:
    room = room_of(router, clock)
    router.connect_failed("gpu-0", clock.now_s, timed_out=False)
    clock.now_s += 0.999
    # A millisecond from now the instance's pause is over: nobody need say so.
    await room.wait_change(clock.now_s + 3600)
    assert len(room) == 0
