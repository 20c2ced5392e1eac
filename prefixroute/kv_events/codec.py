"""Payload of a KV-event message → events as plain values.

vLLM has written these in two ways: a batch and its events as arrays (fields in a fixed order), or as maps by field
name. Both are read, in any mixture. Fields and kinds of events that are not known here are passed over, because every
release adds some; a field we need that is not what it must be spoils its own event and no other.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from msgspec import Raw
from msgspec.msgpack import Decoder

from prefixroute.core.kv_blocks import Cleared, Event, Removed, Stored

# Order of the fields behind the tag, where an event is an array.
_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
# Of a name longer than this the end is kept, as the server itself does when it is told to send numbers.
_NAME_BYTES = 8
_MAX_BLOCK_TOKENS = 1 << 20
# Names of adapters are kept. A path may be one; nobody names a model in more than this.
_MAX_ADAPTER_CHARS = 1_024

# In three steps, so that what cannot be decoded (a name that is no UTF-8, say) spoils no more than its own event.
_batch = Decoder(list[Raw] | dict[str, Raw])
_events = Decoder(list[Raw])
_anything = Decoder()
# What msgspec raises: its own errors are ValueErrors.
_FAULTS = (ValueError, RecursionError)


class UndecodableError(ValueError):
    """The payload is no batch of events. What it would have said is lost."""


@dataclass(slots=True)
class Batch:
    """What one message says, in its order."""

    time_s: float | None
    """When it was made, by the server's wall clock."""
    events: list[Event] = field(default_factory=list)
    n_unknown: int = 0
    """Events of a kind that is not known here."""
    n_bad_stored: int = 0
    """Blocks were stored, but which cannot be read."""
    n_bad: int = 0
    """Something else happened that cannot be read: perhaps a removal."""


def decode(payload: bytes) -> Batch:
    """Raises UndecodableError."""
    try:
        document = _batch.decode(payload)
        if isinstance(document, dict):
            time_s, events = document.get("ts"), document["events"]
        else:
            time_s, events = document[0], document[1]
        listed = _events.decode(events)
    except (*_FAULTS, LookupError) as error:
        raise UndecodableError(f"no batch of events: {error}") from None
    batch = Batch(_time(time_s))
    for event in listed:
        try:
            _read(batch, _anything.decode(event))
        except _FAULTS:
            batch.n_bad += 1
    return batch


def _time(raw: Raw | None) -> float | None:
    try:
        value = None if raw is None else _anything.decode(raw)
    except _FAULTS:
        return None
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def _read(batch: Batch, event: Any) -> None:
    if isinstance(event, dict):
        kind, get = event.get("type"), event.get
    elif isinstance(event, list) and event:
        kind = event[0]
        get = dict(zip(_REMOVED if kind == "BlockRemoved" else _STORED, event[1:], strict=False)).get
    else:
        kind, get = None, None
    match kind:
        case "BlockStored":
            try:
                batch.events.append(_stored(get))
            except (TypeError, ValueError, OverflowError):
                batch.n_bad_stored += 1
        case "BlockRemoved":
            try:
                batch.events.append(_removed(get))
            except (TypeError, ValueError):
                batch.n_bad += 1
        case "AllBlocksCleared":
            batch.events.append(Cleared())
        case str():
            batch.n_unknown += 1
        case _:
            batch.n_bad += 1


def _stored(get: Any) -> Stored:
    parent, size, lora_id = get("parent_block_hash"), get("block_size"), get("lora_id")
    if type(size) is not int or not 0 < size <= _MAX_BLOCK_TOKENS:
        raise ValueError
    adapter = _text(get("lora_name"))
    if adapter is None and lora_id is not None:
        if type(lora_id) is not int:
            raise ValueError
        adapter = f"lora_id={lora_id}"  # nobody asks for that, but it is not the base model
    if adapter is not None and len(adapter) > _MAX_ADAPTER_CHARS:
        raise ValueError
    extra_keys = get("extra_keys")
    if not isinstance(extra_keys, list):
        extra_keys = None
    return Stored(
        _names(get("block_hashes")),
        None if parent is None else _name(parent),
        _packed(get("token_ids") or []),
        size,
        adapter,
        None if extra_keys is None else [keys if isinstance(keys, list) else None for keys in extra_keys],
        _text(get("medium")),
        _number(get("group_idx")),
        _text(get("kv_cache_spec_kind")),
    )


def _removed(get: Any) -> Removed:
    return Removed(_names(get("block_hashes")), _text(get("medium")), _number(get("group_idx")))


def _names(values: Any) -> Sequence[int]:
    if not isinstance(values, list):
        raise TypeError
    return [value if type(value) is int else _name(value) for value in values]


def _name(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bytes):
        return int.from_bytes(value[-_NAME_BYTES:])
    raise TypeError


def _packed(tokens: Any) -> bytes:
    if not isinstance(tokens, list):
        raise TypeError
    packed = array("I", tokens)  # raises OverflowError, TypeError
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return value if type(value) is int else None
