"""The routes that make the engine work: generation and embeddings.

Sampling parameters, stop strings, tool choice, response formats, logprobs and echo are accepted and change
nothing: the model says what it says.
"""

import json
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from prefixroute.demo.server import anthropic_api, openai_api, prompts, tokens
from prefixroute.demo.server.api_errors import (
    BadRequestError,
    UnparsableError,
    ValidationError,
    invalid,
    require_fields,
    wrong_field,
)
from prefixroute.demo.server.jobs import EventWriter, Job, TokenStream
from prefixroute.demo.server.prompts import JsonObject
from prefixroute.demo.server.responses_api import ResponseStream, StoredResponse
from prefixroute.demo.server.service import Service

EVENT_STREAM_TYPE = "text/event-stream; charset=utf-8"


class GenerationRoutes:
    """Handlers over a `Service`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._interval = service.config.stream_interval

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat_completions),
            web.post("/v1/completions", self.completions),
            web.post("/v1/embeddings", self.embeddings),
            web.post("/v1/messages", self.messages),
            web.post("/v1/messages/count_tokens", self.count_tokens),
            web.post("/v1/responses", self.responses),
            web.get("/v1/responses/{response_id}", self.stored_response, allow_head=False),
            web.post("/v1/responses/{response_id}/cancel", self.cancel_response),
            web.post("/invocations", self.invocations),
        ]

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._chat_completions(request, await read_json(request))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._completions(request, await read_json(request))

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        return await self._embeddings(request, await read_json(request))

    async def invocations(self, request: web.Request) -> web.StreamResponse:
        """SageMaker's one path: the shape of the body decides, and any model means the default one."""
        body = await read_json(request)
        if body.get("model") not in self._service.config.models:
            body = {**body, "model": None}
        if "messages" in body:
            return await self._chat_completions(request, body)
        if "input" in body:
            return await self._embeddings(request, body)
        return await self._completions(request, body)

    async def _chat_completions(self, request: web.Request, body: JsonObject) -> web.StreamResponse:
        job = self._make_job(request, body, [prompts.chat_prompt(body)], "chatcmpl-")
        if not body.get("stream"):
            return await self._whole(job, openai_api.chat_completion)
        usage = _wants_usage(body)
        return await self._streamed(
            request, job, lambda writer: openai_api.ChatStream(job, writer, self._interval, include_usage=usage)
        )

    async def _completions(self, request: web.Request, body: JsonObject) -> web.StreamResponse:
        job = self._make_job(request, body, prompts.completion_prompts(body), "cmpl-")
        if not body.get("stream"):
            return await self._whole(job, openai_api.text_completion)
        usage = _wants_usage(body)
        return await self._streamed(
            request, job, lambda writer: openai_api.CompletionStream(job, writer, self._interval, include_usage=usage)
        )

    async def _embeddings(self, request: web.Request, body: JsonObject) -> web.StreamResponse:
        encoding = body.get("encoding_format", "float")
        if encoding not in ("float", "base64"):
            raise wrong_field("encoding_format", "expected float or base64", encoding)
        inputs = prompts.completion_prompts(body, "input")
        # One step after the prefill, as much as a pooling model needs.
        job = self._make_job(request, {**body, "n": 1}, inputs, "embd-", max_tokens=1, ignore_eos=True)
        return await self._whole(job, lambda done: openai_api.embeddings(done, encoding))

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        require_fields(body, "model", "messages", "max_tokens")
        prompt = prompts.messages_prompt(body)
        if isinstance(body["max_tokens"], int) and body["max_tokens"] < 1:
            raise wrong_field("max_tokens", "max_tokens must be positive", body["max_tokens"])
        job = self._make_job(request, {**body, "n": 1}, [prompt], "chatcmpl-")
        if not body.get("stream"):
            return await self._whole(job, anthropic_api.message)
        return await self._streamed(
            request, job, lambda writer: anthropic_api.MessageStream(job, writer, self._interval)
        )

    async def count_tokens(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        require_fields(body, "model", "messages")
        self._service.resolve_model(body)
        n_tokens = tokens.count(prompts.messages_prompt(body))
        return json_response({"input_tokens": n_tokens, "context_management": {"original_input_tokens": n_tokens}})

    async def responses(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        store = self._service.responses
        turns = prompts.responses_turns(body)
        previous_id = body.get("previous_response_id")
        if previous_id is not None:
            turns = [*store.get(previous_id).turns_after(), *turns]
        instructions = body.get("instructions")
        system = [prompts.Turn(tokens.SYSTEM, (instructions,))] if isinstance(instructions, str) else []
        prompt = prompts.render([*system, *turns], body.get("tools"))
        # Ids are always new here: they are the keys of the store.
        job = self._make_job(None, {**body, "n": 1}, [prompt], "resp_")

        echoed = ("instructions", "metadata", "max_output_tokens", "previous_response_id", "tools", "tool_choice")
        echo = {name: body[name] for name in echoed if body.get(name) is not None}
        background = body.get("background") is True and not body.get("stream")
        response = StoredResponse(job, echo, turns, background)
        if body.get("store") is not False:
            store.put(response)
        if background:
            self._service.submit(job)
            return json_response(response.body())
        if not body.get("stream"):
            return await self._whole(job, lambda _: response.body())
        return await self._streamed(request, job, lambda writer: ResponseStream(response, writer, self._interval))

    async def stored_response(self, request: web.Request) -> web.Response:
        return json_response(self._service.responses.get(request.match_info["response_id"]).body())

    async def cancel_response(self, request: web.Request) -> web.Response:
        response = self._service.responses.get(request.match_info["response_id"])
        if response.status not in ("queued", "in_progress"):
            raise BadRequestError("Cannot cancel a response that has ended.", "response_id")
        if not response.background:
            raise BadRequestError("Cannot cancel a synchronous response.", "response_id")
        response.cancelled = True
        self._service.abort(response.job)
        return json_response(response.body())

    def _make_job(
        self,
        request: web.Request | None,
        body: JsonObject,
        prompt_tokens: list[bytes],
        id_prefix: str,
        *,
        max_tokens: int | None = None,
        ignore_eos: bool = False,
    ) -> Job:
        """The job of `request`, whose id is part of the job's; refused if the queue is full."""
        request_id = body.get("request_id")
        if request is not None:
            request_id = request.headers.get("X-Request-Id", request_id)
        job = self._service.make_job(
            body,
            prompt_tokens,
            id_prefix=id_prefix,
            request_id=request_id if isinstance(request_id, str) and request is not None else None,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
        )
        self._service.check_admission()
        return job

    async def _whole(self, job: Job, make_body: Callable[[Job], JsonObject]) -> web.Response:
        await self._service.run(job)
        return json_response(make_body(job))

    async def _streamed(
        self, request: web.Request, job: Job, make_stream: Callable[[EventWriter], TokenStream]
    ) -> web.StreamResponse:
        # The head goes out at once, before there is any token: so does vLLM's.
        response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM_TYPE})
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            return response
        writer = EventWriter(transport, chunked="Transfer-Encoding" in response.headers)
        await self._service.run(job, make_stream(writer))
        await response.write_eof()
        return response


async def read_json(request: web.Request) -> JsonObject:
    """The body, an object. Raises BadRequestError for anything else."""
    if request.content_type != "application/json":
        raise ValidationError("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
    data = await request.read()
    if not data:
        raise invalid("missing", "body", "Field required", None)
    try:
        body = orjson.loads(data.decode())
    except UnicodeDecodeError as error:
        raise UnparsableError("There was an error parsing the body") from error
    except orjson.JSONDecodeError as error:
        where = f"body.{error.pos}"
        raise invalid("json_invalid", where, "JSON decode error", {}, _json_fault(data)) from error
    if not isinstance(body, dict):
        wanted = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", wanted, body)
    return body


def _json_fault(data: bytes) -> str:
    """In the words of Python's own parser, which knows some more numbers than others do."""
    try:
        json.loads(data)
    except json.JSONDecodeError as error:
        return error.msg
    except (UnicodeDecodeError, RecursionError):
        pass
    return "Invalid JSON"


def json_response(data: Any) -> web.Response:
    return web.Response(body=orjson.dumps(data), content_type="application/json")


def _wants_usage(body: JsonObject) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True
