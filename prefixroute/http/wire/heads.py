"""Heads: from bytes to fields and back, nothing changed on the way.

Strict, because the next reader may read leniently: a line that is no field, a bare LF, a folded line or a NUL makes the
whole head malformed (RFC 9112, 2.2 and 5.2).
"""

import re
from dataclasses import dataclass

from prefixroute.http.headers import HOP_BY_HOP, HOP_BY_HOP_OR_LENGTH, MAX_HEADERS, RawHeaders, rendered

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*))?\r\n")
_USUAL_LINE = b"HTTP/1.1 200 OK\r\n"
# Whole lines, so that there are as many fields as lines, or something is wrong with one. Nothing is tried a second time
# (possessive quantifiers), or a line of blanks would take the square of its length.
_NAME_AND_VALUE = rb"(?m:^)([!#$%&'*+.^_`|~0-9A-Za-z-]++):[ \t]*+([^\x00\r\n]*+)"
_FIELD = re.compile(_NAME_AND_VALUE + rb"(?<![ \t])\r\n")
_BLANK_ENDED_FIELD = re.compile(_NAME_AND_VALUE + rb"\r\n")
HEAD_END = b"\r\n\r\n"

# A Trailer goes to those clients only who get trailers.
_NOT_PLAIN = HOP_BY_HOP | {b"trailer"}
_NAMES_NO_HEADER = (b"close", b"keep-alive")


class MalformedError(ValueError):
    """These bytes are no HTTP that could be passed on. The message quotes none of them."""


@dataclass(slots=True)
class AnswerHead:
    """Of an answer, interim ones included. `minor`: of its version, HTTP/1.`minor`."""

    minor: int
    status: int
    reason: bytes
    headers: RawHeaders
    index: dict[bytes, bytes]
    """The first value of each header, by its name in lower case."""
    lines: bytes
    """The headers as received, each with its CRLF."""

    @property
    def repeats(self) -> bool:
        """Whether a header comes more than once."""
        return len(self.index) != len(self.headers)

    @property
    def relayed(self) -> bytes | None:
        """The lines that go on to the client, as `headers.relayed` chooses them; None: look at each header.

        None where Connection names another header or comes again, and where there is a Trailer.
        """
        index = self.index
        if _NOT_PLAIN.isdisjoint(index):
            return self.lines
        if b"trailer" in index:
            return None
        named = index.get(b"connection")
        if named is not None and (self.repeats or named.lower() not in _NAMES_NO_HEADER):
            return None
        dropped = HOP_BY_HOP_OR_LENGTH if b"transfer-encoding" in index else HOP_BY_HOP
        return rendered([field for field in self.headers if field[0].lower() not in dropped])


def parse_answer_head(block: bytes) -> AnswerHead:
    """`block`: status line and fields up to and with the empty line. Raises MalformedError."""
    if block.startswith(_USUAL_LINE):
        minor, status, reason, start = 1, 200, b"OK", len(_USUAL_LINE)
    elif (line := _STATUS_LINE.match(block)) is not None:
        minor, status, reason, start = int(line[1]), int(line[2]), line[3] or b"", line.end()
    else:
        raise MalformedError("no status line of HTTP/1")
    fields = parse_fields(block, start)
    index: dict[bytes, bytes] = {}
    for name, value in fields:
        index.setdefault(name.lower(), value)
    return AnswerHead(minor, status, reason, fields, index, block[start:-2])


def parse_fields(block: bytes, start: int = 0) -> list[tuple[bytes, bytes]]:
    """The fields of `block` from `start`, where a line begins, up to and with the empty line. Raises MalformedError."""
    fields: list[tuple[bytes, bytes]] = _FIELD.findall(block, start)
    n_lines = block.count(b"\n", start) - 1  # the last one is the empty line
    if len(fields) != n_lines:
        fields = [(name, value.rstrip(b" \t")) for name, value in _BLANK_ENDED_FIELD.findall(block, start)]
        if len(fields) != n_lines:
            raise MalformedError("a line of the head is no field")
    if n_lines > MAX_HEADERS:
        raise MalformedError(f"more than {MAX_HEADERS} fields")
    return fields
