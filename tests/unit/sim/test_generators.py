"""Generated workloads: the same for the same seed, at the rate asked for, and sharing what they say they share."""

import pytest

from prefixroute.errors import ConfigError
from prefixroute.sim.generators import GENERATORS, make
from prefixroute.sim.report import ideal_tokens
from prefixroute.sim.sessions import BLOCK_TOKENS
from prefixroute.sim.workload import Workload

NAMES = sorted(GENERATORS)


def first_arrivals(workload: Workload) -> list[float]:
    return [request.arrival_s for request in workload.requests if request.after is None]


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_is_one_workload(name: str) -> None:
    assert make(name, 300, 10.0, 7) == make(name, 300, 10.0, 7)
    assert make(name, 300, 10.0, 7) != make(name, 300, 10.0, 8)


@pytest.mark.parametrize("name", NAMES)
def test_requests_are_sound(name: str) -> None:
    workload = make(name, 500, 10.0, 1)
    assert len(workload.requests) == 500
    for place, request in enumerate(workload.requests):
        assert request.input_tokens >= 1
        assert request.output_tokens >= 1
        assert request.arrival_s >= 0
        assert request.after is None or request.after < place
        assert len(request.hashes) == (request.input_tokens + request.output_tokens) // BLOCK_TOKENS
        assert all(0 <= block < 2**64 for block in request.hashes)
    arrivals = first_arrivals(workload)
    assert arrivals == sorted(arrivals)


@pytest.mark.parametrize("name", NAMES)
def test_equal_ids_mean_equal_beginnings(name: str) -> None:
    """A block stands at one depth, behind one block: so an id names everything up to it."""
    before: dict[int, int | None] = {}
    for request in make(name, 500, 10.0, 1).requests:
        for place, block in enumerate(request.hashes):
            expected = request.hashes[place - 1] if place else None
            assert before.setdefault(block, expected) == expected


@pytest.mark.parametrize("name", ["chat", "rag", "toolagent"])
def test_a_follow_up_begins_with_the_answer_before(name: str) -> None:
    requests = make(name, 500, 10.0, 1).requests
    followers = [request for request in requests if request.after is not None]
    assert followers
    for request in followers:
        before = requests[request.after or 0]
        assert request.hashes[: len(before.hashes)] == before.hashes
        assert request.input_tokens > before.input_tokens + before.output_tokens


@pytest.mark.parametrize("name", NAMES)
def test_all_of_it_is_about_as_busy(name: str) -> None:
    """Whatever servers do: by the times at which requests would come to idle ones."""
    rate = 20.0
    workload = make(name, 4_000, rate, 3)
    came: list[float] = []
    for request in workload.requests:
        if request.after is None:
            came.append(request.arrival_s)
        else:
            before = workload.requests[request.after]
            came.append(came[request.after] + 0.2 + 0.01 * before.output_tokens + request.arrival_s)
    assert came == sorted(came)
    halves = came[1_999], came[3_999] - came[1_999]
    assert halves == pytest.approx((2_000 / rate, 2_000 / rate), rel=0.25)


@pytest.mark.parametrize("name", ["noshare", "chat"])
def test_another_rate_brings_the_same_sessions_closer_together(name: str) -> None:
    """Those that begin in the window, that is; the last ones are cut elsewhere."""

    def openers(rate: float) -> dict[tuple[int, int], float]:
        requests = make(name, 1_000, rate, 1).requests
        return {(r.input_tokens, r.output_tokens): r.arrival_s for r in requests if r.after is None}

    slow, fast = openers(5.0), openers(10.0)
    doubled = [key for key in slow.keys() & fast.keys() if slow[key] == pytest.approx(2 * fast[key])]
    assert len(doubled) > 80


@pytest.mark.parametrize(
    ("name", "input_tokens", "ideal_ratio"),
    [
        ("chat", (3_500, 7_000), (0.8, 0.95)),
        ("rag", (5_500, 8_000), (0.75, 0.95)),
        ("toolagent", (5_500, 10_000), (0.65, 0.85)),
        ("noshare", (3_000, 5_000), (0.0, 0.0)),
        ("heldout", (9_000, 16_000), (0.75, 0.95)),
    ],
)
def test_how_long_prompts_are_and_how_much_of_them_comes_up_again(
    name: str, input_tokens: tuple[int, int], ideal_ratio: tuple[float, float]
) -> None:
    workload = make(name, 6_000, 20.0, 2)
    total = sum(request.input_tokens for request in workload.requests)
    assert input_tokens[0] <= total / 6_000 <= input_tokens[1]
    assert ideal_ratio[0] <= ideal_tokens(workload.requests, BLOCK_TOKENS) / total <= ideal_ratio[1]


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="no generated workload"):
        make("chatt", 10, 1.0, 0)


@pytest.mark.parametrize(("n_requests", "rate"), [(0, 1.0), (1, 0.0)])
def test_a_workload_of_nothing(n_requests: int, rate: float) -> None:
    with pytest.raises(ConfigError, match="at least one request"):
        make("chat", n_requests, rate, 0)
