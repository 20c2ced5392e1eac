"""The engine on virtual time: every figure here can be checked by hand."""

from collections.abc import Sequence

import pytest

from prefixroute.demo.engine import Engine, EngineConfig
from prefixroute.demo.engine.request import EngineRequest, FinishReason
from prefixroute.errors import ConfigError

# Sixteen tokens a block, a hundred blocks; otherwise the speeds that are assumed.
CONFIG = EngineConfig(kv_tokens=1_600)


def run(engine: Engine[EngineRequest], now_s: float = 0.0, n_steps: int | None = None) -> float:
    """Steps until the engine is idle, or `n_steps` of them; the time at the end."""
    while n_steps is None or n_steps > 0:
        duration_s = engine.start_step(now_s)
        if duration_s is None:
            break
        now_s += duration_s
        engine.finish_step(now_s)
        n_steps = None if n_steps is None else n_steps - 1
    return now_s


def request(n_prompt: int, n_output: int = 1, name: int = 1, hashes: Sequence[int] | None = None) -> EngineRequest:
    """Requests of one `name` share all their blocks, as far as they both reach."""
    if hashes is None:
        hashes = [name * 1_000_000 + index for index in range((n_prompt + n_output - 1) // 16)]
    return EngineRequest(n_prompt, n_output, hashes)


def serve(engine: Engine[EngineRequest], *requests: EngineRequest) -> None:
    for one in requests:
        engine.add(one, 0.0)
    run(engine)


def test_idle_latency_is_the_cost_model_by_hand() -> None:
    engine: Engine[EngineRequest] = Engine(EngineConfig())
    one = request(1_000, 3)
    engine.add(one, 5.0)
    end_s = run(engine, 5.0)

    prefill_s = 1_000 * (1 + 500 / 32_768) / 16_000
    first_token_s = 5.0 + 0.007 + prefill_s
    assert one.first_token_s == pytest.approx(first_token_s)
    # The two other tokens attend to 1,000 and 1,001 tokens.
    decode_s = 2 * (0.007 + 0.00003) + 2_001 * 52e-9
    assert end_s == one.finished_s == pytest.approx(first_token_s + decode_s)


def test_chunks_of_a_long_prompt_cost_what_the_whole_would() -> None:
    config = EngineConfig()
    engine: Engine[EngineRequest] = Engine(config)
    one = request(20_000)
    engine.add(one, 0.0)
    end_s = run(engine)

    assert engine.counters.steps == 3
    assert end_s == pytest.approx(3 * 0.007 + config.prefill_s(0, 20_000))


def test_speed_divides_all_times() -> None:
    ends_s = []
    for speed in (1.0, 10.0):
        engine: Engine[EngineRequest] = Engine(EngineConfig(speed=speed))
        engine.add(request(1_000, 20), 0.0)
        ends_s.append(run(engine))
    assert ends_s[0] == pytest.approx(10 * ends_s[1])


def test_decodes_go_on_beside_the_prefill_of_another_prompt() -> None:
    config = EngineConfig()
    engine: Engine[EngineRequest] = Engine(config)
    first = request(100, 10, name=1)
    engine.add(first, 0.0)
    now_s = run(engine, n_steps=1)
    second = request(12_000, 1, name=2)
    engine.add(second, now_s)

    duration_s = engine.start_step(now_s)
    # One token of the budget of 8,192 is the decode's.
    assert duration_s == pytest.approx(config.step_time_s(config.prefill_s(0, 8_191), 1, 100))
    assert engine.finish_step(now_s) == [first]
    assert second.n_computed == 8_191


def test_a_cache_that_holds_everything_hits_everything_shared() -> None:
    engine: Engine[EngineRequest] = Engine(EngineConfig(kv_tokens=10_000_000))
    for name in range(20):
        serve(engine, request(1_000, 1, name))
    assert engine.counters.prefix_cache_hits == 0
    for name in range(20):
        serve(engine, request(1_600, 1, name))

    # 1,000 tokens are 62 full blocks.
    assert engine.counters.prefix_cache_hits == engine.counters.prompt_tokens_cached == 20 * 62 * 16
    assert engine.counters.prefix_cache_queries == engine.counters.prompt_tokens == 20 * 2_600


@pytest.mark.parametrize(("n_prompt", "cached"), [(64, 48), (65, 64), (63, 48), (16, 0), (1, 0)])
def test_at_most_all_but_one_token_of_a_prompt_is_a_hit(n_prompt: int, cached: int) -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    again = request(n_prompt)
    serve(engine, request(n_prompt))
    serve(engine, again)
    assert again.cached_tokens == cached


def test_a_warm_prompt_costs_only_what_is_new() -> None:
    config = EngineConfig()
    engine: Engine[EngineRequest] = Engine(config)
    serve(engine, request(4_000))
    engine.add(request(4_096), 0.0)
    assert run(engine) == pytest.approx(config.step_time_s(config.prefill_s(4_000, 96), 0, 0))


def test_the_answer_of_one_turn_is_cached_for_the_next() -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    serve(engine, request(100, 61))
    following = request(200)
    serve(engine, following)
    # 160 of 161 tokens were computed: the last one never is.
    assert following.cached_tokens == 160


def test_without_prefix_caching_nothing_hits() -> None:
    engine: Engine[EngineRequest] = Engine(EngineConfig(enable_prefix_caching=False))
    serve(engine, request(100), request(100))
    again = request(100)
    serve(engine, again)
    assert again.cached_tokens == 0
    assert engine.pool.n_cached == 0


def test_two_alike_in_one_batch_share_their_blocks() -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    first, second = request(100), request(100)
    engine.add(first, 0.0)
    engine.add(second, 0.0)
    engine.start_step(0.0)
    assert second.cached_tokens == 96
    assert first.blocks[:6] == second.blocks[:6]
    assert engine.pool.n_blocks - engine.pool.n_free == 8


def test_what_exceeds_the_cache_is_evicted_from_its_tail() -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    serve(engine, request(800, name=1))
    serve(engine, request(1_200, name=2))
    # 100 blocks: 75 for the second leave 25 of the first, from its start.
    again = request(800, name=1)
    serve(engine, again)
    assert again.cached_tokens == 25 * 16


def test_requests_wait_in_order_for_free_blocks() -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    requests = [request(800, 1, name=1), request(900, 1, name=2), request(16, 1, name=3)]
    for one in requests:
        engine.add(one, 0.0)
    end_s = run(engine, n_steps=1)
    # The third would fit beside the first, but does not overtake.
    assert [one.finish_reason for one in requests] == [FinishReason.LENGTH, None, None]
    assert engine.n_waiting == 2
    run(engine, end_s)
    assert requests[1].scheduled_s == requests[2].scheduled_s == end_s


def test_max_num_seqs_bounds_the_batch() -> None:
    engine: Engine[EngineRequest] = Engine(EngineConfig(max_num_seqs=2))
    for name in range(3):
        engine.add(request(10, 2, name), 0.0)
    engine.start_step(0.0)
    assert (engine.n_running, engine.n_waiting) == (2, 1)


def test_usage_counts_what_is_in_use_not_what_is_cached() -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    engine.add(request(160, 2), 0.0)
    run(engine, n_steps=2)
    assert engine.kv_usage_ratio == pytest.approx(0.0)
    assert engine.pool.n_cached == 10

    engine.add(request(160, 2), 0.0)
    engine.start_step(0.0)
    assert engine.kv_usage_ratio == pytest.approx(0.10)


def test_when_blocks_run_out_the_latest_starts_over() -> None:
    engine: Engine[EngineRequest] = Engine(EngineConfig(kv_tokens=160))
    first, second = request(64, 40, name=1), request(64, 40, name=2)
    engine.add(first, 0.0)
    engine.add(second, 0.0)
    run(engine)

    assert engine.counters.preemptions == second.n_preemptions == 1
    assert first.n_preemptions == 0
    assert first.finished_s is not None
    assert second.finished_s is not None
    assert first.finished_s < second.finished_s
    assert first.n_output == second.n_output == 40
    # Counted once, when it was first scheduled.
    assert engine.counters.prefix_cache_queries == 128
    assert engine.counters.generation_tokens == 80
    assert engine.pool.n_free == engine.pool.n_blocks


@pytest.mark.parametrize("n_steps", [0, 1, 5])
def test_abort_frees_everything(n_steps: int) -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    one = request(100, 50)
    engine.add(one, 0.0)
    run(engine, n_steps=n_steps)

    assert engine.abort(one, 1.0)
    assert one.finish_reason == FinishReason.ABORT
    assert engine.n_requests == 0
    assert engine.pool.n_free == engine.pool.n_blocks
    assert engine.start_step(2.0) is None
    assert not engine.abort(one, 3.0)


def test_abort_in_the_middle_of_a_step_takes_effect_at_once() -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    leaving, staying = request(100, 50, name=1), request(100, 1, name=2)
    engine.add(leaving, 0.0)
    engine.add(staying, 0.0)
    engine.start_step(0.0)

    assert engine.abort(leaving, 0.0)
    assert engine.pool.n_blocks - engine.pool.n_free == len(staying.blocks)
    assert engine.finish_step(1.0) == [staying]
    assert leaving.n_output == 0


def test_the_last_reason_is_the_requests_own() -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    one = EngineRequest(10, 1, [], FinishReason.STOP)
    serve(engine, one)
    assert one.finish_reason == FinishReason.STOP


def test_what_can_never_fit_is_refused() -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    engine.add(request(1_599, 1), 0.0)
    with pytest.raises(ValueError, match="exceed the context of 1600 tokens"):
        engine.add(request(1_600, 1), 0.0)


def test_the_queue_limit_counts_waiting_and_running() -> None:
    engine: Engine[EngineRequest] = Engine(EngineConfig(max_num_seqs=1, max_num_queued_reqs=2))
    engine.add(request(10, 2), 0.0)
    engine.start_step(0.0)
    assert not engine.is_full
    engine.add(request(10, 2), 0.0)
    assert engine.is_full


def test_reset_prefix_cache_forgets_all_unless_requests_run() -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    engine.add(request(100, 2), 0.0)
    run(engine, n_steps=1)
    assert not engine.reset_prefix_cache()
    run(engine)
    assert engine.reset_prefix_cache()
    again = request(100)
    serve(engine, again)
    assert again.cached_tokens == 0


def test_steps_are_started_and_finished_in_turn() -> None:
    engine: Engine[EngineRequest] = Engine(CONFIG)
    with pytest.raises(RuntimeError):
        engine.finish_step(0.0)
    engine.add(request(10), 0.0)
    engine.start_step(0.0)
    with pytest.raises(RuntimeError):
        engine.start_step(0.0)


@pytest.mark.parametrize("n", [0, -1])
def test_a_request_has_tokens(n: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        EngineRequest(n, 1, [])
    with pytest.raises(ValueError, match="at least one"):
        EngineRequest(1, n, [])


def test_useless_configurations_are_refused() -> None:
    with pytest.raises(ConfigError, match="speed is 0, but must be above 0"):
        EngineConfig(speed=0)
    with pytest.raises(ConfigError, match="kv_tokens 15"):
        EngineConfig(kv_tokens=15)
