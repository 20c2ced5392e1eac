"""The router on what instances say they hold: their word counts, and what they are computing at the moment."""

from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import orjson
import pytest

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.exact import ExactIndex
from prefixroute.core.fleet import Instance
from prefixroute.core.held import Held, HoldConstants
from prefixroute.core.kv_blocks import Cleared, Removed, Stored
from prefixroute.core.kv_sources import Source, Trust
from prefixroute.core.lease import Lease
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policies.kv_aware import KvAware
from prefixroute.core.policy import Candidate, Policy, Reason
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.core.request import Request
from prefixroute.core.router import Router
from prefixroute.core.survey import Sampling
from prefixroute.core.turns import Turns

BLOCK_TOKENS = 64
"""Of the router's own blocks."""
SIZE = 16
"""Of the instances'."""
TEXT = "some words of a long document " * 200
N_TOKENS = 1_200
"""Of TEXT as the engine sees it: fewer than one for four bytes of it."""


def packed(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


TOKENS = list(range(1_000, 1_000 + N_TOKENS))


class Fleet:
    """A router whose instances 0 … n - 1 have KV events; those of `trusted` are believed."""

    def __init__(self, n: int = 3, policy: Policy | None = None, trusted: Sequence[int] = (), **more: Any) -> None:
        self.exact = ExactIndex(seed=5, max_bytes=1 << 24)
        instances = [Instance(f"gpu-{slot}", f"http://10.0.0.{slot}:8000", slot) for slot in range(n)]
        self.router = Router(
            instances, policy or ExpectedLatency(), BlockHasher(BLOCK_TOKENS, 1), Random(1), exact=self.exact, **more
        )
        for instance in instances:
            self.router.fleet.probe_passed(instance.name)
        self.sources: list[Source] = [self.exact.open(slot) for slot in range(n)]
        for slot in trusted:
            self.trust(slot)

    def trust(self, slot: int, trust: Trust = Trust.TRUSTED) -> None:
        self.exact.set_trust(self.sources[slot], trust)

    def stores(self, slot: int, tokens: Sequence[int], **more: Any) -> None:
        """The instance tells of all full blocks of `tokens`."""
        n = len(tokens) // SIZE
        names = [hash((tuple(tokens[: (i + 1) * SIZE]), str(more))) & (2**63 - 1) for i in range(n)]
        self.exact.apply(self.sources[slot], Stored(names, None, packed(tokens[: n * SIZE]), SIZE, **more))

    def read(self, text: str = TEXT, tokens: Sequence[int] | None = TOKENS, **fields: object) -> Request:
        return self.router.read(prompt(text, **fields), None if tokens is None else packed(tokens))

    def candidates(self, request: Request, now_s: float = 0.0) -> list[Candidate]:
        _, candidates = self.router._survey.look(request, now_s, ())
        return sorted(candidates, key=lambda candidate: candidate.instance.slot)

    def matched(self, request: Request) -> list[tuple[int, bool]]:
        return [(candidate.matched_tokens, candidate.exact) for candidate in self.candidates(request)]

    def sends(self, request: Request, slot: int) -> Lease:
        """On its way to the instance, without an answer so far."""
        return self.router.lease(request, now_s=0.0, only=f"gpu-{slot}")


def prompt(text: str = TEXT, **fields: object) -> Prompt:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True} | fields
    return read_prompt(Api.CHAT, orjson.dumps(body))


def spared(n_tokens: int) -> int:
    """Of a prompt that is held whole."""
    return (n_tokens - 1) // SIZE * SIZE


# The instance's word


def test_what_an_instance_says_replaces_the_estimate_where_it_is_trusted() -> None:
    fleet = Fleet(4, trusted=[0, 1])
    request = fleet.read()
    for slot in (0, 2):
        lease = fleet.sends(request, slot)
        lease.first_byte(1.0, learn=True)
        lease.end()
    fleet.stores(0, TOKENS[:160])  # less than was sent there: it was evicted
    fleet.stores(1, TOKENS)  # by somebody else
    fleet.stores(3, TOKENS)
    told_less, told_more, estimated, unheard = fleet.matched(request)
    assert told_less == (160, True)
    assert told_more == (spared(N_TOKENS), True)
    assert estimated == (int(len(request.chain) * BLOCK_TOKENS * request.token_scale), False)
    assert unheard == (0, False)


def test_an_instance_that_holds_none_is_known_to() -> None:
    fleet = Fleet(2, trusted=[0])
    request = fleet.read()
    for slot in (0, 1):
        with fleet.sends(request, slot) as lease:
            lease.first_byte(1.0, learn=True)
    assert fleet.matched(request)[0] == (0, True)
    first, second = fleet.candidates(request)
    assert first.work > second.work


def test_estimates_serve_again_when_trust_ends() -> None:
    fleet = Fleet(1, trusted=[0])
    request = fleet.read()
    with fleet.sends(request, 0) as lease:
        lease.first_byte(1.0, learn=True)
    fleet.trust(0, Trust.REPLAYING)
    ((matched_tokens, is_exact),) = fleet.matched(request)
    assert matched_tokens > 0
    assert not is_exact


def test_evictions_and_clears_are_seen_by_the_next_decision() -> None:
    fleet = Fleet(1, trusted=[0])
    request = fleet.read()
    (source,) = fleet.sources
    fleet.stores(0, TOKENS)
    names = list(source.keys)
    fleet.exact.apply(source, Removed(names[10:]))
    assert fleet.matched(request) == [(10 * SIZE, True)]
    fleet.exact.apply(source, Cleared())
    assert fleet.matched(request) == [(0, True)]


def test_a_prompt_whose_tokens_are_not_known_goes_by_the_estimate() -> None:
    fleet = Fleet(2, trusted=[0, 1])
    request = fleet.read(tokens=None)
    with fleet.sends(request, 1) as lease:
        lease.first_byte(1.0, learn=True)
    fleet.stores(0, TOKENS)
    assert request.exact is None
    assert request.token_scale == 1.0
    assert fleet.matched(request) == [(0, False), (len(request.chain) * BLOCK_TOKENS, False)]


def test_salts_and_adapters_are_matched_as_the_engine_does() -> None:
    fleet = Fleet(2, trusted=[0, 1])
    fleet.stores(0, TOKENS, extra_keys=[["tenant"], *[None] * (N_TOKENS // SIZE - 1)])
    fleet.stores(1, TOKENS, adapter="sql", extra_keys=[["sql"]] * (N_TOKENS // SIZE))
    whole = (spared(N_TOKENS), True)
    none = (0, True)
    assert fleet.matched(fleet.read(cache_salt="tenant")) == [whole, none]
    assert fleet.matched(fleet.read(model="sql")) == [none, whole]
    assert fleet.matched(fleet.read()) == [none, none]
    assert fleet.matched(fleet.read(cache_salt="another")) == [none, none]


# What is being computed


def test_a_burst_that_nobody_has_told_of_yet_stays_together() -> None:
    fleet = Fleet(3, trusted=[0, 1, 2])
    first = fleet.router.lease(fleet.read(), now_s=0.0)
    for n in range(3):
        sibling = fleet.read(f"{TEXT} question {n}", [*TOKENS, n, n, n])
        lease = fleet.router.lease(sibling, now_s=0.0)
        assert lease.instance is first.instance
        assert lease.decision.candidate.matched_tokens == N_TOKENS // SIZE * SIZE
        assert lease.decision.candidate.exact


def test_what_is_being_computed_counts_to_the_block_and_only_on_that_instance() -> None:
    fleet = Fleet(2, trusted=[0, 1])
    fleet.stores(0, TOKENS[:64])
    fleet.stores(1, TOKENS[:64])
    fleet.sends(fleet.read(TEXT, [*TOKENS[:100], 7, 7]), 0)
    fleet.sends(fleet.read(TEXT, [7, *TOKENS]), 0)
    fleet.sends(fleet.read(TEXT, [*TOKENS[:200], 7], cache_salt="tenant"), 0)
    assert fleet.matched(fleet.read()) == [(96, True), (64, True)]


def test_once_it_is_answered_only_the_instances_word_counts() -> None:
    """The estimate remembers the answer as well; the engine may have evicted it, or be asked for other tokens."""
    fleet = Fleet(1, trusted=[0])
    request = fleet.read()
    fleet.sends(fleet.read("another one", [5] * 40), 0)  # still pending, and older
    lease = fleet.sends(request, 0)
    lease.first_byte(1.0, learn=True)
    lease.computed([*request.chain, 77])
    lease.end()
    fleet.stores(0, TOKENS[:320])
    assert fleet.matched(request) == [(320, True)]


def test_a_refused_sibling_promises_nothing() -> None:
    fleet = Fleet(1, trusted=[0])
    with fleet.sends(fleet.read(), 0) as lease:
        lease.refused()
    assert fleet.matched(fleet.read()) == [(0, True)]


def test_a_sibling_whose_tokens_came_too_late_counts_by_its_text() -> None:
    fleet = Fleet(1, trusted=[0])
    request = fleet.read()
    fleet.sends(fleet.read(tokens=None), 0)
    fleet.sends(fleet.read("unlike", tokens=None), 0)
    assert fleet.matched(request) == [(int(len(request.chain) * BLOCK_TOKENS * request.token_scale), True)]


# Lengths


def test_lengths_are_the_engines_and_estimates_are_scaled_to_them() -> None:
    fleet = Fleet(1)
    request = fleet.read()
    assert request.n_tokens == N_TOKENS
    with fleet.sends(request, 0) as lease:
        lease.first_byte(1.0, learn=True)
    ((matched_tokens, _),) = fleet.matched(request)
    assert 0.9 * N_TOKENS < matched_tokens <= N_TOKENS


def test_of_a_batch_the_first_prompts_tokens_are_exact_and_the_others_estimated() -> None:
    body = {"model": "m", "prompt": ["a" * 400, "b" * 4_000]}
    batch = read_prompt(Api.COMPLETIONS, orjson.dumps(body))
    request = Fleet(1).router.read(batch, packed(range(50)))
    assert request.n_tokens == 50 + 1_000
    assert request.token_scale == 0.5


def test_tokens_without_a_key_scale_nothing() -> None:
    nothing = read_prompt(Api.CHAT, b'{"messages": []}')
    fleet = Fleet(1, trusted=[0])
    fleet.stores(0, TOKENS)
    request = fleet.router.read(nothing, packed(TOKENS))
    assert request.token_scale == 1.0
    assert request.n_tokens == N_TOKENS
    assert fleet.matched(request) == [(spared(N_TOKENS), True)]


# What is learned from reports


@pytest.mark.parametrize("is_trusted", [True, False])
def test_what_an_instance_said_by_itself_sizes_no_map(is_trusted: bool) -> None:
    fleet = Fleet(1, trusted=[0] if is_trusted else [])
    request = fleet.read()
    with fleet.sends(request, 0) as lease:
        lease.reported(0, N_TOKENS)
    fleet.stores(0, TOKENS)
    with fleet.sends(request, 0) as lease:
        assert lease.decision.candidate.matched_tokens > 0
        lease.reported(0, N_TOKENS)
    capacity_tokens = fleet.router.capacity_tokens("gpu-0")
    assert (capacity_tokens == 1_000_000) is is_trusted


def test_the_ladder_counts_in_the_engines_tokens() -> None:
    fleet = Fleet(1, default_capacity_tokens=100_000)
    for _ in range(2):
        with fleet.sends(fleet.read(), 0) as lease:
            lease.first_byte(1.0, learn=True)
            lease.reported(lease.decision.candidate.matched_tokens, N_TOKENS)
    rungs = fleet.router.audit.ladder.reported
    assert rungs.prompt == 2 * N_TOKENS
    assert rungs.ideal == pytest.approx(rungs.chosen, abs=1)
    assert rungs.chosen == rungs.reported


# Policies and large fleets


def test_kv_aware_goes_by_what_is_told_and_by_nothing_else() -> None:
    fleet = Fleet(3, KvAware(8), trusted=[0, 1])
    request = fleet.read()
    fleet.sends(request, 2)  # an estimate
    fleet.stores(1, TOKENS[:64])
    with fleet.router.lease(request, now_s=0.0) as lease:
        assert (lease.instance.slot, lease.decision.reason) == (1, Reason.AFFINITY)
        assert lease.decision.candidate.matched_tokens == 64


def test_who_holds_it_is_weighed_in_a_large_fleet() -> None:
    fleet = Fleet(40, trusted=range(40), sampling=Sampling())
    request = fleet.read()
    fleet.stores(33, TOKENS)
    for _ in range(20):
        with fleet.router.lease(request, now_s=0.0) as lease:
            assert lease.instance.slot == 33
            # Those who say that they hold none are no better than others.
            assert len(lease.candidates) <= 5
            assert all(candidate.exact for candidate in lease.candidates)


# Held requests


def test_a_held_request_is_matched_anew_when_it_is_its_turn() -> None:
    fleet = Fleet(2, trusted=[0, 1], hold=HoldConstants(hold_s=0.01))
    busy = [fleet.sends(fleet.read(f"unlike {slot}", [slot] * 9_000), slot) for slot in (0, 1)]
    granted: list[Lease | None] = []
    held = fleet.router.enter(fleet.read(), now_s=0.0, grant=granted.append)
    assert isinstance(held, Held)
    fleet.stores(1, TOKENS)
    for other in busy:
        other.first_byte(1.0, learn=False)
        other.end()
    fleet.router.release(1.0)
    (lease,) = granted
    assert lease is not None
    assert (lease.instance.slot, lease.decision.candidate.matched_tokens) == (1, spared(N_TOKENS))


def test_while_a_request_is_held_instances_are_asked_about_it_only_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is looked at again at each first byte of the fleet; walking a long prompt each time would take the loop."""
    fleet = Fleet(2, trusted=[0, 1], hold=HoldConstants(hold_s=0.01))
    for slot in (0, 1):
        fleet.sends(fleet.read(f"unlike {slot}", [slot] * 9_000), slot)
    assert isinstance(fleet.router.enter(fleet.read(), now_s=0.0, grant=lambda _lease: None), Held)
    n_walks = 0
    match = ExactIndex.match

    def counted(index: ExactIndex, prompt: Any) -> dict[int, int]:
        nonlocal n_walks
        n_walks += 1
        return match(index, prompt)

    monkeypatch.setattr(ExactIndex, "match", counted)
    monkeypatch.setattr(Turns, "_has_room", lambda *_arguments: True)
    for hundredth in range(100):
        fleet.router.release(hundredth / 100)
    assert 3 <= n_walks <= 5
