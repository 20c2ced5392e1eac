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
            if c.matched_tokens > longest:
                longest = c.matched_tokens
            if c.work < least_work:
                least_work = c.work
            total_in_flight += c.in_flight
            total_pending += c.pending_work

        affinity = k.affinity * min(k.affinity_max, 1 + total_pending / n / k.affinity_backlog_tokens)
        interference = k.interference / (1 + total_in_flight / n / k.interference_damping)
        fleet_rate, mean_work = facts.fleet_rate, facts.mean_work
        kv_read, least_cache = k.kv_read_s * fleet_rate, k.kv_read_tokens
        slowest_same, fastest_same = fleet_rate * (1 - k.same_speed_ratio), fleet_rate * (1 + k.same_speed_ratio)

        scores = []
        for c in candidates:
            work, rate, cache = c.work, c.prefill_rate, c.capacity_tokens
            if slowest_same < rate < fastest_same:
                rate = fleet_rate
            here = (
                c.pending_work
                - c.head_progress
                + c.held_work
                + work
                + interference * c.in_flight * (work if work < mean_work else mean_work)  # noqa: FURB136  3x min()
                + kv_read * c.in_flight_tokens / (cache if cache > least_cache else least_cache)  # noqa: FURB136
            )
            scores.append(here / rate + affinity * (work - least_work) / fleet_rate)

        least = min(scores)
        best = [c for c, score in zip(candidates, scores, strict=True) if score == least]
        chosen = best[0] if len(best) == 1 else rng.choice(best)
        if not longest:
            reason = Reason.COLD if facts.prompt.key else Reason.LOAD
        elif chosen.matched_tokens == longest:
            reason = Reason.AFFINITY
        else:
            reason = Reason.SPILL
        return Decision(chosen, reason, scores)
