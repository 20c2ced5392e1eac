"""`PrefixIndex` against a list of blocks for each instance, with exact LRU."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from prefixroute.core.index import BYTES_PER_BLOCK, PrefixIndex, Recorded

SLOTS = (0, 1, 2, 63, 64)
DEPTH = 5

# A block is the path to it in a tree of two branches, so that prompts share prefixes: 0b1, 0b10, 0b101 …
Chain = list[int]
WHOLE_CHAINS: list[Chain] = [
    [leaf >> (DEPTH - depth) for depth in range(1, DEPTH + 1)] for leaf in range(2**DEPTH, 2 ** (DEPTH + 1))
]
chains = st.builds(lambda chain, n: chain[:n], st.sampled_from(WHOLE_CHAINS), st.integers(0, DEPTH))
slots = st.sampled_from(SLOTS)
capacities = st.integers(1, 12)


@dataclass(slots=True)
class Map:
    """One instance, naively: blocks and the number of the record that touched each, oldest first."""

    capacity: int
    blocks: list[tuple[int, int]] = field(default_factory=list)

    def touch(self, block: int, number: int) -> None:
        self.blocks = [(b, n) for b, n in self.blocks if b != block] + [(block, number)]

    def shrink(self) -> None:
        del self.blocks[: max(0, len(self.blocks) - self.capacity)]

    def depth(self, chain: Chain) -> int:
        held = {block for block, _ in self.blocks}
        return next((i for i, block in enumerate(chain) if block not in held), len(chain))


@dataclass(frozen=True, slots=True)
class Told:
    """A record, as the index and as the model remember it."""

    slot: int
    recorded: Recorded
    number: int
    new_blocks: list[int]


class IndexMachine(RuleBasedStateMachine):
    told = Bundle("told")

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(1 << 40)
        self.maps: dict[int, Map] = {}
        self.n_records = 0

    @rule(slot=slots, capacity=capacities)
    def add(self, slot: int, capacity: int) -> None:
        if slot not in self.maps:
            self.index.add(slot, capacity)
            self.maps[slot] = Map(capacity)

    @precondition(lambda self: self.maps)
    @rule(target=told, data=st.data(), chain=chains)
    def record(self, data: st.DataObject, chain: Chain) -> Told:
        slot = data.draw(st.sampled_from(sorted(self.maps)))
        one = self.maps[slot]
        kept = chain[: one.capacity]
        new_blocks = kept[one.depth(kept) :]
        self.n_records += 1
        for block in reversed(kept):
            one.touch(block, self.n_records)
        one.shrink()
        recorded = self.index.record(chain, slot)
        assert self.index.match(chain).get(slot, 0) == len(kept), "what was just recorded is found"
        return Told(slot, recorded, self.n_records, new_blocks)

    @rule(told=consumes(told))
    def forget(self, told: Told) -> None:
        self.index.forget(told.recorded)
        if told.slot in self.maps:
            one = self.maps[told.slot]
            mine = {(block, told.number) for block in told.new_blocks}
            one.blocks = [entry for entry in one.blocks if entry not in mine]

    @precondition(lambda self: self.maps)
    @rule(data=st.data(), capacity=capacities)
    def resize(self, data: st.DataObject, capacity: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.maps)))
        self.index.resize(slot, capacity)
        self.maps[slot].capacity = capacity
        self.maps[slot].shrink()

    @precondition(lambda self: self.maps)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.maps)))
        self.index.clear(slot)
        self.maps[slot].blocks = []

    @precondition(lambda self: self.maps)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.maps)))
        self.index.remove(slot)
        del self.maps[slot]

    @invariant()
    def matches_what_the_model_matches(self) -> None:
        for chain in WHOLE_CHAINS:
            expected = {slot: depth for slot, one in self.maps.items() if (depth := one.depth(chain))}
            assert self.index.match(chain) == expected

    @invariant()
    def counts_right_and_within_capacity(self) -> None:
        for slot, one in self.maps.items():
            assert self.index.capacity_blocks(slot) == one.capacity
            assert self.index.n_blocks(slot) == len(one.blocks) <= one.capacity
        assert self.index.n_bytes == sum(len(one.blocks) for one in self.maps.values()) * BYTES_PER_BLOCK

    def teardown(self) -> None:
        for slot in self.maps:
            self.index.clear(slot)
        assert self.index.n_bytes == 0
        assert not any(self.index.match(chain) for chain in WHOLE_CHAINS)


class BoundedIndexMachine(RuleBasedStateMachine):
    """With a bound in bytes it is free to choose what goes, but not to claim, overflow or tear chains apart."""

    told = Bundle("told")

    def __init__(self) -> None:
        super().__init__()
        self.max_bytes = 20 * BYTES_PER_BLOCK + BYTES_PER_BLOCK // 2
        self.index = PrefixIndex(self.max_bytes)
        for slot in SLOTS:
            self.index.add(slot, 15)
        self.sent: dict[int, set[int]] = {slot: set() for slot in SLOTS}

    @rule(target=told, slot=slots, chain=chains)
    def record(self, slot: int, chain: Chain) -> Recorded:
        self.sent[slot].update(chain)
        return self.index.record(chain, slot)

    @rule(told=consumes(told))
    def forget(self, told: Recorded) -> None:
        self.index.forget(told)

    @rule(slot=slots, capacity=st.integers(1, 30))
    def resize(self, slot: int, capacity: int) -> None:
        self.index.resize(slot, capacity)

    @rule(slot=slots)
    def clear(self, slot: int) -> None:
        self.index.clear(slot)
        self.sent[slot].clear()

    @invariant()
    def stays_within_its_bound(self) -> None:
        assert self.index.n_bytes <= self.max_bytes

    @invariant()
    def claims_only_what_was_sent_and_nothing_without_what_is_before_it(self) -> None:
        reachable: dict[int, set[int]] = {slot: set() for slot in SLOTS}
        for chain in WHOLE_CHAINS:
            for slot, depth in self.index.match(chain).items():
                reachable[slot].update(chain[:depth])
        for slot, blocks in reachable.items():
            assert blocks <= self.sent[slot]
            assert len(blocks) == self.index.n_blocks(slot), "a block that cannot be reached"


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBoundedIndex = BoundedIndexMachine.TestCase
TestBoundedIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
