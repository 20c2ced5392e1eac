"""Stateful sessions: from the container's word that one began until it ends, its requests go there alone."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.config import Settings
from prefixroute.core.fleet import State
from prefixroute.sagemaker.service import SageMaker
from prefixroute.testing import Call, FakeUpstream
from prefixroute.testing.upstream import json_answer
from tests.integration.aws import Json, Runtime, component, endpoint, endpoints, runtime, variant

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

SOON = {"wait_for_instance_s": 0.05}
LEAST = "LEAST_OUTSTANDING_REQUESTS"


class Container(FakeUpstream):
    """Begins the sessions `sessions`, one after the other, for those who ask for one.

    `expires`: when they end. A request whose body is `close` ends its session, `renew` prolongs it.
    """

    def __init__(self, *sessions: str, expires: str | None = None) -> None:
        super().__init__(self._respond)
        self.sessions = list(sessions)
        self.expires = expires
        self.let_go = asyncio.Event()
        self.let_go.set()

    async def _respond(self, call: Call) -> None:
        await self.let_go.wait()
        session = call.header("x-amzn-sagemaker-session-id")
        said = ""
        if session == "NEW_SESSION":
            said = f"X-Amzn-SageMaker-New-Session-Id: {self._named(self.sessions.pop(0))}\r\n"
        elif call.body == b"renew":
            said = f"X-Amzn-SageMaker-New-Session-Id: {self._named(str(session))}\r\n"
        elif call.body == b"close":
            said = f"X-Amzn-SageMaker-Closed-Session-Id: {session}\r\n"
        await json_answer({"port": self.port}, headers=said)(call)

    def _named(self, session: str) -> str:
        return session if self.expires is None else f"{session}; Expires={self.expires}"


async def begins(client: Runtime, **given: Any) -> str:
    """A new session's id."""
    answer = await client.invoke(SessionId="NEW_SESSION", **given)
    return str(answer["NewSessionId"]).partition(";")[0]


def told(fakes: list[FakeUpstream]) -> list[int]:
    """How many requests each got."""
    return [len(fake.calls) for fake in fakes]


async def is_unknown(client: Runtime, session: str, *, streaming: bool = False, **given: Any) -> bool:
    error = await client.refusal(SessionId=session, streaming=streaming, **given)
    return client.is_a(error, "ValidationError") and "no such session" in error.response["Message"]


def as_it_is(app: App, **tables: Any) -> Json:
    """Its settings, but for these tables."""
    return {**app.settings.model_dump(by_alias=True), **tables}


async def test_a_session_stays_where_it_began(serve: Serve) -> None:
    """Whatever is asked, and of either operation."""
    async with (
        Container("s-1") as one,
        Container("s-2") as two,
        serve(one, two) as app,
        runtime(app.url) as client,
    ):
        first, second = await begins(client), await begins(client)
        assert (first, second) == ("s-1", "s-2")
        for _ in range(3):
            await client.invoke(SessionId=first)
            await client.stream(SessionId=first)
        assert told([one, two]) == [7, 1]
        await client.invoke(SessionId=second)
        assert told([one, two]) == [7, 2]
        # The container is told whose request it is.
        assert {call.header("X-Amzn-SageMaker-Session-Id") for call in one.calls} == {"NEW_SESSION", "s-1"}


@pytest.mark.parametrize("strategy", ["RANDOM", LEAST, "PREFIX_AWARE", "EXPECTED_LATENCY"])
async def test_a_session_stays_where_it_is_busy_and_others_idle(serve: Serve, until: Until, strategy: str) -> None:
    async with (
        Container("s-1") as one,
        Container("s-1") as two,
        serve(one, two, sagemaker=endpoints(endpoint(variant(strategy=strategy)))) as app,
        runtime(app.url) as client,
    ):
        session = await begins(client)
        home, other = (one, two) if one.calls else (two, one)
        home.let_go.clear()
        # Above any threshold.
        asked = [asyncio.create_task(client.invoke(SessionId=session)) for _ in range(4)]
        await home.wait_calls(5)
        assert other.calls == []
        # Who has no session goes where there is room.
        if strategy == LEAST:
            await client.invoke()
            assert told([other]) == [1]
        home.let_go.set()
        await asyncio.gather(*asked)


async def test_a_session_ends_when_it_expires(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [datetime(2030, 1, 1, tzinfo=UTC).timestamp()]
    monkeypatch.setattr("prefixroute.parts.SageMaker", partial(SageMaker, wall_clock=lambda: now[0]))
    async with (
        Container("s-1", "s-2", expires="2030-01-01T00:01:00Z") as container,
        serve(container) as app,
        runtime(app.url) as client,
    ):
        session = await begins(client)
        now[0] += 59
        await client.invoke(SessionId=session)
        container.expires = "2030-01-01T00:05:00Z"
        await client.invoke(b"renew", SessionId=session)
        now[0] += 200
        await client.invoke(SessionId=session)
        now[0] += 41
        assert await is_unknown(client, session)
        assert await is_unknown(client, session, streaming=True)
        # One that is over when it begins.
        assert await is_unknown(client, await begins(client))
        assert told([container]) == [5]


async def test_a_session_ends_when_the_container_closes_it(serve: Serve) -> None:
    async with Container("s-1", "s-1") as container, serve(container) as app, runtime(app.url) as client:
        session = await begins(client)
        assert (await client.invoke(b"close", SessionId=session))["ClosedSessionId"] == session
        assert await is_unknown(client, session)
        # The container may use its id again.
        await client.invoke(SessionId=await begins(client))
        await client.stream(b"close", SessionId=session)
        assert await is_unknown(client, session)


async def test_nobodys_session_is_no_valid_request(serve: Serve) -> None:
    async with Container() as container, serve(container) as app, runtime(app.url) as client:
        for streaming in (False, True):
            assert await is_unknown(client, "nobodys", streaming=streaming)
        assert container.calls == []


@pytest.mark.parametrize("value", ["", "no good", "x; Expires=tomorrow", "NEW_SESSION", "x" * 300])
async def test_a_session_whose_name_is_no_good_is_the_containers_own_matter(serve: Serve, value: str) -> None:
    said = json_answer({}, headers=f"X-Amzn-SageMaker-New-Session-Id: {value}\r\n")
    async with FakeUpstream(said) as container, serve(container) as app, runtime(app.url) as client:
        assert (await client.invoke(SessionId="NEW_SESSION")).get("NewSessionId", "") == value
        assert await is_unknown(client, "x")


async def test_two_endpoints_may_have_a_session_of_the_same_name(serve: Serve) -> None:
    table = endpoints(endpoint(variant("v", "gpu-0"), name="a"), endpoint(variant("v", "gpu-1"), name="b"))
    async with (
        Container("s-1") as one,
        Container("s-1") as two,
        serve(one, two, sagemaker=table) as app,
        runtime(app.url) as client,
    ):
        assert await begins(client, EndpointName="a") == "s-1"
        assert await is_unknown(client, "s-1", EndpointName="b")
        assert await begins(client, EndpointName="b") == "s-1"
        await client.invoke(b"close", SessionId="s-1", EndpointName="a")
        await client.invoke(SessionId="s-1", EndpointName="b")
        assert await is_unknown(client, "s-1", EndpointName="a")
        assert told([one, two]) == [2, 2]


async def test_a_session_is_of_its_variant(serve: Serve) -> None:
    table = endpoints(endpoint(variant("blue", "gpu-0"), variant("green", "gpu-1", weight=0)))
    async with (
        Container() as one,
        Container("s-1") as two,
        serve(one, two, sagemaker=table) as app,
        runtime(app.url) as client,
    ):
        session = await begins(client, TargetVariant="green")
        # Though all traffic goes to the other one.
        assert (await client.invoke(SessionId=session))["InvokedProductionVariant"] == "green"
        assert (await client.invoke(SessionId=session, TargetVariant="green"))["InvokedProductionVariant"] == "green"
        assert await is_unknown(client, session, TargetVariant="blue")
        assert told([one, two]) == [0, 3]


async def test_a_session_is_of_its_component(serve: Serve) -> None:
    parts = (component("large", "gpu-0", "gpu-1"), component("small", "gpu-0"))
    async with (
        Container("s-1") as one,
        Container("s-1") as two,
        serve(one, two, sagemaker=endpoints(endpoint(components=parts))) as app,
        runtime(app.url) as client,
    ):
        session = await begins(client, InferenceComponentName="large")
        home, other = (one, two) if one.calls else (two, one)
        for _ in range(6):
            await client.invoke(SessionId=session, InferenceComponentName="large")
        # It says where it is by itself, too.
        await client.invoke(SessionId=session)
        assert await is_unknown(client, session, InferenceComponentName="small")
        assert told([home, other]) == [8, 0]


async def test_as_many_sessions_are_remembered_as_is_configured(serve: Serve) -> None:
    async with (
        Container("s-1", "s-2", "s-3") as container,
        serve(container, sagemaker={"max_sessions": 2}) as app,
        runtime(app.url) as client,
    ):
        one, two = await begins(client), await begins(client)
        # Used, so that the other one has waited longest.
        await client.invoke(SessionId=one)
        three = await begins(client)
        assert await is_unknown(client, two)
        await client.invoke(SessionId=one)
        await client.invoke(SessionId=three)
        app.apply(Settings.model_validate(as_it_is(app, sagemaker={"max_sessions": 1})))
        assert await is_unknown(client, one)
        await client.invoke(SessionId=three)


# Its container, no more


async def test_a_session_goes_nowhere_else_while_its_container_is_away(serve: Serve, until: Until) -> None:
    async with (
        Container("s-1") as one,
        Container() as two,
        serve(one, two, limits=SOON, health={"interval_s": 0.05}) as app,
        runtime(app.url) as client,
    ):
        session = await begins(client)
        await one.stop()
        for streaming in (False, True):
            error = await client.refusal(SessionId=session, streaming=streaming)
            assert client.is_a(error, "ServiceUnavailable")
        await until(lambda: app.router.fleet.state("gpu-0").state is not State.UP)
        assert client.is_a(await client.refusal(SessionId=session), "ServiceUnavailable")
        # Without a session there is somebody.
        await client.invoke()
        await one.start()
        await until(lambda: app.router.fleet.state("gpu-0").state is State.UP)
        await client.invoke(SessionId=session)
        assert told([one, two]) == [2, 1]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_session_goes_nowhere_else_while_its_container_is_busy(serve: Serve, status: int) -> None:
    async with Container("s-1") as one, Container() as two, serve(one, two) as app, runtime(app.url) as client:
        session = await begins(client)
        one.script = json_answer({"error": "busy"}, status=status)
        error = await client.refusal(SessionId=session)
        assert (client.is_a(error, "ModelError"), error.response["OriginalStatusCode"]) == (True, status)
        assert told([one, two]) == [2, 0]


async def test_a_session_goes_nowhere_else_while_its_container_is_drained(serve: Serve) -> None:
    async with (
        Container("s-1") as one,
        Container() as two,
        serve(one, two, limits=SOON) as app,
        runtime(app.url) as client,
    ):
        session = await begins(client)
        app.router.fleet.drain("gpu-0")
        assert client.is_a(await client.refusal(SessionId=session), "ServiceUnavailable")
        app.router.fleet.undrain("gpu-0")
        await client.invoke(SessionId=session)
        assert told([one, two]) == [2, 0]


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_session_is_over_when_its_container_is_taken_away(serve: Serve, until: Until, comes_back: bool) -> None:
    """Another one of its name has never heard of it."""
    async with (
        Container("s-1") as one,
        Container() as two,
        Container() as three,
        serve(one, two) as app,
        runtime(app.url) as client,
    ):
        session = await begins(client)
        fleet = app.settings.model_dump()["fleet"]
        new = {"url": three.url, "name": "gpu-0" if comes_back else "gpu-9"}
        fleet["instances"] = [new, *fleet["instances"][1:]]
        app.apply(Settings.model_validate(as_it_is(app, fleet=fleet)))
        await until(lambda: all(app.router.fleet.state(i.name).state is State.UP for i in app.router.fleet.instances))
        assert await is_unknown(client, session)
        assert told([one, two, three]) == [1, 0, 0]


async def test_a_session_survives_a_change_of_what_it_does_not_concern(serve: Serve) -> None:
    table = endpoints(endpoint(variant("v", "gpu-0", "gpu-1")))
    async with (
        Container("s-1") as one,
        Container("s-1") as two,
        serve(one, two, sagemaker=table) as app,
        runtime(app.url) as client,
    ):
        session = await begins(client)
        home = "gpu-0" if one.calls else "gpu-1"
        changed = endpoints(endpoint(variant("v", "gpu-0", "gpu-1", strategy=LEAST)), endpoint(name="new"))
        app.apply(Settings.model_validate(as_it_is(app, sagemaker=changed)))
        for _ in range(4):
            await client.invoke(SessionId=session)
        assert sorted(told([one, two])) == [0, 5]
        # Its container is another endpoint's now.
        others = {"gpu-0", "gpu-1"} - {home}
        moved = endpoints(endpoint(variant("v", *others)), endpoint(variant("v", home), name="new"))
        app.apply(Settings.model_validate(as_it_is(app, sagemaker=moved)))
        assert await is_unknown(client, session)
        assert sorted(told([one, two])) == [0, 5]
