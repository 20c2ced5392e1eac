"""Request bodies of all dialects to prompts.

One plain template that only ever appends: a role token, the message's texts, an end token; last the assistant's
role token, after which the model speaks. The same conversation gives the same prompt in each dialect, and a turn
is an exact prefix of the next one. Tools come before everything else, as JSON.

Media are not looked into: a part that is no text stands in the prompt as the digest of its JSON.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import orjson
from xxhash import xxh3_128_hexdigest

from prefixroute.demo.server import tokens
from prefixroute.demo.server.api_errors import BadRequestError, invalid, missing_field, wrong_field

JsonObject = dict[str, Any]

_WANTED = "expected text or token ids, or a list of them"
_ROLES = {
    "system": tokens.SYSTEM,
    "developer": tokens.SYSTEM,
    "user": tokens.USER,
    "assistant": tokens.ASSISTANT,
    "tool": tokens.TOOL,
    "function": tokens.TOOL,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. Each of `texts` is tokenized by itself."""

    role: bytes
    texts: tuple[str, ...]


def render(turns: Iterable[Turn], tools: object = None, *, add_generation_prompt: bool = True) -> bytes:
    """The prompt, as tokens."""
    parts: list[bytes] = []
    if tools:
        parts += (tokens.SYSTEM, tokens.encode(_json(tools)), tokens.END)
    for turn in turns:
        parts.append(turn.role)
        parts += map(tokens.encode, turn.texts)
        parts.append(tokens.END)
    if add_generation_prompt:
        parts.append(tokens.ASSISTANT)
    return b"".join(parts)


def chat_prompt(body: JsonObject) -> bytes:
    """/v1/chat/completions."""
    add_generation_prompt = body.get("add_generation_prompt") is not False
    turns = _turns(_messages(body), _chat_turns)
    return render(turns, body.get("tools"), add_generation_prompt=add_generation_prompt)


def messages_prompt(body: JsonObject) -> bytes:
    """/v1/messages."""
    turns = _turns(_messages(body), _anthropic_turns)
    system = body.get("system")
    if system:
        turns.insert(0, Turn(tokens.SYSTEM, _texts(system)))
    return render(turns, body.get("tools"))


def responses_turns(body: JsonObject) -> list[Turn]:
    """The `input` of /v1/responses; instructions and earlier turns go before it."""
    given = body.get("input")
    if isinstance(given, str):
        return [Turn(tokens.USER, (given,))]
    if not isinstance(given, list):
        raise missing_field("input", body)
    return _turns(given, _responses_turns)


def completion_prompts(body: JsonObject, field: str = "prompt") -> list[bytes]:
    """One prompt, or several: text, texts, token ids, or lists of token ids."""
    given = body.get(field)
    match given:
        case "" | None if field == "prompt":
            wanted = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            raise BadRequestError(wanted, field)
        case str():
            prompts = [tokens.encode(given)]
        case [int(), *_]:
            prompts = [_from_ids(given, field)]
        case []:
            raise BadRequestError(f"You must pass at least one {field}")
        case [_, *_]:
            prompts = [tokens.encode(item) if isinstance(item, str) else _from_ids(item, field) for item in given]
        case None:
            raise missing_field(field, body)
        case _:
            raise wrong_field(field, _WANTED, given)
    if not all(prompts):
        raise BadRequestError("The decoder prompt cannot be empty")
    return prompts


def _from_ids(ids: object, field: str) -> bytes:
    if not isinstance(ids, list):
        raise wrong_field(field, _WANTED, ids)
    try:
        return tokens.from_ids(ids)
    except ValueError as error:
        raise BadRequestError(str(error), field) from error


def _messages(body: JsonObject) -> list[Any]:
    messages = body.get("messages")
    if messages is None:
        raise missing_field("messages", body)
    if not isinstance(messages, list):
        raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
    if not messages:
        raise BadRequestError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return messages


def _turns(items: list[Any], convert: Callable[[JsonObject], Iterable[Turn]]) -> list[Turn]:
    turns: list[Turn] = []
    for item in items:
        if not isinstance(item, dict):
            raise wrong_field("messages", "expected an object for each message", item)
        turns += convert(item)
    return turns


def _chat_turns(message: JsonObject) -> Iterable[Turn]:
    texts = _texts(message.get("content"))
    if message.get("tool_calls"):
        texts += (_json(message["tool_calls"]),)
    yield Turn(_role(message), texts)


def _anthropic_turns(message: JsonObject) -> Iterable[Turn]:
    content = message.get("content")
    if not isinstance(content, list):
        yield Turn(_role(message), _texts(content))
        return
    # Tool results are parts of a user message here, and messages of their own everywhere else.
    rest = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "tool_result":
            yield Turn(tokens.TOOL, _texts(part.get("content")))
        else:
            rest.append(part)
    if rest:
        yield Turn(_role(message), _texts(rest))


def _responses_turns(item: JsonObject) -> Iterable[Turn]:
    match item.get("type", "message"):
        case "message":
            yield Turn(_role(item), _texts(item.get("content")))
        case "function_call_output":
            yield Turn(tokens.TOOL, _texts(item.get("output")))
        case _:
            yield Turn(tokens.ASSISTANT, (_json(item),))


def _role(message: JsonObject) -> bytes:
    role = message.get("role")
    if not isinstance(role, str):
        raise missing_field("role", message)
    return _ROLES.get(role, tokens.USER)


def _texts(content: object) -> tuple[str, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if isinstance(content, list):
        return tuple(map(_part_text, content))
    return (_json(content),)


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("text")
        if isinstance(text, str):
            return text
        if part.get("type") in ("tool_use", "tool_call"):
            return _json(part)
        return f"<{part.get('type')} {xxh3_128_hexdigest(orjson.dumps(part))}>"
    return _json(part)


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
