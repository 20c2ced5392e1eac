"""`expected_latency`: least expected cost, in seconds. The default.

For each candidate, in tokens of prefill work (docs/routing.md):

    wait for what is pending there, less what is done of it, and for what the router holds for it
    + the request's own work there
    + interference: prefilling stops the requests that decode there
    + reading the resident KV at each decode step
    … all at the speed of the candidate
    + a charge for recomputing what another candidate holds, which grows with the backlog

No thresholds: sticking and spilling fall out of one sum.

Speeds are learned, so equal instances never cost quite the same, and who was measured a hair faster would get every
cold prompt of an idle fleet. A speed that is near the fleet's is therefore taken to be the fleet's; ties go by lot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from prefixroute.core.policy import Candidate, Decision, Facts, Reason, StatelessPolicy

# Python 3.11 takes as long to find a member of an enum as to call a function.
_AFFINITY, _SPILL, _COLD, _LOAD = Reason.AFFINITY, Reason.SPILL, Reason.COLD, Reason.LOAD


@dataclass(frozen=True, slots=True)
class LatencyConstants:
    """Defaults as found by simulating fleets on public and generated traces."""

    interference: float = 0.4
    interference_damping: float = 10
    kv_read_s: float = 1.0
    # Of the GPU that the seconds were found on. Who has less memory reads less of it at each step: a cache of an eighth
    # that is full costs an eighth.
    kv_read_tokens: int = 400_000
    affinity: float = 1.0
    affinity_max: float = 20
    affinity_backlog_tokens: float = 16_000
    # Above the noise of learned speeds: each is worth about 100 samples, which leaves 3 % of a scatter of 30 %.
    same_speed_ratio: float = 0.05


class ExpectedLatency(StatelessPolicy):
    """Picks the least cost. Without a match anywhere it is routing by expected wait."""

    def __init__(self, constants: LatencyConstants | None = None) -> None:
        self._constants = constants or LatencyConstants()

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        k = self._constants
        n = len(candidates)
        longest = 0
        least_work = float("inf")
        total_in_flight = 0
        total_pending = facts.held_work
        for c in candidates:
            matched_tokens, work = c.matched_tokens, c.work
            if matched_tokens > longest:
                longest = matched_tokens
            if work < least_work:
                least_work = work
            total_in_flight += c.in_flight
            total_pending += c.pending_work

        affinity = k.affinity * min(k.affinity_max, 1 + total_pending / n / k.affinity_backlog_tokens)
        interference = k.interference / (1 + total_in_flight / n / k.interference_damping)
        fleet_rate, mean_work = facts.fleet_rate, facts.mean_work
        kv_read, least_cache = k.kv_read_s * fleet_rate, k.kv_read_tokens
        slowest_same, fastest_same = fleet_rate * (1 - k.same_speed_ratio), fleet_rate * (1 + k.same_speed_ratio)

        scores: list[float] = []
        keep = scores.append
        for c in candidates:
            # In line, and what is nothing is left out: with the facts, this is what a decision in a large fleet costs.
            work, rate = c.work, c.prefill_rate
            here = c.pending_work - c.head_progress + c.held_work + work
            if n_in_flight := c.in_flight:
                here += interference * n_in_flight * (work if work < mean_work else mean_work)  # noqa: FURB136  3x min()
            if kv_tokens := c.in_flight_tokens:
                cache = c.capacity_tokens
                here += kv_read * kv_tokens / (cache if cache > least_cache else least_cache)  # noqa: FURB136
            score = here / (fleet_rate if slowest_same < rate < fastest_same else rate)
            if work > least_work:
                score += affinity * (work - least_work) / fleet_rate
            keep(score)

        least = min(scores)
        if scores.count(least) == 1:
            chosen = candidates[scores.index(least)]
        else:
            chosen = rng.choice([c for c, score in zip(candidates, scores, strict=True) if score == least])
        if not longest:
            reason = _COLD if facts.prompt.key else _LOAD
        elif chosen.matched_tokens == longest:
            reason = _AFFINITY
        else:
            reason = _SPILL
        return Decision(chosen, reason, scores)
