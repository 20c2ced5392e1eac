"""Instances that join a fleet at work, and leave it."""

from prefixroute.core.capacity import Capacities
from prefixroute.core.exact import ExactIndex
from prefixroute.core.feedback import Feedback
from prefixroute.core.fleet import Fleet, Instance
from prefixroute.core.held import HeldRequests
from prefixroute.core.load import InstanceLoad, Load


class Membership:
    """Of one fleet: all that knows instances by slot learns of it here, at once."""

    __slots__ = ("_capacities", "_exact", "_feedback", "_fleet", "_held", "_leaving", "_load")

    def __init__(
        self,
        fleet: Fleet,
        load: Load,
        held: HeldRequests,
        capacities: Capacities,
        feedback: Feedback,
        exact: ExactIndex | None,
    ) -> None:
        self._fleet = fleet
        self._load = load
        self._held = held
        self._capacities = capacities
        self._feedback = feedback
        self._exact = exact
        # Removed, with requests under way when last looked at.
        self._leaving: list[tuple[Instance, InstanceLoad]] = []

    def add(self, name: str, url: str, models: frozenset[str] | None, capacity_tokens: int | None) -> Instance:
        """As `Router.add_instance`."""
        instance = self._fleet.add(name, url, models)
        self._load.add(instance.slot)
        self._capacities.add(instance.slot, capacity_tokens)
        self._feedback.add(instance.slot)
        return instance

    def remove(self, name: str) -> Instance:
        """As `Router.remove_instance`."""
        instance = self._fleet.remove(name)
        slot = instance.slot
        self._leaving = [*self._still_leaving(), (instance, self._load.of(slot))]
        self._held.remove(slot)
        self._load.remove(slot)
        self._capacities.remove(slot)
        self._feedback.remove(slot)
        if self._exact is not None:
            self._exact.remove(slot)
        return instance

    def leaving(self) -> dict[str, int]:
        """Removed instances that have requests under way still, and how many."""
        self._leaving = self._still_leaving()
        n_by_name: dict[str, int] = {}
        for instance, load in self._leaving:
            n_by_name[instance.name] = n_by_name.get(instance.name, 0) + load.in_flight
        return n_by_name

    def _still_leaving(self) -> list[tuple[Instance, InstanceLoad]]:
        return [(instance, load) for instance, load in self._leaving if load.in_flight]
