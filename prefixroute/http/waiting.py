"""The waiting room: where requests are while nobody can take them.

A fleet that restarts, or a router that started first, should cost a client seconds, not an error. Bounded in time and
number; a client that leaves leaves the room too (its task is cancelled).
"""

import asyncio
from collections.abc import Callable
from math import ceil

from prefixroute.core.router import Router
from prefixroute.errors import NoInstanceError

# How often to look without being woken: instances become available by the clock, too.
_LONGEST_NAP_S = 1.0


class WaitingRoom:
    """`wait_s`: how long one request may stay in all; `max_waiting`: how many may be here at once."""

    def __init__(self, router: Router, *, wait_s: float, max_waiting: int, clock: Callable[[], float]) -> None:
        self._router = router
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._clock = clock
        self._waiting: set[asyncio.Future[None]] = set()

    def configure(self, *, wait_s: float, max_waiting: int) -> None:
        """Other bounds, for requests that come from now on."""
        self._wait_s = wait_s
        self._max_waiting = max_waiting

    @property
    def wait_s(self) -> float:
        return self._wait_s

    def __len__(self) -> int:
        return len(self._waiting)

    def wake(self) -> None:
        """Someone may be able to take requests now."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_change(self, until_s: float) -> None:
        """Waits until it is worth asking again. Raises NoInstanceError when the room is full or `until_s` has come."""
        now_s = self._clock()
        if now_s >= until_s:
            raise NoInstanceError("no instance can take the request", self._retry_after_s(now_s))
        if len(self._waiting) >= self._max_waiting:
            raise NoInstanceError(
                "no instance can take the request, and too many requests wait already", self._retry_after_s(now_s)
            )
        nap_s = min(until_s - now_s, _LONGEST_NAP_S)
        back_s = self._router.fleet.next_return_s()
        if back_s is not None and back_s > now_s:  # else it is back, and serves other models
            nap_s = min(nap_s, back_s - now_s)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            async with asyncio.timeout(nap_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(waiter)

    def _retry_after_s(self, now_s: float) -> int:
        back_s = self._router.fleet.next_return_s()
        return max(1, ceil(back_s - now_s)) if back_s is not None else 1
