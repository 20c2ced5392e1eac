"""What each baseline does in situations that its source's rule decides, and what holds for all of them."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from prefixroute.core.fleet import Instance
from prefixroute.core.load import prefill_work
from prefixroute.core.policies.blind import RandomPolicy
from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason
from prefixroute.demo.engine import EngineConfig, EngineRequest
from prefixroute.sim.gauges import Gauges
from prefixroute.sim.prompt import SimPrompt
from prefixroute.sim.run import Done, FleetShape, Outage, Simulation
from prefixroute.sim.strategies import BASELINES, NAMES, strategy
from prefixroute.sim.workload import SimRequest, Workload
from prefixroute.testing import check_policy

BLOCK = 256
RATE = 12_000.0
INSTANCES = [Instance(f"i{slot}", f"http://i{slot}", slot) for slot in range(4)]


def simulation(name: str = "random", n: int = 4, workload: Workload | None = None, **engine: float) -> Simulation:
    known = strategy(name)
    shape = FleetShape([1.0] * n, EngineConfig(**engine))  # type: ignore[arg-type]  # sizes given are whole
    return Simulation(
        workload or Workload("none", BLOCK, []), shape, known.make, hold=known.hold, load_constants=known.load_constants
    )


def policy_of(sim: Simulation) -> Policy:
    return sim.router.policy


def facts(chain: Sequence[int] = (), n_tokens: int | None = None, now_s: float = 0.0) -> Facts:
    n_tokens = len(chain) * BLOCK + 1 if n_tokens is None else n_tokens
    return Facts(SimPrompt(None, b"", b"key", n_tokens, hashes=chain), n_tokens, now_s, chain=chain)


def candidates(*in_flight: int) -> list[Candidate]:
    return [Candidate(INSTANCES[slot], in_flight=n, prefill_rate=RATE) for slot, n in enumerate(in_flight)]


def matching(n_tokens: int, *matched: int, pending: Sequence[float] = (0.0,) * 4) -> list[Candidate]:
    """As the router would describe them for a prompt of `n_tokens`."""
    return [
        Candidate(
            INSTANCES[slot],
            matched_tokens=tokens,
            work=prefill_work(tokens, max(1, n_tokens - tokens), 32_000),
            pending_work=pending[slot],
            prefill_rate=RATE,
        )
        for slot, tokens in enumerate(matched)
    ]


def send(policy: Policy, asked: Facts, to: Candidate) -> None:
    """As if it had been picked."""
    policy.record(asked, Decision(to, Reason.COLD))


def slots(policy: Policy, asked: Facts, fleet: Sequence[Candidate]) -> set[int]:
    """Wherever it may go, by the dice."""
    return {policy.pick(asked, fleet, Random(seed)).instance.slot for seed in range(60)}


def pick(policy: Policy, asked: Facts, fleet: Sequence[Candidate]) -> int:
    (slot,) = slots(policy, asked, fleet)
    return slot


def wait_in(sim: Simulation, slot: int, n: int, n_prompt: int = 100) -> None:
    """`n` requests in the queue of that engine, which computes nothing."""
    for _ in range(n):
        sim.engines[slot].add(EngineRequest(n_prompt, 10, ()), 0.0)  # type: ignore[arg-type]  # no router sent it


def cache_in(sim: Simulation, slot: int, hashes: Sequence[int]) -> None:
    """Those blocks are in that engine's cache, used by nobody."""
    pool = sim.engines[slot].pool
    blocks = pool.take(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.name(block, block_hash)
    pool.give_back(blocks)


# ------------------------------------------------------------------ sglang


@pytest.mark.parametrize(("matched", "slot"), [(3, 1), (4, 2)])
def test_sglang_follows_a_match_above_the_threshold_and_else_goes_by_load(matched: int, slot: int) -> None:
    policy = policy_of(simulation("sglang"))
    chain = range(100, 110)
    fleet = candidates(5, 4, 30, 9)
    send(policy, facts(chain[:matched]), fleet[2])
    # 3 of 10 blocks are not above 0.3, 4 are.
    assert pick(policy, facts(chain, n_tokens=10 * BLOCK), fleet) == slot


@pytest.mark.parametrize(
    ("in_flight", "slot"),
    [
        ((80, 16, 80, 80), 0),  # 64 apart
        ((81, 16, 80, 80), 1),
        ((210, 140, 200, 200), 0),  # half as many again
        ((211, 140, 200, 200), 1),
    ],
)
def test_sglang_gives_up_all_affinity_when_the_fleet_is_unbalanced(in_flight: tuple[int, ...], slot: int) -> None:
    policy = policy_of(simulation("sglang"))
    fleet = candidates(*in_flight)
    send(policy, facts(range(8)), fleet[0])
    assert pick(policy, facts(range(8)), fleet) == slot


def test_sglang_names_one_holder_of_a_node_and_never_looks_at_its_load() -> None:
    policy = policy_of(simulation("sglang"))
    fleet = candidates(0, 60, 60, 60)
    named = Counter[int]()
    for n in range(60):
        asked = facts([10 * n, 10 * n + 1])
        for slot in (1, 2, 3):
            send(policy, asked, fleet[slot])
        named[pick(policy, asked, fleet)] += 1
    assert named.keys() == {1, 2, 3}


def test_sglang_takes_the_first_of_the_least_loaded() -> None:
    assert pick(policy_of(simulation("sglang")), facts(range(8)), candidates(2, 1, 1, 1)) == 1


def test_sglang_takes_the_first_who_serves_when_the_named_one_does_not() -> None:
    policy = policy_of(simulation("sglang"))
    fleet = candidates(5, 0, 0, 0)
    send(policy, facts(range(8)), fleet[2])
    assert pick(policy, facts(range(8)), [fleet[0], fleet[1], fleet[3]]) == 0


# ------------------------------------------------------------------ smg


@pytest.mark.parametrize(("in_flight", "stays"), [(125, True), (126, False)])
def test_smg_spills_from_a_holder_far_above_the_mean_and_the_prefix_is_there_too(in_flight: int, stays: bool) -> None:
    policy = policy_of(simulation("smg"))
    # 64 above the mean, (in_flight + 120) / 4.
    fleet = candidates(in_flight, 40, 40, 40)
    send(policy, facts(range(8), now_s=-100.0), fleet[0])
    decision = policy.pick(facts(range(8)), fleet, Random(1))
    assert (decision.instance.slot == 0) is stays
    if not stays:
        assert decision.reason is Reason.SPILL
        policy.record(facts(range(8)), decision)
        again = policy.pick(facts(range(8), now_s=20.0), candidates(in_flight, 0, 0, 0), Random(2))
        assert again.instance is decision.instance
        assert again.reason is Reason.AFFINITY


def test_smg_credits_what_it_has_sent_since_the_last_poll() -> None:
    policy = policy_of(simulation("smg"))
    fleet = candidates(0, 0, 0, 0)
    for n, left in enumerate(({0, 1, 2, 3}, {1, 2, 3}, {2, 3}, {3})):
        asked = facts([n], n_tokens=1_000)
        assert slots(policy, asked, fleet) == left
        send(policy, asked, fleet[n])


def test_smg_forgets_the_credit_at_the_next_poll_and_reads_the_queues() -> None:
    sim = simulation("smg")
    policy = policy_of(sim)
    fleet = candidates(0, 0, 0, 0)
    for slot in (0, 1):
        send(policy, facts([slot], n_tokens=1_000), fleet[slot])
    wait_in(sim, 2, 3)
    wait_in(sim, 3, 1)
    assert slots(policy, facts([9], now_s=9.9), fleet) == {2, 3}
    assert slots(policy, facts([9], now_s=10.0), fleet) == {0, 1}


def test_smg_avoids_an_engine_whose_cache_is_in_use() -> None:
    sim = simulation("smg")
    sim.engines[0].pool.take(sim.engines[0].pool.n_blocks // 2)
    assert slots(policy_of(sim), facts([9]), candidates(0, 0, 0, 0)) == {1, 2, 3}


# ------------------------------------------------------------------ dynamo


@pytest.mark.parametrize(("later_s", "slot"), [(119.0, {2}), (120.0, {0, 1, 2, 3})])
def test_dynamo_forgets_what_was_sent_two_minutes_ago(later_s: float, slot: set[int]) -> None:
    policy = policy_of(simulation("dynamo"))
    fleet = candidates(0, 0, 0, 0)
    send(policy, facts(range(8)), fleet[2])
    assert slots(policy, facts(range(8), now_s=later_s), fleet) == slot


def test_dynamo_renews_what_is_sent_again() -> None:
    policy = policy_of(simulation("dynamo"))
    fleet = candidates(0, 0, 0, 0)
    send(policy, facts(range(8)), fleet[2])
    send(policy, facts(range(4), now_s=100.0), fleet[2])
    decision = policy.pick(facts(range(8), now_s=130.0), fleet, Random(0))
    assert (decision.instance.slot, decision.reason) == (2, Reason.AFFINITY)
    # Of the eight blocks four are left.
    assert policy._map.match(facts(range(8), now_s=130.0)) == {2: 4 * BLOCK}  # type: ignore[attr-defined]


class Dispatching:
    """Sends requests to the engines of a simulation by hand."""

    def __init__(self, name: str) -> None:
        requests = [SimRequest(0.0, 8 * BLOCK, 50, range(100 * n, 100 * n + 8)) for n in range(4)]
        self.sim = simulation(name, workload=Workload("by hand", BLOCK, requests))
        self.policy = policy_of(self.sim)

    def arrive(self, index: int) -> int:
        """Of the workload's requests; where it went."""
        self.sim._arrive(index)
        return self.sim.done[index].instance

    def finish(self, slot: int, n_steps: int) -> None:
        engine = self.sim.engines[slot]
        for _ in range(n_steps):
            if engine._batch is None:
                engine.start_step(self.sim.now_s)
            engine.finish_step(self.sim.now_s)


@pytest.mark.parametrize("name", ["dynamo", "dynamo_exact"])
def test_dynamo_counts_prefill_and_kv_of_what_is_under_way(name: str) -> None:
    by_hand = Dispatching(name)
    busy = by_hand.arrive(0)
    assert slots(by_hand.policy, facts(range(900, 908)), candidates(0, 0, 0, 0)) == {0, 1, 2, 3} - {busy}
    active = by_hand.policy._active  # type: ignore[attr-defined]
    assert active.prefill_tokens(busy) == 8 * BLOCK
    assert active.kv_tokens(busy, facts(())) == 8 * BLOCK

    by_hand.finish(busy, 1)  # the first token is here
    active.settle()
    assert active.prefill_tokens(busy) == 0
    assert active.kv_tokens(busy, facts(())) == 8 * BLOCK

    by_hand.finish(busy, 49)
    active.settle()
    assert active.kv_tokens(busy, facts(())) == 0


def test_dynamo_counts_blocks_that_are_shared_once() -> None:
    by_hand = Dispatching("dynamo")
    busy = by_hand.arrive(0)
    active = by_hand.policy._active  # type: ignore[attr-defined]
    assert active.kv_tokens(busy, facts([*range(6), 900])) == 9 * BLOCK


def test_the_overlap_weight_decides_between_a_match_and_kv_in_use() -> None:
    for weight, stays in ((1, False), (16, True)):
        by_hand = Dispatching(f"dynamo_exact:overlap_weight={weight}")
        busy = by_hand.arrive(0)
        by_hand.finish(busy, 1)
        # Two blocks are warm where eight are in use, six of them of no use to it.
        assert (busy in slots(by_hand.policy, facts([0, 1, 900, 901]), candidates(0, 0, 0, 0))) is stays


# ------------------------------------------------------------------ exact events


@pytest.mark.parametrize("name", ["dynamo_exact", "llm_d_precise"])
def test_exact_events_tell_what_the_engines_hold_whatever_was_sent(name: str) -> None:
    sim = simulation(name)
    policy = policy_of(sim)
    fleet = candidates(0, 0, 0, 0)
    send(policy, facts(range(8)), fleet[1])
    cache_in(sim, 2, range(8))
    cache_in(sim, 3, range(4))
    assert pick(policy, facts(range(8)), fleet) == 2
    assert sim.engines[2].reset_prefix_cache()
    assert pick(policy, facts(range(8)), fleet) == 3


# ------------------------------------------------------------------ llm-d


def test_llm_d_weighs_the_match_against_the_queue() -> None:
    for n_matched, expected in ((5, {1, 2, 3}), (6, {0})):  # of 8, at weight 3, against a queue of weight 2
        sim = simulation("llm_d")
        policy = policy_of(sim)
        fleet = candidates(0, 0, 0, 0)
        send(policy, facts(range(n_matched)), fleet[0])
        wait_in(sim, 0, 3)
        assert slots(policy, facts(range(8), n_tokens=8 * BLOCK), fleet) == expected


def test_llm_d_weighs_the_use_of_kv() -> None:
    sim = simulation("llm_d")
    sim.engines[1].pool.take(10)
    assert slots(policy_of(sim), facts(range(8)), candidates(0, 0, 0, 0)) == {0, 2, 3}


def test_llm_d_reads_the_gauges_every_50_ms() -> None:
    sim = simulation("llm_d")
    policy = policy_of(sim)
    fleet = candidates(0, 0, 0, 0)
    assert slots(policy, facts([1]), fleet) == {0, 1, 2, 3}
    wait_in(sim, 0, 1)
    assert slots(policy, facts([1], now_s=0.049), fleet) == {0, 1, 2, 3}
    assert slots(policy, facts([1], now_s=0.05), fleet) == {1, 2, 3}


def test_llm_d_keeps_two_million_tokens_of_an_instance() -> None:
    policy = policy_of(simulation("llm_d"))
    fleet = candidates(0, 0, 0, 0)
    n_blocks = 31_250 * 64 // BLOCK
    send(policy, facts([1]), fleet[2])
    send(policy, facts(range(10, 10 + n_blocks - 1)), fleet[2])
    assert pick(policy, facts([1]), fleet) == 2
    send(policy, facts([2]), fleet[2])
    assert slots(policy, facts([1]), fleet) == {0, 1, 2, 3}


# ------------------------------------------------------------------ kubeai


def test_kubeai_looks_at_the_first_block_only() -> None:
    policy = policy_of(simulation("kubeai"))
    fleet = candidates(0, 0, 0, 0)
    homes = {first: pick(policy, facts([first]), fleet) for first in range(100)}
    assert all(pick(policy, facts([first, 900 + first]), fleet) == home for first, home in homes.items())
    assert set(homes.values()) == {0, 1, 2, 3}


def test_kubeai_walks_on_from_an_instance_above_its_bound_and_always_to_the_same() -> None:
    policy = policy_of(simulation("kubeai"))
    home = pick(policy, facts([7]), candidates(0, 0, 0, 0))
    in_flight = [8] * 4
    in_flight[home] = 11  # the bound is 36/4 · 1.25 = 11.25
    assert pick(policy, facts([7]), candidates(*in_flight)) == home
    in_flight[home] = 12  # 37/4 · 1.25 = 11.56
    assert pick(policy, facts([7]), candidates(*in_flight)) != home


def test_kubeai_moves_only_those_of_an_instance_that_is_away() -> None:
    policy = policy_of(simulation("kubeai"))
    fleet = candidates(0, 0, 0, 0)
    for first in range(50):
        home = pick(policy, facts([first]), fleet)
        left = pick(policy, facts([first]), fleet[1:])
        assert left == home or home == 0


# ------------------------------------------------------------------ preble


def test_preble_exploits_a_match_of_more_than_half() -> None:
    policy = policy_of(simulation("preble"))
    # One dispatch, 0.5 s of it prefill, is lately there: less than 1.5 × 0 + 1 s.
    send(policy, facts(), matching(6_000, 0, 0, 0, 0)[1])
    assert pick(policy, facts(n_tokens=8_000), matching(8_000, 0, 4_096, 2_048, 0)) == 1
    assert 1 not in slots(policy, facts(n_tokens=8_200), matching(8_200, 0, 4_096, 2_048, 0))


def test_preble_picks_the_holder_with_least_work_lately_and_leaves_it_when_that_is_too_much() -> None:
    policy = policy_of(simulation("preble"))
    fleet = matching(4_000, 4_000, 4_000, 0, 0)
    send(policy, facts(), matching(1_000, 0)[0])
    assert pick(policy, facts(n_tokens=4_000), fleet) == 1
    for slot in (0, 1):
        send(policy, facts(), matching(40_000, 0, 0)[slot])
    assert slots(policy, facts(n_tokens=4_000), fleet) == {2, 3}


def test_preble_work_lately_fades() -> None:
    policy = policy_of(simulation("preble"))
    fleet = matching(4_000, 4_000, 0, 0, 0)
    for _ in range(10):
        send(policy, facts(), fleet[0])  # 0.15 s each, of which nearly all is the answer
    assert slots(policy, facts(n_tokens=4_000), fleet) == {1, 2, 3}
    assert pick(policy, facts(n_tokens=4_000, now_s=180.0), fleet) == 0


def test_preble_charges_for_what_would_be_evicted() -> None:
    sim = simulation("preble", kv_tokens=10 * BLOCK)
    sim.router.index.record(range(900, 909), 0)
    sim.router.index.record(range(800, 808), 1)
    asked = facts(range(2), n_tokens=2 * BLOCK)
    assert slots(policy_of(sim), asked, matching(2 * BLOCK, 0, 0, 0, 0)) == {1, 2, 3}


# ------------------------------------------------------------------ the others


def test_min_ttft_takes_the_least_of_pending_and_own_prefill() -> None:
    policy = policy_of(simulation("min_ttft"))
    own = prefill_work(0, 8_000, 32_000) - prefill_work(6_144, 1_856, 32_000)
    for pending, slot in ((own - 1, {0}), (own + 1, {1, 2, 3})):
        fleet = matching(8_000, 6_144, 0, 0, 0, pending=(pending, 0, 0, 0))
        assert slots(policy, facts(n_tokens=8_000), fleet) == slot


def test_aibrix_takes_the_best_match_within_a_standard_deviation() -> None:
    policy = policy_of(simulation("aibrix"))
    fleet = candidates(0, 0, 0, 0)
    send(policy, facts(range(8)), fleet[0])
    send(policy, facts(range(4)), fleet[1])
    assert pick(policy, facts(range(8)), candidates(4, 4, 0, 4)) == 0  # mean 3, deviation 1.7
    assert pick(policy, facts(range(8)), candidates(6, 2, 2, 2)) == 1  # mean 3, deviation 1.7
    assert slots(policy, facts(range(4, 8)), candidates(3, 2, 2, 2)) == {1, 2, 3}  # nobody holds it
    send(policy, facts([77]), fleet[0])
    assert slots(policy, facts([77]), candidates(6, 2, 2, 2)) == {1, 2, 3}  # whoever does is too busy


def test_aibrix_takes_the_less_busy_of_equal_matches() -> None:
    policy = policy_of(simulation("aibrix"))
    for one in candidates(0, 0):
        send(policy, facts(range(8)), one)
    assert pick(policy, facts(range(8)), candidates(3, 2, 2, 9)) == 1


def test_aibrix_looks_only_at_the_least_busy_when_they_are_far_apart() -> None:
    policy = policy_of(simulation("aibrix"))
    send(policy, facts(range(8)), candidates(0)[0])
    assert pick(policy, facts(range(8)), candidates(3, 2, 2, 10)) == 0
    assert slots(policy, facts(range(8)), candidates(3, 2, 2, 11)) == {1, 2}


def test_aibrix_forgets_after_20_minutes_and_beyond_200_000_blocks_in_all() -> None:
    policy = policy_of(simulation("aibrix"))
    fleet = candidates(0, 0, 0, 0)
    send(policy, facts([1]), fleet[0])
    assert pick(policy, facts([1], now_s=1_199.0), fleet) == 0
    assert slots(policy, facts([1], now_s=1_200.0), fleet) == {0, 1, 2, 3}
    n_blocks = 200_000 // BLOCK
    send(policy, facts(range(10, 10 + n_blocks - 1)), fleet[1])
    assert pick(policy, facts([1]), fleet) == 0
    send(policy, facts([2]), fleet[2])
    assert slots(policy, facts([1]), fleet) == {0, 1, 2, 3}


def test_ray_follows_a_tenth_and_else_goes_to_the_smallest_tree() -> None:
    policy = policy_of(simulation("ray"))
    fleet = candidates(9, 0, 0, 0)
    send(policy, facts([1]), fleet[0])
    for slot, n_blocks in ((1, 3), (2, 2), (3, 5)):
        send(policy, facts(range(100 * slot, 100 * slot + n_blocks)), fleet[slot])
    assert pick(policy, facts([1, *range(900, 909)], n_tokens=10 * BLOCK), fleet) == 0
    # A match of less: the smallest tree is the same one, whatever its load.
    assert pick(policy, facts([1, *range(900, 910)], n_tokens=11 * BLOCK), fleet) == 0
    send(policy, facts(range(900, 902)), fleet[0])
    assert pick(policy, facts([500]), fleet) == 2


def test_ray_counts_what_is_shared_once_and_what_is_short_too() -> None:
    policy = policy_of(simulation("ray"))
    fleet = candidates(0, 0, 0, 0)[:2]
    for _ in range(3):
        send(policy, facts(range(8), n_tokens=8 * BLOCK), fleet[0])
    send(policy, facts(range(100, 109)), fleet[1])
    assert pick(policy, facts([500]), fleet) == 0
    send(policy, facts((), n_tokens=255), fleet[0])
    send(policy, facts((), n_tokens=255), fleet[0])
    assert pick(policy, facts([500]), fleet) == 1


def test_ray_with_a_threshold_takes_the_better_of_two_when_unbalanced() -> None:
    policy = policy_of(simulation("ray:imbalanced_threshold=10"))
    fleet = candidates(11, 3, 2, 0)
    send(policy, facts(range(8)), fleet[0])
    assert slots(policy, facts(range(8)), fleet) == {1, 2, 3}
    assert pick(policy, facts(range(8)), candidates(10, 3, 2, 0)) == 0


def test_d2lpm_leaves_the_longest_match_when_its_credit_is_used_up() -> None:
    policy = policy_of(simulation("d2lpm:quantum=1000,answer_tokens=0"))
    fleet = matching(4_000, 3_000, 0, 0, 0)
    asked = facts(n_tokens=4_000)
    assert pick(policy, asked, fleet) == 0
    send(policy, asked, fleet[0])  # pays 1,000, and has none left
    assert slots(policy, asked, fleet) == {1, 2, 3}
    for slot in (1, 2, 3):
        send(policy, asked, fleet[slot])  # 3,000 in debt each
    assert pick(policy, asked, fleet) == 0  # one quantum is enough for it


def test_production_stack_takes_any_holder_whatever_its_load() -> None:
    policy = policy_of(simulation("production_stack"))
    fleet = candidates(90, 90, 0, 0)
    for slot in (0, 1):
        send(policy, facts(range(8)), fleet[slot])
    assert slots(policy, facts(range(9)), fleet) == {0, 1}
    assert slots(policy, facts([77]), fleet) == {0, 1, 2, 3}


# ------------------------------------------------------------------ gauges


def test_gauges_are_as_old_as_the_last_poll() -> None:
    sim = simulation()
    gauges = Gauges(sim, 10.0)
    wait_in(sim, 1, 3, n_prompt=100)
    assert gauges.read(5.0)[1].n_waiting == 3
    assert gauges.read(5.0)[1].queued_tokens == 300
    wait_in(sim, 1, 1)
    assert gauges.read(14.9)[1].n_waiting == 3
    assert gauges.read(15.0)[1].n_waiting == 4
    assert gauges.polled_s == 15.0


# ------------------------------------------------------------------ all of them


def shared(n: int, apart_s: float = 0.2) -> Workload:
    """Prompts of four kinds, each its own after a common start; some too short for a block, some follow-ups."""
    rng = Random(3)
    requests: list[SimRequest] = []
    for number in range(n):
        kind = rng.randrange(4)
        n_shared = 4 + 4 * kind
        hashes = [*range(100 * kind, 100 * kind + n_shared), *range(10_000 + 100 * number, 10_006 + 100 * number)]
        n_tokens = rng.choice([40, n_shared * BLOCK, len(hashes) * BLOCK + 7])
        after = number - 1 if number % 5 == 4 else None
        arrival_s = 0.5 if after is not None else number * apart_s
        requests.append(SimRequest(arrival_s, n_tokens, rng.randint(1, 80), hashes[: n_tokens // BLOCK], after))
    return Workload("shared", BLOCK, requests)


def run(name: str) -> tuple[Simulation, list[Done]]:
    sim = simulation(name, 3, shared(200), kv_tokens=60_000)
    return sim, sim.run()


@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_answered(name: str) -> None:
    sim, done = run(name)
    assert all(one.e2e_s >= one.ttft_s > 0 for one in done)
    assert sim.router.n_policy_faults == 0, sim.router.last_policy_fault
    assert sum(sim.router.load.of(slot).in_flight for slot in range(3)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_one_instance_makes_all_alike(name: str) -> None:
    """When nothing is held: that alters the order in which requests reach it."""
    runs = [
        Simulation(shared(200), FleetShape([1.0], EngineConfig(kv_tokens=60_000)), strategy(one).make).run()
        for one in (name, "random")
    ]
    times = [[(one.ttft_s, one.e2e_s, one.cached_tokens) for one in done] for done in runs]
    assert times[0] == times[1]


@pytest.mark.parametrize("name", BASELINES)
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    assert run(name)[1] == run(name)[1]


@pytest.mark.parametrize("name", BASELINES)
def test_it_keeps_the_promises_of_a_policy(name: str) -> None:
    rng = Random(5)
    policy = policy_of(simulation(name))
    for number in range(200):
        kind = rng.randrange(3)
        chain = [*range(100 * kind, 100 * kind + rng.randrange(6)), *range(1_000 + number, 1_000 + number + kind)]
        asked = facts(chain, now_s=number * 0.7)
        fleet = matching(asked.n_tokens, *(rng.choice([0, len(chain) // 2 * BLOCK]) for _ in range(4)))
        for one in fleet:
            one.in_flight = rng.choice([0, 1, 5, 90])
        check_policy(policy, asked, rng.sample(fleet, rng.randint(1, 4)), seed=number)


@pytest.mark.parametrize("name", NAMES)
def test_it_lives_with_an_instance_that_dies_and_comes_back(name: str) -> None:
    known = strategy(name)
    shape = FleetShape([1.0] * 3, EngineConfig(kv_tokens=60_000), [Outage(1, 5.0, 10.0)])
    sim = Simulation(shared(200), shape, known.make, hold=known.hold, load_constants=known.load_constants)
    assert all(one.e2e_s > 0 for one in sim.run())
    assert sim.router.n_policy_faults == 0, sim.router.last_policy_fault


def test_random_here_is_the_one_that_serves() -> None:
    assert isinstance(policy_of(simulation("random")), RandomPolicy)
