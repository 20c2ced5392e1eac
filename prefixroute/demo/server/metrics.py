"""vLLM's /metrics: its names, labels and buckets, as far as a router or a dashboard may want them.

Written by hand, because nothing here may cost anything per token: the engine's own counters are read at scrape
time, and a request is observed once, when it ends.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prefixroute.demo.engine.request import EngineRequest, FinishReason
from prefixroute.demo.engine.scheduler import Engine, RequestT

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_TTFT_BUCKETS = _bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
_REQUEST_BUCKETS = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_TOKEN_TIME_BUCKETS = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """(suffix, extra labels, value), the buckets cumulative."""
        total = 0
        samples: list[tuple[str, dict[str, str], float]] = []
        for bound, n in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += n
            samples.append(("_bucket", {"le": bound}, total))
        return [*samples, ("_count", {}, total), ("_sum", {}, self._sum)]


class RequestStats:
    """What is known about requests once they have ended."""

    def __init__(self) -> None:
        self.n_rejected = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.time_to_first_token = Histogram(_TTFT_BUCKETS)
        self.e2e_latency = Histogram(_REQUEST_BUCKETS)
        self.queue_time = Histogram(_REQUEST_BUCKETS)
        self.time_per_output_token = Histogram(_TOKEN_TIME_BUCKETS)

    def observe(self, request: EngineRequest) -> None:
        """`request` has ended."""
        if request.finish_reason is None or request.queued_s is None or request.finished_s is None:
            raise ValueError("the request has not ended")
        self.finished[request.finish_reason] += 1
        if request.scheduled_s is not None:
            self.queue_time.observe(request.scheduled_s - request.queued_s)
        if request.first_token_s is not None:
            self.time_to_first_token.observe(request.first_token_s - request.queued_s)
            if request.n_output > 1:
                decode_s = request.finished_s - request.first_token_s
                self.time_per_output_token.observe(decode_s / (request.n_output - 1))
        if request.finish_reason != FinishReason.ABORT:
            self.e2e_latency.observe(request.finished_s - request.queued_s)


def render(engine: Engine[RequestT], stats: RequestStats, *, model: str, start_time_s: float, sleeping: bool) -> bytes:
    """The whole page. `start_time_s`: of this server, in Unix time; a restart is seen by it."""
    page = _Page({"engine": "0", "model_name": model})
    config, counters = engine.config, engine.counters
    page.lines += (
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {start_time_s!r}",
    )
    page.gauge("num_requests_running", engine.n_running)
    page.gauge("num_requests_waiting", engine.n_waiting)
    waiting: tuple[tuple[Mapping[str, str], float], ...] = (
        ({"reason": "capacity"}, engine.n_waiting),
        ({"reason": "deferred"}, 0),
    )
    page.family("num_requests_waiting_by_reason", "gauge", waiting)
    page.family(
        "engine_sleep_state",
        "gauge",
        [
            ({"sleep_state": "awake"}, not sleeping),
            ({"sleep_state": "weights_offloaded"}, sleeping),
            ({"sleep_state": "discard_all"}, 0),
        ],
    )
    page.gauge("kv_cache_usage_perc", engine.kv_usage_ratio)
    cache = {
        "block_size": str(config.block_size),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "kv_cache_size_tokens": str(config.n_blocks * config.block_size),
        "num_gpu_blocks": str(config.n_blocks),
        "prefix_caching_hash_algo": "xxhash",
    }
    page.family("cache_config_info", "gauge", [(cache, 1)], without="model_name")

    page.counter("prefix_cache_queries", counters.prefix_cache_queries)
    page.counter("prefix_cache_hits", counters.prefix_cache_hits)
    page.counter("num_preemptions", counters.preemptions)
    page.counter("prompt_tokens", counters.prompt_tokens)
    page.counter("prompt_tokens_cached", counters.prompt_tokens_cached)
    page.counter("generation_tokens", counters.generation_tokens)
    page.family(
        "request_success_total",
        "counter",
        [({"finished_reason": reason.value}, n) for reason, n in stats.finished.items()],
    )
    rejections = [({"reason": "max_num_queued_reqs"}, stats.n_rejected), ({"reason": "max_num_queued_tokens"}, 0)]
    page.family("admission_rejections_total", "counter", rejections, without="engine")

    page.histogram("time_to_first_token_seconds", stats.time_to_first_token)
    page.histogram("request_time_per_output_token_seconds", stats.time_per_output_token)
    page.histogram("e2e_request_latency_seconds", stats.e2e_latency)
    page.histogram("request_queue_time_seconds", stats.queue_time)
    return page.encode()


class _Page:
    def __init__(self, labels: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._labels = labels

    def gauge(self, name: str, value: float) -> None:
        self.family(name, "gauge", [({}, value)])

    def counter(self, name: str, value: float) -> None:
        self.family(f"{name}_total", "counter", [({}, value)])

    def histogram(self, name: str, histogram: Histogram) -> None:
        self.lines.append(f"# TYPE vllm:{name} histogram")
        for suffix, labels, value in histogram.samples():
            self._sample(name + suffix, labels, value)

    def family(
        self, name: str, kind: str, samples: Sequence[tuple[Mapping[str, str], float]], *, without: str = ""
    ) -> None:
        """`without`: the one label of all others that vLLM leaves out here."""
        self.lines.append(f"# TYPE vllm:{name} {kind}")
        for labels, value in samples:
            self._sample(name, labels, value, without)

    def encode(self) -> bytes:
        return ("\n".join(self.lines) + "\n").encode()

    def _sample(self, name: str, labels: Mapping[str, str], value: float, without: str = "") -> None:
        pairs = sorted((key, text) for key, text in {**self._labels, **labels}.items() if key != without)
        text = ",".join(f'{key}="{_escape(value)}"' for key, value in pairs)
        self.lines.append(f"vllm:{name}{{{text}}} {float(value)!r}")


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
