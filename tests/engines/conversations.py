"""Chats of several turns over a few system prompts, as clients of real engines have them at the same time.

8 system prompts of 1,500 tokens, some far more popular than others (Zipf 1); 32 conversations of 4 turns, which 8
clients go on with in turn: whose last answer is longest ago is next. All of it together is more than one engine holds,
and less than three: who is asked where it was asked before finds all but its last question.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

import aiohttp

from tests.engines.load import Told, client, share, words
from tests.engines.tiny_model import NAME

N_SYSTEM_PROMPTS = 8
SYSTEM_TOKENS = 1_500
N_CONVERSATIONS = 32
N_TURNS = 4
QUESTION_TOKENS = 170
ANSWER_TOKENS = 32
N_CLIENTS = 8
_SEED = 8
_DATA = b"data: "


@dataclass(slots=True)
class Conversation:
    """What was said so far, and what is still to be asked."""

    messages: list[dict[str, str]]
    questions: deque[str]


@dataclass(slots=True)
class Outcome:
    """What became of all turns."""

    told: list[Told] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def cached(self) -> float:
        return share(self.told)

    @property
    def median_ttft_s(self) -> float:
        return median(self.ttft_s)


def make_conversations() -> list[Conversation]:
    """The same each time."""
    rng = Random(_SEED)
    prompts: list[str] = []
    for n_uses in zipf(N_CONVERSATIONS, N_SYSTEM_PROMPTS):
        prompts += [words(rng, SYSTEM_TOKENS)] * n_uses
    rng.shuffle(prompts)
    return [
        Conversation(
            [{"role": "system", "content": prompt}], deque(words(rng, QUESTION_TOKENS) for _ in range(N_TURNS))
        )
        for prompt in prompts
    ]


def zipf(n: int, n_kinds: int) -> list[int]:
    """`n` things of so many kinds: of the second one half as many as of the first, of the third a third, …"""
    shares = [1 / rank for rank in range(1, n_kinds + 1)]
    ends = [round(n * sum(shares[: i + 1]) / sum(shares)) for i in range(n_kinds)]
    return [end - begin for begin, end in pairwise([0, *ends])]


async def play(url: str, conversations: Sequence[Conversation]) -> Outcome:
    """Has all of them to their ends, through `url`."""
    outcome = Outcome()
    queue = deque(conversations)
    begun_s = time.monotonic()
    async with client() as session:

        async def take() -> None:
            while queue:
                conversation = queue.popleft()
                await _turn(session, url, conversation, outcome)
                if conversation.questions:
                    queue.append(conversation)

        async with asyncio.TaskGroup() as clients:
            for _ in range(N_CLIENTS):
                clients.create_task(take())
    outcome.wall_s = time.monotonic() - begun_s
    return outcome


async def _turn(session: aiohttp.ClientSession, url: str, conversation: Conversation, outcome: Outcome) -> None:
    """Asks the next question, and remembers the answer, which comes as a stream."""
    conversation.messages.append({"role": "user", "content": conversation.questions.popleft()})
    body = {
        "model": NAME,
        "messages": conversation.messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun_s = time.monotonic()
    first_s: float | None = None
    answer: list[str] = []
    usage: dict[str, Any] | None = None
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(_DATA + b"{"):
                continue
            chunk = json.loads(line.removeprefix(_DATA))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    first_s = first_s or time.monotonic()
                    answer.append(text)
    assert usage is not None, "the stream ended early"
    assert first_s is not None
    conversation.messages.append({"role": "assistant", "content": "".join(answer)})
    outcome.ttft_s.append(first_s - begun_s)
    details = usage["prompt_tokens_details"] or {}
    outcome.told.append(Told(usage["prompt_tokens"], details.get("cached_tokens") or 0))
