"""Where a body ends: one machine for each framing (RFC 9112, 6.3). Each is fed what comes and gives the payload back.

`feed` returns slices of what it is fed; nothing of the payload is kept. `rest` is what came behind the end.
"""

import re
from typing import Protocol

from prefixroute.http.wire.heads import HEAD_END, AnswerHead, MalformedError, parse_fields

# The beginning of a chunk as nearly all are: no extensions, no padding.
_PLAIN_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
# Digits of a chunk's size or a length: as many as 64 bits need.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_MAX_LENGTH_DIGITS = 19
# Extensions of chunks mean nothing to us, and a line of them is work without payload.
_MAX_LINE_BYTES = 4096
# In one step: every chunk costs 1 µs, and what is read at once may hold 40,000 of a byte each.
_MAX_CHUNKS = 2_048
_MAX_TRAILER_BYTES = 65_536
# A trailer cannot frame, route or authorise: who merges it into the head would be told lies (RFC 9110, 6.5.1).
_NO_TRAILERS = frozenset(
    {
        b"authorization",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-range",
        b"content-type",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"set-cookie",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"www-authenticate",
    }
)
_NO_BODY = (204, 304)
_FRAMINGS = (b"content-length", b"transfer-encoding")


class BodyReader(Protocol):
    """Follows one body."""

    is_done: bool
    unfed: bytes
    """What of the last bytes fed is to be fed again before what comes next: there was too much to do."""
    rest: bytes
    """What came behind the end."""
    trailers: list[tuple[bytes, bytes]]

    @property
    def chunks(self) -> bytes | None:
        """What was fed last, if it can be written as it is where the payload goes on in chunks.

        Whole chunks, the last one among them if the body is done; no extensions, no trailers, nothing behind the end.
        """
        ...

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`, maybe none of it. Raises MalformedError."""
        ...

    def end_of_connection(self) -> bool:
        """Whether the body is complete if nothing comes any more."""
        ...


class CountedBody:
    """As many bytes as were declared; none of them: done at once."""

    __slots__ = ("_left_bytes", "is_done", "rest", "trailers")
    chunks = None
    unfed = b""

    def __init__(self, n_bytes: int) -> None:
        self._left_bytes = n_bytes
        self.is_done = n_bytes == 0
        self.rest = b""
        self.trailers: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> bytes:
        left_bytes = self._left_bytes - len(data)
        if left_bytes < 0:
            data, self.rest = data[:left_bytes], data[left_bytes:]
            left_bytes = 0
        self._left_bytes = left_bytes
        self.is_done = not left_bytes
        return data

    def end_of_connection(self) -> bool:
        return self.is_done


class EndlessBody:
    """Ends with the connection."""

    __slots__ = ("is_done", "rest", "trailers")
    chunks = None
    unfed = b""

    def __init__(self) -> None:
        self.is_done = False
        self.rest = b""
        self.trailers: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> bytes:
        return data

    def end_of_connection(self) -> bool:
        return True


class ChunkedBody:
    """Chunks, and maybe trailers."""

    __slots__ = ("_is_between", "_left_bytes", "_line", "_trailer", "chunks", "is_done", "rest", "trailers", "unfed")

    def __init__(self) -> None:
        self._is_between = True
        """Whether a chunk begins with the next byte."""
        self._left_bytes = 0
        """Of the chunk under way, its CRLF included; 0: a size is next."""
        self._line = b""
        """The beginning of a size's line."""
        self._trailer: bytes | None = None
        """What came behind the last chunk; None: it has not come."""
        self.chunks: bytes | None = None
        self.is_done = False
        self.unfed = b""
        self.rest = b""
        self.trailers: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> bytes:
        # One chunk in one piece, which is what a token at a time looks like.
        if self._is_between and (size := _PLAIN_SIZE.match(data)) is not None:
            start = size.end()
            end = len(data) - 2
            if start < end == start + int(size[1], 16) and data.endswith(b"\r\n"):
                self.chunks = data
                return data[start:end]
        return self._follow(data)

    def _follow(self, data: bytes) -> bytes:
        self.chunks = None
        self.unfed = b""
        if self._trailer is not None:
            self._read_trailer(data)
            return b""
        pieces: list[bytes] = []
        is_plain = self._is_between
        fed = data
        at, end = 0, len(data)
        n_chunks_left = _MAX_CHUNKS
        if self._line:
            data, self._line = self._line + data, b""
            end = len(data)
        while at < end:
            left_bytes = self._left_bytes
            fault = None
            if left_bytes:
                # The last two of them are the CRLF.
                n_payload = min(left_bytes - 2, end - at)
                if n_payload > 0:
                    pieces.append(data[at : at + n_payload])
                    at += n_payload
                    left_bytes -= n_payload
                self._left_bytes = left_bytes
                if left_bytes <= 2 and at < end:
                    n_behind = min(left_bytes, end - at)
                    if data[at : at + n_behind] == b"\r\n"[2 - left_bytes : 2 - left_bytes + n_behind]:
                        at += n_behind
                        self._left_bytes = left_bytes - n_behind
                    else:
                        fault = "a chunk is longer than its size"
            elif not n_chunks_left:
                self.unfed = data[at:]
                is_plain = False
                break
            else:
                n_chunks_left -= 1
                line_end = data.find(b"\r\n", at)
                if (line_end if line_end >= 0 else end) - at > _MAX_LINE_BYTES:
                    fault = "the line of a chunk's size is too long"
                elif line_end < 0:
                    self._line = data[at:]
                    break
                elif (size := _SIZE.fullmatch(data, at, line_end)) is None:
                    fault = "a chunk has no size"
                else:
                    is_plain = is_plain and size.end(1) == line_end
                    at = line_end + 2
                    n_bytes = int(size[1], 16)
                    if not n_bytes:
                        self._trailer = b""
                        try:
                            self._read_trailer(data[at:])
                        except MalformedError:
                            if not pieces:
                                raise
                            self.unfed = data[at:]
                        is_plain = is_plain and self._trailer == b"" and self.is_done and not self.rest
                        break
                    self._left_bytes = n_bytes + 2
            if fault is not None:
                if not pieces:
                    raise MalformedError(fault)
                # What came before it counts. It is met again, by itself.
                self.unfed = data[at:]
                is_plain = False
                break
        self._is_between = not self._left_bytes and not self._line and self._trailer is None
        if is_plain and (self._is_between or self.is_done):
            self.chunks = fed
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_trailer(self, data: bytes) -> None:
        if not self._trailer and data.startswith(b"\r\n"):
            self.is_done, self.rest = True, data[2:]
            return
        trailer = (self._trailer or b"") + data
        end = trailer.find(HEAD_END)
        if trailer.startswith(b"\r\n"):  # its two bytes came one by one
            self.is_done, self.rest = True, trailer[2:]
        elif end >= 0:
            fields = parse_fields(trailer[: end + 4])
            self.trailers = [field for field in fields if field[0].lower() not in _NO_TRAILERS]
            self.is_done, self.rest = True, trailer[end + 4 :]
        elif len(trailer) > _MAX_TRAILER_BYTES:
            raise MalformedError("the trailers are too long")
        self._trailer = trailer

    def end_of_connection(self) -> bool:
        return self.is_done


def answer_body(head: AnswerHead, method: bytes) -> BodyReader:
    """What follows `head`, the answer to a request of `method`. Raises MalformedError: nobody can tell for sure."""
    length = head.index.get(b"content-length")
    coding = head.index.get(b"transfer-encoding")
    if (length is not None and coding is not None) or (head.repeats and _n_framings(head) > 1):
        raise MalformedError("more than one framing")
    if length is not None and not (length.isdigit() and len(length) <= _MAX_LENGTH_DIGITS):
        raise MalformedError("the length is no number")
    if coding is not None and (coding.lower() != b"chunked" or not head.minor):
        raise MalformedError("a coding that was not asked for")
    if head.status in _NO_BODY or method == b"HEAD":
        return CountedBody(0)
    if length is not None:
        return CountedBody(int(length))
    return EndlessBody() if coding is None else ChunkedBody()


def _n_framings(head: AnswerHead) -> int:
    return sum(name.lower() in _FRAMINGS for name, _ in head.headers)
