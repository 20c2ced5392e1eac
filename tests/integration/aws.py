"""AWS's own client as programs use it: boto3's `sagemaker-runtime`, each call in a thread of its own."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import boto3
from botocore.config import Config
from botocore.eventstream import EventStreamBuffer, EventStreamMessage
from botocore.exceptions import ClientError

from prefixroute.testing import RawAnswer, RawClient

Json = dict[str, Any]

ENDPOINT = "support-bot"
WHOLE = f"/endpoints/{ENDPOINT}/invocations"
STREAM = f"/endpoints/{ENDPOINT}/invocations-response-stream"
KEY_ID = "AKIDALICE0123456"
SECRET = "a-secret-that-the-tests-made-up-themselves"
# Guards against what hangs.
_PATIENCE_S = 15


def variant(name: str = "AllTraffic", *instances: str, weight: float = 1.0, strategy: str = "RANDOM") -> Json:
    """A production variant; of the whole fleet, if it names no instances."""
    made: Json = {"VariantName": name, "InitialVariantWeight": weight}
    made["RoutingConfig"] = {"RoutingStrategy": strategy}
    if strategy == "PREFIX_AWARE":
        made["RoutingConfig"]["PrefixAwareRoutingConfig"] = {"PrefixLength": 1024, "ConcurrencyThreshold": 2}
    return {**made, "Instances": list(instances)} if instances else made


def component(name: str, *servers: str, of: str = "AllTraffic") -> Json:
    """An inference component with a copy on each of these servers, every one a machine of its own."""
    copies = [{"Instance": f"machine-of-{server}", "Server": server} for server in servers]
    return {"InferenceComponentName": name, "VariantName": of, "Copies": copies}


def endpoint(*variants: Json, name: str = ENDPOINT, components: tuple[Json, ...] = ()) -> Json:
    """An endpoint; of one variant of the whole fleet, if none is given."""
    made: Json = {"EndpointName": name, "ProductionVariants": list(variants) or [variant()]}
    return {**made, "InferenceComponents": list(components)} if components else made


def endpoints(*those: Json, **settings: Any) -> Json:
    """The table `sagemaker`; with the plainest endpoint, if none is given."""
    return {"endpoints": list(those) or [endpoint()], **settings}


@cache
def _session() -> Any:
    # It tells of every step, at length, where a test looks at all that is logged.
    for name in ("botocore", "urllib3"):
        logging.getLogger(name).setLevel(logging.INFO)
    # One: it keeps the service model, which takes a while to read.
    return boto3.session.Session()


class Runtime:
    """A client of the router at `url`. Bodies of answers are read to their end."""

    def __init__(self, url: str, key_id: str = KEY_ID, secret: str = SECRET, token: str | None = None) -> None:
        self.client = _session().client(
            "sagemaker-runtime",
            endpoint_url=url,
            region_name="eu-west-1",
            aws_access_key_id=key_id,
            aws_secret_access_key=secret,
            aws_session_token=token,
            config=Config(
                retries={"total_max_attempts": 1},
                connect_timeout=_PATIENCE_S,
                read_timeout=_PATIENCE_S,
                max_pool_connections=50,
            ),
        )

    async def invoke(self, body: Any = b"{}", **given: Any) -> Json:
        """InvokeEndpoint. Raises ClientError."""
        return await asyncio.to_thread(self._invoke, {"EndpointName": ENDPOINT, "Body": body, **given})

    def _invoke(self, given: Json) -> Json:
        answer: Json = self.client.invoke_endpoint(**given)
        with answer["Body"] as body:
            return {**answer, "Body": body.read()}

    async def open(self, body: Any = b"{}", **given: Any) -> tuple[Json, AsyncIterator[bytes]]:
        """InvokeEndpointWithResponseStream: the answer without its body, and the pieces of that. Raises ClientError."""
        answer: Json = await asyncio.to_thread(
            self.client.invoke_endpoint_with_response_stream, **{"EndpointName": ENDPOINT, "Body": body, **given}
        )
        return answer, _pieces(answer.pop("Body"))

    async def stream(self, body: Any = b"{}", **given: Any) -> tuple[Json, list[bytes]]:
        """The same, and all of the pieces."""
        answer, pieces = await self.open(body, **given)
        return answer, [piece async for piece in pieces]

    async def refusal(self, body: Any = b"{}", *, streaming: bool = False, **given: Any) -> ClientError:
        """The error of a call that is refused."""
        try:
            await (self.stream if streaming else self.invoke)(body, **given)
        except ClientError as error:
            return error
        raise AssertionError("it was not refused")

    def is_a(self, error: ClientError, name: str) -> bool:
        """Whether programs catch it as `client.exceptions.NAME`."""
        return type(error) is getattr(self.client.exceptions, name)


@asynccontextmanager
async def runtime(url: str, *credentials: str) -> AsyncIterator[Runtime]:
    """A client that leaves no connection behind."""
    made = Runtime(url, *credentials)
    try:
        yield made
    finally:
        made.client.close()


async def _pieces(body: Any) -> AsyncIterator[bytes]:
    events: Iterator[Json] = iter(body)
    try:
        while (event := await asyncio.to_thread(next, events, None)) is not None:
            yield event["PayloadPart"]["Bytes"]
    finally:
        body.close()


def messages(body: bytes) -> list[EventStreamMessage]:
    """The frames of a body, which botocore checks the sums of. Nothing may be left over."""
    buffer = EventStreamBuffer()
    buffer.add_data(body)
    found = list(buffer)
    assert sum(message.prelude.total_length for message in found) == len(body)
    return found


def payload(body: bytes) -> bytes:
    """What the container said, of a body that has nothing but pieces of that."""
    parts = messages(body)
    assert {message.headers[":event-type"] for message in parts} <= {"PayloadPart"}
    return b"".join(message.payload for message in parts)


def last_words(body: bytes) -> tuple[str, Json]:
    """The exception that ends a stream, and its fields."""
    message = messages(body)[-1]
    assert message.headers[":message-type"] == "exception"
    return message.headers[":exception-type"], json.loads(message.payload)


async def post(url: str, target: str = WHOLE, body: bytes | None = b"{}", **headers: str) -> RawAnswer:
    """An answer as it came. `headers` have _ for -."""
    return await send(url, "POST", target, body, **headers)


async def send(url: str, method: str, target: str, body: bytes | None = None, **headers: str) -> RawAnswer:
    """As `post`, with any method."""
    async with RawClient(url) as client:
        lines = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return await client.request(method, target, body, lines)


def error_of(answer: RawAnswer) -> tuple[int, str | None, Json]:
    """Status, type and fields of an error answer."""
    return answer.status, answer.header("x-amzn-errortype"), json.loads(answer.body)
