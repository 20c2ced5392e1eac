"""What the prefix index costs in memory: `python -m benchmarks.index_memory --help`.

Bytes per block that one or several instances hold, measured with tracemalloc in the state that lasts: maps are
full and have turned over, and each conversation came in three turns, so that most blocks were touched again. Each
request brings hashes of its own, as real ones do. The estimate by which the index bounds itself must not be below.
"""

import argparse
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.decision import numbers
from benchmarks.tables import markdown
from prefixroute.core.index import PrefixIndex

SEED = 7
CONVERSATION_BLOCKS = 20
TURNS = (0.5, 0.75, 1.0)
N_TURNOVERS = 3
UNBOUNDED = 1 << 50
HEADINGS = ("fleet, blocks", "holders of each", "bytes/block", "peak", "estimate")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per block, however many hold it."""

    used: float
    peak: float
    estimated: float


def measured(n_instances: int, n_blocks: int, n_holders: int) -> Memory:
    """A fleet that holds `n_blocks` different blocks, each on `n_holders` instances."""
    capacity_blocks = n_blocks * n_holders // n_instances
    n_conversations = N_TURNOVERS * n_blocks // CONVERSATION_BLOCKS
    rng = Random(SEED)
    tracemalloc.start()
    try:
        index = PrefixIndex(UNBOUNDED)
        for slot in range(n_instances):
            index.add(slot, capacity_blocks)
        for conversation in range(n_conversations):
            slots = rng.sample(range(n_instances), n_holders)
            for share in TURNS:
                for slot in slots:
                    index.record(hashes(conversation, int(share * CONVERSATION_BLOCKS)), slot)
        used_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    n_held = sum(index.n_blocks(slot) for slot in range(n_instances))
    per_block = n_holders / n_held
    return Memory(used_bytes * per_block, peak_bytes * per_block, index.n_bytes * per_block)


def hashes(conversation: int, n_blocks: int) -> list[int]:
    """The beginning of a conversation: equal, but never the same objects."""
    rng = Random(conversation)
    return [rng.getrandbits(64) for _ in range(n_blocks)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.index_memory", description="Memory of the prefix index, bytes per block."
    )
    parser.add_argument("--instances", type=numbers, default="8,64", help="fleet sizes (default %(default)s)")
    parser.add_argument("--blocks", type=numbers, default="20000,100000", help="blocks held (default %(default)s)")
    parser.add_argument("--holders", type=numbers, default="1,2", help="instances that hold each (default %(default)s)")
    options = parser.parse_args(arguments)
    rows = []
    for n_instances in options.instances:
        for n_blocks in options.blocks:
            for n_holders in options.holders:
                found = measured(n_instances, n_blocks, n_holders)
                figures = (found.used, found.peak, found.estimated)
                rows.append([f"{n_instances} instances, {n_blocks:,}", f"{n_holders}", *(f"{x:.0f}" for x in figures)])
    print(markdown(HEADINGS, rows))


if __name__ == "__main__":
    main()
