"""SageMaker's KV_AWARE rule: the longest exact match that is not too busy."""

from collections import Counter
from random import Random

import pytest

from prefixroute.core.fleet import Instance
from prefixroute.core.policies.kv_aware import KvAware
from prefixroute.core.policy import Candidate, Decision, Facts, Reason
from prefixroute.core.prompt import Api, read_prompt

FACTS = Facts(read_prompt(Api.COMPLETIONS, b'{"model": "m", "prompt": "x"}'), n_tokens=1_000, now_s=0.0)
THRESHOLD = 4


def candidate(slot: int, matched_tokens: int, in_flight: int = 0, *, exact: bool = True) -> Candidate:
    instance = Instance(f"gpu-{slot}", "", slot)
    return Candidate(instance, matched_tokens=matched_tokens, in_flight=in_flight, exact=exact)


def pick(*candidates: Candidate, seed: int = 0) -> Decision:
    return KvAware(THRESHOLD).pick(FACTS, candidates, Random(seed))


def chosen(*candidates: Candidate) -> tuple[int, Reason]:
    decision = pick(*candidates)
    return decision.instance.slot, decision.reason


def test_the_longest_match_wins_though_it_is_busier() -> None:
    assert chosen(candidate(0, 0), candidate(1, 512, 3), candidate(2, 256, 1)) == (1, Reason.AFFINITY)


def test_at_the_threshold_the_next_longest_is_taken() -> None:
    assert chosen(candidate(0, 0), candidate(1, 512, THRESHOLD), candidate(2, 256, 3)) == (2, Reason.SPILL)


def test_when_all_who_hold_some_are_too_busy_load_decides() -> None:
    assert chosen(candidate(0, 0, 9), candidate(1, 512, 7), candidate(2, 256, 8)) == (1, Reason.SPILL)


@pytest.mark.parametrize("matched_tokens", [0, 512])
def test_without_an_exact_match_load_decides(matched_tokens: int) -> None:
    """What is merely estimated holds nothing."""
    estimated = candidate(1, matched_tokens, 2, exact=False)
    assert chosen(candidate(0, 0, 1), estimated) == (0, Reason.COLD)
    assert chosen(candidate(0, 16, 3), estimated) == (0, Reason.AFFINITY)


def test_equal_matches_go_to_the_less_busy_then_by_lot() -> None:
    same = [candidate(0, 512, 2), candidate(1, 512, 1), candidate(2, 512, 1), candidate(3, 256, 0)]
    slots = Counter(pick(*same, seed=seed).instance.slot for seed in range(200))
    assert slots.keys() == {1, 2}
    assert min(slots.values()) > 60
