"""Whose turn it is: held requests go to instances that have room.

Of the oldest, those with the least left to compute go first, weighed against how long they have waited. Only of those
whose model somebody with room may serve: others would hide them. Those that nobody can take any more are told so. When
all of the oldest wait for others, those behind them who would go where there is room are looked at as well: else a
prefix that is worth waiting for could keep everybody from idle instances.
"""

from collections.abc import Callable, Sequence
from math import inf

from prefixroute.core.fleet import Fleet
from prefixroute.core.group import Group
from prefixroute.core.held import Held, HeldRequests, HoldConstants, Kind
from prefixroute.core.lease import Lease
from prefixroute.core.load import Load
from prefixroute.core.matching import Matcher
from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.core.request import Request
from prefixroute.core.survey import Survey


class Turns:
    """Of one fleet. `decide` and `take`: as for a request that comes. `holds`: whether requests of a group are held.

    `on_fault`: is told what `decide` or `take` raised.
    """

    __slots__ = ("_decide", "_fleet", "_held", "_hold", "_holds", "_load", "_matcher", "_on_fault", "_survey", "_take")

    def __init__(
        self,
        fleet: Fleet,
        load: Load,
        held: HeldRequests,
        matcher: Matcher,
        survey: Survey,
        hold: HoldConstants | None,
        *,
        decide: Callable[[Request, Facts, list[Candidate]], Decision],
        take: Callable[[Request, Facts, Sequence[Candidate], Decision], Lease],
        holds: Callable[[Group | None], bool],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._fleet = fleet
        self._load = load
        self._held = held
        self._matcher = matcher
        self._survey = survey
        self._hold = hold
        self._decide = decide
        self._take = take
        self._holds = holds
        self._on_fault = on_fault

    def configure(self, hold: HoldConstants | None) -> None:
        """By these from now on; None: nobody is held any longer."""
        self._hold = hold

    def is_busy(self, candidate: Candidate, limit: float) -> bool:
        """Whether what is pending there keeps a prompt waiting for longer than the limit, in tokens."""
        if candidate.pending_work <= 0:
            return False
        return self._load.known_backlog(candidate.instance.slot, candidate.head_progress) > limit

    def release(self, now_s: float) -> None:
        """Gives held requests, of which there are some, to instances that have room, each through its `grant`."""
        # Held under constants that hold nobody any more: all go.
        hold = self._hold or HoldConstants(hold_s=inf, hold_batch=len(self._held))
        fleet_rate = self._load.fleet_rate()
        limit = hold.hold_s * fleet_rate
        room: set[int] = set()
        able: set[Kind] = set()
        for kind in self._held.kinds:
            model, group = kind
            instances = self._fleet.candidates(model, now_s, among=None if group is None else group.members)
            free = [i.slot for i in instances if self._has_room(i.slot, now_s, fleet_rate, limit)]
            room.update(free)
            if free or not instances or not self._holds(group):
                able.add(kind)
        if not able:
            return
        n_held = len(self._held)
        oldest = self._held.oldest(hold.hold_batch, able)
        ahead: dict[int, float] = {}
        self._release(oldest, room, ahead, now_s, fleet_rate, hold)
        if len(self._held) == n_held > len(oldest):
            behind = self._held.oldest(hold.hold_batch, able, bound_to=room, behind=oldest[-1])
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
            work = self._load.work(longest, held.request.n_tokens)
            waiting.append((work - hold.hold_age_tokens_per_s * (now_s - held.since_s), held))
        waiting.sort(key=lambda entry: entry[0])
        for _, held in waiting:
            if held not in self._held:
                continue  # a grant has made it leave
            try:
                slot = self._turn(held, now_s, ahead, room, limit)
            except Exception as fault:  # noqa: BLE001  of one request, in the task of another: it asks again by itself
                self._on_fault(fault)
                if self._held.leave(held):
                    held.grant(None)
                continue
            if slot in room and not self._has_room(slot, now_s, fleet_rate, limit):
                room.discard(slot)
                if not room:
                    break

    def _turn(self, held: Held, now_s: float, ahead: dict[int, float], room: set[int], limit: float) -> int | None:
        """Weighs one held request again: it goes, is bound anew, or is told that nobody can take it. Where it went."""
        facts, candidates = self._survey.look(held.request, now_s, (), ahead, room)
        if not candidates:
            self._held.leave(held)
            held.grant(None)
            return None
        decision = self._decide(held.request, facts, candidates)
        chosen = decision.candidate
        slot = chosen.instance.slot
        if self._holds(held.request.group) and self.is_busy(chosen, limit):
            self._held.bind(held, slot, chosen.work)
            ahead[slot] = ahead.get(slot, 0.0) + chosen.work
            return None
        lease = self._take(held.request, facts, candidates, decision)
        self._held.leave(held)
        held.grant(lease)
        return slot

    def _has_room(self, slot: int, now_s: float, fleet_rate: float, limit: float) -> bool:
        _, _, progress = self._load.observe(slot, now_s, fleet_rate)
        return self._load.known_backlog(slot, progress) <= limit
