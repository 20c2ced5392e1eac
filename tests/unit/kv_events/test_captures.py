"""Everything that real vLLM servers sent, against another decoder and a model without any hashing of our own."""

import gzip
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest

from prefixroute.core.exact import ExactIndex
from prefixroute.core.kv_blocks import Stored
from prefixroute.core.kv_sources import Source, Trust
from prefixroute.kv_events.codec import decode

DATA = Path(__file__).parents[2] / "data" / "kv_events"
CAPTURES = {
    "plain": 4,
    "evict": 22,
    "legacy_array_reencoded": 22,
    "three_servers_bytes": 232,
    "gemma3_hybrid": 3,
}
# Order of fields in the older form, and what stands for those that older servers do not send.
STORED_FIELDS = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
)


class Message(NamedTuple):
    server: int
    number: int
    payload: bytes


def messages(name: str) -> list[Message]:
    data = gzip.decompress((DATA / f"{name}.kvev.gz").read_bytes())
    assert data.startswith(b"KVEV1\n")
    found, at = [], 6
    while at < len(data):
        _, server, n_frames = struct.unpack_from(">QHI", data, at)
        at += 14
        frames = []
        for _ in range(n_frames):
            (size,) = struct.unpack_from(">I", data, at)
            frames.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        topic, number, payload = frames
        assert topic == b"kv-events"
        found.append(Message(server, int.from_bytes(number), payload))
    return found


def events(payload: bytes) -> Iterator[dict[str, Any]]:
    for event in msgpack.unpackb(payload, strict_map_key=False)[1]:
        yield event if isinstance(event, dict) else dict(zip(STORED_FIELDS, event, strict=False))


class Prompt(NamedTuple):
    """A prompt that a server computed: its blocks by the server's own names."""

    names: tuple[Any, ...]
    tokens: tuple[int, ...]
    salt: str | None


class Model:
    """What one server holds, by its own names only."""

    def __init__(self) -> None:
        self.references: Counter[Any] = Counter()
        self.prompts: dict[Any, Prompt] = {}

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.references.clear()
        elif event["type"] == "BlockRemoved":
            self.references.subtract(event["block_hashes"])
        elif event.get("kv_cache_spec_kind", "full_attention") == "full_attention":
            above = self.prompts.get(event["parent_block_hash"], Prompt((), (), None))
            size = event["block_size"]
            for n, name in enumerate(event["block_hashes"]):
                salt = ((event.get("extra_keys") or [None])[0] or [None])[0] if not above.names else above.salt
                block = event["token_ids"][n * size : (n + 1) * size]
                above = self.prompts[name] = Prompt((*above.names, name), (*above.tokens, *block), salt)
                self.references[name] += 1

    def held_tokens(self, prompt: Prompt) -> int:
        n_blocks = next(
            (n for n, name in enumerate(prompt.names) if self.references[name] < 1),
            len(prompt.names),
        )
        return n_blocks * 32


def packed(tokens: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


@pytest.mark.parametrize("name", CAPTURES)
def test_after_each_message_the_index_holds_what_the_server_holds(name: str) -> None:
    index = ExactIndex(seed=5, max_bytes=1 << 30)
    sources: dict[int, Source] = {}
    models: dict[int, Model] = {}
    captured = messages(name)
    assert len(captured) == CAPTURES[name]
    for server, _, payload in captured:
        if server not in sources:
            sources[server], models[server] = index.open(server), Model()
            index.set_trust(sources[server], Trust.TRUSTED)
        batch = decode(payload)
        assert (batch.n_bad, batch.n_bad_stored, batch.n_unknown) == (0, 0, 0)
        for event in batch.events:
            index.apply(sources[server], event)
        for as_sent in events(payload):
            models[server].apply(as_sent)
        assert index.n_blocks(server) == len(+models[server].references)
        # The deepest of each conversation, with one token more, and some of those on the way.
        for prompt in list(models[server].prompts.values())[::7] + list(models[server].prompts.values())[-3:]:
            whole = index.prompt(packed((*prompt.tokens, 7)), salt=prompt.salt)
            assert index.match(whole) == {s: model.held_tokens(prompt) for s, model in models.items()}
            exact = index.prompt(packed(prompt.tokens), salt=prompt.salt)
            spared = index.match(exact)[server]
            assert spared == min(models[server].held_tokens(prompt), len(prompt.tokens) - 32), "the last is computed"
    counts = [source.counts for source in sources.values()]
    assert sum(c.orphan_blocks for c in counts) == 0
    assert sum(c.placed_blocks for c in counts) > 0


def test_an_equal_prompt_with_a_salt_is_another_one() -> None:
    index = ExactIndex(seed=5, max_bytes=1 << 30)
    source = index.open(0)
    index.set_trust(source, Trust.TRUSTED)
    first, salted, *_ = [event for m in messages("plain") for event in decode(m.payload).events]
    assert isinstance(first, Stored)
    assert isinstance(salted, Stored)
    assert first.tokens == salted.tokens
    longer = salted.tokens + bytes(4)

    index.apply(source, salted)
    assert index.match(index.prompt(longer)) == {0: 0}
    assert index.match(index.prompt(longer, salt="tenant-b")) == {0: 0}
    assert index.match(index.prompt(longer, salt="tenant-a")) == {0: 96}

    index.apply(source, first)
    assert index.match(index.prompt(longer)) == {0: 96}


def test_of_a_hybrid_model_only_the_layers_that_keep_the_whole_prefix_count() -> None:
    index = ExactIndex(seed=5, max_bytes=1 << 30)
    source = index.open(0)
    for message in messages("gemma3_hybrid"):
        for event in decode(message.payload).events:
            index.apply(source, event)
    assert source.counts.stored == 3
    assert source.counts.ignored == 15
    assert source.group == 5
