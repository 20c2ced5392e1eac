"""How long an instance may keep us waiting, without a timer for each wait."""

import asyncio
from collections.abc import Callable


class Patience:
    """Of one connection: one wait at a time, most of which end well and soon.

    Its timer is left alone by that. It looks when it fires, and is set again for what is left of the wait then under
    way. Only a wait that would end before it fires sets it anew.
    """

    __slots__ = ("_fires_s", "_limit_s", "_loop", "_on_end", "_text", "_timer", "heard_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[str], None]) -> None:
        """`on_end`: gets the text of a wait that took too long."""
        self._loop = loop
        self._on_end = on_end
        self._limit_s: float | None = None
        """Of the wait under way; None: there is none, or it may take any time."""
        self._text = ""
        self._timer: asyncio.TimerHandle | None = None
        self._fires_s = 0.0
        self.heard_s = 0.0
        """When something was last heard, by the loop's clock. Set it, and the wait begins again."""

    def wait(self, limit_s: float | None, text: str) -> None:
        """From now on, nothing may be heard for so long. `text`: what to say then, with a place for the limit."""
        self._limit_s = limit_s
        if limit_s is None:
            return
        self._text = text
        self.heard_s = now_s = self._loop.time()
        if self._timer is None or now_s + limit_s < self._fires_s:
            self._set(now_s, limit_s)

    def hurry(self, limit_s: float, text: str) -> None:
        """Nothing more may be heard for longer than this; what allows less stays. The time before does not count."""
        if self._limit_s is None or limit_s < self._limit_s:
            self.wait(limit_s, text)

    def rest(self) -> None:
        """Nothing is waited for."""
        self._limit_s = None

    def close(self) -> None:
        """For good: nobody is told of anything any more, nor kept in memory for it."""
        self._limit_s = None
        self._on_end = _ignore
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, now_s: float, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_s = now_s + delay_s
        self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        limit_s = self._limit_s
        if limit_s is None:
            return
        now_s = self._loop.time()
        left_s = self.heard_s + limit_s - now_s
        if left_s > 0:
            self._set(now_s, left_s)
        else:
            self._limit_s = None
            self._on_end(self._text.format(limit_s))


def _ignore(_text: str) -> None:
    pass
