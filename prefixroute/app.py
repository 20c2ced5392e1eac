"""Builds everything from settings and runs it. The only module that knows everybody."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from prefixroute import __version__
from prefixroute.build import make_kv_events, make_router
from prefixroute.config import api_key
from prefixroute.config.settings import RecordingSettings, Settings
from prefixroute.core.exact import ExactIndex
from prefixroute.core.prompt import Prompt
from prefixroute.drift import tell_drift
from prefixroute.exact_tokens.service import ExactTokens, State
from prefixroute.exact_tokens.setup import make_exact_tokens, make_verifier
from prefixroute.exact_tokens.verify import Verifier
from prefixroute.http.admin import Admin
from prefixroute.http.body import BodyLimits
from prefixroute.http.decisions import Decisions
from prefixroute.http.exchange import Exchanges
from prefixroute.http.holding import Holding
from prefixroute.http.proxy import Proxy
from prefixroute.http.retry import RetryBudget
from prefixroute.http.routes import plain_path, route_of
from prefixroute.http.server import ClientLimits, FrontServer, address, has_fast_parser, listen
from prefixroute.http.stored import StoredResponses
from prefixroute.http.tokenize import post
from prefixroute.http.upstream import ConnectionLimits, Upstream
from prefixroute.http.waiting import WaitingRoom
from prefixroute.instance_facts import EventSource
from prefixroute.logs import access_log
from prefixroute.metrics import Metrics, TokenFacts
from prefixroute.prober import Prober
from prefixroute.record import RequestRecord
from prefixroute.recording.recorder import Recorder, start_recorder

if TYPE_CHECKING:
    from prefixroute.kv_events.service import KvEvents

_log = logging.getLogger(__name__)
_access = logging.getLogger("prefixroute.access")

# How long connections have to close once the drain is over: those without a request, and the admin port's.
_GRACE_S = 0.1
_UNSENT_POLL_S = 0.02


class App:
    """A router that runs. Made by `running`."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.stopping = False
        self.port = 0
        self.admin_port: int | None = None
        self._clock = clock
        self._n_faults_told = 0
        self.recorder: Recorder | None = None
        """While it serves, and as configured."""
        keys = {i.name: key for i in settings.fleet.instances if (key := api_key(i, environ)) is not None}
        self.exact: ExactIndex | None = None
        """What instances say they hold, when any of them has KV events."""
        if any(i.kv_events != "off" for i in settings.fleet.instances):
            self.exact = ExactIndex(secrets.randbits(64), settings.limits.exact_index_bytes)
        self.router = make_router(settings, exact=self.exact)
        self.metrics = Metrics(self.router, strategy=settings.routing.strategy, clock=clock)
        self._kv_events: KvEvents | None = None
        if self.exact is not None:
            self.metrics.exact = self.exact
            self._kv_events = make_kv_events(settings, self.exact, self.router.fleet.instances)
        self._waiting = WaitingRoom(
            self.router,
            wait_s=settings.limits.wait_for_instance_s,
            max_waiting=settings.limits.max_waiting,
            clock=clock,
        )
        self.metrics.waiting = lambda: len(self._waiting)
        self._stored = StoredResponses(settings.limits.max_stored_responses)
        self._decisions = Decisions(settings.limits.max_decisions)
        self._upstream = Upstream(
            first_byte_timeout_s=settings.upstream.first_byte_timeout_s,
            idle_timeout_s=settings.upstream.idle_timeout_s,
            limits=ConnectionLimits(
                connect_timeout_s=settings.upstream.connect_timeout_s,
                keepalive_s=settings.upstream.keepalive_s,
                max_header_bytes=settings.limits.max_header_bytes,
                max_requests=settings.upstream.max_requests,
                n_warm=settings.upstream.warm_connections,
            ),
            api_keys=keys,
        )
        self._prober = Prober(
            self.router,
            settings.fleet.health,
            api_keys=keys,
            known_capacity=[i.name for i in settings.fleet.instances if i.capacity_tokens is not None],
            asks_events=[i.name for i in settings.fleet.instances if i.kv_events == "auto"],
            on_change=self._waiting.wake,
            on_probe=self.metrics.probed,
            on_emptied=self._cache_emptied,
            on_events=self._told_events,
            on_adapters=None if self.exact is None else self.exact.learned_adapters,
            clock=clock,
        )
        self._tokens = make_exact_tokens(settings.tokenizer)
        self._verifier: Verifier | None = None
        if self._tokens is not None:
            self._verifier = make_verifier(
                settings.tokenizer,
                self._tokens,
                lambda model: self.router.fleet.candidates(model, clock()),
                partial(post, self._upstream),
            )
            self.metrics.exact_tokens = partial(_token_facts, self._tokens, self._verifier)
        self.proxy = Proxy(
            Exchanges(
                router=self.router,
                upstream=self._upstream,
                waiting=self._waiting,
                holding=Holding(self.router, clock),
                stored=self._stored,
                decisions=self._decisions,
                budget=RetryBudget(settings.retry.budget_ratio),
                clock=clock,
                max_attempts=settings.retry.max_attempts,
                repeat_unanswered=settings.retry.unanswered == "inference",
                tell_decision=settings.response_headers,
                exact_tokens=self._tokens,
            ),
            body_limits=_body_limits(settings),
            engine_control_open=settings.engine_control == "allow",
            session_header=settings.routing.session.header,
            on_record=self._on_record,
            on_served=None if settings.recording is None else self._on_served,
        )

    @property
    def waiting(self) -> int:
        """Requests that wait because nobody can take them."""
        return len(self._waiting)

    @property
    def url(self) -> str:
        """Base URL of the data plane."""
        return _url(self.settings.listen.host, self.port)

    @property
    def admin_url(self) -> str | None:
        """Base URL of the admin plane; None when it is off."""
        if self.settings.admin is None or self.admin_port is None:
            return None
        return _url(self.settings.admin.host, self.admin_port)

    def banner(self) -> list[str]:
        """What an operator wants to see at the start, line by line."""
        settings = self.settings
        names = [i.name for i in settings.fleet.instances]
        width = max(map(len, names), default=0)
        n = len(names)
        return [
            f"PrefixRoute {__version__}: {settings.routing.strategy} over {n} instance{'s' if n != 1 else ''}",
            f"  requests  {self.url}",
            f"  metrics   {self.admin_url}/metrics" if self.admin_url else "  metrics   off (admin: null)",
            *([f"  recording {settings.recording.path}"] if settings.recording is not None else []),
            *(f"  instance  {i.name:{width}}  {i.url}" for i in settings.fleet.instances),
        ]

    def facts(self) -> dict[str, Any]:
        """The banner for machines."""
        settings = self.settings
        return {
            "version": __version__,
            "strategy": settings.routing.strategy,
            "requests": self.url,
            "metrics": f"{self.admin_url}/metrics" if self.admin_url else None,
            "recording": settings.recording.path if settings.recording is not None else None,
            "instances": [{"name": i.name, "url": i.url} for i in settings.fleet.instances],
        }

    def _on_record(self, record: RequestRecord) -> None:
        self.metrics.record(record)
        if self.settings.log.access:
            access_log(record, _access, self.router.fleet.knows_model)
        for slot, one in self.router.audit.feedback.take_changed():
            tell_drift(self.router.fleet.instances[slot].name, one)
        if self.router.n_policy_faults > self._n_faults_told:
            # The first, then ever more rarely: every request may be one.
            self._n_faults_told = 2 * self.router.n_policy_faults
            _log.error(
                "strategy %s failed, so that load decides (%d times so far)",
                self.settings.routing.strategy,
                self.router.n_policy_faults,
                exc_info=self.router.last_policy_fault,
            )

    def _cache_emptied(self, name: str, started_s: float | None) -> None:
        if self._kv_events is not None:
            self._kv_events.emptied(name, started_s)

    def _told_events(self, name: str, sources: Sequence[EventSource]) -> None:
        if self._kv_events is not None:
            self._kv_events.told_sources(name, sources)

    def _on_served(self, record: RequestRecord, prompt: Prompt) -> None:
        if self.recorder is not None:
            self.recorder.record(record, prompt)

    def _start_recorder(self, settings: RecordingSettings) -> Recorder:
        recorder = start_recorder(settings, clock=self._clock, knows_model=self.router.fleet.knows_model)
        self.metrics.recorded = recorder.counts
        return recorder

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        settings = self.settings
        if not has_fast_parser():
            _log.warning("aiohttp's compiled parser is missing: requests are parsed slower and less strictly")
        if settings.routing.strategy == "kv_aware" and self.exact is None:
            _log.warning("strategy kv_aware knows nothing: no instance has kv_events (docs/kv-events.md); load decides")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._upstream.close)
            if settings.recording is not None:
                self.recorder = self._start_recorder(settings.recording)
                # After the last request; not on the loop, because it may wait for the disk.
                stack.push_async_callback(asyncio.to_thread, self.recorder.close)
            front = FrontServer(self.proxy.handle, _client_limits(settings))
            server, self.port = await listen(front, settings.listen.host, settings.listen.port)
            transports: list[asyncio.Transport] = []
            stack.callback(_abort, transports)
            stack.push_async_callback(front.shutdown, _GRACE_S)
            stack.callback(server.close)
            if settings.admin is not None:
                admin = FrontServer(self._make_admin().handle, _client_limits(settings))
                admin_server, self.admin_port = await listen(admin, settings.admin.host, settings.admin.port)
                stack.push_async_callback(admin.shutdown, _GRACE_S)
                stack.callback(admin_server.close)
            await stack.enter_async_context(_background(self._prober.run(), "prober"))
            if self._kv_events is not None:
                await stack.enter_async_context(_background(self._kv_events.run(), "KV events"))
            if self._tokens is not None:
                await stack.enter_async_context(_background(self._tokens.run(), "exact tokens"))
            if self._verifier is not None and settings.tokenizer.verify:
                await stack.enter_async_context(_background(self._verifier.run(), "verifier of exact tokens"))
            try:
                yield
            finally:
                # Unready first; then nobody new; then those under way; probes and the admin plane go on until the end.
                self.stopping = True
                server.close()
                # Before connections let go of theirs.
                transports += [c.transport for c in front.connections if c.transport is not None]
                front.pre_shutdown()
                await self._drain(transports)
                self.proxy.is_cutting_off = True
                _log.info("stopped")

    async def _drain(self, transports: Sequence[asyncio.Transport]) -> None:
        limit_s = self.settings.drain_timeout_s
        if self.proxy.n_active:
            _log.info("stopping: requests under way have up to %g s to end (%d now)", limit_s, self.proxy.n_active)
        try:
            async with asyncio.timeout(limit_s):
                await self.proxy.wait_idle()
                # An answer is over for us before its client has taken all of it.
                while any(t.get_write_buffer_size() for t in transports):  # noqa: ASYNC110  they tell nobody
                    await asyncio.sleep(_UNSENT_POLL_S)
        except TimeoutError:
            _log.warning("stopping: what did not end in time is cut off (%d requests)", self.proxy.n_active)

    def _make_admin(self) -> Admin:
        return Admin(
            self.router,
            self.metrics,
            strategy=self.settings.routing.strategy,
            classify=lambda path: route_of(plain_path(path)).api,
            is_stopping=lambda: self.stopping,
            stored=self._stored,
            decisions=self._decisions,
            on_change=self._waiting.wake,
            session_header=self.settings.routing.session.header,
            body_limits=_body_limits(self.settings),
            clock=self._clock,
            exact_tokens=self._tokens,
        )


@asynccontextmanager
async def running(
    settings: Settings,
    *,
    environ: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[App]:
    """A router that listens while the context is open, and drains when it closes. Raises ConfigError, ListenError."""
    app = App(settings, os.environ if environ is None else environ, clock)
    async with app._serving():
        yield app


def _client_limits(settings: Settings) -> ClientLimits:
    limits = settings.limits
    return ClientLimits(limits.max_header_bytes, limits.client_head_timeout_s, limits.client_idle_timeout_s)


def _body_limits(settings: Settings) -> BodyLimits:
    limits = settings.limits
    return BodyLimits(limits.max_body_bytes, limits.client_body_timeout_s, limits.client_body_bytes_per_s)


def _token_facts(tokens: ExactTokens, verifier: Verifier) -> TokenFacts:
    return TokenFacts(
        state=tokens.state.value,
        states=[state.value for state in State],
        outcomes={outcome.value: n for outcome, n in tokens.outcomes.items()},
        verdicts={verdict.value: n for verdict, n in verifier.verdicts.items()},
        checks={"agreed": tokens.n_checks - tokens.n_check_faults, "differed": tokens.n_check_faults},
    )


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """`work` runs while the context is open. If it ends by itself, that is a fault, and said so."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_say_fault)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _say_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _log.error("%s stopped by a fault", task.get_name(), exc_info=fault)


def _abort(transports: Sequence[asyncio.Transport]) -> None:
    """Ends what closing did not: it waits for clients to read what is left, and some never do."""
    for transport in transports:
        transport.abort()


def _url(host: str, port: int) -> str:
    # A wildcard address is listened on, not connected to.
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{address(reachable, port)}"
