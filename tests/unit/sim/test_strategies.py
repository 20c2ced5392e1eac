"""Strategies by name, their parameters, and what is said of those that are wrong."""

from typing import get_args

import pytest

from prefixroute.config.routing import Strategy
from prefixroute.core.held import HoldConstants
from prefixroute.core.load import LoadConstants
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policies.prefix_aware import PrefixAware
from prefixroute.core.policy import Policy
from prefixroute.errors import ConfigError
from prefixroute.sim.prompt import SimPrompt
from prefixroute.sim.run import FleetShape, Simulation
from prefixroute.sim.strategies import NAMES, strategy
from prefixroute.sim.workload import Workload


def made(text: str) -> Policy:
    return Simulation(Workload("none", 256, []), FleetShape([1.0] * 2), strategy(text).make).router.policy


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_a_policy_of_its_own_each_time(name: str) -> None:
    known = strategy(name)
    assert known.name == name
    sims = [Simulation(Workload("none", 256, []), FleetShape([1.0] * 2), known.make) for _ in range(2)]
    assert sims[0].router.policy is not sims[1].router.policy


def test_only_expected_latency_holds() -> None:
    assert {name for name in NAMES if strategy(name).hold is not None} == {"expected_latency"}
    assert strategy("expected_latency").hold == HoldConstants()
    assert strategy("expected_latency").load_constants == LoadConstants()


def test_without_room_for_held_requests_nobody_is_held_rather_than_refused() -> None:
    assert strategy("expected_latency:max_held=0").hold is None


def test_constants_of_expected_latency_go_where_they_belong() -> None:
    text = "expected_latency:affinity=1.0, kv_read_s=0.2,hold_s=0.5,max_held=7,rate_decay=0.9"
    known = strategy(text)
    policy = made(text)
    assert known.name == text
    assert known.hold == HoldConstants(hold_s=0.5, max_held=7)
    assert known.load_constants == LoadConstants(rate_decay=0.9)
    assert isinstance(policy, ExpectedLatency)
    assert (policy._constants.affinity, policy._constants.kv_read_s, policy._constants.interference) == (1.0, 0.2, 0.4)


def test_parameters_of_prefix_aware_and_of_baselines() -> None:
    policy = made("prefix_aware:prefix_length=1024,concurrency_threshold=4")
    assert isinstance(policy, PrefixAware)
    assert (policy._prefix_length, policy._threshold) == (1_024, 4)
    assert made("dynamo_exact:overlap_weight=16")._overlap_weight == 16.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dynamo_exakt", "did you mean 'dynamo_exact'?"),
        ("", "known here: random, round_robin"),
        ("dynamo_exact:overlap_wait=3", "unknown parameter overlap_wait; did you mean 'overlap_weight'?"),
        ("random:seed=1", "unknown parameter seed (it has none)"),
        ("min_ttft:x=1", "unknown parameter x (it has none)"),
        ("dynamo:ttl_s", "'ttl_s' is not key=value"),
        ("dynamo:ttl_s=", "'ttl_s=' is not key=value"),
        ("dynamo:ttl_s=1,,", "'' is not key=value"),
        ("dynamo:ttl_s=1,ttl_s=2", "ttl_s is given twice"),
        ("dynamo:ttl_s=long", "ttl_s must be a number, not 'long'"),
        ("sglang:balance_abs=1.5", "balance_abs must be a whole number, not '1.5'"),
        ("dynamo:ttl_s=-1", "ttl_s must be a finite number, at least 0, not '-1'"),
        ("dynamo:ttl_s=nan", "ttl_s must be a finite number"),
        ("expected_latency:rate_decay=1.5", "rate_decay: must be at most 1, not 1.5"),
        ("prefix_aware:prefix_length=10", "prefix_length: must be at least 1024, not 10"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kv_aware", "KV events, which simulated servers do not publish"),
        ("kv_aware:concurrency_threshold=4", "KV events"),
        ("session", "session ids, which the requests of traces do not carry"),
        ("custom", "not read from the command line"),
    ],
)
def test_what_serve_has_and_is_not_simulated_says_why_and_what_is(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy(text)
    said = str(caught.value)
    assert said.startswith(f"strategy '{text.partition(':')[0]}' is not simulated: ")
    assert why in said
    assert said.endswith(f"; simulated are {', '.join(NAMES)}")


def test_every_strategy_of_serve_is_simulated_or_says_why_not() -> None:
    for name in get_args(Strategy):
        if name not in NAMES:
            with pytest.raises(ConfigError, match="is not simulated: "):
                strategy(name)


# ------------------------------------------------------------------ prompts without text


def prompt(number: int, *hashes: int) -> SimPrompt:
    return SimPrompt(None, b"", b"key", 1_000, hashes=hashes, block_tokens=512, number=number)


def test_beginnings_are_equal_when_the_blocks_that_cover_them_are() -> None:
    # 4,096 bytes are two blocks of 512 tokens.
    assert prompt(1, 7, 8, 9).prefix_bytes(4_096) == prompt(2, 7, 8, 10).prefix_bytes(4_096)
    assert prompt(1, 7, 8, 9).prefix_bytes(4_097) != prompt(2, 7, 8, 10).prefix_bytes(4_097)


def test_a_prompt_that_ends_before_shares_its_beginning_with_nobody() -> None:
    assert prompt(1, 7).prefix_bytes(4_096) != prompt(2, 7).prefix_bytes(4_096)
    assert prompt(1, 7).prefix_bytes(4_096) == prompt(1, 7).prefix_bytes(4_096)
    assert prompt(1).prefix_bytes(1_024)
