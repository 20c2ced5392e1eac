"""What vLLM answers on /v1/responses, whole and streamed, and the responses it keeps.

Responses live in the memory of one process, like vLLM's with VLLM_ENABLE_RESPONSES_API_STORE=1: another server
knows nothing of them. The oldest are forgotten.
"""

from collections import OrderedDict
from dataclasses import dataclass

from prefixroute.demo.engine.request import FinishReason
from prefixroute.demo.server import tokens
from prefixroute.demo.server.api_errors import UnknownResponseError
from prefixroute.demo.server.jobs import EventWriter, Job, ServedRequest, TokenStream, named_event
from prefixroute.demo.server.prompts import JsonObject, Turn


@dataclass(slots=True)
class StoredResponse:
    job: Job
    # The fields of the request that the answer repeats.
    echo: JsonObject
    # The conversation up to the answer, without instructions: those hold for one response only.
    turns: list[Turn]
    background: bool = False
    cancelled: bool = False

    @property
    def status(self) -> str:
        (request,) = self.job.requests
        if self.cancelled or request.finish_reason == FinishReason.ABORT:
            return "cancelled"
        if request.finish_reason is None:
            return "in_progress" if request.scheduled_s is not None else "queued"
        return "completed" if request.finish_reason == FinishReason.STOP else "incomplete"

    def turns_after(self) -> list[Turn]:
        """The conversation with the answer."""
        (request,) = self.job.requests
        return [*self.turns, Turn(tokens.ASSISTANT, (request.answer,))]

    def body(self) -> JsonObject:
        (request,) = self.job.requests
        status = self.status
        ended = request.finish_reason is not None
        return {
            "id": self.job.id,
            "created_at": self.job.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": None,
            "model": self.job.model,
            "object": "response",
            "output": [output_item(self.job, request.answer, "completed")] if ended and request.n_output else [],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto" if self.echo.get("tools") else "none",
            "tools": [],
            "top_p": 1.0,
            "background": self.background,
            "max_output_tokens": None,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage(self.job) if ended else None,
            "user": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
            **self.echo,
        }


class ResponseStore:
    """The last `capacity` responses, by id."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: StoredResponse) -> None:
        self._responses[response.job.id] = response
        if len(self._responses) > self._capacity:
            self._responses.popitem(last=False)

    def get(self, response_id: str) -> StoredResponse:
        """Raises UnknownResponseError."""
        response = self._responses.get(response_id)
        if response is None:
            raise UnknownResponseError(f"Response with id '{response_id}' not found.", "response_id")
        return response


def usage(job: Job) -> JsonObject:
    return {
        "input_tokens": job.n_prompt,
        "input_tokens_details": {
            "cached_tokens": job.n_cached,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": job.n_output,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": job.n_prompt + job.n_output,
    }


def output_item(job: Job, text: str | None, status: str) -> JsonObject:
    return {
        "id": job.id.replace("resp_", "msg_", 1),
        "content": [] if text is None else [output_text(text)],
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def output_text(text: str) -> JsonObject:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


class ResponseStream(TokenStream):
    """response.created … response.completed, numbered."""

    def __init__(self, response: StoredResponse, writer: EventWriter, interval: int) -> None:
        super().__init__(response.job, writer, interval)
        self._response = response
        self._n_events = 0
        self._place: JsonObject = {
            "item_id": output_item(response.job, None, "in_progress")["id"],
            "output_index": 0,
            "content_index": 0,
        }
        delta = {"type": "response.output_text.delta", **self._place, "logprobs": [], "delta": ""}
        self._before = named_event(delta).removesuffix(b'"}\n\n')

    def on_start(self) -> None:
        begun = {**self._response.body(), "status": "in_progress"}
        events = ("response.created", "response.in_progress")
        self._writer.send_all([self._numbered({"type": name, "response": begun}) for name in events])

    def _first_events(self, request: ServedRequest) -> list[bytes]:
        item = output_item(self.job, None, "in_progress")
        begun = {**output_text(""), "logprobs": []}
        return [
            self._numbered({"type": "response.output_item.added", "output_index": 0, "item": item}),
            self._numbered({"type": "response.content_part.added", **self._place, "part": begun}),
        ]

    def _text_event(self, request: ServedRequest, text: bytes) -> bytes:
        number = self._n_events
        self._n_events = number + 1
        return b'%b%b","sequence_number":%d}\n\n' % (self._before, text, number)

    def _last_events(self, request: ServedRequest, text: bytes, reason: FinishReason) -> list[bytes]:
        answer = request.answer
        item = output_item(self.job, answer, "completed")
        return [
            *([self._text_event(request, text)] if text else []),
            self._numbered(
                {"type": "response.output_text.done", **self._place, "text": answer, "logprobs": []},
            ),
            self._numbered({"type": "response.content_part.done", **self._place, "part": output_text(answer)}),
            self._numbered({"type": "response.output_item.done", "output_index": 0, "item": item}),
            self._numbered({"type": "response.completed", "response": self._response.body()}),
        ]

    def _numbered(self, data: JsonObject) -> bytes:
        number = self._n_events
        self._n_events = number + 1
        return named_event({**data, "sequence_number": number})
