"""Sessions of which a later call waits for the answer to an earlier one, and windows of the traffic they make."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import chain, islice
from random import Random

from prefixroute.sim.workload import SimRequest

# A quarter of the router's: the engines of the simulation find prefixes as finely as that.
BLOCK_TOKENS = 64
# Few sessions are longer: as many as there ever are have begun by then.
_BEFORE_S = 300.0
# At rates beyond all sense, this many times the requests asked for must do.
_BEFORE_RATIO = 10


class Text:
    """A text as the ids of its full blocks. Two that continue the same object share its blocks and no others."""

    __slots__ = ("_fresh", "ids", "n_tokens")

    def __init__(self, fresh: Iterator[int], ids: Sequence[int] = (), n_tokens: int = 0) -> None:
        self._fresh = fresh
        self.ids = ids
        self.n_tokens = n_tokens

    def then(self, n_tokens: int) -> "Text":
        """This text and `n_tokens` that nobody else has."""
        end = self.n_tokens + n_tokens
        new = islice(self._fresh, end // BLOCK_TOKENS - len(self.ids))
        return Text(self._fresh, [*self.ids, *new], end)


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a session.

    `after`: place in the session of the call whose answer it waits for, then `pause_s` more; None: it comes `pause_s`
    after the session's beginning.
    """

    prompt: Text
    answered: Text
    pause_s: float
    after: int | None

    @property
    def idle_s(self) -> float:
        """About how long its answer takes when nobody else is there."""
        return 0.2 + 0.01 * (self.answered.n_tokens - self.prompt.n_tokens)

    def request(self, nominal_s: float, after: int | None) -> SimRequest:
        """`after`: place in the workload of the call it waits for; None if that one is not in it."""
        arrival_s = nominal_s if after is None else self.pause_s
        n_output = self.answered.n_tokens - self.prompt.n_tokens
        return SimRequest(arrival_s, self.prompt.n_tokens, n_output, self.answered.ids, after)


Draw = Callable[[Random], list[Call]]
"""Draws one session."""

# By when they would come: time, number of the session, place in it, the session, and where its earlier calls went.
_Coming = list[tuple[float, int, int, list[Call], dict[int | None, int]]]


def window(draw: Draw, n_requests: int, rate: float, key: str) -> list[SimRequest]:
    """`n_requests` at `rate` per second, in the order in which they would come if servers were idle.

    It is a window of traffic that has been going on: at its beginning sessions are under way, and at its end they are
    cut, so that all of it is equally busy. (What came before is in no cache.) `key` is the seed: another rate brings
    the same sessions closer together.
    """
    after, before, begins_after, begins_before = (Random(f"{key} {what}") for what in range(4))
    drawn: list[list[Call]] = []
    n_drawn = 0
    while n_drawn < n_requests:
        drawn.append(draw(after))
        n_drawn += len(drawn[-1])
    between_s = n_drawn / len(drawn) / rate
    coming: _Coming = []
    begin_s = 0.0
    number = 0
    while (begin_s := begin_s - begins_before.expovariate(1) * between_s) > -_before_s(n_requests, rate):
        number -= 1
        _expect(coming, begin_s, number, draw(before))
    requests: list[SimRequest] = []
    begin_s = 0.0
    for number, calls in enumerate(chain(drawn, iter(partial(draw, after), None))):
        begin_s += begins_after.expovariate(1) * between_s
        while coming and coming[0][0] <= begin_s:
            if len(requests) == n_requests:
                return requests
            nominal_s, _, place, of_session, placed = heappop(coming)
            after_place = placed.get(of_session[place].after)
            placed[place] = len(requests)
            requests.append(of_session[place].request(nominal_s, after_place))
        _expect(coming, begin_s, number, calls)
    raise AssertionError("sessions never end")


def _expect(coming: _Coming, begin_s: float, number: int, calls: list[Call]) -> None:
    """Put the calls of a session that begins at `begin_s` into the heap, but for those that were before time 0."""
    nominals_s: list[float] = []
    placed: dict[int | None, int] = {}
    for place, call in enumerate(calls):
        asked_s = begin_s if call.after is None else nominals_s[call.after] + calls[call.after].idle_s
        nominals_s.append(asked_s + call.pause_s)
        if nominals_s[place] >= 0:
            heappush(coming, (nominals_s[place], number, place, calls, placed))


def _before_s(n_requests: int, rate: float) -> float:
    return min(_BEFORE_S, _BEFORE_RATIO * n_requests / rate)
