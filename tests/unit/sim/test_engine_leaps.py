"""Leaps are a shortcut: what comes out is what single steps make of the same requests."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixroute.demo.engine import Engine, EngineConfig, EngineRequest

# Odd on purpose: no arrival falls on the end of a step, where rounding would decide which came first.
_TICK_S = 0.001_713_579

Ask = tuple[int, int, int, int, int]


def requests_of(asks: Sequence[Ask], block_size: int) -> list[tuple[float, EngineRequest]]:
    """Each with its time. Prompts of one family share their first blocks; answers are shared with nobody.

    (A prompt that contains what another request is just being answered would be admitted a little late by a leap. In
    a simulation nobody knows an answer before it has ended.)
    """
    arrivals: list[tuple[float, EngineRequest]] = []
    at = 0
    for number, (after, family, shared, n_prompt, n_output) in enumerate(asks):
        at += after
        own = 1_000 * (number + 1)
        n_blocks = (n_prompt + n_output) // block_size
        hashes = [
            family * 100 + place if place < min(shared, n_prompt // block_size) else own + place
            for place in range(n_blocks)
        ]
        arrivals.append(((at + 0.123_457) * _TICK_S, EngineRequest(n_prompt, n_output, hashes)))
    return arrivals


def play(
    config: EngineConfig, asks: Sequence[Ask], max_steps: int
) -> tuple[list[EngineRequest], Engine[EngineRequest]]:
    """As a simulation drives an engine: whoever arrives in the middle of a leap cuts it."""
    engine: Engine[EngineRequest] = Engine(config)
    arrivals = requests_of(asks, config.block_size)
    waiting = list(reversed(arrivals))
    now_s, end_s = 0.0, None
    while waiting or end_s is not None:
        if waiting and (end_s is None or waiting[-1][0] < end_s):
            now_s, request = waiting.pop()
            engine.add(request, now_s)
            if end_s is not None:
                left_s = engine.cut(now_s)
                end_s = end_s if left_s is None else now_s + left_s
                continue
        else:
            assert end_s is not None
            now_s = end_s
            engine.finish_step(now_s)
        duration_s = engine.start_step(now_s, max_steps)
        end_s = None if duration_s is None else now_s + duration_s
    return [request for _, request in arrivals], engine


@given(
    asks=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 10), st.integers(0, 400)),
            st.integers(0, 2),
            st.integers(0, 8),
            st.integers(1, 40),
            st.integers(1, 24),
        ),
        min_size=1,
        max_size=14,
    ),
    kv_tokens=st.sampled_from([64, 100, 200]),
    block_size=st.sampled_from([1, 4, 16]),
    max_num_seqs=st.sampled_from([1, 3, 8]),
)
def test_leaps_and_single_steps_come_to_the_same(
    asks: list[Ask], kv_tokens: int, block_size: int, max_num_seqs: int
) -> None:
    config = EngineConfig(
        block_size=block_size,
        kv_tokens=kv_tokens,
        max_num_batched_tokens=24,
        max_num_seqs=max_num_seqs,
        # So that the times of steps differ by much more than rounding.
        step_per_sequence_s=0.003,
        step_per_token_s=0.000_1,
    )
    slow, slow_engine = play(config, asks, 1)
    fast, fast_engine = play(config, asks, 1_000_000)
    for one, other in zip(slow, fast, strict=True):
        assert one.finished_s is not None
        assert other.n_output == one.n_output == one.n_output_wanted
        assert other.cached_tokens == one.cached_tokens
        assert other.n_preemptions == one.n_preemptions
        assert other.scheduled_s == pytest.approx(one.scheduled_s, rel=1e-6)
        assert other.first_token_s == pytest.approx(one.first_token_s, rel=1e-6)
        assert other.finished_s == pytest.approx(one.finished_s, rel=1e-6)
    assert fast_engine.counters == slow_engine.counters
    assert fast_engine.pool.n_free == slow_engine.pool.n_free == config.n_blocks
    assert fast_engine.pool.n_cached == slow_engine.pool.n_cached
