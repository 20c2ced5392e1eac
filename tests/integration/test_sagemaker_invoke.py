"""InvokeEndpoint, by boto3: what it is told reaches the container, and what the container says comes back."""

import gzip
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer
from prefixroute.testing import Call, FakeUpstream
from prefixroute.testing.upstream import json_answer, raw_answer
from tests.integration.aws import (
    STREAM,
    WHOLE,
    Json,
    component,
    endpoint,
    endpoints,
    post,
    runtime,
    variant,
)

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]

EVERY_BYTE = bytes(range(256)) * 4
LARGE = Random(1).randbytes(5_000_000)
PARTS = b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\n\xff\x00\r\n--b--\r\n'
EVERYTHING: Json = {
    "ContentType": "application/x-own; v=1",
    "Accept": "application/json;verbose=true",
    "CustomAttributes": "trace=1, tenant=a",
    "TargetModel": "models/one.tar.gz",
    "TargetVariant": "blue",
    "TargetContainerHostname": "second",
    "InferenceId": "inference 17",
    "EnableExplanations": "`true`",
    "InferenceComponentName": "adapter-1",
    "SessionId": "NEW_SESSION",
    "PrefixAwareId": "app one",
}
# Of the client's connection, or the router's to add.
OTHERS = {"host", "user-agent", "content-length", "x-request-id"}

lanes = pytest.mark.parametrize("lane", ["auto", "aiohttp"])


async def echo(call: Call) -> None:
    await raw_answer(call.body, headers=f"content-type: {call.header('content-type') or 'none'}\r\n")(call)


@lanes
async def test_everything_that_is_said_reaches_the_container_and_nothing_else(serve: Serve, lane: str) -> None:
    """And whoever asks gets to know: no signature, no token, nothing of the SDK's own."""
    async with (
        FakeUpstream() as upstream,
        serve(upstream, lane=lane) as app,
        runtime(app.url, "AKID", "secret", "a-session-token") as client,
    ):
        await client.invoke(b"\x00 a body", **EVERYTHING)
        (call,) = upstream.calls
        assert (call.method, call.target, call.body) == ("POST", "/invocations", b"\x00 a body")
        told = client.client.meta.service_model.operation_model("InvokeEndpoint").input_shape.members
        names = {shape.serialization["name"]: EVERYTHING[n] for n, shape in told.items() if n in EVERYTHING}
        assert {name: call.all_headers(name) for name in names} == {name: [value] for name, value in names.items()}
        sent = {name.lower() for name, _ in call.headers}
        assert sent == OTHERS | {name.lower() for name in names}


@lanes
async def test_everything_that_the_container_says_comes_back(serve: Serve, lane: str, finished: Finished) -> None:
    """But what is the endpoint's to say, whatever a container thinks of it."""
    said = (
        "X-Amzn-SageMaker-Custom-Attributes: c=1\r\n"
        "X-Amzn-SageMaker-New-Session-Id: s-1; Expires=2038-01-01T00:00:00Z\r\n"
        "X-Amzn-SageMaker-Closed-Session-Id: s-0\r\n"
        "x-Amzn-Invoked-Production-Variant: mine\r\n"
        "x-amzn-RequestId: mine\r\n"
        "x-amzn-ErrorType: ModelError\r\n"
        "X-Of-The-Container: 1\r\n"
    )
    async with (
        FakeUpstream(json_answer({"ok": 1}, headers=said)) as upstream,
        serve(upstream, lane=lane) as app,
        runtime(app.url) as client,
    ):
        answer = await client.invoke(TargetVariant="blue")
        about = answer.pop("ResponseMetadata")
        assert answer == {
            "Body": b'{"ok": 1}',
            "ContentType": "application/json",
            "InvokedProductionVariant": "blue",
            "CustomAttributes": "c=1",
            "NewSessionId": "s-1; Expires=2038-01-01T00:00:00Z",
            "ClosedSessionId": "s-0",
        }
        assert about["HTTPHeaders"]["x-of-the-container"] == "1"
        assert "x-amzn-errortype" not in about["HTTPHeaders"]
        (line,) = finished()
        assert about["RequestId"] == line["request_id"] == upstream.calls[0].header("x-request-id")
        assert (line["route"], line["outcome"]) == ("/endpoints/{name}/invocations", "ok")


async def test_the_variant_without_a_name_is_the_one_that_took_it(serve: Serve) -> None:
    table = endpoints(endpoint(variant("blue", "gpu-0"), variant("green", "gpu-1", weight=0)))
    async with (
        FakeUpstream() as one,
        FakeUpstream() as two,
        serve(one, two, sagemaker=table) as app,
        runtime(app.url) as client,
    ):
        for _ in range(4):
            assert (await client.invoke())["InvokedProductionVariant"] == "blue"
        assert (await client.invoke(TargetVariant="green"))["InvokedProductionVariant"] == "green"
        assert (len(one.calls), len(two.calls)) == (4, 1)


async def test_traffic_is_divided_by_the_variants_weights(serve: Serve) -> None:
    table = endpoints(endpoint(variant("blue", weight=3), variant("green", weight=1)))
    async with FakeUpstream() as upstream, serve(upstream, sagemaker=table) as app:
        taken = [(await post(app.url)).header("x-amzn-invoked-production-variant") for _ in range(200)]
        # Six standard deviations either way.
        assert 113 <= taken.count("blue") <= 187
        assert taken.count("blue") + taken.count("green") == 200


async def test_a_component_is_asked_on_its_copies(serve: Serve) -> None:
    table = endpoints(endpoint(components=(component("small", "gpu-0"), component("large", "gpu-1"))))
    async with (
        FakeUpstream() as one,
        FakeUpstream() as two,
        serve(one, two, sagemaker=table) as app,
        runtime(app.url) as client,
    ):
        for _ in range(3):
            await client.invoke(InferenceComponentName="large", TargetVariant="AllTraffic")
        await client.invoke(InferenceComponentName="small")
        assert (len(one.calls), len(two.calls)) == (1, 3)
        assert two.calls[0].header("X-Amzn-SageMaker-Inference-Component") == "large"


async def test_without_configured_endpoints_every_name_means_the_whole_fleet(serve: Serve) -> None:
    async with (
        FakeUpstream() as one,
        FakeUpstream() as two,
        serve(one, two) as app,
        runtime(app.url) as client,
    ):
        for name in ("a", "b" * 63, "A-1-z", "9"):
            assert (await client.invoke(EndpointName=name))["InvokedProductionVariant"] == "AllTraffic"
        answer = await client.invoke(TargetVariant="any", InferenceComponentName="any-too")
        assert answer["InvokedProductionVariant"] == "any"
        # By the router's own strategy: in turn.
        assert (len(one.calls), len(two.calls)) == (3, 2)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "application/octet-stream"),
        (EVERY_BYTE, "application/octet-stream"),
        (b"\xff\xfe not JSON {", "application/json"),
        (gzip.compress(b'{"prompt": "hi"}'), "application/json"),
        (PARTS, "multipart/form-data; boundary=b"),
        (LARGE, "application/x-npy"),
        ("text, not bytes: é", "text/plain"),
    ],
    ids=["empty", "binary", "no-json", "gzip", "multipart", "large", "text"],
)
@lanes
async def test_bodies_are_left_as_they_are(serve: Serve, lane: str, body: Any, kind: str) -> None:
    async with FakeUpstream(echo) as upstream, serve(upstream, lane=lane) as app, runtime(app.url) as client:
        sent = body.encode() if isinstance(body, str) else body
        answer = await client.invoke(body, ContentType=kind)
        assert upstream.bodies == [sent]
        assert (answer["Body"], answer["ContentType"]) == (sent, kind)


async def test_a_file_goes_as_it_is(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "body"
    path.write_bytes(EVERY_BYTE)
    async with FakeUpstream(echo) as upstream, serve(upstream) as app, runtime(app.url) as client:
        with path.open("rb") as file:
            assert (await client.invoke(file))["Body"] == EVERY_BYTE


async def test_a_coded_body_goes_on_coded(serve: Serve) -> None:
    body = gzip.compress(b'{"prompt": "hi"}')
    async with FakeUpstream() as upstream, serve(upstream) as app:
        answer = await post(app.url, WHOLE, body, Content_Encoding="gzip", Content_Type="application/json")
        assert answer.status == 200
        assert (upstream.calls[0].header("content-encoding"), upstream.bodies) == ("gzip", [body])


@pytest.mark.parametrize(("status", "body"), [(200, b"x"), (201, b"made"), (202, b""), (204, b"")])
async def test_every_success_of_the_container_is_one(serve: Serve, status: int, body: bytes) -> None:
    async with (
        FakeUpstream(raw_answer(body, status=status)) as upstream,
        serve(upstream) as app,
        runtime(app.url) as client,
    ):
        for _ in range(2):
            answer = await client.invoke()
            assert (answer["ResponseMetadata"]["HTTPStatusCode"], answer["Body"]) == (status, body)


async def test_an_answer_without_a_length_comes_whole(serve: Serve) -> None:
    async def pours(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(LARGE), 700_000):
            await call.send_chunk(LARGE[start : start + 700_000])
        await call.send_chunk(b"")

    async with FakeUpstream(pours) as upstream, serve(upstream) as app, runtime(app.url) as client:
        assert (await client.invoke())["Body"] == LARGE


async def test_an_answer_that_breaks_off_is_no_whole_one(serve: Serve) -> None:
    async def breaks(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        call.close()

    async with FakeUpstream(breaks) as upstream, serve(upstream) as app:
        answer = await post(app.url)
        assert (answer.status, answer.body, answer.complete) == (200, b"half", False)


async def test_the_containers_own_key_stands_in_for_the_signature(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "instance.key"
    file.write_text("sk-own\n")
    async with (
        FakeUpstream() as upstream,
        serve(upstream, instance={"api_key_file": str(file)}) as app,
        runtime(app.url) as client,
    ):
        await client.invoke()
        await client.stream()
        assert [call.all_headers("authorization") for call in upstream.calls] == [["Bearer sk-own"]] * 2


async def test_a_query_and_other_headers_go_on(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        for target in (WHOLE, STREAM):
            assert (await post(app.url, f"{target}?a=1&b=%2F", X_Own="yes", Authorization="Bearer sk")).status == 200
        for call in upstream.calls:
            assert (call.target, call.header("x-own")) == ("/invocations?a=1&b=%2F", "yes")
            # It is for the endpoint, and SageMaker's tokens are made of credentials of an account.
            assert call.header("authorization") is None


async def test_what_a_container_says_ahead_of_its_answer_is_not_for_sdks(serve: Serve) -> None:
    """They know no interim answers but 100."""

    async def hints(call: Call) -> None:
        await call.send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        await json_answer({"ok": 1})(call)

    async with FakeUpstream(hints) as upstream, serve(upstream) as app, runtime(app.url) as client:
        assert (await client.invoke())["Body"] == b'{"ok": 1}'
        assert (await post(app.url, STREAM)).interim == ()


async def test_a_chat_with_a_model_server(serve: Serve, finished: Finished) -> None:
    """vLLM's /invocations takes the bodies of its other paths; what it reports of a prompt is counted."""
    async with (
        SimulatedServer(ServerConfig(EngineConfig(speed=1_000.0))) as server,
        serve(server.url, routing={"strategy": "expected_latency"}) as app,
        runtime(app.url) as client,
    ):
        chat: Json = {"messages": [{"role": "user", "content": "What is a prefix cache? " * 60}], "max_tokens": 20}
        for _ in range(2):
            answer = await client.invoke(json.dumps(chat).encode(), ContentType="application/json")
            told = json.loads(answer["Body"])
            assert told["choices"][0]["message"]["content"]
            assert told["usage"]["completion_tokens"] == 20
        first, second = finished()
        assert first["matched_tokens"] == 0 < second["matched_tokens"]
        assert second["cached_tokens"] > 0
