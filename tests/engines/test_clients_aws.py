"""boto3 and the OpenAI SDK at an endpoint of two vLLM servers are told what a third one, asked directly, tells."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import boto3
import botocore.config
import openai
import pytest

from prefixroute.app import App
from prefixroute.testing.client import RawAnswer, RawClient
from tests.engines.answers import gist, without_variable
from tests.engines.chats import MESSAGES, chats
from tests.engines.routers import before
from tests.engines.servers import VllmServer
from tests.engines.tiny_model import NAME

ENDPOINT = "support-bot"
PREFIX_AWARE = {
    "RoutingStrategy": "PREFIX_AWARE",
    "PrefixAwareRoutingConfig": {"PrefixLength": 1_024, "ConcurrencyThreshold": 4},
}
VARIANT = {"VariantName": "AllTraffic", "RoutingConfig": PREFIX_AWARE}


@pytest.fixture
async def endpoint(vllm: list[VllmServer]) -> AsyncIterator[App]:
    """A router with an endpoint of two servers."""
    endpoints = [{"EndpointName": ENDPOINT, "ProductionVariants": [VARIANT]}]
    async with before(vllm[:2], sagemaker={"endpoints": endpoints}) as app:
        yield app


def aws_client(url: str) -> Any:
    return boto3.client(
        "sagemaker-runtime",
        endpoint_url=url,
        region_name="eu-north-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
        config=botocore.config.Config(retries={"max_attempts": 0}),
    )


def invoked(client: Any, **fields: Any) -> tuple[str, bytes]:
    """Content type and body of an answer."""
    answer = client.invoke_endpoint(EndpointName=ENDPOINT, ContentType="application/json", **fields)
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    return answer["ContentType"], answer["Body"].read()


def invoked_stream(client: Any, **fields: Any) -> tuple[str, bytes]:
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName=ENDPOINT, ContentType="application/json", **fields
    )
    return answer["ContentType"], b"".join(part["PayloadPart"]["Bytes"] for part in answer["Body"])


async def test_boto3_invokes_an_endpoint(endpoint: App, direct: str) -> None:
    client, asked = aws_client(endpoint.url), invocation()
    for n_asked in range(2):
        kind, body = await asyncio.to_thread(invoked, client, Body=asked)
        answer = await invocation_answer(direct, asked)
        assert (kind, without_variable(body)) == ("application/json", without_variable(answer.body))
        assert (json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == (n_asked > 0)


async def test_boto3_reads_an_endpoints_stream(endpoint: App, direct: str) -> None:
    client, asked = aws_client(endpoint.url), invocation(stream=True, stream_options={"include_usage": True})
    for _ in range(2):
        kind, body = await asyncio.to_thread(invoked_stream, client, Body=asked)
        answer = await invocation_answer(direct, asked)
        assert (kind, gist(body)) == (answer.header("content-type"), gist(answer.body))
        assert body.endswith(b"data: [DONE]\n\n")


async def test_boto3_reads_what_a_model_refuses(endpoint: App, direct: str) -> None:
    client, asked = aws_client(endpoint.url), invocation(max_tokens=-1)
    answer = await invocation_answer(direct, asked)
    for invoke in (invoked, invoked_stream):
        with pytest.raises(client.exceptions.ModelError) as raised:
            await asyncio.to_thread(invoke, client, Body=asked)
        told = raised.value.response
        assert (told["OriginalStatusCode"], told["OriginalMessage"]) == (answer.status, answer.body.decode())


def invocation(**fields: object) -> bytes:
    return json.dumps({"model": NAME, "messages": MESSAGES, "max_tokens": 9, "temperature": 0, **fields}).encode()


async def invocation_answer(direct: str, asked: bytes) -> RawAnswer:
    async with RawClient(direct) as client:
        return await client.request("POST", "/invocations", asked, [("Content-Type", "application/json")])


async def test_the_openai_sdk_at_an_endpoint(endpoint: App, direct: str) -> None:
    found = []
    for url in (f"{direct}/v1", f"{endpoint.url}/endpoints/{ENDPOINT}/openai/v1"):
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as gpt:
            found.append(await chats(gpt))
    assert found[1] == found[0]
