"""How much of a prompt each instance holds: as it says itself where all of it is known, else as estimated.

What an instance says is behind by the prompts that it is computing at the moment: who shares one of them will find it,
so they count as held there. Only those, and not what was sent there a while ago: of that its word is final.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import islice

from prefixroute.core.exact import ExactIndex
from prefixroute.core.index import PrefixIndex
from prefixroute.core.load import Flight, Load
from prefixroute.core.request import Request

# Of the prompts that an instance is computing, the newest: siblings in a burst are close to each other.
_MAX_COMING = 16
# Held requests are looked at again at each first byte in the fleet, a hundred of them at a time: what instances say
# is asked anew for each as rarely as this.
_GLANCE_S = 0.25

Matches = tuple[dict[int, int], Collection[int]]
"""Slot → leading tokens of the prompt that it holds, if any; and the slots whose own word it is."""


class Matcher:
    """Of one fleet. `exact`: what instances say; None: none of them says anything."""

    __slots__ = ("_block_tokens", "_exact", "_index", "_load")

    def __init__(self, index: PrefixIndex, block_tokens: int, load: Load, exact: ExactIndex | None) -> None:
        self._index = index
        self._block_tokens = block_tokens
        self._load = load
        self._exact = exact

    def match(self, request: Request) -> Matches:
        """As known now. Costs what `PrefixIndex.match` and `ExactIndex.match` cost."""
        matched = self._estimated(request)
        if request.exact is None or self._exact is None:
            return matched, ()
        return self._told(request, matched, self._exact.match(request.exact))

    def glance(self, request: Request, now_s: float) -> Matches:
        """As `match`, for a request that is looked at again and again: what instances say may be a moment old."""
        matched = self._estimated(request)
        if request.exact is None or self._exact is None:
            return matched, ()
        seen = request.seen
        if seen is None or now_s - seen[0] > _GLANCE_S:
            seen = request.seen = now_s, self._exact.match(request.exact)
        return self._told(request, matched, seen[1])

    def _estimated(self, request: Request) -> dict[int, int]:
        matched, block_tokens = self._index.match(request.chain), self._block_tokens
        if request.token_scale == 1.0:
            for slot in matched:
                matched[slot] *= block_tokens
        else:
            for slot in matched:
                matched[slot] = self._tokens(matched[slot], request)
        return matched

    def _told(self, request: Request, matched: dict[int, int], told: dict[int, int]) -> Matches:
        for slot, held_tokens in told.items():
            if flights := self._load.pending(slot):
                held_tokens = self._coming(slot, request, flights, held_tokens)  # noqa: PLW2901  and what comes
            if held_tokens:
                matched[slot] = held_tokens
            else:
                matched.pop(slot, None)
        return matched, told

    def _coming(self, slot: int, request: Request, flights: dict[Flight, None], held_tokens: int) -> int:
        """What the slot holds of the prompt once it has computed those of `flights`."""
        if request.exact is None or self._exact is None:
            return held_tokens
        others = []
        for flight in islice(reversed(flights), _MAX_COMING):
            other = flight.request
            if other is None:
                continue
            if other.exact is not None:
                others.append(other.exact)
            elif request.chain and other.chain and request.chain[0] == other.chain[0]:
                # Its tokens could not be told in time: by the keys then.
                held_tokens = max(held_tokens, self._tokens(_n_common(request.chain, other.chain), request))
        return self._exact.coming(slot, request.exact, others, held_tokens) if others else held_tokens

    def _tokens(self, n_blocks: int, request: Request) -> int:
        return int(n_blocks * self._block_tokens * request.token_scale)


def _n_common(chain: Sequence[int], other: Sequence[int]) -> int:
    return bisect_left(range(min(len(chain), len(other))), True, key=lambda i: chain[i] != other[i])
