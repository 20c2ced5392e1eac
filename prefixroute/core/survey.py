"""What a decision is made of: the instances that may take a request, and what is known of each at this moment."""

from collections.abc import Collection
from dataclasses import dataclass
from heapq import nlargest
from random import Random

from prefixroute.core.capacity import Capacities
from prefixroute.core.fleet import Fleet, Instance
from prefixroute.core.held import HeldRequests
from prefixroute.core.load import Load
from prefixroute.core.matching import Matcher
from prefixroute.core.policy import Candidate, Facts
from prefixroute.core.request import Request


@dataclass(frozen=True, slots=True)
class Sampling:
    """In a large fleet only some instances are weighed against each other: who matches most, and some others.

    Applied above `sample_above` candidates. In simulation the loss in time to first token is below its noise.
    """

    sample_above: int = 32
    sample_matches: int = 4
    sample_others: int = 4


class Survey:
    """Of one fleet. `sampling` None: every candidate is weighed, however many there are."""

    __slots__ = ("_capacities", "_fleet", "_held", "_load", "_matcher", "_rng", "_sampling")

    def __init__(
        self,
        fleet: Fleet,
        matcher: Matcher,
        load: Load,
        held: HeldRequests,
        capacities: Capacities,
        sampling: Sampling | None,
        rng: Random,
    ) -> None:
        self._fleet = fleet
        self._matcher = matcher
        self._load = load
        self._held = held
        self._capacities = capacities
        self._sampling = sampling
        self._rng = rng

    def configure(self, sampling: Sampling | None) -> None:
        self._sampling = sampling

    def look(
        self,
        request: Request,
        now_s: float,
        without: Collection[str],
        ahead: dict[int, float] | None = None,
        room: Collection[int] = (),
    ) -> tuple[Facts, list[Candidate]]:
        """What is known now of the request and of those that may take it; nobody may: no candidates.

        `without`: names of instances already tried. `ahead`: held work that goes before this request, which is held
        itself, by slot; None: all that is held. `room`: slots that are to be candidates even if only some are.
        """
        prompt, chain, n_tokens = request.prompt, request.chain, request.n_tokens
        group = request.group
        instances = self._fleet.candidates(prompt.model, now_s, without, None if group is None else group.members)
        matched, told = self._matcher.match(request) if ahead is None else self._matcher.glance(request, now_s)
        sampling = self._sampling if group is None else group.sampling
        if sampling is not None and len(instances) > sampling.sample_above:
            instances = self._some(instances, matched, sampling, room)
        load = self._load
        if ahead is None:
            ahead = self._held.by_slot
        fleet_rate, cold_work = load.fleet_rate(), load.work(0, n_tokens)
        weight_s = load.rate_weight_s
        weight_tokens = fleet_rate * weight_s
        capacities, loads = self._capacities.by_slot, load.by_slot
        candidates = []
        for instance in instances:
            slot = instance.slot
            matched_tokens, work = 0, cold_work
            if slot in matched:
                matched_tokens = matched[slot]
                work = load.work(matched_tokens, n_tokens)
            own = loads[slot]
            if own.waiting or own.silent:
                _, rate, progress = load.observe(slot, now_s, fleet_rate)
            else:  # as `observe` says of one with no prefill under way: most of a fleet, at most moments
                rate, progress = (own.learned_tokens + weight_tokens) / (own.learned_s + weight_s), 0.0
            candidates.append(
                # By position: keywords would make this, the most frequent call of a decision, cost thrice as much.
                Candidate(
                    instance,
                    matched_tokens,
                    work,
                    own.in_flight,
                    own.in_flight_tokens,
                    own.pending_work,
                    progress,
                    rate,
                    capacities[slot],
                    ahead.get(slot, 0.0) if ahead else 0.0,
                    slot in told,
                )
            )
        if group is not None:
            group.tell(candidates)
        held_work = self._held.work if self._held.by_slot else 0.0
        facts = Facts(prompt, n_tokens, now_s, fleet_rate, load.mean_work, chain, held_work, bool(without))
        return facts, candidates

    def _some(
        self, instances: list[Instance], matched: dict[int, int], sampling: Sampling, room: Collection[int]
    ) -> list[Instance]:
        """The best matches, equal ones by lot, and others by lot."""
        n = len(instances)
        first = self._rng.randrange(n)
        turned = instances[first:] + instances[:first]
        chosen: dict[str, Instance] = {}
        if matched:
            holders = [i for i in turned if i.slot in matched]
            for instance in nlargest(sampling.sample_matches, holders, key=lambda i: matched[i.slot]):
                chosen[instance.name] = instance
        if room:
            free = [i for i in turned if i.slot in room]
            chosen |= {i.name: i for i in free[: sampling.sample_others]}
        for instance in self._rng.sample(instances, min(n, sampling.sample_others)):
            chosen[instance.name] = instance
        return list(chosen.values())
