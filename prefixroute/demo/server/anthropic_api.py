"""What vLLM answers on /v1/messages, whole and streamed."""

from prefixroute.demo.engine.request import FinishReason
from prefixroute.demo.server.jobs import EventWriter, Job, ServedRequest, TokenStream, named_event
from prefixroute.demo.server.prompts import JsonObject

_STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


def usage(job: Job) -> JsonObject:
    """At the end: `input_tokens` leaves out what the cache gave."""
    return {
        "input_tokens": job.n_prompt - job.n_cached,
        "output_tokens": job.n_output,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": job.n_cached,
    }


def message(job: Job) -> JsonObject:
    (request,) = job.requests
    return {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": request.answer}],
        "model": job.model,
        "stop_reason": _STOP_REASONS.get(request.finish_reason or FinishReason.ABORT),
        "usage": usage(job),
    }


def _begun(job: Job) -> JsonObject:
    """As a stream begins: all of the prompt, and nothing of what was cached."""
    return {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": job.model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": job.n_prompt, "output_tokens": 0},
    }


class MessageStream(TokenStream):
    """message_start, one block of text in deltas, message_delta, message_stop."""

    def __init__(self, job: Job, writer: EventWriter, interval: int) -> None:
        super().__init__(job, writer, interval)
        start = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}, "index": 0}
        before, after = named_event(start).split(b'"text":""')
        self._before = before + b'"text":"'
        self._after = b'"' + after

    def _first_events(self, request: ServedRequest) -> list[bytes]:
        return [
            named_event({"type": "message_start", "message": _begun(self.job)}),
            named_event({"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}),
        ]

    def _text_event(self, request: ServedRequest, text: bytes) -> bytes:
        return self._before + text + self._after

    def _last_events(self, request: ServedRequest, text: bytes, reason: FinishReason) -> list[bytes]:
        delta = {"stop_reason": _STOP_REASONS.get(reason), "stop_sequence": None}
        return [
            *([self._text_event(request, text)] if text else []),
            named_event({"type": "content_block_stop", "index": 0}),
            named_event({"type": "message_delta", "delta": delta, "usage": usage(self.job)}),
            named_event({"type": "message_stop"}),
        ]
