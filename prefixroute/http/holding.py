"""Requests that the router holds back: how their tasks wait, and when the router looks at them again.

It looks at every first byte and every end of an attempt, which is when instances get room, and by the clock while
anyone is held: answers that are not streamed do not tell when their prefill is over.

A look at a long queue takes milliseconds, and every first byte asks for one. So it rests after each look, and serves
requests: for a few times as long as the look took.
"""

import asyncio
from collections.abc import Callable

from prefixroute.core.held import Held
from prefixroute.core.lease import Lease
from prefixroute.core.request import Request
from prefixroute.core.router import Router

_LOOK_EVERY_S = 0.1
# How long it rests, in times of what the look took: a quarter of the loop's time at most is spent on looking.
_REST = 3.0


class Holding:
    """The router's held requests, on the event loop."""

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        self._router = router
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._rests_until_s = float("-inf")
        # Whether the timer is set for the end of the rest, because somebody asked meanwhile.
        self._is_asked = False

    def look(self) -> None:
        """An instance may have room now."""
        if not len(self._router.held):
            return
        now_s = self._clock()
        if now_s >= self._rests_until_s:
            self._router.release(now_s)
            took_s = self._clock() - now_s
            # Not longer than until the timer would look anyway, whatever else the machine did meanwhile.
            self._rests_until_s = now_s + took_s + min(_REST * took_s, _LOOK_EVERY_S)
        elif not self._is_asked:
            self._is_asked = True
            self._look_in(self._rests_until_s - now_s)

    def enter(self, request: Request, now_s: float) -> "Lease | Turn":
        """A place for `request`, or its turn to wait for.

        Raises NoInstanceError, and TooManyRequestsError when too many are held.
        """
        entered = self._router.enter(request, now_s=now_s, grant=_nobody)
        if isinstance(entered, Lease):
            return entered
        # Few are held, so only they get a future: nothing has been granted in this turn of the loop.
        granted: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        entered.grant = granted.set_result
        if self._timer is None:
            self._look_in(_LOOK_EVERY_S)
        return Turn(self, entered, granted)

    def give_up(self, held: Held, granted: "asyncio.Future[Lease | None]") -> None:
        """The client has left, perhaps in the moment between the grant and its task's turn."""
        self._router.held.leave(held)
        if granted.done() and not granted.cancelled() and (lease := granted.result()) is not None:
            lease.refused()
            lease.end()
            self.look()

    def _look_in(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._is_asked = False
        if len(self._router.held):
            self._look_in(_LOOK_EVERY_S)
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


def _nobody(_lease: Lease | None) -> None:
    """Who is granted a lease, until that is known."""
    raise RuntimeError("granted before anybody waited")
