"""The demo's workload: people who chat with a few assistants.

An assistant is a system prompt; some are asked far more often than others (Zipf). A conversation arrives at its
time, whatever the servers do (Poisson); its next turn comes when the answer before has been read. All that is
random is drawn here, from one seed: two strategies are given exactly the same.

Each seed is another order of the same crowd: how long system prompts and conversations are, and how often each
assistant is asked, is spread evenly over its distribution and shuffled. Two hundred free draws would differ so
much that a seed, rather than a strategy, could decide whether the fleet's cache suffices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from random import Random
from statistics import NormalDist

from prefixroute.demo.words import WORD_BYTES, text

# What is longer is cut, so that no single conversation decides how long the demo takes.
MAX_TURNS = 12
MAX_TURN_TOKENS = 2_000


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """Times in seconds of the simulated servers. Sigmas, medians and the mean of turns: of log-normal distributions."""

    n_conversations: int = 200
    n_systems: int = 20
    min_system_tokens: int = 1_500
    max_system_tokens: int = 5_000
    zipf_exponent: float = 0.9
    conversations_per_s: float = 3.0
    mean_turns: float = 5.0
    turns_sigma: float = 0.7
    user_tokens_median: float = 180.0
    answer_tokens_median: float = 200.0
    tokens_sigma: float = 0.4
    think_s: float = 6.0


@dataclass(frozen=True, slots=True)
class Turn:
    """`think_s`: from the end of the answer before to this turn. The answer has exactly `answer_tokens`."""

    user: str
    answer_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    arrival_s: float
    system: str
    turns: tuple[Turn, ...]


def make_workload(shape: WorkloadShape, seed: int) -> list[Conversation]:
    """Conversations in order of arrival."""
    rng = Random(seed)
    n = shape.n_conversations
    systems = [text(f"{seed} system {rank}", n_tokens) for rank, n_tokens in enumerate(_system_tokens(shape, rng))]
    ranks = _ranks(shape, rng)
    n_turns = _n_turns(shape, rng)
    arrival_s = 0.0
    conversations: list[Conversation] = []
    for number in range(n):
        arrival_s += rng.expovariate(shape.conversations_per_s)
        turns = tuple(
            Turn(
                user=text(f"{seed} user {number} {place}", _log_normal(rng, shape.user_tokens_median, shape)),
                answer_tokens=_log_normal(rng, shape.answer_tokens_median, shape),
                think_s=shape.think_s if place else 0.0,
            )
            for place in range(n_turns[number])
        )
        conversations.append(Conversation(arrival_s, systems[ranks[number]], turns))
    return conversations


def n_requests(conversations: Sequence[Conversation]) -> int:
    """One request for each turn."""
    return sum(len(conversation.turns) for conversation in conversations)


def n_new_tokens(conversations: Sequence[Conversation]) -> int:
    """Tokens of system prompts and turns that come up for the first time: no cache can spare them."""
    texts = {conversation.system for conversation in conversations}
    n_bytes = sum(map(len, texts))
    n_bytes += sum(len(turn.user) for conversation in conversations for turn in conversation.turns)
    return n_bytes // WORD_BYTES


def _system_tokens(shape: WorkloadShape, rng: Random) -> list[int]:
    """By rank of the assistant."""
    span = shape.max_system_tokens - shape.min_system_tokens
    lengths = [round(shape.min_system_tokens + span * share) for share in _even_shares(shape.n_systems)]
    rng.shuffle(lengths)
    return lengths


def _ranks(shape: WorkloadShape, rng: Random) -> list[int]:
    """Which assistant each conversation is with; rank 0 is asked most."""
    reached = list(accumulate((rank + 1) ** -shape.zipf_exponent for rank in range(shape.n_systems)))
    ranks = [
        next(rank for rank, weight in enumerate(reached) if weight >= share * reached[-1])
        for share in _even_shares(shape.n_conversations)
    ]
    rng.shuffle(ranks)
    return ranks


def _n_turns(shape: WorkloadShape, rng: Random) -> list[int]:
    log_turns = NormalDist(log(shape.mean_turns) - shape.turns_sigma**2 / 2, shape.turns_sigma)
    turns = [
        min(MAX_TURNS, max(1, round(exp(log_turns.inv_cdf(share))))) for share in _even_shares(shape.n_conversations)
    ]
    rng.shuffle(turns)
    return turns


def _even_shares(n: int) -> list[float]:
    """`n` numbers spread evenly between 0 and 1."""
    return [(place + 0.5) / n for place in range(n)]


def _log_normal(rng: Random, median: float, shape: WorkloadShape) -> int:
    return min(MAX_TURN_TOKENS, max(1, round(rng.lognormvariate(log(median), shape.tokens_sigma))))
