"""What others know, read at the scrape: router, audit, KV events, tokenizer."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from prometheus_client.core import Metric

from prefixroute.core.audit import Audit
from prefixroute.core.exact import ExactIndex
from prefixroute.core.feedback import Prediction
from prefixroute.core.fleet import Instance, State
from prefixroute.core.kv_sources import Trust
from prefixroute.core.router import Router
from prefixroute.metrics.families import counter, gauge

# Fields of `kv_sources.Counts` that count events.
EVENTS = ("stored", "removed", "cleared", "ignored", "unknown")
_UPSTREAM = ("upstream",)


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What is told of exact tokens. `states`: every one there is; counts by outcome, each outcome in them."""

    state: str = "off"
    states: Sequence[str] = ("off",)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    verdicts: Mapping[str, int] = field(default_factory=dict)
    checks: Mapping[str, int] = field(default_factory=dict)


class ReloadOutcome(Enum):
    """What became of a change of the configuration. Closed: values are metric labels."""

    APPLIED = "applied"
    UNCHANGED = "unchanged"
    """It was read again, and says what it said."""
    REFUSED = "refused"
    """It is wrong: the one before stays in force."""


@dataclass(slots=True)
class ReloadFacts:
    """Of changes of the configuration since the start. `time_s`: when that in force was read, by the wall clock."""

    n: dict[ReloadOutcome, int] = field(default_factory=lambda: dict.fromkeys(ReloadOutcome, 0))
    is_good: bool = True
    time_s: float = field(default_factory=time.time)

    def note(self, outcome: ReloadOutcome) -> None:
        self.n[outcome] += 1
        self.is_good = outcome is not ReloadOutcome.REFUSED
        if self.is_good:
            self.time_s = time.time()


def router_families(router: Router, now_s: float) -> Iterator[Metric]:
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
    there = {name: n for (name,), n in in_flight}
    for name, n in router.leaving().items():
        there[name] = there.get(name, 0) + n
    in_flight = [((name,), n) for name, n in there.items()]
    weight = load.guard.weight
    yield gauge("in_flight", "Requests on the instance now.", _UPSTREAM, in_flight)
    yield gauge("pending_prefill_tokens", "Prefill work not yet answered by a first byte.", _UPSTREAM, pending)
    yield gauge(
        "upstream_state", "1 for the state the instance is in; draining besides.", ("upstream", "state"), states
    )
    yield gauge("index_blocks", "Blocks the instance is thought to hold.", _UPSTREAM, blocks)
    yield gauge("index_bytes", "Memory of the prefix index, estimated.", (), [((), index.n_bytes)])
    yield gauge("learned_prefill_tokens_per_second", "Prefill speed learned so far.", _UPSTREAM, rates)
    yield gauge("kv_capacity_tokens", "Size of the KV cache, as told, learned or assumed.", _UPSTREAM, capacities)
    yield gauge(
        "affinity_weight", "What a match counts for: 1, or less while matches bring nothing.", (), [((), weight)]
    )
    yield gauge("held_requests", "Requests held because their instance is busy.", (), [((), len(router.held))])
    yield counter("policy_faults", "Decisions in which the strategy failed.", (), [((), router.n_policy_faults)])


def audit_families(audit: Audit, instances: Sequence[Instance]) -> Iterator[Metric]:
    fed_back = [(i.name, audit.feedback.of(i.slot)) for i in instances]
    yield counter(
        "predicted_cached_tokens",
        "Prompt tokens predicted to be cached, over answers that report cached tokens.",
        _UPSTREAM,
        [((name,), one.predicted_tokens) for name, one in fed_back],
    )
    yield counter(
        "reported_cached_tokens",
        "Of the same answers, tokens reported as cached, scaled to the router's.",
        _UPSTREAM,
        [((name,), one.reported_tokens) for name, one in fed_back],
    )
    yield gauge(
        "upstream_prediction",
        "1 for how predictions of cached tokens hold; unknown: too little is reported.",
        ("upstream", "state"),
        [((name, state.value), int(one.prediction is state)) for name, one in fed_back for state in Prediction],
    )
    yield counter(
        "ladder_tokens",
        "Prompt tokens down the ladder, over answers that report cached tokens.",
        ("rung",),
        [((rung,), n) for rung, n in audit.ladder.reported.by_name().items()],
    )
    yield counter(
        "ladder_unreported_tokens",
        "The same over answers that report none.",
        ("rung",),
        [((rung,), n) for rung, n in audit.ladder.unreported.by_name().items() if rung != "reported"],
    )
    shadows = () if audit.shadows is None else audit.shadows.shadows
    yield counter(
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
        yield counter(name, help_text, ("strategy",), [((s.name,), n) for s, n in zip(shadows, counts, strict=True)])


def event_families(exact: ExactIndex | None, instances: Sequence[Instance]) -> Iterator[Metric]:
    """`exact` None: no instance has KV events."""
    told = () if exact is None else [(i.name, exact.trust(i.slot)) for i in instances]
    states = [((name, one.value), int(one is trust)) for name, trust in told for one in Trust]
    sources = [] if exact is None else [i for i in instances if exact.trust(i.slot) is not Trust.OFF]
    counted = [] if exact is None else [(i.name, exact.counts(i.slot)) for i in sources]
    events = [((name, kind), getattr(counts, kind)) for name, counts in counted for kind in EVENTS]
    lags = [((name,), counts.lag_s) for name, counts in counted if counts.lag_s is not None]
    blocks = [] if exact is None else [((i.name,), exact.n_blocks(i.slot)) for i in sources]
    size = 0 if exact is None else exact.n_bytes
    yield counter("kv_events", "KV-cache events received.", ("upstream", "event"), events)
    yield gauge("kv_events_state", "1 for how far KV-cache events are believed.", ("upstream", "state"), states)
    yield gauge("kv_events_lag_seconds", "Age of the last KV-cache event when applied.", _UPSTREAM, lags)
    for name, help_text, field_name in (
        ("kv_events_gaps", "Times that messages with KV-cache events were missing.", "gaps"),
        ("kv_events_restarts", "Times that an instance published anew.", "restarts"),
        ("kv_events_undecodable", "Messages and KV-cache events not understood.", "undecodable"),
        ("kv_events_orphan_blocks", "Blocks stored whose place is not known.", "orphan_blocks"),
    ):
        yield counter(name, help_text, _UPSTREAM, [((of,), getattr(counts, field_name)) for of, counts in counted])
    yield gauge("exact_index_blocks", "Blocks the instance said it holds.", _UPSTREAM, blocks)
    yield gauge("exact_index_bytes", "Memory of what instances said, estimated.", (), [((), size)])


def reload_families(facts: ReloadFacts) -> Iterator[Metric]:
    outcomes = [((outcome.value,), n) for outcome, n in facts.n.items()]
    yield counter("config_reloads", "Times that the configuration was read again.", ("outcome",), outcomes)
    is_good = [((), int(facts.is_good))]
    yield gauge("config_last_reload_successful", "0: the configuration last read was wrong, see the log.", (), is_good)
    yield gauge(
        "config_last_reload_success_timestamp_seconds",
        "When the configuration in force was last read, Unix time.",
        (),
        [((), facts.time_s)],
    )


def token_families(facts: TokenFacts) -> Iterator[Metric]:
    yield gauge(
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
        yield counter(name, help_text, ("outcome",), [((outcome,), n) for outcome, n in counts.items()])
