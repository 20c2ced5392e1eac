"""What each instance is doing, as this router saw it: in flight, prefill not yet answered, speed learned.

Work is counted in tokens of prefill at the start of a prompt (`prefill_work`), time in monotonic seconds.
Everything is taken at the decision, not at the answer: a burst must see itself.

A *flight* is one attempt under way. Its first body byte says that its prefill is over. An answer that is not
streamed hides that moment (its first byte is its last), so such a flight is taken to be past its prefill when
the clock, at the learned speed, says so; nothing is learned from it.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixroute.core.guard import MIN_COLD_TOKENS, Guard, GuardConstants

if TYPE_CHECKING:
    from prefixroute.core.request import Request


# A prefill that takes longer than so many times what was expected teaches no more than that: one stall of a minute
# (an engine that compiles) would make a fleet seem thirty times slower, for hundreds of requests. What is really so
# slow is learned in a dozen.
_LONGEST = 10.0


@dataclass(frozen=True, slots=True)
class LoadConstants:
    """Constants of the learned speeds; defaults as found by simulating fleets."""

    position_scale_tokens: float = 32_000
    prior_prefill_tokens_per_s: float = 12_000
    prior_weight_s: float = 2
    rate_weight_s: float = 20
    rate_decay: float = 0.98
    min_sample_tokens: float = 256
    mean_work_tokens: float = 2_000
    mean_work_weight: float = 0.01
    head_progress_cap: float = 0.9
    # A prefill that has taken so many times what was expected, and so much more, says that its instance is slower than
    # learned, and the longer it takes the more: one that hangs must not look as if it were about to answer.
    stall_ratio: float = 4
    stall_s: float = 5


def prefill_work(cached_tokens: float, new_tokens: float, position_scale_tokens: float) -> float:
    """Work of computing `new_tokens` behind `cached_tokens`, in tokens: attention grows with position."""
    return new_tokens * (1 + (cached_tokens + new_tokens / 2) / position_scale_tokens)


class Flight:
    """One attempt under way on one instance. Made by `Load.begin`, ended exactly once by `Load.end`."""

    __slots__ = (
        "begun_s",
        "load",
        "matched_tokens",
        "n_tokens",
        "pending",
        "prefilled_by_s",
        "request",
        "streamed",
        "work",
    )

    def __init__(
        self, load: "InstanceLoad", n_tokens: int, work: float, begun_s: float, streamed: bool, matched_tokens: int
    ) -> None:
        # The object that was counted up is the one that is counted down, whatever became of the instance.
        self.load = load
        self.n_tokens = n_tokens
        self.work = work
        self.matched_tokens = matched_tokens
        self.begun_s = begun_s
        self.streamed = streamed
        # What it was begun for, where somebody wants to know.
        self.request: Request | None = None
        self.pending = True
        # For flights that are not streamed: when prefill should be over.
        self.prefilled_by_s = 0.0


class InstanceLoad:
    """The load of one instance. Read-only outside this module."""

    __slots__ = (
        "_in_fleet",
        "_silent_work",
        "in_flight",
        "in_flight_tokens",
        "last_first_byte_s",
        "learned_s",
        "learned_tokens",
        "pending_work",
        "silent",
        "waiting",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.pending_work = 0.0
        self.last_first_byte_s = float("-inf")
        # Decayed sums of prefills that were timed: their quotient is its speed.
        self.learned_tokens = 0.0
        self.learned_s = 0.0
        self._in_fleet = True
        # Flights without a first byte, in order of dispatch.
        self.waiting: dict[Flight, None] = {}
        # Those of them that will not tell when prefill is over, in order of dispatch; and their work.
        self.silent: deque[Flight] = deque()
        self._silent_work = 0.0

    def _settle(self, now_s: float) -> None:
        """Takes silent flights whose prefill must be over by now out of what is pending."""
        silent = self.silent
        while silent and (not silent[0].pending or silent[0].prefilled_by_s <= now_s):
            flight = silent.popleft()
            if flight.pending:
                # Its end is not observed: the next head starts when this one is thought to have ended.
                self.last_first_byte_s = max(self.last_first_byte_s, flight.prefilled_by_s)
                self._not_pending(flight)

    def _not_pending(self, flight: Flight) -> None:
        flight.pending = False
        del self.waiting[flight]
        # An empty instance has nothing pending, whatever floating point has left over.
        self.pending_work = self.pending_work - flight.work if self.waiting else 0.0
        if not flight.streamed:
            self._silent_work = self._silent_work - flight.work if self.waiting else 0.0
        elif not self.waiting:
            self._silent_work = 0.0


class Load:
    """The load of a fleet, by instance slot."""

    __slots__ = ("_constants", "_learned_s", "_learned_tokens", "by_slot", "guard", "mean_work", "rate_weight_s")

    def __init__(self, constants: LoadConstants | None = None, guard: GuardConstants | None = None) -> None:
        self._constants = constants or LoadConstants()
        self.rate_weight_s = self._constants.rate_weight_s
        """What the fleet's speed counts for in an instance's own, as seconds of prefill."""
        self.by_slot: dict[int, InstanceLoad] = {}
        """Read-only."""
        self._learned_tokens = 0.0
        self._learned_s = 0.0
        self.guard = Guard(guard)
        self.mean_work = self._constants.mean_work_tokens
        """Running mean of the work dispatched, tokens."""

    def configure(self, constants: LoadConstants, guard: GuardConstants) -> None:
        """Other constants from now on. What was learned stays."""
        self._constants = constants
        self.rate_weight_s = constants.rate_weight_s
        self.guard.configure(guard)

    def add(self, slot: int) -> None:
        self.by_slot[slot] = InstanceLoad()

    def remove(self, slot: int) -> None:
        """The instance leaves the fleet. Its flights go on and end as any other."""
        self.relearn(slot)
        self.by_slot.pop(slot)._in_fleet = False

    def of(self, slot: int) -> InstanceLoad:
        return self.by_slot[slot]

    def pending(self, slot: int) -> dict[Flight, None]:
        """Flights without a first byte, in order of dispatch. Read-only."""
        return self.by_slot[slot].waiting

    def relearn(self, slot: int) -> None:
        """Forgets the learned speed: another machine may answer at this address."""
        load = self.by_slot[slot]
        self._learned_tokens -= load.learned_tokens
        self._learned_s -= load.learned_s
        load.learned_tokens = load.learned_s = 0.0

    def work(self, matched_tokens: int, n_tokens: int) -> float:
        """Prefill work of a prompt of `n_tokens` of which `matched_tokens` are cached. At least one is computed.

        A match counts for as much as the guard lets it.
        """
        promised = self.promised_work(matched_tokens, n_tokens)
        weight = self.guard.weight
        if weight == 1.0 or not matched_tokens:
            return promised
        return weight * promised + (1 - weight) * self.promised_work(0, n_tokens)

    def promised_work(self, matched_tokens: int, n_tokens: int) -> float:
        """As `work`, of a match that is worth what it promises."""
        n_new = n_tokens - matched_tokens
        if n_new < 1:
            n_new = 1
        # `prefill_work`, in line.
        return n_new * (1 + (matched_tokens + n_new / 2) / self._constants.position_scale_tokens)

    def fleet_rate(self) -> float:
        """Prefill speed of the fleet, tokens of work per second."""
        constants = self._constants
        return (self._learned_tokens + constants.prior_prefill_tokens_per_s * constants.prior_weight_s) / (
            self._learned_s + constants.prior_weight_s
        )

    def observe(self, slot: int, now_s: float, fleet_rate: float) -> tuple[InstanceLoad, float, float]:
        """Load of an instance now, its speed (tokens/s), and the work already done on its oldest prefill (tokens).

        `fleet_rate` as `fleet_rate()` gives it: asked for once a decision. The speed falls while the oldest prefill
        takes far longer than expected, and nothing of it is taken for done.
        """
        load, constants = self.by_slot[slot], self._constants
        if load.silent:
            load._settle(now_s)
        # Its own speed as far as known, else the fleet's; `survey` has it in line.
        rate = (load.learned_tokens + fleet_rate * constants.rate_weight_s) / (load.learned_s + constants.rate_weight_s)
        waiting = load.waiting
        if not waiting:
            return load, rate, 0.0
        # In line and without max() and min(): a most frequent call.
        head = next(iter(waiting))
        since_s, last_s = head.begun_s, load.last_first_byte_s
        progress = rate * (now_s - (last_s if last_s > since_s else since_s))  # noqa: FURB136
        most = constants.head_progress_cap * head.work
        if progress <= most:
            return load, rate, progress if progress > 0 else 0.0
        patience = constants.stall_ratio * head.work + constants.stall_s * rate
        if progress > patience:
            return load, rate * patience / progress, 0.0
        return load, rate, most

    def known_backlog(self, slot: int, progress: float) -> float:
        """Work pending there, less the `progress` on it, as far as it is known well enough to keep others waiting.

        Where no speed was ever measured, when silent flights are past their prefill is a guess: it must not make a fast
        instance as slow as it was assumed to be.
        """
        load = self.by_slot[slot]
        return load.pending_work - progress - (0.0 if load.learned_s else load._silent_work)

    def begin(
        self, slot: int, n_tokens: int, work: float, now_s: float, *, streamed: bool, matched_tokens: int = 0
    ) -> Flight:
        """Counts an attempt on `slot` from now on."""
        load = self.by_slot[slot]
        flight = Flight(load, n_tokens, work, now_s, streamed, matched_tokens)
        if not streamed:
            _, rate, progress = self.observe(slot, now_s, self.fleet_rate())
            flight.prefilled_by_s = now_s + (load.pending_work - progress + work) / rate
            load.silent.append(flight)
            load._silent_work += work
        load.in_flight += 1
        load.in_flight_tokens += n_tokens
        load.pending_work += work
        load.waiting[flight] = None
        self.mean_work += self._constants.mean_work_weight * (work - self.mean_work)
        return flight

    def first_byte(self, flight: Flight, now_s: float, *, learn: bool = True) -> None:
        """The answer's body has begun, so prefill is over. `learn`: it was a real answer, fit to time prefill by."""
        load = flight.load
        if load.silent:
            load._settle(now_s)  # what was computed silently before is none of this flight's time
        if not flight.pending:
            return
        load._not_pending(flight)
        if not learn:
            return  # refused at once, perhaps: it says nothing of the prefill under way
        if flight.streamed and load._in_fleet:
            took_s = now_s - max(flight.begun_s, load.last_first_byte_s)
            if took_s > 0:
                self._learn(load, flight, took_s)
        if now_s > load.last_first_byte_s:
            load.last_first_byte_s = now_s

    def end(self, flight: Flight) -> None:
        """Gives back what `begin` took."""
        load = flight.load
        if flight.pending:
            load._not_pending(flight)
        load.in_flight -= 1
        load.in_flight_tokens -= flight.n_tokens

    def _learn(self, load: InstanceLoad, flight: Flight, took_s: float) -> None:
        """The prefill of a flight took so long, alone."""
        constants, tokens = self._constants, flight.work
        old_tokens, old_s, weight_s = load.learned_tokens, load.learned_s, constants.rate_weight_s
        fleet_rate = self.fleet_rate()
        rate = (old_tokens + fleet_rate * weight_s) / (old_s + weight_s)
        matched_tokens = flight.matched_tokens
        cold = self.promised_work(0, flight.n_tokens) if matched_tokens else tokens
        if cold >= MIN_COLD_TOKENS:
            promised = self.promised_work(matched_tokens, flight.n_tokens) if matched_tokens else tokens
            # Prefill times of slow and fast instances are compared.
            self.guard.observe(cold, promised, took_s * (rate / fleet_rate))
        if tokens < constants.min_sample_tokens:
            return
        took_s = min(took_s, _LONGEST * tokens / rate)
        decay = constants.rate_decay
        load.learned_tokens = decay * old_tokens + tokens
        load.learned_s = decay * old_s + took_s
        self._learned_tokens += load.learned_tokens - old_tokens
        self._learned_s += load.learned_s - old_s
