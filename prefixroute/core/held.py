"""Requests that the router holds back because the instance they want is busy with the prompts of others.

Once sent, a request waits in its instance's own queue and cannot be moved. Held here, it may still go elsewhere, and
those that share a warm prefix go before those that do not. A held request is *bound* to the instance it would have
been sent to, so that those who come after it see its work.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import dropwhile, islice
from math import ceil
from typing import TYPE_CHECKING

from prefixroute.core.group import Group
from prefixroute.core.request import Request
from prefixroute.errors import TooManyRequestsError

if TYPE_CHECKING:
    from prefixroute.core.lease import Lease

Kind = tuple[str | None, Group | None]
"""Model and group."""

# A place among the held is free when the first of them goes, long before all of their work is done.
_LONGEST_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class HoldConstants:
    """When requests are held, and in which order they go. Defaults as found by simulating fleets."""

    # Pending prefill, as time at the fleet's speed, above which an instance gets no more.
    hold_s: float = 2.0
    # How many of the oldest are looked at when an instance has room.
    hold_batch: int = 128
    # What a second of waiting is worth, in tokens of prefill work.
    hold_age_tokens_per_s: float = 500
    max_held: int = 2_048


class Held:
    """A request that is held. When it is so no longer, `grant` gets its lease; None: nobody can take it now.

    `model`: None when no instance lists it, so that anybody may take the request (of its group, where it has one).
    """

    __slots__ = ("grant", "kind", "request", "since_s", "slot", "work")

    def __init__(
        self, request: Request, since_s: float, grant: "Callable[[Lease | None], None]", model: str | None = None
    ) -> None:
        self.request = request
        self.kind: Kind = model, request.group
        """Those who are equal in this may go to the same instances."""
        self.since_s = since_s
        self.grant = grant
        self.slot = -1
        self.work = 0.0


class HeldRequests:
    """All that are held, in order of arrival, and their work by the instance that they are bound to."""

    __slots__ = ("_by_kind", "_held", "_max_held", "by_slot")

    def __init__(self, max_held: int) -> None:
        self._max_held = max_held
        self._held: dict[Held, None] = {}
        self._by_kind: dict[Kind, int] = {}
        self.by_slot: dict[int, float] = {}
        """Prefill work of those bound to each slot, tokens. Read-only."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def work(self) -> float:
        """Prefill work of all of them, tokens."""
        return sum(self.by_slot.values(), 0.0)

    def __contains__(self, held: Held) -> bool:
        return held in self._held

    @property
    def kinds(self) -> Iterable[Kind]:
        """Of those that are held."""
        return self._by_kind

    def oldest(
        self,
        n: int,
        kinds: Collection[Kind],
        *,
        bound_to: Collection[int] | None = None,
        behind: Held | None = None,
    ) -> list[Held]:
        """The `n` oldest of these kinds; only those bound to these slots or to none, and who came after `behind`."""
        coming = iter(self._held)
        if behind is not None:
            coming = dropwhile(lambda held: held is not behind, coming)
            next(coming, None)
        fit = (
            held
            for held in coming
            if held.kind in kinds and (bound_to is None or held.slot < 0 or held.slot in bound_to)
        )
        return list(islice(fit, n))

    def hold(self, held: Held, slot: int, work: float, *, retry_after_s: float) -> None:
        """Raises TooManyRequestsError when there is no room."""
        if len(self._held) >= self._max_held:
            raise TooManyRequestsError(
                "all instances are busy, and too many requests wait already",
                ceil(min(_LONGEST_RETRY_AFTER_S, retry_after_s)),
            )
        self._held[held] = None
        self._by_kind[held.kind] = self._by_kind.get(held.kind, 0) + 1
        self.bind(held, slot, work)

    def bind(self, held: Held, slot: int, work: float) -> None:
        """It would be sent to `slot` now, where it is `work`."""
        self._unbind(held)
        held.slot, held.work = slot, work
        self.by_slot[slot] = self.by_slot.get(slot, 0.0) + work

    def remove(self, slot: int) -> None:
        """The instance leaves the fleet: who was bound to it is bound to nobody until it is looked at again."""
        if self.by_slot.pop(slot, None) is not None:
            for held in self._held:
                if held.slot == slot:
                    held.slot = -1

    def configure(self, max_held: int) -> None:
        """Another bound from now on; who is held stays."""
        self._max_held = max_held

    def leave(self, held: Held) -> bool:
        """It is held no longer. False: it was not (any more)."""
        if held not in self._held:
            return False
        del self._held[held]
        self._unbind(held)
        self._by_kind[held.kind] -= 1
        if not self._by_kind[held.kind]:
            del self._by_kind[held.kind]
        if not self._held:
            self.by_slot.clear()  # whatever floating point has left over
        return True

    def _unbind(self, held: Held) -> None:
        if held.slot >= 0:
            self.by_slot[held.slot] -= held.work
            held.slot = -1
