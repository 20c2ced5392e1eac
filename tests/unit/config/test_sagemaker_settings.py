"""Endpoints as operators write them: what is taken, and what they are told of the rest."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from botocore.loaders import Loader

from prefixroute.config.file import parse_yaml
from prefixroute.config.live import change, files_named
from prefixroute.config.load import load_settings
from prefixroute.config.sagemaker import (
    AwsTable,
    ComponentSettings,
    EndpointSettings,
    PrefixAwareConfigSettings,
    RoutingConfigSettings,
    RoutingStrategy,
    SageMakerSettings,
    VariantSettings,
    unheard_variants,
)
from prefixroute.config.settings import Settings
from prefixroute.config.tables import fields_by_key
from prefixroute.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "config.example.yaml"
FLEET = {"instances": [{"url": f"http://{name}:8000", "name": name} for name in ("gpu-a", "gpu-b", "gpu-c")]}
KEYS = "AKIDEXAMPLE nobodys-secret-of-any-account\n"
PREFIX_AWARE = {
    "RoutingStrategy": "PREFIX_AWARE",
    "PrefixAwareRoutingConfig": {"PrefixLength": 4096, "ConcurrencyThreshold": 16},
}


def variant(name: str = "AllTraffic", **fields: Any) -> dict[str, Any]:
    return {"VariantName": name, **fields}


def component(*servers: str, name: str = "lora", of: str = "AllTraffic", on: str = "machine-1") -> dict[str, Any]:
    copies = [{"Instance": on, "Server": server} for server in servers]
    return {"InferenceComponentName": name, "VariantName": of, "Copies": copies}


def endpoint(*variants: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"EndpointName": "bot", "ProductionVariants": list(variants) or [variant()], **fields}


def load(*endpoints: Any, **fields: Any) -> SageMakerSettings:
    table = {"endpoints": list(endpoints), **fields}
    return load_settings(None, environ={}, overrides={"fleet": FLEET, "sagemaker": table}).sagemaker


def problems(*endpoints: Any, **fields: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*endpoints, **fields)
    return [line.removeprefix("sagemaker.") for line in str(caught.value).splitlines()]


# What is taken


def test_an_endpoint_with_everything(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    settings = load(
        endpoint(
            variant("A", InitialVariantWeight=3, RoutingConfig=PREFIX_AWARE, Instances=["gpu-a", "gpu-b"]),
            variant("B"),
            InferenceComponents=[component("gpu-a", of="A"), component("gpu-a", "gpu-c", name="base", of="B")],
        ),
        access_keys_file=str(keys),
        max_sessions=5,
    )
    assert (settings.access_keys_file, settings.max_sessions) == (str(keys), 5)
    (bot,) = settings.endpoints
    first, second = bot.production_variants
    assert (bot.endpoint_name, first.variant_name, first.initial_variant_weight) == ("bot", "A", 3.0)
    assert first.instances == ("gpu-a", "gpu-b")
    assert first.routing_config.routing_strategy == "PREFIX_AWARE"
    config = first.routing_config.prefix_aware_routing_config
    assert config is not None
    assert (config.prefix_length, config.concurrency_threshold) == (4096, 16)
    assert (second.initial_variant_weight, second.instances) == (1.0, None)
    lora, base = bot.inference_components
    assert (lora.inference_component_name, lora.variant_name) == ("lora", "A")
    assert [(copy.instance, copy.server) for copy in base.copies] == [("machine-1", "gpu-a"), ("machine-1", "gpu-c")]


def test_what_is_left_out_is_as_at_sagemaker() -> None:
    assert load() == SageMakerSettings()
    assert (SageMakerSettings().endpoints, SageMakerSettings().access_keys_file) == ((), None)
    (bot,) = load(endpoint()).endpoints
    assert bot.inference_components == ()
    assert bot.production_variants[0].routing_config.routing_strategy == "RANDOM"
    assert bot.production_variants[0].routing_config.prefix_aware_routing_config is None


@pytest.mark.parametrize("strategy", get_args(RoutingStrategy))
def test_every_strategy_can_be_named(strategy: str) -> None:
    config = PREFIX_AWARE if strategy == "PREFIX_AWARE" else {"RoutingStrategy": strategy}
    (bot,) = load(endpoint(variant(RoutingConfig=config))).endpoints
    assert bot.production_variants[0].routing_config.routing_strategy == strategy


def test_the_example_in_the_documentation_is_right() -> None:
    text = (EXAMPLE.parent / "docs" / "sagemaker.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        settings = Settings.model_validate(parse_yaml(block))
        assert settings.sagemaker.endpoints[0].production_variants[0].instances == ("gpu-a", "gpu-b", "gpu-c")


def test_the_example_in_comments_is_right() -> None:
    """Its lines without their marks are a list of endpoints."""
    text = EXAMPLE.read_text().partition("\nsagemaker:")[2].partition("\n  endpoints:")[0]
    (shown,) = load(*parse_yaml("\n".join(re.findall(r"^  #     (.*)$", text, re.MULTILINE)))).endpoints
    assert shown.endpoint_name == "support-bot"
    assert [len(one.copies) for one in shown.inference_components] == [3]


def test_variables_take_endpoints_as_yaml() -> None:
    table = "[{EndpointName: bot, ProductionVariants: [{VariantName: A, InitialVariantWeight: 2}]}]"
    settings = load_settings(
        None, environ={"PREFIXROUTE_SAGEMAKER__ENDPOINTS": table, "PREFIXROUTE_SAGEMAKER__MAX_SESSIONS": "7"}
    ).sagemaker
    assert settings.endpoints[0].production_variants[0].initial_variant_weight == 2
    assert settings.max_sessions == 7


def test_a_path_of_keys_counts_from_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "router.yaml").write_text("sagemaker: {access_keys_file: keys}")
    settings = load_settings(tmp_path / "router.yaml", environ={})
    assert settings.sagemaker.access_keys_file == f"{tmp_path}/keys"
    assert list(files_named(settings)) == [tmp_path / "keys"]


def test_a_file_of_keys_is_read_by_a_check(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    (line,) = problems(access_keys_file=str(keys))
    assert line.startswith("access_keys_file: there is no file")
    keys.write_text("AKIDEXAMPLE")
    (line,) = problems(access_keys_file=str(keys))
    assert line.startswith("access_keys_file: ")
    assert "line 1 " in line
    assert problems(access_keys_file="folder/") == ["access_keys_file: must be the path of a file"]


def test_a_name_has_one_set_of_limits_in_both_files(tmp_path: Path) -> None:
    """Else a start would fail on what a check had found right."""
    (tmp_path / "keys").write_text("bot: sk-nobodys-key-0123456789 in_flight=3\n")
    (tmp_path / "access").write_text(f"bot: {KEYS}")
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    overrides = {
        "listen": {"api_keys_file": f"{tmp_path}/keys"},
        "sagemaker": {"access_keys_file": f"{tmp_path}/access"},
    }
    with pytest.raises(ConfigError, match="bot has other limits than in"):
        load_settings(None, environ={}, overrides=overrides)
    (tmp_path / "access").write_text(f"bot: {KEYS.strip()} in_flight=3\n")
    load_settings(None, environ={}, overrides=overrides)


def test_access_keys_are_keys_to_the_limits_for_each(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    limits = {"limits": {"per_key_in_flight": 1}}
    load_settings(None, environ={}, overrides={"sagemaker": {"access_keys_file": f"{tmp_path}/keys"}, **limits})
    with pytest.raises(ConfigError, match=r"^limits\.per_key_in_flight: needs listen\.api_keys_file or sagemaker\."):
        load_settings(None, environ={}, overrides=limits)


# Ranges: the last value inside, and the first outside


@pytest.mark.parametrize("name", ["a", "0", "a--b", "A-1", "a" * 63])
def test_names_that_sagemaker_takes(name: str) -> None:
    (bot,) = load(
        endpoint(variant(name), EndpointName=name, InferenceComponents=[component("gpu-a", name=name, of=name)])
    ).endpoints
    assert bot.endpoint_name == bot.production_variants[0].variant_name == name
    assert bot.inference_components[0].inference_component_name == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "a_b", "a.b", "a b", "ä", "a\n", "a" * 64])
def test_names_that_sagemaker_refuses(name: str) -> None:
    words = "must be 1 to 63 letters, digits and hyphens, with no hyphen at either end"
    assert problems(
        endpoint(variant(name), EndpointName=name, InferenceComponents=[component("gpu-a", name=name, of=name)])
    ) == [
        f"endpoints[0].EndpointName: {words}",
        f"endpoints[0].ProductionVariants[0].VariantName: {words}",
        f"endpoints[0].InferenceComponents[0].InferenceComponentName: {words}",
        f"endpoints[0].InferenceComponents[0].VariantName: {words}",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("PrefixLength", 1024),
        ("PrefixLength", 65_536),
        ("ConcurrencyThreshold", 1),
        ("ConcurrencyThreshold", 1024),
    ],
)
def test_the_ends_of_documented_ranges_are_taken(key: str, value: int) -> None:
    config = {**PREFIX_AWARE["PrefixAwareRoutingConfig"], key: value}  # type: ignore[dict-item]
    load(endpoint(variant(RoutingConfig={**PREFIX_AWARE, "PrefixAwareRoutingConfig": config})))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("PrefixLength", 1023, "must be at least 1024, not 1023"),
        ("PrefixLength", 65_537, "must be at most 65536, not 65537"),
        ("PrefixLength", "4096", "must be a whole number, not '4096'"),
        ("ConcurrencyThreshold", 0, "must be at least 1, not 0"),
        ("ConcurrencyThreshold", 1025, "must be at most 1024, not 1025"),
        ("ConcurrencyThreshold", 1.5, "must be a whole number, not 1.5"),
    ],
)
def test_what_is_beyond_them_is_refused(key: str, value: object, line: str) -> None:
    config = {**PREFIX_AWARE["PrefixAwareRoutingConfig"], key: value}  # type: ignore[dict-item]
    where = f"endpoints[0].ProductionVariants[0].RoutingConfig.PrefixAwareRoutingConfig.{key}"
    assert problems(endpoint(variant(RoutingConfig={**PREFIX_AWARE, "PrefixAwareRoutingConfig": config}))) == [
        f"{where}: {line}"
    ]


@pytest.mark.parametrize("weight", [1, 0.001, 1e9, 3.4e38])
def test_weights(weight: float) -> None:
    (bot,) = load(endpoint(variant("A", InitialVariantWeight=weight), variant("B", InitialVariantWeight=0))).endpoints
    assert [one.initial_variant_weight for one in bot.production_variants] == [weight, 0.0]


@pytest.mark.parametrize(
    ("weight", "line"),
    [
        (-0.001, "must be at least 0, not -0.001"),
        ("1", "must be a number, not '1'"),
        (True, "must be a number, not true"),
        (float("nan"), "must be a finite number"),
        (None, "must be a number, not null (leave it out for the default)"),
    ],
)
def test_weights_that_cannot_be(weight: object, line: str) -> None:
    assert problems(endpoint(variant(InitialVariantWeight=weight))) == [
        f"endpoints[0].ProductionVariants[0].InitialVariantWeight: {line}"
    ]


def test_an_endpoint_has_one_to_ten_variants() -> None:
    assert len(load(endpoint(*(variant(f"v{n}") for n in range(10)))).endpoints[0].production_variants) == 10
    assert problems(endpoint(*(variant(f"v{n}") for n in range(11)))) == [
        "endpoints[0].ProductionVariants: must be a list of at most 10"
    ]
    assert problems(endpoint(ProductionVariants=[])) == ["endpoints[0].ProductionVariants: must not be an empty list"]


def test_sessions_remembered() -> None:
    assert load(max_sessions=1).max_sessions == 1
    assert problems(max_sessions=0) == ["max_sessions: must be at least 1, not 0"]


# What does not go together


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({}, "EndpointName: is required|ProductionVariants: is required"),
        (
            endpoint(InferenceComponents=[{}]),
            "|".join(
                f"InferenceComponents[0].{key}: is required"
                for key in ("InferenceComponentName", "VariantName", "Copies")
            ),
        ),
        (
            endpoint(variant(RoutingConfig={"RoutingStrategy": "PREFIX_AWARE"})),
            (
                "ProductionVariants[0].RoutingConfig.PrefixAwareRoutingConfig: is required when RoutingStrategy is "
                "PREFIX_AWARE (write PrefixLength and ConcurrencyThreshold)"
            ),
        ),
        (
            endpoint(variant(RoutingConfig={"RoutingStrategy": "PREFIX_AWARE", "PrefixAwareRoutingConfig": {}})),
            "|".join(
                f"ProductionVariants[0].RoutingConfig.PrefixAwareRoutingConfig.{key}: is required"
                for key in ("PrefixLength", "ConcurrencyThreshold")
            ),
        ),
        (
            endpoint(variant(RoutingConfig={**PREFIX_AWARE, "RoutingStrategy": "KV_AWARE"})),
            (
                "ProductionVariants[0].RoutingConfig.PrefixAwareRoutingConfig: is for RoutingStrategy PREFIX_AWARE, "
                "which here is KV_AWARE (change that, or leave this out)"
            ),
        ),
        (
            endpoint(variant(RoutingConfig={"RoutingStrategy": "prefix-aware"})),
            (
                "ProductionVariants[0].RoutingConfig.RoutingStrategy: must be one of RANDOM, "
                "LEAST_OUTSTANDING_REQUESTS, PREFIX_AWARE, KV_AWARE, EXPECTED_LATENCY, not 'prefix-aware'; "
                "did you mean 'PREFIX_AWARE'?"
            ),
        ),
        (
            endpoint(variant("A"), variant("B"), variant("A")),
            ("ProductionVariants[2].VariantName: 'A' is also the name of ProductionVariants[0] (give each its own)"),
        ),
        (
            endpoint(variant("A", InitialVariantWeight=0), variant("B", InitialVariantWeight=0.0)),
            "ProductionVariants: need an InitialVariantWeight of more than 0 in one of them",
        ),
        (
            endpoint(variant(Instances=["gpu-a", "gpu-d"])),
            (
                "ProductionVariants[0].Instances[1]: 'gpu-d' is not the name of one of fleet.instances; "
                "did you mean 'gpu-c'?"
            ),
        ),
        (
            endpoint(variant("A"), variant("B", Instances=["gpu-a", "gpu-a"])),
            "ProductionVariants[1].Instances[1]: 'gpu-a' is there twice",
        ),
        (
            endpoint(variant(Instances=[])),
            "ProductionVariants[0].Instances: must not be an empty list (leave it out for the default)",
        ),
        (
            endpoint(variant(Instances=["gpu a"])),
            "ProductionVariants[0].Instances[0]: must be 1 to 64 characters out of A-Z a-z 0-9 . _ : - [ ]",
        ),
        (
            endpoint(variant(Instances=[1])),
            "ProductionVariants[0].Instances[0]: must be text (put it in quotes), not a number",
        ),
        (
            endpoint(InferenceComponents=[component("gpu-a"), component("gpu-b")]),
            (
                "InferenceComponents[1].InferenceComponentName: 'lora' is also the name of InferenceComponents[0] "
                "(give each its own)"
            ),
        ),
        (
            endpoint(InferenceComponents=[component("gpu-a", of="AllTrafic")]),
            (
                "InferenceComponents[0].VariantName: 'AllTrafic' is not in ProductionVariants; "
                "did you mean 'AllTraffic'?"
            ),
        ),
        (
            endpoint(InferenceComponents=[component()]),
            "InferenceComponents[0].Copies: must not be an empty list",
        ),
        (
            endpoint(InferenceComponents=[component("gpu-a", "gpu-b", "gpu-a")]),
            "InferenceComponents[0].Copies[2].Server: 'gpu-a' is there twice (list each server once)",
        ),
        (
            endpoint(InferenceComponents=[component("gpu-a", "elsewhere")]),
            (
                "InferenceComponents[0].Copies[1].Server: 'elsewhere' is not the name of one of fleet.instances "
                "(known here: gpu-a, gpu-b, gpu-c)"
            ),
        ),
        (
            endpoint(variant(Instances=["gpu-a"]), InferenceComponents=[component("gpu-a", "gpu-b")]),
            (
                "InferenceComponents[0].Copies[1].Server: 'gpu-b' is not among the Instances of 'AllTraffic'; "
                "did you mean 'gpu-a'?"
            ),
        ),
        (
            endpoint(
                InferenceComponents=[
                    component("gpu-a", "gpu-b"),
                    component("gpu-c", "gpu-b", name="base", on="machine-2"),
                ]
            ),
            (
                "InferenceComponents[1].Copies[1].Instance: 'gpu-b' is on 'machine-1' in "
                "InferenceComponents[0].Copies[1] (a server is on one machine)"
            ),
        ),
        (
            endpoint(InferenceComponents=[{**component("gpu-a"), "Copies": [{"Instance": "", "Server": "gpu-a"}]}]),
            "InferenceComponents[0].Copies[0].Instance: must be 1 to 64 characters out of A-Z a-z 0-9 . _ : - [ ]",
        ),
    ],
)
def test_what_is_wrong_is_told_where_it_is_in_the_files_own_spelling(table: dict[str, Any], line: str) -> None:
    assert problems(table) == [f"endpoints[0].{one}" for one in line.split("|")]


def test_an_endpoints_name_is_its_own_whatever_its_case() -> None:
    assert len(load(endpoint(), endpoint(EndpointName="bot-2")).endpoints) == 2
    assert problems(endpoint(), endpoint(EndpointName="Bot")) == [
        "endpoints[1].EndpointName: 'bot' is also the name of sagemaker.endpoints[0] (give each its own)"
    ]


def test_without_a_fleet_no_name_is_right() -> None:
    with pytest.raises(ConfigError, match=r"Instances\[0\]: 'gpu-a' is not the name of one of fleet\.instances$"):
        load_settings(
            None, environ={}, overrides={"sagemaker": {"endpoints": [endpoint(variant(Instances=["gpu-a"]))]}}
        )


# Keys


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (endpoint(endpoint_name="bot"), "endpoint_name: unknown setting; did you mean 'EndpointName'?"),
        (
            endpoint(variant(Routingconfig={})),
            "ProductionVariants[0].Routingconfig: unknown setting; did you mean 'RoutingConfig'?",
        ),
        (
            endpoint(variant(RoutingConfig={"Strategy": "RANDOM"})),
            "ProductionVariants[0].RoutingConfig.Strategy: unknown setting; did you mean 'RoutingStrategy'?",
        ),
        (
            endpoint(InferenceComponents=[{**component("gpu-a"), "Name": "x"}]),
            ("InferenceComponents[0].Name: unknown setting (known here: InferenceComponentName, VariantName, Copies)"),
        ),
        (
            endpoint(EndpointConfigName="bot-config"),
            "EndpointConfigName: names what SageMaker keeps; clients ask for an endpoint (write EndpointName)",
        ),
        (
            endpoint(variant(ModelName="m", InstanceType="ml.g5.xlarge", ManagedInstanceScaling={})),
            "|".join(
                f"ProductionVariants[0].{key}: is about machines and models that SageMaker makes (leave it out)"
                for key in ("ModelName", "InstanceType", "ManagedInstanceScaling")
            ),
        ),
        (
            endpoint(InferenceComponents=[{**component("gpu-a"), "RuntimeConfig": {"CopyCount": 2}}]),
            (
                "InferenceComponents[0].RuntimeConfig: is how many copies SageMaker makes "
                "(leave it out, and list in Copies those that there are)"
            ),
        ),
        (
            endpoint(Tags=[], KmsKeyId="k"),
            "|".join(
                f"{key}: is about what SageMaker keeps of an endpoint (leave it out)" for key in ("Tags", "KmsKeyId")
            ),
        ),
    ],
)
def test_keys_that_mean_nothing_here(table: dict[str, Any], line: str) -> None:
    assert problems(table) == [f"endpoints[0].{one}" for one in line.split("|")]


@pytest.mark.parametrize(
    ("shape", "table"),
    [
        ("CreateEndpointInput", EndpointSettings),
        ("CreateEndpointConfigInput", EndpointSettings),
        ("ProductionVariant", VariantSettings),
        ("ProductionVariantRoutingConfig", RoutingConfigSettings),
        ("PrefixAwareRoutingConfig", PrefixAwareConfigSettings),
        ("CreateInferenceComponentInput", ComponentSettings),
    ],
)
def test_no_field_of_aws_is_unknown(shape: str, table: type[AwsTable]) -> None:
    """Each is obeyed, or has a word on what to do instead. By AWS's own model of its service."""
    members = set(Loader().load_service_model("sagemaker", "service-2")["shapes"][shape]["members"])
    assert members <= {*fields_by_key(table), *table.foreign}
    assert not set(fields_by_key(table)) & set(table.foreign)


# While running


def running(*endpoints: Any, **tables: Any) -> Settings:
    return Settings.model_validate({"fleet": FLEET, "sagemaker": {"endpoints": list(endpoints)}, **tables})


def test_what_is_dumped_can_be_read_again() -> None:
    settings = running(endpoint(variant(RoutingConfig=PREFIX_AWARE), InferenceComponents=[component("gpu-b")]))
    assert Settings.model_validate(settings.model_dump()) == settings
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_endpoints_change_while_running_beside_what_needs_a_restart() -> None:
    old = running(endpoint(variant(Instances=["gpu-a"])))
    new = running(endpoint(variant(RoutingConfig=PREFIX_AWARE)), listen={"port": 1234})
    made = change(old, new)
    assert (made.changed, made.needs_restart) == (("sagemaker.endpoints",), ("listen.port",))
    assert made.settings.sagemaker == new.sagemaker
    assert made.settings.listen == old.listen


def test_who_is_kv_aware_without_any_events() -> None:
    kv_aware = {"RoutingStrategy": "KV_AWARE"}
    settings = load(
        endpoint(
            variant("some", RoutingConfig=kv_aware, Instances=["gpu-a", "gpu-b"]),
            variant("none", RoutingConfig=kv_aware, Instances=["gpu-b"]),
            variant("fleet", RoutingConfig=kv_aware),
            variant("else"),
        )
    )
    assert unheard_variants(settings, {"gpu-a"}) == [("bot", "none")]
    assert unheard_variants(settings, set()) == [("bot", "some"), ("bot", "none"), ("bot", "fleet")]
