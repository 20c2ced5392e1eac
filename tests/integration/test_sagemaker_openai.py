"""An endpoint's OpenAI path, by OpenAI's SDK: the same answers and errors as on the router's own paths, of the
endpoint's instances alone."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import openai
import pytest

from prefixroute.app import App
from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer
from prefixroute.http.routes import is_engine_control, plain_path
from prefixroute.testing import Call, FakeUpstream
from prefixroute.testing.upstream import json_answer
from tests.integration.aws import Json, component, endpoint, endpoints, post, runtime, send, variant

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]

BASE = "/endpoints/support-bot/openai/v1"
LARGE = "/endpoints/support-bot/inference-components/large/openai/v1"
CHAT = f"{BASE}/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
ASKED: Json = {"model": "demo-model", "messages": [{"role": "user", "content": "What is a prefix cache?"}]}
TWO_VARIANTS = endpoints(endpoint(variant("blue", "gpu-0"), variant("green", "gpu-1", weight=0)))


@asynccontextmanager
async def gpt(app: App, base: str = BASE, key: str = "sk-bearer") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{app.url}{base}", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture
async def server() -> AsyncIterator[SimulatedServer]:
    async with SimulatedServer(ServerConfig(EngineConfig(speed=1_000.0))) as running:
        yield running


@pytest.mark.parametrize("lane", ["auto", "aiohttp"])
async def test_chats_whole_and_streamed(serve: Serve, finished: Finished, server: SimulatedServer, lane: str) -> None:
    async with serve(server.url, lane=lane, sagemaker=endpoints()) as app, gpt(app) as client:
        whole = await client.chat.completions.create(**ASKED, max_tokens=10)
        assert whole.choices[0].message.content
        stream = await client.chat.completions.create(
            **ASKED, max_tokens=10, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].usage is not None
        assert [line["route"] for line in finished()] == ["/endpoints/{name}/openai"] * 2
        assert [line["streamed"] for line in finished()] == [False, True]


async def test_turns_of_a_stored_conversation_stay_together(serve: Serve, server: SimulatedServer) -> None:
    async with (
        SimulatedServer(ServerConfig(EngineConfig(speed=1_000.0))) as other,
        serve(server.url, other.url, sagemaker=endpoints()) as app,
        gpt(app) as client,
    ):
        previous: str | None = None
        for _ in range(4):
            response = await client.responses.create(
                model="demo-model", input="hi", max_output_tokens=5, previous_response_id=previous
            )
            previous = response.id
        assert (await client.responses.retrieve(str(previous))).id == previous


async def test_the_container_sees_its_own_path_and_the_bytes_as_sent(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, sagemaker=endpoints()) as app:
        answer = await post(app.url, f"{CHAT}?a=%2F", BODY, Authorization="Bearer sk-own", Accept_Encoding="gzip")
        assert answer.status == 200
        (call,) = upstream.calls
        assert (call.target, call.body) == ("/v1/chat/completions?a=%2F", BODY)
        # Nothing of the contract's, and nothing withheld: this is a path like any other.
        assert (call.header("authorization"), call.header("accept-encoding")) == (None, "gzip")
        assert answer.header("x-amzn-requestid") is None


async def test_signatures_stay_here(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=x", "X_Amz_Date": "20300101T000000Z"}
        assert (await post(app.url, CHAT, BODY, X_Amz_Security_Token="token", **signed)).status == 200
        (call,) = upstream.calls
        assert not [name for name, _ in call.headers if name.lower().startswith(("authorization", "x-amz-"))]


async def test_a_variant_or_a_component_is_asked(serve: Serve) -> None:
    parts = (component("large", "gpu-1"), component("small", "gpu-0"))
    both = endpoints(*TWO_VARIANTS["endpoints"], endpoint(name="parts", components=parts))
    async with FakeUpstream() as one, FakeUpstream() as two, serve(one, two, sagemaker=both) as app:
        for _ in range(3):
            await post(app.url, CHAT, BODY)
        await post(app.url, CHAT, BODY, X_Amzn_SageMaker_Target_Variant="green")
        assert (len(one.calls), len(two.calls)) == (3, 1)
        for _ in range(3):
            await post(app.url, f"{LARGE.replace('support-bot', 'parts')}/chat/completions", BODY)
        other = CHAT.replace("support-bot", "parts")
        await post(app.url, other, BODY, X_Amzn_SageMaker_Inference_Component="small")
        assert (len(one.calls), len(two.calls)) == (4, 4)
        assert {call.target for call in one.calls + two.calls} == {"/v1/chat/completions"}
        assert (await post(app.url, other, BODY)).status == 400


async def test_a_prefix_stays_on_one_instance(serve: Serve) -> None:
    table = endpoints(endpoint(variant(strategy="PREFIX_AWARE")))
    long = "What is a prefix cache? " * 100
    async with (
        FakeUpstream() as one,
        FakeUpstream() as two,
        serve(one, two, sagemaker=table) as app,
        gpt(app) as client,
    ):
        for n in range(6):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{long}{n}"}])
        assert sorted((len(one.calls), len(two.calls))) == [0, 6]


async def test_models_are_those_of_the_endpoints_instances(serve: Serve) -> None:
    def lists(name: str) -> Any:
        return json_answer({"object": "list", "data": [{"id": name, "object": "model"}]})

    async with (
        FakeUpstream(lists("one")) as one,
        FakeUpstream(lists("two")) as two,
        FakeUpstream(lists("three")) as three,
        serve(
            one, two, three, sagemaker=endpoints(endpoint(variant("v", "gpu-0", "gpu-2")), endpoint(name="all"))
        ) as app,
        gpt(app) as client,
        gpt(app, "/endpoints/all/openai/v1") as of_all,
    ):
        assert [model.id async for model in client.models.list()] == ["one", "three"]
        assert [model.id async for model in of_all.models.list()] == ["one", "two", "three"]


async def test_errors_are_in_openais_dialect(serve: Serve) -> None:
    limits = {"wait_for_instance_s": 0.05, "max_body_bytes": 10_000}
    async with (
        FakeUpstream(json_answer({"error": {"message": "no such model"}}, status=404)) as upstream,
        serve(upstream, limits=limits, sagemaker=endpoints()) as app,
        gpt(app) as client,
        gpt(app, "/endpoints/nobody/openai/v1") as nobody,
        gpt(app, LARGE) as no_component,
    ):
        # The instance's own error, as it is.
        with pytest.raises(openai.NotFoundError, match="no such model"):
            await client.chat.completions.create(**ASKED)
        for unknown in (nobody, no_component):
            with pytest.raises(openai.BadRequestError) as refused:
                await unknown.chat.completions.create(**ASKED)
            assert (refused.value.code, refused.value.type) == ("unknown_destination", "invalid_request_error")
        with pytest.raises(openai.APIStatusError) as too_large:
            await client.embeddings.create(model="m", input="x" * 20_000)
        assert (too_large.value.status_code, too_large.value.response.json()["error"]["code"]) == (
            413,
            "body_too_large",
        )
        await upstream.stop()
        with pytest.raises(openai.InternalServerError) as away:
            await client.chat.completions.create(**ASKED)
        assert away.value.status_code in (502, 503)
        assert away.value.response.headers.get("x-amzn-errortype") is None


@pytest.mark.parametrize("below", ["", "/inference-components/one"])
async def test_a_redirect_stays_below_the_endpoint(serve: Serve, below: str) -> None:
    async def redirects(call: Call) -> None:
        location = call.target.rstrip("/")
        if "whole" in call.target:
            location = f"http://{call.header('host')}{location}"
        await json_answer({}, status=307, headers=f"Location: {location}\r\n")(call)

    async with FakeUpstream(redirects) as upstream, serve(upstream) as app:
        base = f"/endpoints/x{below}/openai/v1"
        for path in ("chat/completions", "whole"):
            answer = await post(app.url, f"{base}/{path}/", b"{}")
            assert (answer.status, answer.header("location")) == (307, f"{base}/{path}")


TRICKS = [
    f"{BASE}/{rest}"
    for rest in (
        "load_lora_adapter",
        "%6coad_lora_adapter",
        "load%5Flora_adapter/",
        "/load_lora_adapter",
        "./load_lora_adapter",
        "x/../load_lora_adapter",
        "x/%2e%2e/load_lora_adapter",
        "x%2f..%2fload_lora_adapter",
        "../sleep",
        "%2e%2e/sleep",
        "../v1/load_lora_adapter",
        "..//sleep",
        "..%2fsleep",
        "..%2f..%2f..%2f..%2fsleep",
        "../../../../sleep",
        "%2e%2e/%2e%2e/%2e%2e/%2e%2e/sleep",
        "../../../../endpoints/y/openai/v1/../sleep",
        "../../../../endpoints/y/openai/v1/load_lora_adapter",
        "../../../../endpoints/y/openai/v1/../../../../sleep",
        "../../../../v1/../endpoints/y/openai/v1/load_lora_adapter",
    )
] + [
    "/endpoints/x/openai/v1/../../../../sleep",
    "//endpoints/x/openai/v1/load_lora_adapter",
    "/endpoints/x/openai//v1/load_lora_adapter",
    "/endpoints/x/openai/%76%31/load_lora_adapter",
    "/endpoints/x/inference-components/y/openai/v1/load_lora_adapter",
    "/endpoints/x/inference-components/../openai/v1/load_lora_adapter",
    "/endpoints/x/inference-components/y/openai/v1/../sleep",
    "/endpoints/../openai/v1/load_lora_adapter",
    "/endpoints/%2e%2e/openai/v1/load_lora_adapter",
    "/endpoints/x/invocations/../../../sleep",
    "/endpoints/x/invocations/%2e%2e/openai/v1/load_lora_adapter",
    "/endpoints/x/openai/v1?/../../../../sleep",
    "/endpoints/x/openai/sleep",
    "http://router.test/endpoints/x/openai/v1/load_lora_adapter",
]


@pytest.mark.parametrize("table", [{"endpoints": []}, endpoints(endpoint(name="x"), endpoint(name="y"), endpoint())])
async def test_no_path_leads_to_what_controls_an_engine(serve: Serve, table: Json) -> None:
    """However an instance reads it: what arrives there is no path of that kind."""
    async with FakeUpstream() as upstream, serve(upstream, sagemaker=table) as app:
        for target in TRICKS:
            answer = await post(app.url, target, b"{}")
            assert answer.status in (200, 400, 403), target
        for call in upstream.calls:
            path = plain_path(call.target)
            assert not is_engine_control("POST", path), call.target
            # It is a path of the API, or none of an endpoint's and as sent.
            assert f"{path}/".startswith("/v1/") or call.target in TRICKS, call.target
        # It is there, where it is open.
        plain = f"{BASE}/load_lora_adapter"
        refused = await post(app.url, plain, b"{}")
        assert (refused.status, b"engine_control" in refused.body) == (403, True)


async def test_where_engine_control_is_open_it_is_open_here_as_well(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, engine_control="allow") as app:
        assert (await post(app.url, f"{BASE}/load_lora_adapter", b"{}")).status == 200
        assert upstream.calls[0].target == "/v1/load_lora_adapter"


async def test_labels_are_of_a_closed_set(serve: Serve) -> None:
    """Whatever names clients make up."""
    async with FakeUpstream() as upstream, serve(upstream) as app, runtime(app.url) as client:
        for name in ("made-up-1", "made-up-2"):
            await client.invoke(EndpointName=name, TargetVariant=name)
            await client.stream(EndpointName=name)
            await send(app.url, "POST", f"/endpoints/{name}/openai/v1/chat/completions", BODY)
            await send(app.url, "POST", f"/endpoints/{name}/openai/v1/{name}", BODY)
            await send(app.url, "POST", f"/endpoints/{name}/async-invocations", BODY)
        text = app.metrics.exposition()[0].decode()
        assert "made-up" not in text
        routes = {line.partition('route="')[2].partition('"')[0] for line in text.splitlines() if 'route="' in line}
        assert {route for route in routes if "endpoints" in route} == {
            "/endpoints/{name}/invocations",
            "/endpoints/{name}/invocations-response-stream",
            "/endpoints/{name}/openai",
        }
