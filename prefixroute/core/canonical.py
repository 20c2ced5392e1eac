"""From the fields of a request to its key: the prompt's material in the order the engine renders it.

Rules that every shape keeps:

- **The order of known chat templates**: leading system (or developer) messages, then tools and what else
  templates read, then the turns. Tools stand before the turns wherever they are in the body.
- **Appending keeps the beginning.** A message is rendered by itself, without a length in front or a
  terminator behind, so the key of one turn is the beginning of the key of the next. (A further *leading*
  system message is no turn: it moves the tools, in the key as in the engine.)
- **Same prompt, same key**, across spellings (a string or one text part) and across APIs (chat,
  Responses and Messages meet in the engine's chat template). What no template renders leaves no trace:
  `cache_control`, ids of calls, `detail` of images.
- **Media by digest**, repeated to stand for their size up to a bound: megabytes are hashed, never kept.
- **A look, not a judgement.** Whatever is odd is rendered as JSON or left out; nothing raises, except IntricateError
  for what would take the event loop too long: the body itself is the key then.

Control characters mark the boundaries. A client that sends them itself can make two prompts look alike;
that costs a cold prefill, nothing else.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

from prefixroute.core.content import (
    FIELD,
    MESSAGE,
    NAME,
    PART,
    REASONING,
    TEXT,
    KeyText,
    append_call,
    append_content,
    append_media,
    n_key_tokens,
    str_or_empty,
    to_json,
)

# vLLM's prompt_embeds: base64 of a tensor, one row per token. Hidden size 4096, fp16. An estimate for load.
EMBEDS_BYTES_PER_TOKEN = 4096 * 2 * 4 // 3

# Templates that know both render developer as system; the others know only system.
_HEADS = {
    role: f"{MESSAGE}{'system' if role == 'developer' else role}{TEXT}"
    for role in ("system", "developer", "user", "assistant", "tool")
}
_LEADING_ROLES = ("system", "developer")
# Claude Code's first system block: it changes with every request, and vLLM leaves it out of the prompt.
_BILLING_BLOCK = "x-anthropic-billing-header"


# What templates read of a chat body besides its messages, in this order.
_CHAT_FIELDS = ("tools", "functions", "documents", "chat_template_kwargs", "reasoning_effort")
_ANY_CHAT_FIELD = frozenset(_CHAT_FIELDS)


def chat_key(body: dict[str, Any]) -> bytes:
    """Key of an OpenAI chat body; empty without `messages`."""
    if _ANY_CHAT_FIELD.isdisjoint(body):
        return _conversation(None, body.get("messages"), ())
    return _conversation(None, body.get("messages"), [(name, body.get(name)) for name in _CHAT_FIELDS])


def messages_key(body: dict[str, Any]) -> bytes:
    """Key of an Anthropic Messages body; empty without `messages`."""
    system = body.get("system")
    if isinstance(system, list):
        system = [block for block in system if not _is_billing_block(block)]
    return _conversation(
        system,
        body.get("messages"),
        (
            ("tools", body.get("tools")),
            ("documents", body.get("documents")),
            ("chat_template_kwargs", body.get("chat_template_kwargs")),
        ),
    )


def responses_key(body: dict[str, Any]) -> bytes:
    """Key of a Responses body; empty without `input`.

    A stored response stands in it by its id, where the engine puts what it stored.
    """
    given = body.get("input")
    reasoning = body.get("reasoning")
    return _conversation(
        body.get("instructions"),
        [{"role": "user", "content": given}] if given and isinstance(given, str) else given,
        (
            ("tools", body.get("tools")),
            ("reasoning_effort", reasoning.get("effort") if isinstance(reasoning, dict) else None),
            ("previous_response_id", body.get("previous_response_id")),
        ),
    )


def completions_key(body: dict[str, Any]) -> tuple[bytes, int]:
    """Key and prompt tokens of a completions body; an empty key for embeddings, which come as tensors."""
    if body.get("prompt_embeds"):
        return b"", _n_embeds_tokens(body["prompt_embeds"])
    return _texts_or_ids(body.get("prompt"))


# Where completions and generate bodies have their prompt; the first that is there counts.
PROMPT_FIELDS = ("token_ids", "input_ids", "prompt", "inputs", "text")

# More than any model takes in; each costs a digest.
_MAX_IMAGES = 1024


def generate_key(body: dict[str, Any]) -> tuple[bytes, int]:
    """Key and prompt tokens of the `/generate` bodies of vLLM, Text Generation Inference and SGLang."""
    for name in PROMPT_FIELDS:
        if body.get(name):
            key, n_tokens = _texts_or_ids(body[name])
            break
    else:
        return b"", 0
    images = body.get("image_data")
    if not key or not images:
        return key, n_tokens
    media = KeyText()
    for image in images[:_MAX_IMAGES] if isinstance(images, list) else [images]:
        append_media(media, {"url": image}, None)
    # In front: placeholders in the text do not say whose digest they stand for.
    with_media = ("".join(media) + PART).encode() + key
    return with_media, n_tokens + n_key_tokens(len(with_media)) - n_key_tokens(len(key))


def turns_key(turns: list[Any]) -> bytes:
    """What a conversation's key grows by when `turns` are appended: messages, or items of a Responses input."""
    out = KeyText()
    _messages(out, turns)
    return "".join(out).encode()


def _is_billing_block(block: object) -> bool:
    if not isinstance(block, dict):
        return False
    text = block.get("text")
    return isinstance(text, str) and text.startswith(_BILLING_BLOCK)


def _conversation(system: object, messages: object, fields: Sequence[tuple[str, object]]) -> bytes:
    """System, leading system messages, fields that templates read, turns."""
    if not isinstance(messages, list):
        return b""
    out = KeyText()
    out.check_room(len(messages))
    for message in messages:
        if isinstance(message, dict):
            break
    else:
        return b""
    if system:
        out.append(_HEADS["system"])
        append_content(out, system)
    if not fields:  # nothing to be put between them
        _messages(out, messages)
        return "".join(out).encode()
    n_leading = 0
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _LEADING_ROLES:
            break
        n_leading += 1
    _messages(out, messages[:n_leading])
    for name, value in fields:
        if value:
            out += (FIELD, name, TEXT, _without_cache_control(value))
    _messages(out, messages[n_leading:])
    return "".join(out).encode()


def _messages(out: KeyText, messages: list[Any]) -> None:
    """Chat messages, Anthropic messages or Responses items."""
    append, heads = out.append, _HEADS
    for message in messages:
        # Nearly all of them have a known role, a text and nothing else; no step is spent on what else there could be.
        try:
            head, content = heads[message["role"]], message["content"]
        except (KeyError, TypeError):
            _odd_message(out, message)
            continue
        if type(content) is str and len(message) == 2:
            append(head)
            append(content)
        else:
            _odd_message(out, message)


def _odd_message(out: KeyText, message: object) -> None:
    """Any message or item, or none at all: then the engine refuses the whole request."""
    if not isinstance(message, dict):
        return
    role = message.get("role")
    if not isinstance(role, str):
        _item(out, message)
        return
    content = message.get("content")
    head = _HEADS.get(role) or f"{MESSAGE}{role}{TEXT}"
    if len(message) == 2 and content is not None:
        out.append(head)
        append_content(out, content)
    else:
        _message(out, head, message, content)


def _message(out: KeyText, head: str, message: dict[str, Any], content: object) -> None:
    name = message.get("tool_call_id") or message.get("name")
    if isinstance(name, str):
        out += (head[:-1], NAME, name, TEXT)
    else:
        out.append(head)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning and isinstance(reasoning, str):
        out += (REASONING, reasoning)
        if content:
            out.append(PART)
    append_content(out, content)
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        calls = ()
    out.check_room(len(calls))
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            append_call(out, function.get("name"), function.get("arguments"))
        else:
            append_call(out, None, call)
    function = message.get("function_call")
    if isinstance(function, dict):
        append_call(out, function.get("name"), function.get("arguments"))


def _item(out: KeyText, item: dict[str, Any]) -> None:
    """An item of a Responses input that is not a message."""
    match item.get("type"):
        case "function_call" | "custom_tool_call":
            out.append(_HEADS["assistant"])
            append_call(out, item.get("name"), item.get("arguments", item.get("input")))
        case "function_call_output" | "custom_tool_call_output":
            out += (MESSAGE, "tool", NAME, str_or_empty(item.get("call_id")), TEXT)
            append_content(out, item.get("output"))
        case "reasoning":
            out += (_HEADS["assistant"], REASONING)
            append_content(out, item.get("content") or item.get("summary"))
        case kind:
            out += (MESSAGE, str_or_empty(kind), TEXT)
            append_media(out, item, None)


def _texts_or_ids(prompt: object) -> tuple[bytes, int]:
    """A prompt string, token ids, or a list of either: key of the first, tokens of all."""
    if isinstance(prompt, str):
        key = prompt.encode()
        return key, n_key_tokens(len(key))
    if not isinstance(prompt, list) or not prompt:
        return b"", 0
    first = prompt[0]
    if isinstance(first, str):
        return first.encode(), _n_batch_tokens(prompt)
    if isinstance(first, list):
        return _packed(first), _n_batch_tokens(prompt)
    return _packed(prompt), len(prompt)


# Of a batch, so many prompts are measured. The first is always among them: its key stands for no more than all of it.
_MAX_MEASURED = 4_096


def _n_batch_tokens(prompts: list[Any]) -> int:
    stride = len(prompts) // _MAX_MEASURED + 1
    if stride == 1:
        return sum(map(_n_prompt_tokens, prompts))
    first, *measured = prompts[::stride]
    return _n_prompt_tokens(first) + sum(map(_n_prompt_tokens, measured)) * (len(prompts) - 1) // len(measured)


def _n_prompt_tokens(prompt: object) -> int:
    if isinstance(prompt, str):
        return n_key_tokens(len(prompt.encode()))
    return len(prompt) if isinstance(prompt, list) else 1


def _packed(ids: list[Any]) -> bytes:
    """Token ids as little-endian uint32; empty when one of them cannot be a token id."""
    if set(map(type, ids)) != {int}:  # bool is an int to array, and to isinstance
        return b""
    try:
        packed = array("I", ids)
    except OverflowError:
        return b""
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _n_embeds_tokens(embeds: object) -> int:
    given = embeds if isinstance(embeds, list) else [embeds]
    n_bytes = sum(len(tensor) for tensor in given if isinstance(tensor, str))
    return n_bytes // EMBEDS_BYTES_PER_TOKEN + 1


def _without_cache_control(value: object) -> str:
    text = value if isinstance(value, str) else to_json(value)
    if isinstance(value, list) and '"cache_control"' in text:
        return to_json([
            {name: x for name, x in tool.items() if name != "cache_control"}
            if isinstance(tool, dict)
            else tool
            for tool in value
        ])  # fmt: skip
    return text
