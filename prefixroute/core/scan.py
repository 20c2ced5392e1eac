"""Bodies too long to parse on the event loop: what a bounded look finds.

Such a body is nearly always media (a mebibyte of text is more than most models' context). Two rules:

- **A field counts only at the top level.** The fields in front of the prompt and those behind it are cut
  out and parsed as an object of their own, which works exactly when the cut is at depth one: a bracket too
  many or too few is no JSON. A field that is missed leaves `None`; one from inside a message would send the
  request to the wrong model.
- **The key is the body itself**, its beginning, with long base64 strings folded to a digest: one client
  serialises one conversation the same way every time. Without folding, one photograph would pass for a
  million tokens of prefill, and hide the turns behind it.
"""

from __future__ import annotations

import re
import string
from typing import Any

import orjson

from prefixroute.core.content import MAX_MEDIA_KEY_BYTES, media_fill, n_key_tokens

# How much of either end is searched for fields: room for tools that stand between them and the prompt.
EDGE_BYTES = 64 * 1024
# Each costs one parse of at most EDGE_BYTES, some 50 µs; of many items, a millisecond, and then there is but one.
MAX_CUTS = 8
_MANY_ITEMS = 4_096

# A run of base64 at least PROBE_STRIDE_BYTES + PROBE_BYTES long holds a whole probe, wherever it begins.
PROBE_STRIDE_BYTES = 2048
PROBE_BYTES = 256
# 256 random base64 digits show 62 of 64 letters; hexadecimal shows 16, and "aaaa" one.
_MIN_DISTINCT = 24
_FEW_BYTES = 64
# The backslash: some serialisers escape the slash.
_BASE64 = (string.ascii_letters + string.digits + "+/-_=\\").encode()
# Of a long medium, this much of either end is hashed: ten megabytes are not walked on the event loop.
_HASHED_END_BYTES = 8 * 1024
# A key stands for no more of a body than this. To find where a medium ends takes 1 ms for ten megabytes.
MAX_WALKED_BYTES = 16 * 1024 * 1024
# However long the rest of a body is, look at this many places of it.
_MAX_SAMPLES = 512

_PROMPT_NAMES = (
    *("messages", "prompt", "input", "inputs", "input_ids", "token_ids", "text", "system", "instructions", "tools"),
)
_SMALL_NAMES = (
    *("model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "cache_salt"),
    *("extra_key", "lora_path", "lora_name", "lora_request", "previous_response_id", "parameters", "sampling_params"),
)


def _begin_of(names: tuple[str, ...], *, escaped: bool) -> re.Pattern[bytes]:
    """Where one of these fields begins. `escaped`: its name may be spelt with escapes, which the engine reads alike.

    No match inside a string: there, both quotes are escaped.
    """
    spelt = "|".join(
        "".join(rf"(?:{char}|\\u00(?i:{ord(char):02x}))" for char in name) if escaped else name for name in names
    )
    return re.compile(rf'"(?:{spelt})"\s*:'.encode())


_PROMPT_FIELD = _begin_of(_PROMPT_NAMES, escaped=False)
_SMALL_FIELD = _begin_of(_SMALL_NAMES, escaped=False)
# Up to three times the work, so it is only for where escapes of ASCII are.
_ESCAPED_SMALL_FIELD = _begin_of(_SMALL_NAMES, escaped=True)
_ESCAPED = re.compile(rb"\\u00[2-7]")


def edge_fields(body: bytes) -> dict[str, Any]:
    """Top-level fields of a JSON object found in its first and last `EDGE_BYTES`; the last wins."""
    return _leading_fields(body[:EDGE_BYTES]) | _trailing_fields(body[-EDGE_BYTES:])


def _leading_fields(head: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _, match in zip(range(_n_cuts(head)), _PROMPT_FIELD.finditer(head), strict=False):
        fields = _object(head[: match.start()].rstrip().removesuffix(b",") + b"}")
        if fields is not None:
            found = fields  # a later cut holds all of an earlier one
    return found


def _trailing_fields(tail: bytes) -> dict[str, Any]:
    begin = _ESCAPED_SMALL_FIELD if _ESCAPED.search(tail) else _SMALL_FIELD
    for _, match in zip(range(_n_cuts(tail)), begin.finditer(tail), strict=False):
        fields = _object(b"{" + tail[match.start() :])
        if fields is not None:
            return fields
    return {}


def _n_cuts(edge: bytes) -> int:
    n_items = edge.count(b",") + edge.count(b"{") + edge.count(b"[")
    return MAX_CUTS if n_items <= _MANY_ITEMS else 1


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def folded(body: bytes, limit_bytes: int) -> tuple[bytes, int]:
    """The beginning of `body` as a key of at most `limit_bytes`, and how many bytes of `body` it stands for.

    Each JSON string with a long run of base64 is replaced by its digest, at most `MAX_MEDIA_KEY_BYTES` of it.
    Looks at one place in `PROBE_STRIDE_BYTES`; the same beginning folds the same way whatever follows. Of a body longer
    than `MAX_WALKED_BYTES` that is its beginning: two that part behind it have the same key.
    """
    end_of_walk = min(len(body), MAX_WALKED_BYTES)
    out: list[bytes] = []
    n_out = kept_to = at = 0
    while at + PROBE_BYTES <= end_of_walk and n_out + at - kept_to < limit_bytes:
        if _is_base64(body[at : at + PROBE_BYTES]):
            start = body.rfind(b'"', kept_to, at) + 1 or kept_to
            end = body.find(b'"', at, end_of_walk)
            if end < 0:
                end = end_of_walk
            if end - start > MAX_MEDIA_KEY_BYTES:
                out += (body[kept_to:start], _digest(body, start, end))
                n_out += start - kept_to + MAX_MEDIA_KEY_BYTES
                kept_to = end
            at = max(end, at + PROBE_STRIDE_BYTES)
        else:
            at += PROBE_STRIDE_BYTES
    stands_for = min(end_of_walk, kept_to + max(limit_bytes - n_out, 0))
    out.append(body[kept_to:stands_for])
    return b"".join(out)[:limit_bytes], stands_for


def _digest(body: bytes, start: int, end: int) -> bytes:
    if end - start <= 2 * _HASHED_END_BYTES:
        data = body[start:end]
    else:  # encoded media that differ do so nearly everywhere, and in length
        first, last = body[start : start + _HASHED_END_BYTES], body[end - _HASHED_END_BYTES : end]
        data = b"%b%b%d" % (first, last, end - start)
    return media_fill(data, MAX_MEDIA_KEY_BYTES).encode()


def sampled_tokens(body: bytes, start: int = 0) -> int:
    """About how many prompt tokens `body[start:]` is: four bytes each where it is text, and for each run of
    base64 at most what one medium counts. Cost does not grow with the body."""
    n_bytes = len(body) - start
    stride = max(PROBE_STRIDE_BYTES, n_bytes // _MAX_SAMPLES)
    n_text_bytes = n_bytes
    n_media = 0
    in_media = False
    for at in range(start, len(body) - PROBE_BYTES + 1, stride):
        is_media = _is_base64(body[at : at + PROBE_BYTES])
        if is_media:
            n_text_bytes -= stride
            n_media += not in_media
        in_media = is_media
    return min(n_key_tokens(max(n_text_bytes, 0)) + n_media * (MAX_MEDIA_KEY_BYTES // 4), n_key_tokens(n_bytes))


def _is_base64(probe: bytes) -> bool:
    if probe.translate(None, _BASE64):
        return False
    # What is encoded shows that many soon; the rest is looked at only where it does not.
    return len(set(probe[:_FEW_BYTES])) >= _MIN_DISTINCT or len(set(probe)) >= _MIN_DISTINCT
