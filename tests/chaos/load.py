"""Clients: so many requests a second, whatever becomes of those before; half of them streamed, each with a marker."""

import asyncio
import json
import time
from contextlib import suppress

from prefixroute.testing import RawClient
from tests.chaos.instance import answer_of
from tests.chaos.judge import Asked

# So many conversations go on; their beginnings are what the router keeps maps of.
_N_CONVERSATIONS = 12
_PATIENCE_S = 40.0


class Load:
    """Use it as an async context manager: it goes on while that is open, and in the end waits for every answer."""

    def __init__(self, url: str, per_second: float, name: str) -> None:
        self.asked: list[Asked] = []
        self._url = url
        self._pause_s = 1 / per_second
        self._name = name
        self._idle: list[RawClient] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._source: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Load":
        self._source = asyncio.create_task(self._go_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._source is not None:
            self._source.cancel()
            with suppress(asyncio.CancelledError):
                await self._source
        if self._tasks:
            await asyncio.wait(self._tasks)
        for client in self._idle:
            await client.__aexit__(None, None, None)

    async def _go_on(self) -> None:
        began_s, n = time.monotonic(), 0
        while True:
            task = asyncio.create_task(self._ask(n))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            n += 1
            await asyncio.sleep(max(0.0, began_s + n * self._pause_s - time.monotonic()))

    async def _ask(self, n: int) -> None:
        marker, streamed = f"{self._name}-{n}", n % 2 == 0
        story = f"conversation {n % _N_CONVERSATIONS} " * 150
        body = json.dumps({"model": "m", "prompt": story + marker, "stream": streamed}, separators=(",", ":")).encode()
        began_s = time.monotonic()
        status, whole, sound = None, False, False
        client = self._idle.pop() if self._idle else await RawClient(self._url).__aenter__()
        keep = False
        try:
            async with asyncio.timeout(_PATIENCE_S):
                answer = await client.request(
                    "POST", "/v1/completions", body, [("Content-Type", "application/json"), ("x-request-id", marker)]
                )
            status, whole = answer.status, answer.complete
            sound = answer.body == answer_of(marker, streamed=streamed)
            keep = whole and answer.header("connection") is None
        except (OSError, EOFError, TimeoutError):
            pass
        self.asked.append(Asked(marker, streamed, began_s, time.monotonic(), status, whole, sound))
        if keep:
            self._idle.append(client)
        else:
            await client.__aexit__(None, None, None)
