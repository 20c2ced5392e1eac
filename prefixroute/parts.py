"""What a router is made of, as configured, and how all of it follows another configuration.

A change is made in two steps: `prepare` does whatever can fail and changes nothing; `commit` fails in nothing and is
over before the event loop turns. So a request sees the one configuration or the other, and never a piece of both.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from prefixroute.build import (
    Deciding,
    decides_alike,
    make_deciding,
    make_endpoints,
    make_kv_events,
    make_policy,
    make_router,
    make_seed,
    make_shadows,
)
from prefixroute.config import InstanceSettings
from prefixroute.config.live import Change, change
from prefixroute.config.settings import Settings
from prefixroute.core.exact import ExactIndex
from prefixroute.core.fleet import ProbeFailure
from prefixroute.core.group import Group
from prefixroute.core.prompt import Api, Prompt
from prefixroute.exact_tokens.service import ExactTokens, State
from prefixroute.exact_tokens.setup import make_exact_tokens, make_verifier
from prefixroute.exact_tokens.verify import Verifier
from prefixroute.http.arrival import RequestHead
from prefixroute.http.body import BodyLimits
from prefixroute.http.decisions import Decisions
from prefixroute.http.exchange import Exchanges
from prefixroute.http.holding import Holding
from prefixroute.http.proxy import Proxy
from prefixroute.http.retry import RetryBudget
from prefixroute.http.routes import plain_path, route_of
from prefixroute.http.stored import StoredResponses
from prefixroute.http.tokenize import post
from prefixroute.http.upstream import ConnectionLimits, Upstream
from prefixroute.http.waiting import WaitingRoom
from prefixroute.instance_facts import EventSource
from prefixroute.leaving import Leaving
from prefixroute.metrics import Metrics, TokenFacts
from prefixroute.names import Names
from prefixroute.prober import Prober
from prefixroute.record import RequestRecord
from prefixroute.sagemaker.endpoints import Endpoints
from prefixroute.sagemaker.service import SageMaker
from prefixroute.sagemaker.sessions import Sessions
from prefixroute.security import PreparedSecurity, Security

if TYPE_CHECKING:
    from prefixroute.kv_events.service import KvEvents


@dataclass(frozen=True, slots=True)
class Prepared:
    """A change that can be made."""

    change: Change
    deciding: Deciding
    security: PreparedSecurity
    endpoints: Endpoints


class Parts:
    """Of one router. `on_record`: gets each finished request; `on_served`: as `Proxy` has it."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        clock: Callable[[], float],
        *,
        on_record: Callable[[RequestRecord], None],
        on_served: Callable[[RequestRecord, Prompt], None] | None,
    ) -> None:
        self.settings = settings
        """As in force."""
        self._clock = clock
        self.security = Security(settings, environ, clock=clock)
        self._seed = make_seed(settings.routing)
        self.exact: ExactIndex | None = None
        """What instances say they hold, when any of them has KV events."""
        if any(i.kv_events != "off" for i in settings.fleet.instances):
            self.exact = ExactIndex(secrets.randbits(64), settings.limits.exact_index_bytes)
        self.router = make_router(settings, exact=self.exact, seed=self._seed)
        self.leaving = Leaving(self.router.leaving)
        self.metrics = Metrics(self.router, strategy=settings.routing.strategy, clock=clock)
        self.kv_events: KvEvents | None = None
        if self.exact is not None:
            self.metrics.exact = self.exact
            self.kv_events = make_kv_events(settings, self.exact, self.router.fleet.instances)
        self.waiting = WaitingRoom(
            self.router,
            wait_s=settings.limits.wait_for_instance_s,
            max_waiting=settings.limits.max_waiting,
            clock=clock,
        )
        self.metrics.waiting = lambda: len(self.waiting)
        self._holding = Holding(self.router, clock)
        self.stored = StoredResponses(settings.limits.max_stored_responses)
        self.decisions = Decisions(settings.limits.max_decisions)
        names = Names()
        self.upstream = Upstream(
            first_byte_timeout_s=settings.upstream.first_byte_timeout_s,
            idle_timeout_s=settings.upstream.idle_timeout_s,
            gone_timeout_s=settings.upstream.gone_timeout_s,
            limits=_connection_limits(settings),
            api_keys=self.security.instance_keys,
            tls=self.security.instance_tls,
            names=names,
        )
        self.prober = Prober(
            self.router,
            settings.fleet.health,
            api_keys=self.security.instance_keys,
            tls=self.security.instance_tls,
            known_capacity=_known_capacity(settings),
            asks_events=_asks_events(settings),
            names=names,
            on_change=self.waiting.wake,
            on_probe=self._probed,
            on_emptied=self._cache_emptied,
            on_events=self._told_events,
            on_adapters=None if self.exact is None else self.exact.learned_adapters,
            clock=clock,
        )
        self.tokens = make_exact_tokens(settings.tokenizer)
        self.verifier: Verifier | None = None
        if self.tokens is not None:
            self.verifier = make_verifier(
                settings.tokenizer,
                self.tokens,
                lambda model: self.router.fleet.candidates(model, clock()),
                partial(post, self.upstream),
            )
            self.metrics.exact_tokens = partial(_token_facts, self.tokens, self.verifier)
        self.sagemaker = SageMaker(
            make_endpoints(settings, self._seed),
            Sessions(settings.sagemaker.max_sessions),
            self.router.fleet,
            self.security.gate,
            lambda: self.security.signatures,
            rng=Random(secrets.randbits(64)),
        )
        self._budget = RetryBudget(settings.retry.budget_ratio)
        self.proxy = Proxy(
            self._exchanges(),
            body_limits=body_limits(settings),
            engine_control_open=settings.engine_control == "allow",
            session_header=settings.routing.session.header,
            on_record=on_record,
            on_served=on_served,
            gate=self.security.gate,
            contract=self.sagemaker,
            on_sleep=lambda name: self._cache_emptied(name, None),
            names_clients=lambda: self.settings.log.client_address,
        )

    # ------------------------------------------------------------------ another configuration

    def prepare(self, new: Settings) -> Prepared:
        """Whatever can fail of a change to `new`, or takes time. Raises ConfigError. Any thread may do it."""
        made = change(self.settings, new)
        old, routing = self.settings.routing, made.settings.routing
        router = self.router
        policy = router.policy if decides_alike(old, routing) else make_policy(routing, self._seed)
        shadows = router.audit.shadows if old == routing else make_shadows(routing, self._seed)
        security = self.security.prepare(made.settings)
        made = replace(made, changed=(*made.changed, *self.security.differences(security)))
        endpoints = make_endpoints(made.settings, self._seed, self.sagemaker.endpoints)
        return Prepared(made, make_deciding(made.settings, policy, shadows), security, endpoints)

    def commit(self, prepared: Prepared) -> None:
        """Makes the change. It applies to requests, probes and scrapes that begin from now on."""
        old, new = self.settings, prepared.change.settings
        self.settings = new
        self.security.commit(prepared.security)
        limits = new.limits
        self.router.configure(**prepared.deciding)
        self.upstream.configure(
            first_byte_timeout_s=new.upstream.first_byte_timeout_s,
            idle_timeout_s=new.upstream.idle_timeout_s,
            gone_timeout_s=new.upstream.gone_timeout_s,
            limits=_connection_limits(new),
            api_keys=self.security.instance_keys,
            tls=self.security.instance_tls,
        )
        self._change_fleet(old.fleet.instances, new.fleet.instances)
        self.prober.configure(
            new.fleet.health,
            api_keys=self.security.instance_keys,
            tls=self.security.instance_tls,
            known_capacity=_known_capacity(new),
            asks_events=_asks_events(new),
        )
        self.waiting.configure(wait_s=limits.wait_for_instance_s, max_waiting=limits.max_waiting)
        self.stored.configure(limits.max_stored_responses)
        self.sagemaker.endpoints = prepared.endpoints
        self.sagemaker.sessions.configure(new.sagemaker.max_sessions)
        self.decisions.configure(limits.max_decisions)
        self.metrics.strategy = new.routing.strategy
        self.metrics.instances_changed()
        if new.retry.budget_ratio != old.retry.budget_ratio:
            self._budget = RetryBudget(new.retry.budget_ratio)
        self.proxy.configure(
            self._exchanges(),
            body_limits=body_limits(new),
            engine_control_open=new.engine_control == "allow",
            session_header=new.routing.session.header,
        )
        # Somebody may be there now who takes what was waiting for others.
        self.waiting.wake()
        self._holding.look()

    def _change_fleet(self, old: Sequence[InstanceSettings], new: Sequence[InstanceSettings]) -> None:
        """Who has the same name and address is the same instance. It keeps what is known of it."""
        before = {i.name: i for i in old}
        after = {i.name: i for i in new}
        for name, was in before.items():
            now = after.get(name)
            if now is None or now.url != was.url:
                self._remove(name)
        for name, now in after.items():
            was_here = before.get(name)
            if was_here is None or was_here.url != now.url:
                self._add(now)
            elif was_here != now:
                self._alter(was_here, now)

    def _remove(self, name: str) -> None:
        # Who may still talk of the instance first.
        self.prober.remove(name)
        if self.kv_events is not None:
            self.kv_events.remove(name)
        self.router.remove_instance(name)
        self.stored.forget(name)
        self.sagemaker.sessions.forget(name)
        self.upstream.keep([i.name for i in self.router.fleet.instances])
        self.leaving.removed(name)

    def _add(self, instance: InstanceSettings) -> None:
        models = None if instance.models is None else frozenset(instance.models)
        self.router.add_instance(instance.name, instance.url, models=models, capacity_tokens=instance.capacity_tokens)
        self._follow_events(instance)
        self.prober.add(instance.name)

    def _alter(self, was: InstanceSettings, now: InstanceSettings) -> None:
        router, name = self.router, now.name
        if now.models != was.models:
            router.fleet.set_models(name, None if now.models is None else frozenset(now.models))
        if now.capacity_tokens is not None:
            router.learned_capacity(name, now.capacity_tokens)
        elif was.capacity_tokens is not None:
            router.forget_capacity(name)
        if now.kv_events != was.kv_events:
            self._follow_events(now)

    def _follow_events(self, instance: InstanceSettings) -> None:
        if self.kv_events is None:
            return
        from prefixroute.kv_events.sources import addresses_of

        self.kv_events.add(self.router.fleet.state(instance.name).instance, addresses_of(instance))

    # ------------------------------------------------------------------ what parts tell each other

    def aim(self, path: str, head: RequestHead) -> tuple[Api, Group | None]:
        """What a request at a path of the data port means: the grammar of its body, and whom it is for (None: any
        instance). `head`: with its headers. Raises RequestError for what could not be asked."""
        route = route_of(plain_path(path))
        if not route.is_endpoint:
            return route.api, None
        call = self.sagemaker.call(RequestHead("POST", path, 1, head.headers), dry=True)
        return call.head.route.api, call.group

    def _probed(self, name: str, outcome: str) -> None:
        self.metrics.probed(name, outcome)
        self.upstream.told(name, listens=outcome != ProbeFailure.REFUSED.value)

    def _cache_emptied(self, name: str, started_s: float | None) -> None:
        if self.kv_events is not None:
            self.kv_events.emptied(name, started_s)

    def _told_events(self, name: str, sources: Sequence[EventSource]) -> None:
        if self.kv_events is not None:
            self.kv_events.told_sources(name, sources)

    def _exchanges(self) -> Exchanges:
        settings = self.settings
        return Exchanges(
            router=self.router,
            upstream=self.upstream,
            waiting=self.waiting,
            holding=self._holding,
            stored=self.stored,
            decisions=self.decisions,
            budget=self._budget,
            clock=self._clock,
            max_attempts=settings.retry.max_attempts,
            repeat_unanswered=settings.retry.unanswered == "inference",
            tell_decision=settings.response_headers,
            comment_s=settings.upstream.sse_comment_s,
            exact_tokens=self.tokens,
        )


def body_limits(settings: Settings) -> BodyLimits:
    limits = settings.limits
    return BodyLimits(limits.max_body_bytes, limits.client_body_timeout_s, limits.client_body_bytes_per_s)


def _connection_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        connect_timeout_s=settings.upstream.connect_timeout_s,
        keepalive_s=settings.upstream.keepalive_s,
        max_header_bytes=settings.limits.max_header_bytes,
        max_requests=settings.upstream.max_requests,
        n_warm=settings.upstream.warm_connections,
    )


def _known_capacity(settings: Settings) -> list[str]:
    return [i.name for i in settings.fleet.instances if i.capacity_tokens is not None]


def _asks_events(settings: Settings) -> list[str]:
    return [i.name for i in settings.fleet.instances if i.kv_events == "auto"]


def _token_facts(tokens: ExactTokens, verifier: Verifier) -> TokenFacts:
    return TokenFacts(
        state=tokens.state.value,
        states=[state.value for state in State],
        outcomes={outcome.value: n for outcome, n in tokens.outcomes.items()},
        verdicts={verdict.value: n for verdict, n in verifier.verdicts.items()},
        checks={"agreed": tokens.n_checks - tokens.n_check_faults, "differed": tokens.n_check_faults},
    )
