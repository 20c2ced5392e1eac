"""What is counted as it happens: finished requests, probes."""

from collections.abc import Collection, Iterator, Mapping

from prometheus_client.core import Metric

from prefixroute.core.fleet import Fleet, ProbeFailure
from prefixroute.core.policy import Reason
from prefixroute.core.prompt import NoKeyCause
from prefixroute.metrics.families import Histogram, Samples, counter, histogram
from prefixroute.record import AttemptOutcome, Outcome, RequestRecord

TIME_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip
DECISION_BUCKETS_S = (
    5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
)  # fmt: skip

MAX_MODELS = 200
MAX_LABEL_CHARS = 256
UNREAD_CAUSES = ("malformed_request", "headers_too_large", "request_timeout")

# Series of `requests_total`: about 1 µs each at a scrape for which the event loop waits, 5 more elsewhere.
MAX_REQUEST_SERIES = 5_000
# Routes and lanes are few. The bound only guards against a mistake elsewhere.
MAX_CLOSED = 256

NONE = "none"
OTHER = "other"
PROBE_OUTCOMES = ("passed", *(failure.value for failure in ProbeFailure), "not_sent")


class Counts:
    """Of one fleet. About 1 µs a request."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._models = _Names(MAX_MODELS)
        self._routes = _Names(MAX_CLOSED)
        self._lanes = _Names(MAX_CLOSED)
        self._upstreams = _Names(MAX_CLOSED)
        self._requests: dict[tuple[str, ...], _Requests] = {}
        # The same objects by what records hold; only what is its own label, so it is bounded as they are.
        self._by_record: dict[tuple[str, str | None, str | None, Outcome, str], _Requests] = {}
        self._durations: dict[str, Histogram] = {}
        self._first_bytes: dict[tuple[str, str], Histogram] = {}
        self._decision_times = Histogram(DECISION_BUCKETS_S)
        self._held_times = Histogram(TIME_BUCKETS_S)
        # By value: hashing a member is a call of a function in Python.
        self._decisions = dict.fromkeys([reason.value for reason in Reason], 0)
        self._attempts = dict.fromkeys(AttemptOutcome, 0)
        self._no_key = dict.fromkeys(NoKeyCause, 0)
        self._probes: dict[tuple[str, str], int] = {}
        self._n_disconnects = 0
        self._codes = _Names(MAX_CLOSED)
        self._refused: dict[str, int] = {}
        self._unread = dict.fromkeys(UNREAD_CAUSES, 0)
        self._prompt_tokens = 0
        self._matched_tokens = 0
        self._cached_tokens = 0
        self._reported_prompt_tokens = 0
        self.keep()

    def keep(self, leaving: Collection[str] = ()) -> None:
        """Series of instances that are no longer in the fleet go, but for those that are `leaving` it.

        So labels do not grow with every instance that ever was. Called before each scrape, too: a removed instance's
        last request is counted after its lease has ended.
        """
        names = {instance.name for instance in self._fleet.instances}
        self._upstreams.n_max = max(MAX_CLOSED, len(names))
        for name in names:
            for outcome in PROBE_OUTCOMES:
                self._probes.setdefault((name, outcome), 0)
        names |= {*leaving, NONE, OTHER}
        if gone := {*self._upstreams.names, *(name for name, _ in self._probes)} - names:
            self._upstreams.names -= gone
            self._probes = {key: n for key, n in self._probes.items() if key[0] not in gone}
            self._first_bytes = {key: one for key, one in self._first_bytes.items() if key[0] not in gone}
            self._requests = {key: one for key, one in self._requests.items() if one.upstream not in gone}
            self._by_record = {key: one for key, one in self._by_record.items() if one.upstream not in gone}

    # ------------------------------------------------------------------ counting

    def record(self, record: RequestRecord) -> None:
        """One finished request."""
        outcome, streamed, reason = record.outcome, record.streamed, record.reason
        requests = self._by_record.get(
            (record.route, record.model, record.upstream, outcome, record.lane)
        ) or self._requests_of(record)
        requests.n += 1
        requests.durations.observe(record.duration_s)
        if record.ttft_s is not None:
            first_bytes = requests.first_bytes[streamed] or self._first_bytes_of(requests, streamed)
            first_bytes.observe(record.ttft_s)
        if record.decision_s is not None:
            self._decision_times.observe(record.decision_s)
        if record.held_s:
            self._held_times.observe(record.held_s)
        if reason is not None:
            self._decisions[reason._value_] += 1
            self._prompt_tokens += record.prompt_tokens
            self._matched_tokens += record.matched_tokens
        if record.cached_tokens is not None and record.reported_prompt_tokens is not None:
            self._cached_tokens += record.cached_tokens
            self._reported_prompt_tokens += record.reported_prompt_tokens
        if record.no_key is not None:
            self._no_key[record.no_key] += 1
        for attempt in record.attempts:
            self._attempts[attempt] += 1
        if outcome is Outcome.CLIENT_GONE:
            self._n_disconnects += 1
        elif outcome is Outcome.REFUSED and record.error is not None:
            code = self._codes.label(record.error)
            self._refused[code] = self._refused.get(code, 0) + 1

    def unread(self, cause: str) -> None:
        """One request that was refused before it could be read; `cause` is one of `UNREAD_CAUSES`."""
        self._unread[cause] += 1

    def probed(self, upstream: str, outcome: str) -> None:
        """One probe of an instance; `outcome` is one of `PROBE_OUTCOMES`."""
        self._probes[upstream, outcome] = self._probes.get((upstream, outcome), 0) + 1

    # ------------------------------------------------------------------ the labels of a request

    def _requests_of(self, record: RequestRecord) -> "_Requests":
        route = self._routes.label(record.route)
        model = self._model_label(record.model)
        upstream = NONE if record.upstream is None else self._upstreams.label(record.upstream)
        lane = self._lanes.label(record.lane)
        if len(self._requests) >= MAX_REQUEST_SERIES:
            known = (route, model, upstream, record.outcome.value, lane) in self._requests
            model = model if known else OTHER
        requests = self._requests.get((route, model, upstream, record.outcome.value, lane))
        if requests is None:
            durations = self._durations.setdefault(route, Histogram(TIME_BUCKETS_S))
            requests = _Requests(upstream, durations)
            self._requests[route, model, upstream, record.outcome.value, lane] = requests
        if (route, model, upstream, lane) == (
            record.route, record.model or NONE, record.upstream or NONE, record.lane,
        ):  # fmt: skip
            self._by_record[record.route, record.model, record.upstream, record.outcome, record.lane] = requests
        return requests

    def _model_label(self, model: str | None) -> str:
        if model is None:
            return NONE
        if model not in self._models and (len(model) > MAX_LABEL_CHARS or not self._fleet.knows_model(model)):
            return OTHER
        return self._models.label(model)

    def _first_bytes_of(self, requests: "_Requests", streamed: bool) -> Histogram:
        labels = (requests.upstream, "true" if streamed else "false")
        first_bytes = self._first_bytes.setdefault(labels, Histogram(TIME_BUCKETS_S))
        requests.first_bytes[streamed] = first_bytes
        return first_bytes

    # ------------------------------------------------------------------ the scrape

    def families(self) -> Iterator[Metric]:
        """All of it as it is now."""
        yield counter(
            "requests",
            "Finished requests. upstream: the instance tried last.",
            ("route", "model", "upstream", "outcome", "lane"),
            ((labels, requests.n) for labels, requests in self._requests.items()),
        )
        yield histogram(
            "request_duration_seconds",
            "From the request's head to the answer's end.",
            ("route",),
            (((route,), durations) for route, durations in self._durations.items()),
        )
        yield histogram(
            "time_to_first_byte_seconds",
            "From the request's head to the first byte of the answer's body. Streamed answers: time to first token.",
            ("upstream", "streamed"),
            self._first_bytes.items(),
        )
        yield histogram(
            "decision_duration_seconds",
            "Time the last decision of a request took: match, pick, record.",
            (),
            [((), self._decision_times)],
        )
        yield histogram(
            "held_seconds",
            "How long requests were held because their instance was busy; those that were not are not in it.",
            (),
            [((), self._held_times)],
        )
        yield counter(
            "decisions",
            "Last decision of each request, by reason.",
            ("reason",),
            (((reason,), n) for reason, n in self._decisions.items()),
        )
        yield counter("attempts", "Attempts on instances by outcome.", ("outcome",), _by(self._attempts))
        yield counter(
            "prompts_without_key",
            "Requests on understood routes without a prefix, by cause.",
            ("cause",),
            _by(self._no_key),
        )
        yield counter(
            "unread_requests",
            "Requests refused before they could be read, by the code of their answer; they are in no other count.",
            ("cause",),
            (((cause,), n) for cause, n in self._unread.items()),
        )
        yield counter(
            "refused_requests",
            "Requests that the router itself refused, by the code of the error.",
            ("code",),
            (((code,), n) for code, n in self._refused.items()),
        )
        yield counter("probes", "Health probes by outcome.", ("upstream", "outcome"), self._probes.items())
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
            yield counter(name, help_text, (), [((), value)])


class _Requests:
    """Requests with the same labels, and the histograms they go into; `first_bytes[streamed]`."""

    __slots__ = ("durations", "first_bytes", "n", "upstream")

    def __init__(self, upstream: str, durations: Histogram) -> None:
        self.n = 0
        self.upstream = upstream
        self.durations = durations
        self.first_bytes: list[Histogram | None] = [None, None]


class _Names:
    """Label values that come from outside this module: the first `n_max`, then `other`."""

    __slots__ = ("n_max", "names")

    def __init__(self, n_max: int) -> None:
        self.n_max = n_max
        self.names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def label(self, name: str) -> str:
        if name not in self.names:
            if len(self.names) >= self.n_max:
                return OTHER
            self.names.add(name)
        return name


def _by(counts: Mapping[AttemptOutcome, int] | Mapping[NoKeyCause, int]) -> Samples:
    return [((key.value,), n) for key, n in counts.items()]
