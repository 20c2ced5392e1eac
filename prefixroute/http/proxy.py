"""The data plane's handler: request in, answer out, one record written.

Answers itself: `GET /health`, `/ping`, `/v1/models` (of several instances), engine control when it is closed, and
errors. Everything else goes to an instance, whatever method, path or body.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from traceback import format_tb

from prefixroute.core.group import Group
from prefixroute.core.prompt import Prompt
from prefixroute.errors import (
    ForbiddenError,
    MethodError,
    NoInstanceError,
    PrefixRouteError,
    RequestError,
    TooManyRequestsError,
    UnauthorizedError,
    UpstreamBrokenError,
    UpstreamError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from prefixroute.http.arrival import Arrival, RequestHead
from prefixroute.http.ask import Ask, Exchanges, read_ask
from prefixroute.http.auth import Gate, KeyLimitError, Visit, tenant_of
from prefixroute.http.body import BodyLimits, FramingError, MalformedHeadError, SlowBodyError, check_head
from prefixroute.http.contract import Call, Contract
from prefixroute.http.cors import is_preflight
from prefixroute.http.dialects import error_body, error_headers
from prefixroute.http.exchange import Exchange
from prefixroute.http.headers import RawHeaders, asking, asks_for_websocket, identified, new_request_id
from prefixroute.http.models import joined_models
from prefixroute.http.peer import client_address
from prefixroute.http.relay import outcome_of
from prefixroute.http.response import RawResponse
from prefixroute.http.routes import Route, empties_cache, is_sleep
from prefixroute.http.upstream import UpstreamRequest
from prefixroute.record import METHODS, Outcome, RequestRecord

_log = logging.getLogger(__name__)

# Bodies that come in more pieces than one.
_LARGE_BYTES = 262_144
_JSON = (b"Content-Type", b"application/json")
# Beside any others but TRACE; the instance may allow less.
_ALLOWED = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
# Of a body that was refused: more costs the connection.
_DROPPED_BYTES = 65_536


class Proxy:
    """Serves requests of the data port. `on_record` gets each finished record, synchronously.

    `on_served`: so does this, with the prompt, where a request came as far as having one. `gate`: who is let in.
    `contract`: whose endpoints are served as well. `on_sleep`: gets the name of an instance that was put to sleep.
    `names_clients`: whether records tell clients' addresses.
    """

    def __init__(
        self,
        shared: Exchanges,
        *,
        body_limits: BodyLimits,
        engine_control_open: bool,
        session_header: str,
        on_record: Callable[[RequestRecord], None],
        on_served: Callable[[RequestRecord, Prompt], None] | None = None,
        gate: Gate | None = None,
        contract: Contract | None = None,
        on_sleep: Callable[[str], None] = lambda _name: None,
        names_clients: Callable[[], bool] = lambda: False,
    ) -> None:
        self._shared = shared
        self._body_limits = body_limits
        self._engine_control_open = engine_control_open
        self._session_header = session_header.lower().encode("ascii")
        self._on_record = on_record
        self._on_served = on_served
        self._gate = gate or Gate()
        self._contract = contract
        self._on_sleep = on_sleep
        self._names_clients = names_clients
        self.n_active = 0
        """Requests under way."""
        self.large_body_bytes = 0
        """Of large bodies of requests that are over, until somebody sets it back."""
        self.is_stopping = False
        """Set when the router is about to stop: load balancers that ask here are told to look elsewhere."""
        self.is_cutting_off = False
        """Set when what is still under way is the router's to end, not its clients'."""
        self._idle: asyncio.Future[None] | None = None
        """Somebody waits for it."""

    def configure(
        self, shared: Exchanges, *, body_limits: BodyLimits, engine_control_open: bool, session_header: str
    ) -> None:
        """For requests that come from now on; those under way keep what they began with."""
        self._shared = shared
        self._body_limits = body_limits
        self._engine_control_open = engine_control_open
        self._session_header = session_header.lower().encode("ascii")

    async def wait_idle(self) -> None:
        """Until no request is under way."""
        while self.n_active:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            # Shielded: a second waiter would be cancelled with the first.
            await asyncio.shield(self._idle)

    async def handle(self, arrival: Arrival) -> RawResponse:
        """The answer to one request: already written, or broken off."""
        clock = self._shared.clock
        head = arrival.head
        route = head.route
        name = arrival.request_id or new_request_id()
        method = head.method if head.method in METHODS else "other"
        record = RequestRecord(name, method, route.label, arrival.lane, clock())
        if self._names_clients():
            record.client = client_address(arrival.client.transport)
        response = self._response(arrival)
        ask: Ask | None = None
        call: Call | None = None
        visit: Visit | None = None
        self.n_active += 1
        try:
            if not self._answered(head, response, record):
                contract = self._contract if head.route.is_endpoint else None
                if contract is not None:
                    visit = await contract.enter(arrival, self._body_limits)
                if visit is None and self._gate.api_keys is not None:
                    visit = self._gate.api_keys.enter(head)
                if visit is not None:
                    record.key = visit.name
                if contract is not None:
                    call = contract.call(head if visit is None else visit.head)
                ask = await self._ask(arrival, response, record, visit, call)
            if ask is not None:
                await Exchange(self._shared, ask, response, record).run()
                if head.is_engine_control:
                    self._controlled(head, record)
        except asyncio.CancelledError:
            record.outcome = Outcome.CUT_OFF if self.is_cutting_off else Outcome.CLIENT_GONE
            raise
        except ConnectionResetError:
            record.outcome = Outcome.CLIENT_GONE
            response.abort()
        except PrefixRouteError as fault:
            record.outcome = _outcome_of(fault)
            # An answer that has begun says in its own form what went wrong.
            error = fault if call is None or response.started else call.error(fault)
            record.error = error.code
            if isinstance(error, KeyLimitError):
                record.key = error.key
            if isinstance(fault, UpstreamError):
                _log.warning("request %s: %s", name, fault)
            response = self._fail(arrival, response, record, route, error)
        except Exception as fault:  # noqa: BLE001  the one place that answers 500
            record.outcome, record.error = Outcome.FAULT, PrefixRouteError.code
            # Where, not what: the message of an exception may hold a piece of the request.
            frames = "".join(format_tb(fault.__traceback__))
            _log.error("request %s: fault in the router: %s\n%s", name, type(fault).__name__, frames)
            response = self._fail(arrival, response, record, route, PrefixRouteError("internal error"))
        finally:
            ended_s = clock()
            record.duration_s = ended_s - record.began_s
            record.is_over = True
            record.body_bytes = arrival.n_received
            if visit is not None:
                visit.leave(ended_s)
            self.n_active -= 1
            if record.body_bytes > _LARGE_BYTES:
                self.large_body_bytes += record.body_bytes
            if self._idle is not None and not self.n_active:
                self._idle.set_result(None)
                self._idle = None
            self._on_record(record)
            if self._on_served is not None and ask is not None:
                self._on_served(record, ask.prompt)
        await response.taken()
        return response

    def _response(self, arrival: Arrival, *, close: bool = False) -> RawResponse:
        response = RawResponse(arrival, close=close)
        if self._gate.cors is not None:
            response.permissions = self._gate.cors.permissions(arrival.head.headers)
        return response

    def _answered(self, head: RequestHead, response: RawResponse, record: RequestRecord) -> bool:
        """Answers what needs no key: health, and preflights that are the router's to answer. False: it is neither."""
        if not head.is_plain:
            check_head(head)
        if head.method == "POST":
            return False
        if head.method in ("GET", "HEAD") and head.path in ("/health", "/ping"):
            self._health(response, record)
            return True
        cors = self._gate.cors
        if (cors is None and self._gate.api_keys is None) or not is_preflight(head.method, head.headers):
            return False
        # Without CORS settings it allows nothing. An instance is not asked: nobody is let through without a key.
        if cors is not None:
            response.permissions = [*cors.permissions(head.headers), *cors.preflight(head.headers)]
        record.outcome = Outcome.LOCAL
        self._answer(response, record, 204, (), b"")
        return True

    async def _ask(
        self, arrival: Arrival, response: RawResponse, record: RequestRecord, visit: Visit | None, call: Call | None
    ) -> Ask | None:
        """What is to be sent to an instance; None when it is answered already."""
        head = arrival.head if visit is None else visit.head
        if call is not None:
            head = call.head
        if head.method == "CONNECT":
            raise MalformedHeadError("tunnels are not made here")
        if head.method == "TRACE":
            # Who answers one sends back all that it got, and what the router adds to it with that: an instance's key.
            raise MethodError("TRACE goes to no instance", _ALLOWED)
        if head.origin is None:
            raise MalformedHeadError("the request target must be a path")
        cors = self._gate.cors
        if cors is not None and asks_for_websocket(head.headers) and not cors.may_connect(head.headers):
            raise ForbiddenError("pages of this origin may open no WebSocket here (listen.cors)")
        if head.is_engine_control and not self._engine_control_open:
            raise ForbiddenError(
                "this path controls the engine and is closed (engine_control: allow in the configuration opens it)"
            )
        is_models = head.path == "/v1/models" and head.method in ("GET", "HEAD")
        if is_models and len(self._shared.router.fleet.instances) > 1:
            await self._models(head, response, record, None if call is None else call.group)
            return None
        tenant = b""
        if self._gate.isolates:
            tenant = tenant_of(head.headers) if visit is None else visit.tenant
        return await read_ask(
            arrival,
            record,
            stored=self._shared.stored,
            limits=self._body_limits,
            session_header=self._session_header,
            head=head,
            call=call,
            tenant=tenant,
            exact_tokens=self._shared.exact_tokens,
        )

    def _controlled(self, head: RequestHead, record: RequestRecord) -> None:
        """An engine has done what was asked of it. Its probes would tell a while later, or never."""
        router, name = self._shared.router, record.upstream
        if record.outcome is Outcome.OK and name is not None and empties_cache(head.path):
            with suppress(KeyError):  # it has left meanwhile
                router.cache_emptied(name)
                if is_sleep(head.path):
                    self._on_sleep(name)

    def _health(self, response: RawResponse, record: RequestRecord) -> None:
        if self.is_stopping:
            record.outcome = Outcome.LOCAL
            self._answer(response, record, 503, [_JSON], b'{"status":"stopping"}')
            return
        up = self._shared.router.fleet.can_serve(self._shared.clock())
        record.outcome = Outcome.LOCAL if up else Outcome.NO_INSTANCE
        body = b'{"status":"ok"}' if up else b'{"status":"no instance can serve"}'
        self._answer(response, record, 200 if up else 503, [_JSON], body)

    async def _models(
        self, head: RequestHead, response: RawResponse, record: RequestRecord, group: Group | None
    ) -> None:
        shared = self._shared
        among = None if group is None else group.members
        until_s = shared.clock() + shared.waiting.wait_s
        while not (instances := shared.router.fleet.candidates(None, shared.clock(), among=among)):
            await shared.waiting.wait_change(until_s)
        request = UpstreamRequest.of(
            "GET", head.origin or "/", identified(asking(head.headers), record.request_id), None
        )
        answer = await joined_models(shared.upstream, instances, request)
        record.outcome = Outcome.LOCAL if answer.status == 200 else outcome_of(answer.status)
        self._answer(response, record, answer.status, answer.headers, answer.body)

    def _fail(
        self,
        arrival: Arrival,
        response: RawResponse,
        record: RequestRecord,
        route: Route,
        error: PrefixRouteError,
    ) -> RawResponse:
        """Answers the error, or breaks the answer off when it has begun."""
        if response.started:
            # Last words may find nobody any more.
            with suppress(ConnectionResetError):
                response.fail(error)
            return response
        # A body that was refused unread would have to be read to its end before the next request.
        close = isinstance(error, FramingError) or (arrival.is_unread and not _is_worth_reading(arrival, error))
        response = self._response(arrival, close=close)
        body = error_body(route.dialect, error.status, error.code, str(error), error.details)
        try:
            headers = error_headers(route.dialect, error.status, record.request_id, error)
            self._answer(response, record, error.status, headers, body)
            if isinstance(error, SlowBodyError):
                response.hang_up()
        except ConnectionResetError:
            record.status = None
        return response

    @staticmethod
    def _answer(response: RawResponse, record: RequestRecord, status: int, headers: RawHeaders, body: bytes) -> None:
        record.status = status
        response.whole_now(status, identified(headers, record.request_id), body)
        record.answer_bytes = response.sent_bytes


def _is_worth_reading(arrival: Arrival, error: PrefixRouteError) -> bool:
    """Whether the rest of a refused request is read and dropped, so that its connection can go on.

    The front does so, for a moment. Only where it is short, surely coming, and delimited by a length.
    """
    if not isinstance(error, UnauthorizedError | ForbiddenError | TooManyRequestsError):
        return False
    if b"expect" in arrival.head.index or b"upgrade" in arrival.head.index:
        return False
    return arrival.length is not None and arrival.length <= _DROPPED_BYTES


def _outcome_of(error: PrefixRouteError) -> Outcome:
    match error:
        case NoInstanceError():
            return Outcome.NO_INSTANCE
        case UpstreamUnreachableError():
            return Outcome.UNREACHABLE
        case UpstreamTimeoutError():
            return Outcome.TIMEOUT
        case UpstreamBrokenError():
            return Outcome.BROKEN
        case RequestError():
            return Outcome.REFUSED
        case _:
            return Outcome.FAULT
