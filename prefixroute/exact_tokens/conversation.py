"""A chat request → what the engine hands its chat template, in vLLM's way (0.32; `renderers/chat_utils.py` there).

The engine validates before it renders, and that shows in the text: unknown fields are dropped, objects come in the
order of its schemas, arguments of calls are parsed, tools get the fields they lack. What is not surely rendered
alike raises `NotExactError`: media, templates of the request, truncation, odd types. Nobody is judged by that.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Claude Code's first system block changes with every request; the engine leaves the line out.
_BILLING_LINE = "x-anthropic-billing-header"
# Arguments of `apply_chat_template` itself: as template variables they mean something else.
_NOT_VARIABLES = frozenset(
    {"chat_template", "tokenize", "tools", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "conversation"}
)
# What changes the prompt in ways that are not followed here.
_NOT_FOLLOWED = ("chat_template", "truncate_prompt_tokens", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds")
_UNSET = (None, "auto")


class NotExactError(Exception):
    """The request is not surely rendered as the engine does it. The message names fields, never their values."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is given."""

    messages: list[dict[str, Any]]
    """Content as text where all of it is; parts stay lists of `{"type": "text", "text": …}`, see `with_content`."""
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool


def read_conversation(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Conversation:
    """The conversation of a chat body. `defaults`: variables of templates that requests may override.

    Does not change `body`; shares strings and schemas with it. Raises NotExactError.
    """
    for name in _NOT_FOLLOWED:
        if body.get(name) is not None:
            raise NotExactError(name)
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise NotExactError("kv_transfer_params")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise NotExactError("messages")
    variables = _variables(body, defaults or {})
    return Conversation(
        messages=[_message(message) for message in messages],
        tools=_tools(body.get("tools")),
        documents=_dicts(body.get("documents"), "documents"),
        variables=variables,
        add_generation_prompt=_flag(body, "add_generation_prompt", default=True),
        continue_final_message=_flag(body, "continue_final_message", default=False),
        add_special_tokens=_flag(body, "add_special_tokens", default=False),
    )


def with_content(messages: list[dict[str, Any]], *, as_parts: bool) -> list[dict[str, Any]]:
    """The messages with content as the template iterates over it: lists of parts, or one text.

    Results of tools are text for every template, because most know them only so.
    """
    shaped = []
    for message in messages:
        parts = message["content"]
        if as_parts and message["role"] != "tool":
            content: object = [{"type": "text", "text": text} for text in parts]
        else:
            content = "\n".join(parts)
        shaped.append({**message, "content": content})
    return shaped


def without_developer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that do not know the role: developer messages become system ones, and those are joined in front."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    renamed = [
        {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [message for message in renamed if message["role"] == "system"]
    if len(system) == 1 and renamed[0]["role"] == "system":
        return renamed
    texts = [text for message in system if (text := _joined(message["content"]))]
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _joined(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return str(content)


def _variables(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise NotExactError("chat_template_kwargs")
    variables = dict(given or {})
    effort = body.get("reasoning_effort")
    if effort not in _UNSET:
        # The engine turns thinking on with it, or off for "none", unless the request says otherwise.
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    if not _NOT_VARIABLES.isdisjoint(variables):
        raise NotExactError("chat_template_kwargs")
    merged = {**defaults, **{name: value for name, value in variables.items() if value not in _UNSET}}
    for name in ("add_generation_prompt", "continue_final_message", "documents"):
        merged.pop(name, None)  # the body's own fields stand above them
    return merged


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise NotExactError("messages")
    texts = _texts(message.get("content"))
    if role == "system":
        texts = _without_billing(texts)
    made: dict[str, Any] = {"role": role, "content": texts}
    if role == "assistant":
        _add_turn(made, message)
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    if role == "developer" and message.get("tools") is not None:
        raise NotExactError("messages.tools")
    return made


def _add_turn(made: dict[str, Any], message: Mapping[str, Any]) -> None:
    """Calls and thoughts of an assistant's message."""
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise NotExactError("tool_calls")
        if calls:
            made["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        # With an explicit null as content, releases differ in whether the thought is kept.
        if not isinstance(reasoning, str) or message.get("content", "") is None:
            raise NotExactError("reasoning")
        made["reasoning"] = made["reasoning_content"] = reasoning


def _call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise NotExactError("tool_calls")
    # Releases differ in whether further fields stay. Clients repeat the index that streams have.
    if not (function.keys() <= {"name", "arguments"} and call.keys() <= {"id", "type", "function", "index"}):
        raise NotExactError("tool_calls")
    name, identity, given = function.get("name"), call.get("id"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(identity, str) or not isinstance(given, str | None):
        raise NotExactError("tool_calls")
    try:
        arguments = json.loads(given) if given else {}
    except (ValueError, RecursionError):
        arguments = {}  # as the engine does, so that one garbled call does not end a conversation
    # In the order of the engine's schema, which templates show that print a call whole.
    return {
        "id": identity,
        "function": {"arguments": arguments if isinstance(arguments, dict) else {}, "name": name},
        "type": "function",
    }


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise NotExactError("content")
        texts.append(text)
    return texts


def _without_billing(texts: list[str]) -> list[str]:
    kept = []
    for text in texts:
        rest = text.partition("\n")[2] if text.startswith(_BILLING_LINE) else text
        if rest or rest == text:
            kept.append(rest)
    return kept


def _tools(tools: object) -> list[dict[str, Any]] | None:
    listed = _dicts(tools, "tools")
    return None if listed is None else [_tool(tool) for tool in listed]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise NotExactError("tools")
    # Releases differ in what they do with further fields.
    if not (function.keys() <= {"name", "description", "parameters", "strict"}):
        raise NotExactError("tools")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise NotExactError("tools")
    made: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if function.get("strict") is not None:
        made["strict"] = function["strict"]
    return {"type": "function", "function": made}


def _dicts(value: object, name: str) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise NotExactError(name)
    return value


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise NotExactError(name)
    return value
