"""An event loop on which an hour is over in seconds.

Its clock runs `SPEED` times as fast as the machine's, and so do all limits, pauses and timers that are measured on it,
of router, upstreams and clients alike; sockets work as ever. What lasts 310 s there takes a second here, in the same
order and with the same limits. The router's settings for reaching an instance are generous, because the machine's own
work (a connection, say) seems to take long.
"""

import asyncio
import selectors
from typing import Any

SPEED = 300.0

SETTINGS: dict[str, Any] = {"upstream": {"connect_timeout_s": 500.0}, "health": {"timeout_s": 500.0}}


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> Any:
        return super().select(None if timeout is None else timeout / SPEED)


class FastLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        super().__init__(_Selector())

    def time(self) -> float:
        return super().time() * SPEED
