"""What Prometheus scrapes.

- Families are kept here in plain dicts and turned into `prometheus_client` families at the scrape. All counting
  is done on the event loop, so the library's own counters would add a lock to each increment, a linear search
  to each observation (10 µs a request instead of 1.5), and a `_created` series to each series.
- What the router knows itself (in flight, states, index) is read from it at the scrape, never mirrored.
- Label sets are closed. Names that are not ours to choose (models) count as `other` unless an instance lists
  them, and then up to a bound; `none` stands for "there was none".
- A scrape is a snapshot taken on the event loop and encoded elsewhere: `encode` may run in another thread.
- Two counters, never a ratio. Each pair is counted over the same requests, so that dividing them is exact.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from prefixroute import __version__
from prefixroute.core.exact import ExactIndex, Trust
from prefixroute.core.feedback import Prediction
from prefixroute.core.fleet import ProbeFailure, State
from prefixroute.core.policy import Reason
from prefixroute.core.prompt import NoKeyCause
from prefixroute.core.router import Router
from prefixroute.record import AttemptOutcome, Outcome, RequestRecord

TIME_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip
DECISION_BUCKETS_S = (
    5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
)  # fmt: skip

MAX_MODELS = 200
MAX_LABEL_CHARS = 256
# Series of `requests_total`: about 1 µs each at a scrape for which the event loop waits, 5 more elsewhere.
MAX_REQUEST_SERIES = 5_000
# Routes and lanes are few. The bound only guards against a mistake elsewhere.
MAX_CLOSED = 256

NONE = "none"
OTHER = "other"
# Fields of `exact.Counts` that count events.
EVENTS = ("stored", "removed", "cleared", "ignored", "unknown")
PROBE_OUTCOMES = ("passed", *(failure.value for failure in ProbeFailure), "not_sent")


class Metrics:
    """Counts finished requests and shows them, and the router's facts, to Prometheus.

    `waiting` may be set: how many requests are held because nobody can take them. So may `recorded`: how many requests
    were recorded and how many were not, by outcome. `exact_tokens`: facts of the tokenizer, if it is in use.
    """

    def __init__(
        self, router: Router, *, strategy: str, version: str = __version__, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.waiting: Callable[[], int] = lambda: 0
        self.recorded: Callable[[], Mapping[str, int]] = dict
        self.exact: ExactIndex | None = None
        """What instances say they hold, when any of them has KV events."""
        self.exact_tokens: Callable[[], TokenFacts] = TokenFacts
        self._router = router
        self._clock = clock
        self._build = (version, strategy)
        self._models = _Names(MAX_MODELS)
        self._routes = _Names(MAX_CLOSED)
        self._lanes = _Names(MAX_CLOSED)
        self._upstreams = _Names(max(MAX_CLOSED, len(router.fleet.instances)))
        self._requests: dict[tuple[str, ...], _Requests] = {}
        # The same objects by what records hold; only what is its own label, so it is bounded as they are.
        self._by_record: dict[tuple[str, str | None, str | None, Outcome, str], _Requests] = {}
        self._durations: dict[str, _Histogram] = {}
        self._first_bytes: dict[tuple[str, str], _Histogram] = {}
        self._decision_times = _Histogram(DECISION_BUCKETS_S)
        self._held_times = _Histogram(TIME_BUCKETS_S)
        self._decisions = dict.fromkeys(Reason, 0)
        self._attempts = dict.fromkeys(AttemptOutcome, 0)
        self._no_key = dict.fromkeys(NoKeyCause, 0)
        self._probes = {(i.name, outcome): 0 for i in router.fleet.instances for outcome in PROBE_OUTCOMES}
        self._n_disconnects = 0
        self._prompt_tokens = 0
        self._matched_tokens = 0
        self._cached_tokens = 0
        self._reported_prompt_tokens = 0
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)

    # ------------------------------------------------------------------ counting

    def record(self, record: RequestRecord) -> None:
        """Counts one finished request."""
        requests = self._by_record.get(
            (record.route, record.model, record.upstream, record.outcome, record.lane)
        ) or self._requests_of(record)
        requests.n += 1
        requests.durations.observe(record.duration_s)
        if record.ttft_s is not None:
            first_bytes = requests.first_bytes[record.streamed] or self._first_bytes_of(requests, record.streamed)
            first_bytes.observe(record.ttft_s)
        if record.decision_s is not None:
            self._decision_times.observe(record.decision_s)
        if record.held_s:
            self._held_times.observe(record.held_s)
        if record.reason is not None:
            self._decisions[record.reason] += 1
            self._prompt_tokens += record.prompt_tokens
            self._matched_tokens += record.matched_tokens
        if record.cached_tokens is not None and record.reported_prompt_tokens is not None:
            self._cached_tokens += record.cached_tokens
            self._reported_prompt_tokens += record.reported_prompt_tokens
        if record.no_key is not None:
            self._no_key[record.no_key] += 1
        for attempt in record.attempts:
            self._attempts[attempt] += 1
        if record.outcome is Outcome.CLIENT_GONE:
            self._n_disconnects += 1

    def probed(self, upstream: str, outcome: str) -> None:
        """Counts one probe of an instance; `outcome` is one of `PROBE_OUTCOMES`."""
        self._probes[upstream, outcome] = self._probes.get((upstream, outcome), 0) + 1

    def model_label(self, model: str | None) -> str:
        """What may stand for a model that a client named: in labels, and wherever else a bound is needed."""
        if model is None:
            return NONE
        if model not in self._models and (len(model) > MAX_LABEL_CHARS or not self._router.fleet.knows_model(model)):
            return OTHER
        return self._models.label(model)

    def _requests_of(self, record: RequestRecord) -> "_Requests":
        route = self._routes.label(record.route)
        model = self.model_label(record.model)
        upstream = NONE if record.upstream is None else self._upstreams.label(record.upstream)
        lane = self._lanes.label(record.lane)
        if len(self._requests) >= MAX_REQUEST_SERIES:
            known = (route, model, upstream, record.outcome.value, lane) in self._requests
            model = model if known else OTHER
        requests = self._requests.get((route, model, upstream, record.outcome.value, lane))
        if requests is None:
            durations = self._durations.setdefault(route, _Histogram(TIME_BUCKETS_S))
            requests = _Requests(upstream, durations)
            self._requests[route, model, upstream, record.outcome.value, lane] = requests
        if (route, model, upstream, lane) == (
            record.route, record.model or NONE, record.upstream or NONE, record.lane,
        ):  # fmt: skip
            self._by_record[record.route, record.model, record.upstream, record.outcome, record.lane] = requests
        return requests

    def _first_bytes_of(self, requests: "_Requests", streamed: bool) -> "_Histogram":
        labels = (requests.upstream, "true" if streamed else "false")
        histogram = self._first_bytes.setdefault(labels, _Histogram(TIME_BUCKETS_S))
        requests.first_bytes[streamed] = histogram
        return histogram

    # ------------------------------------------------------------------ the scrape

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of a scrape: OpenMetrics if the Accept header asks for it, else text 0.0.4."""
        return encode(self.snapshot(), accept)

    def snapshot(self) -> Collector:
        """Everything as it is now, for `encode`; later counting does not show in it."""
        families = (self._request_families(), self._router_families(), self._audit_families(), self._other_families())
        return _Snapshot(list(chain.from_iterable(families)), self._process)

    def _other_families(self) -> Iterator[Metric]:
        yield _gauge("build_info", "Always 1; the labels tell.", ("version", "strategy"), [(self._build, 1)])
        yield _counter("probes", "Health probes by outcome.", ("upstream", "outcome"), self._probes.items())
        recorded = [((outcome,), n) for outcome, n in self.recorded().items()]
        yield _counter("recorded_requests", "Requests recorded: written, dropped, failed.", ("outcome",), recorded)
        yield from self._token_families()
        yield from self._event_families()

    def _event_families(self) -> Iterator[Metric]:
        exact = self.exact
        events, states, blocks, orphans, gaps, restarts, undecodable, lags = [], [], [], [], [], [], [], []
        for instance in self._router.fleet.instances:
            if exact is None:
                break
            name, slot = instance.name, instance.slot
            trust, counts = exact.trust(slot), exact.counts(slot)
            states += [((name, one.value), int(one is trust)) for one in Trust]
            if trust is Trust.OFF:
                continue
            events += [((name, kind), getattr(counts, kind)) for kind in EVENTS]
            blocks.append(((name,), exact.n_blocks(slot)))
            orphans.append(((name,), counts.orphan_blocks))
            gaps.append(((name,), counts.gaps))
            restarts.append(((name,), counts.restarts))
            undecodable.append(((name,), counts.undecodable))
            if counts.lag_s is not None:
                lags.append(((name,), counts.lag_s))
        upstream = ("upstream",)
        yield _counter("kv_events", "KV-cache events received.", ("upstream", "event"), events)
        yield _gauge("kv_events_state", "1 for how far KV-cache events are believed.", ("upstream", "state"), states)
        yield _gauge("kv_events_lag_seconds", "Age of the last KV-cache event when applied.", upstream, lags)
        yield _counter("kv_events_gaps", "Times that messages with KV-cache events were missing.", upstream, gaps)
        yield _counter("kv_events_restarts", "Times that an instance published anew.", upstream, restarts)
        yield _counter("kv_events_undecodable", "Messages and KV-cache events not understood.", upstream, undecodable)
        yield _counter("kv_events_orphan_blocks", "Blocks stored whose place is not known.", upstream, orphans)
        yield _gauge("exact_index_blocks", "Blocks the instance said it holds.", upstream, blocks)
        size = 0 if exact is None else exact.n_bytes
        yield _gauge("exact_index_bytes", "Memory of what instances said, estimated.", (), [((), size)])

    def _token_families(self) -> Iterator[Metric]:
        facts = self.exact_tokens()
        yield _gauge(
            "exact_tokens_state",
            "1 for the state of exact tokens; they are used in the state exact only.",
            ("state",),
            [((state,), int(state == facts.state)) for state in facts.states],
        )
        for name, help_text, counts in (
            ("exact_tokens", "Prompts with a key by what came of their exact tokens.", facts.outcomes),
            ("exact_tokens_probes", "Probes tokenized here and by an instance.", facts.verdicts),
            ("exact_tokens_checks", "Live prompts encoded a second way.", facts.checks),
        ):
            yield _counter(name, help_text, ("outcome",), [((outcome,), n) for outcome, n in counts.items()])

    def _request_families(self) -> Iterator[Metric]:
        yield _counter(
            "requests",
            "Finished requests. upstream: the instance tried last.",
            ("route", "model", "upstream", "outcome", "lane"),
            ((labels, requests.n) for labels, requests in self._requests.items()),
        )
        yield _histogram(
            "request_duration_seconds",
            "From the request's head to the answer's end.",
            ("route",),
            (((route,), histogram) for route, histogram in self._durations.items()),
        )
        yield _histogram(
            "time_to_first_byte_seconds",
            "From the request's head to the first byte of the answer's body. Streamed answers: time to first token.",
            ("upstream", "streamed"),
            self._first_bytes.items(),
        )
        yield _histogram(
            "decision_duration_seconds",
            "Time the last decision of a request took: match, pick, record.",
            (),
            [((), self._decision_times)],
        )
        yield _histogram(
            "held_seconds",
            "How long requests were held because their instance was busy; those that were not are not in it.",
            (),
            [((), self._held_times)],
        )
        yield _counter("decisions", "Last decision of each request, by reason.", ("reason",), _by(self._decisions))
        yield _counter("attempts", "Attempts on instances by outcome.", ("outcome",), _by(self._attempts))
        yield _counter(
            "prompts_without_key",
            "Requests on understood routes without a prefix, by cause.",
            ("cause",),
            _by(self._no_key),
        )
        for name, help_text, value in (
            ("prompt_tokens", "Prompt tokens of decided requests, estimated.", self._prompt_tokens),
            ("matched_tokens", "Those of them predicted to be cached where they went.", self._matched_tokens),
            (
                "reported_prompt_tokens",
                "Prompt tokens as instances reported them, over answers that report cached tokens.",
                self._reported_prompt_tokens,
            ),
            ("cached_tokens", "Those of them that instances reported as cached.", self._cached_tokens),
            ("client_disconnects", "Requests whose client left before the answer's end.", self._n_disconnects),
        ):
            yield _counter(name, help_text, (), [((), value)])

    def _router_families(self) -> Iterator[Metric]:
        router, now_s = self._router, self._clock()
        load, index, fleet_rate = router.load, router.index, router.load.fleet_rate()
        in_flight, pending, states, blocks, rates, capacities = [], [], [], [], [], []
        for state in router.fleet.states():
            name, slot = state.instance.name, state.instance.slot
            own, rate, _ = load.observe(slot, now_s, fleet_rate)
            in_flight.append(((name,), own.in_flight))
            pending.append(((name,), own.pending_work))
            rates.append(((name,), rate))
            blocks.append(((name,), index.n_blocks(slot)))
            capacities.append(((name,), router.capacity_tokens(name)))
            states += [((name, one.value), int(one is state.state)) for one in State]
            states.append(((name, "draining"), int(state.draining)))
        upstream = ("upstream",)
        weight = router.load.guard.weight
        yield _gauge("in_flight", "Requests on the instance now.", upstream, in_flight)
        yield _gauge("pending_prefill_tokens", "Prefill work not yet answered by a first byte.", upstream, pending)
        yield _gauge(
            "upstream_state", "1 for the state the instance is in; draining besides.", ("upstream", "state"), states
        )
        yield _gauge("index_blocks", "Blocks the instance is thought to hold.", upstream, blocks)
        yield _gauge("index_bytes", "Memory of the prefix index, estimated.", (), [((), index.n_bytes)])
        yield _gauge("learned_prefill_tokens_per_second", "Prefill speed learned so far.", upstream, rates)
        yield _gauge("kv_capacity_tokens", "Size of the KV cache, as told, learned or assumed.", upstream, capacities)
        yield _gauge(
            "affinity_weight", "What a match counts for: 1, or less while matches bring nothing.", (), [((), weight)]
        )
        yield _gauge("waiting", "Requests held because nobody can take them.", (), [((), self.waiting())])
        yield _gauge("held_requests", "Requests held because their instance is busy.", (), [((), len(router.held))])
        yield _counter("policy_faults", "Decisions in which the strategy failed.", (), [((), router.n_policy_faults)])

    def _audit_families(self) -> Iterator[Metric]:
        audit, upstream = self._router.audit, ("upstream",)
        fed_back = [(i.name, audit.feedback.of(i.slot)) for i in self._router.fleet.instances]
        yield _counter(
            "predicted_cached_tokens",
            "Prompt tokens predicted to be cached, over answers that report cached tokens.",
            upstream,
            [((name,), one.predicted_tokens) for name, one in fed_back],
        )
        yield _counter(
            "reported_cached_tokens",
            "Of the same answers, tokens reported as cached, scaled to the router's.",
            upstream,
            [((name,), one.reported_tokens) for name, one in fed_back],
        )
        yield _gauge(
            "upstream_prediction",
            "1 for how predictions of cached tokens hold; unknown: too little is reported.",
            ("upstream", "state"),
            [((name, state.value), int(one.prediction is state)) for name, one in fed_back for state in Prediction],
        )
        yield _counter(
            "ladder_tokens",
            "Prompt tokens down the ladder, over answers that report cached tokens.",
            ("rung",),
            [((rung,), n) for rung, n in audit.ladder.reported.by_name().items()],
        )
        yield _counter(
            "ladder_unreported_tokens",
            "The same over answers that report none.",
            ("rung",),
            [((rung,), n) for rung, n in audit.ladder.unreported.by_name().items() if rung != "reported"],
        )
        shadows = () if audit.shadows is None else audit.shadows.shadows
        yield _counter(
            "shadow_decisions",
            "Decisions with a choice, by whether the shadow strategy chose the same.",
            ("strategy", "agreement"),
            [((s.name, word), n) for s in shadows for word, n in (("same", s.n_same), ("different", s.n_different))],
        )
        for name, help_text, counts in (
            ("shadow_worse_seconds", "Expected seconds that its choices cost more.", [s.worse_s for s in shadows]),
            ("shadow_better_seconds", "Expected seconds that its choices cost less.", [s.better_s for s in shadows]),
            ("shadow_faults", "Decisions in which the shadow strategy failed.", [s.n_faults for s in shadows]),
        ):
            yield _counter(
                name, help_text, ("strategy",), [((s.name,), n) for s, n in zip(shadows, counts, strict=True)]
            )


def encode(snapshot: Collector, accept: str) -> tuple[bytes, str]:
    """Body and content type for an Accept header. Touches nothing but the snapshot: any thread may call it."""
    try:
        encoder, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no version
        encoder, content_type = choose_encoder("")
    return encoder(snapshot), content_type


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What is told of exact tokens. `states`: every one there is; counts by outcome, each outcome in them."""

    state: str = "off"
    states: Sequence[str] = ("off",)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    verdicts: Mapping[str, int] = field(default_factory=dict)
    checks: Mapping[str, int] = field(default_factory=dict)


class _Snapshot(Collector):
    """Families as they were, and the process, which is read when encoding: that reads files."""

    def __init__(self, families: Sequence[Metric], process: Collector) -> None:
        self._families = families
        self._process = process

    def collect(self) -> Iterator[Metric]:
        yield from self._families
        yield from self._process.collect()


class _Requests:
    """Requests with the same labels, and the histograms they go into; `first_bytes[streamed]`."""

    __slots__ = ("durations", "first_bytes", "n", "upstream")

    def __init__(self, upstream: str, durations: "_Histogram") -> None:
        self.n = 0
        self.upstream = upstream
        self.durations = durations
        self.first_bytes: list[_Histogram | None] = [None, None]


class _Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class _Names:
    """Label values that come from outside this module: the first `n_max`, then `other`."""

    __slots__ = ("_n_max", "_names")

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def label(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= self._n_max:
                return OTHER
            self._names.add(name)
        return name


_Samples = Iterable[tuple[Sequence[str], float]]


def _by(counts: dict[Reason, int] | dict[AttemptOutcome, int] | dict[NoKeyCause, int]) -> _Samples:
    return [((key.value,), n) for key, n in counts.items()]


def _counter(name: str, help_text: str, labels: Sequence[str], samples: _Samples) -> Metric:
    family = CounterMetricFamily(f"prefixroute_{name}", help_text, labels=labels)
    for values, n in samples:
        family.add_metric(values, n)
    return family


def _gauge(name: str, help_text: str, labels: Sequence[str], samples: _Samples) -> Metric:
    family = GaugeMetricFamily(f"prefixroute_{name}", help_text, labels=labels)
    for values, n in samples:
        family.add_metric(values, n)
    return family


def _histogram(
    name: str, help_text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], _Histogram]]
) -> Metric:
    family = HistogramMetricFamily(f"prefixroute_{name}", help_text, labels=labels)
    for values, histogram in samples:
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
        family.add_metric(values, buckets, histogram.total)
    return family
