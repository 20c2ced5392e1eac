"""Shepherd Model Gateway, `cache_aware` as of August 2026: each request stays or spills by itself.

Its workers here speak plain HTTP, so it has its text tree and no events. They tell their queued tokens, as SGLang's
do; of others the source knows the number waiting and takes each for 1,024 tokens, which is worse.
"""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.sim.baselines.maps import SentMap, reason_of
from prefixroute.sim.gauges import Gauges

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation

_TREE_TOKENS = 2**26 // 4
_MAX_HOLDERS = 8
_KV_S = 0.15
# Where the KV term would be infinite.
_FULL = 0.999


class Smg:
    """Those who hold the deepest match, less those who are overloaded; of them the one with the least expected wait.

    Overloaded: in flight are more than `balance_rel` times the fleet's mean, and `balance_abs` more than it. When no
    holder is left, or the match is no more than `cache_threshold` of the prompt, all may take it who are not
    overloaded holders. A tenant of more than eight is looked at by lot.

    The expected wait is (queued at the last poll + sent since) ÷ throughput, and a term for a full cache. Throughput
    is the prefill speed that our router has learned: better than the source's, which assumes 2,000 tokens/s at first.
    """

    def __init__(
        self,
        sim: "Simulation",
        *,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        poll_s: float = 10.0,
    ) -> None:
        self._map = SentMap(sim, _TREE_TOKENS)
        self._gauges = Gauges(sim, poll_s)
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        # By slot: tokens sent since `_credited_s`, the time of the poll that they are credited to.
        self._credit = [0] * len(sim.engines)
        self._credited_s = float("-inf")

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        matched = self._map.match(facts)
        longest = max((matched.get(c.instance.slot, 0) for c in candidates), default=0)
        holders: list[Candidate] = []
        if longest > self._cache_threshold * facts.n_tokens:
            holders = [c for c in candidates if matched.get(c.instance.slot, 0) == longest]
            if len(holders) > _MAX_HOLDERS:
                holders = rng.sample(holders, _MAX_HOLDERS)
        mean = sum(c.in_flight for c in candidates) / len(candidates)
        limit = max(self._balance_rel * mean, mean + self._balance_abs)
        spilled = [c for c in holders if c.in_flight > limit]
        able = [c for c in holders if c not in spilled] or [c for c in candidates if c not in spilled] or candidates
        waits = self._waits_s(facts, able)
        least = min(waits)
        chosen = rng.choice([c for c, wait_s in zip(able, waits, strict=True) if wait_s == least])
        return Decision(chosen, reason_of(chosen, matched, candidates))

    def record(self, facts: Facts, decision: Decision) -> None:
        slot = decision.instance.slot
        self._map.record(facts, slot)
        self._gauges.read(facts.now_s)
        if self._credited_s != self._gauges.polled_s:
            self._credited_s = self._gauges.polled_s
            self._credit = [0] * len(self._credit)
        self._credit[slot] += facts.n_tokens

    def _waits_s(self, facts: Facts, candidates: Sequence[Candidate]) -> list[float]:
        gauges = self._gauges.read(facts.now_s)
        # A new poll has seen what was sent before it.
        is_current = self._credited_s == self._gauges.polled_s
        waits = []
        for c in candidates:
            slot = c.instance.slot
            tokens = gauges[slot].queued_tokens + (self._credit[slot] if is_current else 0)
            usage = min(gauges[slot].kv_usage_ratio, _FULL)
            waits.append(tokens / c.prefill_rate + _KV_S * usage / (1 - usage))
        return waits
