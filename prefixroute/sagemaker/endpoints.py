"""Endpoints as configured, and who of the fleet a request to one of them may go to.

An endpoint has variants, between which its traffic is divided by weight, and perhaps inference components, which are
models that share its instances. Each variant and each component is a group of its own: its instances, under the rule
that the variant's RoutingConfig states. With no endpoints configured, every name means the whole fleet under the
router's own policy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import NamedTuple

from prefixroute.config.sagemaker import ComponentSettings, EndpointSettings, RoutingConfigSettings, VariantSettings
from prefixroute.core.group import Group
from prefixroute.core.policies.prefix_aware import PrefixAware
from prefixroute.core.policy import Policy
from prefixroute.core.survey import Sampling
from prefixroute.sagemaker.errors import UnknownDestinationError

# What SageMaker's own tools call the only variant of an endpoint.
ONLY_VARIANT = "AllTraffic"


class RoutingRule(NamedTuple):
    """How a group picks: see `Group`."""

    policy: Policy
    holds: bool = False
    sampling: Sampling | None = None


MakeRule = Callable[[RoutingConfigSettings], RoutingRule]


class Destination(NamedTuple):
    """Where a request goes. `group` None: the whole fleet, by the router's own policy."""

    variant: str
    component: str | None
    group: Group | None


@dataclass(frozen=True, slots=True)
class _Part:
    """A variant's instances, or a component's copies."""

    variant: VariantSettings
    component: ComponentSettings | None
    rule: RoutingRule
    group: Group

    @property
    def destination(self) -> Destination:
        component = self.component
        return Destination(
            self.variant.variant_name, None if component is None else component.inference_component_name, self.group
        )


class Endpoint:
    """One of them. `earlier`: the one of its name, before the configuration changed."""

    def __init__(self, settings: EndpointSettings, make_rule: MakeRule, earlier: "Endpoint | None") -> None:
        self.settings = settings
        self._variants = {v.variant_name: v for v in settings.production_variants}
        weighed = [v for v in settings.production_variants if v.initial_variant_weight]
        self._names = [v.variant_name for v in weighed]
        self._shares = list(accumulate(v.initial_variant_weight for v in weighed))
        before: Mapping[tuple[str | None, str | None], _Part] = {} if earlier is None else earlier._parts
        self._parts: dict[tuple[str | None, str | None], _Part] = {}
        for variant in settings.production_variants:
            self._parts[variant.variant_name, None] = _part(
                variant, None, make_rule, before.get((variant.variant_name, None))
            )
        for component in settings.inference_components:
            name = component.inference_component_name
            self._parts[None, name] = _part(
                self._variants[component.variant_name], component, make_rule, before.get((None, name))
            )

    def destination(self, variant: str | None, component: str | None, rng: Random) -> Destination:
        """Where a request goes that names these. Raises UnknownDestinationError."""
        if component is not None:
            return self._of_component(variant, component).destination
        if self.settings.inference_components:
            raise UnknownDestinationError(
                "this endpoint has inference components, and the request must name one of them "
                "(X-Amzn-SageMaker-Inference-Component, or /endpoints/NAME/inference-components/COMPONENT/openai/v1)"
            )
        if variant is None:
            (variant,) = rng.choices(self._names, cum_weights=self._shares)
        part = self._parts.get((variant, None))
        if part is None:
            raise UnknownDestinationError(
                "the endpoint has no such production variant (X-Amzn-SageMaker-Target-Variant)"
            )
        return part.destination

    def _of_component(self, variant: str | None, component: str) -> _Part:
        part = self._parts.get((None, component))
        if part is None:
            raise UnknownDestinationError("the endpoint has no such inference component")
        if variant is not None and variant != part.variant.variant_name:
            raise UnknownDestinationError(
                "the inference component is on another production variant than the request names"
            )
        return part


class Endpoints:
    """All of them. `earlier`: as they were before the configuration changed; what they remember goes on."""

    def __init__(
        self, settings: Sequence[EndpointSettings], make_rule: MakeRule, earlier: "Endpoints | None" = None
    ) -> None:
        before: dict[str, Endpoint] = {} if earlier is None else earlier._endpoints
        self._endpoints: dict[str, Endpoint] = {
            s.endpoint_name: Endpoint(s, make_rule, before.get(s.endpoint_name)) for s in settings
        }

    def destination(self, endpoint: str, variant: str | None, component: str | None, rng: Random) -> Destination:
        """Where a request goes that names these. Raises UnknownDestinationError."""
        if not self._endpoints:
            return Destination(variant or ONLY_VARIANT, component, None)
        found = self._endpoints.get(endpoint)
        if found is None:
            raise UnknownDestinationError("no endpoint of this name is configured (sagemaker.endpoints)")
        return found.destination(variant, component, rng)


def _part(
    variant: VariantSettings, component: ComponentSettings | None, make_rule: MakeRule, before: _Part | None
) -> _Part:
    rule = make_rule(variant.routing_config)
    if before is not None and before.variant.routing_config == variant.routing_config:
        old, new = before.rule.policy, rule.policy
        if isinstance(old, PrefixAware) and isinstance(new, PrefixAware):
            new.succeeds(old)
    machines: dict[str, str] | None = None
    members: Sequence[str] | None = variant.instances
    if component is not None:
        members = [copy.server for copy in component.copies]
        # Ours weighs all that a server does, whosever it is.
        if variant.routing_config.routing_strategy != "EXPECTED_LATENCY":
            machines = {copy.server: copy.instance for copy in component.copies}
    group = Group(
        rule.policy,
        members,
        machines=machines,
        holds=rule.holds,
        sampling=rule.sampling,
        strategy=variant.routing_config.routing_strategy,
    )
    if before is not None:
        group.succeeds(before.group)
    return _Part(variant, component, rule, group)
