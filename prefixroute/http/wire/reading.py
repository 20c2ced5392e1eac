"""Answers as they come in: heads cut out of a stream of bytes, within bounds, and what they say of the connection."""

from dataclasses import dataclass

from prefixroute.http.headers import MAX_FULL_HEADERS
from prefixroute.http.wire.heads import HEAD_END, AnswerHead, MalformedError, parse_answer_head

_BEGINNING = b"HTTP/1."
# What is longer is no limit.
_MAX_DIGITS = 9


class HeadReader:
    """Reads the head of one answer. `max_header_bytes`: of each header; a head may have four times that."""

    __slots__ = ("_begun", "_max_header_bytes")

    def __init__(self, max_header_bytes: int) -> None:
        self._max_header_bytes = max_header_bytes
        self._begun = b""

    def feed(self, data: bytes) -> tuple[AnswerHead, bytes] | None:
        """The head that ends in `data`, and what is behind it; None: there is more of it to come.

        Raises MalformedError.
        """
        begun = self._begun
        block = begun + data if begun else data
        # Seen before, but for a part of the end.
        end = block.find(HEAD_END, max(0, len(begun) - len(HEAD_END) + 1))
        n_bytes = len(block) if end < 0 else end + len(HEAD_END)
        if n_bytes > self._max_header_bytes * MAX_FULL_HEADERS:
            raise MalformedError("the head is too long")
        if end < 0:
            if not _BEGINNING.startswith(block[: len(_BEGINNING)]):
                raise MalformedError("no status line of HTTP/1")
            self._begun = block
            return None
        self._begun = b""
        head = parse_answer_head(block[:n_bytes])
        if n_bytes > self._max_header_bytes:
            for name, value in head.headers:
                if len(name) + len(value) > self._max_header_bytes:
                    raise MalformedError("a header is too long")
        return head, block[n_bytes:]


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a server says of its connection. `timeout_s`, `n_left`: None where it does not say."""

    is_kept: bool
    timeout_s: float | None = None
    n_left: int | None = None


KEPT = Keeping(True)
NOT_KEPT = Keeping(False)


def keeping(head: AnswerHead) -> Keeping:
    """Whether the connection is kept after this answer (RFC 9112, 9.3), for how long and for how many more."""
    if b"connection" not in head.index and b"keep-alive" not in head.index:
        return KEPT if head.minor == 1 else NOT_KEPT
    is_kept = head.minor == 1
    timeout_s: float | None = None
    n_left: int | None = None
    for name, value in head.headers:
        key = name.lower()
        if key == b"connection":
            tokens = [token.strip() for token in value.lower().split(b",")]
            if b"close" in tokens:
                return NOT_KEPT
            is_kept = is_kept or b"keep-alive" in tokens
        elif key == b"keep-alive":
            for parameter in value.split(b","):
                what, _, number = parameter.strip().partition(b"=")
                if number.isdigit() and len(number) <= _MAX_DIGITS:
                    if what.lower() == b"timeout":
                        timeout_s = float(number)
                    elif what.lower() == b"max":
                        n_left = int(number)
    return Keeping(is_kept, timeout_s, n_left)
