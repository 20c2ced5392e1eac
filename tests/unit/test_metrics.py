"""What Prometheus reads: names, values, and how many series there can be."""

from collections.abc import Iterator
from random import Random

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.exact import ExactIndex
from prefixroute.core.fleet import Instance, ProbeFailure, State
from prefixroute.core.kv_blocks import Removed, Stored
from prefixroute.core.kv_sources import Trust
from prefixroute.core.lease import Lease
from prefixroute.core.policies.blind import LeastOutstanding, RoundRobin
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policy import Reason
from prefixroute.core.prompt import Api, NoKeyCause, read_prompt
from prefixroute.core.router import Router
from prefixroute.core.shadow import Shadow, Shadows
from prefixroute.metrics import MAX_MODELS, MAX_REQUEST_SERIES, Metrics, encode
from prefixroute.record import AttemptOutcome, Outcome, RequestRecord

# Type and labels of every family; a change here is one that breaks dashboards.
FAMILIES = {
    "prefixroute_requests_total": ("counter", {"route", "model", "upstream", "outcome", "lane"}),
    "prefixroute_request_duration_seconds": ("histogram", {"route"}),
    "prefixroute_time_to_first_byte_seconds": ("histogram", {"upstream", "streamed"}),
    "prefixroute_decision_duration_seconds": ("histogram", set[str]()),
    "prefixroute_decisions_total": ("counter", {"reason"}),
    "prefixroute_prompt_tokens_total": ("counter", set[str]()),
    "prefixroute_matched_tokens_total": ("counter", set[str]()),
    "prefixroute_cached_tokens_total": ("counter", set[str]()),
    "prefixroute_reported_prompt_tokens_total": ("counter", set[str]()),
    "prefixroute_prompts_without_key_total": ("counter", {"cause"}),
    "prefixroute_attempts_total": ("counter", {"outcome"}),
    "prefixroute_unread_requests_total": ("counter", {"cause"}),
    "prefixroute_refused_requests_total": ("counter", {"code"}),
    "prefixroute_tls_handshake_failures_total": ("counter", {"plane"}),
    "prefixroute_client_disconnects_total": ("counter", set[str]()),
    "prefixroute_in_flight": ("gauge", {"upstream"}),
    "prefixroute_pending_prefill_tokens": ("gauge", {"upstream"}),
    "prefixroute_upstream_state": ("gauge", {"upstream", "state"}),
    "prefixroute_index_blocks": ("gauge", {"upstream"}),
    "prefixroute_index_bytes": ("gauge", set[str]()),
    "prefixroute_affinity_weight": ("gauge", set()),
    "prefixroute_learned_prefill_tokens_per_second": ("gauge", {"upstream"}),
    "prefixroute_kv_capacity_tokens": ("gauge", {"upstream"}),
    "prefixroute_recorded_requests_total": ("counter", {"outcome"}),
    "prefixroute_exact_tokens_state": ("gauge", {"state"}),
    "prefixroute_exact_tokens_total": ("counter", {"outcome"}),
    "prefixroute_exact_tokens_probes_total": ("counter", {"outcome"}),
    "prefixroute_exact_tokens_checks_total": ("counter", {"outcome"}),
    "prefixroute_policy_faults_total": ("counter", set[str]()),
    "prefixroute_waiting": ("gauge", set[str]()),
    "prefixroute_held_requests": ("gauge", set[str]()),
    "prefixroute_held_seconds": ("histogram", set[str]()),
    "prefixroute_predicted_cached_tokens_total": ("counter", {"upstream"}),
    "prefixroute_reported_cached_tokens_total": ("counter", {"upstream"}),
    "prefixroute_upstream_prediction": ("gauge", {"upstream", "state"}),
    "prefixroute_ladder_tokens_total": ("counter", {"rung"}),
    "prefixroute_ladder_unreported_tokens_total": ("counter", {"rung"}),
    "prefixroute_shadow_decisions_total": ("counter", {"strategy", "agreement"}),
    "prefixroute_shadow_worse_seconds_total": ("counter", {"strategy"}),
    "prefixroute_shadow_better_seconds_total": ("counter", {"strategy"}),
    "prefixroute_shadow_faults_total": ("counter", {"strategy"}),
    "prefixroute_probes_total": ("counter", {"upstream", "outcome"}),
    "prefixroute_config_reloads_total": ("counter", {"outcome"}),
    "prefixroute_config_last_reload_successful": ("gauge", set[str]()),
    "prefixroute_config_last_reload_success_timestamp_seconds": ("gauge", set[str]()),
    "prefixroute_event_loop_lag_seconds": ("histogram", set[str]()),
    "prefixroute_build_info": ("gauge", {"version", "strategy"}),
    "prefixroute_kv_events_total": ("counter", {"upstream", "event"}),
    "prefixroute_kv_events_lag_seconds": ("gauge", {"upstream"}),
    "prefixroute_kv_events_state": ("gauge", {"upstream", "state"}),
    "prefixroute_kv_events_gaps_total": ("counter", {"upstream"}),
    "prefixroute_kv_events_restarts_total": ("counter", {"upstream"}),
    "prefixroute_kv_events_undecodable_total": ("counter", {"upstream"}),
    "prefixroute_kv_events_orphan_blocks_total": ("counter", {"upstream"}),
    "prefixroute_exact_index_blocks": ("gauge", {"upstream"}),
    "prefixroute_exact_index_bytes": ("gauge", set[str]()),
}
BODY = b'{"model":"llama","messages":[{"role":"user","content":"%s"}]}' % (b"once upon a time " * 200)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def router() -> Router:
    instances = [
        Instance("gpu-a:8000", "http://gpu-a:8000", 0, frozenset({"llama"})),
        Instance("gpu-b:8000", "http://gpu-b:8000", 1),
    ]
    shadows = Shadows([Shadow("round_robin", RoundRobin())], ExpectedLatency(), Random(1))
    return Router(instances, LeastOutstanding(), BlockHasher(64, seed=1), Random(1), shadows=shadows)


@pytest.fixture
def metrics(router: Router) -> Metrics:
    return Metrics(router, strategy="least_outstanding_requests", version="9.9", clock=Clock())


def a_record(
    *,
    route: str = "/v1/chat/completions",
    model: str | None = "llama",
    upstream: str | None = "gpu-a:8000",
    outcome: Outcome = Outcome.OK,
) -> RequestRecord:
    return RequestRecord(
        "req-1", "POST", route, "aiohttp", 0.0,
        model=model, upstream=upstream, outcome=outcome, status=200, duration_s=1.5, ttft_s=0.25, streamed=True,
        decision_s=30e-6, reason=Reason.COLD, prompt_tokens=900, matched_tokens=640,
        attempts=[AttemptOutcome.ANSWERED],
    )  # fmt: skip


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = metrics.exposition()[0].decode()
    return {(s.name, frozenset(s.labels.items())): s.value for family in read_text(text) for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((f"prefixroute_{name}", frozenset(labels.items())))


def models(metrics: Metrics) -> set[str]:
    return {dict(labels)["model"] for name, labels in samples(metrics) if name == "prefixroute_requests_total"}


def declared(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line.startswith("# TYPE prefixroute_"):
            _, _, name, kind = line.split()
            yield name, kind


def test_the_families_are_those_that_are_promised(metrics: Metrics) -> None:
    metrics.record(a_record())

    text = metrics.exposition()[0].decode()

    assert dict(declared(text)) == {name: kind for name, (kind, _) in FAMILIES.items()}
    for family in read_text(text):
        for sample in family.samples:
            if family.name.startswith("prefixroute_"):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                assert set(sample.labels) - {"le"} == FAMILIES[name][1]


def test_every_family_explains_itself(metrics: Metrics) -> None:
    assert all(family.documentation for family in read_text(metrics.exposition()[0].decode()))


def test_counters_with_closed_labels_begin_at_zero(metrics: Metrics) -> None:
    assert {r: value(metrics, "decisions_total", reason=r.value) for r in Reason} == dict.fromkeys(Reason, 0)
    assert all(value(metrics, "attempts_total", outcome=o.value) == 0 for o in AttemptOutcome)
    assert all(value(metrics, "prompts_without_key_total", cause=c.value) == 0 for c in NoKeyCause)
    assert value(metrics, "probes_total", upstream="gpu-b:8000", outcome="refused") == 0
    assert value(metrics, "client_disconnects_total") == 0
    assert value(metrics, "decision_duration_seconds_count") == 0


def test_one_record_is_counted_everywhere_once(metrics: Metrics) -> None:
    record = a_record()
    record.attempts = [AttemptOutcome.BUSY, AttemptOutcome.BUSY, AttemptOutcome.ANSWERED]
    record.no_key = NoKeyCause.NO_PROMPT

    metrics.record(record)

    labels = {"route": "/v1/chat/completions", "model": "llama", "upstream": "gpu-a:8000", "lane": "aiohttp"}
    assert value(metrics, "requests_total", outcome="ok", **labels) == 1
    assert value(metrics, "request_duration_seconds_sum", route="/v1/chat/completions") == 1.5
    assert value(metrics, "time_to_first_byte_seconds_sum", upstream="gpu-a:8000", streamed="true") == 0.25
    assert value(metrics, "time_to_first_byte_seconds_count", upstream="gpu-a:8000", streamed="false") is None
    assert value(metrics, "decision_duration_seconds_count") == 1
    assert value(metrics, "decisions_total", reason="cold") == 1
    assert value(metrics, "prompt_tokens_total") == 900
    assert value(metrics, "matched_tokens_total") == 640
    assert value(metrics, "prompts_without_key_total", cause="no_prompt") == 1
    assert value(metrics, "attempts_total", outcome="busy") == 2
    assert value(metrics, "attempts_total", outcome="answered") == 1


def test_a_request_that_was_never_decided_counts_no_tokens(metrics: Metrics) -> None:
    record = a_record(model=None, upstream=None, outcome=Outcome.REFUSED)
    record.reason, record.decision_s, record.ttft_s, record.attempts = None, None, None, []

    metrics.record(record)

    labels = {"route": "/v1/chat/completions", "model": "none", "upstream": "none", "lane": "aiohttp"}
    assert value(metrics, "requests_total", outcome="refused", **labels) == 1
    assert value(metrics, "prompt_tokens_total") == 0


def test_cached_and_reported_tokens_count_the_same_answers(metrics: Metrics) -> None:
    for cached, reported in ((512, 900), (None, 100), (64, None), (0, 100)):
        record = a_record()
        record.cached_tokens, record.reported_prompt_tokens = cached, reported
        metrics.record(record)

    assert value(metrics, "cached_tokens_total") == 512
    assert value(metrics, "reported_prompt_tokens_total") == 1000


def test_a_client_that_left_is_counted(metrics: Metrics) -> None:
    metrics.record(a_record(outcome=Outcome.CLIENT_GONE))
    metrics.record(a_record())

    assert value(metrics, "client_disconnects_total") == 1


def test_time_histograms_reach_ten_minutes_and_decisions_begin_at_microseconds(metrics: Metrics) -> None:
    record = a_record()
    record.duration_s, record.decision_s = 0.001, 5e-6
    metrics.record(record)
    record.duration_s, record.decision_s = 599.0, 0.2
    metrics.record(record)

    bounds: dict[str, list[float]] = {}
    for family in read_text(metrics.exposition()[0].decode()):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bounds.setdefault(family.name, []).append(float(sample.labels["le"]))

    times, decisions = bounds["prefixroute_request_duration_seconds"], bounds["prefixroute_decision_duration_seconds"]
    assert (times[0], times[-2:]) == (0.001, [600.0, float("inf")])
    assert bounds["prefixroute_time_to_first_byte_seconds"] == times
    assert (decisions[0], decisions[-2:]) == (5e-6, [0.1, float("inf")])
    route = "/v1/chat/completions"
    in_bucket = [value(metrics, "request_duration_seconds_bucket", route=route, le=le) for le in ("0.001", "600.0")]
    assert in_bucket == [1, 2]  # a bound belongs to its bucket, and buckets add up
    assert value(metrics, "decision_duration_seconds_bucket", le="0.1") == 1
    assert value(metrics, "decision_duration_seconds_bucket", le="+Inf") == 2


def test_a_model_that_no_instance_lists_is_other(metrics: Metrics, router: Router) -> None:
    metrics.record(a_record(model="sk-secret\n"))
    assert models(metrics) == {"other"}
    assert b"sk-secret" not in metrics.exposition()[0]

    router.fleet.learned_models("gpu-b:8000", frozenset({"mistral"}))
    metrics.record(a_record(model="mistral"))
    assert models(metrics) == {"other", "mistral"}


def test_a_thousand_unknown_models_and_routes_add_a_bounded_number_of_series(metrics: Metrics) -> None:
    for i in range(1000):
        metrics.record(a_record(model=f"model-{i}", outcome=list(Outcome)[i % 11]))
    n_series = len(samples(metrics))
    for i in range(1000, 3000):
        metrics.record(a_record(model=f"model-{i}", outcome=list(Outcome)[i % 11]))
    assert len(samples(metrics)) == n_series

    for i in range(1000):
        metrics.record(a_record(route=f"/scan/{i}"))
    n_series = len(samples(metrics))
    for i in range(1000, 3000):
        metrics.record(a_record(route=f"/scan/{i}"))
    assert len(samples(metrics)) == n_series


def test_known_models_are_bounded_too(router: Router) -> None:
    """An instance may list any number of adapters, and any length of name."""
    metrics = Metrics(router, strategy="s")
    router.fleet.learned_models("gpu-b:8000", frozenset({f"lora-{i}" for i in range(1000)} | {"x" * 10_000}))

    for i in range(1000):
        metrics.record(a_record(model=f"lora-{i}"))
    metrics.record(a_record(model="x" * 10_000))

    labels = {dict(labels)["model"] for name, labels in samples(metrics) if name == "prefixroute_requests_total"}
    assert len(labels) == MAX_MODELS + 1
    assert "other" in labels


def test_every_instance_of_a_large_fleet_has_its_own_label() -> None:
    instances = [Instance(f"gpu-{slot}", f"http://gpu-{slot}", slot) for slot in range(300)]
    metrics = Metrics(Router(instances, LeastOutstanding(), BlockHasher(256, 1), Random(1)), strategy="s")
    for instance in instances:
        metrics.record(a_record(upstream=instance.name))

    counted = {dict(labels)["upstream"] for name, labels in samples(metrics) if name == "prefixroute_requests_total"}
    assert counted == {instance.name for instance in instances}


def test_no_request_is_lost_when_the_series_are_used_up(router: Router) -> None:
    metrics = Metrics(router, strategy="s")
    router.fleet.learned_models("gpu-b:8000", frozenset(f"lora-{i}" for i in range(MAX_MODELS)))
    n = 0
    for i in range(MAX_MODELS):
        for outcome in Outcome:
            for upstream in ("gpu-a:8000", "gpu-b:8000", None):
                metrics.record(a_record(model=f"lora-{i}", outcome=outcome, upstream=upstream))
                n += 1

    counted = [v for (name, _), v in samples(metrics).items() if name == "prefixroute_requests_total"]
    assert sum(counted) == n > MAX_REQUEST_SERIES
    assert len(counted) <= MAX_REQUEST_SERIES + 3 * len(Outcome)


def test_what_the_router_knows_is_read_at_the_scrape(router: Router, metrics: Metrics) -> None:
    prompt = read_prompt(Api.CHAT, BODY.replace(b"}]}", b'}],"stream":true}'))
    router.fleet.connect_failed("gpu-b:8000", 1000.0)
    router.fleet.answered("gpu-a:8000")
    with router.lease(router.read(prompt), now_s=1000.0) as lease:
        assert value(metrics, "in_flight", upstream="gpu-a:8000") == 1
        assert value(metrics, "pending_prefill_tokens", upstream="gpu-a:8000") == pytest.approx(
            router.load.of(0).pending_work
        )
        assert value(metrics, "index_blocks", upstream="gpu-a:8000") == len(lease.request.chain) > 0
        assert value(metrics, "index_bytes") == router.index.n_bytes > 0
    router.fleet.drain("gpu-a:8000")

    assert value(metrics, "in_flight", upstream="gpu-a:8000") == 0
    assert value(metrics, "pending_prefill_tokens", upstream="gpu-a:8000") == 0
    assert value(metrics, "kv_capacity_tokens", upstream="gpu-b:8000") == 1_000_000
    assert value(metrics, "learned_prefill_tokens_per_second", upstream="gpu-b:8000") == 12_000
    states = {
        dict(labels)["state"]: v
        for (name, labels), v in samples(metrics).items()
        if name == "prefixroute_upstream_state" and ("upstream", "gpu-a:8000") in labels
    }
    assert states == {**{state.value: float(state is State.UP) for state in State}, "draining": 1}
    assert value(metrics, "upstream_state", upstream="gpu-b:8000", state="ejected") == 1


def test_probes_and_waiting_requests_and_the_build_are_shown(metrics: Metrics) -> None:
    metrics.probed("gpu-a:8000", "passed")
    metrics.probed("gpu-a:8000", ProbeFailure.TIMEOUT.value)
    metrics.probed("gpu-a:8000", "passed")
    metrics.waiting = lambda: 7

    assert value(metrics, "probes_total", upstream="gpu-a:8000", outcome="passed") == 2
    assert value(metrics, "probes_total", upstream="gpu-a:8000", outcome="timeout") == 1
    assert value(metrics, "waiting") == 7
    assert value(metrics, "build_info", version="9.9", strategy="least_outstanding_requests") == 1


def leased(router: Router, metrics: Metrics, cached_tokens: int | None) -> Lease:
    """A request that has been answered and counted."""
    with router.lease(router.read(read_prompt(Api.CHAT, BODY)), now_s=0.0) as lease:
        lease.first_byte(0.1, learn=True)
        if cached_tokens is not None:
            lease.reported(cached_tokens, 2 * lease.request.n_tokens)
    return lease


def test_predictions_are_counted_beside_reports_for_each_instance(router: Router, metrics: Metrics) -> None:
    leases = [leased(router, metrics, 512), leased(router, metrics, 512), leased(router, metrics, None)]
    sums = dict.fromkeys(("gpu-a:8000", "gpu-b:8000"), 0)
    for lease in leases[:2]:
        sums[lease.instance.name] += lease.decision.candidate.matched_tokens
    for name, predicted in sums.items():
        n = sum(lease.instance.name == name for lease in leases[:2])
        assert value(metrics, "predicted_cached_tokens_total", upstream=name) == predicted
        # Reported in tokens of which the prompt has twice as many.
        assert value(metrics, "reported_cached_tokens_total", upstream=name) == 256 * n
        assert value(metrics, "upstream_prediction", upstream=name, state="unknown") == 1
        assert value(metrics, "upstream_prediction", upstream=name, state="sound") == 0


def test_the_ladder_counts_requests_with_and_without_a_report_apart(router: Router, metrics: Metrics) -> None:
    leases = [leased(router, metrics, 512), leased(router, metrics, None)]
    n_tokens = leases[0].request.n_tokens
    assert value(metrics, "ladder_tokens_total", rung="prompt") == n_tokens
    assert value(metrics, "ladder_tokens_total", rung="chosen") == 0
    assert value(metrics, "ladder_tokens_total", rung="reported") == 256
    assert value(metrics, "ladder_unreported_tokens_total", rung="prompt") == n_tokens
    assert value(metrics, "ladder_unreported_tokens_total", rung="reachable") == len(leases[0].request.chain) * 64
    assert value(metrics, "ladder_unreported_tokens_total", rung="reported") is None


def test_shadows_are_shown(router: Router, metrics: Metrics) -> None:
    for _ in range(5):
        leased(router, metrics, None)
    by_agreement = [
        value(metrics, "shadow_decisions_total", strategy="round_robin", agreement=agreement)
        for agreement in ("same", "different")
    ]
    assert sum(n or 0 for n in by_agreement) == 5
    assert value(metrics, "shadow_faults_total", strategy="round_robin") == 0


def test_held_requests_are_timed_and_others_are_not(metrics: Metrics) -> None:
    metrics.record(a_record())
    held = a_record()
    held.held_s = 0.75
    metrics.record(held)
    assert value(metrics, "held_seconds_count") == 1
    assert value(metrics, "held_seconds_sum") == 0.75
    assert value(metrics, "held_requests") == 0


def test_what_instances_say_of_their_caches_is_shown(metrics: Metrics) -> None:
    metrics.exact = exact = ExactIndex(seed=1, max_bytes=1 << 20)
    source = exact.open(0)
    exact.set_trust(source, Trust.TRUSTED)
    exact.apply(source, Stored([1, 2], None, bytes(2 * 16 * 4), 16))
    exact.apply(source, Removed([2]))
    exact.apply(source, Stored([3, 4, 5], 77, bytes(3 * 16 * 4), 16))
    source.counts.gaps, source.counts.lag_s = 3, 0.5

    assert value(metrics, "kv_events_total", upstream="gpu-a:8000", event="stored") == 2
    assert value(metrics, "kv_events_total", upstream="gpu-a:8000", event="removed") == 1
    assert value(metrics, "kv_events_total", upstream="gpu-a:8000", event="unknown") == 0
    assert value(metrics, "kv_events_state", upstream="gpu-a:8000", state="trusted") == 1
    assert value(metrics, "kv_events_state", upstream="gpu-a:8000", state="off") == 0
    assert value(metrics, "kv_events_state", upstream="gpu-b:8000", state="off") == 1
    assert value(metrics, "kv_events_gaps_total", upstream="gpu-a:8000") == 3
    assert value(metrics, "kv_events_lag_seconds", upstream="gpu-a:8000") == 0.5
    assert value(metrics, "kv_events_orphan_blocks_total", upstream="gpu-a:8000") == 3
    assert value(metrics, "exact_index_blocks", upstream="gpu-a:8000") == 1
    assert value(metrics, "exact_index_bytes") == exact.n_bytes > 0


def test_a_snapshot_stays_as_it_was(metrics: Metrics) -> None:
    snapshot = metrics.snapshot()
    metrics.record(a_record())

    assert b"prefixroute_requests_total{" not in encode(snapshot, "")[0]


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain;version=0.0.4", "application/openmetrics-text;version=x"])
def test_the_classic_format_is_the_default(metrics: Metrics, accept: str) -> None:
    body, content_type = metrics.exposition(accept)

    assert content_type.startswith("text/plain; version=0.0.4")
    assert body.endswith(b"\n")
    assert not body.endswith(b"# EOF\n")


def test_openmetrics_is_spoken_to_who_asks(metrics: Metrics) -> None:
    metrics.record(a_record())

    body, content_type = metrics.exposition(
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    )

    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = read_openmetrics(body.decode())  # type: ignore[no-untyped-call]  # untyped upstream
    names = {family.name for family in families}
    assert {name.removesuffix("_total") for name in FAMILIES} <= names


def test_two_routers_in_one_process_share_nothing(router: Router) -> None:
    first, second = Metrics(router, strategy="s"), Metrics(router, strategy="s")

    first.record(a_record())

    assert value(first, "decisions_total", reason="cold") == 1
    assert value(second, "decisions_total", reason="cold") == 0


def test_the_process_is_shown(metrics: Metrics) -> None:
    assert b"process_resident_memory_bytes" in metrics.exposition()[0]


def test_refused_requests_are_counted_by_the_code_of_the_error(metrics: Metrics) -> None:
    for outcome, error in (
        (Outcome.REFUSED, "key_limit_exceeded"),
        (Outcome.REFUSED, "key_limit_exceeded"),
        (Outcome.REFUSED, "invalid_api_key"),
        (Outcome.UNREACHABLE, "upstream_unreachable"),
        (Outcome.OK, None),
    ):
        record = a_record()
        record.outcome, record.error = outcome, error
        metrics.record(record)
    text, _ = metrics.exposition()
    assert [line for line in text.decode().splitlines() if line.startswith("prefixroute_refused_requests_total{")] == [
        'prefixroute_refused_requests_total{code="key_limit_exceeded"} 2.0',
        'prefixroute_refused_requests_total{code="invalid_api_key"} 1.0',
    ]
