"""llm-d-router (the Gateway API's endpoint picker): queue 2, KV 2, prefix 3; approximate, and with KV events."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.sim.baselines.maps import ExactMap, SentMap, TokenMap, reason_of
from prefixroute.sim.gauges import Gauges

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation

# 31,250 blocks an instance, of 64 tokens each.
_INDEX_TOKENS = 31_250 * 64
# No more of a prompt is hashed.
_MAX_HASHED_TOKENS = 131_072


class _LlmD(ABC):
    """Greatest sum of three scores between 0 and 1.

    Queue: 1 for the shortest, 0 for the longest, 1 for all when they are equal. KV: the share that is not used.
    Prefix: the share of the prompt that matches. Queue and KV are polled every `poll_s`.
    """

    def __init__(
        self,
        sim: "Simulation",
        *,
        queue_weight: float = 2.0,
        kv_weight: float = 2.0,
        prefix_weight: float = 3.0,
        poll_s: float = 0.05,
    ) -> None:
        self._map = self._make_map(sim)
        self._gauges = Gauges(sim, poll_s)
        self._queue_weight = queue_weight
        self._kv_weight = kv_weight
        self._prefix_weight = prefix_weight

    @staticmethod
    @abstractmethod
    def _make_map(sim: "Simulation") -> TokenMap: ...

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        gauges = self._gauges.read(facts.now_s)
        matched = self._map.match(facts)
        queues = [gauges[c.instance.slot].n_waiting for c in candidates]
        shortest, longest = min(queues), max(queues)
        scores = []
        for c, queue in zip(candidates, queues, strict=True):
            slot = c.instance.slot
            scores.append(
                self._queue_weight * (1.0 if longest == shortest else (longest - queue) / (longest - shortest))
                + self._kv_weight * (1 - gauges[slot].kv_usage_ratio)
                + self._prefix_weight * min(matched.get(slot, 0), _MAX_HASHED_TOKENS) / facts.n_tokens
            )
        best = max(scores)
        chosen = rng.choice([c for c, score in zip(candidates, scores, strict=True) if score == best])
        return Decision(chosen, reason_of(chosen, matched, candidates))

    def record(self, facts: Facts, decision: Decision) -> None:
        self._map.record(facts, decision.instance.slot)


class LlmD(_LlmD):
    """Approximate: an LRU of what was sent, of a fixed size."""

    @staticmethod
    def _make_map(sim: "Simulation") -> TokenMap:
        return SentMap(sim, _INDEX_TOKENS)


class LlmDPrecise(_LlmD):
    """With KV events that take no time; without speculative entries, which are off by default."""

    @staticmethod
    def _make_map(sim: "Simulation") -> TokenMap:
        return ExactMap(sim)
