"""Another contract over the same proxy: its clients ask in another way than instances are asked, and get other answers.

Routes whose `is_endpoint` is set are of the contract. Everything between asking and answering, from reading the body to
repeating an attempt, is the proxy's own.
"""

from typing import TYPE_CHECKING, Protocol

from prefixroute.core.group import Group
from prefixroute.core.lease import Lease
from prefixroute.errors import PrefixRouteError
from prefixroute.http.arrival import Arrival, RequestHead
from prefixroute.http.auth import Visit
from prefixroute.http.body import BodyLimits
from prefixroute.http.response import RawResponse
from prefixroute.http.upstream import Answer
from prefixroute.record import RequestRecord

if TYPE_CHECKING:
    from prefixroute.http.ask import Ask, Exchanges
    from prefixroute.http.relay import Relay


class Call(Protocol):
    """One request of the contract."""

    head: RequestHead
    """As an instance gets it: its target, and its headers."""
    group: Group | None
    """Who may take it; None: any instance."""
    prefix: bytes
    """What the client's path has in front of the instance's, where the rest of them is alike; else empty."""
    takes_interim: bool
    """Whether its clients know what to do with answers ahead of the answer (1xx)."""

    def relay(
        self,
        shared: "Exchanges",
        ask: "Ask",
        response: RawResponse,
        record: RequestRecord,
        answer: Answer,
        lease: Lease | None,
    ) -> "Relay":
        """What passes the answer on, in the contract's form."""
        ...

    def again(self) -> None:
        """The request has waited: who may take it is looked at anew, as the configuration may have changed."""
        ...

    def error(self, error: PrefixRouteError) -> PrefixRouteError:
        """What went wrong, as the contract has it."""
        ...


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
