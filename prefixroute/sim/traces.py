"""Request traces in Mooncake's format: one JSON object a line.

`timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`: one id for each 512 tokens of the
prompt, the last of which may be shorter. Equal ids mean equal prefixes up to there.
Where to get them: the repository kvcache-ai/Mooncake, folder FAST25-release/traces (Apache-2.0).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import orjson

from prefixroute.errors import ConfigError

BLOCK_TOKENS = 512
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
    """`arrival_s`: seconds after the trace's beginning. `hash_ids`: one for each `BLOCK_TOKENS` begun."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests (None: all), in order of arrival. Raises TraceError."""
    try:
        with path.open("rb") as file:
            return parse_trace(file, str(path), limit)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def parse_trace(lines: Iterable[bytes], name: str, limit: int | None = None) -> list[TraceRequest]:
    """As `read_trace`. Empty lines do not count; what comes after the limit is not looked at.

    Requests with the same time are spread evenly until the next one, at most over `TICK_S`.
    """
    rows: list[TraceRequest] = []
    last_s = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _parse_row(line, last_s)
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
    return _spread(rows)[:limit]


def _parse_row(line: bytes, last_s: float) -> TraceRequest:
    """Raises ValueError or TypeError with what is wrong. `last_s`: arrival of the one before."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TypeError("not an object")
    for field in _FIELDS:
        if field not in row:
            raise ValueError(f"{field} is missing")
    timestamp = row["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or timestamp < 0:
        raise ValueError("timestamp must be a number of milliseconds, 0 or more")
    if timestamp / 1000 < last_s:
        raise ValueError("timestamp is earlier than the one before")
    input_tokens = _count(row, "input_length")
    output_tokens = _count(row, "output_length")
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= MAX_ID for i in ids):
        raise ValueError("hash_ids must be a list of integers, 0 or more")
    n_blocks = -(-input_tokens // BLOCK_TOKENS)
    if len(ids) != n_blocks:
        raise ValueError(f"hash_ids has {len(ids)} ids, but {input_tokens} tokens are {n_blocks} blocks")
    return TraceRequest(timestamp / 1000, input_tokens, output_tokens, tuple(ids))


def _count(row: dict[str, object], field: str) -> int:
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
            arrival_s = begin_s + (end_s - begin_s) * place / len(tick)
            spread.append(TraceRequest(arrival_s, row.input_tokens, row.output_tokens, row.hash_ids))
    return spread
