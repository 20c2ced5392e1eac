"""What one request asks, ready to be sent, and what all of them share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prefixroute.core.blocks import BYTES_PER_TOKEN
from prefixroute.core.content import n_key_tokens
from prefixroute.core.group import Group
from prefixroute.core.prompt import SIMPLE_BYTES, Api, Fields, Prompt, read_fields, read_prompt
from prefixroute.core.router import Router
from prefixroute.core.tokens import ExactTokens
from prefixroute.http.arrival import Arrival, RequestHead
from prefixroute.http.body import BodyLimits, check_length, expect_continue, read_whole, stream
from prefixroute.http.decisions import Decisions
from prefixroute.http.headers import (
    asks_for_websocket,
    identified,
    is_encoded,
    prefix_aware_id,
    rendered,
    short_text,
    switching,
)
from prefixroute.http.holding import Holding
from prefixroute.http.retry import RetryBudget
from prefixroute.http.routes import stored_response_id
from prefixroute.http.stored import StoredResponses
from prefixroute.http.upstream import Upstream, UpstreamRequest
from prefixroute.http.waiting import WaitingRoom
from prefixroute.metrics import MAX_LABEL_CHARS, OTHER
from prefixroute.record import RequestRecord

if TYPE_CHECKING:
    from prefixroute.http.contract import Call


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What all exchanges share."""

    router: Router
    upstream: Upstream
    waiting: WaitingRoom
    holding: Holding
    stored: StoredResponses
    decisions: Decisions
    budget: RetryBudget
    clock: Callable[[], float]
    max_attempts: int
    repeat_unanswered: bool
    tell_decision: bool
    """Adds the x-prefixroute-… headers to answers."""
    comment_s: float | None = None
    """After so long a silence, an event stream gets a comment; None: never."""
    exact_tokens: ExactTokens | None = None


@dataclass(slots=True)
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
    token_ids: bytes | None = None
    """The engine's own ids of the prompt, four bytes each; None: not known, the prompt's key stands for it."""
    call: "Call | None" = None
    """Of another contract, whose request it is."""

    @property
    def group(self) -> Group | None:
        """Who may take it; None: any instance."""
        return None if self.call is None else self.call.group

    def forget_body(self) -> None:
        """The answer has begun, so that nothing is sent or decided again: a stream may take minutes."""
        self.prompt.forget_body()
        if self.body_again:
            self.request = self.request._replace(body=None)


async def read_ask(
    arrival: Arrival,
    record: RequestRecord,
    *,
    stored: StoredResponses,
    limits: BodyLimits,
    session_header: bytes,
    head: RequestHead,
    call: "Call | None" = None,
    tenant: bytes = b"",
    exact_tokens: ExactTokens | None = None,
) -> Ask:
    """The request as it will be sent, and the prompt that decides where to. Notes what it sees in `record`.

    `head`: what goes on instead of the request's own; it has a target. `call`: whose head it is, in another contract,
    where all of a body counts. `tenant`: whose prompts may match this one; empty: anyone's.

    Raises RequestError: the body is too large, malformed, or comes with a demand that cannot be met.
    """
    own, route = arrival.head, head.route
    method = own.method
    understood = route.api is not Api.OTHER and method == "POST"
    check_length(arrival, limits)
    declared = arrival.length
    content: bytes | Callable[[], AsyncIterator[bytes]] | None = None
    if arrival.whole is not None:
        content, declared = arrival.take_whole(), None
    elif arrival.content is not None:
        expect_continue(arrival)
        if understood and (call is not None or not head.is_multipart):
            content = await read_whole(arrival, limits)
            declared = None
        else:
            content = partial(stream, arrival.content, limits)
    body = content if isinstance(content, bytes) else b""
    encoded = b"content-encoding" in head.index and is_encoded(head.headers)
    prompt = read_prompt(
        route.api if understood else Api.OTHER,
        body,
        fields_read=await fields_in_steps(body, encoded=encoded) if len(body) > SIMPLE_BYTES else None,
        # It may be a header with a key: who it is, is told by that as well.
        session_id=short_text(own.first(session_header)),
        prefix_aware_id=prefix_aware_id(head.first(b"x-amzn-sagemaker-prefix-aware-id")),
        encoded=encoded,
        tenant=tenant,
    )
    if len(body) > SIMPLE_BYTES:
        await asyncio.sleep(0)
    # Records are kept: a name must not be as long as a body.
    record.model = OTHER if prompt.model is not None and len(prompt.model) > MAX_LABEL_CHARS else prompt.model
    record.streamed = prompt.stream
    record.prompt_tokens = prompt.n_tokens
    record.no_key = prompt.no_key if understood else None
    token_ids = None
    if exact_tokens is not None or prompt.is_token_ids:
        token_ids = await read_token_ids(exact_tokens, route.api, prompt)
    if token_ids is not None:
        # Of a batch, key and ids are the first prompt's; the others stay estimated.
        record.prompt_tokens += len(token_ids) // BYTES_PER_TOKEN - n_key_tokens(len(prompt.key))
    # Old clients know no other protocol, and a body in front of one would be an odd thing.
    switches = content is None and method == "GET" and own.minor > 0 and asks_for_websocket(head.headers)
    fields, has_credentials = head.fields_for(record.request_id)
    if switches:
        fields = rendered(identified(switching(head.headers), record.request_id))
    stored_id = prompt.previous_response_id or stored_response_id(head.path)
    return Ask(
        prompt=prompt,
        request=UpstreamRequest(
            method.encode("ascii"),
            (head.origin or "/").encode("utf-8", "surrogateescape"),
            fields,
            has_credentials,
            content,
            declared,
            switches,
        ),
        request_id=record.request_id,
        only=None if stored_id is None else stored.home(stored_id),
        repeatable=route.repeatable,
        body_again=content is None or isinstance(content, bytes),
        watched=understood,
        stores_responses=route.stores_responses,
        # A streamed response says first that it exists and waits for its turn.
        token_mark=b".delta" if route.stores_responses and prompt.stream else None,
        token_ids=token_ids,
        call=call,
    )


async def fields_in_steps(body: bytes, *, encoded: bool) -> Fields:
    """As `read_fields`. Of a long body, that and what is made of it are steps of their own: others have their turns."""
    await asyncio.sleep(0)
    fields = read_fields(body, encoded=encoded)
    await asyncio.sleep(0)
    return fields


async def read_token_ids(exact_tokens: ExactTokens | None, api: Api, prompt: Prompt) -> bytes | None:
    """The engine's own ids of the prompt, four bytes each; None: not known. Waits as `ExactTokens.of` does."""
    if prompt.is_token_ids:
        return prompt.key
    return await exact_tokens.of(api, prompt) if exact_tokens is not None and prompt.key else None
