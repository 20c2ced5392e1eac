"""KubeAI's PrefixHash: consistent hashing with bounded loads."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from prefixroute.core.policy import Candidate, Decision, Facts, Reason

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation

_N_VIRTUAL = 256


class KubeAi:
    """The instance that the ring names for the prompt's beginning, or the next one on it that is not overfull.

    Overfull: in flight are more than `load_factor` times the mean, this request included. The source's key is the
    first 100 characters; the first block stands for them, which tells more prompts apart. A prompt shorter than a
    block has a beginning that nobody shares.
    """

    def __init__(self, sim: "Simulation", *, load_factor: float = 1.25) -> None:
        self._load_factor = load_factor
        # Places on the ring and their instances. Who is away keeps its places and is passed over: nobody else moves.
        self._ring: list[tuple[int, int]] = []
        for slot in range(len(sim.engines)):
            for number in range(_N_VIRTUAL):
                insort(self._ring, (xxh3_64_intdigest(f"{slot} {number}".encode()), slot))

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        key = xxh3_64_intdigest(facts.chain[0].to_bytes(8)) if facts.chain else rng.getrandbits(64)
        by_slot = {c.instance.slot: c for c in candidates}
        limit = (sum(c.in_flight for c in candidates) + 1) / len(candidates) * self._load_factor
        start = bisect_left(self._ring, (key, -1))
        first: Candidate | None = None
        for place in range(len(self._ring)):
            candidate = by_slot.get(self._ring[(start + place) % len(self._ring)][1])
            if candidate is None:
                continue
            if first is None:
                first = candidate
            if candidate.in_flight <= limit:
                return Decision(candidate, Reason.AFFINITY if candidate is first else Reason.SPILL)
        raise AssertionError("not all can be above their mean")

    def record(self, facts: Facts, decision: Decision) -> None:
        """Nothing to remember: the ring is all."""
