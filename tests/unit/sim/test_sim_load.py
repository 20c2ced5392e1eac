"""A trace at another rate, and what does not fit into a server."""

import pytest

from prefixroute.errors import ConfigError
from prefixroute.sim.load import MAX_COMPRESSION, natural_rate, only_fitting, overlay
from prefixroute.sim.traces import Trace, TraceRequest
from prefixroute.sim.workload import SimRequest, Workload

# 100 requests, one a second; each two of them share their first block.
TRACE = Trace(
    [TraceRequest(float(n), 1_100 + n, 50, (n // 2, 1_000 + n, 2_000 + n)) for n in range(100)], block_tokens=512
)


def test_at_its_own_rate_a_trace_is_what_it_was() -> None:
    workload = overlay(TRACE, "trace", 100, natural_rate(TRACE))
    assert [request.arrival_s for request in workload.requests] == pytest.approx(range(100))
    assert [request.input_tokens for request in workload.requests] == [1_100 + n for n in range(100)]
    # Full blocks only: 1,100 tokens are two and something.
    assert all(len(request.hashes) == 2 for request in workload.requests)
    firsts = [request.hashes[0] for request in workload.requests]
    assert firsts[0::2] == firsts[1::2]
    assert len(set(firsts)) == 50


@pytest.mark.parametrize("rate", [0.1, 1.0, 1.4, 1.6, 2.9, 10.0])
def test_the_rate_is_the_one_asked_for(rate: float) -> None:
    requests = overlay(TRACE, "trace", 100, rate).requests
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert len(requests) / arrivals[-1] == pytest.approx(rate, rel=0.15)


def test_time_is_compressed_a_little_and_then_copies_are_laid_over() -> None:
    """Two requests that share a block come a second apart in the trace."""
    requests = overlay(TRACE, "trace", 100, 6.0).requests
    by_block: dict[int, list[float]] = {}
    for request in requests:
        by_block.setdefault(request.hashes[0], []).append(request.arrival_s)
    gaps = [times[1] - times[0] for times in by_block.values() if len(times) == 2]
    assert gaps
    assert min(gaps) >= 1 / MAX_COMPRESSION - 1e-9


def test_copies_share_nothing_and_are_disjoint_windows_while_the_trace_suffices() -> None:
    requests = overlay(TRACE, "trace", 100, 6.0).requests
    assert len({request.input_tokens for request in requests}) == 100
    blocks = [request.hashes[1] for request in requests]
    assert len(set(blocks)) == 100


def test_a_copy_has_each_request_once() -> None:
    """So a workload may be shorter than was asked for."""
    assert len(overlay(TRACE, "trace", 1_000, 1.0).requests) == 100
    overlaid = overlay(TRACE, "trace", 1_000, 4.0).requests
    assert len(overlaid) == 300
    assert len({request.hashes[1] for request in overlaid}) == 300


def test_seeds_are_other_windows() -> None:
    windows = {overlay(TRACE, "trace", 10, 1.0, seed).requests[0].input_tokens for seed in range(5)}
    assert len(windows) == 5
    assert overlay(TRACE, "trace", 10, 1.0, 0).requests[0].input_tokens == 1_100


def test_a_trace_without_time_in_it() -> None:
    assert len(overlay(Trace([TraceRequest(0.0, 10, 1, (1,))]), "trace", 5, 2.0).requests) == 2


def test_a_workload_of_nothing() -> None:
    with pytest.raises(ConfigError, match="at least one request"):
        overlay(TRACE, "trace", 0, 1.0)


def test_what_is_too_long_is_left_out_with_what_follows_it() -> None:
    def ask(input_tokens: int, after: int | None = None) -> SimRequest:
        return SimRequest(1.0, input_tokens, 10, (), after)

    asked = Workload("w", 64, [ask(100), ask(991), ask(50, 1), ask(60, 2), ask(70, 0), ask(990, 4), ask(80, 5)])
    left = only_fitting(asked, 1_000)
    assert [request.input_tokens for request in left.requests] == [100, 70, 990, 80]
    assert [request.after for request in left.requests] == [None, 0, 1, 2]
    assert only_fitting(left, 1_000) == left


@pytest.mark.parametrize("rate", [1e6, 1e300])
def test_a_rate_far_above_the_traces_makes_no_more_copies_than_requests(rate: float) -> None:
    """A trace of one request a year, say: millions of copies would be made for their first requests."""
    requests = overlay(TRACE, "trace", 50, rate).requests
    assert [request.arrival_s for request in requests] == [0.0] * 50
    assert len({request.hashes[0] for request in requests}) == 50
