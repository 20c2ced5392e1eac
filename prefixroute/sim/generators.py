"""Workloads drawn from a seed: chat, rag, toolagent, noshare and heldout.

Sessions arrive whatever the fleet does (Poisson); what follows in a session waits for the answer before. A seed draws
sessions; the applications, documents and tools that they share are always the same. Distributions are log-normal around
the median given unless said otherwise. Lengths are in tokens.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate, count
from math import log
from random import Random

from prefixroute.errors import ConfigError
from prefixroute.sim.sessions import BLOCK_TOKENS, Call, Draw, Text, window
from prefixroute.sim.workload import Workload

# Longer than any text drawn here is meant to be: the tail of a distribution must not decide a run.
_MAX_PART_TOKENS = 32_000


def make(name: str, n_requests: int, rate: float, seed: int) -> Workload:
    """`n_requests` of the generator `name` at `rate` requests per second. Raises ConfigError for an unknown name."""
    if name not in GENERATORS:
        raise ConfigError(f"{name} is no generated workload (known: {', '.join(GENERATORS)})")
    if n_requests < 1 or rate <= 0:
        raise ConfigError("a workload has at least one request, at a rate above 0")
    # Not by seed: how long the most popular documents are decides how much a request costs.
    draw = GENERATORS[name](Random(f"pool {name}"))
    return Workload(name, BLOCK_TOKENS, window(draw, n_requests, rate, f"{name} {seed}"))


# ---------------------------------------------------------------------- the generators


def _chat(pool: Random) -> Draw:
    """People who talk with one of 20 applications, each with its system prompt. About five turns."""
    empty = Text(count())
    systems = [empty.then(pool.randint(600, 2_400)) for _ in range(20)]
    popularity = _zipf(len(systems), 1.1)

    def draw(rng: Random) -> list[Call]:
        text = rng.choices(systems, cum_weights=popularity)[0]
        calls: list[Call] = []
        for place in range(min(20, _around(rng, 4, 0.7))):
            pause_s = _around_s(rng, 12, 0.5) if place else 0.0
            text = _ask(calls, text.then(_around(rng, 250, 1.1)), _around(rng, 400, 0.8), pause_s)
        return calls

    return draw


def _rag(pool: Random) -> Draw:
    """Questions about one of 1,500 documents, half of them with a second one."""
    system = Text(count()).then(300)
    documents = [system.then(_around(pool, 5_400, 0.6)) for _ in range(1_500)]
    popularity = _zipf(len(documents), 0.9)

    def draw(rng: Random) -> list[Call]:
        text = rng.choices(documents, cum_weights=popularity)[0]
        calls: list[Call] = []
        for place in range(rng.randint(1, 2)):
            pause_s = _around_s(rng, 12, 0.5) if place else 0.0
            text = _ask(calls, text.then(_around(rng, 60, 0.6)), _around(rng, 200, 0.7), pause_s)
        return calls

    return draw


def _toolagent(pool: Random) -> Draw:
    """Agents of 120 kinds, each with its tools in the prompt: one to three calls, with a tool's result between."""
    empty = Text(count())
    tools = [empty.then(_around(pool, 3_500, 0.6)) for _ in range(120)]
    popularity = _zipf(len(tools), 1.0)

    def draw(rng: Random) -> list[Call]:
        text = rng.choices(tools, cum_weights=popularity)[0]
        text = text.then(_around(rng, 1_500, 1.0))
        calls: list[Call] = []
        for place in range(rng.randint(1, 3)):
            pause_s = _around_s(rng, 2, 0.8) if place else 0.0
            text = _ask(calls, text.then(_around(rng, 300, 1.0)), _around(rng, 120, 0.8), pause_s)
        return calls

    return draw


def _noshare(_: Random) -> Draw:
    """Prompts that have nothing in common."""
    empty = Text(count())

    def draw(rng: Random) -> list[Call]:
        calls: list[Call] = []
        _ask(calls, empty.then(_around(rng, 2_500, 1.0)), _around(rng, 250, 0.8), 0.0)
        return calls

    return draw


def _heldout(pool: Random) -> Draw:
    """What the strategies' constants were not chosen on: three kinds of traffic at once. For final reports, with seeds
    from 1,000 on.

    A third of the sessions are agents in long tool loops; a third put several questions about one of 400 documents
    at the same moment, and one more over all the answers; the rest comes once and shares nothing.
    """
    empty = Text(count())
    tools = [empty.then(_around(pool, 6_000, 0.5)) for _ in range(30)]
    documents = [empty.then(800).then(_around(pool, 9_000, 0.7)) for _ in range(400)]
    tool_popularity, document_popularity = _zipf(len(tools), 0.8), _zipf(len(documents), 0.7)

    def draw(rng: Random) -> list[Call]:
        calls: list[Call] = []
        match rng.randrange(3):
            case 0:
                text = rng.choices(tools, cum_weights=tool_popularity)[0].then(_around(rng, 800, 0.8))
                for place in range(min(40, _around(rng, 10, 0.6))):
                    pause_s = _around_s(rng, 1.5, 1.0) if place else 0.0
                    text = _ask(calls, text.then(_around(rng, 350, 1.2)), _around(rng, 90, 0.8), pause_s)
            case 1:
                document = rng.choices(documents, cum_weights=document_popularity)[0]
                for _ in range(rng.randint(3, 8)):
                    question = document.then(_around(rng, 80, 0.6))
                    _ask(calls, question, _around(rng, 150, 0.6), rng.uniform(0, 0.2), follows=False)
                # Whose answer comes last is not known here: it waits for the last one asked.
                _ask(calls, document.then(_around(rng, 1_000, 0.4)), _around(rng, 400, 0.6), 1.0)
            case _:
                _ask(calls, empty.then(_around(rng, 3_000, 1.0)), _around(rng, 300, 0.8), 0.0)
        return calls

    return draw


GENERATORS: Mapping[str, Callable[[Random], Draw]] = {
    "chat": _chat,
    "rag": _rag,
    "toolagent": _toolagent,
    "noshare": _noshare,
    "heldout": _heldout,
}


def _ask(calls: list[Call], prompt: Text, n_output: int, pause_s: float, *, follows: bool = True) -> Text:
    """Append a call, which waits for the one before unless it is the first or `follows` is false. What it leads to."""
    answered = prompt.then(n_output)
    calls.append(Call(prompt, answered, pause_s, len(calls) - 1 if calls and follows else None))
    return answered


def _around(rng: Random, median: float, sigma: float) -> int:
    return min(_MAX_PART_TOKENS, max(1, round(rng.lognormvariate(log(median), sigma))))


def _around_s(rng: Random, median_s: float, sigma: float) -> float:
    return rng.lognormvariate(log(median_s), sigma)


def _zipf(n: int, exponent: float) -> list[float]:
    """Cumulative weights of ranks: the first is asked for most."""
    return list(accumulate((rank + 1) ** -exponent for rank in range(n)))
