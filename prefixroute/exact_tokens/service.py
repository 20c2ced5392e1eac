"""Exact tokens for requests, within a budget of time: the workers, and whether their word is taken.

`of` waits for nobody longer than the budget, and for no place in a line that is full: routing then goes on by bytes.
Work that was begun is finished nevertheless, so that the next turn of the conversation finds its pieces cached.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from enum import Enum

from prefixroute.core.prompt import MAX_PARSED_BYTES, Api, Prompt
from prefixroute.exact_tokens.frames import Kind
from prefixroute.exact_tokens.options import Options
from prefixroute.exact_tokens.process import Reply, UnusableFilesError, WorkerGoneError, WorkerProcess

_log = logging.getLogger(__name__)

# Requests that may wait for each worker: as many as it would do within the budget, between these bounds.
_MIN_WAITING = 8
_MAX_WAITING = 256
# Weight of the newest job in the mean of what one takes.
_JOB_WEIGHT = 0.1
# Pauses before a process that ended is started again, doubling; files that could not be used are looked at as rarely.
RESTART_S = 1.0
_RESTART_MAX_S = 300.0

_KINDS = {Api.CHAT: Kind.CHAT, Api.COMPLETIONS: Kind.COMPLETIONS, Api.INVOCATIONS: Kind.INVOCATIONS}


class State(Enum):
    """Whether exact tokens are used, and why not. The values are metric labels."""

    OFF = "off"  # not configured
    LOADING = "loading"
    UNVERIFIED = "unverified"  # no instance has been asked yet
    EXACT = "exact"  # in use
    MISMATCH = "mismatch"  # an instance tokenises otherwise
    FAILED = "failed"  # files that cannot be used, or a process that keeps ending


class TokenOutcome(Enum):
    """What came of one prompt. The values are metric labels."""

    EXACT = "exact"
    NOT_IN_USE = "not_in_use"  # see the state
    UNSUPPORTED = "unsupported"  # another model or API, media, too long, odd fields
    TEMPLATE_ERROR = "template_error"
    TIMEOUT = "timeout"
    SATURATED = "saturated"  # too many waited
    FAULT = "fault"  # the process ended over it


class ExactTokens:
    """Keeps `n_processes` workers and asks them. `run` in the background; `of` from requests.

    `models`: names that the tokenizer is for; None: every one. `verify`: an instance must agree before tokens are
    used (`judge` says so). `on_loaded`: called when a worker has become ready.
    """

    def __init__(
        self,
        options: Options,
        *,
        models: Collection[str] | None = None,
        budget_s: float = 0.05,
        n_processes: int = 1,
        verify: bool = True,
        job_limit_s: float | None = None,
        restart_s: float = RESTART_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outcomes = dict.fromkeys(TokenOutcome, 0)
        self.n_checks = 0
        """Live prompts on which the fast library was compared with the reference."""
        self.n_check_faults = 0
        self.on_loaded: Callable[[], None] = lambda: None
        self._options = options
        self._models = None if models is None else frozenset(models)
        self._budget_s = budget_s
        self._n_processes = n_processes
        self._job_limit_s = job_limit_s
        self._restart_s = restart_s
        self._clock = clock
        # What a job takes, running mean: at first so that the least may wait.
        self._job_s = budget_s / _MIN_WAITING
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._agreed: bool | None = None if verify else True
        self._failed = False
        self._n_template_errors_told = 0

    @property
    def state(self) -> State:
        if all(worker.gone.done() for worker in self._workers):
            return State.FAILED if self._failed or self._workers else State.LOADING
        if self._agreed is None:
            return State.UNVERIFIED
        return State.EXACT if self._agreed else State.MISMATCH

    def judge(self, agreed: bool) -> None:
        """What a comparison with an instance came to: tokens are used from now on, or no longer."""
        self._agreed = agreed

    async def of(self, api: Api, prompt: Prompt) -> bytes | None:
        """The prompt's token ids, four bytes each, little-endian; None: route by bytes. Raises nothing."""
        outcome, ids = await self._of(api, prompt)
        self.outcomes[outcome] += 1
        return ids

    async def ask(self, api: Api, body: bytes) -> bytes | None:
        """Ids for a probe: whatever the state, and without a budget. None when they cannot be told.

        Raises WorkerGoneError when no process runs, or it ends over the probe.
        """
        reply = await (await self._worker()).ask(_KINDS[api], body)
        if reply.kind is Kind.TEMPLATE_ERROR:
            _log.warning("exact tokens: the chat template raised %s on a probe", reply.payload.decode(errors="replace"))
        return reply.payload if reply.kind is Kind.TOKENS else None

    async def _of(self, api: Api, prompt: Prompt) -> tuple[TokenOutcome, bytes | None]:
        kind = _KINDS.get(api)
        if kind is None or not prompt.body or len(prompt.body) > MAX_PARSED_BYTES or prompt.no_key is not None:
            return TokenOutcome.UNSUPPORTED, None
        if self._models is not None and prompt.model not in self._models:
            return TokenOutcome.UNSUPPORTED, None
        if self.state is not State.EXACT:
            return TokenOutcome.NOT_IN_USE, None
        if len(self._waiting) >= self._max_waiting() * len(self._workers):
            return TokenOutcome.SATURATED, None
        try:
            async with asyncio.timeout(self._budget_s):
                reply = await self._timed(await self._worker(), kind, prompt.body)
        except TimeoutError:
            return TokenOutcome.TIMEOUT, None
        except WorkerGoneError:
            return TokenOutcome.FAULT, None
        return self._outcome(reply)

    async def _timed(self, worker: WorkerProcess, kind: Kind, body: bytes) -> Reply:
        began_s = self._clock()
        try:
            return await worker.ask(kind, body)
        finally:
            # Also of those that take longer than anybody waits.
            self._job_s += _JOB_WEIGHT * (self._clock() - began_s - self._job_s)

    def _max_waiting(self) -> float:
        """For each worker. Who would wait behind more has no chance within the budget."""
        return max(_MIN_WAITING, min(_MAX_WAITING, self._budget_s / max(self._job_s, 1e-6)))

    def _outcome(self, reply: Reply) -> tuple[TokenOutcome, bytes | None]:
        if reply.kind is Kind.TOKENS:
            return TokenOutcome.EXACT, reply.payload
        if reply.kind is Kind.NOT_EXACT:
            return TokenOutcome.UNSUPPORTED, None
        n = self.outcomes[TokenOutcome.TEMPLATE_ERROR] + 1
        if n > self._n_template_errors_told:
            # The first, then ever more rarely: every request may be one.
            self._n_template_errors_told = 2 * n
            _log.warning(
                "exact tokens: the chat template raised %s; the prompt is routed by bytes (%d times so far)",
                reply.payload.decode(errors="replace"),
                n,
            )
        return TokenOutcome.TEMPLATE_ERROR, None

    async def _worker(self) -> WorkerProcess:
        """An idle worker, the first there is: its cache knows the most. Waits for one; raises WorkerGoneError."""
        waited = False
        while (worker := next((worker for worker in self._workers if worker.idle), None)) is None:
            if all(worker.gone.done() for worker in self._workers):
                raise WorkerGoneError("no process runs")
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            # In front again, if a newcomer was quicker than the one whose turn it was.
            (self._waiting.appendleft if waited else self._waiting.append)(place)
            waited = True
            try:
                await place
            except asyncio.CancelledError:
                if place in self._waiting:
                    self._waiting.remove(place)
                else:
                    self._wake()  # it was this one's turn
                raise
        return worker

    def _wake(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return

    def _wake_all(self) -> None:
        for _ in range(len(self._waiting)):
            self._wake()

    # ------------------------------------------------------------------ the processes

    async def run(self) -> None:
        """Keeps the workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for i in range(self._n_processes):
                tasks.create_task(self._keep(), name=f"exact tokens {i}")

    async def _keep(self) -> None:
        pause_s = self._restart_s
        while True:
            worker = WorkerProcess(self._wake, self._heard)
            began_s = self._clock()
            cause = None
            try:
                facts = await worker.start(self._options, job_limit_s=self._job_limit_s)
                self._ready(worker, facts)
                await asyncio.shield(worker.gone)
            except UnusableFilesError as error:
                cause = str(error)
            except WorkerGoneError as error:
                _log.debug("exact tokens: %s", error)
            finally:
                if worker in self._workers:
                    self._workers.remove(worker)
                self._wake_all()
                ended = await worker.close()
            self._failed = True
            if self._clock() - began_s > _RESTART_MAX_S:
                pause_s = self._restart_s  # it worked for long
            _log.error(
                "exact tokens are off, prompts are routed by bytes: %s; next try in %g s", cause or ended, pause_s
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RESTART_MAX_S)

    def _ready(self, worker: WorkerProcess, facts: dict[str, str]) -> None:
        self._workers.append(worker)
        _log.info("exact tokens: the tokenizer is read, by %s (%s)", facts["library"], facts["remark"])
        self._wake_all()
        self.on_loaded()

    def _heard(self, kind: Kind, text: str) -> None:
        """A worker checked a live prompt, or found a fault in doing so."""
        if kind is Kind.CHECKED:
            self.n_checks += 1
            return
        self.n_check_faults += 1
        _log.error("exact tokens: %s", text)
