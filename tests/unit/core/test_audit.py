"""The loop closed over a router: what reports teach, and what a request counts for."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.feedback import Prediction
from prefixroute.core.fleet import Instance
from prefixroute.core.lease import Lease
from prefixroute.core.policies.blind import LeastOutstanding, RoundRobin
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.prompt import Prompt
from prefixroute.core.request import Request
from prefixroute.core.router import Router
from prefixroute.core.shadow import Shadow, Shadows

BLOCK = 16
N_TOKENS = 100 * BLOCK
CAPACITY = 200 * BLOCK


def make_router(n: int = 1, **more: Any) -> Router:
    instances = [Instance(f"gpu-{i}", f"http://gpu-{i}", i) for i in range(n)]
    more.setdefault("default_capacity_tokens", CAPACITY)
    router = Router(instances, more.pop("policy", LeastOutstanding()), BlockHasher(BLOCK, 1), Random(1), **more)
    for instance in instances:
        router.fleet.probe_passed(instance.name)
    return router


def a_request(topic: int, n_tokens: int = N_TOKENS) -> Request:
    chain = [(topic << 32) + i for i in range(n_tokens // BLOCK)]
    return Request(Prompt("m", b"", b"k", n_tokens, stream=True), chain, n_tokens)


def answered(router: Router, request: Request, cached: Callable[[int], int] | None) -> Lease:
    """One request, whose instance reports so many cached tokens for so many predicted; None: it reports none."""
    with router.lease(request, now_s=0.0) as lease:
        lease.first_byte(0.1, learn=True)
        if cached is not None:
            lease.reported(cached(lease.decision.candidate.matched_tokens), request.n_tokens)
    return lease


def test_an_instance_that_caches_less_than_predicted_is_taken_to_be_smaller() -> None:
    router = make_router()
    answered(router, a_request(1), lambda predicted: predicted)
    assert router.capacity_tokens("gpu-0") == CAPACITY
    answered(router, a_request(1), lambda _: 0)
    assert router.capacity_tokens("gpu-0") == round(CAPACITY * 0.97)
    assert router.index.capacity_blocks(0) == round(CAPACITY * 0.97) // BLOCK


def test_one_that_caches_more_is_taken_to_be_larger_once_its_map_is_full() -> None:
    router = make_router()
    answered(router, a_request(1), lambda _: N_TOKENS)
    assert router.capacity_tokens("gpu-0") == CAPACITY
    answered(router, a_request(2), lambda predicted: predicted)
    answered(router, a_request(3), lambda _: N_TOKENS)
    assert router.capacity_tokens("gpu-0") == round(CAPACITY * 1.03)


@pytest.mark.parametrize("told_by", ["configuration", "instance"])
def test_a_capacity_that_was_told_stays(told_by: str) -> None:
    router = make_router(capacities={"gpu-0": CAPACITY} if told_by == "configuration" else None)
    if told_by == "instance":
        assert not router.is_capacity_told("gpu-0")
        router.learned_capacity("gpu-0", CAPACITY)  # what was assumed, as it happens
    assert router.is_capacity_told("gpu-0")
    for _ in range(5):
        answered(router, a_request(1), lambda _: 0)
    assert router.capacity_tokens("gpu-0") == CAPACITY


def test_capacity_is_learned_within_bounds() -> None:
    router = make_router()
    for topic in range(2_000):
        answered(router, a_request(topic % 3), lambda _: 0)
    assert router.capacity_tokens("gpu-0") >= CAPACITY // 64 > 0


def test_the_true_size_is_found_from_a_wrong_start() -> None:
    """An engine with room for 10 prompts behind a map that starts with room for 40."""
    true, router, rng = 10, make_router(default_capacity_tokens=40 * N_TOKENS), Random(5)
    engine: dict[int, None] = {}
    for _ in range(3_000):
        topic = rng.choices(range(30), weights=range(1, 31))[0]
        was_cached = topic in engine
        engine.pop(topic, None)
        engine[topic] = None
        while len(engine) > true:
            del engine[next(iter(engine))]
        answered(router, a_request(topic), lambda _, hit=was_cached: N_TOKENS * hit)  # type: ignore[misc]  # a default
    assert router.capacity_tokens("gpu-0") == pytest.approx(true * N_TOKENS, rel=0.25)


def test_reports_come_in_the_instances_own_tokens() -> None:
    router = make_router()
    answered(router, a_request(1), None)
    request = a_request(1)
    with router.lease(request, now_s=0.0) as lease:
        lease.first_byte(0.1, learn=True)
        lease.reported(300, 400)  # a token of the instance is four of ours
    one = router.audit.feedback.of(0)
    assert (one.predicted_tokens, one.reported_tokens) == (N_TOKENS, N_TOKENS * 0.75)


def test_a_report_that_cannot_be_is_taken_as_far_as_it_can() -> None:
    router = make_router()
    with router.lease(a_request(1), now_s=0.0) as lease:
        lease.reported(5, 0)
        lease.reported(10**9, 100)
    assert router.audit.feedback.of(0).reported_tokens == N_TOKENS
    assert router.audit.ladder.reported.n_requests == 1


def test_an_instance_that_reports_nothing_is_unknown_not_wrong() -> None:
    router = make_router()
    for _ in range(100):
        answered(router, a_request(1), None)
    assert router.audit.feedback.of(0).prediction is Prediction.UNKNOWN
    assert router.capacity_tokens("gpu-0") == CAPACITY
    ladder = router.audit.ladder
    assert (ladder.reported.n_requests, ladder.unreported.n_requests) == (0, 100)
    assert ladder.unreported.chosen == 99 * N_TOKENS


def test_a_request_counts_once_by_the_lease_that_was_answered() -> None:
    router = make_router(2)
    request = a_request(1)
    with router.lease(request, now_s=0.0) as refused:
        refused.first_byte(0.1, learn=False)
        refused.refused()
    with router.lease(request, now_s=0.2, without={refused.instance.name}) as lease:
        lease.first_byte(0.3, learn=True)
        lease.reported(0, N_TOKENS)
        lease.end()
        lease.reported(0, N_TOKENS)
    rungs = router.audit.ladder.reported
    assert (rungs.n_requests, rungs.prompt, rungs.ideal) == (1, N_TOKENS, 0)
    assert router.audit.ladder.unreported.n_requests == 0


def test_prompts_without_a_chain_are_not_looked_at() -> None:
    router = make_router()
    answered(router, Request(Prompt("m", b"", b"", 5_000, stream=True), [], 5_000), lambda _: 5_000)
    assert router.audit.ladder.reported.n_requests == 0
    assert router.audit.feedback.of(0).n_reports == 0
    assert router.capacity_tokens("gpu-0") == CAPACITY


def test_an_answer_is_seen_before_by_the_next_turn() -> None:
    router = make_router()
    longer = a_request(1, N_TOKENS + 50 * BLOCK)
    with router.lease(a_request(1), now_s=0.0) as lease:
        lease.computed(longer.chain)
    answered(router, longer, lambda predicted: predicted)
    rungs = router.audit.ladder.reported
    assert rungs.ideal == rungs.pooled == rungs.chosen == rungs.reported == longer.n_tokens


def test_reachable_is_what_the_best_candidate_held_whoever_was_chosen() -> None:
    router = make_router(2, policy=RoundRobin())
    answered(router, a_request(1), None)
    second = answered(router, a_request(1), lambda predicted: predicted)
    assert second.decision.candidate.matched_tokens == 0
    rungs = router.audit.ladder.reported
    assert (rungs.pooled, rungs.reachable, rungs.chosen) == (N_TOKENS, N_TOKENS, 0)


def test_a_lost_instances_predictions_are_forgotten() -> None:
    router = make_router()
    for topic in range(60):
        answered(router, a_request(topic % 2), lambda _: 0)
    assert router.audit.feedback.of(0).prediction is Prediction.OVER
    router.connect_failed("gpu-0", 1.0, timed_out=False)
    assert router.audit.feedback.of(0).prediction is Prediction.UNKNOWN


def test_shadows_see_each_decision_that_is_carried_out_and_change_none() -> None:
    def run(shadows: Shadows | None) -> list[str]:
        router = make_router(3, policy=ExpectedLatency(), shadows=shadows)
        return [answered(router, a_request(topic % 5), None).instance.name for topic in range(40)]

    shadow = Shadow("round_robin", RoundRobin())
    assert run(Shadows([shadow], ExpectedLatency(), Random(9))) == run(None)
    assert shadow.n_same + shadow.n_different == 40
    assert shadow.n_faults == 0
    assert shadow.worse_s > 0


def test_an_explanation_leaves_no_trace() -> None:
    shadow = Shadow("round_robin", RoundRobin())
    router = make_router(2, shadows=Shadows([shadow], ExpectedLatency(), Random(9)))
    router.explain(Prompt("m", b"", b"k" * 4 * N_TOKENS, N_TOKENS, stream=True), now_s=0.0)
    assert router.audit.ladder.n_blocks == 0
    assert shadow.n_same + shadow.n_different == 0
