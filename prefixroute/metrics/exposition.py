"""A scrape: everything as it is, and as Prometheus wants to read it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from prefixroute import __version__
from prefixroute.core.exact import ExactIndex
from prefixroute.core.router import Router
from prefixroute.metrics.counts import Counts
from prefixroute.metrics.facts import (
    ReloadFacts,
    TokenFacts,
    audit_families,
    event_families,
    reload_families,
    router_families,
    token_families,
)
from prefixroute.metrics.families import counter, gauge, histogram
from prefixroute.metrics.loop_lag import LoopLag
from prefixroute.record import RequestRecord


class Metrics:
    """Counts finished requests and shows them, and the router's facts, to Prometheus.

    `waiting` may be set: how many requests are held because nobody can take them. So may `recorded`: how many requests
    were recorded and how many were not, by outcome. `exact_tokens`: facts of the tokenizer, if it is in use. `reloads`:
    what became of changes of the configuration.
    """

    def __init__(
        self, router: Router, *, strategy: str, version: str = __version__, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.waiting: Callable[[], int] = lambda: 0
        self.recorded: Callable[[], Mapping[str, int]] = dict
        self.exact: ExactIndex | None = None
        """What instances say they hold, when any of them has KV events."""
        self.exact_tokens: Callable[[], TokenFacts] = TokenFacts
        self.reloads = ReloadFacts()
        self.loop_lag = LoopLag()
        """Of the event loop that runs it."""
        self.failed_handshakes = dict.fromkeys(("data", "admin"), 0)
        """TLS handshakes with clients that failed, by plane."""
        self.strategy = strategy
        self._router = router
        self._clock = clock
        self._version = version
        self._counts = Counts(router.fleet)
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)

    def record(self, record: RequestRecord) -> None:
        """Counts one finished request."""
        self._counts.record(record)

    def unread(self, cause: str) -> None:
        """Counts one request that was refused before it could be read; `cause` is one of `counts.UNREAD_CAUSES`."""
        self._counts.unread(cause)

    def probed(self, upstream: str, outcome: str) -> None:
        """Counts one probe of an instance; `outcome` is one of `counts.PROBE_OUTCOMES`."""
        self._counts.probed(upstream, outcome)

    def instances_changed(self) -> None:
        """Instances have joined or left the fleet."""
        self._counts.keep(self._router.leaving())

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of a scrape: OpenMetrics if the Accept header asks for it, else text 0.0.4."""
        return encode(self.snapshot(), accept)

    def snapshot(self) -> Collector:
        """Everything as it is now, for `encode`; later counting does not show in it."""
        router, instances = self._router, self._router.fleet.instances
        self._counts.keep(router.leaving())
        families = (
            self._counts.families(),
            router_families(router, self._clock()),
            audit_families(router.audit, instances),
            event_families(self.exact, instances),
            token_families(self.exact_tokens()),
            reload_families(self.reloads),
            self._other_families(),
        )
        return _Snapshot(list(chain.from_iterable(families)), self._process)

    def _other_families(self) -> Iterator[Metric]:
        recorded = [((outcome,), n) for outcome, n in self.recorded().items()]
        yield counter("recorded_requests", "Requests recorded: written, dropped, failed.", ("outcome",), recorded)
        failed = [((plane,), n) for plane, n in self.failed_handshakes.items()]
        yield counter("tls_handshake_failures", "TLS handshakes with clients that failed.", ("plane",), failed)
        lags = [((), self.loop_lag.lags)]
        yield histogram("event_loop_lag_seconds", "How late timers ring: what everybody waits for the loop.", (), lags)
        yield gauge("waiting", "Requests held because nobody can take them.", (), [((), self.waiting())])
        build = (self._version, self.strategy)
        yield gauge("build_info", "Always 1; the labels tell.", ("version", "strategy"), [(build, 1)])


def encode(snapshot: Collector, accept: str) -> tuple[bytes, str]:
    """Body and content type for an Accept header. Touches nothing but the snapshot: any thread may call it."""
    try:
        encoder, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no version
        encoder, content_type = choose_encoder("")
    return encoder(snapshot), content_type


class _Snapshot(Collector):
    """Families as they were, and the process, which is read when encoding: that reads files."""

    def __init__(self, families: Sequence[Metric], process: Collector) -> None:
        self._families = families
        self._process = process

    def collect(self) -> Iterator[Metric]:
        yield from self._families
        yield from self._process.collect()
