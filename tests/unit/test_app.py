"""What settings become: the policy of each strategy, the core's constants, the banner."""

import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import signature
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest

from prefixroute import __version__
from prefixroute.app import running
from prefixroute.build import make_policy, make_router
from prefixroute.config.constants import constants
from prefixroute.config.routing import ExpectedLatencySettings, RoutingSettings, Strategy
from prefixroute.config.settings import FleetSettings, HealthSettings, LimitsSettings, RecordingSettings, Settings
from prefixroute.core.capacity import DEFAULT_CAPACITY_TOKENS
from prefixroute.core.fleet import HealthConstants, Instance
from prefixroute.core.guard import GuardConstants
from prefixroute.core.held import HoldConstants
from prefixroute.core.load import LoadConstants
from prefixroute.core.policies.blind import LeastOutstanding, RandomPolicy, RoundRobin
from prefixroute.core.policies.expected_latency import ExpectedLatency, LatencyConstants
from prefixroute.core.policies.kv_aware import KvAware
from prefixroute.core.policies.prefix_aware import PrefixAware
from prefixroute.core.policies.session import SessionPolicy
from prefixroute.core.policy import Candidate, Facts, Policy
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.core.router import Router
from prefixroute.core.survey import Sampling
from prefixroute.errors import ConfigError
from prefixroute.testing.policies import check_policy

POLICIES: dict[str, type[Policy]] = {
    "random": RandomPolicy,
    "round_robin": RoundRobin,
    "least_outstanding_requests": LeastOutstanding,
    "prefix_aware": PrefixAware,
    "session": SessionPolicy,
    "kv_aware": KvAware,
    "expected_latency": ExpectedLatency,
}

# A module of the user's own: what its factories make, and how they fail.
CUSTOM = """
from prefixroute.core.policy import Decision, Reason, StatelessPolicy

class Last(StatelessPolicy):
    def __init__(self, offset=1):
        self.offset = offset

    def pick(self, facts, candidates, rng):
        return Decision(candidates[-self.offset], Reason.CUSTOM)

def fails(**options):
    raise OSError("no weights\\nat all")

def makes_nothing():
    return None

def makes_a_class():
    return Last

not_callable = 5
"""


@pytest.fixture
def custom_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "policies_of_test_app"
    (tmp_path / f"{name}.py").write_text(CUSTOM)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_module_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    for module in (name, f"{name}_broken"):
        # Unknown before, and forgotten afterwards.
        monkeypatch.setitem(sys.modules, module, None)
        del sys.modules[module]
    return name


def custom(factory: str, **options: Any) -> RoutingSettings:
    return RoutingSettings.model_validate({"strategy": "custom", "custom": {"factory": factory, "options": options}})


def facts_and_candidates() -> tuple[Facts, list[Candidate]]:
    prompt = read_prompt(Api.COMPLETIONS, b'{"model": "m", "prompt": "once upon a time"}', session_id="s")
    return Facts(prompt, prompt.n_tokens, 1.0), [Candidate(Instance(f"gpu-{n}", "", n)) for n in range(3)]


# Strategies


def test_every_strategy_but_custom_is_covered_here() -> None:
    assert {*POLICIES, "custom"} == set(get_args(Strategy))


@pytest.mark.parametrize("strategy", POLICIES)
def test_a_strategy_makes_its_policy(strategy: str) -> None:
    policy = make_policy(RoutingSettings.model_validate({"strategy": strategy}), seed=7)
    assert type(policy) is POLICIES[strategy]
    check_policy(policy, *facts_and_candidates())


def test_a_custom_factory_gets_its_options(custom_module: str) -> None:
    facts, candidates = facts_and_candidates()
    for options, expected in (({}, 2), ({"offset": 3}, 0)):
        policy = make_policy(custom(f"{custom_module}:Last", **options), seed=7)
        check_policy(policy, facts, candidates)
        assert policy.pick(facts, candidates, Random(1)).candidate is candidates[expected]


@pytest.mark.parametrize(
    ("factory", "options", "problem"),
    [
        ("no_such_module_anywhere:make", {}, "failed: ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("MODULE_broken:make", {}, "failed: ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("MODULE:make", {}, "failed: AttributeError: module 'MODULE' has no attribute 'make'"),
        ("MODULE:not_callable", {}, "failed: TypeError: 'int' object is not callable"),
        (
            "MODULE:Last",
            {"colour": 1},
            "failed: TypeError: Last.__init__() got an unexpected keyword argument 'colour'",
        ),
        ("MODULE:fails", {}, "failed: OSError: no weights\nat all"),
        ("MODULE:makes_nothing", {}, "made no policy (it needs the methods pick and record)"),
        ("MODULE:makes_a_class", {}, "made no policy (it needs the methods pick and record)"),
    ],
)
def test_a_custom_factory_that_fails_is_named_with_the_cause(
    custom_module: str, factory: str, options: dict[str, Any], problem: str
) -> None:
    factory, problem = factory.replace("MODULE", custom_module), problem.replace("MODULE", custom_module)
    with pytest.raises(ConfigError) as raised:
        make_policy(custom(factory, **options), seed=7)
    assert str(raised.value) == f"routing.custom.factory: {factory} {problem}"


# Defaults that are written twice: in config.py for those who configure, in core for those who import it


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (LoadConstants, ExpectedLatencySettings()),
        (LatencyConstants, ExpectedLatencySettings()),
        (HealthConstants, HealthSettings()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_constants_of_the_core_have_the_defaults_of_their_settings(kind: type[Any], table: Any) -> None:
    for field in fields(kind):
        assert field.default is not MISSING
        assert getattr(table, field.name) == field.default, field.name


# What has the constants of expected_latency.
PARTS = (LoadConstants, LatencyConstants, HoldConstants, GuardConstants, Sampling)


def test_every_constant_of_expected_latency_is_used_by_exactly_one_part_of_the_core() -> None:
    used = [field.name for kind in PARTS for field in fields(kind)]
    assert sorted(used) == sorted(ExpectedLatencySettings.model_fields)


def test_every_health_setting_is_the_fleets_or_the_probers() -> None:
    probers = {"path", "interval_s", "timeout_s"}
    assert {field.name for field in fields(HealthConstants)} | probers == set(HealthSettings.model_fields)


@pytest.mark.parametrize("kind", [*PARTS, HealthConstants])
def test_each_constant_comes_from_the_setting_of_its_name(kind: Callable[..., Any]) -> None:
    table = HealthSettings() if kind is HealthConstants else ExpectedLatencySettings()
    for n, name in enumerate(signature(kind).parameters, start=2):
        changed = table.model_copy(update={name: n})
        assert constants(kind, changed) == kind(**{name: n})


def test_sizes_have_the_defaults_of_their_settings() -> None:
    routing, limits = RoutingSettings(), LimitsSettings()
    assert routing.default_capacity_tokens == DEFAULT_CAPACITY_TOKENS
    parameters = signature(Router.__init__).parameters
    assert limits.index_bytes == parameters["index_bytes"].default
    assert routing.default_capacity_tokens == parameters["default_capacity_tokens"].default


# From settings to a router


def test_a_router_knows_what_is_configured_of_its_instances() -> None:
    settings = Settings(
        fleet=FleetSettings.model_validate(
            {
                "instances": [
                    {"url": "http://gpu-a:8000", "models": ["m", "n"], "capacity_tokens": 5_000},
                    {"url": "http://gpu-b:8000", "name": "b"},
                ]
            }
        ),
        routing=RoutingSettings(default_capacity_tokens=7_000),
    )
    router = make_router(settings)
    first, second = router.fleet.instances
    assert first == Instance("gpu-a:8000", "http://gpu-a:8000", 0, frozenset({"m", "n"}))
    assert second == Instance("b", "http://gpu-b:8000", 1, None)
    assert router.capacity_tokens("gpu-a:8000") == 5_000
    assert router.capacity_tokens("b") == 7_000


def decides(router: Router, body: bytes) -> str:
    with router.lease(router.read(read_prompt(Api.COMPLETIONS, body)), now_s=1.0) as lease:
        return lease.instance.name


def test_with_a_seed_and_a_source_of_chance_two_routers_decide_alike() -> None:
    instances = [{"url": f"http://gpu-{n}:8000"} for n in range(5)]
    settings = Settings.model_validate({"fleet": {"instances": instances}, "routing": {"hash_seed": 1}})
    bodies = [b'{"model": "m", "prompt": "%d %s"}' % (n % 7, b"tokens " * 200) for n in range(40)]
    one, two = make_router(settings, Random(3)), make_router(settings, Random(3))
    assert [decides(one, body) for body in bodies] == [decides(two, body) for body in bodies]


def settings_for_banner(admin: dict[str, Any] | None, *instances: dict[str, Any]) -> Settings:
    return Settings.model_validate(
        {"listen": {"port": 0}, "admin": admin, "fleet": {"instances": instances}, "routing": {"strategy": "random"}}
    )


async def test_the_banner_names_fleet_strategy_and_metrics() -> None:
    settings = settings_for_banner(
        {"host": "0.0.0.0", "port": 0, "token_env": "TOKEN"},
        {"url": "http://127.0.0.1:1", "name": "gpu-a"},
        {"url": "http://127.0.0.1:2", "name": "gpu-long"},
    )
    async with running(settings, environ={"TOKEN": "t"}) as app:
        assert app.banner() == [
            f"PrefixRoute {__version__}: random over 2 instances",
            f"  requests  http://127.0.0.1:{app.port}",
            # Where it can be reached, not the address for everybody.
            f"  metrics   http://127.0.0.1:{app.admin_port}/metrics",
            "  instance  gpu-a     http://127.0.0.1:1",
            "  instance  gpu-long  http://127.0.0.1:2",
        ]
        assert app.facts() == {
            "version": __version__,
            "strategy": "random",
            "requests": f"http://127.0.0.1:{app.port}",
            "metrics": f"http://127.0.0.1:{app.admin_port}/metrics",
            "recording": None,
            "instances": [
                {"name": "gpu-a", "url": "http://127.0.0.1:1"},
                {"name": "gpu-long", "url": "http://127.0.0.1:2"},
            ],
        }


async def test_the_banner_says_when_there_are_no_metrics() -> None:
    async with running(settings_for_banner(None, {"url": "http://127.0.0.1:1"})) as app:
        assert app.admin_url is None
        title, _, metrics, _ = app.banner()
        assert title.endswith("random over 1 instance")
        assert metrics == "  metrics   off (admin: null)"
        assert app.facts()["metrics"] is None


async def test_the_banner_says_where_requests_are_recorded(tmp_path: Path) -> None:
    settings = settings_for_banner(None, {"url": "http://127.0.0.1:1"})
    path = str(tmp_path / "rec.jsonl")
    table = RecordingSettings.model_validate({"path": path})
    async with running(settings.model_copy(update={"recording": table})) as app:
        assert f"  recording {path}" in app.banner()
        assert app.facts()["recording"] == path


async def test_a_start_says_who_is_to_go_by_knowledge_that_nobody_gives(caplog: pytest.LogCaptureFixture) -> None:
    variant = {"VariantName": "A", "RoutingConfig": {"RoutingStrategy": "KV_AWARE"}}
    settings = Settings.model_validate(
        {
            "listen": {"port": 0},
            "admin": None,
            "fleet": {"instances": [{"url": "http://127.0.0.1:1"}]},
            "routing": {"strategy": "kv_aware"},
            "sagemaker": {"endpoints": [{"EndpointName": "bot", "ProductionVariants": [variant]}]},
        }
    )
    async with running(settings):
        told = [record.getMessage() for record in caplog.records if "knows nothing" in record.getMessage()]
    assert told == [
        "strategy kv_aware knows nothing: no instance has kv_events (docs/kv-events.md); load decides",
        (
            "KV_AWARE knows nothing in variant A of endpoint bot: none of its instances has kv_events "
            "(docs/kv-events.md); load decides"
        ),
    ]


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
async def test_kv_events_without_their_extra_stop_the_start(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("prefixroute.kv_events")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    settings = settings_for_banner(None, {"url": "http://127.0.0.1:1", "kv_events": "auto"})
    with pytest.raises(ConfigError, match=rf"needs {missing}, .*pip install 'prefixroute\[kv-events\]'"):
        async with running(settings):
            pass


async def test_a_key_that_is_not_set_stops_the_start() -> None:
    settings = settings_for_banner(None, {"url": "http://127.0.0.1:1", "api_key_env": "GPU_KEY"})
    with pytest.raises(ConfigError, match="GPU_KEY is not set"):
        async with running(settings, environ={}):
            pass
