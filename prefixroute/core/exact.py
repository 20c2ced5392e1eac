"""Which instance holds which blocks, as the instances themselves say (KV events of vLLM).

- Only what is trusted is shown. A source of events (a data-parallel rank of an instance) that may have been missed
  something counts as unknown, and the estimated map serves; who decides about trust is `kv_events.tracker`.
- What is claimed was said: a block whose place in a prompt cannot be told is left out and counted.
- All sources share one table, own key → bits of the sources that hold it, so that a prompt is walked once, whatever
  the size of the fleet, and only as deep as somebody holds it.
- Of an instance with several ranks, which picks one by itself, the mean over its ranks is told.
- Bounded: a source that would pass the bound is emptied and not trusted until it begins anew.
"""

from collections.abc import Iterable

from prefixroute.core.blocks import BYTES_PER_TOKEN
from prefixroute.core.exact_prompt import ExactPrompt
from prefixroute.core.kv_blocks import Cleared, Event, Removed, Stored, block_keys, root_key
from prefixroute.core.kv_sources import Counts, Source, Trust

# Two dicts that hold a 64-bit hash and a key, in CPython 3.11 to 3.13, with up to four places an entry in dicts that
# evict all the time. benchmarks/exact_index.py measures 240 to 310.
BYTES_PER_BLOCK = 330
"""Estimated memory of one block of one source. A block that several hold costs less."""

# Of a server that has stored nothing yet.
_USUAL_BLOCK_TOKENS = 16
# Adapters are few; the bound is for a server that invents names.
_MAX_ADAPTERS = 4_096


class ExactIndex:
    """Blocks by source, as told. Slots are the fleet's; `seed` as of `BlockHasher`."""

    __slots__ = (
        "_adapters",
        "_gone",
        "_holders",
        "_max_held",
        "_n_held",
        "_plan",
        "_seed",
        "_slots",
        "_sources",
        "_trusted",
    )

    def __init__(self, seed: int, max_bytes: int) -> None:
        self._seed = seed
        self._max_held = max_bytes // BYTES_PER_BLOCK
        self._n_held = 0
        self._holders: dict[int, int] = {}
        self._sources: dict[int, Source] = {}
        self._slots: dict[int, list[Source]] = {}
        # What closed sources had counted: counters do not go back.
        self._gone: dict[int, Counts] = {}
        self._adapters: set[str] = set()
        # Made of the above, when that changes: slots that are trusted, and bits of their sources by block size.
        self._trusted: dict[int, int] = {}
        self._plan: dict[int, int] = {}

    @property
    def n_bytes(self) -> int:
        """Estimated memory of the index, bytes."""
        return self._n_held * BYTES_PER_BLOCK

    # ------------------------------------------------------------------ asking

    def prompt(self, tokens: bytes, *, model: str | None = None, salt: str | None = None) -> ExactPrompt:
        """What `match` takes: token ids as the server will see them, four bytes each, little-endian.

        `model` as the client names it: it is an adapter if one of that name is known.
        """
        return ExactPrompt(tokens, root_key(model if model in self._adapters else None, salt, self._seed))

    def match(self, prompt: ExactPrompt) -> dict[int, int]:
        """Slot → leading tokens of the prompt that it holds, 0 included, for trusted slots only.

        Costs a lookup for each block that anybody holds, and nothing when nobody is trusted.
        """
        matched = dict.fromkeys(self._trusted, 0)
        holders = self._holders
        for block_tokens, all_bits in self._plan.items():
            alive, n_tokens = all_bits, 0
            for key in prompt.keys(block_tokens):
                now = holders.get(key, 0) & alive
                if now != alive:
                    self._settle(matched, alive & ~now, n_tokens)
                    alive = now
                    if not now:
                        break
                n_tokens += block_tokens
            self._settle(matched, alive, n_tokens)
        return matched

    def coming(self, slot: int, prompt: ExactPrompt, others: Iterable[ExactPrompt], held_tokens: int) -> int:
        """As `match` for this slot, which holds `held_tokens`, once it will have computed `others`, too."""
        sources = self._slots[slot]
        block_tokens = next((source.block_tokens for source in sources if source.block_tokens), _USUAL_BLOCK_TOKENS)
        # One of its ranks will hold them, and who knows which one is asked next.
        return max(held_tokens, prompt.n_shared(others, block_tokens, held_tokens) // len(sources))

    def _settle(self, matched: dict[int, int], bits: int, n_tokens: int) -> None:
        while n_tokens and bits:
            bit = bits & -bits
            bits ^= bit
            slot = self._sources[bit].slot
            matched[slot] += n_tokens // self._trusted[slot]

    def trust(self, slot: int) -> Trust:
        sources = self._slots.get(slot)
        if not sources:
            return Trust.OFF
        states = {source.trust for source in sources}
        return next(trust for trust in Trust if trust in states)

    def sources(self, slot: int) -> Iterable[Source]:
        return self._slots.get(slot, ())

    def n_blocks(self, slot: int) -> int:
        """Blocks that are known of the instance, trusted or not."""
        return sum(len(source.keys) for source in self.sources(slot))

    def counts(self, slot: int) -> Counts:
        """What came from all sources of the instance; the largest lag."""
        total = Counts()
        for counts in (self._gone.get(slot), *(source.counts for source in self.sources(slot))):
            if counts is not None:
                total.add(counts)
        return total

    # ------------------------------------------------------------------ being told

    def open(self, slot: int) -> Source:
        """A new source for the instance in `slot`, not trusted yet."""
        bit = 1
        while bit in self._sources:
            bit <<= 1
        source = self._sources[bit] = Source(slot, bit)
        self._slots.setdefault(slot, []).append(source)
        self._replan()
        return source

    def remove(self, slot: int) -> None:
        """The instance leaves the fleet: its sources are closed, and what they had counted is forgotten."""
        for source in list(self.sources(slot)):
            self.close(source)
        self._slots.pop(slot, None)
        self._gone.pop(slot, None)

    def close(self, source: Source) -> None:
        """Forgets the source and all it told. The second time does nothing."""
        if self._sources.get(source.bit) is not source:
            return
        self.clear(source)
        source.counts.lag_s = None
        self._gone.setdefault(source.slot, Counts()).add(source.counts)
        del self._sources[source.bit]
        self._slots[source.slot].remove(source)
        self._replan()

    def set_trust(self, source: Source, trust: Trust) -> None:
        """Whether what is known of the source is all it holds. Over the limit it stays so until `clear`."""
        trust = Trust.OVER_LIMIT if source.over_limit else trust
        if source.trust is not trust:
            source.trust = trust
            self._replan()

    def learned_adapters(self, names: Iterable[str]) -> None:
        """Names of adapters that prompts may ask for, besides those that events tell."""
        for name in names:
            if len(self._adapters) < _MAX_ADAPTERS:
                self._adapters.add(name)

    def clear(self, source: Source) -> None:
        """The source holds nothing. Costs some 0.1 µs for each block that it held."""
        holders, bit = self._holders, source.bit
        for key in source.keys.values():
            mask = holders.get(key, 0)
            if mask & bit:
                if mask == bit:
                    del holders[key]
                else:
                    holders[key] = mask ^ bit
        self._n_held -= len(source.keys)
        if not holders:
            self._holders = {}  # a dict keeps the room it once needed
        source.keys, source.repeats, source.twins = {}, {}, {}
        source.block_tokens, source.group, source.skipped, source.over_limit = 0, None, False, False
        self._replan()

    def apply(self, source: Source, event: Event) -> None:
        """One event, in the order in which they came."""
        match event:
            case Stored():
                self._store(source, event)
            case Removed():
                self._remove(source, event)
            case Cleared():
                source.counts.cleared += 1
                self.clear(source)

    def _store(self, source: Source, stored: Stored) -> None:
        counts = source.counts
        if not stored.is_indexed or (source.block_tokens and stored.group != source.group):
            counts.ignored += 1
            source.skipped = source.skipped or stored.is_on_gpu
            return
        counts.stored += 1
        hashes, size = stored.hashes, stored.block_tokens
        parent_key = None if stored.parent is None else source.keys.get(stored.parent)
        if (
            (stored.parent is not None and parent_key is None)
            or len(stored.tokens) != len(hashes) * size * BYTES_PER_TOKEN
            or size != (source.block_tokens or size)
            or source.over_limit
        ):
            counts.orphan_blocks += len(hashes)
            return
        if self._n_held + len(hashes) > self._max_held:
            self.clear(source)
            source.over_limit = True
            self.set_trust(source, Trust.OVER_LIMIT)
            return
        if not source.block_tokens:
            source.block_tokens, source.group = size, stored.group
            self._replan()
        if stored.adapter is not None:
            self.learned_adapters((stored.adapter,))
        counts.placed_blocks += len(hashes)
        keys, holders, bit = source.keys, self._holders, source.bit
        n_before = len(keys)
        for name, key in zip(hashes, block_keys(stored, parent_key, self._seed), strict=True):
            if name in keys:
                source.repeats[name] = source.repeats.get(name, 0) + 1
                continue
            keys[name] = key
            mask = holders.get(key, 0)
            if mask & bit:
                source.twins[key] = source.twins.get(key, 0) + 1
            else:
                holders[key] = mask | bit
        self._n_held += len(keys) - n_before

    def _remove(self, source: Source, removed: Removed) -> None:
        # The same name stands for a block in every group of layers.
        is_of_other_group = removed.group not in (None, source.group) and source.group is not None
        if not removed.is_on_gpu or is_of_other_group:
            source.counts.ignored += 1
            return
        source.counts.removed += 1
        for name in removed.hashes:
            if name in source.repeats:
                _take_one(source.repeats, name)
            elif name in source.keys:
                self._drop(source, source.keys.pop(name))

    def _drop(self, source: Source, key: int) -> None:
        source.counts.evicted_blocks += 1
        self._n_held -= 1
        if key in source.twins:
            _take_one(source.twins, key)
            return
        mask = self._holders[key] ^ source.bit
        if mask:
            self._holders[key] = mask
        else:
            del self._holders[key]

    def _replan(self) -> None:
        self._trusted = {
            slot: len(sources)
            for slot, sources in self._slots.items()
            if sources and all(source.trust is Trust.TRUSTED for source in sources)
        }
        self._plan = {}
        for source in self._sources.values():
            if source.slot in self._trusted and source.block_tokens:
                self._plan[source.block_tokens] = self._plan.get(source.block_tokens, 0) | source.bit


def _take_one(counts: dict[int, int], key: int) -> None:
    if counts[key] == 1:
        del counts[key]
    else:
        counts[key] -= 1
