"""What exact knowledge costs: `python -m benchmarks.exact_index --help`.

- A match: the time that a decision spends on finding who holds how much of a prompt, keys of its blocks included, when
  nobody holds any of it, when everybody holds all of it, and when it is asked for again.
- A message: from the bytes of a batch to the index, for what vLLM sends in a step of prefill and of decoding.
- Memory: bytes for each block of a source, with tracemalloc, after caches have turned over several times. The estimate
  by which the index bounds itself must not be below.
"""

import argparse
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from statistics import median
from time import perf_counter

import msgpack

from benchmarks.decision import numbers
from benchmarks.tables import markdown
from prefixroute.core.exact import BYTES_PER_BLOCK, ExactIndex
from prefixroute.core.kv_blocks import Removed, Stored
from prefixroute.core.kv_sources import Source, Trust
from prefixroute.kv_events.codec import decode

SEED = 7
BLOCK_TOKENS = 16
UNBOUNDED = 1 << 50
N_TURNOVERS = 3
CONVERSATION_BLOCKS = 64


def fleet(n_instances: int) -> tuple[ExactIndex, list[Source]]:
    index = ExactIndex(SEED, UNBOUNDED)
    sources = [index.open(slot) for slot in range(n_instances)]
    for source in sources:
        index.set_trust(source, Trust.TRUSTED)
    return index, sources


def conversation(rng: Random, n_blocks: int) -> Stored:
    tokens = array("I", (rng.randrange(100_000) for _ in range(n_blocks * BLOCK_TOKENS)))
    return Stored([rng.getrandbits(64) for _ in range(n_blocks)], None, tokens.tobytes(), BLOCK_TOKENS)


def microseconds(call: Callable[[], object], n: int = 200) -> float:
    times = []
    for _ in range(n):
        began_s = perf_counter()
        call()
        times.append(perf_counter() - began_s)
    return median(times) * 1e6


def matches(n_instances: int, n_tokens: int) -> list[float]:
    """Microseconds of a match: nobody trusted, held by nobody, by all, by all to different depths, by all again."""
    rng = Random(SEED)
    held = conversation(rng, n_tokens // BLOCK_TOKENS)
    prompt = held.tokens + bytes(4)
    cold = ExactIndex(SEED, UNBOUNDED)
    index, sources = fleet(n_instances)
    for source in sources:
        index.apply(source, conversation(rng, 64))
    nobody = microseconds(lambda: index.match(index.prompt(prompt)))
    for source in sources:
        index.apply(source, held)
    everybody = microseconds(lambda: index.match(index.prompt(prompt)))
    asked = index.prompt(prompt)
    again = microseconds(lambda: index.match(asked))
    for n, source in enumerate(sources):
        index.apply(source, Removed(held.hashes[len(held.hashes) * (n + 1) // (n_instances + 1) :]))
    staggered = microseconds(lambda: index.match(index.prompt(prompt)))
    return [microseconds(lambda: cold.match(cold.prompt(prompt))), nobody, everybody, staggered, again]


def messages() -> list[list[str]]:
    """Microseconds from bytes to index, by what a step of the engine sends."""
    rows = []
    for name, n_stored, n_blocks, n_removed in (
        ("decoding: 1 block", 1, 1, 0),
        ("decoding: 16 requests fill a block each", 16, 1, 0),
        ("prefill: 2,048 tokens", 1, 128, 0),
        ("prefill: 2,048 tokens into a full cache", 1, 128, 128),
    ):
        rng = Random(SEED)
        index, (source,) = fleet(1)
        # What is removed was stored a hundred messages before.
        names, oldest = count(n_removed * 100), count()
        payloads = []
        for _ in range(400):
            removed = [
                {"type": "BlockRemoved", "block_hashes": [next(oldest)], "medium": "GPU", "group_idx": 0}
                for _ in range(n_removed)
            ]
            stored = [
                {
                    "type": "BlockStored",
                    "block_hashes": [next(names) for _ in range(n_blocks)],
                    "parent_block_hash": None,
                    "token_ids": [rng.randrange(100_000) for _ in range(n_blocks * BLOCK_TOKENS)],
                    "block_size": BLOCK_TOKENS,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [None] * n_blocks,
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
                for _ in range(n_stored)
            ]
            payloads.append(msgpack.packb([0.0, [*removed, *stored], 0]))
        began_s = perf_counter()
        for payload in payloads:
            for event in decode(payload).events:
                index.apply(source, event)
        took = (perf_counter() - began_s) * 1e6 / len(payloads)
        n_all = n_stored + n_removed
        rows.append([name, f"{took:.0f}", f"{took / n_all:.1f}", f"{took / (n_stored * n_blocks):.2f}"])
    return rows


def memory(n_instances: int, n_blocks: int, n_holders: int) -> list[str]:
    """Bytes per block of a source: used, at the peak, estimated."""
    rng = Random(SEED)
    tracemalloc.start()
    try:
        index, sources = fleet(n_instances)
        per_source = n_blocks // n_instances
        held: dict[int, list[list[int]]] = {source.bit: [] for source in sources}
        while sum(source.counts.placed_blocks for source in sources) < N_TURNOVERS * n_blocks:
            talk = conversation(rng, CONVERSATION_BLOCKS)
            for source in rng.sample(sources, n_holders):
                mine = held[source.bit]
                while len(source.keys) + CONVERSATION_BLOCKS > per_source:
                    index.apply(source, Removed(mine.pop(0)))
                # Each source's events bring numbers of their own.
                index.apply(source, Stored([n + 0 for n in talk.hashes], None, talk.tokens, BLOCK_TOKENS))
                mine.append(list(talk.hashes))
        held.clear()
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    n_held = sum(index.n_blocks(source.slot) for source in sources)
    return [
        f"{n_instances}, {n_blocks:,}, {n_holders}",
        f"{used / n_held:.0f}",
        f"{peak / n_held:.0f}",
        f"{BYTES_PER_BLOCK}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exact_index", description="Cost of exact knowledge: matches, messages, memory."
    )
    parser.add_argument("--instances", type=numbers, default="8,64", help="fleet sizes (default %(default)s)")
    parser.add_argument("--tokens", type=numbers, default="8192", help="prompt lengths (default %(default)s)")
    parser.add_argument("--blocks", type=numbers, default="100000", help="blocks held in all (default %(default)s)")
    options = parser.parse_args(arguments)
    rows = [
        [f"{n_instances}, {n_tokens:,}", *(f"{x:.0f}" for x in matches(n_instances, n_tokens))]
        for n_instances in options.instances
        for n_tokens in options.tokens
    ]
    print(
        markdown(
            ("match, µs: instances, tokens", "nobody trusted", "nobody holds it", "all do", "to all depths", "again"),
            rows,
        )
    )
    print()
    print(markdown(("message, µs", "all of it", "an event", "a block"), messages()))
    print()
    print(
        markdown(
            ("memory, bytes a block: instances, blocks, holders", "used", "peak", "estimate"),
            [memory(n, blocks, k) for n in options.instances for blocks in options.blocks for k in (1, 2)],
        )
    )


if __name__ == "__main__":
    main()
