"""Clients that ask real engines one after the other, and what they were told was cached."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import aiohttp

from tests.engines.tiny_model import NAME

# Each a token of its own in the tiny model's vocabulary, with the space before it.
# fmt: off
WORDS = (
    "import", "def", "class", "return", "value", "list", "while", "open", "read", "write", "path", "index", "token",
    "name", "self", "file", "line", "type", "data", "result",
)
# fmt: on
# A guard against hanging.
_ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A question about one of several documents."""

    document: int
    question: str


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer said of its prompt, in tokens."""

    prompt_tokens: int
    cached_tokens: int


def words(rng: Random, n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


def share(told: Sequence[Told]) -> float:
    """Of all prompt tokens, those that were cached."""
    return sum(one.cached_tokens for one in told) / sum(one.prompt_tokens for one in told)


def client(*, reuses_connections: bool = True) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(force_close=not reuses_connections)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_ANSWER_S))


async def ask_all(
    asks: Sequence[Ask], documents: Sequence[str], url_of: Callable[[Ask], str], *, n_clients: int = 3
) -> tuple[list[Told], float]:
    """Each client takes the next question when it has its answer. What they were told, and how long it took."""
    told: list[Told] = []
    queue: Iterator[Ask] = iter(asks)
    begun_s = time.monotonic()
    async with client() as session:

        async def take() -> None:
            for ask in queue:
                one = await _ask(session, url_of(ask), documents[ask.document], ask.question)
                told.append(one)

        await asyncio.gather(*(take() for _ in range(n_clients)))
    return told, time.monotonic() - begun_s


async def _ask(session: aiohttp.ClientSession, url: str, document: str, question: str) -> Told:
    body = {
        "model": NAME,
        "messages": [{"role": "system", "content": document}, {"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    usage = answer["usage"]
    return Told(usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
