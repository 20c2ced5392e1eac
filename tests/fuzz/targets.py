"""What is fuzzed. Each target has a corpus, words, and a check of one case; `rest` checks that nothing is left over."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Protocol, Self

from prefixroute.build import make_router
from prefixroute.config import Settings
from prefixroute.config.load import load_settings
from prefixroute.core.exact import ExactIndex
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.errors import ConfigError
from prefixroute.kv_events.codec import UndecodableError, decode
from prefixroute.kv_events.tracker import Tracker
from tests.fuzz import seeds
from tests.fuzz.case import Case, Finding


class Target(Protocol):
    """Use it as an async context manager."""

    @property
    def corpus(self) -> Sequence[bytes]: ...

    @property
    def words(self) -> Sequence[bytes]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def run(self, case: Case) -> None:
        """Raises Finding, or what must not come out."""
        ...

    async def rest(self) -> None:
        """Raises Finding when something is left over of the cases so far."""
        ...


class _Plain:
    """A target without a server."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    async def rest(self) -> None:
        pass


class PromptTarget(_Plain):
    """Bodies, as every API may bring them: read, hashed, and routed by each strategy that decides by itself."""

    corpus = seeds.BODIES
    words = seeds.BODY_WORDS

    def __init__(self) -> None:
        instances = [{"url": f"http://gpu-{i}:1"} for i in range(3)]
        self._routers = [
            make_router(Settings.model_validate({"fleet": {"instances": instances}, "routing": {"strategy": name}}))
            for name in ("expected_latency", "prefix_aware", "session", "kv_aware")
        ]
        self._now_s = 0.0

    async def run(self, case: Case) -> None:
        n, api = divmod(case.pick, len(Api))
        prompt = read_prompt(list(Api)[api], case.data, session_id="s" if n % 2 else None, encoded=n % 16 == 15)
        check_prompt(prompt)
        self._now_s += 0.01
        for router in self._routers:
            request = router.read(prompt)
            with router.lease(request, now_s=self._now_s) as lease:
                lease.first_byte(self._now_s, learn=True)
            load = router.load.of(lease.instance.slot)
            if (load.in_flight, load.in_flight_tokens, load.pending_work) != (0, 0, 0.0):
                raise Finding("a lease was not given back")
            if router.n_policy_faults:
                raise Finding(f"the strategy failed: {router.last_policy_fault!r}")


class KvEventsTarget(_Plain):
    """Messages, decoded and applied to an index of little memory."""

    corpus = seeds.KV_MESSAGES
    words = seeds.KV_WORDS
    max_bytes = 1 << 20

    def __init__(self) -> None:
        self._index = ExactIndex(1, self.max_bytes)
        self._source = self._index.open(0)
        self._tracker = Tracker(
            self._index, self._source, can_replay=False, wall_clock=lambda: 1.0, tell=lambda _level, _message: None
        )
        self._tracker.connected()
        self._n = 0

    async def run(self, case: Case) -> None:
        try:
            batch = decode(case.data)
        except UndecodableError:
            pass
        else:
            if batch.time_s is not None and not math.isfinite(batch.time_s):
                raise Finding("a time that is none")
        # Now and then a number that skips some, or was had before.
        self._n = max(0, self._n + (1, 1, 1, 2, -1)[case.pick % 5])
        self._tracker.live(self._n, case.data)
        if self._index.n_bytes > self.max_bytes:
            raise Finding("the index grew beyond its bound")
        if self._index.n_blocks(0) != len(self._source.keys):
            raise Finding("blocks are counted that are not held")

    async def rest(self) -> None:
        self._tracker.disconnected()
        self._tracker.connected()


class ConfigTarget(_Plain):
    """Files in both formats, and values of environment variables."""

    corpus = seeds.CONFIGS
    words = seeds.CONFIG_WORDS

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def run(self, case: Case) -> None:
        path: Path | None = self._folder / ("config.json" if case.pick % 2 else "config.yaml")
        environ: dict[str, str] = {}
        if case.pick % 4 >= 2:
            path, environ = None, _environ(case)
        else:
            assert path is not None
            path.write_bytes(case.data)
        try:
            settings = load_settings(path, environ=environ)
        except ConfigError as error:
            _check_words(str(error))
            return
        # What has been let through can be used; custom factories run code of others.
        if settings.routing.strategy != "custom" and "custom" not in settings.routing.shadow:
            make_router(settings, Random(0))


def _environ(case: Case) -> dict[str, str]:
    names = ("FLEET__INSTANCES", "ROUTING__STRATEGY", "LIMITS", "LISTEN__PORT", "LOG", "TOKENIZER__PATH", "NO__SUCH")
    # As a process finds them: bytes that are no UTF-8 are surrogates; there is no NUL.
    value = case.data.replace(b"\0", b"").decode("utf-8", "surrogateescape")
    return {f"PREFIXROUTE_{names[case.pick // 4 % len(names)]}": value}


def _check_words(message: str) -> None:
    if not message.strip():
        raise Finding("an error without words")
    for line in message.splitlines():
        if len(line) > 2_000 or "Traceback" in line:
            raise Finding(f"an error that nobody reads: {line[:100]}")
    # It is printed.
    message.encode("utf-8")


def check_prompt(prompt: Prompt) -> None:
    """Raises Finding when it contradicts itself."""
    if (prompt.no_key is None) is not (prompt.key != b""):
        raise Finding("a cause for no key, and a key")
    if prompt.n_tokens * 4 < len(prompt.key):
        raise Finding("fewer tokens than its key stands for")
    if prompt.max_tokens is not None and prompt.max_tokens < 0:
        raise Finding("a negative bound")
    for n in (-1, 0, 7, 10_000):
        if len(prompt.prefix_bytes(n).decode("utf-8", "replace")) > max(n, 0):
            raise Finding("a prefix longer than asked for")


PLAIN: Mapping[str, Callable[[], Target]] = {
    "prompt": PromptTarget,
    "kv_events": KvEventsTarget,
    "config": ConfigTarget,
}
