"""Request traces: Mooncake's, and recordings made by `prefixroute serve`. One JSON object a line.

Both have `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, equal where prompts are equal
from their beginnings on.

- **Mooncake's**: an id for each 512 tokens of the prompt, the last of which may be shorter. Times come in ticks.
  Where to get them: the repository kvcache-ai/Mooncake, folder FAST25-release/traces (Apache-2.0).
- **Recordings** begin with a header line; `recording.form` has their rules. Ids are for full blocks only. Files whose
  header is equal are one trace, however many runs wrote them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from prefixroute.errors import ConfigError
from prefixroute.recording.form import Header

MOONCAKE_BLOCK_TOKENS = 512
MAX_ID = 2**64 - 1
# Longer than any context window; a number above it is no length.
MAX_TOKENS = 2**27
# The public traces give times in steps of this, so that a dozen requests seem to come at once.
TICK_S = 3.0

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(ConfigError):
    """A trace cannot be read. The message names file, line and what is wrong."""

    code = "invalid_trace"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`arrival_s`: seconds after the trace's beginning. `hash_ids`: as the trace has them.

    Tokens beyond the ids' blocks are shared with nobody, as far as the trace knows.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """`requests` in order of arrival. `notes`: what was left out and why, a sentence each, for people."""

    requests: Sequence[TraceRequest]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    notes: tuple[str, ...] = ()


def read_trace(paths: Path | Sequence[Path], limit: int | None = None) -> Trace:
    """The first `limit` requests (None: all) of one file or several that belong together. Raises TraceError.

    Beside a recording's current file its rotated ones (`NAME.1`, `NAME.2`, …) are read too. Of Mooncake's traces only
    one can be read at a time: two of them share no ids and no clock.
    """
    given = [paths] if isinstance(paths, Path) else list(paths)
    try:
        files = _all_files(given)
        if any(header is not None for _, header in files):
            return _read_recording(files, limit)
        if len(files) > 1:
            raise _cannot_join(files[1][0])
        path = files[0][0]
        with path.open("rb") as file:
            return parse_trace(file, str(path), limit)
    except OSError as error:
        raise TraceError(f"{error.filename or given[0]}: {error.strerror}") from error


def parse_trace(lines: Iterable[bytes], name: str, limit: int | None = None) -> Trace:
    """A trace in Mooncake's format. Empty lines do not count; what comes after the limit is not looked at.

    Requests with the same time are spread evenly until the next one, at most over `TICK_S`.
    """
    rows: list[TraceRequest] = []
    last_s = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _parse_row(_parse_object(line), earliest_s=last_s)
        except (ValueError, TypeError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from None
        # The tick of the last one wanted is read to its end: its requests share it.
        if limit is not None and len(rows) >= limit and row.arrival_s > last_s:
            rows.append(row)
            break
        last_s = row.arrival_s
        rows.append(row)
    if not rows:
        raise TraceError(f"{name}: there are no requests in it")
    return Trace(_spread(rows)[:limit])


# ---------------------------------------------------------------------- recordings


def _all_files(paths: Sequence[Path]) -> list[tuple[Path, Header | None]]:
    """The files, with the rotated ones of each recording, each once; and their headers, None for Mooncake's."""
    files: dict[Path, tuple[Path, Header | None]] = {}
    for path in paths:
        header = _read_header(path)
        files.setdefault(path.resolve(), (path, header))
        number = 1
        while header is not None and (older := path.with_name(f"{path.name}.{number}")).is_file():
            # One of another key or another block size is another recording, which only had the same name.
            if (its_header := _read_header(older)) == header:
                files.setdefault(older.resolve(), (older, its_header))
            number += 1
    return list(files.values())


def _read_header(path: Path) -> Header | None:
    """Raises TraceError for one that is not understood."""
    with path.open("rb") as file:
        line = next(filter(bytes.strip, file), b"")
    try:
        row = _parse_object(line)
        return Header.parse(row) if "format" in row else None
    except TypeError:  # no object: whoever reads on will say so
        return None
    except ValueError as error:
        if str(error).startswith("not JSON"):
            return None
        raise TraceError(f"{path}, line 1: {error}") from None


def _read_recording(files: Sequence[tuple[Path, Header | None]], limit: int | None) -> Trace:
    first_path, expected = files[0]
    if expected is None:
        raise _cannot_join(first_path)
    rows: list[TraceRequest] = []
    notes: list[str] = []
    n_unanswered = 0
    for path, header in files:
        if header is None:
            raise _cannot_join(path)
        try:
            _check_same(header, expected)
        except ValueError as error:
            raise TraceError(f"{path}: beside {first_path}: {error}") from None
        with path.open("rb") as file:
            of_file, unanswered, note = _parse_recording(file, str(path), header)
        rows += of_file
        n_unanswered += unanswered
        notes += note
    if n_unanswered:
        notes.append(f"{n_unanswered} requests were not answered and are left out: the lengths of answers are unknown")
    if not rows:
        raise TraceError(f"{first_path}: there are no answered requests in it")
    rows.sort(key=lambda row: row.arrival_s)
    begin_s = rows[0].arrival_s
    requests = [replace(row, arrival_s=row.arrival_s - begin_s) for row in rows[:limit]]
    return Trace(requests, expected.block_tokens, tuple(notes))


def _parse_recording(lines: Iterable[bytes], name: str, header: Header) -> tuple[list[TraceRequest], int, list[str]]:
    """Requests in the file's order with times as recorded, how many were never answered, and notes."""
    rows: list[TraceRequest] = []
    n_unanswered = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _parse_object(line)
        except (ValueError, TypeError) as error:
            # A writer that died, or one that is just writing. Only the last line of a file has no end.
            if not line.endswith(b"\n"):
                return rows, n_unanswered, [f"{name}, line {number}: cut short, left out"]
            raise TraceError(f"{name}, line {number}: {error}") from None
        try:
            if "format" in row:
                # Files that were put together begin again with a header.
                _check_same(Header.parse(row), header)
            elif row.get("output_length") == 0:
                n_unanswered += 1
            else:
                rows.append(_parse_row(row, block_tokens=header.block_tokens, only_full=True))
        except (ValueError, TypeError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from None
    return rows, n_unanswered, []


def _cannot_join(path: Path) -> TraceError:
    return TraceError(f"{path}: has no header of a recording, and other traces cannot be joined")


def _check_same(header: Header, expected: Header) -> None:
    """Raises ValueError if ids under the one mean something else under the other."""
    if header != expected:
        what = "key" if header.key_id != expected.key_id else "block_tokens"
        raise ValueError(f"was recorded with another {what}, so that ids do not compare")


# ---------------------------------------------------------------------- lines


def _parse_object(line: bytes) -> dict[str, Any]:
    """Raises ValueError or TypeError with what is wrong."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TypeError("not an object")
    return row


def _parse_row(
    row: dict[str, Any],
    *,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    only_full: bool = False,
    earliest_s: float = 0.0,
) -> TraceRequest:
    """Raises ValueError with what is wrong. `only_full`: blocks that are only begun have no id."""
    for field in _FIELDS:
        if field not in row:
            raise ValueError(f"{field} is missing")
    timestamp = row["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or timestamp < 0:
        raise ValueError("timestamp must be a number of milliseconds, 0 or more")
    if timestamp / 1000 < earliest_s:
        raise ValueError("timestamp is earlier than the one before")
    input_tokens = _count(row, "input_length")
    output_tokens = _count(row, "output_length")
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= MAX_ID for i in ids):
        raise ValueError("hash_ids must be a list of integers, 0 or more")
    n_blocks = input_tokens // block_tokens if only_full else -(-input_tokens // block_tokens)
    if len(ids) > n_blocks or (len(ids) < n_blocks and not only_full):
        kind = "full blocks" if only_full else "blocks"
        raise ValueError(f"hash_ids has {len(ids)} ids, but {input_tokens} tokens are {n_blocks} {kind}")
    return TraceRequest(timestamp / 1000, input_tokens, output_tokens, tuple(ids))


def _count(row: dict[str, Any], field: str) -> int:
    value = row[field]
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{field} must be an integer from 1 to {MAX_TOKENS}")
    return value


def _spread(rows: Sequence[TraceRequest]) -> list[TraceRequest]:
    ticks = [list(tick) for _, tick in groupby(rows, key=lambda row: row.arrival_s)]
    spread: list[TraceRequest] = []
    for number, tick in enumerate(ticks):
        begin_s = tick[0].arrival_s
        end_s = begin_s + TICK_S
        if number + 1 < len(ticks):
            end_s = min(end_s, ticks[number + 1][0].arrival_s)
        for place, row in enumerate(tick):
            spread.append(replace(row, arrival_s=begin_s + (end_s - begin_s) * place / len(tick)))
    return spread
