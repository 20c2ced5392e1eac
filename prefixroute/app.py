"""Builds everything from settings and runs it. The only module that knows everybody."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from prefixroute import __version__
from prefixroute.access_log import AccessLog
from prefixroute.background import background
from prefixroute.config.live import Change
from prefixroute.config.sagemaker import unheard_variants
from prefixroute.config.settings import RecordingSettings, Settings
from prefixroute.config.tls import ServerTls
from prefixroute.core.prompt import Prompt
from prefixroute.drift import tell_drift
from prefixroute.errors import n_requests
from prefixroute.handshakes import FailedHandshakes
from prefixroute.http.admin import Admin
from prefixroute.http.front import ClientLimits, FrontServer, address, has_fast_parser, listen
from prefixroute.logs import set_level
from prefixroute.memory import give_back
from prefixroute.parts import Parts, Prepared, body_limits
from prefixroute.record import RequestRecord
from prefixroute.recording.recorder import Recorder, start_recorder
from prefixroute.reload import ConfigSource, Reloader
from prefixroute.systemd import Notifier

_log = logging.getLogger(__name__)
_access = logging.getLogger("prefixroute.access")

# How long connections have to close once the drain is over: those without a request, and the admin port's.
_GRACE_S = 0.1
_UNSENT_POLL_S = 0.02
# How often it is looked whether so much of large bodies has come that memory is worth giving back.
_MEMORY_LOOK_S = 3.0
_MEMORY_STEP_BYTES = 32 * 1024 * 1024


class App:
    """A router that runs. Made by `running`."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        clock: Callable[[], float],
        source: ConfigSource | None,
        notifier: Notifier,
    ) -> None:
        self.stopping = False
        self.port = 0
        self.admin_port: int | None = None
        self.recorder: Recorder | None = None
        """While it serves, and as configured."""
        self._clock = clock
        self._n_faults_told = 0
        self._admin: Admin | None = None
        self.parts = parts = Parts(
            settings,
            environ,
            clock,
            on_record=self._on_record,
            on_served=None if settings.recording is None else self._on_served,
        )
        self.exact = parts.exact
        self.router = parts.router
        self.metrics = parts.metrics
        self._access_log = AccessLog(_access, self.router.fleet.knows_model)
        self._logs_requests = settings.log.access
        self.proxy = parts.proxy
        self.security = parts.security
        self._notifier = notifier
        self._source = source
        self._reloader: Reloader | None = None
        if source is not None:
            self._reloader = Reloader(
                source,
                self._take_up,
                prepare=parts.prepare,
                note=self.metrics.reloads.note,
                is_watching=lambda: self.settings.watch_config,
                on_begin=notifier.reloading,
                on_end=lambda: notifier.ready(self._status()),
            )

    @property
    def settings(self) -> Settings:
        """As in force."""
        return self.parts.settings

    def apply(self, new: Settings) -> Change:
        """Follows another configuration as far as that can be done while running.

        Raises ConfigError, and then nothing has changed.
        """
        return self._take_up(self.parts.prepare(new))

    def _take_up(self, prepared: Prepared) -> Change:
        old, change = self.settings, prepared.change
        self.parts.commit(prepared)
        settings = change.settings
        if settings.log.level != old.log.level:
            set_level(settings.log.level)
        self._logs_requests = settings.log.access
        if self._admin is not None:
            self._admin.configure(
                strategy=settings.routing.strategy,
                session_header=settings.routing.session.header,
                body_limits=body_limits(settings),
            )
        self._tell_oddities()
        return change

    @property
    def waiting(self) -> int:
        """Requests that wait because nobody can take them."""
        return len(self.parts.waiting)

    @property
    def url(self) -> str:
        """Base URL of the data plane."""
        return _url(self.settings.listen.host, self.port, self.security.listen_tls)

    @property
    def admin_url(self) -> str | None:
        """Base URL of the admin plane; None when it is off."""
        if self.settings.admin is None or self.admin_port is None:
            return None
        return _url(self.settings.admin.host, self.admin_port, self.security.admin_tls)

    def banner(self) -> list[str]:
        """What an operator wants to see at the start, line by line."""
        settings = self.settings
        names = [i.name for i in settings.fleet.instances]
        width = max(map(len, names), default=0)
        return [
            f"PrefixRoute {__version__}: {self._status()}",
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
        self.parts.leaving.look()
        if self._logs_requests:
            self._access_log.note(record)
        for slot, one in self.router.audit.feedback.take_changed():
            tell_drift(next(i.name for i in self.router.fleet.instances if i.slot == slot), one)
        if self.router.n_policy_faults > self._n_faults_told:
            # The first, then ever more rarely: every request may be one.
            self._n_faults_told = 2 * self.router.n_policy_faults
            _log.error(
                "strategy %s failed, so that load decides (%d times so far)",
                self.settings.routing.strategy,
                self.router.n_policy_faults,
                exc_info=self.router.last_policy_fault,
            )

    def _on_served(self, record: RequestRecord, prompt: Prompt) -> None:
        if self.recorder is not None:
            self.recorder.record(record, prompt)

    def _start_recorder(self, settings: RecordingSettings) -> Recorder:
        recorder = start_recorder(settings, clock=self._clock, knows_model=self.router.fleet.knows_model)
        self.metrics.recorded = recorder.counts
        return recorder

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        settings, parts = self.settings, self.parts
        if not has_fast_parser():
            _log.warning("aiohttp's compiled parser is missing: requests are parsed slower and less strictly")
        self._tell_oddities()
        async with AsyncExitStack() as stack:
            stack.callback(self._say_stopped)
            stack.push_async_callback(parts.upstream.close)
            if settings.recording is not None:
                self.recorder = self._start_recorder(settings.recording)
                # After the last request; not on the loop, because it may wait for the disk.
                stack.push_async_callback(asyncio.to_thread, self.recorder.close)
            front = FrontServer(
                self.proxy.handle,
                _client_limits(settings),
                self.metrics.unread,
                names_clients=lambda: self.settings.log.client_address,
                max_fast_bytes=self._max_fast_bytes,
            )
            security, at = self.security, settings.listen
            self._watch_handshakes("data", security.listen_tls)
            self._watch_handshakes("admin", security.admin_tls)
            server = await listen(front, at.host, at.port, security.listen_tls)
            self.port = server.port
            transports: list[asyncio.Transport] = []
            stack.callback(_abort, transports)
            stack.push_async_callback(self._wait_cut_off)
            stack.push_async_callback(front.shutdown, _GRACE_S)
            stack.callback(server.close)
            if settings.admin is not None:
                admin = FrontServer(self._make_admin().handle, _client_limits(settings))
                at_admin = settings.admin
                admin_server = await listen(admin, at_admin.host, at_admin.port, security.admin_tls)
                self.admin_port = admin_server.port
                stack.push_async_callback(admin.shutdown, _GRACE_S)
                stack.callback(admin_server.close)
            await stack.enter_async_context(background(parts.prober.run(), "prober"))
            await stack.enter_async_context(background(self._give_back_memory(), "memory"))
            await stack.enter_async_context(background(self.metrics.loop_lag.run(), "event loop's lag"))
            if parts.kv_events is not None:
                await stack.enter_async_context(background(parts.kv_events.run(), "KV events"))
            if parts.tokens is not None:
                await stack.enter_async_context(background(parts.tokens.run(), "exact tokens"))
            if parts.verifier is not None and settings.tokenizer.verify:
                await stack.enter_async_context(background(parts.verifier.run(), "verifier of exact tokens"))
            await stack.enter_async_context(background(self._notifier.watch(), "watchdog"))
            try:
                async with background(self._follow_configuration(), "configuration"):
                    self._notifier.ready(self._status())
                    yield
            finally:
                # Unready first; then nobody new; then those under way; probes and the admin plane go on until the end.
                self.stopping = self.proxy.is_stopping = True
                self._notifier.stopping()
                await self._stay_open()
                server.close()
                # Before connections let go of theirs.
                transports += front.transports()
                front.pre_shutdown()
                await self._drain(transports)
                self.proxy.is_cutting_off = True

    def _max_fast_bytes(self) -> int:
        return self.settings.limits.max_body_bytes if self.settings.lane == "auto" else 0

    def _watch_handshakes(self, plane: str, tls: ServerTls | None) -> None:
        if tls is None:
            return

        def count() -> None:
            self.metrics.failed_handshakes[plane] += 1

        tls.on_failure = FailedHandshakes(plane, count, self._clock).failed

    def _tell_oddities(self) -> None:
        if self.settings.routing.strategy == "kv_aware" and self.exact is None:
            _log.warning("strategy kv_aware knows nothing: no instance has kv_events (docs/kv-events.md); load decides")
        told_of = {i.name for i in self.settings.fleet.instances if i.kv_events != "off"}
        for endpoint, variant in unheard_variants(self.settings.sagemaker, told_of):
            _log.warning(
                "KV_AWARE knows nothing in variant %s of endpoint %s: none of its instances has kv_events "
                "(docs/kv-events.md); load decides",
                variant,
                endpoint,
            )
        self.security.tell_openness()

    async def _follow_configuration(self) -> None:
        if self._source is not None and self._reloader is not None:
            self._source.tell_outranked()
            await self._reloader.run()

    def _status(self) -> str:
        n = len(self.settings.fleet.instances)
        endpoints = len(self.settings.sagemaker.endpoints)
        also = f", {endpoints} endpoint{'s' if endpoints != 1 else ''} of their own" if endpoints else ""
        return f"{self.settings.routing.strategy} over {n} instance{'s' if n != 1 else ''}{also}"

    async def _stay_open(self) -> None:
        """Takes requests a while longer: balancers need to find out that it is not ready, and stop sending any."""
        delay_s = self.settings.shutdown_delay_s
        if delay_s:
            _log.info("stopping: not ready any more, the port closes in %g s", delay_s)
            await asyncio.sleep(delay_s)

    async def _give_back_memory(self) -> None:
        while True:
            await asyncio.sleep(_MEMORY_LOOK_S)
            if self.proxy.large_body_bytes > _MEMORY_STEP_BYTES:
                self.proxy.large_body_bytes = 0
                await asyncio.to_thread(give_back)

    async def _drain(self, transports: Sequence[asyncio.Transport]) -> None:
        limit_s = self.settings.drain_timeout_s
        if self.proxy.n_active:
            _log.info("stopping: requests under way have up to %g s to end (%d now)", limit_s, self.proxy.n_active)
        try:
            async with asyncio.timeout(limit_s):
                await self.proxy.wait_idle()
                # An answer is over for us before its client has taken all of it.
                while any(map(_n_unsent, transports)):  # noqa: ASYNC110  they tell nobody
                    await asyncio.sleep(_UNSENT_POLL_S)
        except TimeoutError:
            _log.warning("stopping: what did not end in time is cut off (%s)", n_requests(self.proxy.n_active))

    async def _wait_cut_off(self) -> None:
        """Until what was cut off has been recorded as such: it is cancelled by now, and needs a turn of the loop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self.proxy.wait_idle()

    def _say_stopped(self) -> None:
        if self.stopping:
            _log.info("stopped")

    def _make_admin(self) -> Admin:
        parts = self.parts
        self._admin = Admin(
            self.router,
            self.metrics,
            strategy=self.settings.routing.strategy,
            aim=parts.aim,
            is_stopping=lambda: self.stopping,
            stored=parts.stored,
            decisions=parts.decisions,
            on_change=parts.waiting.wake,
            session_header=self.settings.routing.session.header,
            body_limits=body_limits(self.settings),
            clock=self._clock,
            exact_tokens=parts.tokens,
            token=self.security.admin_token,
        )
        return self._admin


@asynccontextmanager
async def running(
    settings: Settings,
    *,
    environ: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    source: ConfigSource | None = None,
    notifier: Notifier | None = None,
) -> AsyncIterator[App]:
    """A router that listens while the context is open, and drains when it closes. Raises ConfigError, ListenError.

    `source`: where `settings` came from, to be read again when they change; None: they never do.
    """
    environ = os.environ if environ is None else environ
    app = App(settings, environ, clock, source, notifier or Notifier(None))
    async with app._serving():
        yield app


def _client_limits(settings: Settings) -> ClientLimits:
    limits = settings.limits
    return ClientLimits(
        limits.max_header_bytes,
        limits.client_head_timeout_s,
        limits.client_idle_timeout_s,
        limits.client_stall_timeout_s,
    )


def _n_unsent(transport: asyncio.Transport) -> int:
    try:
        return transport.get_write_buffer_size()
    except AttributeError:  # asyncio's transport of TLS, once it was closed twice, as aiohttp does
        return 0


def _abort(transports: Sequence[asyncio.Transport]) -> None:
    """Ends what closing did not: it waits for clients to read what is left, and some never do."""
    for transport in transports:
        transport.abort()


def _url(host: str, port: int, tls: ServerTls | None) -> str:
    # A wildcard address is listened on, not connected to.
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http{'' if tls is None else 's'}://{address(reachable, port)}"
