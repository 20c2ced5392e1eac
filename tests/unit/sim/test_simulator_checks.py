"""What a simulator must pass before its tables count."""

from collections.abc import Sequence
from dataclasses import fields
from random import Random

import pytest

from prefixroute.core.fleet import Instance
from prefixroute.core.policies.blind import RandomPolicy
from prefixroute.core.policy import Candidate, Decision, Facts, Policy
from prefixroute.core.prompt import Prompt
from prefixroute.demo.engine import EngineConfig
from prefixroute.sim.calibration import idle_ttft_s
from prefixroute.sim.generators import make
from prefixroute.sim.prompt import SimPrompt
from prefixroute.sim.report import ideal_tokens
from prefixroute.sim.run import Done, FleetShape, Outage, Simulation
from prefixroute.sim.strategies import NAMES, strategy
from prefixroute.sim.workload import SimRequest, Workload

UNBOUNDED = EngineConfig(kv_tokens=50_000_000)


def run(
    workload: Workload, name: str = "random", shape: FleetShape | None = None, *, seed: int = 0, held: bool = True
) -> list[Done]:
    chosen = strategy(name)
    return Simulation(
        workload,
        shape or FleetShape([1.0] * 4),
        chosen.make,
        seed=seed,
        load_constants=chosen.load_constants,
        hold=chosen.hold if held else None,
    ).run()


# ---------------------------------------------------------------------- one instance


@pytest.mark.parametrize("name", NAMES)
def test_with_one_instance_every_policy_gives_the_same(name: str) -> None:
    """But for requests held back, which may change places: that is no matter of picking."""
    workload = make("rag", 150, 3.0, 1)
    one = FleetShape([1.0])
    expected = run(workload, "random", one)
    done = run(workload, name, one, held=False)
    assert [(d.ttft_s, d.e2e_s, d.cached_tokens) for d in done] == [
        (d.ttft_s, d.e2e_s, d.cached_tokens) for d in expected
    ]


# ---------------------------------------------------------------------- the bound


@pytest.mark.parametrize("name", ["chat", "rag", "toolagent", "noshare", "heldout"])
def test_one_unbounded_cache_reaches_the_bound(name: str) -> None:
    workload = make(name, 300, 2.0, 1)
    done = run(workload, "expected_latency", FleetShape([1.0], UNBOUNDED), held=False)
    in_order = sorted(zip(done, workload.requests, strict=True), key=lambda pair: pair[0].arrived_s)
    bound = ideal_tokens([request for _, request in in_order], workload.block_tokens)
    assert sum(d.cached_tokens for d in done) == bound


@pytest.mark.parametrize("name", NAMES)
def test_no_fleet_is_above_the_bound(name: str) -> None:
    workload = make("rag", 200, 5.0, 1)
    done = run(workload, name, FleetShape([1.0] * 3, UNBOUNDED))
    in_order = sorted(zip(done, workload.requests, strict=True), key=lambda pair: pair[0].arrived_s)
    bound = ideal_tokens([request for _, request in in_order], workload.block_tokens)
    assert 0 < sum(d.cached_tokens for d in done) <= bound


# ---------------------------------------------------------------------- the cost model


def test_an_idle_server_takes_what_the_cost_model_says() -> None:
    """20,000 tokens are chunks of 8,192, 8,192 and 3,616; then 49 tokens follow the first."""
    workload = Workload("one", 64, [SimRequest(5.0, 20_000, 50, range(312))])
    (done,) = run(workload)
    chunks = ((0, 8_192), (8_192, 8_192), (16_384, 3_616))
    prefill_s = sum(n * (1 + (begin + n / 2) / 32_768) / 16_000 for begin, n in chunks) + 3 * 0.007
    decode_s = sum(0.007 + 0.000_03 + 0.000_000_052 * (20_000 + n) for n in range(49))
    assert done.arrived_s == 5.0
    assert done.ttft_s == pytest.approx(prefill_s)
    assert done.e2e_s == pytest.approx(prefill_s + decode_s)
    assert idle_ttft_s(EngineConfig(), 20_000) == pytest.approx(prefill_s)


def test_what_is_cached_costs_nothing_but_the_rest_has_its_position() -> None:
    """The second prompt is the first one and its answer, 20,050 tokens or 313 full blocks; and 1,000 more."""
    ids = range(313)
    follow_up = SimRequest(3.0, 21_050, 1, [*ids, *range(900, 915)], after=0)
    _, second = run(Workload("two", 64, [SimRequest(0.0, 20_000, 50, ids), follow_up]), shape=FleetShape([1.0]))
    n_cached = 313 * 64
    n_new = 21_050 - n_cached
    assert second.cached_tokens == n_cached
    assert second.ttft_s == pytest.approx(n_new * (1 + (n_cached + n_new / 2) / 32_768) / 16_000 + 0.007)


def test_the_last_token_of_an_answer_is_in_no_cache() -> None:
    """It was never put into the engine: here it is the one that would fill the first block."""
    requests = [SimRequest(0.0, 60, 4, [1]), SimRequest(1.0, 100, 1, [1], after=0)]
    _, second = run(Workload("two", 64, requests), shape=FleetShape([1.0]))
    assert second.cached_tokens == 0 == ideal_tokens(requests, 64)


def test_a_slow_instance_takes_longer_by_its_factor() -> None:
    workload = Workload("one", 64, [SimRequest(0.0, 5_000, 20, ())])
    (slow,), (fast,) = run(workload, shape=FleetShape([0.4])), run(workload, shape=FleetShape([1.0]))
    assert slow.ttft_s == pytest.approx(fast.ttft_s / 0.4)
    assert slow.e2e_s == pytest.approx(fast.e2e_s / 0.4)


# ---------------------------------------------------------------------- an instance dies


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_when_an_instance_dies(name: str) -> None:
    workload = make("chat", 300, 10.0, 1)
    outages = [Outage(0, 5.0, 10.0), Outage(1, 12.0, 5.0)]
    finished: list[Done] = []
    chosen = strategy(name)
    done = Simulation(
        workload, FleetShape([1.0] * 3, outages=outages), chosen.make, hold=chosen.hold, on_done=finished.append
    ).run()
    assert len(finished) == len({id(one) for one in finished}) == len(workload.requests)
    assert all(0 < one.ttft_s <= one.e2e_s for one in done)
    assert sum(one.n_attempts for one in done) > len(done)
    # Known to be dead from its second failed probe on at the latest.
    assert not [one for one in done if one.instance == 0 and one.arrived_s > 9.5 and one.arrived_s + one.e2e_s < 15]


def test_a_fleet_that_is_dead_for_a_while_answers_when_it_is_back() -> None:
    workload = make("noshare", 30, 3.0, 1)
    done = run(workload, "expected_latency", FleetShape([1.0], outages=[Outage(0, 2.0, 20.0)]))
    assert all(one.e2e_s > 0 for one in done)
    assert max(one.e2e_s for one in done) > 15


# ---------------------------------------------------------------------- the same again


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_output(name: str) -> None:
    shape = FleetShape([0.5, 1.0, 1.0], EngineConfig(kv_tokens=60_000), [Outage(1, 4.0, 5.0)])
    first, second = (run(make("toolagent", 150, 12.0, 1), name, shape, seed=3) for _ in range(2))
    assert first == second


# ---------------------------------------------------------------------- what the policy sees


class Watched:
    """Passes everything on, and keeps what it was shown."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.shown: list[tuple[Facts, Sequence[Candidate]]] = []

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        self.shown.append((facts, candidates))
        return self.policy.pick(facts, candidates, rng)

    def record(self, facts: Facts, decision: Decision) -> None:
        self.policy.record(facts, decision)


def test_facts_hold_nothing_but_numbers_and_the_prompt() -> None:
    watched = Watched(RandomPolicy())
    Simulation(make("rag", 50, 5.0, 1), FleetShape([1.0] * 3), lambda _: watched).run()
    assert watched.shown
    for facts, candidates in watched.shown:
        for one in fields(Facts):
            value = getattr(facts, one.name)
            assert isinstance(value, int | float | Prompt | Sequence), one.name
        assert isinstance(facts.prompt, SimPrompt)
        # Neither the length of the answer nor any block of it.
        assert len(facts.prompt.hashes) <= facts.n_tokens // 64
        assert len(facts.chain) <= facts.n_tokens // 256
        for candidate in candidates:
            assert isinstance(candidate.instance, Instance)
            assert candidate.machine == ""
            assert all(
                isinstance(getattr(candidate, name), int | float)
                for name in Candidate.__slots__
                if name not in ("instance", "machine")
            )


@pytest.mark.parametrize("name", NAMES)
def test_what_no_router_can_know_changes_no_decision(name: str) -> None:
    """A burst, before anything has come back: speeds, lengths of answers and their blocks are not known yet."""

    def own(n: int, n_blocks: int) -> range:
        return range(1_000 * (n + 1), 1_000 * (n + 1) + n_blocks)

    burst = [SimRequest(n * 1e-6, 3_000 + 64 * (n % 7), 10, [n % 5, *own(n, 45)]) for n in range(40)]
    other = [SimRequest(r.arrival_s, r.input_tokens, 500, [n % 5, *own(n, 52)]) for n, r in enumerate(burst)]
    chosen = strategy(name)
    picked = []
    for requests, shape in (
        (burst, FleetShape([1.0] * 4)),
        (other, FleetShape([0.3, 1.0, 0.5, 2.0], EngineConfig(step_s=0.02, max_num_seqs=64))),
    ):
        simulation = Simulation(Workload("burst", 64, requests), shape, chosen.make)
        picked.append([done.instance for done in simulation.run()])
    assert picked[0] == picked[1]
    assert len(picked[0]) == 40
