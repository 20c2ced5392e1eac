"""The promises of a `Policy`, as a check that anyone's policy can be put through."""

from collections.abc import Sequence
from math import isfinite
from random import Random

from prefixroute.core.policy import Candidate, Facts, Policy


def check_policy(policy: Policy, facts: Facts, candidates: Sequence[Candidate], seed: int = 0) -> None:
    """Raises AssertionError when `policy` breaks a promise on these facts.

    It picks one of the candidates; picking changes nothing, so the same randomness picks the same; scores, if given,
    are finite and one for each candidate; what it picked can be recorded, and then it still picks.
    """
    first = policy.pick(facts, candidates, Random(seed))
    again = policy.pick(facts, candidates, Random(seed))
    _promise(any(first.candidate is c for c in candidates), "the pick is not one of the candidates")
    _promise(first.candidate is again.candidate, "the same facts and randomness gave another pick")
    _promise(first.reason is again.reason, "the same facts and randomness gave another reason")
    if first.scores is not None:
        _promise(len(first.scores) == len(candidates), "there is not one score for each candidate")
        _promise(all(map(isfinite, first.scores)), "a score is not finite")
    policy.record(facts, first)
    after = policy.pick(facts, candidates, Random(seed))
    _promise(any(after.candidate is c for c in candidates), "after record, the pick is not one of the candidates")


def _promise(kept: bool, broken: str) -> None:
    if not kept:
        raise AssertionError(broken)
