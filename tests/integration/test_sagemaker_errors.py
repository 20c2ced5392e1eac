"""Every error that the contract documents, as the class of boto3's that programs catch, and what brings it about."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trustme

from prefixroute.app import App
from prefixroute.core.fleet import State
from prefixroute.sagemaker.relay import InvocationRelay
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import chunked, head
from prefixroute.testing.upstream import json_answer, raw_answer
from tests.integration.aws import (
    STREAM,
    WHOLE,
    Json,
    component,
    endpoint,
    endpoints,
    error_of,
    post,
    runtime,
    send,
    variant,
)

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

NOWHERE = "http://127.0.0.1:1"
SOON = {"wait_for_instance_s": 0.05}

both = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])


def path_of(streaming: bool) -> str:
    return STREAM if streaming else WHOLE


async def hangs_up(call: Call) -> None:
    call.close()


async def silent(call: Call) -> None:
    await call.wait_disconnected()


# Of the container


@pytest.mark.parametrize(("status", "fault"), [(400, "client"), (404, "client"), (429, "client"), (500, "server")])
@pytest.mark.parametrize("lane", ["auto", "aiohttp"])
@both
async def test_an_error_of_the_container_is_a_model_error(
    serve: Serve, finished: Finished, streaming: bool, lane: str, status: int, fault: str
) -> None:
    said = '{"error": "no \\"such\\" model: é"}'
    async with (
        FakeUpstream(raw_answer(said.encode(), status=status)) as upstream,
        serve(upstream, lane=lane) as app,
        runtime(app.url) as client,
    ):
        error = await client.refusal(streaming=streaming, TargetVariant="blue")
        assert client.is_a(error, "ModelError")
        about = error.response.pop("ResponseMetadata")
        assert about["HTTPStatusCode"] == 424
        assert about["HTTPHeaders"]["x-amzn-invoked-production-variant"] == "blue"
        assert about["HTTPHeaders"]["content-type"] == "application/json"
        message = f'Received {fault} error ({status}) from primary with message "{said}"'
        assert error.response == {
            "Error": {"Code": "ModelError", "Message": message},
            "Message": message,
            "OriginalStatusCode": status,
            "OriginalMessage": said,
            "LogStreamArn": "",
        }
        (line,) = finished()
        assert about["RequestId"] == line["request_id"]
        assert (line["status"], line["error"], line["attempts"]) == (424, "model_error", "answered")


@pytest.mark.parametrize(
    ("said", "original"),
    [
        (b"", ""),
        (b"\xff\x00", "�\x00"),
        (b"x" * 5_000, "x" * 2_048),
        (b"x" * 500_000, "x" * 2_048),
    ],
    ids=["nothing", "no-text", "long", "endless"],
)
@both
async def test_what_the_container_said_is_told_within_the_contracts_bounds(
    serve: Serve, streaming: bool, said: bytes, original: str
) -> None:
    async def pours(call: Call) -> None:
        await call.send(b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.send(chunked(said) if said else b"0\r\n\r\n")

    async with FakeUpstream(pours) as upstream, serve(upstream) as app, runtime(app.url) as client:
        for _ in range(2):
            error = await client.refusal(streaming=streaming)
            assert error.response["OriginalMessage"] == original
            assert len(error.response["Message"]) < 2_200


@both
async def test_another_place_than_the_containers_answer_is_no_answer(serve: Serve, streaming: bool) -> None:
    moved = json_answer({}, status=307, headers="Location: http://elsewhere.test/\r\n")
    async with FakeUpstream(moved) as upstream, serve(upstream) as app:
        answer = await post(app.url, path_of(streaming))
        status, name, fields = error_of(answer)
        assert (status, name, fields["OriginalStatusCode"]) == (424, "ModelError", 307)
        assert answer.header("location") is None


@both
async def test_a_container_that_gives_no_answer_is_a_model_error(
    serve: Serve, finished: Finished, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeUpstream(hangs_up) as upstream, serve(upstream) as app, runtime(app.url) as client:
        error = await client.refusal(streaming=streaming)
        assert client.is_a(error, "ModelError")
        assert (error.response["OriginalStatusCode"], len(upstream.calls)) == (0, 1)
        assert (finished()[-1]["outcome"], finished()[-1]["status"]) == ("broken", 424)
        # The operator is told which instance it was.
        assert [
            r.getMessage() for r in caplog.records if r.name == "prefixroute.http.proxy" and "gpu-0" in r.msg % r.args
        ]


@both
async def test_a_container_that_is_silent_for_too_long_is_a_model_error(
    serve: Serve, finished: Finished, streaming: bool
) -> None:
    async with (
        FakeUpstream(silent) as upstream,
        serve(upstream, upstream={"first_byte_timeout_s": 0.1}) as app,
        runtime(app.url) as client,
    ):
        error = await client.refusal(streaming=streaming)
        assert client.is_a(error, "ModelError")
        assert "first_byte_timeout_s" in error.response["OriginalMessage"]
        assert finished()[-1]["outcome"] == "timeout"


@both
async def test_an_error_that_breaks_off_is_a_model_error(serve: Serve, streaming: bool) -> None:
    async def breaks(call: Call) -> None:
        await call.send(b"HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\nhalf")
        call.close()

    async with FakeUpstream(breaks) as upstream, serve(upstream) as app, runtime(app.url) as client:
        error = await client.refusal(streaming=streaming)
        assert (client.is_a(error, "ModelError"), error.response["OriginalStatusCode"]) == (True, 500)


@pytest.mark.parametrize("status", [429, 503])
@both
async def test_another_instance_is_asked_before_there_is_an_error(
    serve: Serve, finished: Finished, streaming: bool, status: int
) -> None:
    busy = json_answer({"error": "busy"}, status=status)
    async with (
        FakeUpstream(busy) as one,
        FakeUpstream() as two,
        serve(one, two) as app,
        runtime(app.url) as client,
    ):
        await (client.stream if streaming else client.invoke)(b"same")
        assert (one.bodies, two.bodies) == ([b"same"], [b"same"])
        two.script = busy
        error = await client.refusal(b"same", streaming=streaming)
        assert client.is_a(error, "ModelError")
        assert error.response["OriginalStatusCode"] == status
        assert error.response["OriginalMessage"] == '{"error": "busy"}'
        assert (len(one.calls), len(two.calls)) == (2, 2)
        assert finished()[-1]["attempts"] == "busy,answered"


@both
async def test_only_instances_of_the_variant_are_asked(serve: Serve, streaming: bool) -> None:
    table = endpoints(endpoint(variant("blue", "gpu-0"), variant("green", "gpu-1", weight=0)))
    async with (
        FakeUpstream(json_answer({}, status=503)) as one,
        FakeUpstream() as two,
        serve(one, two, sagemaker=table) as app,
        runtime(app.url) as client,
    ):
        assert client.is_a(await client.refusal(streaming=streaming), "ModelError")
        assert (len(one.calls), len(two.calls)) == (1, 0)


# Of instances, and of the router


@both
async def test_a_container_that_has_never_been_ready_is_not_ready(
    serve: Serve, until: Until, finished: Finished, streaming: bool
) -> None:
    """The streaming operation has no name for it: there it is the container's own 503."""
    async with FakeUpstream(json_answer({}, status=503)) as upstream:
        upstream.health_status = 503
        async with serve(upstream.url) as app, runtime(app.url) as client:
            await until(lambda: upstream.n_probes > 0)
            error = await client.refusal(streaming=streaming)
            assert client.is_a(error, "ModelError" if streaming else "ModelNotReadyException")
            assert error.response["ResponseMetadata"]["HTTPStatusCode"] == (424 if streaming else 429)
            assert finished()[-1]["error"] == ("model_error" if streaming else "model_not_ready")


@both
async def test_an_endpoint_whose_instances_have_never_been_there_is_not_ready(serve: Serve, streaming: bool) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(
            upstream,
            NOWHERE,
            limits=SOON,
            sagemaker=endpoints(endpoint(variant("AllTraffic", "gpu-1")), endpoint(variant(), name="other")),
        ) as app,
        runtime(app.url) as client,
    ):
        error = await client.refusal(streaming=streaming)
        assert client.is_a(error, "ServiceUnavailable" if streaming else "ModelNotReadyException")
        assert error.response["ResponseMetadata"]["HTTPStatusCode"] == (503 if streaming else 429)
        await (client.stream if streaming else client.invoke)(EndpointName="other")


@pytest.mark.parametrize("lane", ["auto", "aiohttp"])
@both
async def test_where_nobody_is_there_any_more_the_service_is_unavailable(
    serve: Serve, finished: Finished, streaming: bool, lane: str
) -> None:
    async with FakeUpstream() as upstream, serve(upstream, limits=SOON, lane=lane) as app, runtime(app.url) as client:
        await upstream.stop()
        error = await client.refusal(streaming=streaming)
        assert client.is_a(error, "ServiceUnavailable")
        assert error.response["Message"]
        about = error.response["ResponseMetadata"]
        assert (about["HTTPStatusCode"], int(about["HTTPHeaders"]["retry-after"]) > 0) == (503, True)
        assert finished()[-1]["status"] == 503


@both
async def test_where_all_instances_are_drained_the_service_is_unavailable(serve: Serve, streaming: bool) -> None:
    async with FakeUpstream() as upstream, serve(upstream, limits=SOON) as app, runtime(app.url) as client:
        app.router.fleet.drain("gpu-0")
        assert client.is_a(await client.refusal(streaming=streaming), "ServiceUnavailable")
        assert upstream.calls == []


@both
async def test_an_instance_that_cannot_be_reached_is_passed_over(serve: Serve, streaming: bool) -> None:
    async with (
        FakeUpstream() as one,
        FakeUpstream() as two,
        serve(one, two) as app,
        runtime(app.url) as client,
    ):
        await one.stop()
        await (client.stream if streaming else client.invoke)(b"same")
        assert two.bodies == [b"same"]


@asynccontextmanager
async def untrusted() -> AsyncIterator[str]:
    """A server whose certificate nobody has heard of."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)

    async def gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(gone, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@both
async def test_a_certificate_that_is_not_trusted_is_a_dependencys_fault(
    serve: Serve, finished: Finished, streaming: bool
) -> None:
    """The streaming operation has no name for it."""
    async with untrusted() as url, serve(url, limits=SOON) as app, runtime(app.url) as client:
        error = await client.refusal(streaming=streaming)
        assert client.is_a(error, "InternalFailure" if streaming else "InternalDependencyException")
        assert error.response["ResponseMetadata"]["HTTPStatusCode"] == (500 if streaming else 530)
        assert "certificate" in error.response["Message"]
        assert finished()[-1]["outcome"] == "unreachable"


@both
async def test_a_fault_of_the_router_is_an_internal_failure(
    serve: Serve, expected_errors: list[str], monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    expected_errors.append("fault in the router")

    async def fails(relay: InvocationRelay) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("prefixroute.http.relay.Relay._pass_on", fails)
    async with FakeUpstream() as upstream, serve(upstream) as app, runtime(app.url) as client:
        error = await client.refusal(streaming=streaming)
        assert client.is_a(error, "InternalFailure")
        assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 500
        assert "secret" not in str(error.response)


# Of the request


@both
async def test_a_body_above_the_limit_is_refused(serve: Serve, streaming: bool) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, limits={"max_body_bytes": 2_000}) as app,
        runtime(app.url) as client,
    ):
        for n_bytes in (2_001, 3_000_000):
            error = await client.refusal(bytes(n_bytes), streaming=streaming)
            assert client.is_a(error, "ValidationError")
            assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 413
            assert "limits.max_body_bytes" in error.response["Message"]
        assert upstream.calls == []
        await (client.stream if streaming else client.invoke)(bytes(2_000))


@pytest.mark.parametrize(
    ("named", "word"),
    [
        ({"EndpointName": "nobody"}, "no endpoint of this name"),
        ({"EndpointName": "bare", "TargetVariant": "red"}, "no such production variant"),
        ({"EndpointName": "bare", "InferenceComponentName": "large"}, "no such inference component"),
        ({"InferenceComponentName": "huge"}, "no such inference component"),
        ({"InferenceComponentName": "large", "TargetVariant": "red"}, "another production variant"),
        ({}, "must name one of them"),
        ({"TargetVariant": "AllTraffic"}, "must name one of them"),
        ({"SessionId": "nobodys", "InferenceComponentName": "large"}, "no such session"),
        ({"SessionId": "nobodys", "EndpointName": "nobody"}, "no endpoint of this name"),
    ],
)
@both
async def test_what_is_not_there_is_no_valid_request(serve: Serve, streaming: bool, named: Json, word: str) -> None:
    table = endpoints(endpoint(components=(component("large", "gpu-0"),)), endpoint(name="bare"))
    async with FakeUpstream() as upstream, serve(upstream, sagemaker=table) as app, runtime(app.url) as client:
        error = await client.refusal(streaming=streaming, **named)
        assert client.is_a(error, "ValidationError")
        assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 400
        assert word in error.response["Message"]
        assert upstream.calls == []


@pytest.mark.parametrize("name", ["a_b", "-a", "a-", "a" * 64, "a.b", "a b", "ä", "a,b"])
async def test_a_name_that_no_endpoint_can_have_is_no_valid_request(serve: Serve, name: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, runtime(app.url) as client:
        error = await client.refusal(EndpointName=name)
        assert client.is_a(error, "ValidationError")
        assert name not in error.response["Message"]
        assert upstream.calls == []


@pytest.mark.parametrize(
    "path",
    [
        "/endpoints/support%2Dbot/invocations",
        "/endpoints/support-bot/%69nvocations",
        "/%65ndpoints/support-bot/invocations",
        "//endpoints/support-bot/invocations",
        "/endpoints//support-bot/invocations",
        "/endpoints/support-bot//invocations",
        "/endpoints/support-bot/invocations/",
        "/endpoints/x/../support-bot/invocations",
        "/endpoints/support-bot/x/%2e%2e/invocations",
        "/./endpoints/support-bot/invocations",
        "/endpoints/support-bot/invocations%2f",
        "/endpoints/support-bot/invocations-response-stream/",
    ],
)
async def test_a_path_that_is_written_in_another_way_is_no_valid_request(serve: Serve, path: str) -> None:
    """Who looks at it on the way, and who answers it, might not mean the same."""
    async with FakeUpstream() as upstream, serve(upstream, sagemaker=endpoints()) as app:
        assert error_of(await post(app.url, path))[:2] == (400, "ValidationError")
        assert upstream.calls == []


async def test_a_whole_url_in_the_request_line_is_good(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, sagemaker=endpoints()) as app:
        assert (await post(app.url, f"http://router.test{WHOLE}?a=1")).status == 200
        assert upstream.calls[0].target == "/invocations?a=1"


async def test_a_slash_behind_the_clients_url_changes_nothing(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, runtime(f"{app.url}/") as client:
        assert (await client.invoke())["Body"] == b'{"ok": true}'
        assert upstream.calls[0].target == "/invocations"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
@both
async def test_endpoints_are_invoked_with_post(serve: Serve, streaming: bool, method: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        answer = await send(app.url, method, path_of(streaming))
        assert (answer.status, answer.header("allow")) == (405, "POST")
        assert answer.header("x-amzn-errortype") == "ValidationError"
        if method != "HEAD":
            assert "POST" in json.loads(answer.body)["Message"]
        assert upstream.calls == []


@pytest.mark.parametrize(
    "operation", ["async-invocations", "invocations-some-day", "async-invocations-response-stream"]
)
async def test_operations_that_there_are_not_are_named(serve: Serve, operation: str, finished: Finished) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        status, name, fields = error_of(await post(app.url, f"/endpoints/support-bot/{operation}"))
        assert (status, name) == (400, "ValidationError")
        assert f"{operation} is not supported" in fields["Message"]
        assert upstream.calls == []
        assert (finished()[-1]["route"], finished()[-1]["error"]) == ("other", "unsupported_operation")


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Custom-Attributes", "x" * 1025),
        ("Custom-Attributes", "é"),
        ("Target-Variant", "a_b"),
        ("Target-Variant", ""),
        ("Inference-Component", "a" * 64),
        ("Inference-Id", "x" * 65),
        ("Prefix-Aware-Id", "\x80"),
        ("Target-Container-Hostname", "a.b"),
        ("Session-Id", "a_b"),
        ("Session-Id", "a" * 257),
    ],
)
@both
async def test_headers_are_held_to_the_contract(serve: Serve, streaming: bool, header: str, value: str) -> None:
    """And what they hold is not told."""
    async with FakeUpstream() as upstream, serve(upstream) as app:
        answer = await post(app.url, path_of(streaming), b"{}", **{f"X_Amzn_SageMaker_{header}": value})
        status, name, fields = error_of(answer)
        assert (status, name) == (400, "ValidationError")
        assert f"X-Amzn-SageMaker-{header}" in fields["Message"]
        assert not value or value not in fields["Message"]
        assert upstream.calls == []


async def test_a_new_session_is_nothing_for_the_streaming_operation(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, runtime(app.url) as client:
        assert client.is_a(await client.refusal(streaming=True, SessionId="NEW_SESSION"), "ValidationError")
        assert upstream.calls == []


async def test_headers_that_the_operation_does_not_have_are_let_be(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        for path, header in ((STREAM, "Target_Model"), (STREAM, "Enable_Explanations"), (WHOLE, "Of_Tomorrow")):
            answer = await post(app.url, path, b"{}", **{f"X_Amzn_SageMaker_{header}": "x" * 2_000})
            assert answer.status == 200
        assert len(upstream.calls) == 3


@both
async def test_what_is_no_valid_http_is_told_in_the_contracts_words(serve: Serve, streaming: bool) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        for line in ("Host: a b", "Transfer-Encoding: gzip, chunked", "X Y: z", "Expect: the unexpected"):
            async with RawClient(app.url) as client:
                start = f"POST {path_of(streaming)} HTTP/1.1\r\n{line}\r\nContent-Length: 0\r\n\r\n"
                await client.send(start.encode())
                answer = await client.answer()
                assert answer.header("x-amzn-errortype") == "ValidationError", line
                assert json.loads(answer.body)["Message"]
        assert upstream.calls == []


@both
async def test_a_client_that_leaves_ends_the_containers_work(serve: Serve, finished: Finished, streaming: bool) -> None:
    async with FakeUpstream(silent) as upstream, serve(upstream) as app:
        async with RawClient(app.url) as client:
            await client.send(head("POST", path_of(streaming), b"{}") + b"{}")
            (call,) = await upstream.wait_calls(1)
        await call.wait_disconnected()
        await app.proxy.wait_idle()
        assert finished()[-1]["outcome"] == "client_gone"
        assert app.router.fleet.state("gpu-0").state is State.UP
