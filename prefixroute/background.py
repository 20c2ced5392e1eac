"""Work in the background, for as long as a context is open."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

_log = logging.getLogger(__name__)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """`work` runs while the context is open. If a fault ends it, that is logged, and the context stays open."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_say_fault)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _say_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _log.error("%s stopped by a fault", task.get_name(), exc_info=fault)
