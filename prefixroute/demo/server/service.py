"""Everything of the simulated server but HTTP: its models, its engine, the jobs in flight."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from prefixroute.demo.engine import Engine
from prefixroute.demo.server import metrics, tokens
from prefixroute.demo.server.api_errors import BadRequestError, BusyError, NotFoundError, invalid
from prefixroute.demo.server.config import ServerConfig
from prefixroute.demo.server.driver import EngineDriver
from prefixroute.demo.server.jobs import Job, ServedRequest, TokenStream
from prefixroute.demo.server.prompts import JsonObject
from prefixroute.demo.server.responses_api import ResponseStore


class Service:
    """To be made, and used, on a running event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine: Engine[ServedRequest] = Engine(config.engine)
        self.responses = ResponseStore(config.max_stored_responses)
        self.stats = metrics.RequestStats()
        self.start_time_s = time.time()
        self._driver = EngineDriver(self.engine, self._deliver, asyncio.get_running_loop())
        self._changed = asyncio.Event()

    @property
    def sleeping(self) -> bool:
        return self._driver.paused

    def resolve_model(self, body: JsonObject) -> str:
        """The model that `body` names, or the default one. Raises NotFoundError."""
        model = body.get("model") or self.config.model
        if model not in self.config.models:
            known = self.config.model
            raise NotFoundError(f"The model `{model}` does not exist. Valid aliases: {known}.", "model")
        return str(model)

    def make_job(
        self,
        body: JsonObject,
        prompts: Sequence[bytes],
        *,
        id_prefix: str,
        request_id: str | None = None,
        max_tokens: int | None = None,
        ignore_eos: bool = False,
    ) -> Job:
        """Sequences for `prompts`, with `body`'s sampling parameters. `max_tokens`: overrides the body's.

        Raises what vLLM answers: NotFoundError for the model, BadRequestError for what does not fit."""
        model = self.resolve_model(body)
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            wanted = "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"
            raise BadRequestError(wanted, "cache_salt")
        _check_sampling(body)
        n_choices, min_tokens = _integer(body, "n"), _integer(body, "min_tokens") or 0
        n_choices = 1 if n_choices is None else n_choices
        if n_choices < 1:
            raise BadRequestError(f"n must be at least 1, got {n_choices}.")
        if min_tokens < 0:
            raise BadRequestError(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
        seed = tokens.chain_seed(model, salt)
        requests = [
            ServedRequest(
                prompt,
                max_tokens=self._max_tokens(tokens.count(prompt), body, max_tokens),
                min_tokens=min_tokens,
                ignore_eos=ignore_eos or body.get("ignore_eos") is True,
                block_size=self.config.engine.block_size,
                seed=seed,
                variant=choice,
            )
            for prompt in prompts
            for choice in range(n_choices)
        ]
        return Job(f"{id_prefix}{request_id or uuid4().hex}", model, requests, n_choices)

    def check_admission(self) -> None:
        """Raises BusyError when the queue is full."""
        if self.engine.is_full:
            self.stats.n_rejected += 1
            raise BusyError("The server is busy: too many requests are in flight. Please retry later.")

    def submit(self, job: Job, stream: TokenStream | None = None) -> None:
        """Start `job`; its tokens go to `stream`. Whoever submits also calls `abort` when it is not wanted."""
        job.stream = stream
        now_s = self._driver.now_s()
        for request in job.requests:
            self.engine.add(request, now_s)
        if stream is not None:
            stream.on_start()
        self._driver.wake()
        self._notify()

    async def run(self, job: Job, stream: TokenStream | None = None) -> None:
        """`submit`, then wait for the end. Cancelled, it aborts."""
        self.submit(job, stream)
        try:
            await job.done
        finally:
            self.abort(job)

    def abort(self, job: Job, *, tell_client: bool = False) -> None:
        """End what is still going on for `job`, and free its blocks at once."""
        for request in job.requests:
            if self.engine.abort(request, self._driver.now_s()):
                if tell_client and job.stream is not None:
                    job.stream.on_token(request)
                self._end(request)
        self._notify()

    def abort_all(self) -> None:
        """As vLLM does on SIGTERM, and before it sleeps: streams end with the finish reason `abort`."""
        for job in {request.job: None for request in self.engine.requests}:
            self.abort(job, tell_client=True)

    def sleep(self, *, forget: bool = True) -> None:
        """End what is under way, as vLLM does by default, and compute no more: what comes later waits.

        `forget`: the cache, too, as from level 1 on.
        """
        self._driver.pause()
        self.abort_all()
        if forget:
            self.engine.reset_prefix_cache()

    def wake_up(self) -> None:
        self._driver.resume()

    def close(self) -> None:
        self._driver.close()

    async def wait_until(self, condition: Callable[[Engine[ServedRequest]], Any]) -> None:
        """Return once `condition(engine)` holds; looked at when a request comes, gets tokens, ends, or is aborted."""
        while not condition(self.engine):
            await self._changed.wait()

    def metrics_page(self) -> bytes:
        return metrics.render(
            self.engine,
            self.stats,
            model=self.config.model,
            start_time_s=self.start_time_s,
            sleeping=self.sleeping,
        )

    def _max_tokens(self, n_prompt: int, body: JsonObject, override: int | None) -> int:
        """No more than there is room for: only a prompt that leaves none is refused."""
        limit = self.config.engine.context_tokens
        wanted = override
        for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
            if wanted is None:
                wanted = _integer(body, name)
        if wanted is None:
            wanted = min(self.config.default_max_tokens, limit)
        if wanted > limit:
            raise BadRequestError(
                f"max_tokens={wanted} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
                f" (parameter=max_tokens, value={wanted})",
                "max_tokens",
            )
        if n_prompt > limit:
            raise BadRequestError(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains {n_prompt}"
                " input tokens, which exceeds this limit even without any output tokens. Please reduce the length of"
                f" the input prompt. (parameter=input_tokens, value={n_prompt})",
                "input_tokens",
            )
        n_output = min(wanted, limit - n_prompt)
        if n_output < 1:
            raise BadRequestError(
                f"max_tokens must be at least 1, got {n_output}. (parameter=max_tokens, value={n_output})", "max_tokens"
            )
        return n_output

    def _deliver(self, grown: Sequence[ServedRequest]) -> None:
        for request in grown:
            stream = request.job.stream
            if stream is not None:
                stream.on_token(request)
            if request.finish_reason is not None:
                self._end(request)
        self._notify()

    def _end(self, request: ServedRequest) -> None:
        self.stats.observe(request)
        # Stored responses keep their requests, and need these no more.
        request.block_hashes = ()
        request.job.end_one()

    def _notify(self) -> None:
        # Wakes those who wait now; each looks again for itself.
        self._changed.set()
        self._changed.clear()


def _check_sampling(body: JsonObject) -> None:
    """What changes nothing here, and is refused by vLLM all the same where it makes no sense."""
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        told = float(temperature)
        words = f"temperature must be non-negative, got {told}. (parameter=temperature, value={told})"
        raise BadRequestError(words, "temperature")
    if body.get("stream_options") and not body.get("stream"):
        words = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise BadRequestError(words, "stream_options")


def _integer(body: JsonObject, name: str) -> int | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise invalid("int_type", f"body.{name}", "Input should be a valid integer", value)
    return value
