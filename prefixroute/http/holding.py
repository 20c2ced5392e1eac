"""Requests that the router holds back: how their tasks wait, and when the router looks at them again.

It looks at every first byte and every end of an attempt, which is when instances get room, and by the clock while
anyone is held: answers that are not streamed do not tell when their prefill is over.
"""

import asyncio
from collections.abc import Callable

from prefixroute.core.held import Held
from prefixroute.core.request import Request
from prefixroute.core.router import Lease, Router

_LOOK_EVERY_S = 0.1


class Holding:
    """The router's held requests, on the event loop."""

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        self._router = router
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """An instance may have room now."""
        if len(self._router.held):
            self._router.release(self._clock())

    def enter(self, request: Request, now_s: float) -> "Lease | Turn":
        """A place for `request`, or its turn to wait for.

        Raises NoInstanceError, and TooManyRequestsError when too many are held.
        """
        granted: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        entered = self._router.enter(request, now_s=now_s, grant=granted.set_result)
        if isinstance(entered, Lease):
            return entered
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._tick)
        return Turn(self, entered, granted)

    def give_up(self, held: Held, granted: "asyncio.Future[Lease | None]") -> None:
        """The client has left, perhaps in the moment between the grant and its task's turn."""
        self._router.held.leave(held)
        if granted.done() and not granted.cancelled() and (lease := granted.result()) is not None:
            lease.refused()
            lease.end()
            self.look()

    def _tick(self) -> None:
        self._timer = None
        if len(self._router.held):
            self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._tick)
            self.look()


class Turn:
    """A held request's wait."""

    def __init__(self, holding: Holding, held: Held, granted: "asyncio.Future[Lease | None]") -> None:
        self._holding = holding
        self._held = held
        self._granted = granted

    async def wait(self) -> Lease | None:
        """Until it is granted. None: nobody can take the request any more."""
        try:
            # Shielded: a grant that comes while the task is being cancelled must be seen, to be given back.
            return await asyncio.shield(self._granted)
        except asyncio.CancelledError:
            self._holding.give_up(self._held, self._granted)
            raise
