"""What one request asks, ready to be sent, and what all of them share."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.core.router import Router
from prefixroute.http.body import check_length, expect_continue, read_whole, stream
from prefixroute.http.headers import (
    RawHeaders,
    first,
    forwarded,
    identified,
    is_encoded,
    prefix_aware_id,
    short_text,
)
from prefixroute.http.holding import Holding
from prefixroute.http.retry import RetryBudget
from prefixroute.http.routes import Route, plain_path, stored_response_id
from prefixroute.http.stored import StoredResponses
from prefixroute.http.upstream import Upstream, UpstreamRequest
from prefixroute.http.waiting import WaitingRoom
from prefixroute.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What all exchanges share."""

    router: Router
    upstream: Upstream
    waiting: WaitingRoom
    holding: Holding
    stored: StoredResponses
    budget: RetryBudget
    clock: Callable[[], float]
    max_attempts: int
    repeat_unanswered: bool
    tell_decision: bool
    """Adds the x-prefixroute-… headers to answers."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, ready to be sent. `body_again`: its body can be sent a second time."""

    prompt: Prompt
    request: UpstreamRequest
    request_id: str
    only: str | None
    repeatable: bool
    body_again: bool
    watched: bool
    stores_responses: bool
    token_mark: bytes | None
    """What the first piece with a token in it holds; None: any piece of a body has one."""


async def read_ask(
    request: web.BaseRequest,
    record: RequestRecord,
    route: Route,
    target: str,
    *,
    stored: StoredResponses,
    max_body_bytes: int,
    session_header: bytes,
) -> Ask:
    """The request as it will be sent, and the prompt that decides where to. Notes what it sees in `record`.

    Raises RequestError: the body is too large, malformed, or comes with a demand that cannot be met.
    """
    raw = request.raw_headers
    understood = route.api is not Api.OTHER and request.method == "POST"
    declared = check_length(request, max_body_bytes)
    content: bytes | Callable[[], AsyncIterator[bytes]] | None = None
    if request.body_exists:
        expect_continue(request)
        if understood and not _is_multipart(raw):
            content = await read_whole(request, max_body_bytes)
            declared = None
            record.body_bytes = len(content)
        else:
            content = partial(stream, request.content, max_body_bytes)
            record.body_bytes = declared or 0
    whole = content if isinstance(content, bytes) else b""
    prompt = read_prompt(
        route.api if understood else Api.OTHER,
        whole,
        session_id=short_text(raw, session_header),
        prefix_aware_id=prefix_aware_id(raw),
        encoded=is_encoded(raw),
    )
    record.model = prompt.model
    record.streamed = prompt.stream
    record.prompt_tokens = prompt.n_tokens
    record.no_key = prompt.no_key if understood else None
    headers = identified(forwarded(raw), record.request_id)
    return Ask(
        prompt=prompt,
        request=UpstreamRequest(request.method, target, headers, content, declared),
        request_id=record.request_id,
        only=stored.home(prompt.previous_response_id or stored_response_id(plain_path(target))),
        repeatable=route.repeatable,
        body_again=content is None or isinstance(content, bytes),
        watched=understood,
        stores_responses=route.stores_responses,
        # A streamed response says first that it exists and waits for its turn.
        token_mark=b".delta" if route.stores_responses and prompt.stream else None,
    )


def _is_multipart(headers: RawHeaders) -> bool:
    return (first(headers, b"content-type") or b"").lstrip().lower().startswith(b"multipart/")
