"""Another contract over the same proxy: its clients ask in another way than instances are asked, and get other answers.

Routes whose `is_endpoint` is set are of the contract. Everything between asking and answering, from reading the body to
repeating an attempt, is the proxy's own.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from prefixroute.core.group import Group
from prefixroute.core.lease import Lease
from prefixroute.errors import PrefixRouteError, RequestError
from prefixroute.http.arrival import Arrival, RequestHead
from prefixroute.http.ask import Ask, Exchanges
from prefixroute.http.auth import Visit
from prefixroute.http.body import BodyLimits
from prefixroute.http.relay import Relay
from prefixroute.http.response import RawResponse
from prefixroute.http.upstream import Answer
from prefixroute.record import RequestRecord

MakeRelay = Callable[[Exchanges, Ask, RawResponse, RequestRecord, Answer, Lease | None], Relay]
Find = Callable[[], Group | None]


class Call:
    """One request of the contract; as it stands here, its answer is what the instance says.

    `head`: as an instance gets it. `group`: who may take it; None: any instance. `find`: says so again, later; raises
    RequestError where that is nobody's any more. `prefix`: what the client's path has in front of the instance's, where
    the rest of them is alike; else empty.
    """

    takes_interim = True
    """Whether its clients know what to do with answers ahead of the answer (1xx)."""

    def __init__(self, head: RequestHead, group: Group | None, find: Find, prefix: bytes = b"") -> None:
        self.head = head
        self.group = group
        self.prefix = prefix
        self._find = find

    @property
    def relay(self) -> MakeRelay:
        """What passes the answer on, in the contract's form."""
        return Relay

    def again(self) -> None:
        """The request has waited: who may take it is looked at anew, as the configuration may have changed."""
        with suppress(RequestError):
            self.group = self._find()

    def error(self, error: PrefixRouteError) -> PrefixRouteError:
        """What went wrong, as the contract has it."""
        return error


class Contract(Protocol):
    """Of one router."""

    async def enter(self, arrival: Arrival, limits: BodyLimits) -> Visit | None:
        """Lets in who proves who it is in the contract's own way; None: who does not try to.

        Reads the body where the proof needs it. Raises RequestError for a proof that fails.
        """
        ...

    def call(self, head: RequestHead) -> Call:
        """What is asked. Raises RequestError for what cannot be."""
        ...
