"""Payloads in both forms, whole and damaged."""

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixroute.core.kv_blocks import Cleared, Removed, Stored
from prefixroute.kv_events.codec import UndecodableError, decode

STORED = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 70_000],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "sql",
    "extra_keys": [["sql"], None],
    "group_idx": 3,
    "kv_cache_spec_kind": "full_attention",
}
STORED_ARRAY = [STORED["type"], *list(STORED.values())[1:]]
EXPECTED = Stored(
    [11, 12],
    10,
    b"\1\0\0\0\2\0\0\0\3\0\0\0\x70\x11\1\0",
    2,
    "sql",
    [["sql"], None],
    "GPU",
    3,
    "full_attention",
)
REMOVED = {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 3}


def payload(*events: Any) -> bytes:
    packed: bytes = msgpack.packb([12.5, list(events), 0])
    return packed


@pytest.mark.parametrize("event", [STORED, STORED_ARRAY], ids=["map", "array"])
def test_blocks_stored(event: Any) -> None:
    batch = decode(payload(event))
    assert batch.events == [EXPECTED]
    assert batch.time_s == 12.5


@pytest.mark.parametrize("event", [REMOVED, list(REMOVED.values())], ids=["map", "array"])
def test_blocks_removed(event: Any) -> None:
    assert decode(payload(event)).events == [Removed([11], "GPU", 3)]


@pytest.mark.parametrize("event", [{"type": "AllBlocksCleared"}, ["AllBlocksCleared"]], ids=["map", "array"])
def test_all_blocks_cleared(event: Any) -> None:
    assert decode(payload(event)).events == [Cleared()]


def test_both_forms_in_one_batch_in_their_order() -> None:
    batch = decode(payload(list(REMOVED.values()), STORED, ["AllBlocksCleared"], STORED_ARRAY))
    assert batch.events == [Removed([11], "GPU", 3), EXPECTED, Cleared(), EXPECTED]


def test_a_batch_may_be_a_map_too() -> None:
    batch = decode(msgpack.packb({"ts": 3, "events": [STORED], "data_parallel_rank": 1, "new": "field"}))
    assert batch.events == [EXPECTED]
    assert batch.time_s == 3


def test_an_adapter_whose_name_nobody_would_write_is_not_kept() -> None:
    batch = decode(payload({**STORED, "lora_name": "x" * 1_024}, {**STORED, "lora_name": "x" * 1_025}))
    assert [event.adapter for event in batch.events if isinstance(event, Stored)] == ["x" * 1_024]
    assert batch.n_bad_stored == 1


@pytest.mark.parametrize("lora_id", ["7" * 2_000, [1], 1.5, {"a": 1}])
def test_an_adapters_number_is_a_number(lora_id: Any) -> None:
    batch = decode(payload({**STORED, "lora_name": None, "lora_id": lora_id}))
    assert (batch.events, batch.n_bad_stored) == ([], 1)


def test_older_servers_send_fewer_fields() -> None:
    (stored,) = decode(payload(["BlockStored", [11], None, [1, 2], 2, None])).events
    assert stored == Stored([11], None, b"\1\0\0\0\2\0\0\0", 2)
    assert decode(payload(["BlockRemoved", [11]])).events == [Removed([11])]


def test_newer_servers_send_more() -> None:
    more = {**STORED, "session_id": "s", "lookahead": [1, {"deep": [None]}]}
    batch = decode(payload(more, [*STORED_ARRAY, 512, "LOCAL", None, "s"], {"type": "BlockMoved", "block_hashes": [1]}))
    assert batch.events == [EXPECTED, EXPECTED]
    assert batch.n_unknown == 1
    assert batch.n_bad == batch.n_bad_stored == 0


def test_names_in_bytes_and_their_last_64_bits_as_numbers_are_the_same() -> None:
    name = bytes(range(32))
    stored, removed = decode(
        payload({**STORED, "block_hashes": [name, 12], "parent_block_hash": name}, {**REMOVED, "block_hashes": [name]})
    ).events
    number = int.from_bytes(name[-8:])
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.parent) == ([number, 12], number)
    assert removed == Removed([number], "GPU", 3)


def test_numbers_up_to_64_bits_without_a_sign() -> None:
    (removed,) = decode(payload({**REMOVED, "block_hashes": [2**64 - 1]})).events
    assert removed == Removed([2**64 - 1], "GPU", 3)


def test_an_adapter_without_a_name_is_not_the_base_model() -> None:
    (stored,) = decode(payload({**STORED, "lora_name": None, "lora_id": 4})).events
    assert isinstance(stored, Stored)
    assert stored.adapter is not None


def test_another_tier_may_tell_no_tokens() -> None:
    (stored,) = decode(payload({**STORED, "medium": "CPU", "token_ids": None})).events
    assert isinstance(stored, Stored)
    assert not stored.is_indexed


@pytest.mark.parametrize(
    "damage",
    [
        {"block_hashes": None},
        {"block_hashes": [1.5]},
        {"block_hashes": ["eleven"]},
        {"parent_block_hash": "ten"},
        {"token_ids": [-1]},
        {"token_ids": [2**32]},
        {"token_ids": ["a"]},
        {"token_ids": b"\1\0\0\0"},
        {"block_size": 0},
        {"block_size": True},
        {"block_size": None},
    ],
    ids=str,
)
def test_a_damaged_event_does_not_cost_the_removals_beside_it(damage: dict[str, Any]) -> None:
    batch = decode(payload(REMOVED, {**STORED, **damage}, REMOVED))
    assert batch.events == [Removed([11], "GPU", 3)] * 2
    assert batch.n_bad_stored == 1


def test_damage_in_a_field_that_is_not_needed_costs_nothing() -> None:
    batch = decode(
        payload({**STORED, "medium": "GPU", "session_id": 2**40, "lora_id": [1], "extra_keys": [["sql"], None]})
    )
    assert batch.events == [EXPECTED]


def test_text_that_is_no_utf8_spoils_its_own_event_only() -> None:
    broken = msgpack.packb(STORED).replace(b"\xa3sql", b"\xa3s\xffl")
    batch = decode(b"\x93\xc0\x92" + broken + msgpack.packb(REMOVED) + b"\x00")
    assert batch.events == [Removed([11], "GPU", 3)]
    assert batch.n_bad == 1
    assert batch.time_s is None


@pytest.mark.parametrize("event", [None, 5, [], {}, [5], {"type": None}, {**REMOVED, "block_hashes": None}], ids=str)
def test_what_may_have_been_a_removal_is_told_apart(event: Any) -> None:
    batch = decode(payload(event, STORED))
    assert batch.n_bad == 1
    assert batch.events == [EXPECTED]


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xc1", b"\xc0", b"{}", b"\x90", b"\x92\xc0\xc0", b"\x93\xcb", b"\x91" * 100_000, payload(STORED)[:-3]],
    ids=lambda garbage: repr(garbage[:8]),
)
def test_garbage_is_no_batch(garbage: bytes) -> None:
    with pytest.raises(UndecodableError, match="no batch of events"):
        decode(garbage)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(garbage: bytes) -> None:
    with suppress(UndecodableError):
        decode(garbage)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=9)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*STORED]), values), st.booleans())
def test_no_values_raise_anything_else(damage: dict[str, Any], as_array: bool) -> None:
    event = {**STORED, **damage}
    batch = decode(payload(list(event.values()) if as_array else event, REMOVED))
    assert batch.events[-1] == Removed([11], "GPU", 3)
