"""What instances report, all the way through: into sizes, drift, the ladder, and the decisions that are shown."""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.upstream import Script, json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Finished = Callable[[], list[dict[str, Any]]]

N_TOKENS = 2_000
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "once more " * 800}]}).encode()
ADMIN = {"port": 0}
ROUTING = {"strategy": "least_outstanding_requests", "block_tokens": 64}


def reporting(cached_tokens: int | None, prompt_tokens: int = N_TOKENS) -> Script:
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return json_answer({"usage": {"prompt_tokens": prompt_tokens, "prompt_tokens_details": details}})


@asynccontextmanager
async def admin(app: App) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, Any]]]]:
    async with aiohttp.ClientSession() as session:

        async def get(path: str) -> tuple[int, Any]:
            async with session.get(f"{app.admin_url}{path}") as response:
                return response.status, await response.json()

        yield get


async def test_an_engine_that_caches_nothing_is_found_out_and_told_of_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        FakeUpstream(reporting(0)) as upstream,
        serve(upstream, routing=ROUTING, admin=ADMIN) as app,
        admin(app) as get,
        RawClient(app.url) as client,
    ):
        for _ in range(60):
            assert (await client.request(body=BODY)).status == 200
        _, instances = await get("/instances")
        _, ladder = await get("/ladder")
    (instance,) = instances
    assert instance["prediction"] == "over_predicting"
    assert not instance["capacity_told"]
    assert instance["capacity_tokens"] < 1_000_000
    assert ladder["requests"] == 60
    assert max(ladder["gaps"], key=ladder["gaps"].__getitem__) == "engine"
    assert ladder["tokens"]["chosen"] > 0.9 * ladder["tokens"]["prompt"]
    told = [record for record in caplog.records if record.name == "prefixroute.drift"]
    assert [(record.levelno, record.__dict__["fields"]["prediction"]) for record in told] == [
        (logging.WARNING, "over_predicting")
    ]
    assert "is prefix caching on" in told[0].getMessage()


async def test_an_engine_that_reports_nothing_is_not_blamed(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        FakeUpstream(reporting(None)) as upstream,
        serve(upstream, routing=ROUTING, admin=ADMIN) as app,
        admin(app) as get,
        RawClient(app.url) as client,
    ):
        for _ in range(30):
            await client.request(body=BODY)
        _, (instance,) = await get("/instances")
        _, ladder = await get("/ladder")
    assert (instance["prediction"], instance["capacity_tokens"]) == ("unknown", 1_000_000)
    assert (ladder["requests"], ladder["gaps"], ladder["unreported"]["requests"]) == (0, {}, 30)
    assert [record for record in caplog.records if record.name == "prefixroute.drift"] == []


async def test_a_decision_can_be_asked_for_while_its_request_is_under_way_and_after(
    serve: Serve, until: Until, finished: Finished
) -> None:
    async def asks_meanwhile(call: Call) -> None:
        asked.update((await get("/decisions/r-1"))[1])
        await reporting(512)(call)

    asked: dict[str, Any] = {}
    async with (
        FakeUpstream(json_answer({}, status=503)) as a,
        FakeUpstream(asks_meanwhile) as b,
        serve(
            a,
            b,
            routing={**ROUTING, "strategy": "round_robin"},
            admin=ADMIN,
            limits={"max_decisions": 1},
            retry={"budget_ratio": 1.0},
        ) as app,
        admin(app) as get,
        RawClient(app.url) as client,
    ):
        answer = await client.request(body=BODY, headers=[("x-request-id", "r-1")])
        await until(lambda: len(finished()) == 1)
        status, shown = await get("/decisions/r-1")
        assert answer.status == status == 200
        asked_while = dict(asked)
        await client.request(body=BODY, headers=[("x-request-id", "r-2")])
        gone, told = await get("/decisions/r-1")
    assert [decision["chosen"] for decision in shown["decisions"]] == ["gpu-0", "gpu-1"]
    assert [len(decision["candidates"]) for decision in shown["decisions"]] == [2, 1]
    assert shown["attempts"] == ["busy", "answered"]
    assert (shown["over"], shown["outcome"], shown["cached_tokens"]) == (True, "ok", 512)
    assert (asked_while["over"], asked_while["outcome"], asked_while["upstream"]) == (False, None, "gpu-1")
    assert gone == 404
    assert "max_decisions" in told["error"]["message"]


async def test_a_model_name_as_long_as_a_body_is_not_kept(serve: Serve, finished: Finished, until: Until) -> None:
    body = json.dumps({"model": "m" * 100_000, "messages": []}).encode()
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request(body=body, headers=[("x-request-id", "r-1")])).status == 200
        await until(lambda: len(finished()) == 1)
        record = app.parts.decisions.find("r-1")
    assert record is not None
    assert record.model == "other"


async def test_shadows_are_made_of_settings_and_counted(serve: Serve) -> None:
    routing = {"strategy": "expected_latency", "shadow": ["round_robin", "session", "prefix_aware"], "block_tokens": 64}
    async with (
        FakeUpstream() as a, FakeUpstream() as b, serve(a, b, routing=routing) as app, RawClient(app.url) as client,
    ):  # fmt: skip
        for _ in range(10):
            await client.request(body=BODY)
        shadows = app.router.audit.shadows
    assert shadows is not None
    assert [shadow.name for shadow in shadows.shadows] == routing["shadow"]
    assert all(shadow.n_same + shadow.n_different == 10 and not shadow.n_faults for shadow in shadows.shadows)
