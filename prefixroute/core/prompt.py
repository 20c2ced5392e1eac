"""What a request asks for, as far as routing cares: `read_prompt` turns a body into a `Prompt`.

- It only looks. The body is never changed and never judged: what cannot be understood gives a `Prompt`
  without a key, which is routed by load, and `no_key` says why. Nothing raises.
- **Four bytes of key are one token.** Text is taken as it is (about four bytes of UTF-8 a token); token ids
  are packed in four bytes each.
- Two keys may match only under the same `scope`: the engine shares no cache across models, adapters or salts.
- Bodies above `MAX_PARSED_BYTES`, or of more than `MAX_PARSED_ITEMS` or `MAX_PARSED_VALUES`, are not parsed; see
  `scan`. So are those treated whose key would be of too many pieces (`content.MAX_PIECES`).
- Reading takes at most two steps of some milliseconds, whatever the body: `read_fields` and what is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, assert_never

import orjson

from prefixroute.core import canonical, scan
from prefixroute.core.content import IntricateError, n_key_tokens

# Parsing and rendering this much takes a few milliseconds, which every other stream has to wait.
MAX_PARSED_BYTES = 1024 * 1024
# Time grows with objects and lists rather than with bytes: a mebibyte of `{},` would take 20 ms to parse and 0.7 s to
# render. So many of each take 3 ms; a conversation of a thousand turns with a hundred tools has a few thousand.
MAX_PARSED_ITEMS = 6_144
# And with numbers, texts and fields: the token ids of a context of 128K take 4 ms, and so do half as many fields. Of a
# longer list of ids the key is its text: it matches what begins alike, but counts half as many tokens again.
MAX_PARSED_VALUES = 131_072
MAX_PARSED_FIELDS = 65_536
# Shorter ones cannot hold so much that parsing takes more than 2 ms.
SIMPLE_BYTES = 64 * 1024
# Where a mark is rarer than this, finding each takes less than counting them all: 0.3 ms for a mebibyte.
_FEW_MARKS = 512
# No model answers at such length; what claims to is no estimate of anything.
MAX_STATED_TOKENS = 1 << 24


class Api(Enum):
    """Which body grammar a route speaks."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    INVOCATIONS = "invocations"  # told apart by the body's shape
    GENERATE = "generate"
    POOLING = "pooling"
    TOKENIZE = "tokenize"
    OTHER = "other"


class NoKeyCause(Enum):
    """Why a prompt has no key. The values are metric labels."""

    ENCODED = "encoded"  # Content-Encoding: never expanded here
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    NO_PROMPT = "no_prompt"  # missing, empty, of another type, or embeddings
    NOT_ROUTED = "not_routed"  # pooling, tokenization, the rest: by load


@dataclass(slots=True)
class Prompt:
    """What routing knows about one request. Read-only: frozen, it would take three times as long to be made.

    Holds references to the body and its parsed messages, no copies of them, and so keeps both alive. Neither
    they nor what is made from them show in `repr`.
    """

    model: str | None
    """As the client names it, an adapter's name included; None if not a string, empty, or not found."""
    scope: bytes = field(repr=False)
    """What must be equal before two keys may match."""
    key: bytes = field(repr=False)
    """The prompt's material in the engine's order, four bytes a token; of a batch, the first prompt's."""
    n_tokens: int
    """Prompt tokens, estimated; of a batch, all of it. Never less than the key stands for."""
    stream: bool = False
    max_tokens: int | None = None
    """The stated bound on the answer, in tokens."""
    no_key: NoKeyCause | None = None
    """None exactly when there is a key."""
    session_id: str | None = None
    prefix_aware_id: str | None = None
    previous_response_id: str | None = None
    is_token_ids: bool = False
    """Whether the key is the engine's own token ids, all of them."""
    cache_salt: str | None = field(default=None, repr=False)
    """vLLM shares no cache between salts."""
    tenant: bytes = field(default=b"", repr=False)
    """Whose it is, where tenants' prompts must not match each other's; a part of `scope`."""
    answered_as: Api | None = None
    """Grammar of the answer, if its words will stand behind this key in the next turn's; None: not surely."""
    body: bytes = field(default=b"", repr=False, compare=False)
    messages: list[Any] | None = field(default=None, repr=False, compare=False)
    """The `messages` array of a chat body that was parsed; odd items included."""

    def forget_body(self) -> None:
        """Nothing is to be decided by it any more: what stays of the text is the key."""
        self.body, self.messages = b"", None

    def prefix_bytes(self, n: int) -> bytes:
        """What SageMaker's `PrefixLength` of `n` looks at; a shorter one whole.

        OpenAI chat: the first `n` characters of the messages' text content, as UTF-8. Anything else, a chat
        body too long to parse, and one without any text: the first `n` bytes of the body. Costs `n`, not the
        length of the conversation.
        """
        left = max(n, 0)
        pieces: list[str] = []
        for text in _texts(self.messages or ()):
            if left <= 0:
                break
            pieces.append(text[:left])
            left -= len(text)
        return "".join(pieces).encode() or self.body[: max(n, 0)]


Fields = tuple[dict[str, Any], NoKeyCause | None, bool]
"""Top-level fields of a body, why they give no key, and whether all of it was parsed."""


def read_fields(body: bytes, *, encoded: bool = False) -> Fields:
    """The first step of `read_prompt`: for who has something else to do between the two."""
    if encoded:
        return {}, NoKeyCause.ENCODED, False
    if not is_parsable(body):
        # Whether the rest of it is JSON is the engine's question.
        if body[: scan.EDGE_BYTES].lstrip()[:1] != b"{":
            return {}, NoKeyCause.NOT_AN_OBJECT, False
        return scan.edge_fields(body), None, False
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}, NoKeyCause.NOT_JSON, True
    return (value, None, True) if isinstance(value, dict) else ({}, NoKeyCause.NOT_AN_OBJECT, True)


def read_prompt(
    api: Api,
    body: bytes,
    *,
    fields_read: Fields | None = None,
    session_id: str | None = None,
    prefix_aware_id: str | None = None,
    encoded: bool = False,
    tenant: bytes = b"",
) -> Prompt:
    """Read `body` as `api` speaks it; never raises, whatever the body.

    `fields_read`: by `read_fields`, where that has been called. `encoded`: the request has a Content-Encoding.
    `session_id` and `prefix_aware_id` come from headers and are handed through. `tenant`: see `Prompt.tenant`; of one
    length, or empty.
    """
    fields, no_key, parsed = fields_read or read_fields(body, encoded=encoded)
    shape = _shape(fields) if api is _INVOCATIONS else api
    key, n_tokens = b"", 0
    if shape is _CHAT and parsed and no_key is None:  # nearly all of them
        try:
            key = canonical.chat_key(fields)
            n_tokens = n_key_tokens(len(key))
        except IntricateError:
            parsed = False
            key, n_tokens = _unparsed_key(body)
        no_key = None if key else NoKeyCause.NO_PROMPT
    elif shape in _BY_LOAD:
        no_key = NoKeyCause.NOT_ROUTED
        if shape is Api.POOLING:  # a prefill like any other, though nobody's prefix
            n_tokens = scan.sampled_tokens(body)
    elif no_key is NoKeyCause.ENCODED:
        n_tokens = n_key_tokens(len(body))  # at least
    elif no_key is None:
        try:
            key, n_tokens = _parsed_key(shape, fields) if parsed else _unparsed_key(body)
        except IntricateError:
            parsed = False
            key, n_tokens = _unparsed_key(body)
        no_key = None if key else NoKeyCause.NO_PROMPT
    model = _text(fields.get("model"))
    if _RARE_FIELDS.isdisjoint(fields):
        previous_response_id = cache_salt = None
        scope = _scope(model, None, None, None)
        max_tokens = _bound(fields["max_tokens"]) if "max_tokens" in fields else None
    else:
        previous_response_id, cache_salt = _text(fields.get("previous_response_id")), _text(fields.get("cache_salt"))
        scope = _scope(model, _adapter(fields), cache_salt, _text(fields.get("extra_key")))
        max_tokens = _max_tokens(fields)
    messages = fields.get("messages") if parsed and api is _CHAT else None
    # By position, in the order of the fields: keywords cost more than what they name.
    return Prompt(
        model,
        scope + tenant if tenant else scope,
        key,
        n_tokens,
        fields.get("stream") is True,
        max_tokens,
        no_key,
        session_id,
        prefix_aware_id,
        previous_response_id,
        parsed and key != b"" and _are_ids(shape, fields),
        cache_salt,
        tenant,
        _answered_as(shape, fields) if key and parsed else None,
        body,
        messages if isinstance(messages, list) else None,
    )


def is_parsable(document: bytes) -> bool:
    """Whether parsing it takes some milliseconds at most. Texts that look like items count as such."""
    n_bytes = len(document)
    return n_bytes <= SIMPLE_BYTES or (n_bytes <= MAX_PARSED_BYTES and not _is_intricate(document))


def _is_intricate(body: bytes) -> bool:
    if _has_more(body, b"{", MAX_PARSED_ITEMS) or _has_more(body, b"[", MAX_PARSED_ITEMS):
        return True
    n_values = _count(body, b",")
    return n_values > MAX_PARSED_VALUES or (n_values > MAX_PARSED_FIELDS and _count(body, b":") > MAX_PARSED_FIELDS)


def _count(body: bytes, mark: bytes) -> int:
    """How many there are, if they are more than a few; else none."""
    return body.count(mark) if _has_more(body, mark, _FEW_MARKS) else 0


def _has_more(body: bytes, mark: bytes, n: int) -> bool:
    # `find` runs at memory speed between hits, ten times as fast as `count`; hits are few, or soon enough.
    at = -1
    for _ in range(n + 1):
        at = body.find(mark, at + 1)
        if at < 0:
            return False
    return True


_BY_LOAD = frozenset({Api.POOLING, Api.TOKENIZE, Api.OTHER})
# Python 3.11 takes as long to find a member of an enum as to call a function.
_CHAT, _COMPLETIONS, _GENERATE, _RESPONSES = Api.CHAT, Api.COMPLETIONS, Api.GENERATE, Api.RESPONSES
_INVOCATIONS = Api.INVOCATIONS


def _shape(fields: dict[str, Any]) -> Api:
    """Which grammar an `/invocations` body follows, tried in vLLM's order; INVOCATIONS if none."""
    if isinstance(fields.get("messages"), list):
        return Api.CHAT
    if "prompt" in fields or "prompt_embeds" in fields:
        return Api.COMPLETIONS
    if "inputs" in fields:  # Text Generation Inference, DJL
        return Api.GENERATE
    if not fields.keys().isdisjoint(("input", "query", "queries", "text_1", "data_1")):
        return Api.POOLING
    return Api.INVOCATIONS


def _parsed_key(shape: Api, fields: dict[str, Any]) -> tuple[bytes, int]:
    match shape:
        case Api.COMPLETIONS:
            return canonical.completions_key(fields)
        case Api.GENERATE:
            return canonical.generate_key(fields)
        case Api.CHAT:
            key = canonical.chat_key(fields)
        case Api.MESSAGES:
            key = canonical.messages_key(fields)
        case Api.RESPONSES:
            key = canonical.responses_key(fields)
        case Api.INVOCATIONS | Api.POOLING | Api.TOKENIZE | Api.OTHER:
            key = b""
        case _:
            assert_never(shape)
    return key, n_key_tokens(len(key))


def _answered_as(shape: Api, fields: dict[str, Any]) -> Api | None:
    """See `Prompt.answered_as`; of fields that gave a key."""
    if shape is _COMPLETIONS or shape is _GENERATE:
        given = next((value for name in canonical.PROMPT_FIELDS if (value := fields.get(name))), None)
        # Behind token ids come token ids, which the answer's text does not tell.
        return shape if isinstance(given[0] if isinstance(given, list) else given, str) else None
    turns = fields.get("input" if shape is _RESPONSES else "messages")
    last = turns[-1] if isinstance(turns, list) else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        return None  # a beginning that the answer goes on with: the next turn has one message of both, or two
    # The next turn will name another response, and early in its key.
    return None if fields.get("previous_response_id") else shape


def _are_ids(shape: Api, fields: dict[str, Any]) -> bool:
    if shape is _GENERATE:
        # vLLM's `/inference/v1/generate`. With media, the ids alone do not say what is cached.
        ids = fields.get("token_ids")
        is_text = not fields.get("features") and not fields.get("image_data")
        return is_text and isinstance(ids, list) and bool(ids) and type(ids[0]) is int
    prompt = fields.get("prompt") if shape is _COMPLETIONS else None
    # A list of texts is a batch; what is cut off is not in the engine's prompt.
    return isinstance(prompt, list) and not isinstance(prompt[0], str) and fields.get("truncate_prompt_tokens") is None


def _unparsed_key(body: bytes) -> tuple[bytes, int]:
    key, stands_for = scan.folded(body, MAX_PARSED_BYTES)
    return key, n_key_tokens(len(key)) + scan.sampled_tokens(body, stands_for)


def _scope(model: str | None, adapter: str | None, cache_salt: str | None, extra_key: str | None) -> bytes:
    # A JSON array: no two lists of names read the same.
    return orjson.dumps((model, adapter, cache_salt, extra_key))


_ADAPTER_FIELDS = ("lora_path", "lora_name", "lora_request")
_LIMIT_FIELDS = ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens")
_NESTED_FIELDS = ("parameters", "sampling_params")
# What needs a closer look, all in one question: most bodies have none of it.
_RARE_FIELDS = frozenset({
    *_ADAPTER_FIELDS,
    *_LIMIT_FIELDS,
    *_NESTED_FIELDS,
    "cache_salt",
    "extra_key",
    "previous_response_id",
}) - {"max_tokens"}  # fmt: skip


def _adapter(fields: dict[str, Any]) -> str | None:
    """Name of a LoRA adapter given apart from the model: SGLang, vLLM's older forms, TGI."""
    for name in _ADAPTER_FIELDS:
        value = fields.get(name)
        if isinstance(value, list) and value:  # one for each prompt of a batch
            value = value[0]
        if isinstance(value, dict):
            value = value.get("lora_name", value.get("name"))
        if value and isinstance(value, str):
            return value
    parameters = fields.get("parameters")
    return _text(parameters.get("adapter_id")) if isinstance(parameters, dict) else None


def _max_tokens(fields: dict[str, Any]) -> int | None:
    for table in (fields, *map(fields.get, _NESTED_FIELDS)):
        if isinstance(table, dict):
            for name in _LIMIT_FIELDS:
                if (bound := _bound(table.get(name))) is not None:
                    return bound
    return None


def _bound(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_STATED_TOKENS else None  # a bool is no number


def _text(value: object) -> str | None:
    return value if value and isinstance(value, str) else None


def _texts(messages: Iterable[Any]) -> Iterator[str]:
    """Text content of chat messages, in order."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            for part in content:
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    yield text
