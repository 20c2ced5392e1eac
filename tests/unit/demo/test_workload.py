"""The demo's workload: the same for the same seed, and shaped as it says."""

from collections import Counter
from dataclasses import replace
from statistics import mean, median

import pytest

from prefixroute.demo.server import tokens
from prefixroute.demo.words import spelled, text
from prefixroute.demo.workload import (
    MAX_TURNS,
    Conversation,
    WorkloadShape,
    make_workload,
    n_new_tokens,
    n_requests,
)

SHAPE = WorkloadShape()
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module", params=SEEDS)
def workload(request: pytest.FixtureRequest) -> list[Conversation]:
    return make_workload(SHAPE, request.param)


def n_tokens(words: str) -> int:
    return tokens.count(tokens.encode(words))


def test_text_has_exactly_as_many_tokens_as_words() -> None:
    assert [n_tokens(text("a", n)) for n in (0, 1, 17, 512)] == [0, 1, 17, 512]
    assert n_tokens(spelled(12_345)) == 8


def test_text_for_one_name_is_always_the_same_and_differs_from_others_early() -> None:
    assert text("a", 100) == text("a", 100)
    # The shorter one is the beginning of the longer one.
    assert text("a", 100).startswith(text("a", 10))
    assert text("a", 8) != text("b", 8)


def test_numbers_are_spelled_differently() -> None:
    assert len({spelled(number) for number in range(2_000)}) == 2_000
    # The low byte comes first, so neighbours differ in their first word.
    assert len({spelled(number)[:4] for number in range(256)}) == 256


def test_one_seed_gives_one_workload() -> None:
    assert make_workload(SHAPE, 7) == make_workload(SHAPE, 7)
    assert make_workload(SHAPE, 7) != make_workload(SHAPE, 8)


def test_workloads_of_two_seeds_share_no_text() -> None:
    a, b = make_workload(SHAPE, 7), make_workload(SHAPE, 8)
    assert {c.system for c in a}.isdisjoint(c.system for c in b)


def test_conversations_arrive_in_order_at_the_rate_asked_for(workload: list[Conversation]) -> None:
    arrivals_s = [conversation.arrival_s for conversation in workload]
    assert arrivals_s == sorted(arrivals_s)
    assert len(workload) / arrivals_s[-1] == pytest.approx(SHAPE.conversations_per_s, rel=0.25)


def test_system_prompts_are_as_long_as_asked_for_and_some_are_popular(workload: list[Conversation]) -> None:
    popularity = Counter(conversation.system for conversation in workload)
    lengths = list(map(n_tokens, popularity))
    assert len(popularity) == SHAPE.n_systems
    assert SHAPE.min_system_tokens <= min(lengths) <= max(lengths) <= SHAPE.max_system_tokens
    # Zipf 0.9 over 20: the first has 23 % of all, twice and a bit as many as the third.
    (_, first), _, (_, third), *_ = popularity.most_common()
    assert first / len(workload) == pytest.approx(0.23, abs=0.02)
    assert first / third == pytest.approx(3**0.9, rel=0.15)


def test_conversations_have_about_five_turns(workload: list[Conversation]) -> None:
    n_turns = [len(conversation.turns) for conversation in workload]
    assert mean(n_turns) == pytest.approx(SHAPE.mean_turns, rel=0.1)
    assert min(n_turns) == 1
    assert max(n_turns) == MAX_TURNS


def test_turns_and_answers_are_log_normal(workload: list[Conversation]) -> None:
    turns = [turn for conversation in workload for turn in conversation.turns]
    users = [n_tokens(turn.user) for turn in turns]
    answers = [turn.answer_tokens for turn in turns]
    assert median(users) == pytest.approx(SHAPE.user_tokens_median, rel=0.1)
    assert median(answers) == pytest.approx(SHAPE.answer_tokens_median, rel=0.1)
    # Skewed to the right.
    assert mean(users) > median(users)
    assert mean(answers) > median(answers)


def test_only_later_turns_are_thought_about(workload: list[Conversation]) -> None:
    for conversation in workload:
        first, *others = conversation.turns
        assert first.think_s == 0
        assert {turn.think_s for turn in others} <= {SHAPE.think_s}


def test_no_turn_repeats_another(workload: list[Conversation]) -> None:
    turns = [turn.user[:64] for conversation in workload for turn in conversation.turns]
    assert len(set(turns)) == len(turns)


def test_new_tokens_count_each_text_once() -> None:
    (one,) = make_workload(replace(SHAPE, n_conversations=1), 1)
    alone = n_tokens(one.system) + sum(n_tokens(turn.user) for turn in one.turns)
    assert n_new_tokens([one]) == alone
    assert n_new_tokens([one, one]) == alone + sum(n_tokens(turn.user) for turn in one.turns)
    assert n_requests([one, one]) == 2 * len(one.turns)
