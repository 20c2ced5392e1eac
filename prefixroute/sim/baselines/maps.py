"""Which instance holds how much of a prompt, as the baselines know it: by what they sent there, or by KV events.

All in tokens, at the router's blocks. Nothing is made before the first request: a policy is older than its router.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from prefixroute.core.index import PrefixIndex
from prefixroute.core.policy import Candidate, Facts, Reason

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation

_NO_LIMIT = 1 << 62


class TokenMap(Protocol):
    """`match`: slot → leading tokens of the prompt held there; slots that hold none are left out."""

    def match(self, facts: Facts) -> Mapping[int, int]: ...

    def record(self, facts: Facts, slot: int) -> int:
        """The prompt was sent there. Tokens of it that are new there."""
        ...


class SentMap:
    """What was sent, the least recently used forgotten beyond `capacity_tokens` an instance; None: never."""

    def __init__(self, sim: "Simulation", capacity_tokens: int | None = None) -> None:
        self._sim = sim
        self._capacity_tokens = capacity_tokens
        self._index: PrefixIndex | None = None

    def match(self, facts: Facts) -> Mapping[int, int]:
        block_tokens = router_block_tokens(self._sim)
        matched = self._opened().match(facts.chain)
        return {slot: n_blocks * block_tokens for slot, n_blocks in matched.items()}

    def record(self, facts: Facts, slot: int) -> int:
        recorded = self._opened().record(facts.chain, slot)
        return len(recorded.new_blocks) * router_block_tokens(self._sim)

    def _opened(self) -> PrefixIndex:
        if self._index is None:
            index = self._index = PrefixIndex(_NO_LIMIT)
            capacity = self._capacity_tokens
            for slot in range(len(self._sim.engines)):
                index.add(slot, _NO_LIMIT if capacity is None else capacity // router_block_tokens(self._sim))
        return self._index


class ExpiringMap:
    """What was sent there in the last `ttl_s` seconds; sending it again renews it."""

    def __init__(self, sim: "Simulation", ttl_s: float) -> None:
        self._sim = sim
        self._ttl_s = ttl_s
        # Block → when it was sent there last, oldest first. A head is never older than what follows it.
        self._sent: list[dict[int, float]] = [{} for _ in sim.engines]

    def match(self, facts: Facts) -> Mapping[int, int]:
        block_tokens = router_block_tokens(self._sim)
        since_s = facts.now_s - self._ttl_s
        matched = {}
        for slot, sent in enumerate(self._sent):
            depth = 0
            for block in facts.chain:
                if sent.get(block, float("-inf")) <= since_s:
                    break
                depth += 1
            if depth:
                matched[slot] = depth * block_tokens
        return matched

    def record(self, facts: Facts, slot: int) -> int:
        sent, since_s = self._sent[slot], facts.now_s - self._ttl_s
        while sent and (oldest := next(iter(sent.items())))[1] <= since_s:
            del sent[oldest[0]]
        n_before = len(sent)
        for block in reversed(facts.chain):
            sent.pop(block, None)  # set again, it becomes the newest
            sent[block] = facts.now_s
        return (len(sent) - n_before) * router_block_tokens(self._sim)


class ExactMap:
    """What the engines' caches hold at this moment: what KV events would tell if they took no time.

    So it is the most that exact events are worth; real ones come after a step or two.
    """

    def __init__(self, sim: "Simulation") -> None:
        self._sim = sim

    def match(self, facts: Facts) -> Mapping[int, int]:
        block_tokens = router_block_tokens(self._sim)
        matched = {}
        for slot, engine in enumerate(self._sim.engines):
            # A router's block has the hash of the engine's block that it ends with.
            if depth := engine.pool.n_leading(facts.chain):
                matched[slot] = depth * block_tokens
        return matched

    def record(self, facts: Facts, slot: int) -> int:
        """Nothing to remember, and nothing is new before the engine says so."""
        return 0


def router_block_tokens(sim: "Simulation") -> int:
    """Tokens that each hash of a chain stands for. Not to be asked before the first request."""
    return sim.router._hasher.block_tokens


def reason_of(chosen: Candidate, matched: Mapping[int, int], candidates: Sequence[Candidate]) -> Reason:
    """Why it was `chosen`, in terms of the baseline's own map."""
    longest = max(matched.get(c.instance.slot, 0) for c in candidates)
    if not longest:
        return Reason.COLD
    return Reason.AFFINITY if matched.get(chosen.instance.slot, 0) == longest else Reason.SPILL
