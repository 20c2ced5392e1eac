"""Makes the deciding parts as configured."""

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any, TypedDict, assert_never

from prefixroute.config.constants import constants, hold_constants
from prefixroute.config.routing import RoutingSettings, Strategy
from prefixroute.config.sagemaker import RoutingConfigSettings
from prefixroute.config.settings import Settings
from prefixroute.core.blocks import BlockHasher
from prefixroute.core.exact import ExactIndex
from prefixroute.core.fleet import HealthConstants, Instance
from prefixroute.core.guard import GuardConstants
from prefixroute.core.held import HoldConstants
from prefixroute.core.load import LoadConstants
from prefixroute.core.policies.blind import LeastOutstanding, RandomPolicy, RoundRobin
from prefixroute.core.policies.expected_latency import ExpectedLatency, LatencyConstants
from prefixroute.core.policies.kv_aware import KvAware
from prefixroute.core.policies.prefix_aware import PrefixAware
from prefixroute.core.policies.session import SessionPolicy
from prefixroute.core.policy import Policy
from prefixroute.core.router import Router
from prefixroute.core.shadow import Shadow, Shadows
from prefixroute.core.survey import Sampling
from prefixroute.errors import ConfigError
from prefixroute.exact_tokens.setup import check_files, make_exact_tokens
from prefixroute.sagemaker.endpoints import Endpoints, RoutingRule

if TYPE_CHECKING:
    from prefixroute.kv_events.service import KvEvents


def check_settings(settings: Settings) -> None:
    """Makes what a start makes, and reads the files that it reads; runs nothing. Raises ConfigError.

    A start goes on without a tokenizer that cannot be read; here it is an error, too.
    """
    router = make_router(settings)
    if any(i.kv_events != "off" for i in settings.fleet.instances):
        make_kv_events(settings, ExactIndex(0, 0), router.fleet.instances)
    if make_exact_tokens(settings.tokenizer) is not None:
        check_files(settings.tokenizer)


class Deciding(TypedDict):
    """What a router decides by, as `Router` takes it: at the start, and whenever the configuration changes."""

    policy: Policy
    index_bytes: int
    load_constants: LoadConstants
    health: HealthConstants
    guard: GuardConstants
    hold: HoldConstants | None
    holds: bool
    sampling: Sampling | None
    shadows: Shadows | None
    default_capacity_tokens: int


def make_seed(routing: RoutingSettings) -> int:
    """Of block hashes, and of policies that hash."""
    return secrets.randbits(64) if routing.hash_seed is None else routing.hash_seed


def make_router(
    settings: Settings, rng: Random | None = None, exact: ExactIndex | None = None, seed: int | None = None
) -> Router:
    """The deciding part, as configured. Raises ConfigError when a custom policy cannot be made."""
    routing = settings.routing
    seed = make_seed(routing) if seed is None else seed
    return Router(
        [
            Instance(i.name, i.url, slot, frozenset(i.models) if i.models is not None else None)
            for slot, i in enumerate(settings.fleet.instances)
        ],
        hasher=BlockHasher(routing.block_tokens, seed),
        rng=rng or Random(secrets.randbits(64)),
        exact=exact,
        capacities={i.name: i.capacity_tokens for i in settings.fleet.instances if i.capacity_tokens is not None},
        **make_deciding(settings, make_policy(routing, seed), make_shadows(routing, seed)),
    )


def make_deciding(settings: Settings, policy: Policy, shadows: Shadows | None) -> Deciding:
    routing = settings.routing
    is_ours = routing.strategy == "expected_latency"
    return {
        "policy": policy,
        "index_bytes": settings.limits.index_bytes,
        "load_constants": constants(LoadConstants, routing.expected_latency),
        "health": constants(HealthConstants, settings.fleet.health),
        "guard": constants(GuardConstants, routing.expected_latency),
        "hold": hold_constants(routing.expected_latency),
        # Other strategies are others' rules, which know none of the following.
        "holds": is_ours,
        "sampling": constants(Sampling, routing.expected_latency) if is_ours else None,
        "shadows": shadows,
        "default_capacity_tokens": routing.default_capacity_tokens,
    }


def decides_alike(old: RoutingSettings, new: RoutingSettings) -> bool:
    """Whether the policy is the same in both, so that what it remembers may stay."""
    # Strategies without constants have no table.
    return old.strategy == new.strategy and getattr(old, old.strategy, None) == getattr(new, new.strategy, None)


def make_shadows(routing: RoutingSettings, seed: int) -> Shadows | None:
    """The strategies that only watch; None: there are none."""
    if not routing.shadow:
        return None
    judge = ExpectedLatency(constants(LatencyConstants, routing.expected_latency))
    shadows = [Shadow(strategy, make_policy(routing, seed, strategy)) for strategy in routing.shadow]
    return Shadows(shadows, judge, Random(seed))


def make_policy(routing: RoutingSettings, seed: int, strategy: Strategy | None = None) -> Policy:
    """The policy of a strategy (the configured one). Raises ConfigError when a custom one cannot be made."""
    strategy = strategy or routing.strategy
    match strategy:
        case "random":
            return RandomPolicy()
        case "round_robin":
            return RoundRobin()
        case "least_outstanding_requests":
            return LeastOutstanding()
        case "prefix_aware":
            p = routing.prefix_aware
            return PrefixAware(p.prefix_length, p.concurrency_threshold, p.max_prefixes, seed)
        case "session":
            return SessionPolicy(routing.session.bounded_load, seed)
        case "expected_latency":
            return ExpectedLatency(constants(LatencyConstants, routing.expected_latency))
        case "kv_aware":
            return KvAware(routing.kv_aware.concurrency_threshold)
        case "custom":
            return _custom_policy(routing.custom.factory or "", routing.custom.options)
        case _:
            assert_never(strategy)


def make_endpoints(settings: Settings, seed: int, earlier: Endpoints | None = None) -> Endpoints:
    """SageMaker's endpoints. `earlier`: as they were before the configuration changed."""
    return Endpoints(settings.sagemaker.endpoints, partial(_make_rule, settings.routing, seed), earlier)


def _make_rule(routing: RoutingSettings, seed: int, config: RoutingConfigSettings) -> RoutingRule:
    aware = config.prefix_aware_routing_config
    if aware is not None:
        max_prefixes = routing.prefix_aware.max_prefixes
        # An endpoint has one model.
        return RoutingRule(
            PrefixAware(aware.prefix_length, aware.concurrency_threshold, max_prefixes, seed, by_model=False)
        )
    match config.routing_strategy:
        case "RANDOM":
            return RoutingRule(make_policy(routing, seed, "random"))
        case "LEAST_OUTSTANDING_REQUESTS":
            return RoutingRule(make_policy(routing, seed, "least_outstanding_requests"))
        case "KV_AWARE":
            return RoutingRule(make_policy(routing, seed, "kv_aware"))
        case "EXPECTED_LATENCY":
            sampling = constants(Sampling, routing.expected_latency)
            return RoutingRule(make_policy(routing, seed, "expected_latency"), holds=True, sampling=sampling)
        case "PREFIX_AWARE":
            raise ValueError("PREFIX_AWARE without its configuration")
        case _:
            assert_never(config.routing_strategy)


def make_kv_events(settings: Settings, index: ExactIndex, instances: Sequence[Instance]) -> "KvEvents":
    """What keeps `index` true to the instances. Raises ConfigError where the extra is not installed."""
    try:
        from prefixroute.kv_events.service import KvEvents
        from prefixroute.kv_events.sources import addresses_of
    except ModuleNotFoundError as error:
        if error.name not in ("zmq", "msgspec"):
            raise
        raise ConfigError(
            f"fleet.instances: kv_events needs {error.name}, which is not installed "
            "(pip install 'prefixroute[kv-events]')"
        ) from error
    return KvEvents(index, instances, {i.name: addresses_of(i) for i in settings.fleet.instances})


def _custom_policy(factory: str, options: Mapping[str, Any]) -> Policy:
    module_name, _, attribute = factory.partition(":")
    where = "routing.custom.factory"
    try:
        make = getattr(import_module(module_name), attribute)
        policy = make(**options)
    except Exception as error:
        raise ConfigError(f"{where}: {factory} failed: {type(error).__name__}: {error}") from error
    methods = (getattr(policy, name, None) for name in ("pick", "record"))
    if isinstance(policy, type) or not all(map(callable, methods)):
        raise ConfigError(f"{where}: {factory} made no policy (it needs the methods pick and record)")
    made: Policy = policy
    return made
