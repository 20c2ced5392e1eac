"""The guard rail in the simulator: it saves the day where hits bring nothing, and costs nothing where they do."""

import pytest

from prefixroute.demo.engine import EngineConfig
from prefixroute.sim.cell import Cell, run_cell
from prefixroute.sim.report import Figures
from prefixroute.sim.sources import Generated

UNGUARDED = "expected_latency:guard_evidence=1000000"


def run(name: str, strategy: str, *, cached_cost: float, rate: float) -> Figures:
    engine = EngineConfig(cached_cost_ratio=cached_cost)
    return run_cell(
        Cell(Generated(name), strategy, n_requests=1_500, n_instances=4, load=None, rate=rate, engine=engine)
    )


def test_hits_that_bring_nothing_lose_their_pull() -> None:
    guarded = run("rag", "expected_latency", cached_cost=1, rate=5.5)
    unguarded = run("rag", UNGUARDED, cached_cost=1, rate=5.5)
    by_load = run("rag", "least_outstanding_requests", cached_cost=1, rate=5.5)
    assert guarded.ttft_mean_s < 0.7 * unguarded.ttft_mean_s
    assert guarded.ttft_p99_s < 0.7 * unguarded.ttft_p99_s
    assert guarded.ttft_mean_s < by_load.ttft_mean_s


@pytest.mark.parametrize("name", ["chat", "rag", "toolagent", "noshare"])
def test_where_hits_keep_their_promise_nothing_changes(name: str) -> None:
    assert run(name, "expected_latency", cached_cost=0, rate=6) == run(name, UNGUARDED, cached_cost=0, rate=6)
