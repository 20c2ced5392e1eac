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


# What names the engine's build.
FINGERPRINT = "vllm-0.32.0-simulated"


def usage(job: Job, created: int | None) -> JsonObject:
    """As with --enable-prompt-tokens-details. `created`: tokens that are newly cached, which only chats tell."""
    return {
        **_counts(job),
        "prompt_tokens_details": {
            "cached_tokens": job.n_cached,
            "created_cache_tokens": created,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }


def _counts(job: Job) -> JsonObject:
    return {
        "prompt_tokens": job.n_prompt,
        "total_tokens": job.n_prompt + job.n_output,
        "completion_tokens": job.n_output,
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
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": request.finish_reason,
                "stop_reason": None,
                "token_ids": None,
                "routed_experts": None,
            }
            for request in job.requests
        ],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(job, 0),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
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
                "routed_experts": None,
            }
            for request in job.requests
        ],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(job, None),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
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

    # Around the text within a choice, which goes on or is over.
    _text_before = b'"text":"'
    _text_after = b'","logprobs":null,"finish_reason":'
    _last_end = b',"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
    _text_end = _text_after + b"null" + _last_end + b"}\n\n"
    _details = b'{"cached_tokens":%d}'

    def _first_events(self, request: ServedRequest) -> list[bytes]:
        return []

    def _text_event(self, request: ServedRequest, text: bytes) -> bytes:
        return self._before[request.index] + text + self._text_end

    def _last_events(self, request: ServedRequest, text: bytes, reason: FinishReason) -> list[bytes]:
        last = b'%b%b"%b"%b' % (self._before[request.index] + text, self._text_after, reason.encode(), self._last_end)
        if self.job.n_left > 1:
            return [last + b"}\n\n"]
        # The last event of all names the engine.
        end = b',"system_fingerprint":"%b"}\n\n' % FINGERPRINT.encode()
        if not self._include_usage:
            return [last + end, DONE]
        return [last + b"}\n\n", b'%b,"choices":[],"usage":%b%b' % (self._head, self._usage(), end), DONE]

    def _usage(self) -> bytes:
        """Shorter than that of a whole answer."""
        details = self._details % self.job.n_cached
        return b'%b,"prompt_tokens_details":%b}' % (orjson.dumps(_counts(self.job))[:-1], details)


class ChatStream(CompletionStream):
    object_name = "chat.completion.chunk"

    _text_before = b'"delta":{"content":"'
    _text_after = b'"},"logprobs":null,"finish_reason":'
    _text_end = _text_after + b'null,"token_ids":null}]}\n\n'
    _last_end = b',"stop_reason":null,"token_ids":null}]'
    _details = b'{"cached_tokens":%d,"created_cache_tokens":0}'

    def _first_events(self, request: ServedRequest) -> list[bytes]:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        prompt = b'"prompt_token_ids":null,"prompt_text":null'
        return [b'%b,"choices":[{"index":%d,%b,%b}\n\n' % (self._head, request.index, delta, prompt)]


def _vector(prompt: bytes) -> list[float]:
    numbers = struct.unpack(f"<{EMBEDDING_DIMENSIONS}h", shake_128(prompt).digest(2 * EMBEDDING_DIMENSIONS))
    length = sum(number * number for number in numbers) ** 0.5 or 1.0
    return [number / length for number in numbers]


def _encode_vector(vector: list[float], encoding_format: str) -> Any:
    if encoding_format == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
    return vector
