"""Waiting for what nothing here tells of: an engine's own state, and what background work has learned."""

import asyncio
from collections.abc import Awaitable, Callable

_POLL_S = 0.01


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Until it holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(_POLL_S)


async def wait_until_told(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Until who is asked says so. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(_POLL_S)
