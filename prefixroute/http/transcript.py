"""A copy of an answer's bytes as they go by, and what in the end was said: key material of the next turn.

Pieces are only kept, until there are enough of them to be read together: so a long stream is no long stop at its end,
and little memory until then.
"""

from typing import Self

from prefixroute.core.answer_reader import AnswerReader
from prefixroute.core.answers import reader_of
from prefixroute.core.prompt import Prompt
from prefixroute.http.events import FloodError, events_of
from prefixroute.http.headers import RawHeaders, first

# Some 130 events of a token each, a tenth of a millisecond; every stream under way keeps half of it on average.
_READ_BYTES = 32_768
# What is read at once, a document or an event, is no longer: 60,000 tokens as a document. What is longer is given up.
_MAX_READ_BYTES = 262_144
# So are streams longer than this, 60,000 tokens: as many strings take 4 MB.
_MAX_STREAM_BYTES = 16_777_216


class Transcript:
    """Watches one answer go by. `see` each piece; `material` at the end."""

    __slots__ = ("_is_stream", "_look_above", "_n_bytes", "_n_read", "_pieces", "_prompt_key", "_reader")

    def __init__(self, reader: AnswerReader, prompt: Prompt, headers: RawHeaders) -> None:
        """`headers`: of the answer, which is not encoded."""
        self._reader: AnswerReader | None = reader
        self._prompt_key = prompt.key
        self._is_stream = (first(headers, b"content-type") or b"").lstrip().lower().startswith(b"text/event-stream")
        self._pieces: list[bytes] = []
        self._n_bytes = 0
        self._n_read = 0
        self._look_above = _READ_BYTES

    @classmethod
    def of(cls, prompt: Prompt, headers: RawHeaders) -> Self | None:
        """None: nothing of the answer will be in the next turn's key, so there is nothing to be watched."""
        reader = None if prompt.answered_as is None else reader_of(prompt.answered_as)
        return None if reader is None else cls(reader, prompt, headers)

    def see(self, piece: bytes) -> None:
        """A further piece of the body. Never raises."""
        self._n_bytes += len(piece)
        self._pieces.append(piece)
        if self._n_bytes > self._look_above:
            self._look()

    def material(self) -> bytes | None:
        """What follows the prompt's key in the next turn's; None when that cannot be told. Only of a whole answer."""
        reader = self._reader
        if reader is None:
            return None
        body = b"".join(self._pieces)
        if self._is_stream:
            # Clients take an event that lacks its last line end.
            self._read(reader, body + b"\n\n")
        else:
            reader.document(body)
        return None if self._reader is None else reader.material(self._prompt_key)

    def _look(self) -> None:
        """Reads what is complete, or gives up."""
        reader = self._reader
        if reader is None or self._n_bytes > _MAX_READ_BYTES or self._n_read > _MAX_STREAM_BYTES:
            self._reader = None
            self._pieces.clear()
            self._n_bytes = 0
        elif self._is_stream:
            data = b"".join(self._pieces)
            rest = self._read(reader, data) if reader.needs(data) else data[data.rfind(b"\n") + 1 :]
            self._pieces = [rest]
            self._n_read += self._n_bytes - len(rest)
            self._n_bytes = len(rest)
            # A long event in small pieces is not looked through again at each of them.
            self._look_above = min(_MAX_READ_BYTES, max(_READ_BYTES, 2 * len(rest)))

    def _read(self, reader: AnswerReader, data: bytes) -> bytes:
        """Reads the events in `data`, or gives up. Returns what is behind them."""
        try:
            found, rest = events_of(data, by_deltas=reader.by_deltas)
        except FloodError:
            self._reader = None
            return b""
        reader.events(found)
        return rest
