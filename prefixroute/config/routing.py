"""Settings of routing: the strategies and their constants."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from prefixroute.config.tables import (
    CapacityTokens,
    Positive,
    Ratio,
    Seconds,
    SettingError,
    Table,
    Weight,
)

Strategy = Literal[
    "random",
    "round_robin",
    "least_outstanding_requests",
    "prefix_aware",
    "session",
    "kv_aware",
    "expected_latency",
    "custom",
]

# Who sends the same head again has other values in these.
_OF_ONE_REQUEST = frozenset({"content-length", "x-request-id"})
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


class ExpectedLatencySettings(Table):
    """Constants of the cost in expected seconds; found by simulation on real traces."""

    position_scale_tokens: Positive = Field(
        32_000.0, description="Position at which a prompt token costs twice the first one to prefill."
    )
    interference: Weight = Field(
        0.4, description="Share of the new prefill charged for each request in flight there, which it holds up."
    )
    interference_damping: Positive = Field(
        10.0, description="Mean requests in flight at which interference counts half."
    )
    head_progress_cap: Ratio = Field(
        0.9, description="Largest share of the oldest pending prefill taken as done already."
    )
    kv_read_s: Weight = Field(1.0, description="Seconds charged for decoding beside a full KV cache.")
    kv_read_tokens: int = Field(
        400_000, ge=1, le=10**12, description="Least size of a cache that costs so much; a smaller one costs less."
    )
    prior_prefill_tokens_per_s: Positive = Field(12_000.0, description="Prefill speed assumed before any is measured.")
    prior_weight_s: Seconds = Field(
        2.0, description="How many seconds of real measurement weigh as much as the assumed speed."
    )
    rate_weight_s: Seconds = Field(
        20.0, description="How many seconds of an instance's own measurement weigh as much as the fleet's speed."
    )
    rate_decay: float = Field(0.98, gt=0, le=1, description="Weight of older measurements at each new one.")
    stall_ratio: float = Field(
        4.0, ge=1, le=1e6, description="Multiple of the expected prefill time after which an instance counts as slower."
    )
    stall_s: Seconds = Field(5.0, description="Time on top of it, so that a short hitch does not.")
    min_sample_tokens: int = Field(256, ge=1, le=10**9, description="Prefills shorter than this teach no speed.")
    mean_work_tokens: Positive = Field(2_000.0, description="Mean prefill assumed at the start.")
    mean_work_weight: float = Field(0.01, gt=0, le=1, description="Weight of each new prefill in that mean.")
    affinity: Weight = Field(
        1.0, description="Charge for each token of prefill that another instance could have spared."
    )
    affinity_max: float = Field(20.0, ge=1, le=1e6, description="Largest factor on it under backlog.")
    affinity_backlog_tokens: Positive = Field(
        16_000.0, description="Mean pending prefill that adds one to that factor."
    )
    same_speed_ratio: Ratio = Field(
        0.05, description="Learned speeds that differ from the fleet's by less count as the fleet's."
    )
    hold_s: Weight = Field(
        2.0, description="Pending prefill, in seconds, above which an instance's further requests are held here."
    )
    hold_batch: int = Field(128, ge=1, le=4096, description="Oldest held requests among which the next are chosen.")
    hold_age_tokens_per_s: Weight = Field(
        500.0, description="Prefill that a second of being held outweighs when the next is chosen."
    )
    guard_decay: float = Field(0.99, gt=0, lt=1, description="Weight of older observations of what matches save.")
    guard_evidence: Positive = Field(
        20.0, description="Observations, with and without a match, before matches can lose their weight."
    )
    guard_kept_ratio: float = Field(
        0.5, gt=0, le=1, description="Realised share of the promised saving below which matches lose weight."
    )
    sample_above: int = Field(
        32, ge=8, le=10**6, description="Instances above which only some are weighed against each other for a request."
    )
    sample_matches: int = Field(4, ge=1, le=1024, description="How many of those have the longest matches.")
    sample_others: int = Field(4, ge=1, le=1024, description="How many more are drawn by lot.")
    max_held: int = Field(
        2_048, ge=0, le=10**6, description="Requests held at most; beyond it the answer is 429. 0: none is ever held."
    )


class PrefixAwareSettings(Table):
    prefix_length: int = Field(4096, ge=1024, le=65_536, description="Longest prefix looked at.")
    concurrency_threshold: int = Field(
        16, ge=1, le=1024, description="Requests in flight at which the prefix's instance is passed over."
    )
    max_prefixes: int = Field(100_000, ge=1, le=10**7, description="Recent prefixes remembered.")


class SessionSettings(Table):
    header: str = Field("x-session-id", description="Request header that names the session.")
    bounded_load: float = Field(
        1.25, ge=1, le=1000, description="Multiple of the mean load up to which a session keeps its instance."
    )

    @field_validator("header")
    @classmethod
    def _check_header(cls, header: str) -> str:
        if _HEADER.fullmatch(header) is None:
            raise SettingError("must be the name of an HTTP header, such as x-session-id")
        if header.lower() in _OF_ONE_REQUEST:
            raise SettingError(f"must name a session, and {header.lower()} is of one request: use another header")
        return header.lower()


class KvAwareSettings(Table):
    concurrency_threshold: int = Field(
        16, ge=1, le=1024, description="Requests in flight at which an instance is passed over."
    )


class CustomSettings(Table):
    factory: str | None = Field(None, description="package.module:make, called to make the policy.")
    options: dict[str, Any] = Field(default_factory=dict, description="Passed to the factory as they are.")

    @field_validator("factory")
    @classmethod
    def _check_factory(cls, factory: str | None) -> str | None:
        if factory is not None and _FACTORY.fullmatch(factory) is None:
            raise SettingError("must be written package.module:make")
        return factory


class RoutingSettings(Table):
    strategy: Strategy = Field("expected_latency", description="How an instance is picked.")
    shadow: Annotated[tuple[Strategy, ...], Field(strict=False, max_length=4)] = Field(
        (), description="Strategies whose choices are only counted and compared, in metrics."
    )
    hash_seed: int | None = Field(
        None, ge=0, le=2**64 - 1, description="Seed of block hashes; null: random in each process."
    )
    isolate_by: Literal["none", "api_key"] = Field(
        "none", description="Whose prompts may match whose; api_key: only those sent with the same key."
    )
    block_tokens: int = Field(256, ge=16, le=4096, description="Tokens in one block of the prefix index.")
    default_capacity_tokens: CapacityTokens = Field(
        1_000_000, description="KV capacity of an instance that does not tell its own."
    )
    expected_latency: ExpectedLatencySettings = Field(
        ExpectedLatencySettings(), description="Constants of expected_latency."
    )
    prefix_aware: PrefixAwareSettings = Field(PrefixAwareSettings(), description="Settings of prefix_aware.")
    session: SessionSettings = Field(SessionSettings(), description="Settings of session.")
    kv_aware: KvAwareSettings = Field(KvAwareSettings(), description="Settings of kv_aware.")
    custom: CustomSettings = Field(CustomSettings(), description="Settings of custom.")

    @model_validator(mode="after")
    def _check_custom(self) -> Self:
        if "custom" in (self.strategy, *self.shadow) and self.custom.factory is None:
            where = "routing.strategy is" if self.strategy == "custom" else "routing.shadow names"
            raise SettingError(f"is required when {where} custom (write package.module:make)", "custom", "factory")
        return self

    @model_validator(mode="after")
    def _check_shadows(self) -> Self:
        for index, strategy in enumerate(self.shadow):
            if strategy == self.strategy:
                raise SettingError("is routing.strategy itself (name another one)", "shadow", index)
            if strategy in self.shadow[:index]:
                raise SettingError("is there twice", "shadow", index)
        return self
