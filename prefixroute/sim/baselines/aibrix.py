"""AIBrix, `prefix-cache` with its own index and defaults."""

from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from prefixroute.core.policy import Candidate, Decision, Facts, Reason, least_outstanding
from prefixroute.sim.baselines.maps import reason_of, router_block_tokens

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation

_TTL_S = 20 * 60.0
_MAX_GAP = 8


class AiBrix:
    """The longest match whose holder is not busier than the mean by more than a standard deviation.

    Equal matches: the holder with fewest in flight. No such holder: fewest in flight of all. When the most in flight
    exceed the least by more than 8, only those with the least may take it.

    One table for the fleet: `blocks` of `block_chars` characters, each with those who were sent it in the last 20
    minutes, the least recently used forgotten. The defaults are the source's, and come to 200k tokens for all.
    """

    def __init__(self, sim: "Simulation", *, blocks: int = 200_000, block_chars: int = 4) -> None:
        self._sim = sim
        self._capacity_tokens = blocks * block_chars // 4
        # Block → slot → when it was sent there last; least recently used first.
        self._table: dict[int, dict[int, float]] = {}

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        counts = [c.in_flight for c in candidates]
        least = min(counts)
        able = candidates
        if max(counts) - least > _MAX_GAP:
            able = [c for c in candidates if c.in_flight == least]
        matched = self._match(facts)
        limit = fmean(counts) + pstdev(counts)
        holders = [c for c in able if matched.get(c.instance.slot, 0) and c.in_flight <= limit]
        if not holders:
            chosen = least_outstanding(candidates, rng)
            # Where a match is not looked at, load alone has decided.
            return Decision(chosen, Reason.LOAD if matched else Reason.COLD)
        rank = min((-matched[c.instance.slot], c.in_flight) for c in holders)
        chosen = rng.choice([c for c in holders if (-matched[c.instance.slot], c.in_flight) == rank])
        return Decision(chosen, reason_of(chosen, matched, candidates))

    def record(self, facts: Facts, decision: Decision) -> None:
        slot, table = decision.instance.slot, self._table
        for block in reversed(facts.chain):
            holders = table.pop(block, {})
            holders[slot] = facts.now_s
            table[block] = holders  # set again, it becomes the newest
        capacity = max(1, self._capacity_tokens // router_block_tokens(self._sim))
        while len(table) > capacity:
            del table[next(iter(table))]

    def _match(self, facts: Facts) -> Mapping[int, int]:
        """As `TokenMap.match`. That `record` follows is what renews the blocks."""
        block_tokens = router_block_tokens(self._sim)
        since_s = facts.now_s - _TTL_S
        matched: dict[int, int] = {}
        for depth, block in enumerate(facts.chain):
            holders = self._table.get(block, {})
            still = [slot for slot, sent_s in holders.items() if sent_s > since_s and matched.get(slot, 0) == depth]
            if not still:
                break
            matched |= dict.fromkeys(still, depth + 1)
        return {slot: n_blocks * block_tokens for slot, n_blocks in matched.items()}
