"""Requests to endpoints, as containers get them."""

from functools import partial

from prefixroute.core.fleet import Fleet, Instance
from prefixroute.core.group import Group
from prefixroute.errors import (
    NoInstanceError,
    PrefixRouteError,
    UpstreamBrokenError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
    UpstreamUntrustedError,
)
from prefixroute.http.arrival import RequestHead
from prefixroute.http.contract import Call, Find, MakeRelay
from prefixroute.sagemaker.endpoints import Destination
from prefixroute.sagemaker.errors import DependencyError, ModelError, ModelNotReadyError
from prefixroute.sagemaker.relay import InvocationRelay, StreamRelay
from prefixroute.sagemaker.sessions import Home, Sessions


class InvocationCall(Call):
    """A request of InvokeEndpoint, or when `streaming` of InvokeEndpointWithResponseStream. `head`: for an instance.

    `group`: who may take it, which a session may narrow. `find`: as of `Call`.
    """

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
        super().__init__(head, group, find)
        self.destination = destination
        self.streaming = streaming
        self.original_status = 0
        """Of the container's error, once that is known; it may break off."""
        self._endpoint = endpoint
        self._sessions = sessions
        self._fleet = fleet

    @property
    def relay(self) -> MakeRelay:
        """As `Call` has it."""
        return partial(StreamRelay if self.streaming else InvocationRelay, self)

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
