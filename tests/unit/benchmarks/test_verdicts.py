"""Which targets are reached, out of measurements made up."""

from dataclasses import dataclass, replace

from benchmarks.load import WORKLOADS, Quantiles, Sample
from benchmarks.tables import Measurement, Results
from benchmarks.verdicts import verdict_table

QUICK = Quantiles(n=1000, p50=100.0, p90=110.0, p99=120.0, max=130.0)
NOTHING_WRONG = Sample(
    measured_s=1.0,
    requests=10_000,
    chunks=0,
    errors=0,
    stalls=0,
    slow=0,
    unanswered=0,
    answer_us=QUICK,
    chunk_us=None,
    proxy_cpu_s=None,
    load_cpu_s=0.1,
)


def measured(peer: str, workload: str, *samples: Sample, rss_mb: float = 50.0) -> list[Measurement]:
    """One sample a round."""
    assert workload in WORKLOADS
    return [Measurement(peer, workload, n, sample, int(rss_mb * 1e6), 0.0) for n, sample in enumerate(samples)]


def of_cpu(*us: float) -> list[Sample]:
    return [replace(NOTHING_WRONG, proxy_cpu_s=one * NOTHING_WRONG.requests / 1e6) for one in us]


def of_burst(slowest_ms: float, slow: int = 0) -> Sample:
    return replace(NOTHING_WRONG, answer_us=replace(QUICK, max=slowest_ms * 1000), slow=slow)


@dataclass(frozen=True, slots=True)
class Row:
    figure: str
    proxy: str
    value: str
    against: str
    other: str
    comparison: str
    target: str
    reached: str


def row(measurements: list[Measurement], figure: str, proxy: str = "prefixroute", against: str = "nginx") -> Row:
    lines = verdict_table(Results(measurements)).splitlines()[2:]
    rows = [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]
    (found,) = (one for one in rows if (one.figure, one.proxy, one.against) == (figure, proxy, against))
    return found


CPU = "CPU µs a request, 2–8 KB"
BURST = "256 connections at once, slowest request, ms"
IDLE = "1,000 idle streams, % of a core"
RSS = "all tests, peak RSS, MB"
IDLE_RSS = "1,000 idle streams, peak RSS, MB"


def test_a_ratio_is_taken_within_each_round_and_its_median_is_judged() -> None:
    # The machine was half as fast in the second round.
    found = row(
        measured("nginx", "c32", *of_cpu(10, 20, 10)) + measured("prefixroute", "c32", *of_cpu(20, 48, 25)), CPU
    )

    assert (found.value, found.other) == ("25.0", "10.0")
    assert found.comparison == "2.40× (2.00× … 2.50×)"
    assert (found.target, found.reached) == ("≤ 2.50×", "yes")


def test_a_ratio_above_the_target_is_not_reached() -> None:
    found = row(measured("nginx", "c32", *of_cpu(10, 10)) + measured("prefixroute", "c32", *of_cpu(26, 27)), CPU)

    assert found.reached == "**no**"


def test_rounds_that_judge_otherwise_are_told() -> None:
    found = row(
        measured("nginx", "c32", *of_cpu(10, 10, 10)) + measured("prefixroute", "c32", *of_cpu(24, 24, 30)), CPU
    )

    assert found.reached == "yes (2 of 3 rounds)"


def test_below_means_below() -> None:
    both = measured("vllm-router", "c32", *of_cpu(80)) + measured("prefixroute", "c32", *of_cpu(80))

    assert row(both, CPU, against="vllm-router").reached == "**no**"


def test_the_other_lane_has_a_target_of_its_own() -> None:
    both = measured("nginx", "c32", *of_cpu(10)) + measured("prefixroute-aiohttp", "c32", *of_cpu(40))

    assert row(both, CPU, proxy="prefixroute-aiohttp").reached == "yes"
    assert row(both, CPU).reached == "not measured"


def test_cheap_failures_do_not_reach_a_target() -> None:
    failing = replace(of_cpu(1)[0], errors=3)
    found = row(measured("nginx", "c32", *of_cpu(10)) + measured("prefixroute", "c32", failing), CPU)

    assert found.reached == "**no**: 3 requests failed"


def test_ttft_is_what_the_proxy_adds_to_none_at_all() -> None:
    def of_ttft(us: float) -> Sample:
        return replace(NOTHING_WRONG, answer_us=replace(QUICK, p50=us))

    found = row(
        measured("direct", "ttft", of_ttft(50))
        + measured("nginx", "ttft", of_ttft(110))
        + measured("prefixroute", "ttft", of_ttft(170)),
        "TTFT added at one client, p50 µs",
    )

    assert (found.value, found.other, found.reached) == ("120", "60", "yes")


def test_idle_streams_are_compared_by_difference() -> None:
    both = measured("nginx", "idle", *of_cpu(3)) + measured("prefixroute", "idle", *of_cpu(6))
    # In 10,000 requests a second, 3 µs each are 3 % of a core.
    found = row(both, IDLE)

    assert (found.value, found.other, found.comparison) == ("6.00", "3.00", "+3.00 (+3.00 … +3.00)")
    assert found.reached == "**no**"


def test_one_slow_request_of_a_burst_is_too_much() -> None:
    both = measured("nginx", "burst", of_burst(20), of_burst(20)) + measured(
        "prefixroute", "burst", of_burst(90), of_burst(300, slow=1)
    )
    found = row(both, BURST)

    assert (found.value, found.comparison) == ("300.0", "1 above 250 ms")
    assert found.reached == "**no** (1 of 2 rounds)"


def test_a_round_in_which_nginx_was_slow_too_says_nothing_about_a_burst() -> None:
    both = measured("nginx", "burst", of_burst(20), of_burst(400)) + measured(
        "prefixroute", "burst", of_burst(90), of_burst(500, slow=7)
    )

    assert row(both, BURST).reached == "yes"


def test_memory_is_the_highest_peak_of_all_tests_and_of_idle_streams() -> None:
    found = measured("prefixroute", "idle", *of_cpu(9, 9), rss_mb=99.5)
    assert row(found, RSS).reached == row(found, IDLE_RSS).reached == "yes"

    found += measured("prefixroute", "c32", *of_cpu(9), rss_mb=101)
    assert (row(found, RSS).reached, row(found, IDLE_RSS).reached) == ("**no**", "yes")


def test_what_was_not_measured_is_said_so() -> None:
    lines = verdict_table(Results(measured("nginx", "c1", NOTHING_WRONG))).splitlines()[2:]

    assert all(line.endswith("| not measured |") for line in lines)
