"""Match, pick, lease: one synchronous step from a prompt to an instance.

Nothing awaits between reading the facts and recording the choice, so a burst sees itself. What is taken is given
back: a lease is a context manager, and its end returns the place in flight whatever happened in between.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random

from prefixroute.core.audit import Audit
from prefixroute.core.blocks import BYTES_PER_TOKEN, BlockHasher
from prefixroute.core.capacity import DEFAULT_CAPACITY_TOKENS, Capacities
from prefixroute.core.content import n_key_tokens
from prefixroute.core.exact import ExactIndex
from prefixroute.core.fleet import Fleet, HealthConstants, Instance, ProbeFailure
from prefixroute.core.group import Group
from prefixroute.core.guard import GuardConstants
from prefixroute.core.held import Held, HeldRequests, HoldConstants
from prefixroute.core.index import PrefixIndex
from prefixroute.core.kv_sources import Trust
from prefixroute.core.lease import Lease
from prefixroute.core.load import Load, LoadConstants
from prefixroute.core.matching import Matcher
from prefixroute.core.membership import Membership
from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason, least_outstanding
from prefixroute.core.prompt import Prompt
from prefixroute.core.request import Request
from prefixroute.core.shadow import Shadows
from prefixroute.core.survey import Sampling, Survey
from prefixroute.core.tokens import ByteTokenizer, Tokenizer
from prefixroute.core.turns import Turns
from prefixroute.errors import NoInstanceError


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


class Router:
    """The decision for one fleet. Owns the fleet's facts, the prefix index and the load; the policy only picks.

    `capacities`: KV capacity in tokens by instance name, where it is known. `exact`: what instances say they hold.
    `hold`: when requests are held back, under the router's own policy (if it `holds`) and in groups that hold; None:
    nobody ever is.
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
        holds: bool = True,
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
        """Requests held back."""
        self.n_policy_faults = 0
        """Decisions in which the policy failed, so that load decided."""
        self.last_policy_fault: Exception | None = None
        self.policy = policy
        """Read-only; see `configure`."""
        self._hold = hold
        self._holds = holds
        self._exact = exact
        self._hasher = hasher
        self._matcher = Matcher(self.index, hasher.block_tokens, self.load, exact)
        self._rng = rng
        self._tokenizer = tokenizer or ByteTokenizer()
        self.capacities = Capacities(
            instances, self.index, hasher.block_tokens, default_capacity_tokens, capacities or {}
        )
        """Sizes of KV caches as far as known."""
        self._survey = Survey(self.fleet, self._matcher, self.load, self.held, self.capacities, sampling, rng)
        self.audit = Audit(hasher.block_tokens, self.capacities.fleet_blocks, shadows)
        """What becomes of decisions."""
        self.capacities.tell(self.audit.ladder)
        for instance in instances:
            self.load.add(instance.slot)
            self.audit.feedback.add(instance.slot)
        self._turns = Turns(
            self.fleet,
            self.load,
            self.held,
            self._matcher,
            self._survey,
            hold,
            decide=self._pick,
            take=self._take,
            holds=self._may_hold,
            on_fault=self._fault,
        )
        self._members = Membership(self.fleet, self.load, self.held, self.capacities, self.audit.feedback, exact)

    # ------------------------------------------------------------------ changes while it works

    def add_instance(
        self, name: str, url: str, *, models: frozenset[str] | None = None, capacity_tokens: int | None = None
    ) -> Instance:
        """An instance joins. Nothing is known of it, and others go first until a probe has passed.

        `capacity_tokens`: where it is configured. Raises ValueError for a name that is in the fleet.
        """
        return self._members.add(name, url, models, capacity_tokens)

    def remove_instance(self, name: str) -> Instance:
        """The instance leaves, and what is known of it is forgotten. It gets nothing new; its leases end as any others.

        Raises KeyError for a name that is not in the fleet.
        """
        return self._members.remove(name)

    def leaving(self) -> dict[str, int]:
        """Removed instances that have requests under way still, and how many."""
        return self._members.leaving()

    def configure(
        self,
        *,
        policy: Policy,
        load_constants: LoadConstants,
        health: HealthConstants,
        guard: GuardConstants,
        hold: HoldConstants | None,
        holds: bool,
        sampling: Sampling | None,
        shadows: Shadows | None,
        index_bytes: int,
        default_capacity_tokens: int,
    ) -> None:
        """Decides by these from now on; see the constructor. What is known of instances stays."""
        self.policy = policy
        self._hold = hold
        self._holds = holds
        self.held.configure(hold.max_held if hold is not None else 0)
        self.load.configure(load_constants, guard)
        self.fleet.configure(health)
        self.index.configure(index_bytes)
        self.capacities.configure(default_capacity_tokens)
        self.audit.shadows = shadows
        self._survey.configure(sampling)
        self._turns.configure(hold)

    # ------------------------------------------------------------------ deciding

    def read(self, prompt: Prompt, token_ids: bytes | None = None, group: Group | None = None) -> Request:
        """`prompt` made comparable: the costly part, done once a request.

        `group`: whom it is for; None: all instances, by the router's own policy. `token_ids`: its tokens as the engine
        will see them, four bytes each, where they are known. They tell its length and what instances with KV events
        hold; what is merely estimated goes by the key, which every prompt has.
        """
        try:
            material = self._tokenizer.tokenize(prompt)
        except Exception as fault:  # noqa: BLE001  a tokenizer's fault must never cost a request
            self._fault(fault)
            material = b""
        chain = self._hasher.chain(prompt.scope, material) if material else []
        # A real tokenizer's ids do not go on as the key does.
        rest = self._hasher.rest(material) if material is prompt.key else None
        if not token_ids:
            return Request(prompt, chain, prompt.n_tokens, rest, group=group)
        # Of a batch, key and ids are the first prompt's.
        n_key, n_ids = n_key_tokens(len(prompt.key)), len(token_ids) // BYTES_PER_TOKEN
        exact = None
        if self._exact is not None:
            exact = self._exact.prompt(token_ids, model=prompt.model, salt=prompt.cache_salt)
        token_scale = n_ids / n_key_tokens(len(material)) if material else 1.0
        return Request(prompt, chain, max(1, prompt.n_tokens + n_ids - n_key), rest, exact, token_scale, group)

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
        facts, candidates = self._survey.look(request, now_s, without)
        if not candidates:
            raise NoInstanceError("no instance can take the request")
        return self._take(request, facts, candidates, self._decide(request, facts, candidates, only))

    def enter(self, request: Request, *, now_s: float, grant: Callable[[Lease | None], None]) -> Lease | Held:
        """As `lease`, but a request whose instance is busy with other prompts is held.

        `release`, to be called whenever an instance may have got room, gives the lease to `grant`: the request is
        held no longer then. Raises NoInstanceError, and TooManyRequestsError when too many are held.
        """
        facts, candidates = self._survey.look(request, now_s, ())
        if not candidates:
            raise NoInstanceError("no instance can take the request")
        decision = self._pick(request, facts, candidates)
        chosen = decision.candidate
        if not self._must_wait(request, facts, chosen):
            return self._take(request, facts, candidates, decision)
        model = request.prompt.model
        held = Held(request, now_s, grant, model if model is not None and self.fleet.knows_model(model) else None)
        wait = chosen.pending_work - chosen.head_progress + chosen.held_work
        self.held.hold(held, chosen.instance.slot, chosen.work, retry_after_s=wait / chosen.prefill_rate)
        return held

    def release(self, now_s: float) -> None:
        """Gives held requests to instances that have room, each through its `grant`; see `turns`."""
        if len(self.held):
            self._turns.release(now_s)

    def explain(
        self,
        prompt: Prompt,
        *,
        now_s: float,
        only: str | None = None,
        token_ids: bytes | None = None,
        group: Group | None = None,
    ) -> Explanation:
        """A dry run of `lease`: what it would decide now. Records nothing, and gives the dice back as they were."""
        request = self.read(prompt, token_ids, group)
        dice = self._rng.getstate()
        facts, candidates = self._survey.look(request, now_s, ())
        faults = self.n_policy_faults, self.last_policy_fault
        decision = self._decide(request, facts, candidates, only) if candidates else None
        self.n_policy_faults, self.last_policy_fault = faults
        self._rng.setstate(dice)
        is_held = decision is not None and only is None and self._must_wait(request, facts, decision.candidate)
        return Explanation(facts, len(request.chain), token_ids is not None, candidates, decision, is_held)

    def _fault(self, fault: Exception) -> None:
        self.n_policy_faults += 1
        self.last_policy_fault = fault

    def _may_hold(self, group: Group | None) -> bool:
        return self._holds if group is None else group.holds

    def _must_wait(self, request: Request, facts: Facts, chosen: Candidate) -> bool:
        """Whether the request is held back first, because its instance is busy with the prompts of others."""
        hold = self._hold
        if hold is None or not self._may_hold(request.group):
            return False
        return self._turns.is_busy(chosen, hold.hold_s * facts.fleet_rate)

    def _policy_of(self, request: Request) -> Policy:
        return self.policy if request.group is None else request.group.policy

    def _decide(self, request: Request, facts: Facts, candidates: list[Candidate], only: str | None) -> Decision:
        if only is not None:
            for candidate in candidates:
                if candidate.instance.name == only:
                    return Decision(candidate, Reason.STORED)
        return self._pick(request, facts, candidates)

    def _pick(self, request: Request, facts: Facts, candidates: list[Candidate]) -> Decision:
        try:
            # A copy: what a policy does to its list must not reach the one that load would decide on.
            decision = self._policy_of(request).pick(facts, tuple(candidates), self._rng)
            _check(decision, candidates)
        except Exception as fault:  # noqa: BLE001  a policy's fault must never cost a request
            self._fault(fault)
            return Decision(least_outstanding(candidates, self._rng), _FALLBACK)
        return decision

    def _take(self, request: Request, facts: Facts, candidates: Sequence[Candidate], decision: Decision) -> Lease:
        candidate = decision.candidate
        slot = candidate.instance.slot
        if decision.reason is not _FALLBACK:
            try:
                self._policy_of(request).record(facts, decision)
            except Exception as fault:  # noqa: BLE001  as above: the choice stands
                self._fault(fault)
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
        if request.group is not None:
            request.group.taken(slot)
        return Lease(self, decision, request, candidates, recorded, flight, self.fleet.taken(candidate.instance.name))

    # ------------------------------------------------------------------ what is learned of instances

    def connect_failed(self, name: str, now_s: float, *, timed_out: bool) -> None:
        """No connection to the instance. A refusal means that nothing listens: its cache went with it."""
        self.fleet.connect_failed(name, now_s)
        if not timed_out:
            self._lost(name)

    def probe_failed(self, name: str, failure: ProbeFailure, reason: str | None = None) -> None:
        """A probe failed. `reason`: in words, for people."""
        if self.fleet.probe_failed(name, failure, reason):
            self._lost(name)

    def cache_emptied(self, name: str) -> None:
        """The instance no longer holds what it held: it restarted, slept, or was reset."""
        self.index.clear(self._slot(name))

    def trust(self, name: str) -> Trust:
        """How far what the instance says of its cache is believed."""
        return Trust.OFF if self._exact is None else self._exact.trust(self._slot(name))

    def capacity_tokens(self, name: str) -> int:
        """Size of the instance's KV cache as far as known."""
        return self.capacities.by_slot[self._slot(name)]

    def is_capacity_told(self, name: str) -> bool:
        """Whether `capacity_tokens` is what configuration or the instance says; else it is learned from reports."""
        return self.capacities.is_told(self._slot(name))

    def learned_capacity(self, name: str, capacity_tokens: int) -> None:
        """The instance told the size of its KV cache: its map is sized like it, whatever it reports of hits."""
        self.capacities.told(self._slot(name), capacity_tokens)

    def forget_capacity(self, name: str) -> None:
        """The size is no longer configured: it is unknown until the instance tells it, or its reports do."""
        self.capacities.unknown(self._slot(name))

    def reported(self, lease: Lease, cached_tokens: float) -> None:
        """By `Lease.reported`. `cached_tokens` in the router's tokens."""
        self.audit.answered(lease.request, lease.candidates, lease.decision.candidate, cached_tokens)
        self.capacities.reported(lease, cached_tokens)

    def _lost(self, name: str) -> None:
        slot = self._slot(name)
        self.index.clear(slot)
        self.load.relearn(slot)
        self.audit.feedback.forget(slot)

    def _slot(self, name: str) -> int:
        return self.fleet.state(name).instance.slot


_NUMBERS = (float, int)
# Python 3.11 takes as long to find a member of an enum as to call a function.
_FALLBACK = Reason.FALLBACK
_PLAIN_NUMBERS = frozenset(_NUMBERS)


def _check(decision: Decision, candidates: Sequence[Candidate]) -> None:
    """Raises ValueError for what cannot be carried out, counted or shown: policies are also other people's."""
    if decision.candidate not in candidates:
        raise ValueError(f"the policy picked {decision.candidate!r}, which is no candidate")
    if not isinstance(decision.reason, Reason):
        raise ValueError(f"the policy's reason is {decision.reason!r}, which is no Reason")  # noqa: TRY004  its value
    scores = decision.scores
    if scores is None:
        return
    if len(scores) != len(candidates):
        raise ValueError(f"the policy gave {len(scores)} scores for {len(candidates)} candidates")
    if _PLAIN_NUMBERS.issuperset(map(type, scores)):
        return
    for score in scores:
        if not isinstance(score, _NUMBERS):
            raise ValueError("the policy gave scores that are no numbers")  # noqa: TRY004  its value, again
