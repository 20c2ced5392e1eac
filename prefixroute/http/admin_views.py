"""What the admin plane shows of the fleet and of a decision, as plain data."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from yarl import URL

from prefixroute.core.fleet import Instance, InstanceState, ProbeFailure, State
from prefixroute.core.group import Group
from prefixroute.core.ladder import Ladder, gaps
from prefixroute.core.policy import Candidate, Decision
from prefixroute.core.router import Explanation, Router
from prefixroute.record import Decided, RequestRecord


def instance_view(router: Router, state: InstanceState, now_s: float) -> dict[str, Any]:
    """An instance as the router sees it. Rates in tokens per second."""
    instance, load = state.instance, router.load
    own, rate, _ = load.observe(instance.slot, now_s, load.fleet_rate())
    return {
        "name": instance.name,
        "url": _plain_url(instance),
        "state": state.state.value,
        "draining": state.draining,
        "failure": _failure(state),
        "failure_reason": state.reason if state.last_probe is _probe_failure(state) else None,
        "models": None if state.models is None else sorted(state.models),
        "in_flight": own.in_flight,
        "pending_prefill_tokens": round(own.pending_work),
        "index_blocks": router.index.n_blocks(instance.slot),
        "kv_events": router.trust(instance.name).value,
        "capacity_tokens": router.capacity_tokens(instance.name),
        "capacity_told": router.is_capacity_told(instance.name),
        "prediction": router.audit.feedback.of(instance.slot).prediction.value,
        "prefill_tokens_per_second": round(rate, 1),
    }


def states_view(router: Router) -> Mapping[str, str]:
    """Instance name → its state, or that it drains."""
    return {s.instance.name: "draining" if s.draining else s.state.value for s in router.fleet.states()}


def explanation_view(router: Router, explanation: Explanation, strategy: str, group: Group | None) -> dict[str, Any]:
    """Where a request would go, and from what. No text of the prompt. `group`: whom it is for; None: any instance."""
    prompt, decision = explanation.facts.prompt, explanation.decision
    return {
        "model": prompt.model,
        "prompt_tokens": explanation.facts.n_tokens,
        "blocks": explanation.n_blocks,
        "exact_tokens": explanation.has_exact_tokens,
        "no_key": None if prompt.no_key is None else prompt.no_key.value,
        "strategy": strategy if group is None else group.strategy,
        "candidates": [
            {**_candidate_view(candidate, cost_s), "state": router.fleet.state(candidate.instance.name).state.value}
            for candidate, cost_s in _with_costs(explanation.candidates, decision)
        ],
        "chosen": None if decision is None else decision.instance.name,
        "reason": "no_instance" if decision is None else decision.reason.value,
        "held": explanation.is_held,
    }


def record_view(record: RequestRecord, strategy: str, model: str) -> dict[str, Any]:
    """What was decided for a request, from what, and how it went. `model`: as it may be shown. Times in seconds."""
    return {
        "request_id": record.request_id,
        "route": record.route,
        "model": model,
        "strategy": record.strategy or strategy,
        "streamed": record.streamed,
        "prompt_tokens": record.prompt_tokens,
        "no_key": None if record.no_key is None else record.no_key.value,
        "decisions": [_decided_view(decided) for decided in record.decisions],
        "held_s": record.held_s,
        "waited_s": record.waited_s,
        "decision_s": record.decision_s,
        "attempts": [attempt.value for attempt in record.attempts],
        "over": record.is_over,
        "outcome": record.outcome.value if record.is_over else None,
        "error": record.error,
        "status": record.status,
        "ttft_s": record.ttft_s,
        "duration_s": record.duration_s if record.is_over else None,
        "upstream": record.upstream,
        "matched_tokens": record.matched_tokens,
        "cached_tokens": record.cached_tokens,
        "reported_prompt_tokens": record.reported_prompt_tokens,
    }


def ladder_view(ladder: Ladder) -> dict[str, Any]:
    """Tokens by rung, over requests whose instance reported and over the others, and the gaps between rungs."""
    unreported = ladder.unreported.by_name()
    del unreported["reported"]
    return {
        "requests": ladder.reported.n_requests,
        "tokens": {rung: round(n) for rung, n in ladder.reported.by_name().items()},
        "gaps": {gap.value: share for gap, share in gaps(ladder.reported).items()},
        "unreported": {
            "requests": ladder.unreported.n_requests,
            "tokens": {rung: round(n) for rung, n in unreported.items()},
        },
        "sampling": ladder.sampling,
    }


def _decided_view(decided: Decided) -> dict[str, Any]:
    decision = decided.decision
    return {
        "at_s": decided.at_s,
        "candidates": [_candidate_view(*one) for one in _with_costs(decided.candidates, decision)],
        "chosen": decision.instance.name,
        "reason": decision.reason.value,
    }


def _with_costs(candidates: Sequence[Candidate], decision: Decision | None) -> Iterable[tuple[Candidate, float | None]]:
    if decision is None or decision.scores is None:
        return ((candidate, None) for candidate in candidates)
    return zip(candidates, map(float, decision.scores), strict=True)


def _candidate_view(candidate: Candidate, cost_s: float | None) -> dict[str, Any]:
    return {
        "instance": candidate.instance.name,
        "matched_tokens": candidate.matched_tokens,
        "exact": candidate.exact,
        "in_flight": candidate.in_flight,
        "pending_prefill_tokens": round(candidate.pending_work),
        "held_prefill_tokens": round(candidate.held_work),
        "cost_s": cost_s,
    }


def _failure(state: InstanceState) -> str | None:
    failure = _probe_failure(state)
    if failure is not None:
        return failure.value
    return "unreachable" if state.state is State.EJECTED else None


def _probe_failure(state: InstanceState) -> ProbeFailure | None:
    # One that starts was never well, so that a single probe tells why it is not yet.
    return state.last_probe if state.state is State.STARTING else state.failure


def _plain_url(instance: Instance) -> str:
    # Settings refuse a password in a URL; whoever builds the fleet in code may have put one there.
    if instance.url.startswith("unix:"):
        return instance.url
    return str(URL(instance.url, encoded=True).with_user(None))
