"""Routers of this process before real engines."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from prefixroute.app import App, running
from prefixroute.config import Settings
from prefixroute.core.fleet import State
from prefixroute.core.kv_sources import Trust
from tests.engines.servers import tiny_model
from tests.engines.waiting import wait_until

# A router imports its tokenizer's libraries in a process of its own, and asks each instance what it makes of a sample.
KNOWING_S = 120.0


def exact_tokens() -> dict[str, Any]:
    """Settings for the tiny model's own tokens. No prompt is too long for its budget: machines are busy."""
    return {"kind": "huggingface", "path": str(tiny_model()), "budget_ms": 10_000.0}


class Server(Protocol):
    """Whatever is to be routed to."""

    @property
    def url(self) -> str: ...


@asynccontextmanager
async def before(
    servers: Sequence[Server],
    *,
    strategy: str = "expected_latency",
    instance: Mapping[str, Any] | None = None,
    **tables: Any,
) -> AsyncIterator[App]:
    """A router before `servers`, named gpu-0, gpu-1, …; once it has found all of them well.

    `instance`: settings of each. Where events or tokens are exact, once they are trusted.
    """
    settings = Settings.model_validate(
        {
            "listen": {"port": 0},
            "admin": {"port": 0},
            "fleet": {
                "instances": [
                    {"url": server.url, "name": f"gpu-{i}", **(instance or {})} for i, server in enumerate(servers)
                ]
            },
            "routing": {"strategy": strategy},
            "drain_timeout_s": 0.0,
            **tables,
        }
    )
    async with running(settings, environ={}) as app:
        await wait_until(lambda: all(one.state is State.UP for one in app.router.fleet.states()), KNOWING_S)
        if app.exact is not None:
            await wait_until_trusted(app)
        if "tokenizer" in tables:
            await wait_until(lambda: app.metrics.exact_tokens().state == "exact", KNOWING_S)
        yield app


async def wait_until_trusted(app: App) -> None:
    """Until what each instance tells of its cache is believed."""
    exact = app.exact
    assert exact is not None
    slots = [one.slot for one in app.router.fleet.instances]
    await wait_until(lambda: all(exact.trust(slot) is Trust.TRUSTED for slot in slots), KNOWING_S)
