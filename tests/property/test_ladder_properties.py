"""The ladder's two caches against plain ones, as long as every block is in the sample."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from prefixroute.core.ladder import IDEAL_MULTIPLE, Gap, Ladder, Rungs, gaps

BLOCK = 16
# Conversations: a topic and how far it has come. A block is its topic and its place.
prompts = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), max_size=60)


class PlainLru:
    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: list[int] = []

    def take(self, chain: Sequence[int]) -> int:
        """How many of these blocks were here; then they are, deepest first."""
        n_found = len(set(chain) & set(self.blocks))
        for block in reversed(chain):
            if block in self.blocks:
                self.blocks.remove(block)
            self.blocks.append(block)
        del self.blocks[: max(0, len(self.blocks) - self.size)]
        return n_found


@given(prompts, st.integers(1, 40))
def test_ideal_and_pooled_are_what_plain_caches_would_hit(asked: list[tuple[int, int]], capacity: int) -> None:
    ladder = Ladder(BLOCK, capacity)
    ideal, pooled = PlainLru(capacity * IDEAL_MULTIPLE), PlainLru(capacity)
    for topic, n in asked:
        chain = [100 * topic + place for place in range(n)]
        missing = ladder.dispatched(chain)
        assert missing == (n - ideal.take(chain), n - pooled.take(chain))


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(-50, 50), st.integers(-50, 50), *[st.integers(0, 50)] * 3),
        max_size=30,
    )
)
def test_gaps_are_shares_that_leave_the_lowest_rung(counted: list[tuple[int, int, int, int, int, int]]) -> None:
    rungs = Rungs()
    before = rungs.by_name()
    for one in counted:
        rungs.add(*one)
        now = rungs.by_name()
        assert all(now[rung] >= before[rung] for rung in now)
        before = now
    shares = gaps(rungs)
    if counted:
        assert list(shares) == list(Gap)
        assert all(0 <= share <= 1 for share in shares.values())
        lost = sum(shares.values()) * rungs.prompt
        assert abs(rungs.prompt - lost - min(before.values())) < 1e-6
