"""What vLLM answers on /v1/chat/completions, /v1/completions and /v1/embeddings, whole and streamed."""

import base64
import struct
from hashlib import shake_128
from typing import Any

import orjson

from prefixroute.demo.engine.request import FinishReason
from prefixroute.demo.server.jobs import EventWriter, Job, ServedRequest, TokenStream
from prefixroute.demo.server.prompts import JsonObject

DONE = b"data: [DONE]\n\n"
EMBEDDING_DIMENSIONS = 32


def usage(job: Job) -> JsonObject:
    """As with --enable-prompt-tokens-details."""
    return {
        "prompt_tokens": job.n_prompt,
        "total_tokens": job.n_prompt + job.n_output,
        "completion_tokens": job.n_output,
        "prompt_tokens_details": {"cached_tokens": job.n_cached, "created_cache_tokens": 0},
    }


def chat_completion(job: Job) -> JsonObject:
    return {
        "id": job.id,
        "object": "chat.completion",
        "created": job.created,
        "model": job.model,
        "choices": [
            {
                "index": request.index,
                "message": {
                    "role": "assistant",
                    "content": request.answer,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [],
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": request.finish_reason,
                "stop_reason": None,
                "token_ids": None,
            }
            for request in job.requests
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage(job),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": None,
    }


def text_completion(job: Job) -> JsonObject:
    return {
        "id": job.id,
        "object": "text_completion",
        "created": job.created,
        "model": job.model,
        "choices": [
            {
                "index": request.index,
                "text": request.answer,
                "logprobs": None,
                "finish_reason": request.finish_reason,
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
            for request in job.requests
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage(job),
        "kv_transfer_params": None,
    }


def embeddings(job: Job, encoding_format: str) -> JsonObject:
    """A unit vector for each input, decided by its tokens."""
    return {
        "id": job.id,
        "object": "list",
        "created": job.created,
        "model": job.model,
        "data": [
            {
                "index": request.index,
                "object": "embedding",
                "embedding": _encode_vector(_vector(request.prompt), encoding_format),
            }
            for request in job.requests
        ],
        "usage": {
            "prompt_tokens": job.n_prompt,
            "total_tokens": job.n_prompt,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": job.n_cached},
        },
    }


class CompletionStream(TokenStream):
    """The events common to both OpenAI dialects: one choice an event, then the usage, then [DONE]."""

    object_name = "text_completion"

    def __init__(self, job: Job, writer: EventWriter, interval: int, *, include_usage: bool) -> None:
        super().__init__(job, writer, interval)
        self._include_usage = include_usage
        head = {"id": job.id, "object": self.object_name, "created": job.created, "model": job.model}
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._before = [
            b'%b,"choices":[{"index":%d,%b' % (self._head, request.index, self._text_before) for request in job.requests
        ]

    # Around the text within a choice.
    _text_before = b'"text":"'
    _text_after = b'","logprobs":null,"finish_reason":'
    _more = b"null,"
    _text_end = _text_after + b'null,"stop_reason":null,"token_ids":null}]}\n\n'

    def _first_events(self, request: ServedRequest) -> list[bytes]:
        return []

    def _text_event(self, request: ServedRequest, text: bytes) -> bytes:
        return self._before[request.index] + text + self._text_end

    def _last_events(self, request: ServedRequest, text: bytes, reason: FinishReason) -> list[bytes]:
        last = b'%b%b"%b","stop_reason":null,"token_ids":null}]}\n\n' % (
            self._before[request.index] + text,
            self._text_after,
            reason.encode(),
        )
        if self.job.n_left > 1:
            return [last]
        events = [last]
        if self._include_usage:
            events.append(b'%b,"choices":[],"usage":%b}\n\n' % (self._head, orjson.dumps(usage(self.job))))
        return [*events, DONE]


class ChatStream(CompletionStream):
    object_name = "chat.completion.chunk"

    _text_before = b'"delta":{"content":"'
    _text_after = b'"},"logprobs":null,"finish_reason":'
    _text_end = _text_after + b'null,"token_ids":null}]}\n\n'

    def _first_events(self, request: ServedRequest) -> list[bytes]:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        return [b'%b,"choices":[{"index":%d,%b"prompt_token_ids":null}\n\n' % (self._head, request.index, delta)]


def _vector(prompt: bytes) -> list[float]:
    numbers = struct.unpack(f"<{EMBEDDING_DIMENSIONS}h", shake_128(prompt).digest(2 * EMBEDDING_DIMENSIONS))
    length = sum(number * number for number in numbers) ** 0.5 or 1.0
    return [number / length for number in numbers]


def _encode_vector(vector: list[float], encoding_format: str) -> Any:
    if encoding_format == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
    return vector
