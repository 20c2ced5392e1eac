"""Where requests go: by the models that instances list, the stored response they name, or else by load."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from random import Random
from types import ModuleType
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


def chat(model: str) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()


# ---------------------------------------------------------------------- models


async def test_a_request_goes_where_its_model_is(serve: Serve) -> None:
    adapters = ("base", "org/lora:v1", "a b", "m\u00e9")
    async with FakeUpstream(models=("base",)) as one, FakeUpstream(models=adapters) as two, serve(one, two) as app:
        async with RawClient(app.url) as client:
            for name in adapters[1:]:
                for _ in range(2):
                    assert (await client.request(body=chat(name))).status == 200
        assert one.calls == []
        assert two.bodies == [chat(name) for name in adapters[1:] for _ in range(2)]


async def test_a_model_that_nobody_lists_goes_by_load_and_the_instance_answers_for_itself(
    serve: Serve, finished: Finished
) -> None:
    unknown = json_answer({"error": {"message": "The model `x` does not exist.", "code": 404}}, status=404)
    async with FakeUpstream(unknown) as one, FakeUpstream(unknown) as two, serve(one, two) as app:
        async with RawClient(app.url) as client:
            for _ in range(2):
                answer = await client.request(body=chat("x"))
                assert (answer.status, json.loads(answer.body)["error"]["code"]) == (404, 404)
        assert (len(one.calls), len(two.calls)) == (1, 1)
        # A name of the client's own is no label and no word in the log.
        assert [line["model"] for line in finished()] == ["other", "other"]


async def test_configured_models_need_no_asking(serve: Serve) -> None:
    async with (
        FakeUpstream(models=("other",)) as upstream,
        serve(upstream, instance={"models": ["mine"]}) as app,
        RawClient(app.url) as client,
    ):
        assert (await client.request(body=chat("mine"))).status == 200
        assert app.router.fleet.knows_model("mine")
        assert not app.router.fleet.knows_model("other")


async def test_a_model_whose_only_instance_is_away_is_waited_for(serve: Serve) -> None:
    """Another instance would only say that it does not know the model."""
    async with FakeUpstream(models=("a",)) as one, FakeUpstream(models=("b",)) as two:
        async with serve(one, two, limits={"wait_for_instance_s": 0.02}) as app, RawClient(app.url) as client:
            await two.stop()
            assert (await client.request(body=chat("b"))).status == 503
        assert one.calls == []


# ---------------------------------------------------------------------- stored responses


def stores(name: str) -> Callable[[Call], Awaitable[None]]:
    async def script(call: Call) -> None:
        if call.method != "POST" or call.target != RESPONSES:
            await json_answer({"from": name})(call)
        elif b'"stream":true' in call.body:
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            # The id is cut in two by the chunks, as it may be.
            await call.send_chunk(b'event: response.created\ndata: {"response":{"id":"resp_st')
            await call.send_chunk(b'ream%s"}}\n\n' % name.encode())
            await ended.wait()
            await call.send_chunk(b"")
        else:
            await json_answer({"id": f"resp_{name}", "object": "response", "previous_response_id": "resp_x"})(call)

    ended = asyncio.Event()
    script.ended = ended  # type: ignore[attr-defined]
    return script


def response(**fields: object) -> bytes:
    return json.dumps({"model": "m", "input": "hi", **fields}, separators=(",", ":")).encode()


async def test_what_names_a_stored_response_goes_where_it_was_made(serve: Serve, finished: Finished) -> None:
    fakes = [FakeUpstream(stores(name)) for name in "abc"]
    for fake in fakes:
        await fake.start()
    a, b, c = fakes
    async with serve(a, b, c) as app, RawClient(app.url) as client:
        for _ in range(3):
            assert (await client.request("POST", RESPONSES, response())).status == 200
        for method, path, body in [
            ("GET", "/v1/responses/resp_b", None),
            ("GET", "/v1/responses/resp_b?stream=true", None),
            ("GET", "/v1/responses/resp%5Fb", None),
            ("GET", "/v1/responses/resp_b/input_items", None),
            ("POST", "/v1/responses/resp_b/cancel", b""),
            ("DELETE", "/v1/responses/resp_b", None),
            ("POST", RESPONSES, response(previous_response_id="resp_b")),
        ]:
            assert (await client.request(method, path, body)).status == 200
            assert b.calls[-1].target == path
        assert [len(fake.calls) for fake in fakes] == [1, 8, 1]
        assert {line["reason"] for line in finished()[3:]} == {"stored"}
        # An id that nobody knows goes by load.
        assert (await client.request("GET", "/v1/responses/resp_z")).status == 200
        assert finished()[-1]["reason"] == "turn"
    for fake in fakes:
        await fake.stop()


async def test_a_stored_response_is_found_while_it_is_still_being_made(serve: Serve) -> None:
    script = stores("a")
    async with FakeUpstream(script) as a, FakeUpstream(stores("b")) as b, serve(a, b) as app:
        async with RawClient(app.url) as client, RawClient(app.url) as other:
            body = response(stream=True)
            await client.send(head("POST", RESPONSES, body) + body)
            await client.begin()
            seen = b""
            while b"resp_streama" not in seen:
                seen += await client.chunk()
            for _ in range(3):
                await other.request("POST", "/v1/responses/resp_streama/cancel", b"")
            script.ended.set()  # type: ignore[attr-defined]
            assert await client.chunk() == b""
        assert (len(a.calls), len(b.calls)) == (4, 0)


async def test_a_busy_home_is_not_replaced_by_one_that_cannot_know(serve: Serve) -> None:
    async def script(call: Call) -> None:
        if call.method == "POST":
            await stores("a")(call)
        else:
            await json_answer({"busy": True}, status=503)(call)

    async with FakeUpstream(script) as a, FakeUpstream() as b, serve(a, b) as app, RawClient(app.url) as client:
        await client.request("POST", RESPONSES, response())
        assert (await client.request("GET", "/v1/responses/resp_a")).status == 503
        assert b.calls == []


async def test_a_home_that_is_gone_leaves_the_answer_to_the_others(serve: Serve) -> None:
    lost = json_answer({"error": "no such response"}, status=404)
    async with (
        FakeUpstream(stores("a")) as a,
        FakeUpstream(lost) as b,
        serve(a, b) as app,
        RawClient(app.url) as client,
    ):
        await client.request("POST", RESPONSES, response())
        await a.stop()
        assert (await client.request("GET", "/v1/responses/resp_a")).status == 404


async def test_few_homes_are_remembered(serve: Serve) -> None:
    async with (
        FakeUpstream(stores("a")) as a,
        FakeUpstream(stores("b")) as b,
        serve(a, b, limits={"max_stored_responses": 1}) as app,
        RawClient(app.url) as client,
    ):
        for _ in range(2):
            await client.request("POST", RESPONSES, response())
        for _ in range(2):
            await client.request("GET", "/v1/responses/resp_b")
        assert (len(a.calls), len(b.calls)) == (1, 3)
        for _ in range(2):
            await client.request("GET", "/v1/responses/resp_a")
        assert (len(a.calls), len(b.calls)) == (2, 4)


# ---------------------------------------------------------------------- a policy that fails


class Broken:
    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at

    def pick(self, facts: Facts, candidates: object, rng: Random) -> Decision:
        if self.fails_at == "pick":
            raise ValueError("sk-secret")
        if self.fails_at == "stranger":
            return None  # type: ignore[return-value]
        assert isinstance(candidates, tuple)
        candidate = candidates[0]
        assert isinstance(candidate, Candidate)
        from prefixroute.core.policy import Reason

        return Decision(candidate, Reason.CUSTOM)

    def record(self, facts: Facts, decision: Decision) -> None:
        if self.fails_at == "record":
            raise ValueError("sk-secret")


@pytest.mark.parametrize("fails_at", ["pick", "record"])
async def test_a_policy_that_fails_costs_no_request(
    serve: Serve,
    finished: Finished,
    expected_errors: list[str],
    monkeypatch: pytest.MonkeyPatch,
    fails_at: str,
) -> None:
    expected_errors.append("strategy custom failed")
    module = ModuleType("a_users_policy")
    module.make = Broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_policy", module)
    custom = {"factory": "a_users_policy:make", "options": {"fails_at": fails_at}}
    async with FakeUpstream() as one, FakeUpstream() as two:
        async with serve(one, two, routing={"strategy": "custom", "custom": custom}) as app:
            async with RawClient(app.url) as client:
                for _ in range(4):
                    assert (await client.request(body=chat("m"))).status == 200
            assert app.router.n_policy_faults == 4
            assert b"prefixroute_policy_faults_total 4.0" in app.metrics.exposition()[0]
        assert finished()[0]["reason"] == ("fallback" if fails_at == "pick" else "custom")


@pytest.mark.parametrize(
    "strategy", ["random", "round_robin", "least_outstanding_requests", "prefix_aware", "session", "expected_latency"]
)
async def test_every_strategy_serves_every_request(serve: Serve, strategy: str) -> None:
    async with FakeUpstream() as one, FakeUpstream() as two, serve(one, two, routing={"strategy": strategy}) as app:
        async with RawClient(app.url) as client:
            for target, body in [(CHAT, chat("m")), (CHAT, b"{"), ("/v1/embeddings", b"{}"), ("/unknown", b"x")]:
                for headers in ([], [("X-Session-Id", "s"), ("X-Amzn-SageMaker-Prefix-Aware-Id", "p")]):
                    assert (await client.request("POST", target, body, headers)).status == 200
        assert len(one.calls) + len(two.calls) == 8
