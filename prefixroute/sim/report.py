"""From finished requests to the figures of a row, and from rows of several seeds to one."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prefixroute.core.load import LoadConstants, prefill_work
from prefixroute.demo.report import percentile
from prefixroute.sim.run import Done
from prefixroute.sim.workload import SimRequest, Workload

_POSITION_SCALE_TOKENS = LoadConstants().position_scale_tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """What one strategy made of one workload. Ratios are shares of all prompt tokens; times are in seconds.

    `cached_ratio`: as the servers reported it. `matched_ratio`: as the router had predicted it. `ideal_ratio`: what one
    cache without bound would have had. `pooled_ratio`: the same of one with all instances' capacity, LRU. `imbalance`:
    prefill work computed by the instance that computed most, over the mean of all; 1 is even. `n_left_out`: requests
    too long for any server. `n_attempts`: more than `n` if instances died.
    """

    n: int
    n_left_out: int
    n_attempts: int
    input_tokens: int
    output_tokens: int
    computed_tokens: int
    cached_ratio: float
    matched_ratio: float
    ideal_ratio: float
    pooled_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    imbalance: float
    duration_s: float


# Of these a mean over seeds is wanted; the rest is the same or is told in runs.
RATIOS = ("cached_ratio", "matched_ratio", "ideal_ratio", "pooled_ratio")
TIMES = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "e2e_mean_s", "e2e_p50_s", "e2e_p99_s")


def summarise(
    workload: Workload, done: Sequence[Done], *, n_instances: int, kv_tokens: int, n_left_out: int
) -> Figures:
    """`done`: of each request of the workload, in its order."""
    input_tokens = sum(one.input_tokens for one in done)
    cached_tokens = sum(one.cached_tokens for one in done)
    work = [0.0] * n_instances
    for one in done:
        work[one.instance] += prefill_work(
            one.cached_tokens, one.input_tokens - one.cached_tokens, _POSITION_SCALE_TOKENS
        )
    ttfts_s = sorted(one.ttft_s for one in done)
    e2es_s = sorted(one.e2e_s for one in done)
    in_order = [workload.requests[place] for place in sorted(range(len(done)), key=lambda place: done[place].arrived_s)]
    block_tokens = workload.block_tokens
    return Figures(
        n=len(done),
        n_left_out=n_left_out,
        n_attempts=sum(one.n_attempts for one in done),
        input_tokens=input_tokens,
        output_tokens=sum(one.output_tokens for one in done),
        computed_tokens=input_tokens - cached_tokens,
        cached_ratio=cached_tokens / input_tokens,
        matched_ratio=sum(one.matched_tokens for one in done) / input_tokens,
        ideal_ratio=ideal_tokens(in_order, block_tokens) / input_tokens,
        pooled_ratio=pooled_tokens(in_order, block_tokens, n_instances * (kv_tokens // block_tokens)) / input_tokens,
        ttft_mean_s=sum(ttfts_s) / len(done),
        ttft_p50_s=_percentile(ttfts_s, 0.5),
        ttft_p90_s=_percentile(ttfts_s, 0.9),
        ttft_p99_s=_percentile(ttfts_s, 0.99),
        e2e_mean_s=sum(e2es_s) / len(done),
        e2e_p50_s=_percentile(e2es_s, 0.5),
        e2e_p99_s=_percentile(e2es_s, 0.99),
        imbalance=max(work) * n_instances / sum(work),
        duration_s=max(one.arrived_s + one.e2e_s for one in done),
    )


def ideal_tokens(requests: Iterable[SimRequest], block_tokens: int) -> int:
    """Prompt tokens that a cache which forgets nothing has, if each request's prompt and answer are in it at once."""
    known: set[int] = set()
    total = 0
    for request in requests:
        total += _n_known(request, block_tokens, known) * block_tokens
        known.update(_computed(request, block_tokens))
    return total


def pooled_tokens(requests: Iterable[SimRequest], block_tokens: int, n_blocks: int) -> int:
    """The same of a cache that holds `n_blocks` and forgets what was used least recently, the end of a prompt first."""
    held: OrderedDict[int, None] = OrderedDict()
    total = 0
    for request in requests:
        total += _n_known(request, block_tokens, held) * block_tokens
        for block in reversed(_computed(request, block_tokens)):
            held[block] = None
            held.move_to_end(block)
        while len(held) > n_blocks:
            held.popitem(last=False)
    return total


def _n_known(request: SimRequest, block_tokens: int, known: Container[int]) -> int:
    """Leading blocks of the prompt that are known. Its last token is always computed."""
    n_blocks = min(len(request.hashes), (request.input_tokens - 1) // block_tokens)
    # Whoever knows a block knows those before it.
    return bisect_left(range(n_blocks), True, key=lambda place: request.hashes[place] not in known)


def _computed(request: SimRequest, block_tokens: int) -> Sequence[int]:
    """What an engine has of it in the end: the last token of an answer is told, and never put in."""
    return request.hashes[: (request.input_tokens + request.output_tokens - 1) // block_tokens]


def mean_of(figures: Sequence[Figures]) -> dict[str, Any]:
    """Each figure's mean over seeds; `spread`: half of what lies between least and most, as a share of the mean."""
    names = Figures.__slots__
    values = {name: [getattr(one, name) for one in figures] for name in names}
    means = {name: sum(of_all) / len(figures) for name, of_all in values.items()}
    spread = {name: (max(values[name]) - min(values[name])) / 2 / (means[name] or 1) for name in (*RATIOS, *TIMES)}
    counted = ("n", "n_left_out", "n_attempts", "input_tokens", "output_tokens", "computed_tokens")
    return {**means, **{name: round(means[name]) for name in counted}, "spread": spread}


def _percentile(ordered: Sequence[float], share: float) -> float:
    value = percentile(ordered, share)
    assert value is not None  # noqa: S101  there is at least one request
    return value
