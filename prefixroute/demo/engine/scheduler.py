"""One vLLM-like engine: continuous batching over a paged KV cache, on a clock that the caller owns.

The engine knows counts and block hashes, never text. A caller alternates `start_step(now_s)`, which schedules
a batch and says how long it takes, and `finish_step(now_s)`, which hands out the tokens of that batch:

    duration_s = engine.start_step(now_s)       # None: nothing to do until the next `add`
    for request in engine.finish_step(now_s + duration_s): ...

Who only wants to know when requests begin and end lets it leap: `start_step(now_s, max_steps=…)` takes as many steps
at once as nothing but decoding can happen in, and `cut(now_s)` ends such a leap at the step under way when a request
arrives. The outcome is that of single steps; a property test holds them equal.

Scheduling is vLLM's first-come-first-served: running requests first, then waiting ones, within a budget of
tokens a step; long prompts are computed in chunks beside the decodes of others. A running request that finds
no free block evicts the latest one, which starts over (its blocks stay cached as long as they last). Blocks
are cached when they are scheduled, so a second request in the same batch already shares them.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Generic, TypeVar

from prefixroute.demo.engine.config import EngineConfig
from prefixroute.demo.engine.kvcache import BlockPool
from prefixroute.demo.engine.request import EngineRequest, FinishReason


@dataclass(slots=True)
class EngineCounters:
    """Since the start, as vLLM counts: hits and queries in tokens, once a request."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


RequestT = TypeVar("RequestT", bound=EngineRequest)


class Engine(Generic[RequestT]):
    """Holds requests from `add` until they have finished or were aborted."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.n_blocks)
        self.counters = EngineCounters()
        self._waiting: deque[RequestT] = deque()
        self._running: list[RequestT] = []
        # The batch being computed; None between steps.
        self._batch: list[RequestT] | None = None
        # Of a leap: how many steps, since when, and the time of the first and what each adds to the one before.
        self._n_steps = 1
        self._began_s = 0.0
        self._first_step_s = 0.0
        self._added_step_s = 0.0

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_requests(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def requests(self) -> list[RequestT]:
        """All of them, the earliest first."""
        return [*self._running, *self._waiting]

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the blocks that running requests use. What is merely cached counts as free."""
        return 1 - self.pool.n_free / self.pool.n_blocks

    @property
    def is_full(self) -> bool:
        limit = self.config.max_num_queued_reqs
        return limit is not None and self.n_requests >= limit

    def add(self, request: RequestT, now_s: float) -> None:
        """Queue `request`; the next step that has room takes it. Raises ValueError if it can never fit."""
        if request.n_prompt + request.n_output_wanted > self.config.context_tokens:
            raise ValueError(
                f"{request.n_prompt} prompt and {request.n_output_wanted} output tokens exceed"
                f" the context of {self.config.context_tokens} tokens"
            )
        request.queued_s = now_s
        self._waiting.append(request)

    def abort(self, request: RequestT, now_s: float) -> bool:
        """Drop `request` and free its blocks, also in the middle of a step. False if it is not here (any more)."""
        if request.queued_s is None or request.finish_reason is not None:
            return False
        queue: deque[RequestT] | list[RequestT] = self._running if request in self._running else self._waiting
        queue.remove(request)
        self._end(request, FinishReason.ABORT, now_s)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached. False, and nothing done, while requests run, as in vLLM."""
        return self.pool.clear()

    def start_step(self, now_s: float, max_steps: int = 1) -> float | None:
        """Schedule the next batch; seconds until its end, or None when there is no request at all.

        It is computed up to `max_steps` times, as long as all of it decodes and nobody ends.
        """
        if self._batch is not None:
            raise RuntimeError("the step before has not been finished")
        config = self.config
        budget = config.max_num_batched_tokens
        batch: list[RequestT] = []
        prefill_s = 0.0
        n_decoding = decoding_tokens = 0
        preempted = False

        index = 0
        while index < len(self._running) and budget:
            request = self._running[index]
            n_computed = request.n_computed
            n_new = min(request.n_prompt + request.n_output - n_computed, budget)
            end = n_computed + n_new
            # Most decodes neither begin a block nor fill one.
            moves_on = n_new > 1 or end % config.block_size == 0 or end > len(request.blocks) * config.block_size
            if moves_on and not self._extend(request, end):
                # The latest goes; if that is this one, the loop ends by itself.
                self._preempt(self._running.pop())
                preempted = True
                continue
            request.n_new = n_new
            budget -= n_new
            batch.append(request)
            if n_new == 1 and request.n_output:
                n_decoding += 1
                decoding_tokens += n_computed
            else:
                prefill_s += config.prefill_s(n_computed, n_new)
            index += 1

        while self._waiting and budget and not preempted and len(self._running) < config.max_num_seqs:
            request = self._waiting[0]
            if not self._admit(request, budget):
                break
            if request.scheduled_s is None:
                request.scheduled_s = now_s
            budget -= request.n_new
            self._running.append(self._waiting.popleft())
            batch.append(request)
            prefill_s += config.prefill_s(request.n_computed, request.n_new)
            if config.cached_cost_ratio:
                prefill_s += config.cached_cost_ratio * config.prefill_s(0, request.n_computed)

        if not batch:
            return None
        self._batch = batch
        self._n_steps = 1
        step_s = config.step_time_s(prefill_s, n_decoding, decoding_tokens)
        if max_steps == 1 or preempted or n_decoding < len(self._running):
            return step_s
        # Whoever waits could not be admitted now, so not before somebody ends. (A waiting prompt that contains an
        # answer still being made might; nobody can ask that before having the answer.)
        self._n_steps = self._longest_leap(max_steps)
        self._began_s = now_s
        self._first_step_s = step_s
        self._added_step_s = n_decoding * config.step_per_token_s / config.speed
        return self._leap_s(self._n_steps)

    def cut(self, now_s: float) -> float | None:
        """End the leap under way, if any, with the step that is under way: seconds from `now_s` to its end.

        None: the step ends when it was said to.
        """
        if self._batch is None or self._n_steps == 1:
            return None
        elapsed_s = now_s - self._began_s
        first_s, added_s = self._first_step_s, self._added_step_s
        # Where first·n + added·n(n − 1)/2 reaches the time gone by.
        half = first_s - added_s / 2
        n = ceil(2 * elapsed_s / (half + sqrt(half * half + 2 * added_s * elapsed_s))) if elapsed_s > 0 else 1
        self._n_steps = min(max(n, 1), self._n_steps)
        return max(0.0, self._leap_s(self._n_steps) - elapsed_s)

    def finish_step(self, now_s: float) -> list[RequestT]:
        """End the batch. The requests that got a token, each with `finish_reason` set if it was the last."""
        if self._batch is None:
            raise RuntimeError("no step has been started")
        batch, self._batch = self._batch, None
        self.counters.steps += self._n_steps
        if self._n_steps > 1:
            for request in batch:
                if request.finish_reason is not None:
                    continue
                # All but the last step, whose token is handed out below.
                self._extend(request, request.n_computed + self._n_steps)
                request.n_computed += self._n_steps - 1
                request.n_output += self._n_steps - 1
            self.counters.generation_tokens += len(batch) * (self._n_steps - 1)
        grown: list[RequestT] = []
        ended = False
        for request in batch:
            if request.finish_reason is not None:  # aborted meanwhile
                continue
            request.n_computed += request.n_new
            if request.n_computed < request.n_prompt + request.n_output:
                continue
            request.n_output += 1
            if request.n_output == 1:
                self._begin_answer(request, now_s)
            if request.n_output == request.n_output_wanted:
                self._end(request, request.last_reason, now_s)
                ended = True
            grown.append(request)
        self.counters.generation_tokens += len(grown)
        if ended:
            self._running = [request for request in self._running if request.finish_reason is None]
        return grown

    def _leap_s(self, n_steps: int) -> float:
        return n_steps * self._first_step_s + self._added_step_s * (n_steps * (n_steps - 1) / 2)

    def _longest_leap(self, max_steps: int) -> int:
        """Steps until somebody in the all-decoding batch ends or needs a block that is not free."""
        block_size = self.config.block_size
        n_steps = min(max_steps, *(r.n_output_wanted - r.n_output for r in self._running))
        while n_steps > 1:
            n_missing = sum(
                max(0, _ceil_div(r.n_computed + n_steps, block_size) - len(r.blocks)) for r in self._running
            )
            if n_missing <= self.pool.n_free:
                break
            n_steps //= 2
        return max(1, n_steps)

    def _begin_answer(self, request: RequestT, now_s: float) -> None:
        request.first_token_s = now_s
        self.counters.prompt_tokens += request.n_prompt
        self.counters.prompt_tokens_cached += request.cached_tokens or 0

    def _end(self, request: RequestT, reason: FinishReason, now_s: float) -> None:
        request.finish_reason = reason
        request.finished_s = now_s
        self._give_back(request)

    def _admit(self, request: RequestT, budget: int) -> bool:
        """Give a waiting request its cached prefix and the blocks of its first chunk, or nothing."""
        block_size = self.config.block_size
        # The last token is always computed: its output is the next token.
        limit = (request.n_tokens - 1) // block_size if self.config.enable_prefix_caching else 0
        cached = self.pool.match(request.block_hashes, limit)
        # The whole prompt must fit now, though its blocks are taken chunk by chunk: else two long prompts could
        # each hold half of the cache.
        n_missing = _ceil_div(request.n_tokens, block_size) - len(cached)
        if n_missing + self.pool.count_free(cached) > self.pool.n_free:
            return False
        self.pool.share(cached)
        request.blocks = cached
        request.n_named = len(cached)
        request.n_computed = len(cached) * block_size
        request.n_new = min(request.n_tokens - request.n_computed, budget)
        if request.cached_tokens is None:
            request.cached_tokens = request.n_computed
            self.counters.prefix_cache_queries += request.n_tokens
            self.counters.prefix_cache_hits += request.n_computed
        self._extend(request, request.n_computed + request.n_new)
        return True

    def _extend(self, request: RequestT, end: int) -> bool:
        """Hold blocks for the first `end` tokens, and name those that become full. False: not enough are free."""
        block_size = self.config.block_size
        n_missing = _ceil_div(end, block_size) - len(request.blocks)
        if n_missing > self.pool.n_free:
            return False
        if n_missing > 0:
            request.blocks += self.pool.take(n_missing)
        if self.config.enable_prefix_caching:
            n_full = min(end // block_size, len(request.block_hashes))
            for index in range(request.n_named, n_full):
                self.pool.name(request.blocks[index], request.block_hashes[index])
            request.n_named = max(request.n_named, n_full)
        return True

    def _preempt(self, request: RequestT) -> None:
        self._give_back(request)
        request.n_preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(request)

    def _give_back(self, request: RequestT) -> None:
        self.pool.give_back(request.blocks)
        request.blocks = []
        request.n_named = 0
        request.n_computed = 0


def _ceil_div(n: int, divisor: int) -> int:
    return -(-n // divisor)
