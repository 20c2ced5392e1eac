"""Shadow strategies watch, and change nothing."""

from collections.abc import Sequence
from random import Random

import pytest

from prefixroute.core.fleet import Instance
from prefixroute.core.policies.blind import LeastOutstanding, RandomPolicy
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.core.shadow import MAX_SHADOWS, Shadow, Shadows

FACTS = Facts(read_prompt(Api.CHAT, b"{}"), 1000, 5.0)


def candidates(n: int = 3) -> list[Candidate]:
    return [Candidate(Instance(f"gpu-{i}", f"http://gpu-{i}", i), work=1000.0 * (i + 1)) for i in range(n)]


class Always:
    """Picks the candidate at a place; remembers what it was told."""

    def __init__(self, place: int, scores: Sequence[float] | None = None) -> None:
        self.place = place
        self.scores = scores
        self.recorded: list[Decision] = []

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        return Decision(candidates[self.place], Reason.CUSTOM, self.scores)

    def record(self, facts: Facts, decision: Decision) -> None:
        self.recorded.append(decision)


class Broken:
    def __init__(self, where: str) -> None:
        self.where = where

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        if self.where == "pick":
            raise RuntimeError("broken")
        return Decision(candidates[0] if self.where == "record" else candidates_of_others[0], Reason.CUSTOM)

    def record(self, facts: Facts, decision: Decision) -> None:
        raise RuntimeError("broken")


candidates_of_others = candidates()


def watched(policy: Policy, decision_at: int, scores: Sequence[float] | None, judge: Policy | None = None) -> Shadow:
    shadow = Shadow("s", policy)
    seen = candidates()
    Shadows([shadow], judge or ExpectedLatency(), Random(1)).see(
        FACTS, seen, Decision(seen[decision_at], Reason.COLD, scores)
    )
    return shadow


def test_the_same_choice_is_agreement_and_no_regret() -> None:
    shadow = watched(Always(1), 1, [1.0, 2.0, 3.0])
    assert (shadow.n_same, shadow.n_different, shadow.worse_s, shadow.better_s) == (1, 0, 0, 0)


def test_another_choice_is_regretted_by_the_real_decisions_scores() -> None:
    worse, better = watched(Always(2), 1, [1.0, 2.0, 3.5]), watched(Always(0), 1, [1.0, 2.5, 3.0])
    assert (worse.n_different, worse.worse_s, worse.better_s) == (1, 1.5, 0)
    assert (better.n_different, better.worse_s, better.better_s) == (1, 0, 1.5)


def test_a_decision_without_scores_is_judged_by_those_of_the_judge() -> None:
    shadow = watched(Always(2), 0, None, judge=Always(0, scores=[1.0, 2.0, 4.0]))
    assert shadow.worse_s == 3
    assert watched(Always(2), 0, None).worse_s > 0


def test_a_shadow_remembers_its_own_decisions() -> None:
    policy = Always(2)
    watched(policy, 0, [1.0, 2.0, 3.0])
    assert [decision.instance.name for decision in policy.recorded] == ["gpu-2"]


@pytest.mark.parametrize("where", ["pick", "record", "candidate"])
def test_a_fault_is_counted_and_goes_no_further(where: str) -> None:
    shadow = watched(Broken(where), 1, [1.0, 2.0, 3.0])
    assert shadow.n_faults == 1
    assert shadow.last_fault is not None


def test_decisions_without_a_choice_are_not_counted() -> None:
    shadow = Shadow("s", LeastOutstanding())
    shadows = Shadows([shadow], ExpectedLatency(), Random(1))
    alone, three = candidates(1), candidates()
    shadows.see(FACTS, alone, Decision(alone[0], Reason.COLD, [1.0]))
    shadows.see(FACTS, three, Decision(three[0], Reason.STORED))
    assert (shadow.n_same, shadow.n_different) == (0, 0)


def test_there_are_few() -> None:
    with pytest.raises(ValueError, match="more than 4"):
        Shadows([Shadow(str(i), RandomPolicy()) for i in range(MAX_SHADOWS + 1)], ExpectedLatency(), Random(1))


@pytest.mark.parametrize("scores", [[1.0, float("inf"), 3.0], [float("inf")] * 3, [1.0, float("nan"), 3.0]])
def test_costs_that_are_no_number_of_seconds_spoil_no_sum(scores: list[float]) -> None:
    """Policies write "never" as an infinite cost, and counters that were infinite once stay so."""
    shadow = watched(Always(1), 0, scores)
    assert (shadow.n_different, shadow.n_faults) == (1, 0)
    assert (shadow.worse_s, shadow.better_s) == (0.0, 0.0)
