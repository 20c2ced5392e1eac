"""`ExactIndex` against lists: what each source said, without hashes, bits or counts."""

from array import array
from collections import Counter
from collections.abc import Iterator

from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixroute.core.exact import ExactIndex
from prefixroute.core.exact_prompt import ExactPrompt
from prefixroute.core.kv_blocks import Cleared, Removed, Stored
from prefixroute.core.kv_sources import Source, Trust

SIZES = (1, 2, 4)
LENGTH = 8
"""Tokens of the longest prompt; of two kinds, so that prompts share beginnings."""

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=LENGTH).map(tuple)
Path = tuple[int, ...]
slots = st.integers(0, 3)


class Told:
    """One source, naively: how often each beginning of a prompt is held."""

    def __init__(self, source: Source, size: int) -> None:
        self.source = source
        self.size = size
        self.held: Counter[Path] = Counter()

    def depth(self, prompt: Path) -> int:
        """Tokens spared: the last one is always computed."""
        end = 0
        while end + self.size < len(prompt) and self.held[prompt[: end + self.size]] > 0:
            end += self.size
        return end


def name(path: Path) -> int:
    """What the server calls it: any injection."""
    return int("".join(map(str, (1, *path))), 3)


class ExactMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = ExactIndex(seed=1, max_bytes=1 << 30)
        self.told: list[Told] = []

    @precondition(lambda self: len(self.told) < 6)
    @rule(slot=slots, size=st.sampled_from(SIZES), trusted=st.booleans())
    def open(self, slot: int, size: int, trusted: bool) -> None:
        source = self.index.open(slot)
        self.index.set_trust(source, Trust.TRUSTED if trusted else Trust.PARTIAL)
        self.told.append(Told(source, size))

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.told))
        self.told.remove(one)
        self.index.close(one.source)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), prompt=prompts, start=st.integers(0, LENGTH))
    def store(self, data: st.DataObject, prompt: Path, start: int) -> None:
        one = data.draw(st.sampled_from(self.told))
        paths = [prompt[:end] for end in range(one.size, len(prompt) + 1, one.size)]
        before, new = paths[:start], paths[start:]
        if not new:
            return
        n_before = one.source.counts.orphan_blocks
        self.index.apply(
            one.source,
            Stored(
                [name(path) for path in new],
                name(before[-1]) if before else None,
                array("I", prompt[len(before) * one.size : len(paths) * one.size]).tobytes(),
                one.size,
            ),
        )
        if before and one.held[before[-1]] < 1:
            assert one.source.counts.orphan_blocks == n_before + len(new)
        else:
            one.held.update(new)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), gone=st.lists(prompts, max_size=4))
    def remove(self, data: st.DataObject, gone: list[Path]) -> None:
        one = data.draw(st.sampled_from(self.told))
        self.index.apply(one.source, Removed([name(path) for path in gone]))
        for path in gone:
            one.held[path] = max(0, one.held[path] - 1)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.told))
        self.index.apply(one.source, Cleared())
        one.held.clear()

    @precondition(lambda self: self.told)
    @rule(data=st.data(), trust=st.sampled_from(Trust))
    def trust(self, data: st.DataObject, trust: Trust) -> None:
        self.index.set_trust(data.draw(st.sampled_from(self.told)).source, trust)

    @rule(prompt=prompts)
    def match(self, prompt: Path) -> None:
        expected: dict[int, int] = {}
        for slot, ranks in self.by_slot():
            if all(one.source.trust is Trust.TRUSTED for one in ranks):
                expected[slot] = sum(one.depth(prompt) // len(ranks) for one in ranks)
        assert self.index.match(self.index.prompt(array("I", prompt).tobytes())) == expected

    def by_slot(self) -> Iterator[tuple[int, list[Told]]]:
        for slot in {one.source.slot for one in self.told}:
            yield slot, [one for one in self.told if one.source.slot == slot]

    @invariant()
    def blocks_are_counted(self) -> None:
        for slot, ranks in self.by_slot():
            assert self.index.n_blocks(slot) == sum(len(+one.held) for one in ranks)
        if not any(+one.held for one in self.told):
            assert self.index.n_bytes == 0


TestExact = ExactMachine.TestCase


@given(
    prompt=prompts,
    others=st.lists(st.tuples(prompts, st.booleans()), max_size=4),
    size=st.sampled_from(SIZES),
    behind=st.integers(0, LENGTH),
)
@example(prompt=(1, 0, 0), others=[((1,), True), ((0, 0), True)], size=1, behind=0)
def test_what_others_bring_is_the_longest_beginning_in_common(
    prompt: Path, others: list[tuple[Path, bool]], size: int, behind: int
) -> None:
    def made(tokens: Path, root: int = 1) -> ExactPrompt:
        return ExactPrompt(array("I", tokens).tobytes(), root)

    longest = behind
    for other, is_same_root in others:
        shared = 0
        while is_same_root and shared + size < len(prompt) and shared + size <= len(other):
            if prompt[: shared + size] != other[: shared + size]:
                break
            shared += size
        longest = max(longest, shared)
    assert made(prompt).n_shared([made(o, 1 if same else 2) for o, same in others], size, behind) == longest
