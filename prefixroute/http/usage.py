"""What an answer tells the router, read from a copy of its bytes: its tokens, and the id of a stored response.

Only the first bytes and the last few pieces are looked at: usage stands at the end of OpenAI's answers and streams and
at the start of Anthropic's streams. Nothing is decoded, nothing held back.
"""

from collections import deque
from re import Pattern
from re import compile as re_compile

# OpenAI chat, completions and responses; Anthropic messages.
_CACHED = re_compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,12})')
_PROMPT = re_compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})')
_ANTHROPIC_CACHED = re_compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,12})')
_ANTHROPIC_CREATED = re_compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,12})')
# Those of OpenAI's completions; of its responses and Anthropic's; of Text Generation Inference.
_COMPLETION = (b'"completion_tokens"', b'"output_tokens"', b'"generated_tokens"')
_NUMBER = re_compile(rb"\s*:\s*(\d{1,9})")
_RESPONSE_ID = re_compile(rb'"id"\s*:\s*"(resp[^"\\]{1,200})"')

# A usage object is below 1 KiB; it may be split over pieces.
_KEPT_PIECES = 4
_KEPT_BYTES = 4_096


class UsageWatch:
    """Watches one answer go by."""

    __slots__ = ("_first", "_last", "n_events")

    def __init__(self) -> None:
        self.n_events = 0
        """Ends of events seen, if the answer is a stream of them; those that two pieces share do not count."""
        self._first = b""
        self._last: deque[bytes] = deque(maxlen=_KEPT_PIECES)

    def see(self, piece: bytes) -> bool:
        """Looks at a piece. Returns whether it belongs to the beginning, where a response's id is."""
        is_first = len(self._first) < _KEPT_BYTES
        if is_first:
            self._first += piece[: _KEPT_BYTES - len(self._first)]
        self.n_events += piece.count(b"\n\n") or piece.count(b"\n\r\n")
        self._last.append(piece[-_KEPT_BYTES:] if len(piece) > _KEPT_BYTES else piece)
        return is_first

    def usage(self) -> tuple[int, int] | None:
        """(cached tokens, prompt tokens) as reported; None when the answer does not tell both."""
        return _usage(b"".join(self._last)) or _usage(self._first)

    def completion_tokens(self) -> int | None:
        """Tokens of the answer as last reported; None when it does not tell."""
        text = b"".join(self._last)
        at, name = max((text.rfind(name), name) for name in _COMPLETION)
        found = _NUMBER.match(text, at + len(name)) if at >= 0 else None
        return int(found[1]) if found else None

    def response_id(self) -> str | None:
        """The id under which the instance stores the response."""
        found = _RESPONSE_ID.search(self._first)
        return found[1].decode("utf-8", "replace") if found else None


def _usage(text: bytes) -> tuple[int, int] | None:
    cached = _last_number(_CACHED, text)
    prompt = _last_number(_PROMPT, text)
    if cached is None or prompt is None:
        return None
    if _ANTHROPIC_CACHED.search(text):
        # Anthropic's input_tokens leave out what was cached and what was newly stored.
        prompt += cached + (_last_number(_ANTHROPIC_CREATED, text) or 0)
    return cached, prompt


def _last_number(pattern: Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None
