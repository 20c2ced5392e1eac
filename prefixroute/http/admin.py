"""The admin plane: metrics, health, instances, explanations. Its own port, on loopback by default.

With a token, everything needs it but liveness and readiness. There may be none, so what changes something or costs
something is refused to web pages: a browser marks such requests with Origin or Sec-Fetch-Site, whatever page makes it
send them. Nothing here echoes a prompt or a header.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from traceback import format_tb
from typing import Any
from urllib.parse import parse_qs, unquote

import orjson

from prefixroute.core.fleet import InstanceState
from prefixroute.core.group import Group
from prefixroute.core.prompt import Api, Fields, read_prompt
from prefixroute.core.router import Router
from prefixroute.core.tokens import ExactTokens
from prefixroute.errors import ForbiddenError, MethodError, PrefixRouteError, RequestError, UnauthorizedError
from prefixroute.http.admin_views import explanation_view, instance_view, ladder_view, record_view, states_view
from prefixroute.http.arrival import Arrival, RequestHead
from prefixroute.http.ask import fields_in_steps, read_token_ids
from prefixroute.http.auth import AdminToken
from prefixroute.http.body import BodyLimits, check_head, check_length, expect_continue, read_whole
from prefixroute.http.decisions import Decisions
from prefixroute.http.headers import RawHeaders, is_encoded, prefix_aware_id, short_text
from prefixroute.http.response import RawResponse
from prefixroute.http.routes import origin_form
from prefixroute.http.stored import StoredResponses
from prefixroute.metrics import NONE, OTHER, Metrics, encode

_log = logging.getLogger(__name__)

_FOREIGN_SITES = frozenset({b"cross-site", b"same-site"})
_INSTANCES = "/instances/"
_DECISIONS = "/decisions/"
_ENDPOINTS = {
    "GET /metrics": "Prometheus metrics",
    "GET /livez": "200 while the process runs",
    "GET /readyz": "200 while requests can be served, else 503 and why",
    "GET /instances": "the fleet as the router sees it",
    "POST /instances/{name}/drain": "no new requests for an instance",
    "POST /instances/{name}/undrain": "takes that back",
    "GET /decisions/{request_id}": "what was decided for one of the last requests, and how it went",
    "GET /ladder": "why the hit rate is what it is: prompt tokens from all of them down to those reported as cached",
    "POST /explain": "dry run: where this request body would go, and why (?path= names its data-plane path)",
}

# Status, headers (a Content-Type among them), body.
Reply = tuple[int, RawHeaders, bytes]
_Endpoint = Callable[[Arrival], Awaitable[Reply]]


class UnknownInstanceError(RequestError):
    """The fleet has no instance of the name in the path."""

    status = 404
    code = "unknown_instance"


class UnknownDecisionError(RequestError):
    """No decision is kept under the request id in the path."""

    status = 404
    code = "unknown_decision"


class UnknownEndpointError(RequestError):
    """There is nothing at this path."""

    status = 404
    code = "not_found"


_BODY_LIMITS = BodyLimits(64 * 1024 * 1024)


class Admin:
    """Serves requests of the admin port.

    `aim`: what a request at a data-plane path with these headers means: the grammar of its body, and whom it is for
    (None: any instance). `on_change`: called when an instance may have become
    able to serve. `body_limits`: of the body of an explanation.
    """

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        *,
        strategy: str,
        aim: Callable[[str, RequestHead], tuple[Api, Group | None]],
        is_stopping: Callable[[], bool],
        stored: StoredResponses,
        decisions: Decisions,
        on_change: Callable[[], None] = lambda: None,
        session_header: str = "x-session-id",
        body_limits: BodyLimits = _BODY_LIMITS,
        clock: Callable[[], float] = time.monotonic,
        exact_tokens: ExactTokens | None = None,
        token: AdminToken | None = None,
    ) -> None:
        self._router = router
        self._token = token or AdminToken()
        self._exact_tokens = exact_tokens
        self._metrics = metrics
        self._strategy = strategy
        self._aim = aim
        self._is_stopping = is_stopping
        self._stored = stored
        self._decisions = decisions
        self._on_change = on_change
        self._session_header = session_header.lower().encode("ascii")
        self._body_limits = body_limits
        self._clock = clock
        self._get: dict[str, _Endpoint] = {
            "/": self._index,
            "/metrics": self._show_metrics,
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/instances": self._instances,
            "/ladder": self._ladder,
        }
        self._post: dict[str, _Endpoint] = {"/explain": self._explain}

    def configure(self, *, strategy: str, session_header: str, body_limits: BodyLimits) -> None:
        """For requests that come from now on."""
        self._strategy = strategy
        self._session_header = session_header.lower().encode("ascii")
        self._body_limits = body_limits

    async def handle(self, arrival: Arrival) -> RawResponse:
        """The answer to one request, already written. Every error as JSON, and none with a traceback."""
        try:
            status, headers, body = await self._reply(arrival)
        except PrefixRouteError as error:
            status, headers, body = _error(error)
        except Exception as fault:  # noqa: BLE001  the admin plane's one place that answers 500
            _log.error("admin: %s\n%s", type(fault).__name__, "".join(format_tb(fault.__traceback__)))
            status, headers, body = _error(PrefixRouteError("internal error"))
        response = RawResponse(arrival, close=arrival.is_unread)
        response.whole_now(status, headers, body)
        return response

    async def _reply(self, arrival: Arrival) -> Reply:
        head = arrival.head
        check_head(head)
        path = head.path
        # Orchestrators ask these two, and have no token.
        if path not in ("/livez", "/readyz") and not self._token.admits(head.headers):
            raise UnauthorizedError("the admin token is required (Authorization: Bearer TOKEN)")
        if head.method in ("GET", "HEAD"):
            endpoint = self._decision if path.startswith(_DECISIONS) else self._get.get(path)
        else:
            _refuse_web_pages(head)
            endpoint = self._posted(path) if head.method == "POST" else None
        if endpoint is not None:
            return await endpoint(arrival)
        if path in self._get or path.startswith(_DECISIONS):
            raise MethodError("this path takes GET,HEAD", "GET,HEAD")
        if self._posted(path) is not None:
            raise MethodError("this path takes POST", "POST")
        if path.startswith(_INSTANCES) and path.endswith(("/drain", "/undrain")):
            raise UnknownInstanceError("no instance of this name (GET /instances lists the names)")
        raise UnknownEndpointError("there is nothing at this path (GET / lists what there is)")

    def _posted(self, path: str) -> _Endpoint | None:
        """What a POST to `path` reaches; None: nothing, or an instance that is not in the fleet."""
        if not path.startswith(_INSTANCES):
            return self._post.get(path)
        name, _, action = path.removeprefix(_INSTANCES).rpartition("/")
        endpoint = {"drain": self._drain, "undrain": self._undrain}.get(action)
        return endpoint if any(one.name == name for one in self._router.fleet.instances) else None

    async def _index(self, _arrival: Arrival) -> Reply:
        return _json({"endpoints": _ENDPOINTS})

    async def _show_metrics(self, arrival: Arrival) -> Reply:
        # Encoding thousands of series takes tens of milliseconds, which no stream should wait for.
        accept = b",".join(arrival.head.all_of(b"accept")).decode("latin-1")
        body, content_type = await asyncio.to_thread(encode, self._metrics.snapshot(), accept)
        return 200, [(b"Content-Type", content_type.encode("ascii"))], body

    async def _livez(self, _arrival: Arrival) -> Reply:
        return _json({"live": True})

    async def _readyz(self, arrival: Arrival) -> Reply:
        reasons = []
        if self._is_stopping():
            reasons.append("stopping")
        if not self._router.fleet.can_serve(self._clock()):
            reasons.append("no_instance")
        body: dict[str, Any] = {"ready": not reasons, "reasons": reasons}
        if self._token.admits(arrival.head.headers):
            body["instances"] = states_view(self._router)
        return _json(body, status=503 if reasons else 200)

    async def _instances(self, _arrival: Arrival) -> Reply:
        now_s = self._clock()
        return _json([instance_view(self._router, state, now_s) for state in self._router.fleet.states()])

    async def _ladder(self, _arrival: Arrival) -> Reply:
        return _json(ladder_view(self._router.audit.ladder))

    async def _decision(self, arrival: Arrival) -> Reply:
        decisions = self._decisions
        # As written: in an id, dots and doubled slashes mean nothing.
        path = unquote((origin_form(arrival.head.target) or "").partition("?")[0])
        record = decisions.find(path.removeprefix(_DECISIONS))
        if record is None:
            raise UnknownDecisionError(
                f"no decision of this request id is kept (of the last {decisions.max_requests} requests at most: "
                f"limits.max_decisions; {len(decisions)} now)"
            )
        model = NONE if record.model is None else self._shown(record.model)
        return _json(record_view(record, self._strategy, model))

    def _shown(self, model: str) -> str:
        return model if self._router.fleet.knows_model(model) else OTHER

    async def _drain(self, arrival: Arrival) -> Reply:
        state = self._named(arrival)
        self._router.fleet.drain(state.instance.name)
        _log.info("%s drains: it gets no new requests", state.instance.name)
        return _json(instance_view(self._router, state, self._clock()))

    async def _undrain(self, arrival: Arrival) -> Reply:
        state = self._named(arrival)
        self._router.fleet.undrain(state.instance.name)
        _log.info("%s takes requests again", state.instance.name)
        self._on_change()
        return _json(instance_view(self._router, state, self._clock()))

    async def _explain(self, arrival: Arrival) -> Reply:
        head = arrival.head
        check_length(arrival, self._body_limits)
        expect_continue(arrival)
        body = await read_whole(arrival, self._body_limits)
        path = parse_qs(head.target.partition("?")[2]).get("path")
        encoded = is_encoded(head.headers)
        fields = await fields_in_steps(body, encoded=encoded)
        api, group = (_guess(fields), None) if path is None else self._aim(path[0], head)
        prompt = read_prompt(
            api,
            body,
            fields_read=fields,
            session_id=short_text(head.first(self._session_header)),
            prefix_aware_id=prefix_aware_id(head.first(b"x-amzn-sagemaker-prefix-aware-id")),
            encoded=encoded,
        )
        await asyncio.sleep(0)
        only = self._stored.home(prompt.previous_response_id)
        token_ids = await read_token_ids(self._exact_tokens, api, prompt)
        explanation = self._router.explain(prompt, now_s=self._clock(), only=only, token_ids=token_ids, group=group)
        return _json(explanation_view(self._router, explanation, self._strategy, group))

    def _named(self, arrival: Arrival) -> InstanceState:
        return self._router.fleet.state(arrival.head.path[len(_INSTANCES) :].rpartition("/")[0])


def _refuse_web_pages(head: RequestHead) -> None:
    if b"origin" in head.index or head.first(b"sec-fetch-site") in _FOREIGN_SITES:
        raise ForbiddenError("requests of web pages are refused here")


def _guess(fields_read: Fields) -> Api:
    """Grammar of a body whose path is not given, by its fields. Only large bodies are read alike in all grammars."""
    fields, no_key, parsed = fields_read
    if no_key is not None or not parsed:
        return Api.CHAT
    if "messages" in fields:
        return Api.MESSAGES if "system" in fields else Api.CHAT
    return Api.RESPONSES if "input" in fields else Api.INVOCATIONS


def _json(body: object, status: int = 200) -> Reply:
    return status, [(b"Content-Type", b"application/json")], orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE)


def _error(error: PrefixRouteError) -> Reply:
    status, headers, body = _json({"error": {"code": error.code, "message": str(error)}}, error.status)
    if isinstance(error, UnauthorizedError):
        headers = [*headers, (b"WWW-Authenticate", b"Bearer")]
    if isinstance(error, MethodError):
        headers = [*headers, (b"Allow", error.allowed.encode("ascii"))]
    return status, headers, body
