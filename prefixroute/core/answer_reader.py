"""How an answer is read, whatever its dialect: events or a document in, key material out, and nothing ever raises."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from orjson import loads

from prefixroute.core.prompt import is_parsable

# What reading JSON of an unknown form raises: not JSON; no such field or place; no object, list or text there.
_ODD = (ValueError, LookupError, TypeError, AttributeError)

DONE = b"[DONE]"
"""The last event of OpenAI's streams, which is no JSON."""


class AnswerReader(ABC):
    """Reads one answer: events as they come, or `document` once. Then `material`."""

    by_deltas = True
    """Whether texts of events are to be appended to each other."""

    def __init__(self) -> None:
        self.is_odd = False
        self.is_whole = False

    def needs(self, data: bytes) -> bool:
        """Whether there may be something to be read in this part of a stream."""
        return True

    def events(self, payloads: Iterable[bytes]) -> None:
        """Data of further events of a stream, in order."""
        try:
            for payload in payloads:
                if payload != DONE:
                    self._event(_parsed(payload))
        except _ODD:
            self.is_odd = True

    def document(self, data: bytes) -> None:
        """An answer that is no stream."""
        try:
            self._document(_parsed(data))
            self.is_whole = True
        except _ODD:
            self.is_odd = True

    def material(self, prompt_key: bytes) -> bytes | None:
        """Key material that follows the prompt's; None when the next turn will not have it there."""
        if self.is_odd or not self.is_whole:
            return None
        try:
            return self._material(prompt_key)
        except _ODD:
            return None

    @abstractmethod
    def _event(self, event: Any) -> None: ...

    @abstractmethod
    def _document(self, document: Any) -> None: ...

    @abstractmethod
    def _material(self, prompt_key: bytes) -> bytes | None: ...


def _parsed(data: bytes) -> Any:
    """Raises ValueError for what is no JSON, and for what would take too long to read."""
    if not is_parsable(data):
        raise ValueError
    return loads(data)


def first_choice(document: Any) -> list[Any]:
    """The first choice, if the document has something of it. Raises for what is no such document, and for an error."""
    return [choice for choice in document["choices"] if not choice.get("index")]
