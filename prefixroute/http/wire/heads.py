"""Heads of answers: from bytes to fields and back, nothing changed on the way.

Strict, because the next reader may read leniently: a line that is no field, a bare LF, a folded line or a NUL makes the
whole head malformed (RFC 9112, 2.2 and 5.2).
"""

import re
from dataclasses import dataclass

from prefixroute.http.headers import MAX_HEADERS, RawHeaders

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*))?\r\n")
_FIELDS = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00\r\n]*\r\n)*\r\n")
_FIELD = re.compile(rb"([^:\r\n]+):[ \t]*([^\r\n]*)\r\n")
HEAD_END = b"\r\n\r\n"


class MalformedError(ValueError):
    """These bytes are no HTTP that could be passed on. The message quotes none of them."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Of an answer, interim ones included. `minor`: of its version, HTTP/1.`minor`."""

    minor: int
    status: int
    reason: bytes
    headers: RawHeaders


def parse_answer_head(block: bytes) -> AnswerHead:
    """`block`: status line and fields up to and with the empty line. Raises MalformedError."""
    line = _STATUS_LINE.match(block)
    if line is None:
        raise MalformedError("no status line of HTTP/1")
    return AnswerHead(
        block[7] - 48,  # its digit
        int(line[2]),
        line[3] or b"",
        parse_fields(block, line.end()),
    )


def parse_fields(block: bytes, start: int = 0) -> list[tuple[bytes, bytes]]:
    """The fields of `block` from `start` up to and with the empty line. Raises MalformedError."""
    if _FIELDS.fullmatch(block, start) is None:
        raise MalformedError("a line of the head is no field")
    fields: list[tuple[bytes, bytes]] = _FIELD.findall(block, start)
    if len(fields) > MAX_HEADERS:
        raise MalformedError(f"more than {MAX_HEADERS} fields")
    if b" \r\n" in block or b"\t\r\n" in block:
        fields = [(name, value.rstrip(b" \t")) for name, value in fields]
    return fields


def request_head(method: bytes, target: bytes, host: bytes, headers: RawHeaders) -> bytes:
    """A request's head, fields in their order behind Host."""
    lines = [b"%s %s HTTP/1.1\r\nHost: %s\r\n" % (method, target, host)]
    lines += [b"%s: %s\r\n" % header for header in headers]
    lines.append(b"\r\n")
    return b"".join(lines)
