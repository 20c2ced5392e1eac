"""Content of a message as key text: strings, parts and blocks of all dialects, media, calls.

Media stand in the key as their digest, repeated for their size up to a bound: megabytes are hashed, never
kept. What is odd is rendered as JSON or left out. Nothing raises but for there being too much of it all.
"""

from __future__ import annotations

from typing import Any

import orjson
import xxhash

# An image costs a model hundreds of tokens, about a thousand at most: 1,024 tokens of four bytes.
MAX_MEDIA_KEY_BYTES = 4096
# Half a 128-bit digest in hexadecimal: even the shortest reference keeps 64 bits of it.
MIN_MEDIA_KEY_BYTES = 16
# A tool result may hold blocks, and those in turn; no real client goes deeper than two.
MAX_BLOCK_DEPTH = 4

# What marks the boundaries in a key.
MESSAGE = "\x1e"  # a message begins; its role follows
NAME = "\x18"  # name of the author, or id of the call a tool answers
TEXT = "\x1f"  # a head ends, content begins
PART = "\x1d"  # a further part of the same content
REASONING = "\x1b"  # what the assistant thought
FIELD = "\x19"  # name of a body field that templates read, such as tools
_MEDIA = "\x1c"  # digest of a part that is not text
_CALL = "\x1a"  # name of a tool that the assistant calls

# Where a media part keeps its bytes or its address, in all dialects.
_MEDIA_FIELDS = ("url", "data", "image_url", "file_data", "file_url", "video_url", "audio_url", "file_id")


# A key is made in one step of the event loop, which all others wait for: 30 µs a hundred of these pieces of it at most.
# A thousand turns with a call of a tool and its result in each have 8,000.
MAX_PIECES = 32_768
# What is rendered as JSON or digested takes ten times as long as a text: 2 ms for all of these.
MAX_ODD_PIECES = 1_024


class IntricateError(ValueError):
    """The key would be of too many pieces."""


class KeyText(list[str]):
    """The pieces of a key, as it is being made. Bounded by number, so that making one is a matter of milliseconds."""

    n_odd_left = MAX_ODD_PIECES

    def check_room(self, n: int) -> None:
        """To be called before a list of `n` is gone through. Raises IntricateError."""
        if len(self) + n > MAX_PIECES:
            raise IntricateError

    def count_odd(self) -> None:
        """To be called for each medium, and for what nobody knows. Raises IntricateError."""
        self.n_odd_left -= 1
        if self.n_odd_left < 0:
            raise IntricateError


def n_key_tokens(n_bytes: int) -> int:
    """Tokens that `n_bytes` of key stand for: four bytes each, rounded up."""
    return (n_bytes + 3) // 4


def media_fill(data: bytes, n_bytes: int | None = None) -> str:
    """ASCII that stands for `data` in a key: its digest, repeated to fill the bounded size of `data`."""
    size = len(data) if n_bytes is None else n_bytes
    size = max(MIN_MEDIA_KEY_BYTES, min(size, MAX_MEDIA_KEY_BYTES))
    digest = xxhash.xxh3_128_hexdigest(data)
    return (digest * (size // len(digest) + 1))[:size]


def append_call(out: KeyText, name: object, arguments: object) -> None:
    """A tool call: arguments as the JSON text that the client sends, or the object that it means."""
    out += (_CALL, str_or_empty(name), TEXT, arguments if isinstance(arguments, str) else to_json(arguments))


def append_content(out: KeyText, content: object, depth: int = 0) -> None:
    """A content string, or a list of parts or blocks of any dialect; `depth`: tool results around it."""
    if isinstance(content, str):
        out.append(content)
    elif isinstance(content, list):
        out.check_room(len(content))
        for i, part in enumerate(content):
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                if i:
                    out.append(PART)
                out.append(text)
            elif isinstance(part, dict):
                _part(out, part, depth)
            else:
                out.count_odd()
                out += (PART, to_json(part))
    elif content is not None:
        out.count_odd()
        out += (PART, to_json(content))


def _part(out: KeyText, part: dict[str, Any], depth: int) -> None:
    """A part that is not plain text."""
    kind = part.get("type")
    if kind == "tool_use":
        append_call(out, part.get("name"), part.get("input"))
    elif kind == "tool_result" and depth < MAX_BLOCK_DEPTH:
        out += (MESSAGE, "tool", NAME, str_or_empty(part.get("tool_use_id")), TEXT)
        append_content(out, part.get("content"), depth + 1)
    elif kind == "thinking":
        out += (REASONING, str_or_empty(part.get("thinking")))
    elif kind == "refusal":
        out += (PART, str_or_empty(part.get("refusal")))
    else:
        append_media(out, part, kind if isinstance(kind, str) else None)


def append_media(out: KeyText, part: dict[str, Any], kind: str | None) -> None:
    """Image, audio, video, file, or a part of a kind unknown here; `kind` names the field of its payload."""
    out.count_odd()
    payload = part.get(kind) if kind is not None else None
    if payload is None:
        payload = part.get("source")
    if isinstance(payload, dict):
        if payload.get("type") == "text" and isinstance(payload.get("data"), str):
            out += (PART, payload["data"])  # a text document
            return
    elif not isinstance(payload, str):
        payload = part
    uuid = part.get("uuid")
    if uuid and isinstance(uuid, str):
        # vLLM knows the item by this name, and lets the bytes be left out once it has seen them: the
        # size cannot count then.
        out += (_MEDIA, media_fill(uuid.encode(), MAX_MEDIA_KEY_BYTES))
        return
    data = payload if isinstance(payload, str) else None
    if isinstance(payload, dict):
        data = next((v for name in _MEDIA_FIELDS if isinstance(v := payload.get(name), str)), None)
    if data is None:
        data = to_json({name: value for name, value in part.items() if name != "cache_control"})
    out += (_MEDIA, media_fill(data.encode()))


def to_json(value: object) -> str:
    """`value` as compact JSON, keys in the client's order: the engine renders them so."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        # orjson reads 1,024 levels but writes 254. Nobody's prompt: let all such look alike.
        return "?"


def str_or_empty(value: object) -> str:
    """`value` if it is a string."""
    return value if isinstance(value, str) else ""
