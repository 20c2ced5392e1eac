"""Requests for every endpoint of vLLM, in an order in which each may be sent several times.

What is here is asked of an engine directly and through the router, or of a real engine and a simulated one.
"""

import json
from dataclasses import dataclass
from typing import Any

from tests.engines.tiny_model import NAME

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `path` as the engine's own list of endpoints writes it, `target` as it is sent."""

    name: str
    method: str
    path: str
    target: str
    body: bytes | None = None
    content_type: str | None = JSON


def post(path: str, name: str, body: Any, *, target: str | None = None) -> Case:
    return Case(f"POST {path}: {name}", "POST", path, target or path, json.dumps(body).encode())


def bare(method: str, path: str, target: str | None = None) -> Case:
    """Without a body."""
    return Case(f"{method} {target or path}", method, path, target or path, None, None)


MODEL: dict[str, Any] = {"model": NAME}
GREEDY: dict[str, Any] = {**MODEL, "temperature": 0}
HELLO = [{"role": "user", "content": "Hello, «engine» 👋"}]
STREAM: dict[str, Any] = {"stream": True}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
STORED = "/v1/responses/{response_id}"

GENERATION = [
    post(CHAT, "whole", {**GREEDY, "messages": HELLO, "max_tokens": 8}),
    post(CHAT, "two choices", {**MODEL, "messages": HELLO, "max_tokens": 4, "n": 2, "seed": 1}),
    post(CHAT, "probabilities", {**GREEDY, "messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}),
    post(CHAT, "tools", {**GREEDY, "messages": HELLO, "max_tokens": 8, "tools": [TOOL]}),
    post(CHAT, "a tool by name", {
        **GREEDY, "messages": HELLO, "max_tokens": 24, "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    }),
    post(CHAT, "token ids", {**GREEDY, "messages": HELLO, "max_tokens": 4, "return_token_ids": True}),
    post(CHAT, "streamed", {**GREEDY, **STREAM, "messages": HELLO, "max_tokens": 12}),
    post(CHAT, "streamed with usage", {**GREEDY, **USAGE, "messages": HELLO, "max_tokens": 12, "ignore_eos": True}),
    post(TEXT, "whole", {**GREEDY, "prompt": "def f(x):", "max_tokens": 8}),
    post(TEXT, "token ids", {**GREEDY, "prompt": [100, 200, 300], "max_tokens": 8, "logprobs": 1}),
    post(TEXT, "a batch", {**GREEDY, "prompt": ["def", "class"], "max_tokens": 4}),
    post(TEXT, "echo", {**GREEDY, "prompt": "def f(x):", "max_tokens": 2, "echo": True}),
    post(TEXT, "streamed", {**GREEDY, **STREAM, "prompt": "def f(x):", "max_tokens": 12}),
    post(TEXT, "streamed with usage", {**GREEDY, **USAGE, "prompt": [100, 200], "max_tokens": 6}),
    post(RESPONSES, "whole", {**GREEDY, "input": "Hello", "max_output_tokens": 8}),
    post(RESPONSES, "turns", {
        **GREEDY, "instructions": "Be terse.", "max_output_tokens": 8, "store": False,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
    }),
    post(RESPONSES, "streamed", {**GREEDY, **STREAM, "input": "Hello", "max_output_tokens": 12}),
    post(MESSAGES, "whole", {**GREEDY, "messages": HELLO, "max_tokens": 8}),
    post(MESSAGES, "system", {**GREEDY, "messages": HELLO, "max_tokens": 8, "system": "Be terse."}),
    post(MESSAGES, "streamed", {**GREEDY, **STREAM, "messages": HELLO, "max_tokens": 12}),
]  # fmt: skip

REFUSED = [
    *(post(path, "nothing in it", {}) for path in (CHAT, TEXT, RESPONSES, MESSAGES, "/invocations", "/tokenize")),
    *(
        Case(f"POST {path}: {name}", "POST", path, path, body, content_type)
        for path in (CHAT, TEXT, RESPONSES, MESSAGES)
        for name, body, content_type in (
            ("no JSON", b'{"model": ', JSON),
            ("an array", b"[1, 2]", JSON),
            ("empty", b"", JSON),
            ("plain text", b"hello", "text/plain"),
            ("no UTF-8", b'{"model": "\xff"}', JSON),
        )
    ),
    post(CHAT, "no such model", {"model": "nobody", "messages": HELLO}),
    post(TEXT, "no such model", {"model": "nobody", "prompt": "a"}),
    post(RESPONSES, "no such model", {"model": "nobody", "input": "a"}),
    post(MESSAGES, "no such model", {"model": "nobody", "messages": HELLO, "max_tokens": 1}),
    post(MESSAGES, "no limit", {**MODEL, "messages": HELLO}),
    post(CHAT, "no messages", {**MODEL, "messages": []}),
    post(CHAT, "a strange role", {**GREEDY, "messages": [{"role": "nobody", "content": "a"}], "max_tokens": 1}),
    post(CHAT, "no role", {**MODEL, "messages": [{"content": "a"}]}),
    post(CHAT, "no tokens wanted", {**MODEL, "messages": HELLO, "max_tokens": 0}),
    post(CHAT, "words for a number", {**MODEL, "messages": HELLO, "max_tokens": "many"}),
    post(CHAT, "no choices", {**MODEL, "messages": HELLO, "n": 0}),
    post(CHAT, "too hot", {**MODEL, "messages": HELLO, "temperature": -1}),
    post(CHAT, "a longer answer than fits", {**MODEL, "messages": HELLO, "max_tokens": 10**6}),
    post(CHAT, "options without a stream", {**MODEL, "messages": HELLO, "stream_options": {"include_usage": True}}),
    post(CHAT, "an empty salt", {**MODEL, "messages": HELLO, "cache_salt": ""}),
    post(CHAT, "an unknown field", {**GREEDY, "messages": HELLO, "max_tokens": 1, "nobody": 1}),
    post(CHAT, "a stream of no such model", {"model": "nobody", "messages": HELLO, "stream": True}),
    post(TEXT, "no prompt", {**MODEL, "max_tokens": 1}),
    post(TEXT, "an empty prompt", {**MODEL, "prompt": "", "max_tokens": 1}),
    post(TEXT, "no prompts", {**MODEL, "prompt": [], "max_tokens": 1}),
    post(TEXT, "a prompt longer than fits", {**MODEL, "prompt": [5] * 20_000, "max_tokens": 1}),
    post(TEXT, "no such token", {**MODEL, "prompt": [1, 10**6], "max_tokens": 1}),
    post(RESPONSES, "an unknown response before it", {**MODEL, "input": "a", "previous_response_id": "resp_nobody"}),
    bare("GET", STORED, "/v1/responses/resp_nobody"),
    bare("GET", STORED, "/v1/responses/nobody"),
    bare("POST", "/v1/responses/{response_id}/cancel", "/v1/responses/resp_nobody/cancel"),
]

TOKENS = [
    post("/tokenize", "text", {**MODEL, "prompt": "def f(x): # «comment»"}),
    post("/tokenize", "chat", {**MODEL, "messages": HELLO, "return_token_strs": True}),
    post("/tokenize", "no such model", {"model": "nobody", "prompt": "a"}),
    post("/detokenize", "tokens", {**MODEL, "tokens": [100, 200, 300]}),
    post("/detokenize", "nothing in it", {}),
    post("/detokenize", "no such token", {**MODEL, "tokens": [10**6]}),
    post("/v1/messages/count_tokens", "whole", {**MODEL, "messages": HELLO, "system": "Be terse."}),
    post("/v1/messages/count_tokens", "nothing in it", {}),
]

FACTS = [
    bare("GET", "/version"),
    bare("GET", "/load"),
    bare("GET", "/v1/models"),
    bare("GET", "/kv_event_sources"),
    bare("GET", "/health"),
    bare("GET", "/ping"),
    bare("POST", "/ping"),
]

INVOCATIONS = [
    post("/invocations", "chat", {**GREEDY, "messages": HELLO, "max_tokens": 8}),
    post("/invocations", "completion", {**GREEDY, "prompt": "def f(x):", "max_tokens": 8}),
    post("/invocations", "streamed", {**GREEDY, **STREAM, "prompt": "def f(x):", "max_tokens": 8}),
    post("/invocations", "neither", {**MODEL, "words": "a"}),
]

# Rarely routed anywhere; they pass all the same.
RARE = [
    post(f"{CHAT}/batch", "two", {**GREEDY, "messages": [HELLO, HELLO], "max_tokens": 4}),
    post(f"{CHAT}/batch", "nothing in it", {}),
    post("/v1/systemone", "a question", {**MODEL, "state": "It rains.", "questions": {"wet": {"type": "boolean"}}}),
    post("/v1/systemone", "nothing in it", {}),
    post("/generative_scoring", "two items", {
        **MODEL, "query": "Is it wet?", "items": ["rain", "sun"], "label_token_ids": [100, 200],
    }),
    post("/generative_scoring", "nothing in it", {}),
    post(f"{CHAT}/render", "whole", {**GREEDY, "messages": HELLO, "max_tokens": 4}),
    post(f"{TEXT}/render", "whole", {**GREEDY, "prompt": "def f(x):", "max_tokens": 4}),
    post(f"{RESPONSES}/render", "whole", {**GREEDY, "input": "Hello", "max_output_tokens": 4}),
    post(f"{MESSAGES}/render", "whole", {**GREEDY, "messages": HELLO, "max_tokens": 4}),
    post("/inference/v1/generate", "whole", {
        **MODEL, "token_ids": [100, 200], "sampling_params": {"temperature": 0, "max_tokens": 4},
    }),
    post("/inference/v1/generate", "streamed", {
        **MODEL, **STREAM, "token_ids": [100, 200], "sampling_params": {"temperature": 0, "max_tokens": 4},
    }),
    *(post(path, "nothing in it", {}) for path in (
        f"{CHAT}/render", f"{TEXT}/render", f"{RESPONSES}/render", f"{MESSAGES}/render",
        f"{CHAT}/derender", f"{TEXT}/derender", "/inference/v1/generate",
    )),
    bare("GET", "/server_info"),
    bare("GET", "/server_info", "/server_info?config_format=json"),
    bare("GET", "/get_world_size"),
    bare("GET", "/weight_info"),
]  # fmt: skip

# With `engine_control: allow`. In pairs that leave the engine as it was.
CONTROL = [
    bare("POST", "/reset_prefix_cache"),
    bare("POST", "/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=maybe"),
    bare("POST", "/reset_mm_cache"),
    bare("POST", "/reset_encoder_cache"),
    bare("POST", "/pause"),
    bare("POST", "/pause", "/pause?mode=nobody"),
    bare("GET", "/is_paused"),
    bare("POST", "/resume"),
    bare("GET", "/is_sleeping"),
    bare("POST", "/sleep", "/sleep?level=0"),
    bare("POST", "/sleep", "/sleep?level=many"),
    bare("GET", "/is_sleeping"),
    bare("POST", "/release_kv_cache_memory"),
    bare("POST", "/wake_up"),
    bare("POST", "/collective_rpc"),
    post("/collective_rpc", "nothing in it", {}),
    bare("POST", "/abort_requests"),
    post("/abort_requests", "of nobody", {"request_ids": ["nobody"]}),
    bare("POST", "/inference/v1/abort_requests"),
    post("/inference/v1/abort_requests", "of nobody", {"request_ids": ["nobody"]}),
    bare("POST", "/scale_elastic_ep"),
    post("/scale_elastic_ep", "nothing in it", {}),
    bare("POST", "/is_scaling_elastic_ep"),
    post("/init_weight_transfer_engine", "nothing in it", {}),
    post("/init_weight_transfer_engine", "nothing to go by", {"init_info": {}}),
    bare("POST", "/shutdown_weight_transfer_engine"),
    bare("POST", "/start_weight_update"),
    bare("POST", "/start_draft_weight_update"),
    post("/update_weights", "nothing in it", {}),
    post("/update_weights", "nothing to go by", {"update_info": {}}),
    post("/update_weight_version", "nothing in it", {}),
    post("/weight_checker", "nothing in it", {}),
    post("/weight_checker", "a strange action", {"action": "nothing"}),
    bare("POST", "/finish_weight_update"),
]

UNKNOWN = [
    bare("GET", "/nobody"),
    bare("GET", "/"),
    bare("POST", "/v1/embeddings"),
    post("/v1/embeddings", "whole", {**MODEL, "input": "a"}),
    post("/v1/score", "whole", {**MODEL, "text_1": "a", "text_2": "b"}),
    bare("GET", "/v1/models/tiny"),
    bare("GET", "/v1/chat/completions/", "/v1/chat/completions/"),
]

CASES = [*FACTS, *GENERATION, *REFUSED, *TOKENS, *INVOCATIONS, *RARE, *CONTROL, *UNKNOWN]
