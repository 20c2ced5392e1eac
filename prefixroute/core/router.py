"""Match, pick, lease: one synchronous step from a prompt to an instance.

Nothing awaits between reading the facts and recording the choice, so a burst sees itself. What is taken is given
back: a lease is a context manager, and its end returns the place in flight whatever happened in between.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import nlargest
from random import Random
from types import TracebackType
from typing import Self

from prefixroute.core.audit import Audit
from prefixroute.core.blocks import BYTES_PER_TOKEN, BlockHasher
from prefixroute.core.content import n_key_tokens
from prefixroute.core.exact import ExactIndex
from prefixroute.core.feedback import capacity_factor
from prefixroute.core.fleet import Fleet, HealthConstants, Instance, ProbeFailure
from prefixroute.core.guard import GuardConstants
from prefixroute.core.held import Held, HeldRequests, HoldConstants
from prefixroute.core.index import PrefixIndex, Recorded
from prefixroute.core.kv_sources import Trust
from prefixroute.core.load import Flight, Load, LoadConstants
from prefixroute.core.matching import Matcher
from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason, least_outstanding
from prefixroute.core.prompt import Prompt
from prefixroute.core.request import Request
from prefixroute.core.shadow import Shadows
from prefixroute.core.tokens import ByteTokenizer, Tokenizer
from prefixroute.errors import NoInstanceError

DEFAULT_CAPACITY_TOKENS = 1_000_000
"""KV capacity of an instance that does not tell: too large costs less than too small."""

# How far a learned capacity may be from the default, as a factor.
_LEARNED_RANGE = 64


@dataclass(frozen=True, slots=True)
class Sampling:
    """In a large fleet only some instances are weighed against each other: who matches most, and some others.

    Applied above `sample_above` candidates. In simulation the loss in time to first token is below its noise.
    """

    sample_above: int = 32
    sample_matches: int = 4
    sample_others: int = 4


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would be decided now, and from what. `decision` is None when nobody may take the request."""

    facts: Facts
    n_blocks: int
    has_exact_tokens: bool
    """Whether the engine's own tokens of the prompt are known, so that what instances say can be compared."""
    candidates: Sequence[Candidate]
    decision: Decision | None
    is_held: bool
    """Whether the request would be held back first: its instance is busy with the prompts of others."""


class Lease:
    """A request's place on an instance, from the decision until the attempt is over. Use as a context manager."""

    __slots__ = ("_flight", "_recorded", "_router", "_trial", "_unreported", "candidates", "decision", "request")

    def __init__(
        self,
        router: "Router",
        decision: Decision,
        request: Request,
        *,
        candidates: Sequence[Candidate],
        recorded: Recorded,
        flight: Flight,
        trial: int,
    ) -> None:
        self._router = router
        self._flight: Flight | None = flight
        self._recorded = recorded
        self._trial = trial
        self._unreported = False
        self.candidates = candidates
        """What was chosen from."""
        self.decision = decision
        self.request = request

    @property
    def instance(self) -> Instance:
        return self.decision.instance

    def answered(self) -> None:
        """A sound answer (not 5xx) has begun: the instance lives."""
        self._router.fleet.answered(self.instance.name)

    def first_byte(self, now_s: float, *, learn: bool) -> None:
        """The first byte of the answer's body is here. `learn`: of a sound answer, so its time tells the speed."""
        if self._flight is not None:
            self._router.load.first_byte(self._flight, now_s, learn=learn)
            self._unreported = learn

    def reported(self, cached_tokens: int, prompt_tokens: int) -> None:
        """The instance told how much of the prompt was cached, in its own tokens. To be called before the end."""
        if self._flight is not None and prompt_tokens > 0:
            self._unreported = False
            self._router._reported(self, self.request.n_tokens * min(1.0, cached_tokens / prompt_tokens))

    def computed(self, chain: Sequence[int] | None = None) -> None:
        """The answer is whole: the instance holds the prompt, or `chain`, which is the prompt and its answer.

        It was used until now, so it is the newest there.
        """
        self._router.index.record(self.request.chain if chain is None else chain, self.instance.slot)
        if chain is not None:
            self._router.audit.ladder.extended(chain[len(self.request.chain) :])

    def refused(self) -> None:
        """The instance did not take the request (busy, or never reached): it computed none of it."""
        self._router.index.forget(self._recorded)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Gives the place back. The second time does nothing."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._router.load.end(flight)
            self._router.fleet.released(self.instance.name, self._trial)
            if self._unreported:
                self._router.audit.answered(self.request, self.candidates, self.decision.candidate, None)


class Router:
    """The decision for one fleet. Owns the fleet's facts, the prefix index and the load; the policy only picks.

    `capacities`: KV capacity in tokens by instance name, where it is known. `exact`: what instances say they hold.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        policy: Policy,
        hasher: BlockHasher,
        rng: Random,
        *,
        tokenizer: Tokenizer | None = None,
        index_bytes: int = 268_435_456,
        load_constants: LoadConstants | None = None,
        health: HealthConstants | None = None,
        guard: GuardConstants | None = None,
        hold: HoldConstants | None = None,
        sampling: Sampling | None = None,
        exact: ExactIndex | None = None,
        shadows: Shadows | None = None,
        default_capacity_tokens: int = DEFAULT_CAPACITY_TOKENS,
        capacities: dict[str, int] | None = None,
    ) -> None:
        self.fleet = Fleet(instances, health)
        self.index = PrefixIndex(index_bytes)
        self.load = Load(load_constants, guard)
        self.held = HeldRequests(hold.max_held if hold is not None else 0)
        """Requests held back; nobody is when `hold` is None."""
        self.n_policy_faults = 0
        """Decisions in which the policy failed, so that load decided."""
        self.last_policy_fault: Exception | None = None
        self._policy = policy
        self._hold = hold
        self._exact = exact
        self._sampling = sampling
        self._hasher = hasher
        self._matcher = Matcher(self.index, hasher.block_tokens, self.load, exact)
        self._rng = rng
        self._tokenizer = tokenizer or ByteTokenizer()
        self._default_capacity = default_capacity_tokens
        self._capacities = {i.name: default_capacity_tokens for i in instances} | (capacities or {})
        # Capacities that are known, and not to be learned.
        self._told = set(capacities or ())
        self.audit = Audit(hasher.block_tokens, self._fleet_blocks(), shadows)
        """What becomes of decisions."""
        for instance in instances:
            self.index.add(instance.slot, self._blocks(self._capacities[instance.name]))
            self.load.add(instance.slot)
            self.audit.feedback.add(instance.slot)

    # ------------------------------------------------------------------ deciding

    def read(self, prompt: Prompt, token_ids: bytes | None = None) -> Request:
        """`prompt` made comparable: the costly part, done once a request.

        `token_ids`: its tokens as the engine will see them, four bytes each, where they are known. They tell its length
        and what instances with KV events hold; what is merely estimated goes by the key, which every prompt has.
        """
        try:
            material = self._tokenizer.tokenize(prompt)
        except Exception as fault:  # noqa: BLE001  a tokenizer's fault must never cost a request
            self.n_policy_faults += 1
            self.last_policy_fault = fault
            material = b""
        chain = self._hasher.chain(prompt.scope, material) if material else []
        # A real tokenizer's ids do not go on as the key does.
        rest = self._hasher.rest(material) if material is prompt.key else None
        if not token_ids:
            return Request(prompt, chain, prompt.n_tokens, rest)
        # Of a batch, key and ids are the first prompt's.
        n_key, n_ids = n_key_tokens(len(prompt.key)), len(token_ids) // BYTES_PER_TOKEN
        exact = None
        if self._exact is not None:
            exact = self._exact.prompt(token_ids, model=prompt.model, salt=prompt.cache_salt)
        token_scale = n_ids / n_key_tokens(len(material)) if material else 1.0
        return Request(prompt, chain, max(1, prompt.n_tokens + n_ids - n_key), rest, exact, token_scale)

    def continued(self, request: Request, material: bytes) -> Sequence[int]:
        """Chain of the prompt with what follows it: `material`, as the next turn's key will have it.

        The prompt's alone where a text does not continue it.
        """
        if request.rest is None:
            return request.chain
        return self._hasher.continued(request.prompt.scope, request.chain, request.rest + material)

    def lease(self, request: Request, *, now_s: float, without: Collection[str] = (), only: str | None = None) -> Lease:
        """Picks an instance for `request` and counts it there.

        `without`: names of instances already tried. `only`: the instance that must take it (a stored response), if
        it may take requests at all. Raises NoInstanceError when nobody may.
        """
        facts, candidates = self._facts(request, now_s, without)
        if not candidates:
            raise NoInstanceError("no instance can take the request")
        return self._take(request, facts, candidates, self._decide(facts, candidates, only))

    def enter(self, request: Request, *, now_s: float, grant: Callable[[Lease | None], None]) -> Lease | Held:
        """As `lease`, but a request whose instance is busy with other prompts is held.

        `release`, to be called whenever an instance may have got room, gives the lease to `grant`: the request is
        held no longer then. Raises NoInstanceError, and TooManyRequestsError when too many are held.
        """
        facts, candidates = self._facts(request, now_s, ())
        if not candidates:
            raise NoInstanceError("no instance can take the request")
        decision = self._decide(facts, candidates, None)
        chosen = decision.candidate
        if self._hold is None or not self._is_busy(chosen, self._hold.hold_s * facts.fleet_rate):
            return self._take(request, facts, candidates, decision)
        model = request.prompt.model
        held = Held(request, now_s, grant, model if model is not None and self.fleet.knows_model(model) else None)
        wait = chosen.pending_work - chosen.head_progress + chosen.held_work
        self.held.hold(held, chosen.instance.slot, chosen.work, retry_after_s=wait / chosen.prefill_rate)
        return held

    def release(self, now_s: float) -> None:
        """Gives held requests to instances that have room, each through its `grant`.

        Of the oldest, those with the least left to compute go first, weighed against how long they have waited. Only
        of those whose model somebody with room may serve: others would hide them. Those that nobody can take any more
        are told so. When all of the oldest wait for others, those behind them who would go where there is room are
        looked at as well: else a prefix that is worth waiting for could keep everybody from idle instances.
        """
        hold = self._hold
        if hold is None or not len(self.held):
            return
        fleet_rate = self.load.fleet_rate()
        limit = hold.hold_s * fleet_rate
        room: set[int] = set()
        able: set[str | None] = set()
        for model in self.held.models:
            instances = self.fleet.candidates(model, now_s)
            free = [i.slot for i in instances if self._has_room(i.slot, now_s, fleet_rate, limit)]
            room.update(free)
            if free or not instances:
                able.add(model)
        if not able:
            return
        n_held = len(self.held)
        oldest = self.held.oldest(hold.hold_batch, able)
        ahead: dict[int, float] = {}
        self._release(oldest, room, ahead, now_s, fleet_rate, hold)
        if len(self.held) == n_held > len(oldest):
            behind = self.held.oldest(hold.hold_batch, able, bound_to=room, behind=oldest[-1])
            self._release(behind, room, ahead, now_s, fleet_rate, hold)

    def _release(
        self,
        batch: Sequence[Held],
        room: set[int],
        ahead: dict[int, float],
        now_s: float,
        fleet_rate: float,
        hold: HoldConstants,
    ) -> None:
        """`room`: slots that have some, until they are filled. `ahead`: held work by slot that goes first; added to."""
        limit = hold.hold_s * fleet_rate
        waiting = []
        for held in batch:
            longest = max(self._matcher.glance(held.request, now_s)[0].values(), default=0)
            work = self.load.work(longest, held.request.n_tokens)
            waiting.append((work - hold.hold_age_tokens_per_s * (now_s - held.since_s), held))
        waiting.sort(key=lambda entry: entry[0])
        for _, held in waiting:
            if held not in self.held:
                continue  # a grant has made it leave
            facts, candidates = self._facts(held.request, now_s, (), ahead, room)
            if not candidates:
                self.held.leave(held)
                held.grant(None)
                continue
            decision = self._decide(facts, candidates, None)
            chosen = decision.candidate
            slot = chosen.instance.slot
            if self._is_busy(chosen, limit):
                self.held.bind(held, slot, chosen.work)
                ahead[slot] = ahead.get(slot, 0.0) + chosen.work
                continue
            self.held.leave(held)
            held.grant(self._take(held.request, facts, candidates, decision))
            if slot in room and not self._has_room(slot, now_s, fleet_rate, limit):
                room.discard(slot)
                if not room:
                    break

    def _has_room(self, slot: int, now_s: float, fleet_rate: float, limit: float) -> bool:
        _, _, progress = self.load.observe(slot, now_s, fleet_rate)
        return self.load.known_backlog(slot, progress) <= limit

    def _is_busy(self, candidate: Candidate, limit: float) -> bool:
        """Whether what is pending there keeps a prompt waiting for longer than the limit, in tokens."""
        backlog = self.load.known_backlog(candidate.instance.slot, candidate.head_progress)
        return candidate.pending_work > 0 and backlog > limit

    def explain(
        self, prompt: Prompt, *, now_s: float, only: str | None = None, token_ids: bytes | None = None
    ) -> Explanation:
        """A dry run of `lease`: what it would decide now. Records nothing, and gives the dice back as they were."""
        request = self.read(prompt, token_ids)
        dice = self._rng.getstate()
        facts, candidates = self._facts(request, now_s, ())
        faults = self.n_policy_faults, self.last_policy_fault
        decision = self._decide(facts, candidates, only) if candidates else None
        self.n_policy_faults, self.last_policy_fault = faults
        self._rng.setstate(dice)
        hold = self._hold
        is_held = (
            hold is not None
            and decision is not None
            and only is None
            and self._is_busy(decision.candidate, hold.hold_s * facts.fleet_rate)
        )
        return Explanation(facts, len(request.chain), token_ids is not None, candidates, decision, is_held)

    def _facts(
        self,
        request: Request,
        now_s: float,
        without: Collection[str],
        ahead: dict[int, float] | None = None,
        room: Collection[int] = (),
    ) -> tuple[Facts, list[Candidate]]:
        """`ahead`: held work that goes before this request, which is held itself, by slot; None: all that is held.

        `room`: slots that are to be among the candidates even if only some are.
        """
        prompt, chain, n_tokens = request.prompt, request.chain, request.n_tokens
        instances = self.fleet.candidates(prompt.model, now_s, without)
        matched, told = self._matcher.match(request) if ahead is None else self._matcher.glance(request, now_s)
        sampling = self._sampling
        if sampling is not None and len(instances) > sampling.sample_above:
            instances = self._some(instances, matched, sampling, room)
        load = self.load
        if ahead is None:
            ahead = self.held.by_slot
        fleet_rate, cold_work = load.fleet_rate(), load.work(0, n_tokens)
        candidates = []
        for instance in instances:
            slot = instance.slot
            matched_tokens, work = 0, cold_work
            if slot in matched:
                matched_tokens = matched[slot]
                work = load.work(matched_tokens, n_tokens)
            own, rate, progress = load.observe(slot, now_s, fleet_rate)
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
                    self._capacities[instance.name],
                    ahead.get(slot, 0.0) if ahead else 0.0,
                    slot in told,
                )
            )
        held_work = self.held.work
        return Facts(prompt, n_tokens, now_s, fleet_rate, load.mean_work, chain, held_work), candidates

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

    def _decide(self, facts: Facts, candidates: list[Candidate], only: str | None) -> Decision:
        for candidate in candidates if only is not None else ():
            if candidate.instance.name == only:
                return Decision(candidate, Reason.STORED)
        return self._pick(facts, candidates)

    def _pick(self, facts: Facts, candidates: list[Candidate]) -> Decision:
        try:
            # A copy: what a policy does to its list must not reach the one that load would decide on.
            decision = self._policy.pick(facts, tuple(candidates), self._rng)
            _check(decision, candidates)
        except Exception as fault:  # noqa: BLE001  a policy's fault must never cost a request
            self.n_policy_faults += 1
            self.last_policy_fault = fault
            return Decision(least_outstanding(candidates, self._rng), Reason.FALLBACK)
        return decision

    def _take(self, request: Request, facts: Facts, candidates: Sequence[Candidate], decision: Decision) -> Lease:
        candidate = decision.candidate
        slot = candidate.instance.slot
        if decision.reason is not Reason.FALLBACK:
            try:
                self._policy.record(facts, decision)
            except Exception as fault:  # noqa: BLE001  as above: the choice stands
                self.n_policy_faults += 1
                self.last_policy_fault = fault
        self.audit.dispatched(request, facts, candidates, decision)
        recorded = self.index.record(request.chain, slot)
        flight = self.load.begin(
            slot,
            facts.n_tokens,
            candidate.work,
            facts.now_s,
            streamed=facts.prompt.stream,
            matched_tokens=candidate.matched_tokens,
        )
        flight.request = request
        return Lease(
            self,
            decision,
            request,
            candidates=candidates,
            recorded=recorded,
            flight=flight,
            trial=self.fleet.taken(candidate.instance.name),
        )

    # ------------------------------------------------------------------ what is learned of instances

    def connect_failed(self, name: str, now_s: float, *, timed_out: bool) -> None:
        """No connection to the instance. A refusal means that nothing listens: its cache went with it."""
        self.fleet.connect_failed(name, now_s)
        if not timed_out:
            self._lost(name)

    def probe_failed(self, name: str, failure: ProbeFailure) -> None:
        if self.fleet.probe_failed(name, failure):
            self._lost(name)

    def cache_emptied(self, name: str) -> None:
        """The instance no longer holds what it held: it restarted, slept, or was reset."""
        self.index.clear(self.fleet.state(name).instance.slot)

    def trust(self, name: str) -> Trust:
        """How far what the instance says of its cache is believed."""
        return Trust.OFF if self._exact is None else self._exact.trust(self.fleet.state(name).instance.slot)

    def capacity_tokens(self, name: str) -> int:
        """Size of the instance's KV cache as far as known."""
        return self._capacities[name]

    def is_capacity_told(self, name: str) -> bool:
        """Whether `capacity_tokens` is what configuration or the instance says; else it is learned from reports."""
        return name in self._told

    def learned_capacity(self, name: str, capacity_tokens: int) -> None:
        """The instance told the size of its KV cache: its map is sized like it, whatever it reports of hits."""
        if capacity_tokens > 0:
            self._told.add(name)
            self._resize(name, capacity_tokens)

    def _reported(self, lease: Lease, cached_tokens: float) -> None:
        """`cached_tokens` in the router's tokens."""
        instance, request, index = lease.instance, lease.request, self.index
        candidate = lease.decision.candidate
        self.audit.answered(request, lease.candidates, candidate, cached_tokens)
        # What the instance said by itself says nothing of the map that stands for it otherwise.
        if instance.name in self._told or not request.chain or candidate.exact:
            return
        factor = capacity_factor(
            candidate.matched_tokens,
            cached_tokens,
            request.n_tokens,
            max(1, round(self._hasher.block_tokens * request.token_scale)),
            is_full=index.n_blocks(instance.slot) >= index.capacity_blocks(instance.slot),
        )
        if factor != 1.0:
            # Within bounds that no GPU, nor a cache beside it, is outside of.
            least, most = self._default_capacity // _LEARNED_RANGE, self._default_capacity * _LEARNED_RANGE
            self._resize(instance.name, min(most, max(least, round(self._capacities[instance.name] * factor))))

    def _resize(self, name: str, capacity_tokens: int) -> None:
        if capacity_tokens != self._capacities[name]:
            self._capacities[name] = capacity_tokens
            self.index.resize(self.fleet.state(name).instance.slot, self._blocks(capacity_tokens))
            self.audit.ladder.resize(self._fleet_blocks())

    def _lost(self, name: str) -> None:
        slot = self.fleet.state(name).instance.slot
        self.index.clear(slot)
        self.load.relearn(slot)
        self.audit.feedback.forget(slot)

    def _blocks(self, capacity_tokens: int) -> int:
        return max(1, capacity_tokens // self._hasher.block_tokens)

    def _fleet_blocks(self) -> int:
        return sum(map(self._blocks, self._capacities.values()))


def _check(decision: Decision, candidates: Sequence[Candidate]) -> None:
    """Raises ValueError for what cannot be carried out, counted or shown: policies are also other people's."""
    if decision.candidate not in candidates:
        raise ValueError(f"the policy picked {decision.candidate!r}, which is no candidate")
    if not isinstance(decision.reason, Reason):
        raise ValueError(f"the policy's reason is {decision.reason!r}, which is no Reason")  # noqa: TRY004  its value
    if decision.scores is not None and len(decision.scores) != len(candidates):
        raise ValueError(f"the policy gave {len(decision.scores)} scores for {len(candidates)} candidates")
    if decision.scores is not None and not all(isinstance(score, int | float) for score in decision.scores):
        raise ValueError("the policy gave scores that are no numbers")
