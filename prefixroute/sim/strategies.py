"""Strategies by name, ours and the baselines: `name`, or `name:key=value,key=value` to set its constants."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from prefixroute.config.constants import constants, hold_constants
from prefixroute.config.errors import describe
from prefixroute.config.routing import ExpectedLatencySettings, PrefixAwareSettings
from prefixroute.config.tables import Table
from prefixroute.config.words import did_you_mean
from prefixroute.core.guard import GuardConstants
from prefixroute.core.held import HoldConstants
from prefixroute.core.load import LoadConstants
from prefixroute.core.policies.blind import LeastOutstanding, RandomPolicy, RoundRobin
from prefixroute.core.policies.expected_latency import ExpectedLatency, LatencyConstants
from prefixroute.core.policies.prefix_aware import PrefixAware
from prefixroute.core.policy import Policy
from prefixroute.core.survey import Sampling
from prefixroute.errors import ConfigError
from prefixroute.sim.baselines.aibrix import AiBrix
from prefixroute.sim.baselines.d2lpm import D2lpm
from prefixroute.sim.baselines.dynamo import Dynamo, DynamoExact
from prefixroute.sim.baselines.kubeai import KubeAi
from prefixroute.sim.baselines.llm_d import LlmD, LlmDPrecise
from prefixroute.sim.baselines.min_ttft import MinTtft
from prefixroute.sim.baselines.preble import Preble
from prefixroute.sim.baselines.prefixaware import PrefixAwareTrie
from prefixroute.sim.baselines.ray import Ray
from prefixroute.sim.baselines.sglang import Sglang
from prefixroute.sim.baselines.smg import Smg

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation

TableT = TypeVar("TableT", bound=Table)
MakePolicy = Callable[["Simulation"], Policy]


@dataclass(frozen=True, slots=True)
class Strategy:
    """All that a `Simulation` needs to know of one. `name`: as it was asked for, parameters included.

    `make`: a policy of its own for each simulation. `hold` None: it holds no request back.
    """

    name: str
    make: MakePolicy
    hold: HoldConstants | None = None
    load_constants: LoadConstants | None = None
    guard: GuardConstants | None = None
    sampling: Sampling | None = None


BASELINES: Mapping[str, Callable[..., Policy]] = {
    "sglang": Sglang,
    "smg": Smg,
    "dynamo": Dynamo,
    "dynamo_exact": DynamoExact,
    "llm_d": LlmD,
    "llm_d_precise": LlmDPrecise,
    "kubeai": KubeAi,
    "preble": Preble,
    "min_ttft": MinTtft,
    "aibrix": AiBrix,
    "ray": Ray,
    "d2lpm": D2lpm,
    "production_stack": PrefixAwareTrie,
}
"""Each made with the simulation. Its keyword-only parameters are those that can be set."""

_BLIND: Mapping[str, Callable[[], Policy]] = {
    "random": RandomPolicy,
    "round_robin": RoundRobin,
    "least_outstanding_requests": LeastOutstanding,
}
# Strategies of `serve` that cannot be simulated, and why.
_NOT_SIMULATED: Mapping[str, str] = {
    "session": "it goes by session ids, which the requests of traces do not carry",
    "kv_aware": "it goes by KV events, which simulated servers do not publish (llm_d_precise and dynamo_exact know "
    "what their caches hold)",
    "custom": "policies of one's own are not read from the command line",
}
NAMES = (*_BLIND, "prefix_aware", "expected_latency", *BASELINES)


def strategy(text: str) -> Strategy:
    """Raises ConfigError for an unknown name or parameter, and for a value that cannot be."""
    name, _, listed = text.partition(":")
    if name in _NOT_SIMULATED:
        raise ConfigError(
            f"strategy '{name}' is not simulated: {_NOT_SIMULATED[name]}; simulated are {', '.join(NAMES)}"
        )
    if name not in NAMES:
        raise ConfigError(f"strategy '{name}' is unknown{did_you_mean(name, NAMES)}")
    given = _split(text, listed)
    if name == "expected_latency":
        settings = _settings(text, ExpectedLatencySettings, given)
        policy = partial(ExpectedLatency, constants(LatencyConstants, settings))
        return Strategy(
            text,
            _of_none(policy),
            hold_constants(settings),
            constants(LoadConstants, settings),
            constants(GuardConstants, settings),
            constants(Sampling, settings),
        )
    if name == "prefix_aware":
        p = _settings(text, PrefixAwareSettings, given)
        policy_of = partial(PrefixAware, p.prefix_length, p.concurrency_threshold, p.max_prefixes, 0)
        return Strategy(text, _of_none(policy_of))
    if name in _BLIND:
        _values(text, {}, given)
        return Strategy(text, _of_none(_BLIND[name]))
    make = BASELINES[name]
    defaults = {p.name: p.default for p in signature(make).parameters.values() if p.kind is Parameter.KEYWORD_ONLY}
    return Strategy(text, partial(make, **_values(text, defaults, given)))


def _of_none(make: Callable[[], Policy]) -> MakePolicy:
    """Ours need nothing of the simulation: they see what they see live."""
    return lambda _: make()


def _split(text: str, listed: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for item in listed.split(",") if listed else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals or not value:
            raise ConfigError(f"strategy '{text}': '{item}' is not key=value")
        if key in given:
            raise ConfigError(f"strategy '{text}': {key} is given twice")
        given[key] = value
    return given


def _values(text: str, defaults: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, float]:
    """Each as a number of its default's kind."""
    values: dict[str, float] = {}
    for key, value in given.items():
        if key not in defaults:
            hint = did_you_mean(key, defaults) or " (it has none)"
            raise ConfigError(f"strategy '{text}': unknown parameter {key}{hint}")
        kind = int if isinstance(defaults[key], int) else float
        try:
            number = kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"strategy '{text}': {key} must be {what}, not '{value}'") from None
        if not isfinite(number) or number < 0:
            raise ConfigError(f"strategy '{text}': {key} must be a finite number, at least 0, not '{value}'")
        values[key] = number
    return values


def _settings(text: str, table: type[TableT], given: Mapping[str, str]) -> TableT:
    """The configuration's own table of them, with its bounds."""
    defaults = {name: field.default for name, field in table.model_fields.items()}
    try:
        return table(**_values(text, defaults, given))
    except ValidationError as error:
        raise ConfigError(f"strategy '{text}': {'; '.join(describe(error, {}))}") from None
