"""The ladder: why is the hit rate what it is?

Of the same requests' prompt tokens, in five steps down:

    prompt     all of them
    ideal      seen before                                         what is missing: the workload repeats no more
    pooled     one cache as large as all instances' together       … capacity
    reachable  on the instance that holds most, at the decision    … prefixes are spread over instances
    chosen     on the instance that got the request                … sent elsewhere, for load
    reported   as that instance reported                           … the engine did not keep what was thought

Ideal and pooled are simulated over the requests as they are dispatched: an LRU stack of block hashes whose upper part
is as large as the pooled capacity. Only hashes divisible by R are kept (spatial sampling, as in SHARDS), each standing
for R blocks, so that the stack's memory is bounded whatever the fleet: R doubles until the pooled part is within
MAX_POOLED_BLOCKS; for small fleets it is 1 and the numbers are exact. "Seen before" means within IDEAL_MULTIPLE times
the fleet's capacity, which is as far back as anybody's cache could be enlarged to reach.

What is sampled is misses: hits are all blocks less R times the missed samples. The few blocks that every request
shares would make an estimate of hits swing with whether they are among the samples; misses are all over the hashes.
One estimate may still be off by some blocks either way, so that totals count up only when the running sum does.

Answers count as seen only where their text is known to the router. Counted are prompts of a block and more whose key
could be read; the first four steps in whole blocks, the report in the engine's finer ones.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import islice

MAX_POOLED_BLOCKS = 4_096
IDEAL_MULTIPLE = 16
# A hash as int, and a place in a dict that always evicts: as in `index`, but never compacted.
BYTES_PER_BLOCK = 190
"""Of the stack, which has at most MAX_POOLED_BLOCKS × IDEAL_MULTIPLE blocks and 2 % more: 13 MB."""
# Beyond its size by this share, a part of the stack is cut back: to find the oldest, a dict is walked from its start.
_SLACK = 64

Missing = tuple[int, int]
"""Blocks of a prompt that were not in the ideal, and not in the pooled cache."""


class Rungs:
    """Running totals over the same requests, in the router's tokens. None goes down."""

    __slots__ = ("_ideal", "_pooled", "chosen", "ideal", "n_requests", "pooled", "prompt", "reachable", "reported")

    def __init__(self) -> None:
        self.n_requests = 0
        self.prompt = 0
        self.ideal = 0
        self.pooled = 0
        self.reachable = 0
        self.chosen = 0
        self.reported = 0.0
        self._ideal = 0
        self._pooled = 0

    def add(self, prompt: int, ideal: int, pooled: int, reachable: int, chosen: int, reported: float) -> None:
        """One more request."""
        self.n_requests += 1
        self.prompt += prompt
        self.reachable += reachable
        self.chosen += chosen
        self.reported += reported
        self._ideal += ideal
        self._pooled += pooled
        if self._ideal > self.ideal:
            self.ideal = self._ideal
        if self._pooled > self.pooled:
            self.pooled = self._pooled

    def by_name(self) -> dict[str, float]:
        """From the top down."""
        return {name: getattr(self, name) for name in ("prompt", "ideal", "pooled", "reachable", "chosen", "reported")}


class Gap(Enum):
    """What lies between a rung and the next one down, from the top."""

    WORKLOAD = "workload"
    CAPACITY = "capacity"
    SPREAD = "spread"
    SPILL = "spill"
    ENGINE = "engine"


def gaps(rungs: Rungs) -> dict[Gap, float]:
    """Shares of the prompt tokens; empty when nothing was counted. A rung above the one before it leaves no gap."""
    level, *below = rungs.by_name().values()
    if not level:
        return {}
    shares = {}
    for gap, value in zip(Gap, below, strict=True):
        shares[gap] = max(0.0, level - value) / rungs.prompt
        level = min(level, value)
    return shares


class Ladder:
    """`reported`: totals of requests whose instance reported. `unreported`: of the others; their last rung is empty."""

    __slots__ = (
        "_block_tokens",
        "_limit",
        "_mask",
        "_older",
        "_older_size",
        "_pooled",
        "_shift",
        "_size",
        "reported",
        "unreported",
    )

    def __init__(self, block_tokens: int, capacity_blocks: int) -> None:
        self.reported = Rungs()
        self.unreported = Rungs()
        self._block_tokens = block_tokens
        # The stack: its upper part, what follows, each oldest first.
        self._pooled: dict[int, None] = {}
        self._older: dict[int, None] = {}
        self._shift = 0
        self._mask = 0
        self.resize(capacity_blocks)

    @property
    def sampling(self) -> int:
        """R: how many blocks one that is kept stands for."""
        return 1 << self._shift

    @property
    def n_blocks(self) -> int:
        """Blocks kept."""
        return len(self._pooled) + len(self._older)

    def resize(self, capacity_blocks: int) -> None:
        """The fleet holds so many blocks in all. What was left out of the sample once stays out."""
        if not self.n_blocks:
            self._shift = 0
        while capacity_blocks >> self._shift > MAX_POOLED_BLOCKS:
            self._shift += 1
        mask = (1 << self._shift) - 1
        if mask != self._mask:
            self._mask = mask
            self._pooled = {block: None for block in self._pooled if not block & mask}
            self._older = {block: None for block in self._older if not block & mask}
        self._size = max(1, capacity_blocks >> self._shift)
        self._limit = self._size + self._size // _SLACK
        self._older_size = self._size * (IDEAL_MULTIPLE - 1)
        self._cut()

    def dispatched(self, chain: Sequence[int]) -> Missing:
        """A prompt goes to be computed. What of it was missing until now."""
        mask, pooled, older = self._mask, self._pooled, self._older
        n_new = n_older = 0
        # Deepest first, as in the instances' maps.
        for block in reversed(chain):
            if block & mask:
                continue
            if block in pooled:
                del pooled[block]  # set again, it becomes the newest
            elif block in older:
                del older[block]
                n_older += 1
            else:
                n_new += 1
            pooled[block] = None
        if len(pooled) > self._limit:
            self._cut()
        return n_new << self._shift, (n_new + n_older) << self._shift

    def extended(self, blocks: Sequence[int]) -> None:
        """An answer, computed behind its prompt, is there as well."""
        if blocks:
            self.dispatched(blocks)

    def count(
        self,
        n_tokens: int,
        n_blocks: int,
        missing: Missing,
        reachable: int,
        chosen: int,
        reported: float | None,
        token_scale: float = 1.0,
    ) -> None:
        """One request is over, whose prompt `dispatched` was told of. `reported` None: its instance did not.

        `token_scale`: tokens, as in the other arguments, for one of its blocks'.
        """
        rungs = self.unreported if reported is None else self.reported
        ideal, pooled = (n_blocks - missing[0]) * self._block_tokens, (n_blocks - missing[1]) * self._block_tokens
        if token_scale != 1.0:
            ideal, pooled = round(ideal * token_scale), round(pooled * token_scale)
        rungs.add(n_tokens, ideal, pooled, reachable, chosen, reported or 0.0)

    def _cut(self) -> None:
        pooled, older = self._pooled, self._older
        for block in list(islice(pooled, max(0, len(pooled) - self._size))):
            del pooled[block]
            older[block] = None
        if len(older) > self._older_size + self._older_size // _SLACK:
            for block in list(islice(older, len(older) - self._older_size)):
                del older[block]
