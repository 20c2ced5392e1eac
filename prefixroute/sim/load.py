"""A trace at another rate: overlaid copies of it, and only then faster or slower.

Making time run faster shortens pauses that people take, so a trace is sped up by at most `MAX_COMPRESSION`; for more
traffic, several copies of it run at once, each beginning elsewhere and with ids of its own, as if they were the
traffic of other customers. A copy that has come to the trace's end goes on with its beginning.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import count, islice
from math import ceil, floor

from prefixroute.errors import ConfigError
from prefixroute.sim.traces import Trace
from prefixroute.sim.workload import SimRequest, Workload

MAX_COMPRESSION = 1.5
# Beginnings of the windows of successive seeds: as far from all others as can be, whatever the number of seeds.
_GOLDEN = (5**0.5 - 1) / 2


def natural_rate(trace: Trace) -> float:
    """Requests per second of the trace as it is."""
    return len(trace.requests) / _span_s(trace)


def overlay(trace: Trace, name: str, n_requests: int, rate: float, seed: int = 0) -> Workload:
    """The first `n_requests` of as many copies as `rate` (requests per second) takes.

    Copies begin evenly spread over the trace: they are disjoint windows if `n_requests` is at most its length. Each
    request is in a copy at most once, so the workload may be shorter than `n_requests`. Seeds begin at other places;
    seed 0 at the trace's beginning.
    """
    if n_requests < 1 or rate <= 0:
        raise ConfigError("a workload has at least one request, at a rate above 0")
    factor = rate / natural_rate(trace)
    # Each copy brings its first request at once: more copies than requests would bring none earlier.
    n_copies = n_requests if factor > MAX_COMPRESSION * n_requests else max(1, ceil(factor / MAX_COMPRESSION))
    compression = min(MAX_COMPRESSION, factor / n_copies)
    fresh = count().__next__
    begins = [(place / n_copies + seed * _GOLDEN) % 1.0 for place in range(n_copies)]
    copies = [_copy(trace, floor(begin * len(trace.requests)), compression, fresh) for begin in begins]
    requests = islice(merge(*copies, key=lambda request: request.arrival_s), n_requests)
    return Workload(name, trace.block_tokens, list(requests))


def only_fitting(workload: Workload, context_tokens: int) -> Workload:
    """Without the requests that are longer than `context_tokens`, answer included, and those that follow them.

    A server answers those with an error and loses no time on them.
    """
    places: dict[int, int] = {}
    requests: list[SimRequest] = []
    for place, request in enumerate(workload.requests):
        if request.input_tokens + request.output_tokens > context_tokens:
            continue
        after = request.after
        if after is not None:
            if after not in places:
                continue
            if places[after] != after:
                request = SimRequest(  # noqa: PLW2901  the same one, under its new number
                    request.arrival_s, request.input_tokens, request.output_tokens, request.hashes, places[after]
                )
        places[place] = len(requests)
        requests.append(request)
    return Workload(workload.name, workload.block_tokens, requests)


def _copy(trace: Trace, first: int, compression: float, fresh: Callable[[], int]) -> Iterator[SimRequest]:
    """All of the trace from its request `first` on, around to the one before."""
    ids: defaultdict[int, int] = defaultdict(fresh)
    begin_s = trace.requests[first].arrival_s
    for requests, shift_s in ((trace.requests[first:], 0.0), (trace.requests[:first], _span_s(trace))):
        for request in requests:
            n_full = request.input_tokens // trace.block_tokens
            yield SimRequest(
                (request.arrival_s + shift_s - begin_s) / compression,
                request.input_tokens,
                request.output_tokens,
                [ids[hash_id] for hash_id in request.hash_ids[:n_full]],
            )


def _span_s(trace: Trace) -> float:
    """From the first request to one that would come after the last. Made up for a trace without any time in it."""
    n = len(trace.requests)
    last_s = trace.requests[-1].arrival_s
    return last_s * n / (n - 1) if n > 1 and last_s > 0 else float(n)
