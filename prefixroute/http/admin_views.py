"""What the admin plane shows of the fleet and of a decision, as plain data."""

from collections.abc import Mapping
from typing import Any

from yarl import URL

from prefixroute.core.fleet import Instance, InstanceState, State
from prefixroute.core.policy import Candidate
from prefixroute.core.router import Explanation, Router


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
        "models": None if state.models is None else sorted(state.models),
        "in_flight": own.in_flight,
        "pending_prefill_tokens": round(own.pending_work),
        "index_blocks": router.index.n_blocks(instance.slot),
        "capacity_tokens": router.capacity_tokens(instance.name),
        "prefill_tokens_per_second": round(rate, 1),
    }


def states_view(router: Router) -> Mapping[str, str]:
    """Instance name → its state, or that it drains."""
    return {s.instance.name: "draining" if s.draining else s.state.value for s in router.fleet.states()}


def explanation_view(router: Router, explanation: Explanation, strategy: str) -> dict[str, Any]:
    """Where a request would go, and from what. No text of the prompt."""
    prompt, decision = explanation.facts.prompt, explanation.decision
    scores = decision.scores if decision is not None else None
    return {
        "model": prompt.model,
        "prompt_tokens": explanation.facts.n_tokens,
        "blocks": explanation.n_blocks,
        "no_key": None if prompt.no_key is None else prompt.no_key.value,
        "strategy": strategy,
        "candidates": [
            _candidate_view(router, candidate, None if scores is None else float(scores[i]))
            for i, candidate in enumerate(explanation.candidates)
        ],
        "chosen": None if decision is None else decision.instance.name,
        "reason": "no_instance" if decision is None else decision.reason.value,
    }


def _candidate_view(router: Router, candidate: Candidate, cost_s: float | None) -> dict[str, Any]:
    return {
        "instance": candidate.instance.name,
        "state": router.fleet.state(candidate.instance.name).state.value,
        "matched_tokens": candidate.matched_tokens,
        "in_flight": candidate.in_flight,
        "pending_prefill_tokens": round(candidate.pending_work),
        "cost_s": cost_s,
    }


def _failure(state: InstanceState) -> str | None:
    if state.failure is not None:
        return state.failure.value
    return "unreachable" if state.state is State.EJECTED else None


def _plain_url(instance: Instance) -> str:
    # Settings refuse a password in a URL; whoever builds the fleet in code may have put one there.
    return str(URL(instance.url, encoded=True).with_user(None))
