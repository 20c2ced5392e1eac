"""From a prompt to a lease: what is decided, counted, remembered and taken back."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import orjson
import pytest

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.canonical import turns_key
from prefixroute.core.capacity import DEFAULT_CAPACITY_TOKENS
from prefixroute.core.fleet import HealthConstants, Instance, ProbeFailure, State
from prefixroute.core.lease import Lease
from prefixroute.core.policies.blind import LeastOutstanding
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.core.router import Router
from prefixroute.errors import NoInstanceError

BLOCK_TOKENS = 16


def make_router(n: int = 3, policy: Policy | None = None, *, seed: int = 1, **more: Any) -> Router:
    instances = [Instance(f"gpu-{slot}", f"http://10.0.0.{slot}:8000", slot) for slot in range(n)]
    router = Router(instances, policy or ExpectedLatency(), BlockHasher(BLOCK_TOKENS, seed=1), Random(seed), **more)
    for instance in instances:
        router.fleet.probe_passed(instance.name)
    return router


def chat(*turns: str, model: str = "m", stream: bool = True) -> Prompt:
    messages = [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]
    return read_prompt(Api.CHAT, orjson.dumps({"model": model, "messages": messages, "stream": stream}))


def unlike(n: int, n_tokens: int = 2_000) -> Prompt:
    """Prompts that share nothing."""
    return chat(f"{n:08x}" * (n_tokens // 2))


def counts(router: Router) -> list[tuple[int, int, float]]:
    loads = [router.load.of(instance.slot) for instance in router.fleet.instances]
    return [(own.in_flight, own.in_flight_tokens, own.pending_work) for own in loads]


def n_blocks(router: Router) -> list[int]:
    return [router.index.n_blocks(instance.slot) for instance in router.fleet.instances]


def slots(leases: Sequence[Lease]) -> Counter[int]:
    return Counter(lease.instance.slot for lease in leases)


# ------------------------------------------------------------------ matching


def test_the_next_turn_goes_where_the_last_one_was() -> None:
    router = make_router(8)
    turns = ["hello " * 500]
    with router.lease(router.read(chat(*turns)), now_s=0.0) as first:
        assert first.decision.reason is Reason.COLD
    turns += ["answer " * 100, "and then? " * 20]
    with router.lease(router.read(chat(*turns)), now_s=10.0) as second:
        assert second.instance is first.instance
        assert second.decision.reason is Reason.AFFINITY
        assert second.decision.candidate.matched_tokens == len(first.request.chain) * BLOCK_TOKENS


@pytest.mark.parametrize("model", ["lora-a", "org/m:tag", "M"])
def test_other_models_share_no_prefix(model: str) -> None:
    router = make_router()
    with router.lease(router.read(chat("hello " * 500)), now_s=0.0):
        pass
    with router.lease(router.read(chat("hello " * 500, model=model)), now_s=1.0) as lease:
        assert lease.decision.reason is Reason.COLD


def test_a_prompt_without_a_key_is_routed_by_load_and_remembered_nowhere() -> None:
    router = make_router(2)
    busy = router.lease(router.read(unlike(1)), now_s=0.0)
    before = n_blocks(router)
    with router.lease(router.read(read_prompt(Api.CHAT, b"no json")), now_s=0.0) as lease:
        assert lease.instance is not busy.instance
        assert lease.decision.reason is Reason.LOAD
        assert lease.request.chain == []
    assert n_blocks(router) == before


def test_a_prompt_is_cut_from_what_the_tokenizer_makes_of_it() -> None:
    class Backwards:
        def tokenize(self, prompt: Prompt) -> bytes:
            return prompt.key[::-1]

    router = make_router(1, tokenizer=Backwards())
    prompt = chat("hello " * 500)
    with router.lease(router.read(prompt), now_s=0.0) as lease:
        assert lease.request.chain == BlockHasher(BLOCK_TOKENS, seed=1).chain(prompt.scope, prompt.key[::-1])


# ------------------------------------------------------------------ candidates


def test_who_was_tried_is_not_asked_again() -> None:
    router = make_router(3)
    tried: set[str] = set()
    for _ in range(3):
        with router.lease(router.read(chat("hello " * 500)), now_s=0.0, without=tried) as lease:
            assert lease.instance.name not in tried
            tried.add(lease.instance.name)
    with pytest.raises(NoInstanceError):
        router.lease(router.read(chat("hello")), now_s=0.0, without=tried)


def test_when_nobody_may_take_it_the_error_says_so_and_nothing_is_counted() -> None:
    router = make_router(2)
    for instance in router.fleet.instances:
        router.connect_failed(instance.name, 0.0, timed_out=False)
    with pytest.raises(NoInstanceError) as raised:
        router.lease(router.read(chat("hello")), now_s=0.5)
    assert (raised.value.status, raised.value.code) == (503, "no_instance")
    assert counts(router) == [(0, 0, 0)] * 2


def test_a_stored_response_is_asked_of_who_made_it_however_busy() -> None:
    router = make_router(3)
    for n in range(30):
        router.load.begin(1, 10_000, 10_000.0, float(n), streamed=True)
    with router.lease(router.read(chat("hello")), now_s=0.0, only="gpu-1") as lease:
        assert lease.instance.name == "gpu-1"
        assert lease.decision.reason is Reason.STORED


@pytest.mark.parametrize("only", ["gpu-1", "gone"])
def test_a_stored_response_whose_maker_cannot_serve_is_asked_of_another(only: str) -> None:
    router = make_router(2)
    router.fleet.drain("gpu-1")
    with router.lease(router.read(chat("hello")), now_s=0.0, only=only) as lease:
        assert lease.instance.name == "gpu-0"
        assert lease.decision.reason is Reason.COLD


# ------------------------------------------------------------------ leases


def test_a_lease_counts_until_it_ends_and_ends_once() -> None:
    router = make_router(1)
    prompt = unlike(1)
    with router.lease(router.read(prompt), now_s=0.0) as lease:
        work = lease.decision.candidate.work
        assert lease.request.n_tokens == prompt.n_tokens
        assert counts(router) == [(1, prompt.n_tokens, work)]
        lease.first_byte(1.0, learn=True)
        assert counts(router) == [(1, prompt.n_tokens, 0)]
    assert counts(router) == [(0, 0, 0)]
    other = router.lease(router.read(prompt), now_s=2.0)
    lease.end()
    lease.first_byte(3.0, learn=True)
    assert router.load.of(0).in_flight == 1
    other.end()
    assert counts(router) == [(0, 0, 0)]


def test_the_prefill_of_an_answer_that_is_not_streamed_is_over_by_the_clock() -> None:
    router = make_router(1)
    streamed = router.lease(router.read(chat("hello " * 2_000)), now_s=0.0)
    router.lease(router.read(chat("hallo " * 2_000, stream=False)), now_s=0.0)
    with router.lease(router.read(chat("servus")), now_s=100.0) as lease:
        assert lease.decision.candidate.pending_work == streamed.decision.candidate.work


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_whatever_is_raised_meanwhile_the_place_is_given_back(fault: type[BaseException]) -> None:
    router = make_router(1)
    with pytest.raises(fault), router.lease(router.read(unlike(1)), now_s=0.0):
        raise fault
    assert counts(router) == [(0, 0, 0)]


def test_ten_in_flight_survive_a_flapping_instance() -> None:
    router = make_router(1)
    leases = [router.lease(router.read(unlike(n)), now_s=0.0) for n in range(10)]
    for failure in ProbeFailure:
        for _ in range(5):
            router.probe_failed("gpu-0", failure)
    router.connect_failed("gpu-0", 1.0, timed_out=False)
    router.fleet.probe_passed("gpu-0")
    router.fleet.probe_passed("gpu-0")
    assert router.load.of(0).in_flight == 10
    for lease in leases:
        lease.first_byte(2.0, learn=True)
        lease.end()
    assert counts(router) == [(0, 0, 0)]


def test_an_answer_brings_the_instance_back() -> None:
    router = make_router(1)
    lease = router.lease(router.read(unlike(1)), now_s=0.0)
    router.connect_failed("gpu-0", 0.0, timed_out=True)
    lease.answered()
    assert router.fleet.state("gpu-0").state is State.UP
    lease.end()


def test_a_half_open_instance_is_tried_by_one_request_at_a_time() -> None:
    router = make_router(1, health=HealthConstants(eject_s=1))
    old = router.lease(router.read(unlike(0)), now_s=0.0)
    router.connect_failed("gpu-0", 0.0, timed_out=True)
    trial = router.lease(router.read(unlike(1)), now_s=1.0)
    old.end()  # no news of the trial
    with pytest.raises(NoInstanceError):
        router.lease(router.read(unlike(2)), now_s=1.0)
    trial.end()  # its client left
    with router.lease(router.read(unlike(2)), now_s=1.0) as lease:
        lease.answered()
        router.lease(router.read(unlike(3)), now_s=1.0).end()


# ------------------------------------------------------------------ taking back


def test_what_an_instance_refused_it_does_not_hold() -> None:
    router = make_router(1)
    first = chat("hello " * 500)
    with router.lease(router.read(first), now_s=0.0) as lease:
        n_first = len(lease.request.chain)
    with router.lease(router.read(chat("hello " * 500, "answer " * 100, "more " * 100)), now_s=1.0) as lease:
        assert len(lease.request.chain) > n_first
        lease.refused()
        assert n_blocks(router) == [n_first]
        lease.refused()
    assert n_blocks(router) == [n_first]


def test_what_one_request_was_refused_another_may_have_brought() -> None:
    router = make_router(1)
    refused = router.lease(router.read(chat("hello " * 500)), now_s=0.0)
    taken = router.lease(router.read(chat("hello " * 500, "answer " * 100)), now_s=0.0)
    refused.refused()
    assert router.index.match(taken.request.chain) == {0: len(taken.request.chain)}
    refused.end()
    taken.end()


# ------------------------------------------------------------------ instances come and go


def test_a_refused_connection_empties_the_map_and_silence_does_not() -> None:
    router = make_router(2)
    for slot in range(2):
        with router.lease(router.read(unlike(slot)), now_s=0.0, only=f"gpu-{slot}") as lease:
            lease.first_byte(0.01, learn=True)
    rate = router.load.fleet_rate()
    router.connect_failed("gpu-0", 1.0, timed_out=True)
    assert all(n_blocks(router))
    assert router.load.fleet_rate() == rate
    router.connect_failed("gpu-0", 10.0, timed_out=False)
    assert n_blocks(router)[0] == 0
    assert n_blocks(router)[1] > 0
    assert router.load.fleet_rate() != rate, "another machine may answer there"


@pytest.mark.parametrize(("failure", "kept"), [(f, f is ProbeFailure.TIMEOUT) for f in ProbeFailure])
def test_probes_that_find_it_dead_empty_the_map(failure: ProbeFailure, kept: bool) -> None:
    router = make_router(3)
    with router.lease(router.read(unlike(1)), now_s=0.0, only="gpu-0"):
        pass
    for _ in range(2):
        router.probe_failed("gpu-0", failure)
        assert n_blocks(router)[0]
    router.probe_failed("gpu-0", failure)
    assert bool(n_blocks(router)[0]) is kept


def test_a_restarted_instance_holds_nothing_and_learns_again() -> None:
    router = make_router(2)
    for now_s in (0.0, 1.0):
        with router.lease(router.read(chat("hello " * 500)), now_s=now_s, only="gpu-0"):
            pass
    router.cache_emptied("gpu-0")
    assert n_blocks(router) == [0, 0]
    with router.lease(router.read(chat("hello " * 500)), now_s=2.0) as lease:
        assert lease.decision.reason is Reason.COLD
    with router.lease(router.read(chat("hello " * 500)), now_s=3.0) as again:
        assert again.instance is lease.instance


def test_an_instance_that_returns_is_not_flooded() -> None:
    router = make_router(4)
    for n in range(40):
        with router.lease(router.read(unlike(n)), now_s=float(n)) as lease:
            lease.first_byte(n + 0.5, learn=True)
    router.connect_failed("gpu-0", 50.0, timed_out=False)
    router.fleet.probe_passed("gpu-0")
    router.fleet.probe_passed("gpu-0")
    leases = [router.lease(router.read(unlike(100 + n)), now_s=60.0) for n in range(40)]
    assert slots(leases)[0] <= 14


def test_maps_are_sized_like_the_cache() -> None:
    router = make_router(2, capacities={"gpu-1": 1_600})
    assert router.capacity_tokens("gpu-0") == DEFAULT_CAPACITY_TOKENS
    assert router.index.capacity_blocks(0) == DEFAULT_CAPACITY_TOKENS // BLOCK_TOKENS
    assert router.index.capacity_blocks(1) == 100


def test_a_learned_capacity_resizes_the_map() -> None:
    router = make_router(1)
    with router.lease(router.read(unlike(1)), now_s=0.0) as lease:
        n_all = len(lease.request.chain)
    router.learned_capacity("gpu-0", 10 * BLOCK_TOKENS)
    assert n_blocks(router) == [10] < [n_all]
    assert router.capacity_tokens("gpu-0") == 160
    with router.lease(router.read(unlike(1)), now_s=1.0) as lease:
        assert lease.decision.candidate.matched_tokens == 10 * BLOCK_TOKENS
        assert lease.decision.candidate.capacity_tokens == 160


@pytest.mark.parametrize("nonsense", [0, -1])
def test_a_capacity_that_cannot_be_is_not_learned(nonsense: int) -> None:
    router = make_router(1)
    router.learned_capacity("gpu-0", nonsense)
    assert router.capacity_tokens("gpu-0") == DEFAULT_CAPACITY_TOKENS


# ------------------------------------------------------------------ policies that fail


class Broken(LeastOutstanding):
    """Fails where it is told to."""

    def __init__(self, *, pick: BaseException | None = None, record: Exception | None = None) -> None:
        self._pick = pick
        self._record = record
        self.n_recorded = 0

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        if self._pick is not None:
            raise self._pick
        return super().pick(facts, candidates, rng)

    def record(self, facts: Facts, decision: Decision) -> None:
        self.n_recorded += 1
        if self._record is not None:
            raise self._record


def test_a_policy_that_fails_to_pick_means_routing_by_load() -> None:
    fault = ZeroDivisionError("mine")
    policy = Broken(pick=fault)
    router = make_router(3, policy)
    leases = [router.lease(router.read(unlike(n)), now_s=0.0) for n in range(6)]
    assert slots(leases) == {0: 2, 1: 2, 2: 2}
    assert {lease.decision.reason for lease in leases} == {Reason.FALLBACK}
    assert router.n_policy_faults == 6
    assert router.last_policy_fault is fault
    assert policy.n_recorded == 0, "it was not its decision"
    assert all(n_blocks(router)), "the prompts are remembered all the same"


def test_a_policy_that_fails_to_remember_has_decided_all_the_same() -> None:
    fault = KeyError("mine")
    router = make_router(3, Broken(record=fault))
    with router.lease(router.read(unlike(1)), now_s=0.0) as lease:
        assert lease.decision.reason is Reason.LOAD
        assert router.load.of(lease.instance.slot).in_flight == 1
    assert router.n_policy_faults == 1
    assert router.last_policy_fault is fault
    assert counts(router) == [(0, 0, 0)] * 3


class Confused(LeastOutstanding):
    """Picks what it was given last time, or nothing at all."""

    def __init__(self) -> None:
        self._last: Any = None

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        last, self._last = self._last, Decision(candidates[0], Reason.CUSTOM)
        decision: Decision = last
        return decision


def test_a_policy_that_picks_none_of_the_candidates_means_routing_by_load() -> None:
    router = make_router(2, Confused())
    for n in range(2):
        with router.lease(router.read(unlike(n)), now_s=0.0, without={f"gpu-{n}"}) as lease:
            assert lease.decision.reason is Reason.FALLBACK
            assert lease.instance.name == f"gpu-{1 - n}"
    assert router.n_policy_faults == 2
    assert "gpu-1" in str(router.last_policy_fault)


@pytest.mark.parametrize("nonsense", [{"reason": "affinity"}, {"scores": [1.0]}])
def test_a_decision_that_could_not_be_counted_or_shown_means_routing_by_load(nonsense: dict[str, Any]) -> None:
    class Sloppy(LeastOutstanding):
        def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
            return replace(super().pick(facts, candidates, rng), **nonsense)

    router = make_router(2, Sloppy())
    with router.lease(router.read(unlike(1)), now_s=0.0) as lease:
        assert lease.decision.reason is Reason.FALLBACK
    assert router.n_policy_faults == 1


def test_a_policy_that_changes_its_candidates_changes_nothing_else() -> None:
    class Greedy(LeastOutstanding):
        def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
            assert not isinstance(candidates, list)
            candidates.clear()  # type: ignore[attr-defined]
            raise AssertionError

    router = make_router(policy=Greedy())
    with router.lease(router.read(chat("hello")), now_s=0.0) as lease:
        assert lease.decision.reason is Reason.FALLBACK
    assert isinstance(router.last_policy_fault, AttributeError)


def test_scores_that_are_no_numbers_are_a_fault() -> None:
    class Wordy(LeastOutstanding):
        def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
            return Decision(candidates[0], Reason.CUSTOM, ["a"] * len(candidates))  # type: ignore[list-item]

    router = make_router(policy=Wordy())
    with router.lease(router.read(chat("hello")), now_s=0.0) as lease:
        assert lease.decision.reason is Reason.FALLBACK


def test_what_is_no_fault_of_the_policy_passes_through_and_counts_nothing() -> None:
    router = make_router(2, Broken(pick=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        router.lease(router.read(unlike(1)), now_s=0.0)
    assert counts(router) == [(0, 0, 0)] * 2
    assert router.n_policy_faults == 0


# ------------------------------------------------------------------ explain


def snapshot(router: Router, prompts: Sequence[Prompt]) -> list[object]:
    hasher = BlockHasher(BLOCK_TOKENS, seed=1)
    return [
        counts(router),
        n_blocks(router),
        [router.index.match(hasher.chain(prompt.scope, prompt.key)) for prompt in prompts],
        [state.state for state in router.fleet.states()],
        (router.load.mean_work, router.load.fleet_rate()),
        (router.n_policy_faults, router.last_policy_fault),
    ]


def test_explaining_changes_nothing_and_tells_what_the_next_lease_does() -> None:
    router = make_router(8)
    warm, cold = [unlike(n) for n in range(20)], [unlike(100 + n) for n in range(20)]
    prompts = warm + cold
    for prompt in warm:
        router.lease(router.read(prompt), now_s=0.0).end()
    router.connect_failed("gpu-3", 0.0, timed_out=True)
    for n, prompt in enumerate(prompts):
        before = snapshot(router, prompts)
        router.explain(prompt, now_s=5.0 + n)
        explained = router.explain(prompt, now_s=5.0 + n)
        assert snapshot(router, prompts) == before
        with router.lease(router.read(prompt), now_s=5.0 + n) as lease:
            assert explained.decision is not None
            assert explained.decision.instance is lease.instance
            assert explained.decision.reason is lease.decision.reason
            assert explained.decision.scores == lease.decision.scores
            assert explained.n_blocks == len(lease.request.chain)
            assert explained.facts.n_tokens == lease.request.n_tokens
            assert [c.instance for c in explained.candidates] == list(router.fleet.instances)


def test_explaining_a_fault_of_the_policy_does_not_count_it() -> None:
    router = make_router(2, Broken(pick=ValueError()))
    explained = router.explain(unlike(1), now_s=0.0)
    assert explained.decision is not None
    assert explained.decision.reason is Reason.FALLBACK
    assert router.n_policy_faults == 0
    assert router.last_policy_fault is None


def test_explaining_what_nobody_may_take_is_no_error() -> None:
    router = make_router(1)
    router.fleet.drain("gpu-0")
    explained = router.explain(unlike(1), now_s=0.0)
    assert explained.decision is None
    assert explained.candidates == []


# ------------------------------------------------------------------ bursts and hot spots


def test_a_burst_of_different_prompts_is_spread_evenly() -> None:
    router = make_router(8)
    assert set(slots([router.lease(router.read(unlike(n)), now_s=0.0) for n in range(80)]).values()) == {10}


def test_a_burst_of_equal_prompts_sees_itself_and_waits_for_one_prefill() -> None:
    """From the second on there is nothing to compute but the rest of a block: recomputing it elsewhere costs more."""
    router = make_router(8)
    first, *others = [router.lease(router.read(unlike(1)), now_s=0.0) for _ in range(30)]
    assert first.decision.reason is Reason.COLD
    pending = first.decision.candidate.work
    for lease in others:
        assert lease.instance is first.instance
        assert lease.decision.reason is Reason.AFFINITY
        assert lease.decision.candidate.matched_tokens == len(first.request.chain) * BLOCK_TOKENS
        assert lease.decision.candidate.pending_work == pytest.approx(pending)
        pending += lease.decision.candidate.work


def test_a_hot_prefix_is_replicated_under_load_and_not_before() -> None:
    """Everybody shares a system prompt of 4,000 tokens and brings 400 of their own."""
    router = make_router(4)
    system = "you are helpful " * 1_000

    def ask(n: int, now_s: float) -> Lease:
        return router.lease(router.read(chat(system, "", f"{n:08x}" * 200)), now_s=now_s)

    calm = []
    for n in range(20):
        with ask(n, float(n)) as lease:
            lease.first_byte(n + 0.3, learn=True)
            calm.append(lease)
    assert len(slots(calm)) == 1
    hot = [ask(100 + n, 100.0) for n in range(80)]
    found = slots(hot)
    assert len(found) >= 3
    assert max(found.values()) <= 0.6 * 80
    assert sum(n >= 4_000 // BLOCK_TOKENS for n in n_blocks(router)) == len(found)


@pytest.mark.parametrize("speed", [4_000, 16_000, 40_000])
def test_cold_prompts_one_after_the_other_are_spread_over_equals(speed: float) -> None:
    """Speeds are learned on the way, with noise; being measured first must not mean getting everything."""
    router, noise = make_router(8), Random(1)
    leases = []
    for n in range(400):
        with router.lease(router.read(unlike(n)), now_s=float(n)) as lease:
            took_s = lease.decision.candidate.work / speed * noise.uniform(0.8, 1.2)
            lease.first_byte(n + took_s, learn=True)
            leases.append(lease)
    found = slots(leases)
    assert len(found) == 8
    assert all(20 < n < 100 for n in found.values())


def test_an_instance_ten_times_slower_gets_little_and_is_not_given_up() -> None:
    """24 at a time for 20 rounds, each prefill alone on its instance, all answered before the next round."""
    router = make_router(3)
    speeds = {0: 20_000.0, 1: 20_000.0, 2: 2_000.0}
    found = Counter[int]()
    now_s = 0.0
    for round_number in range(20):
        leases = [router.lease(router.read(unlike(100 * round_number + n)), now_s=now_s) for n in range(24)]
        free_s = dict.fromkeys(speeds, now_s)
        for lease in leases:
            slot = lease.instance.slot
            free_s[slot] += lease.decision.candidate.work / speeds[slot]
            lease.first_byte(free_s[slot], learn=True)
            lease.end()
        found += slots(leases)
        now_s = max(free_s.values()) + 1
    assert 0 < found[2] < found.total() / 5
    assert router.fleet.state("gpu-2").state is State.UP


# ------------------------------------------------------------------ answers


def test_the_next_turn_matches_the_answer_too() -> None:
    router = make_router(1)
    question, answer = "why? " * 100, "because " * 100
    request = router.read(chat(question))
    with router.lease(request, now_s=0.0) as lease:
        said = turns_key([{"role": "assistant", "content": answer}])
        lease.computed(router.continued(request, said))
    following = router.lease(router.read(chat(question, answer, "and? " * 100)), now_s=1.0)
    n_bytes = len(request.prompt.key) + len(said)
    assert following.decision.candidate.matched_tokens == n_bytes // (4 * BLOCK_TOKENS) * BLOCK_TOKENS
    following.end()


def test_a_short_prompt_goes_on_as_if_it_had_been_longer() -> None:
    router = make_router(1)
    request = router.read(chat("?"))
    assert request.chain == []
    assert router.continued(request, b"x" * 200) == router._hasher.chain(
        request.prompt.scope, request.prompt.key + b"x" * 200
    )


def test_a_chain_of_real_tokens_is_not_continued_by_text() -> None:
    class Ids:
        def tokenize(self, prompt: Prompt) -> bytes:
            return bytes(4 * BLOCK_TOKENS)

    router = make_router(1, tokenizer=Ids())
    request = router.read(chat("why?"))
    assert len(request.chain) == 1
    assert router.continued(request, b"because " * 100) is request.chain


@pytest.mark.parametrize("stream", [True, False])
def test_candidates_are_as_the_load_says_idle_or_busy(stream: bool) -> None:
    router = make_router(4)
    for n in range(12):
        lease = router.lease(router.read(chat(f"{n:08x}" * 3_000, stream=stream)), now_s=float(n))
        lease.first_byte(n + 0.5 + n % 3, learn=True)
        lease.end()
    # One of four stays idle; prefills are under way, the first one for very long.
    prompts = [chat(f"{n:07x}" * 3_000, stream=stream) for n in range(3)]
    leases = [router.lease(router.read(prompt), now_s=20.0 + n) for n, prompt in enumerate(prompts)]
    for now_s in (22.0, 23.5, 400.0):
        lease = router.lease(router.read(unlike(7)), now_s=now_s)
        lease.end()
        fleet_rate = router.load.fleet_rate()
        for candidate in lease.candidates:
            _, rate, progress = router.load.observe(candidate.instance.slot, now_s, fleet_rate)
            assert (candidate.prefill_rate, candidate.head_progress) == (rate, progress)
    for lease in leases:
        lease.end()
