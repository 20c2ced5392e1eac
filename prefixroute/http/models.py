"""`GET /v1/models` for a fleet: every instance is asked, and what they list is joined."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from prefixroute.core.fleet import Instance
from prefixroute.core.prompt import MAX_PARSED_BYTES, is_parsable
from prefixroute.errors import NoInstanceError, UpstreamBrokenError, UpstreamError
from prefixroute.http.headers import RawHeaders, relayed
from prefixroute.http.upstream import Upstream, UpstreamRequest

_ASK_S = 3.0
# A thousand adapters, with all that vLLM says of each.
_MAX_BYTES = MAX_PARSED_BYTES


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer read to its end. `headers`: without a length."""

    status: int
    headers: RawHeaders
    body: bytes


async def joined_models(upstream: Upstream, instances: Sequence[Instance], request: UpstreamRequest) -> WholeAnswer:
    """Each model once, in the order of the fleet, without instances that fail or talk nonsense.

    When none lists models, the first refusal there is (a 401, say). Raises NoInstanceError when nobody answered,
    UpstreamBrokenError when those who did talk nonsense.
    """
    answers = await asyncio.gather(*(_ask(upstream, instance, request) for instance in instances))
    models: dict[str, object] = {}
    refusal: WholeAnswer | None = None
    listed = heard = False
    for answer in filter(None, answers):
        heard = True
        if answer.status != 200:
            refusal = refusal or answer
            continue
        await asyncio.sleep(0)  # a long list takes some milliseconds, and every instance has one
        entries = _entries(answer.body)
        if entries is None:
            continue
        listed = True
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get("id"), str):
                models.setdefault(entry["id"], entry)
    if listed:
        body = orjson.dumps({"object": "list", "data": list(models.values())})
        return WholeAnswer(200, [(b"Content-Type", b"application/json")], body)
    if refusal is not None:
        return refusal
    if heard:
        raise UpstreamBrokenError("no instance lists its models")
    raise NoInstanceError("no instance answers")


async def _ask(upstream: Upstream, instance: Instance, request: UpstreamRequest) -> WholeAnswer | None:
    try:
        async with asyncio.timeout(_ASK_S):
            answer = await upstream.send(instance, request)
            try:
                headers = [header for header in relayed(answer.headers) if header[0].lower() != b"content-length"]
                # What is longer than any list of models is none.
                return WholeAnswer(answer.status, headers, await answer.whole(_MAX_BYTES) or b"")
            finally:
                answer.close()
    except (UpstreamError, TimeoutError):
        return None


def _entries(body: bytes) -> list[object] | None:
    if not is_parsable(body):
        return None
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    data = document.get("data") if isinstance(document, dict) else None
    return data if isinstance(data, list) else None
