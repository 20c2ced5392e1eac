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

from prefixroute.core.guard import Guard, GuardConstants

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
        "cold_work",
        "load",
        "n_tokens",
        "pending",
        "prefilled_by_s",
        "promised_work",
        "request",
        "streamed",
        "work",
    )

    def __init__(self, load: "InstanceLoad", n_tokens: int, work: float, begun_s: float, streamed: bool) -> None:
        # The object that was counted up is the one that is counted down, whatever became of the instance.
        self.load = load
        self.n_tokens = n_tokens
        self.work = work
        # For the guard: work if nothing, and if all of the match, is cached there.
        self.cold_work = self.promised_work = work
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
        "_learned_s",
        "_learned_tokens",
        "_silent",
        "_silent_work",
        "_waiting",
        "in_flight",
        "in_flight_tokens",
        "last_first_byte_s",
        "pending_work",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.pending_work = 0.0
        self.last_first_byte_s = float("-inf")
        self._learned_tokens = 0.0
        self._learned_s = 0.0
        self._in_fleet = True
        # Flights without a first byte, in order of dispatch.
        self._waiting: dict[Flight, None] = {}
        # Those of them that will not tell when prefill is over, in order of dispatch; and their work.
        self._silent: deque[Flight] = deque()
        self._silent_work = 0.0

    def _settle(self, now_s: float) -> None:
        """Takes silent flights whose prefill must be over by now out of what is pending."""
        silent = self._silent
        while silent and (not silent[0].pending or silent[0].prefilled_by_s <= now_s):
            flight = silent.popleft()
            if flight.pending:
                # Its end is not observed: the next head starts when this one is thought to have ended.
                self.last_first_byte_s = max(self.last_first_byte_s, flight.prefilled_by_s)
                self._not_pending(flight)

    def _not_pending(self, flight: Flight) -> None:
        flight.pending = False
        del self._waiting[flight]
        # An empty instance has nothing pending, whatever floating point has left over.
        self.pending_work = self.pending_work - flight.work if self._waiting else 0.0
        if not flight.streamed:
            self._silent_work = self._silent_work - flight.work if self._waiting else 0.0
        elif not self._waiting:
            self._silent_work = 0.0


class Load:
    """The load of a fleet, by instance slot."""

    __slots__ = ("_by_slot", "_constants", "_learned_s", "_learned_tokens", "guard", "mean_work")

    def __init__(self, constants: LoadConstants | None = None, guard: GuardConstants | None = None) -> None:
        self._constants = constants or LoadConstants()
        self._by_slot: dict[int, InstanceLoad] = {}
        self._learned_tokens = 0.0
        self._learned_s = 0.0
        self.guard = Guard(guard)
        self.mean_work = self._constants.mean_work_tokens
        """Running mean of the work dispatched, tokens."""

    def configure(self, constants: LoadConstants, guard: GuardConstants) -> None:
        """Other constants from now on. What was learned stays."""
        self._constants = constants
        self.guard.configure(guard)

    def add(self, slot: int) -> None:
        self._by_slot[slot] = InstanceLoad()

    def remove(self, slot: int) -> None:
        """The instance leaves the fleet. Its flights go on and end as any other."""
        self.relearn(slot)
        self._by_slot.pop(slot)._in_fleet = False

    def of(self, slot: int) -> InstanceLoad:
        return self._by_slot[slot]

    def pending(self, slot: int) -> dict[Flight, None]:
        """Flights without a first byte, in order of dispatch. Read-only."""
        return self._by_slot[slot]._waiting

    def relearn(self, slot: int) -> None:
        """Forgets the learned speed: another machine may answer at this address."""
        load = self._by_slot[slot]
        self._learned_tokens -= load._learned_tokens
        self._learned_s -= load._learned_s
        load._learned_tokens = load._learned_s = 0.0

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
        return prefill_work(matched_tokens, n_new if n_new > 0 else 1, self._constants.position_scale_tokens)

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
        load, constants = self._by_slot[slot], self._constants
        if load._silent:
            load._settle(now_s)
        # Its own speed as far as known, else the fleet's.
        rate = (load._learned_tokens + fleet_rate * constants.rate_weight_s) / (
            load._learned_s + constants.rate_weight_s
        )
        waiting = load._waiting
        if not waiting:
            return load, rate, 0.0
        # In line and without max() and min(): the most frequent of all calls.
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
        load = self._by_slot[slot]
        return load.pending_work - progress - (0.0 if load._learned_s else load._silent_work)

    def begin(
        self, slot: int, n_tokens: int, work: float, now_s: float, *, streamed: bool, matched_tokens: int = 0
    ) -> Flight:
        """Counts an attempt on `slot` from now on."""
        load = self._by_slot[slot]
        flight = Flight(load, n_tokens, work, now_s, streamed)
        if matched_tokens:
            flight.cold_work = self.promised_work(0, n_tokens)
            flight.promised_work = self.promised_work(matched_tokens, n_tokens)
        if not streamed:
            _, rate, progress = self.observe(slot, now_s, self.fleet_rate())
            flight.prefilled_by_s = now_s + (load.pending_work - progress + work) / rate
            load._silent.append(flight)
            load._silent_work += work
        load.in_flight += 1
        load.in_flight_tokens += n_tokens
        load.pending_work += work
        load._waiting[flight] = None
        self.mean_work += self._constants.mean_work_weight * (work - self.mean_work)
        return flight

    def first_byte(self, flight: Flight, now_s: float, *, learn: bool = True) -> None:
        """The answer's body has begun, so prefill is over. `learn`: it was a real answer, fit to time prefill by."""
        load = flight.load
        if load._silent:
            load._settle(now_s)  # what was computed silently before is none of this flight's time
        if not flight.pending:
            return
        load._not_pending(flight)
        if not learn:
            return  # refused at once, perhaps: it says nothing of the prefill under way
        if flight.streamed and load._in_fleet:
            took_s = now_s - max(flight.begun_s, load.last_first_byte_s)
            if took_s > 0:
                self.guard.observe(flight.cold_work, flight.promised_work, took_s * self._relative_speed(load))
                if flight.work >= self._constants.min_sample_tokens:
                    self._learn(load, flight.work, took_s)
        load.last_first_byte_s = max(load.last_first_byte_s, now_s)

    def end(self, flight: Flight) -> None:
        """Gives back what `begin` took."""
        load = flight.load
        if flight.pending:
            load._not_pending(flight)
        load.in_flight -= 1
        load.in_flight_tokens -= flight.n_tokens

    def _relative_speed(self, load: InstanceLoad) -> float:
        """Of an instance, to the fleet's: prefill times of slow and fast ones are compared."""
        weight_s = self._constants.rate_weight_s
        fleet_rate = self.fleet_rate()
        return (load._learned_tokens + fleet_rate * weight_s) / (load._learned_s + weight_s) / fleet_rate

    def _learn(self, load: InstanceLoad, tokens: float, took_s: float) -> None:
        constants = self._constants
        fleet_tokens = load._learned_tokens + self.fleet_rate() * constants.rate_weight_s
        rate = fleet_tokens / (load._learned_s + constants.rate_weight_s)
        took_s = min(took_s, _LONGEST * tokens / rate)
        decay = constants.rate_decay
        old_tokens, old_s = load._learned_tokens, load._learned_s
        load._learned_tokens = decay * old_tokens + tokens
        load._learned_s = decay * old_s + took_s
        self._learned_tokens += load._learned_tokens - old_tokens
        self._learned_s += load._learned_s - old_s
