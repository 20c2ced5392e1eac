"""Some instances of a fleet under a policy of their own.

A router has one policy for all its instances. A request may belong to a group instead: then only the group's members
are candidates, and the group's policy picks. Groups may share instances; what is known of an instance (its health,
its load, its map of prefixes) is one and the same for all of them.
"""

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason, StatelessPolicy

if TYPE_CHECKING:
    from prefixroute.core.survey import Sampling


class Group:
    """Who may take its requests, and by which rule.

    `members`: names of instances, in the fleet or not; None: all. `machines`: members are copies of one model, and
    these are the machines they run on, by name; a copy's requests in flight are then those of this group alone,
    whatever else its server does. `holds`: requests whose instance is busy are held back, as the router's constants
    say. `sampling`: in a large group only some are weighed against each other; None: all always. `strategy`: what
    people call the rule.
    """

    __slots__ = ("_in_flight", "holds", "machines", "members", "policy", "sampling", "strategy")

    def __init__(
        self,
        policy: Policy,
        members: Collection[str] | None = None,
        *,
        machines: Mapping[str, str] | None = None,
        holds: bool = False,
        sampling: "Sampling | None" = None,
        strategy: str = "",
    ) -> None:
        self.policy = policy
        self.strategy = strategy
        self.members = None if members is None else frozenset(members)
        self.machines = machines
        self.holds = holds
        self.sampling = sampling
        # By slot: who has the name of an instance that left has none of its requests.
        self._in_flight: dict[int, int] = {}

    def only(self, name: str) -> "Group":
        """The same group where a request may go to one member alone, and waits for nobody but it."""
        narrow = Group(_ONLY_ONE, (name,), machines=self.machines, strategy=self.strategy)
        narrow._in_flight = self._in_flight
        return narrow

    def succeeds(self, earlier: "Group") -> None:
        """Requests under way in `earlier` count here as well: it was this group before the configuration changed."""
        self._in_flight = earlier._in_flight

    def tell(self, candidates: Sequence[Candidate]) -> None:
        """Tells candidates what is the group's alone to know: machines, and requests in flight on copies."""
        if self.machines is None:
            return
        for candidate in candidates:
            candidate.machine = self.machines.get(candidate.instance.name, "")
            candidate.in_flight = self._in_flight.get(candidate.instance.slot, 0)

    def taken(self, slot: int) -> None:
        """A member was given a request of the group."""
        if self.machines is not None:
            self._in_flight[slot] = self._in_flight.get(slot, 0) + 1

    def released(self, slot: int) -> None:
        """That request is over."""
        if self.machines is not None:
            n = self._in_flight[slot] - 1
            if n:
                self._in_flight[slot] = n
            else:
                del self._in_flight[slot]


class _OnlyOne(StatelessPolicy):
    """Where there is nothing to choose."""

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        return Decision(candidates[0], Reason.SESSION)


_ONLY_ONE = _OnlyOne()
