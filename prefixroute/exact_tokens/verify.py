"""Whether instances tokenise as we do: probes are asked of both, at the start and every hour.

Any difference turns exact tokens off until a later round agrees. An instance that cannot be asked, or knows no
`/tokenize`, says nothing either way.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import Enum

import orjson

from prefixroute.core.fleet import Instance
from prefixroute.core.prompt import Api
from prefixroute.exact_tokens.probes import COMPLETION, CONVERSATIONS
from prefixroute.exact_tokens.process import WorkerGoneError
from prefixroute.exact_tokens.service import ExactTokens, State

_log = logging.getLogger(__name__)

VERIFY_EVERY_S = 3600.0
# While no instance has been heard (they may still be loading), and while one disagrees (it may be an old release).
UNHEARD_RETRY_S = 5.0
MISMATCH_RETRY_S = 300.0

_PAUSES_S = {
    State.UNVERIFIED: UNHEARD_RETRY_S,
    State.MISMATCH: MISMATCH_RETRY_S,
    State.EXACT: VERIFY_EVERY_S,
}

PATH = "/tokenize"
# A 400 and 422 refuse this prompt; anything else that is no 200 says nothing of tokens.
_REFUSALS = (400, 422)

Post = Callable[[Instance, str, bytes], Awaitable[tuple[int, bytes] | None]]
"""Asks an instance: path and body to status and body; None when there is no answer. Raises nothing."""


class Verdict(Enum):
    """What one comparison says. The values are metric labels."""

    AGREES = "agrees"
    DIFFERS = "differs"
    SILENT = "silent"  # nothing to compare with


class Verifier:
    """Compares, and tells `tokens` to be used or not. `run` in the background.

    `instances`: those that may serve the tokenizer's models now. `model`: named in probes; None leaves it out.
    """

    def __init__(
        self, tokens: ExactTokens, instances: Callable[[], Sequence[Instance]], post: Post, *, model: str | None = None
    ) -> None:
        self.verdicts = dict.fromkeys(Verdict, 0)
        """Probes so far, by what they came to."""
        self._tokens = tokens
        self._instances = instances
        self._post = post
        self._named = {} if model is None else {"model": model}
        self._told = ""
        self._loaded = asyncio.Event()
        tokens.on_loaded = self._loaded.set

    async def run(self) -> None:
        """Verifies until cancelled."""
        while True:
            await self.verify()
            # Without a worker: until there is one.
            pause_s = _PAUSES_S.get(self._tokens.state)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._loaded.wait()
            self._loaded.clear()

    async def verify(self) -> Verdict:
        """One round over the instances; what it came to is told to `tokens`."""
        try:
            ours = await self._ours()
        except WorkerGoneError:
            return Verdict.SILENT
        verdict, told = Verdict.SILENT, ""
        # An engine that tokenises text only does not vouch for the template.
        vouching = [name for name in CONVERSATIONS if ours[name] is not None] or [*ours]
        for instance in self._instances():
            for name, (_, body) in _probes(self._named).items():
                one = compare(ours[name], await self._post(instance, PATH, body))
                self.verdicts[one] += 1
                if one is Verdict.DIFFERS:
                    verdict, told = one, told or f"{instance.name} tokenises the probe '{name}' otherwise"
                elif one is Verdict.AGREES and verdict is Verdict.SILENT and name in vouching:
                    verdict = one
        self._tell(verdict, told)
        return verdict

    async def _ours(self) -> dict[str, bytes | None]:
        return {name: await self._tokens.ask(api, body) for name, (api, body) in _probes(self._named).items()}

    def _tell(self, verdict: Verdict, told: str) -> None:
        before = self._tokens.state
        if verdict is Verdict.SILENT:
            return
        self._tokens.judge(verdict is Verdict.AGREES)
        if verdict is Verdict.DIFFERS:
            # Once, not in every round.
            level = logging.DEBUG if told == self._told else logging.ERROR
            _log.log(level, "exact tokens are off, prompts are routed by bytes: %s (see docs/tokens.md)", told)
        elif before is not State.EXACT:
            _log.info("exact tokens are in use: instances tokenise alike")
        self._told = told


def compare(ours: bytes | None, theirs: tuple[int, bytes] | None) -> Verdict:
    """Our ids for a probe with an instance's answer.

    What the instance refuses, as templates without tools do, proves nothing.
    """
    if theirs is None:
        return Verdict.SILENT
    status, body = theirs
    if status in _REFUSALS:
        # An instance may refuse for reasons of its own, such as a model without a chat template.
        return Verdict.SILENT
    tokens = _tokens(body) if status == 200 else None
    if not tokens:  # llama.cpp has a /tokenize that knows neither field, and finds nothing to do
        return Verdict.SILENT
    if ours is None:
        return Verdict.DIFFERS
    return Verdict.AGREES if ours == tokens else Verdict.DIFFERS


def _tokens(body: bytes) -> bytes | None:
    """The ids in an answer, packed as ours; None when it is no such answer."""
    try:
        document = orjson.loads(body)
        tokens = document["tokens"]
        return b"".join(token.to_bytes(4, "little") for token in tokens)
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError, OverflowError):
        return None


def _probes(named: dict[str, str]) -> dict[str, tuple[Api, bytes]]:
    probes = {name: (Api.CHAT, orjson.dumps(named | body)) for name, body in CONVERSATIONS.items()}
    return probes | {"completion": (Api.COMPLETIONS, orjson.dumps(named | COMPLETION))}
