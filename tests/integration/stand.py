"""A router with endpoints before containers, of which it can be told which of them took what.

Whether two requests share a prefix is told by where they go: while the first is under way on its instance, another
with the same prefix goes there too, and one with any other prefix goes where fewer are in flight, which is elsewhere.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import comb
from typing import Any

from prefixroute.app import App
from prefixroute.config import Settings
from prefixroute.testing import Call, FakeUpstream, RawAnswer, RawClient, json_answer
from prefixroute.testing.client import head

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

OPENAI = "openai/v1/chat/completions"
STREAM = "invocations-response-stream"
PATHS = ("invocations", STREAM, OPENAI)

LENGTH = 1_024
"""The shortest prefix length there is."""
THRESHOLD = 3
STAYS = "stays"
"""Custom attributes of a request whose answer is not given yet."""
STREAMS = "streams"
"""Of one whose answer has begun."""


def aware(threshold: int = THRESHOLD, length: int = LENGTH) -> dict[str, Any]:
    return {
        "RoutingStrategy": "PREFIX_AWARE",
        "PrefixAwareRoutingConfig": {"PrefixLength": length, "ConcurrencyThreshold": threshold},
    }


def rule(strategy: str) -> dict[str, Any]:
    """A RoutingConfig that has nothing else."""
    return {"RoutingStrategy": strategy}


def variant(
    name: str = "all", *gpus: int, routing: dict[str, Any] | None = None, weight: float = 1.0
) -> dict[str, Any]:
    """`gpus`: numbers of its instances; none: the whole fleet. `routing`: its RoutingConfig; None: left out."""
    made: dict[str, Any] = {"VariantName": name, "InitialVariantWeight": weight}
    if gpus:
        made["Instances"] = [f"gpu-{n}" for n in gpus]
    if routing is not None:
        made["RoutingConfig"] = routing
    return made


def endpoint(name: str, *variants: dict[str, Any], components: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"EndpointName": name, "ProductionVariants": [*variants], "InferenceComponents": [*components]}


def component(name: str, *copies: tuple[str, int], variant: str = "all") -> dict[str, Any]:
    """`copies`: machine, and number of the server."""
    return {
        "InferenceComponentName": name,
        "VariantName": variant,
        "Copies": [{"Instance": machine, "Server": f"gpu-{n}"} for machine, n in copies],
    }


def chat(text: object, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


@dataclass
class Held:
    """A request under way. `begun`: so is its answer."""

    client: RawClient
    call: Call
    begun: bool


def pinned(n: int) -> list[dict[str, Any]]:
    """An endpoint `on-N` for each of `n` containers alone."""
    return [endpoint(f"on-{i}", variant("only", i)) for i in range(n)]


class Stand:
    """A router before some containers, with an endpoint `on-N` for each of them alone."""

    def __init__(self, app: App, fakes: Sequence[FakeUpstream], until: Until) -> None:
        self.app = app
        self.fakes = fakes
        self.until = until
        self._held: list[Held] = []
        self._go = asyncio.Event()

    async def script(self, call: Call) -> None:
        attributes = call.header("x-amzn-sagemaker-custom-attributes")
        if attributes == STREAMS:
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
            await call.send_chunk(b"first")
            await self._go.wait()
            await call.send_chunk(b"")
            return
        if attributes == STAYS:
            await self._go.wait()
        await json_answer({"ok": True})(call)

    async def ask(self, client: RawClient, name: str, body: bytes, **options: Any) -> RawAnswer:
        await client.send(request(name, body, **options))
        return await client.answer()

    async def send(self, name: str, body: bytes = b"x", **options: Any) -> int:
        """A request that is answered. Number of the container that it reached."""
        before = [len(fake.calls) for fake in self.fakes]
        async with RawClient(self.app.url) as client:
            answer = await self.ask(client, name, body, **options)
        assert answer.status == 200, answer.body
        await self.until(lambda: self.app.proxy.n_active == len(self._held))
        return self._reached(before)

    async def hold(self, name: str, body: bytes = b"x", *, attributes: str = STAYS, **options: Any) -> int:
        """A request that stays under way until `let_go`."""
        before = [len(fake.calls) for fake in self.fakes]
        client = await RawClient(self.app.url).__aenter__()
        await client.send(request(name, body, attributes=attributes, **options))
        await self.until(lambda: sum(len(fake.calls) for fake in self.fakes) > sum(before))
        reached = self._reached(before)
        self._held.append(Held(client, self.fakes[reached].calls[-1], begun=attributes == STREAMS))
        if attributes == STREAMS:
            assert (await client.begin()).status == 200
            assert await client.chunk()
        return reached

    async def let_go(self) -> None:
        """Answers all that is under way."""
        self._go.set()
        for held in self._held:
            if held.begun:
                while await held.client.chunk():
                    pass
            else:
                assert (await held.client.answer()).complete
            held.client.close()
        self._held.clear()
        await self.until(lambda: self.app.proxy.n_active == 0)
        self._go = asyncio.Event()

    async def leave(self) -> None:
        """The client of the last request under way goes away."""
        held = self._held.pop()
        held.client.reset()
        await held.call.wait_disconnected()
        await self.until(lambda: self.app.proxy.n_active == len(self._held))

    async def spread(self, name: str, n: int, body: bytes = b"x", **options: Any) -> tuple[Counter[int], list[str]]:
        """How many of `n` requests, one after the other, reached each container; and the variants that were named."""
        before = [len(fake.calls) for fake in self.fakes]
        variants = []
        async with RawClient(self.app.url) as client:
            for _ in range(n):
                answer = await self.ask(client, name, body, **options)
                assert answer.status == 200, answer.body
                variants.append(answer.header("x-amzn-invoked-production-variant") or "")
        return Counter({i: len(fake.calls) - before[i] for i, fake in enumerate(self.fakes)}), variants

    async def share_a_prefix(self, name: str, first: bytes, second: bytes, **options: Any) -> bool:
        """Whether the second goes where the first is. `first_options`: of the first one, where they differ."""
        more = options.pop("first_options", options)
        home = await self.hold(name, first, **more)
        reached = await self.send(name, second, **options)
        await self.let_go()
        return reached == home

    def configure(self, *endpoints: dict[str, Any], **tables: Any) -> None:
        """A reload."""
        now = self.app.settings.model_dump()
        now["sagemaker"]["endpoints"] = [*endpoints, *pinned(len(self.fakes))]
        for table, values in tables.items():
            now[table] |= values
        self.app.apply(Settings.model_validate(now))

    def _reached(self, before: Sequence[int]) -> int:
        (reached,) = [n for n, fake in enumerate(self.fakes) if len(fake.calls) > before[n]]
        return reached


def request(
    name: str,
    body: bytes,
    *,
    path: str = "invocations",
    attributes: str | None = None,
    identity: str | None = None,
    target: str | None = None,
    of: str | None = None,
) -> bytes:
    """`of`: the inference component. `target`: the variant."""
    said = {
        "Custom-Attributes": attributes,
        "Prefix-Aware-Id": identity,
        "Target-Variant": target,
        "Inference-Component": of if path != OPENAI else None,
    }
    headers = [("Content-Type", "application/json")]
    headers += [(f"X-Amzn-SageMaker-{key}", value) for key, value in said.items() if value is not None]
    if path == OPENAI and of is not None:
        name = f"{name}/inference-components/{of}"
    return head("POST", f"/endpoints/{name}/{path}", body, headers) + body


StandWith = Callable[..., AbstractAsyncContextManager[Stand]]


@asynccontextmanager
async def standing(
    serve: Serve, until: Until, *endpoints: dict[str, Any], n: int = 3, **tables: Any
) -> AsyncIterator[Stand]:
    """A router with these endpoints before `n` containers."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeUpstream()) for _ in range(n)]
        configured = {"endpoints": [*endpoints, *pinned(n)]}
        stand = Stand(await stack.enter_async_context(serve(*fakes, sagemaker=configured, **tables)), fakes, until)
        for fake in fakes:
            fake.script = stand.script
        yield stand
        await stand.let_go()


def within(n: int, share: float, found: int) -> bool:
    """Whether so many of `n` are to be expected, if each has this chance: no in less than one of 1e9 times."""
    low = sum(comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(found + 1))
    high = sum(comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(found, n + 1))
    return min(low, high) > 0.5e-9
