"""What holds for every policy, and each policy's rule against a naive transcription."""

import math
from collections.abc import Callable, Sequence
from random import Random

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute.core.fleet import Instance
from prefixroute.core.policies.blind import LeastOutstanding, RandomPolicy, RoundRobin
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policies.kv_aware import KvAware
from prefixroute.core.policies.prefix_aware import PrefixAware
from prefixroute.core.policies.session import SessionPolicy
from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason
from prefixroute.core.prompt import Api, Prompt, read_prompt

MAKERS: dict[str, Callable[[], Policy]] = {
    "random": RandomPolicy,
    "round_robin": RoundRobin,
    "least_outstanding_requests": LeastOutstanding,
    "prefix_aware": lambda: PrefixAware(prefix_length=8, concurrency_threshold=3, max_prefixes=4, seed=1),
    "session": lambda: SessionPolicy(bounded_load=1.25, seed=1),
    "kv_aware": lambda: KvAware(concurrency_threshold=3),
    "expected_latency": ExpectedLatency,
}
INSTANCES = [Instance(f"gpu-{slot}", f"http://10.0.0.{slot}:8000", slot) for slot in range(12)]

any_text = st.text(st.characters(), max_size=5)  # lone surrogates too: headers are decoded with surrogateescape
prompts = st.builds(
    lambda text, stream, session, identity: read_prompt(
        Api.CHAT,
        orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}),
        session_id=session,
        prefix_aware_id=identity,
    ),
    st.sampled_from(["", "short", "the same beginning, one end", "the same beginning, another end"]),
    st.booleans(),
    st.none() | any_text,
    st.none() | any_text,
)
counts = st.integers(0, 1000)
tokens = st.integers(0, 10**6)
work = st.floats(1, 1e7)
rates = st.floats(1, 1e6)


@st.composite
def facts_and_candidates(draw: st.DrawFn) -> tuple[Facts, list[Candidate]]:
    facts = Facts(
        draw(prompts), draw(tokens), draw(st.floats(0, 1e9)), draw(rates), draw(work), held_work=draw(st.floats(0, 1e7))
    )
    candidates = [
        Candidate(
            instance,
            matched_tokens=draw(tokens),
            exact=draw(st.booleans()),
            work=draw(work),
            in_flight=draw(counts),
            in_flight_tokens=draw(tokens),
            pending_work=draw(st.floats(0, 1e7)),
            head_progress=draw(st.floats(0, 1e5)),
            prefill_rate=draw(rates | st.floats(0.9, 1.1).map(lambda factor: facts.fleet_rate * factor)),
            held_work=draw(st.floats(0, 1e7)),
            capacity_tokens=draw(st.integers(1, 10**7)),
            machine=draw(st.sampled_from(["", "left", "right"])),
        )
        for instance in draw(st.lists(st.sampled_from(INSTANCES), min_size=1, max_size=6, unique=True))
    ]
    return facts, candidates


situations = facts_and_candidates()
histories = st.lists(situations, max_size=3)


def after(make: Callable[[], Policy], history: Sequence[tuple[Facts, list[Candidate]]]) -> Policy:
    """A policy that has decided all of `history`."""
    policy, rng = make(), Random(0)
    for facts, candidates in history:
        policy.record(facts, policy.pick(facts, candidates, rng))
    return policy


def told(decision: Decision) -> tuple[str, Reason, list[float] | None]:
    scores = decision.scores
    return decision.instance.name, decision.reason, None if scores is None else list(scores)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@settings(max_examples=50)
@given(histories, situations, st.integers())
def test_a_pick_is_one_of_the_candidates_with_finite_scores_and_changes_nothing(
    make: Callable[[], Policy],
    history: list[tuple[Facts, list[Candidate]]],
    situation: tuple[Facts, list[Candidate]],
    seed: int,
) -> None:
    facts, candidates = situation
    policy = after(make, history)
    before = [repr(candidate) for candidate in candidates]
    first = policy.pick(facts, tuple(candidates), Random(seed))
    assert first.candidate in candidates
    if first.scores is not None:
        assert len(first.scores) == len(candidates)
        assert all(map(math.isfinite, first.scores))
    assert told(policy.pick(facts, candidates, Random(seed))) == told(first)
    assert [repr(candidate) for candidate in candidates] == before


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@settings(max_examples=50)
@given(histories, situations, st.integers())
def test_equal_histories_and_dice_give_equal_decisions(
    make: Callable[[], Policy],
    history: list[tuple[Facts, list[Candidate]]],
    situation: tuple[Facts, list[Candidate]],
    seed: int,
) -> None:
    one, other = after(make, history), after(make, history)
    assert told(one.pick(*situation, Random(seed))) == told(other.pick(*situation, Random(seed)))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@settings(max_examples=50)
@given(histories, situations, st.integers())
def test_a_single_candidate_is_picked(
    make: Callable[[], Policy],
    history: list[tuple[Facts, list[Candidate]]],
    situation: tuple[Facts, list[Candidate]],
    seed: int,
) -> None:
    facts, candidates = situation
    assert after(make, history).pick(facts, candidates[:1], Random(seed)).candidate is candidates[0]


# ------------------------------------------------------------------ expected latency


def formula_tokens(facts: Facts, candidates: Sequence[Candidate]) -> list[float]:
    """score_i of docs/routing.md, in its own unit (tokens at the fleet's speed) and names."""
    v_fleet, m_mean = facts.fleet_rate, facts.mean_work
    n_mean = sum(c.in_flight for c in candidates) / len(candidates)
    p_mean = (sum(c.pending_work for c in candidates) + facts.held_work) / len(candidates)
    m_b = min(c.work for c in candidates)
    a = 1.0 * min(20, 1 + p_mean / 16_000)
    scores = []
    for c in candidates:
        p, e, h, m, n, v = c.pending_work, c.head_progress, c.held_work, c.work, c.in_flight, c.prefill_rate
        if 0.95 * v_fleet < v < 1.05 * v_fleet:
            v = v_fleet
        interference = 0.4 / (1 + n_mean / 10) * n * min(m, m_mean)
        kv_read = 1.0 * v_fleet * c.in_flight_tokens / max(c.capacity_tokens, 400_000)
        scores.append((p - e + h + m + interference + kv_read) * v_fleet / v + a * (m - m_b))
    return scores


@given(situations)
def test_expected_latency_scores_by_the_formula(situation: tuple[Facts, list[Candidate]]) -> None:
    facts, candidates = situation
    scores = ExpectedLatency().pick(facts, candidates, Random(0)).scores
    assert scores is not None
    for score, expected in zip(scores, formula_tokens(facts, candidates), strict=True):
        assert score * facts.fleet_rate == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(situations, st.integers())
def test_expected_latency_picks_the_least(situation: tuple[Facts, list[Candidate]], seed: int) -> None:
    facts, candidates = situation
    decision = ExpectedLatency().pick(facts, candidates, Random(seed))
    assert decision.scores is not None
    assert decision.scores[candidates.index(decision.candidate)] == min(decision.scores)


@given(situations)
def test_expected_latency_tells_why(situation: tuple[Facts, list[Candidate]]) -> None:
    facts, candidates = situation
    decision = ExpectedLatency().pick(facts, candidates, Random(0))
    longest = max(c.matched_tokens for c in candidates)
    match decision.reason:
        case Reason.AFFINITY:
            assert decision.candidate.matched_tokens == longest > 0
        case Reason.SPILL:
            assert decision.candidate.matched_tokens < longest
        case Reason.COLD:
            assert longest == 0
            assert facts.prompt.key
        case _:
            assert decision.reason is Reason.LOAD
            assert longest == 0
            assert not facts.prompt.key


# ------------------------------------------------------------------ load, sessions, prefixes


@given(situations, st.integers())
def test_least_outstanding_has_nobody_below_it(situation: tuple[Facts, list[Candidate]], seed: int) -> None:
    facts, candidates = situation
    decision = LeastOutstanding().pick(facts, candidates, Random(seed))
    assert decision.candidate.in_flight == min(c.in_flight for c in candidates)


def asking(session: str) -> Facts:
    return Facts(read_prompt(Api.CHAT, b"{}", session_id=session), 0, 0.0)


def idle(instances: Sequence[Instance]) -> list[Candidate]:
    return [Candidate(instance) for instance in instances]


sessions = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=30, unique=True)
some_instances = st.lists(st.sampled_from(INSTANCES), min_size=2, max_size=12, unique=True)


@given(sessions, some_instances, st.integers(0, 2**64 - 1))
def test_when_an_instance_leaves_only_its_own_sessions_move(
    given_sessions: list[str], instances: list[Instance], seed: int
) -> None:
    policy = SessionPolicy(bounded_load=1.25, seed=seed)
    *stay, leaves = instances
    for session in given_sessions:
        before = policy.pick(asking(session), idle(instances), Random(0)).instance
        after_it_left = policy.pick(asking(session), idle(stay), Random(0)).instance
        assert after_it_left is before or before is leaves


@given(situations, st.floats(1, 3), st.text(min_size=1, max_size=8))
def test_a_session_goes_to_nobody_above_the_bounded_load(
    situation: tuple[Facts, list[Candidate]], bounded_load: float, session: str
) -> None:
    _, candidates = situation
    decision = SessionPolicy(bounded_load, seed=1).pick(asking(session), candidates, Random(0))
    mean = (sum(c.in_flight for c in candidates) + 1) / len(candidates)
    assert decision.candidate.in_flight < max(4, math.ceil(bounded_load * mean))
    assert decision.reason in (Reason.SESSION, Reason.SPILL)


class NaivePrefixAware:
    """SageMaker's rule as a sentence: the home of (prefix, id), unless `threshold` are in flight there."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self.homes: dict[tuple[bytes, str | None], str] = {}

    def allowed(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Candidate]:
        home = self.homes.get(self.key(prompt))
        at_home = [c for c in candidates if c.instance.name == home]
        if len(candidates) > 1 and at_home:
            if at_home[0].in_flight < self.threshold:
                return at_home
            candidates = self.beside(at_home[0], [c for c in candidates if c is not at_home[0]])
        least = min(c.in_flight for c in candidates)
        return [c for c in candidates if c.in_flight == least]

    def beside(self, home: Candidate, others: Sequence[Candidate]) -> Sequence[Candidate]:
        """Copies on the same machine that have room, else those on other machines, else all the others."""
        if home.machine == "":
            return others
        near = [c for c in others if c.machine == home.machine]
        return [c for c in near if c.in_flight < self.threshold] or [c for c in others if c not in near] or others

    def took(self, prompt: Prompt, candidates: Sequence[Candidate], name: str) -> None:
        at_home = any(c.instance.name == self.homes.get(self.key(prompt)) for c in candidates)
        if len(candidates) > 1 and not at_home:
            self.homes[self.key(prompt)] = name

    def key(self, prompt: Prompt) -> tuple[bytes, str | None]:
        return prompt.prefix_bytes(8), prompt.prefix_aware_id or None


@given(st.lists(situations, max_size=20), st.integers(1, 5))
def test_prefix_aware_follows_the_rule(history: list[tuple[Facts, list[Candidate]]], threshold: int) -> None:
    policy = PrefixAware(prefix_length=8, concurrency_threshold=threshold, max_prefixes=1000, seed=1)
    naive, rng = NaivePrefixAware(threshold), Random(0)
    for facts, candidates in history:
        decision = policy.pick(facts, candidates, rng)
        assert decision.candidate in naive.allowed(facts.prompt, candidates)
        policy.record(facts, decision)
        naive.took(facts.prompt, candidates, decision.instance.name)
