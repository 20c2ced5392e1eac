"""What the router holds in memory while clients are many, slow, or mean. Real processes; Linux tells the sizes."""

import asyncio
import json
from contextlib import AsyncExitStack

from prefixroute.testing import RawClient
from prefixroute.testing.client import head
from tests.chaos.instance import answer_of
from tests.chaos.stand import Stand, rss_bytes

_JSON = [("Content-Type", "application/json")]
_SETTLE_S = 0.2
# Samples without growth after which nothing more is taken in.
_N_STILL = 5


async def settled_rss(stand: Stand) -> int:
    """The router's memory once it has stopped growing."""
    highest, n_still = rss_bytes(stand.pid), 0
    while n_still < _N_STILL:
        await asyncio.sleep(_SETTLE_S)
        now = rss_bytes(stand.pid)
        n_still = n_still + 1 if now <= highest else 0
        highest = max(highest, now)
    return highest


async def slow_readers(stand: Stand, n: int, n_bytes: int) -> float:
    """Bytes of memory that each of `n` clients costs that ask for `n_bytes` and read next to nothing of them."""
    await _flood(stand, 1)
    before = await settled_rss(stand)
    async with AsyncExitStack() as stack:
        for i in range(n):
            client = await stack.enter_async_context(RawClient(stand.url, read_bytes=4_096))
            body = b"%d" % n_bytes
            await client.send(head("POST", "/flood", body, [("x-request-id", f"slow-{i}")]) + body)
            await client.begin()
        return (await settled_rss(stand) - before) / n


async def _flood(stand: Stand, n: int) -> None:
    for i in range(n):
        async with RawClient(stand.url) as client:
            answer = await client.request("POST", "/flood", b"%d" % 2**20, [("x-request-id", f"warm-{i}")])
            assert len(answer.body) == 2**20


async def trickled_uploads(stand: Stand, n: int, n_bytes: int) -> float:
    """Memory taken for each byte received of `n` bodies of `n_bytes`, which come in pieces and not to their end."""
    piece = b"x" * 65_536
    await _flood(stand, 1)
    before = await settled_rss(stand)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawClient(stand.url)) for _ in range(n)]
        for i, client in enumerate(clients):
            fields = [*_JSON, ("Content-Length", str(n_bytes + 1)), ("x-request-id", f"upload-{i}")]
            await client.send(head("POST", "/v1/completions", None, fields) + b'{"prompt":"')
        for _ in range(n_bytes // len(piece)):
            for client in clients:
                await client.send(piece)
        return (await settled_rss(stand) - before) / (n * n_bytes)


async def many_streams(stand: Stand, n: int) -> tuple[int, int]:
    """How many of `n` streams that are open at a time came whole, and the most that were in flight."""

    async def one(i: int) -> bool:
        marker = f"stream-{i}"
        fields = [*_JSON, ("x-request-id", marker)]
        body = json.dumps({"prompt": "x", "stream": True, "slow": True}, separators=(",", ":")).encode()
        async with RawClient(stand.url) as client:
            answer = await client.request("POST", "/v1/completions", body, fields)
            return answer.complete and answer.body == answer_of(marker, streamed=True)

    tasks = [asyncio.create_task(one(i)) for i in range(n)]
    most = 0
    while not all(task.done() for task in tasks):
        metrics = await stand.metrics()
        most = max(most, int(sum(value for series, value in metrics.items() if series[0] == "in_flight")))
        await asyncio.sleep(_SETTLE_S)
    return sum(task.result() for task in tasks), most
