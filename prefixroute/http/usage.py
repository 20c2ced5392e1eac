"""What an answer tells the router, read from a copy of its bytes: its tokens, and the id of a stored response.

Only the first bytes and the last few pieces are looked at: usage stands at the end of OpenAI's answers and streams and
at the start of Anthropic's streams. llama.cpp tells its timings at the end of every stream. Nothing is decoded, nothing
held back.
"""

from collections import deque
from re import compile as re_compile

# Names of OpenAI's chat, completions and responses; of Anthropic's messages; of Text Generation Inference. In a text
# their quotes would be escaped.
_ANTHROPIC_CACHED = b"cache_read_input_tokens"
_ANTHROPIC_CREATED = b"cache_creation_input_tokens"
_CACHED = (b"cached_tokens", _ANTHROPIC_CACHED)
_PROMPT = (b"prompt_tokens", b"input_tokens")
_COMPLETION = (b"completion_tokens", b"output_tokens", b"generated_tokens")
_NAMES = (*_CACHED, _ANTHROPIC_CREATED, *_PROMPT, *_COMPLETION)
# What all of them end in, and how far in front of it one may begin.
_END_OF_NAMES = b'_tokens"'
_MAX_BEFORE_END = max(map(len, _NAMES))
_TOLD = re_compile(rb'"(%b)(?=")(?:"\s*:\s*(\d{1,12}))?' % b"|".join(_NAMES))
_MAX_COMPLETION_DIGITS = 9

# What llama.cpp tells with the last event of a stream, also where nobody asks for its usage.
_TIMINGS = re_compile(rb'"timings"\s*:\s*\{([^{}]*)\}')
_TIMED = re_compile(rb'"(cache_n|prompt_n|predicted_n)"\s*:\s*(\d{1,9})(?!\d)')

_LF = 0x0A
_RESPONSE_ID = re_compile(rb'"id"\s*:\s*"(resp[^"\\]{1,200})"')

# A usage object is below 1 KiB; it may be split over pieces.
_KEPT_PIECES = 4
_KEPT_BYTES = 4_096


class UsageWatch:
    """Watches one answer go by."""

    __slots__ = ("_first", "_last", "_n_first_left", "_told", "n_events")

    def __init__(self) -> None:
        self.n_events = 0
        """Ends of events seen, if the answer is a stream of them; those that two pieces share do not count."""
        self._first = b""
        self._n_first_left = _KEPT_BYTES
        self._last: deque[bytes] = deque(maxlen=_KEPT_PIECES)
        # By the last pieces; None: not read yet.
        self._told: _Told | None = None

    def see(self, piece: bytes) -> bool:
        """Looks at a piece. Returns whether it belongs to the beginning, where a response's id is."""
        n_bytes = len(piece)
        # Most pieces are one event, of a line or two: then its end is the first empty line, and searching for single
        # bytes is three times as fast as for two.
        at = piece.find(b"\n")
        if 0 <= at < n_bytes - 2:
            at = piece.find(b"\n", at + 1)
        if at == n_bytes - 2 and piece[-1] == _LF:
            self.n_events += 1
        elif at >= 0:
            self.n_events += piece.count(b"\n\n") or piece.count(b"\n\r\n")
        self._told = None
        self._last.append(piece if n_bytes <= _KEPT_BYTES else piece[-_KEPT_BYTES:])
        n_left = self._n_first_left
        if n_left <= 0:
            return False
        self._first += piece if n_bytes <= n_left else piece[:n_left]
        self._n_first_left = n_left - n_bytes
        return True

    def usage(self) -> tuple[int, int] | None:
        """(cached tokens, prompt tokens) as reported; None when the answer does not tell both."""
        usage = _usage(self._told_last())
        # A document in one piece is both.
        if usage is None and self._last and self._first is not self._last[0]:
            usage = _usage(_told(self._first))
        if usage is None and (timed := self._timed()):
            cached, computed = timed.get(b"cache_n"), timed.get(b"prompt_n")
            usage = None if cached is None or computed is None else (cached, cached + computed)
        return usage

    def completion_tokens(self) -> int | None:
        """Tokens of the answer as last reported; None when it does not tell."""
        for name, number in reversed(self._told_last()):
            if name in _COMPLETION:
                return int(number[:_MAX_COMPLETION_DIGITS]) if number else None
        return self._timed().get(b"predicted_n")

    def response_id(self) -> str | None:
        """The id under which the instance stores the response."""
        found = _RESPONSE_ID.search(self._first)
        return found[1].decode("utf-8", "replace") if found else None

    def _timed(self) -> dict[bytes, int]:
        """Tokens from the cache, computed and generated, as llama.cpp counts them; empty where it is not that."""
        last = self._last[-1] if len(self._last) == 1 else b"".join(self._last)
        found = _TIMINGS.findall(last) if b'"timings"' in last else None
        # Of each token, where that is asked for: the last one tells all.
        return {name: int(number) for name, number in _TIMED.findall(found[-1])} if found else {}

    def _told_last(self) -> "_Told":
        told = self._told
        if told is None:
            told = self._told = _told(b"".join(self._last))
        return told


_Told = list[tuple[bytes, bytes]]
"""Names in their order, each with its number; without one, if what follows is none."""


def _told(text: bytes) -> _Told:
    at = text.find(_END_OF_NAMES)
    if at < 0:
        return []
    told: _Told = _TOLD.findall(text, max(0, at - _MAX_BEFORE_END))
    return told


def _usage(told: _Told) -> tuple[int, int] | None:
    cached = prompt = created = b""
    is_anthropic = False
    for name, number in told:
        if not number:
            continue
        if name in _PROMPT:
            prompt = number
        elif name in _CACHED:
            cached = number
            is_anthropic = is_anthropic or name == _ANTHROPIC_CACHED
        elif name == _ANTHROPIC_CREATED:
            created = number
    if not cached or not prompt:
        return None
    if is_anthropic:
        # Anthropic's input_tokens leave out what was cached and what was newly stored.
        return int(cached), int(prompt) + int(cached) + int(created or 0)
    return int(cached), int(prompt)
