"""Settings of the SageMaker contract: endpoints in the words of CreateEndpointConfig and CreateInferenceComponent.

Keys are spelled as AWS spells them, so that what an endpoint was made with can be pasted; attributes are spelled as
ours. What a self-hosted router must know besides (`Instances`, `Copies`) is in AWS's spelling as well. AWS's fields
that mean nothing here are refused with a word on what to do, since a file says what is obeyed and nothing else.
Ranges and names are those of AWS's own service model.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_pascal

from prefixroute.config.tables import FilePath, SettingError, ShortName, Table
from prefixroute.config.words import did_you_mean

RoutingStrategy = Literal["RANDOM", "LEAST_OUTSTANDING_REQUESTS", "PREFIX_AWARE", "KV_AWARE", "EXPECTED_LATENCY"]

_AWS_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?")
# AWS states no bound of a weight but its type, a 32-bit float.
_MAX_WEIGHT = 3.4e38

_MADE_THERE = "is about machines and models that SageMaker makes (leave it out)"
_KEPT_THERE = "is about what SageMaker keeps of an endpoint (leave it out)"


def _aws_name(name: str) -> str:
    if _AWS_NAME.fullmatch(name) is None:
        raise SettingError("must be 1 to 63 letters, digits and hyphens, with no hyphen at either end")
    return name


AwsName = Annotated[str, AfterValidator(_aws_name)]


class AwsTable(Table):
    """A table whose keys are spelled as AWS spells its fields."""

    model_config = ConfigDict(alias_generator=to_pascal)


class PrefixAwareConfigSettings(AwsTable):
    prefix_length: int = Field(
        ge=1024, le=65_536, description="Longest prefix looked at: bytes of a body, or characters of messages' text."
    )
    concurrency_threshold: int = Field(
        ge=1, le=1024, description="Requests in flight at which the prefix's instance, or copy, is passed over."
    )


class RoutingConfigSettings(AwsTable):
    routing_strategy: RoutingStrategy = Field(
        "RANDOM", description="How an instance is picked; EXPECTED_LATENCY is ours, the others are SageMaker's."
    )
    prefix_aware_routing_config: PrefixAwareConfigSettings | None = Field(
        None, description="Required with PREFIX_AWARE, and only for it."
    )

    @model_validator(mode="after")
    def _check_prefix_aware(self) -> Self:
        is_aware, config = self.routing_strategy == "PREFIX_AWARE", self.prefix_aware_routing_config
        if is_aware and config is None:
            raise SettingError(
                "is required when RoutingStrategy is PREFIX_AWARE (write PrefixLength and ConcurrencyThreshold)",
                "PrefixAwareRoutingConfig",
            )
        if not is_aware and config is not None:
            raise SettingError(
                f"is for RoutingStrategy PREFIX_AWARE, which here is {self.routing_strategy} (change that, or leave "
                "this out)",
                "PrefixAwareRoutingConfig",
            )
        return self


class VariantSettings(AwsTable):
    foreign: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("ModelName", "InitialInstanceCount", "InstanceType", "InstancePools", "AcceleratorType"),
            *("VariantInstanceProvisionTimeoutInSeconds", "CoreDumpConfig", "ServerlessConfig", "VolumeSizeInGB"),
            *("ModelDataDownloadTimeoutInSeconds", "ContainerStartupHealthCheckTimeoutInSeconds"),
            *("EnableSSMAccess", "ManagedInstanceScaling", "InferenceAmiVersion", "CapacityReservationConfig"),
            "AcceleratorPartitionLayouts",
        ),
        _MADE_THERE,
    )

    variant_name: AwsName = Field(description="What clients call it in Target-Variant.")
    initial_variant_weight: float = Field(
        1.0, ge=0, le=_MAX_WEIGHT, description="Its share of the traffic is this, divided by the weights of all."
    )
    routing_config: RoutingConfigSettings = Field(
        RoutingConfigSettings(), description="How its instances are picked; left out: RANDOM, as at SageMaker."
    )
    instances: Annotated[tuple[ShortName, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="Its instances, by their names in fleet.instances; left out: the whole fleet."
    )

    @field_validator("instances")
    @classmethod
    def _check_distinct(cls, instances: tuple[str, ...] | None) -> tuple[str, ...] | None:
        seen: set[str] = set()
        for index, name in enumerate(instances or ()):
            if name in seen:
                raise SettingError(f"'{name}' is there twice", index)
            seen.add(name)
        return instances


class CopySettings(AwsTable):
    instance: ShortName = Field(description="The machine that it runs on; any name, the same for all copies there.")
    server: ShortName = Field(description="The model server that it is, by its name in fleet.instances.")


class ComponentSettings(AwsTable):
    foreign: ClassVar[Mapping[str, str]] = {
        "EndpointName": "is the endpoint that it is listed in (leave it out)",
        "RuntimeConfig": "is how many copies SageMaker makes (leave it out, and list in Copies those that there are)",
        **dict.fromkeys(("Specification", "Specifications"), _MADE_THERE),
        "Tags": _KEPT_THERE,
    }

    inference_component_name: AwsName = Field(description="What clients call it in Inference-Component.")
    variant_name: AwsName = Field(description="The production variant whose routing it has.")
    copies: Annotated[tuple[CopySettings, ...], Field(strict=False, min_length=1)] = Field(
        description="The copies that there are; several may run on one machine."
    )


class EndpointSettings(AwsTable):
    foreign: ClassVar[Mapping[str, str]] = {
        "EndpointConfigName": "names what SageMaker keeps; clients ask for an endpoint (write EndpointName)",
        "ShadowProductionVariants": "is traffic sent a second time, which this router does not do (leave it out)",
        "AsyncInferenceConfig": "is for asynchronous inference, which this router does not do (leave it out)",
        "ExplainerConfig": "is for an explainer, which SageMaker runs (leave it out)",
        "DataCaptureConfig": "is for SageMaker's recordings of requests (leave it out; this router's are 'recording')",
        **dict.fromkeys(
            ("ExecutionRoleArn", "VpcConfig", "EnableNetworkIsolation", "CrossRegionTrafficConfig", "DeploymentConfig"),
            _MADE_THERE,
        ),
        **dict.fromkeys(("Tags", "KmsKeyId", "MetricsConfig", "EndpointConfigArn", "CreationTime"), _KEPT_THERE),
    }

    endpoint_name: AwsName = Field(description="What clients call it in their requests.")
    production_variants: Annotated[tuple[VariantSettings, ...], Field(strict=False, min_length=1, max_length=10)] = (
        Field(description="Between which its traffic is divided.")
    )
    inference_components: Annotated[tuple[ComponentSettings, ...], Field(strict=False)] = Field(
        (), description="Models that share its instances, each on some of them."
    )

    @model_validator(mode="after")
    def _check_variants(self) -> Self:
        names = [variant.variant_name for variant in self.production_variants]
        _check_names(names, "ProductionVariants", "VariantName", "ProductionVariants")
        if not any(variant.initial_variant_weight for variant in self.production_variants):
            raise SettingError("need an InitialVariantWeight of more than 0 in one of them", "ProductionVariants")
        return self

    @model_validator(mode="after")
    def _check_components(self) -> Self:
        names = [component.inference_component_name for component in self.inference_components]
        _check_names(names, "InferenceComponents", "InferenceComponentName", "InferenceComponents")
        variants = {variant.variant_name: variant for variant in self.production_variants}
        for index, component in enumerate(self.inference_components):
            where = ("InferenceComponents", index)
            if (variant := variants.get(component.variant_name)) is None:
                raise SettingError(
                    f"'{component.variant_name}' is not in ProductionVariants"
                    f"{did_you_mean(component.variant_name, variants)}",
                    *(*where, "VariantName"),
                )
            _check_servers(component, variant, where)
        return self

    @model_validator(mode="after")
    def _check_machines(self) -> Self:
        # Of a server that was on two machines, nobody could say which copies are beside it.
        machines: dict[str, tuple[str, str]] = {}
        for at, component in enumerate(self.inference_components):
            for index, copy in enumerate(component.copies):
                here = f"InferenceComponents[{at}].Copies[{index}]"
                machine, there = machines.setdefault(copy.server, (copy.instance, here))
                if machine != copy.instance:
                    raise SettingError(
                        f"'{copy.server}' is on '{machine}' in {there} (a server is on one machine)",
                        *("InferenceComponents", at, "Copies", index, "Instance"),
                    )
        return self


class SageMakerSettings(Table):
    endpoints: Annotated[tuple[EndpointSettings, ...], Field(strict=False)] = Field(
        (), description="Endpoints by their names; none: every name means the whole fleet under routing.strategy."
    )
    access_keys_file: FilePath | None = Field(
        None,
        description="File with the access keys whose signatures endpoints require; null: signatures are not checked.",
    )
    max_sessions: int = Field(100_000, ge=1, le=10**7, description="Sessions whose instance is remembered.")

    @field_validator("endpoints")
    @classmethod
    def _check_distinct(cls, endpoints: tuple[EndpointSettings, ...]) -> tuple[EndpointSettings, ...]:
        # CreateEndpoint knows no case, though who invokes one must match it.
        _check_names([one.endpoint_name.lower() for one in endpoints], "sagemaker.endpoints", "EndpointName")
        return endpoints


def unheard_variants(sagemaker: SageMakerSettings, told_of: Collection[str]) -> list[tuple[str, str]]:
    """Endpoint and variant by name, where a KV_AWARE one has no instance in `told_of`: nothing is known to it."""
    return [
        (endpoint.endpoint_name, variant.variant_name)
        for endpoint in sagemaker.endpoints
        for variant in endpoint.production_variants
        if variant.routing_config.routing_strategy == "KV_AWARE"
        and not (told_of if variant.instances is None else any(name in told_of for name in variant.instances))
    ]


def check_instances(sagemaker: SageMakerSettings, fleet: Sequence[str]) -> None:
    """Raises SettingError, with its place in all settings, for a name that is none of `fleet`."""
    known = frozenset(fleet)
    for name, where in _named_instances(sagemaker):
        if name not in known:
            raise SettingError(
                f"'{name}' is not the name of one of fleet.instances{did_you_mean(name, fleet)}",
                *("sagemaker", "endpoints", *where),
            )


def _named_instances(sagemaker: SageMakerSettings) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    for at, endpoint in enumerate(sagemaker.endpoints):
        for n, variant in enumerate(endpoint.production_variants):
            for index, name in enumerate(variant.instances or ()):
                yield name, (at, "ProductionVariants", n, "Instances", index)
        for n, component in enumerate(endpoint.inference_components):
            for index, copy in enumerate(component.copies):
                yield copy.server, (at, "InferenceComponents", n, "Copies", index, "Server")


def _check_names(names: Sequence[str], of: str, key: str, *where: str) -> None:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if (other := first.setdefault(name, index)) != index:
            raise SettingError(f"'{name}' is also the name of {of}[{other}] (give each its own)", *where, index, key)


def _check_servers(component: ComponentSettings, variant: VariantSettings, where: tuple[str | int, ...]) -> None:
    allowed = None if variant.instances is None else frozenset(variant.instances)
    seen: set[str] = set()
    for index, copy in enumerate(component.copies):
        here = (*where, "Copies", index, "Server")
        if copy.server in seen:
            raise SettingError(f"'{copy.server}' is there twice (list each server once)", *here)
        if allowed is not None and copy.server not in allowed:
            raise SettingError(
                f"'{copy.server}' is not among the Instances of '{variant.variant_name}'"
                f"{did_you_mean(copy.server, variant.instances or ())}",
                *here,
            )
        seen.add(copy.server)
