"""Asks instances how they are: probes for health, and now and then what they serve and hold.

- A probe is a new connection: it also tells whether the server still accepts any. One task an instance, so a
  slow one delays nobody else.
- 2xx, 429 and refusals of *us* (401, 403, 404, 405) mean that the server lives; the latter are told once. A
  connection that could not be made, silence, and any other answer are failures; what follows from them is the
  fleet's rule, not ours. Failures of this machine (no free socket) are no news about the instance.
- Besides, once an instance is reachable and then every `LEARN_EVERY_S`: its models, its KV capacity, whether it
  restarted or sleeps, which empties its cache, and, if wanted, where it publishes KV events. What an answer does
  not tell stays as it was: unknown is not 0.
- Every request carries the instance's key, if it has one. Keys are never logged.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from ssl import SSLContext
from types import TracebackType
from typing import Self

import aiohttp
import aiohttp.abc
from yarl import URL

from prefixroute import __version__
from prefixroute.config import HealthSettings
from prefixroute.core.fleet import Instance, InstanceState, ProbeFailure, State
from prefixroute.core.router import Router
from prefixroute.errors import OWN_FAULTS
from prefixroute.instance_facts import EventSource, InstanceFacts, read_event_sources, read_metrics, read_models
from prefixroute.names import Names

LEARN_EVERY_S = 30.0
MAX_MODELS_BYTES = 1024 * 1024
MAX_METRICS_BYTES = 4 * 1024 * 1024
# Share of the interval by which probes vary, so that routers and instances do not fall into step.
_JITTER = 0.1
# Start times of one process agree exactly; of two processes they differ by a model's loading time.
_SAME_START_S = 1.0

_NO_SUCH_PATH = (404, 405)
_REFUSES_US = (401, 403)
_CHECK_KEY = "check the key in its api_key_env or api_key_file"
# Garbled answers end in ValueErrors of several libraries, unusable host names in UnicodeError, which is one.
_REQUEST_ERRORS = (aiohttp.ClientError, OSError, ValueError)


@dataclass(slots=True)
class _Memory:
    """What the prober remembers of one instance."""

    reported: State
    health_path: str | None = None
    learned_s: float | None = None
    started_s: float | None = None
    asleep: bool = False
    told: dict[str, str] = field(default_factory=dict)
    """Last warning by topic, until the topic is in order again."""


class Prober:
    """Probes every instance of the router's fleet. Use as an async context manager around `probe_once`, or `run`.

    Instances that come and go while it runs are told by `add` and `remove`.

    `api_keys`, `tls` (with the name that certificates are checked against, or None): by instance name.
    `known_capacity`: names whose KV capacity is configured and so not learned. `on_change`: called when an instance may
    have become able to serve. `on_probe(name, outcome)`: after each probe; outcome is `passed`, the value of a
    `ProbeFailure`, or `not_sent`. `on_emptied(name, started_s)`: the instance's
    cache is gone, because it sleeps or, with the time by its own clock, is a new process. `asks_events`: names of
    instances that are asked where they publish KV events; `on_events` gets their answers. `on_adapters`: gets the
    adapters that an instance lists among its models.
    """

    def __init__(
        self,
        router: Router,
        health: HealthSettings,
        *,
        api_keys: Mapping[str, str] | None = None,
        tls: Mapping[str, tuple[SSLContext, str | None]] | None = None,
        known_capacity: Collection[str] = (),
        asks_events: Collection[str] = (),
        names: Names | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_probe: Callable[[str, str], None] = lambda _name, _outcome: None,
        on_emptied: Callable[[str, float | None], None] = lambda _name, _started_s: None,
        on_events: Callable[[str, Sequence[EventSource]], None] = lambda _name, _sources: None,
        on_adapters: Callable[[Collection[str]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self._router = router
        self._health = health
        self._headers = _authorizations(api_keys or {})
        self._tls = dict(tls or {})
        self._known_capacity = frozenset(known_capacity)
        self._on_change = on_change
        self._on_probe = on_probe
        self._on_emptied = on_emptied
        self._asks_events = frozenset(asks_events)
        self._on_events = on_events
        self._on_adapters = on_adapters
        self._clock = clock
        self._rng = rng or Random()
        self._logger = logger or logging.getLogger(__name__)
        self._memories = {s.instance.name: _Memory(s.state) for s in router.fleet.states()}
        self._names = names
        self._session: aiohttp.ClientSession | None = None
        # While it runs.
        self._tasks: asyncio.TaskGroup | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}

    def configure(
        self,
        health: HealthSettings,
        *,
        api_keys: Mapping[str, str],
        known_capacity: Collection[str],
        asks_events: Collection[str],
        tls: Mapping[str, tuple[SSLContext, str | None]] | None = None,
    ) -> None:
        """Probes by these from now on. What instances serve and hold is asked for anew."""
        self._health = health
        self._headers = _authorizations(api_keys)
        self._tls = dict(tls or {})
        self._known_capacity = frozenset(known_capacity)
        self._asks_events = frozenset(asks_events)
        for memory in self._memories.values():
            memory.health_path = memory.learned_s = None

    def add(self, name: str) -> None:
        """An instance has joined the fleet: it is probed at once, and from now on."""
        self._memories[name] = _Memory(self._router.fleet.state(name).state)
        if self._tasks is not None:
            self._begin(name, self._tasks)

    def remove(self, name: str) -> None:
        """The instance leaves the fleet: a probe under way is broken off, and comes to nothing."""
        self._memories.pop(name, None)
        watch = self._watches.pop(name, None)
        if watch is not None:
            watch.cancel()

    async def __aenter__(self) -> Self:
        # At most one request an instance is under way.
        # Names are looked up in threads that requests share: see `names`.
        resolver = None if self._names is None else _Resolver(self._names)
        self._session = _session(aiohttp.TCPConnector(limit=0, force_close=True, resolver=resolver))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def run(self) -> None:
        """Probes until cancelled: all instances at once, then each at its own pace."""
        try:
            async with self, asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for instance in self._router.fleet.instances:
                    self._begin(instance.name, tasks)
                # There may be nobody to probe for a while.
                await asyncio.Event().wait()
        finally:
            self._tasks = None
            self._watches.clear()

    def _begin(self, name: str, tasks: asyncio.TaskGroup) -> None:
        self._watches[name] = tasks.create_task(self._watch(name), name=f"probe {name}")

    async def _watch(self, name: str) -> None:
        await self._probe(name)
        await asyncio.sleep(self._rng.random() * self._health.interval_s)
        while True:
            began_s = self._clock()
            await self._probe(name)
            pause_s = self._health.interval_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
            # A slow answer is part of the interval, but never all of it.
            await asyncio.sleep(max(pause_s - (self._clock() - began_s), pause_s * _JITTER))

    async def _probe(self, name: str) -> None:
        try:
            await self.probe_once(self._router.fleet.state(name).instance)
        except Exception:  # one odd answer must not end the probing of the whole fleet
            self._logger.exception("%s: fault while probing", name)

    async def probe_once(self, instance: Instance) -> None:
        """One probe and all that follows from it, learning included when it is due. Raises nothing of the network's."""
        name = instance.name
        memory = self._memories[name]
        state = self._router.fleet.state(name)
        try:
            status = await self._ask_health(instance, memory)
        except _REQUEST_ERRORS as error:
            failure = failure_of(error)
            cause = "not_sent" if failure is None else failure.value
            if failure is None:
                self._on_probe(name, cause)
                self._tell(memory, name, "not_sent", f"cannot be probed from here ({_error_text(error)})")
                return
            reason = _error_text(error)
            if failure in (ProbeFailure.STATUS, ProbeFailure.UNTRUSTED):
                cause = reason
        else:
            failure = None if self._lives(memory, name, status) else ProbeFailure.STATUS
            cause = reason = "passed" if failure is None else f"status {status}"
        memory.told.pop("not_sent", None)
        self._on_probe(name, "passed" if failure is None else failure.value)
        self._report(state, memory, "traffic")
        before = (state.state, state.failure)
        if failure is None:
            self._router.fleet.probe_passed(name)
        else:
            self._router.probe_failed(name, failure, reason)
        self._report(state, memory, cause)
        if (state.state, state.failure) != before:
            self._on_change()
        if failure is not None or before[0] is not State.UP:
            memory.learned_s = None
        if failure is None and (memory.learned_s is None or self._clock() - memory.learned_s >= LEARN_EVERY_S):
            memory.learned_s = self._clock()
            await self._learn_models(instance, memory, state)
            await self._learn_engine(instance, memory)
            if name in self._asks_events:
                await self._learn_events(instance, memory)

    # ------------------------------------------------------------------ health

    async def _ask_health(self, instance: Instance, memory: _Memory) -> int:
        """Status of the health check. `auto`: of the first path that exists, which is remembered."""
        if self._health.path != "auto":
            return (await self._get(instance, self._health.path, 0))[0]
        status = 0
        for path in dict.fromkeys((memory.health_path or "/health", "/health", "/ping")):
            status, _ = await self._get(instance, path, 0)
            if status not in _NO_SUCH_PATH:
                memory.health_path = path
                break
        return status

    def _lives(self, memory: _Memory, name: str, status: int) -> bool:
        """Whether an answer comes from a server that works, though it may not tell us so."""
        if 200 <= status < 300:
            memory.told.pop("health", None)
        elif status in _REFUSES_US or status in _NO_SUCH_PATH:
            remedy = _CHECK_KEY if status in _REFUSES_US else "set fleet.health.path"
            self._tell(memory, name, "health", f"answers its health check with {status}: taken as alive ({remedy})")
        else:
            return status == 429  # which is what busy servers say
        return True

    def _report(self, state: InstanceState, memory: _Memory, cause: str) -> None:
        """Logs a change of state since the last one told."""
        before, after = memory.reported, state.state
        if before is after:
            return
        memory.reported = after
        level = logging.WARNING if after in (State.DOWN, State.EJECTED) else logging.INFO
        self._log(level, state.instance.name, f"is {after.value}", before=before.value, cause=cause)

    # ------------------------------------------------------------------ what instances serve and hold

    async def _learn_models(self, instance: Instance, memory: _Memory, state: InstanceState) -> None:
        if instance.models is not None and self._on_adapters is None:
            return
        body = await self._ask(instance, memory, "/v1/models", MAX_MODELS_BYTES)
        listed = read_models(body) if body is not None else None
        if listed is None:
            return
        if self._on_adapters is not None:
            self._on_adapters(listed.adapters)
        if instance.models is not None or listed.models == state.models:
            return
        self._router.fleet.learned_models(instance.name, listed.models)
        self._log(logging.INFO, instance.name, "lists its models", n_models=len(listed.models))
        self._on_change()

    async def _learn_engine(self, instance: Instance, memory: _Memory) -> None:
        name = instance.name
        body = await self._ask(instance, memory, "/metrics", MAX_METRICS_BYTES)
        facts = read_metrics(body) if body is not None else InstanceFacts()
        if facts.capacity_tokens is not None and name not in self._known_capacity:
            if facts.capacity_tokens != self._router.capacity_tokens(name):
                self._log(logging.INFO, name, "tells its KV capacity", capacity_tokens=facts.capacity_tokens)
            self._router.learned_capacity(name, facts.capacity_tokens)
        if facts.started_s is not None:
            if memory.started_s is not None and abs(facts.started_s - memory.started_s) > _SAME_START_S:
                self._router.cache_emptied(name)
                self._on_emptied(name, facts.started_s)
                self._log(logging.INFO, name, "has restarted: its cache is taken as empty")
            memory.started_s = facts.started_s
        if facts.asleep is not None:
            if facts.asleep:
                self._router.cache_emptied(name)
                self._on_emptied(name, None)
                if not memory.asleep:
                    self._log(logging.WARNING, name, "sleeps: its cache is taken as empty")
            memory.asleep = facts.asleep

    async def _learn_events(self, instance: Instance, memory: _Memory) -> None:
        body = await self._ask(instance, memory, "/kv_event_sources", MAX_MODELS_BYTES)
        sources = read_event_sources(body) if body is not None else None
        if sources:
            memory.told.pop("events", None)
            self._on_events(instance.name, sources)
        else:
            self._tell(
                memory,
                instance.name,
                "events",
                "tells of no KV events: the estimated map serves (start it with --kv-events-config)",
            )

    async def _ask(self, instance: Instance, memory: _Memory, path: str, max_bytes: int) -> bytes | None:
        """Body of a 2xx answer; None for anything else, which is no reason to think worse of the instance."""
        try:
            status, body = await self._get(instance, path, max_bytes)
        except _REQUEST_ERRORS as error:
            self._log(logging.DEBUG, instance.name, f"{path} could not be read", cause=_error_text(error))
            return None
        if status in _REFUSES_US:
            remedy = _CHECK_KEY
            self._tell(memory, instance.name, path, f"answers {path} with {status} ({remedy})")
        elif body is None:
            self._tell(memory, instance.name, path, f"has a {path} of more than {max_bytes} bytes: not read")
        else:
            memory.told.pop(path, None)
            return body if 200 <= status < 300 else None
        return None

    # ------------------------------------------------------------------ requests and lines

    async def _get(self, instance: Instance, path: str, max_bytes: int) -> tuple[int, bytes | None]:
        """Status and body; None for a body above `max_bytes`."""
        if self._session is None:
            raise RuntimeError("the prober is used outside its context")
        if instance.url.startswith("unix:"):
            async with _session(aiohttp.UnixConnector(instance.url.removeprefix("unix:"), force_close=True)) as session:
                return await self._get_by(session, instance, f"http://localhost{path}", max_bytes)
        return await self._get_by(self._session, instance, instance.url + path, max_bytes)

    async def _get_by(
        self, session: aiohttp.ClientSession, instance: Instance, url: str, max_bytes: int
    ) -> tuple[int, bytes | None]:
        tls, server_name = self._tls.get(instance.name, (True, None))
        async with session.get(
            URL(url, encoded=True),
            ssl=tls,
            server_hostname=server_name,
            headers=self._headers.get(instance.name),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=self._health.timeout_s),
        ) as response:
            body = bytearray()
            if max_bytes:
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > max_bytes:
                        return response.status, None
            return response.status, bytes(body)

    def _tell(self, memory: _Memory, name: str, topic: str, message: str) -> None:
        """Warns of what lasts, once."""
        if memory.told.get(topic) != message:
            memory.told[topic] = message
            self._log(logging.WARNING, name, message)

    def _log(self, level: int, name: str, message: str, **fields: object) -> None:
        self._logger.log(level, "%s %s", name, message, extra={"fields": {"upstream": name, **fields}})


def failure_of(error: Exception) -> ProbeFailure | None:
    """What a request that got no answer says about the instance; None: nothing, it could not be sent from here."""
    os_error = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(os_error, OSError) and os_error.errno in OWN_FAULTS:
        return None
    # A resolver that is out of order says nothing about the name, and hits all instances alike.
    is_silence = isinstance(os_error, TimeoutError) or (
        isinstance(os_error, socket.gaierror) and os_error.errno == socket.EAI_AGAIN
    )
    if is_silence:
        return ProbeFailure.TIMEOUT
    if isinstance(os_error, ssl.SSLError):
        return ProbeFailure.UNTRUSTED
    return ProbeFailure.REFUSED if isinstance(error, aiohttp.ClientConnectorError) else ProbeFailure.STATUS


def _authorizations(api_keys: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {name: {"Authorization": f"Bearer {key}"} for name, key in api_keys.items()}


class _Resolver(aiohttp.abc.AbstractResolver):
    """aiohttp's way to `Names`."""

    def __init__(self, names: Names) -> None:
        self._names = names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[aiohttp.abc.ResolveResult]:
        return [
            {
                "hostname": host,
                "host": address[0],
                "port": port,
                "family": found,
                "proto": proto,
                "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            }
            for found, _kind, proto, _name, address in await self._names.addresses(host, port)
            if family in (socket.AF_UNSPEC, found)
        ]

    async def close(self) -> None:
        """Nothing is held."""


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        headers={"User-Agent": f"prefixroute/{__version__}", "Accept-Encoding": "identity"},
    )


def _error_text(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS: {cause.reason}"
    if isinstance(cause, TimeoutError) and cause.strerror is None:
        return "no answer in time"
    # The error's own text may hold the address, and with it what the operator wrote there.
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
