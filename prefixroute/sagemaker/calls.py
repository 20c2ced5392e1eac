"""Requests to endpoints, as containers get them."""

from collections.abc import Callable
from contextlib import suppress

from prefixroute.core.fleet import Fleet, Instance
from prefixroute.core.group import Group
from prefixroute.core.lease import Lease
from prefixroute.errors import (
    NoInstanceError,
    PrefixRouteError,
    UpstreamBrokenError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
    UpstreamUntrustedError,
)
from prefixroute.http.arrival import RequestHead
from prefixroute.http.ask import Ask, Exchanges
from prefixroute.http.relay import Relay
from prefixroute.http.response import RawResponse
from prefixroute.http.upstream import Answer
from prefixroute.record import RequestRecord
from prefixroute.sagemaker.endpoints import Destination
from prefixroute.sagemaker.errors import DependencyError, ModelError, ModelNotReadyError, UnknownDestinationError
from prefixroute.sagemaker.relay import InvocationRelay, StreamRelay
from prefixroute.sagemaker.sessions import Home, Sessions

Find = Callable[[], Group | None]


class OpenAICall:
    """A request on an endpoint's OpenAI path. Its answer is what the instance says.

    `head`: for an instance. `prefix`: what stands before its target in the client's. `find`: who may take it now; it
    raises UnknownDestinationError where that is nobody's any more.
    """

    takes_interim = True

    def __init__(self, head: RequestHead, group: Group | None, prefix: bytes, find: Find) -> None:
        self.head = head
        self.prefix = prefix
        self.group = group
        self._find = find

    def again(self) -> None:
        """As `Call` has it."""
        with suppress(UnknownDestinationError):
            self.group = self._find()

    def relay(
        self,
        shared: Exchanges,
        ask: Ask,
        response: RawResponse,
        record: RequestRecord,
        answer: Answer,
        lease: Lease | None,
    ) -> Relay:
        """As `Call` has it."""
        return Relay(shared, ask, response, record, answer, lease)

    def error(self, error: PrefixRouteError) -> PrefixRouteError:
        """As `Call` has it."""
        return error


class InvocationCall:
    """A request of InvokeEndpoint, or when `streaming` of InvokeEndpointWithResponseStream. `head`: for an instance.

    `group`: who may take it, which a session may narrow. `find`: as of `OpenAICall`.
    """

    prefix = b""

    # AWS's SDKs take the first head that comes for the answer's, unless it is 100.
    takes_interim = False

    def __init__(
        self,
        head: RequestHead,
        endpoint: str,
        destination: Destination,
        group: Group | None,
        find: Find,
        *,
        streaming: bool,
        sessions: Sessions,
        fleet: Fleet,
    ) -> None:
        self.head = head
        self.group = group
        self.destination = destination
        self.streaming = streaming
        self.original_status = 0
        """Of the container's error, once that is known; it may break off."""
        self._find = find
        self._endpoint = endpoint
        self._sessions = sessions
        self._fleet = fleet

    def again(self) -> None:
        """As `Call` has it."""
        with suppress(UnknownDestinationError):
            self.group = self._find()

    def relay(
        self,
        shared: Exchanges,
        ask: Ask,
        response: RawResponse,
        record: RequestRecord,
        answer: Answer,
        lease: Lease | None,
    ) -> Relay:
        """As `Call` has it."""
        make = StreamRelay if self.streaming else InvocationRelay
        return make(self, shared, ask, response, record, answer, lease)

    def error(self, error: PrefixRouteError) -> PrefixRouteError:
        """As `Call` has it. Once a stream has begun, its errors are others: see `StreamRelay`."""
        match error:
            case NoInstanceError() if not self.streaming and self.is_not_ready(None):
                return ModelNotReadyError("no container of this endpoint has been ready yet")
            case UpstreamTimeoutError() | UpstreamBrokenError():
                return ModelError(self.original_status, str(error))
            case UpstreamUntrustedError():
                # The operation with streams has no name for it.
                return PrefixRouteError(str(error)) if self.streaming else DependencyError(str(error))
            case UpstreamUnreachableError():
                return NoInstanceError(str(error))
            case _:
                return error

    def is_not_ready(self, instance: str | None) -> bool:
        """Whether the instance, or any that may take the request, has not been ready since it started."""
        members = None if self.group is None else self.group.members
        return self._fleet.is_starting(members if instance is None else (instance,))

    def session_opened(self, session: tuple[str, float | None], instance: Instance) -> None:
        """A container began a session: its id, and when it ends."""
        session_id, expires_s = session
        if not self._fleet.has(instance):
            return  # it has left meanwhile, and whoever has its name now is another one
        home = Home(instance.name, self.destination.variant, self.destination.component)
        self._sessions.opened(self._endpoint, session_id, home, expires_s)

    def session_closed(self, session_id: str) -> None:
        """A container ended a session."""
        self._sessions.closed(self._endpoint, session_id)
