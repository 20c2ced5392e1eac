"""Whatever is asked for, in whatever order: the engine loses no block and no request."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixroute.demo.engine import Engine, EngineConfig
from prefixroute.demo.engine.request import EngineRequest, FinishReason

CONFIG = EngineConfig(block_size=4, kv_tokens=64, max_model_len=48, max_num_batched_tokens=20, max_num_seqs=4)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine[EngineRequest] = Engine(CONFIG)
        self.now_s = 0.0
        self.in_step = False
        self.added: list[EngineRequest] = []
        self.got: Counter[int] = Counter()

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 12),
        n_prompt=st.integers(1, 40),
        n_output=st.integers(1, 8),
    )
    def add(self, family: int, shared: int, n_prompt: int, n_output: int) -> None:
        """A prompt that shares its first `shared` blocks with its family, and the rest with nobody."""
        own = 1_000 * (len(self.added) + 1)
        n_blocks = (n_prompt + n_output - 1) // 4
        hashes = [family * 100 + i if i < shared else own + i for i in range(n_blocks)]
        one = EngineRequest(n_prompt, n_output, hashes)
        self.engine.add(one, self.now_s)
        self.added.append(one)

    @precondition(lambda self: not self.in_step)
    @rule()
    def start_step(self) -> None:
        had_requests = self.engine.n_requests > 0
        duration_s = self.engine.start_step(self.now_s)
        # Something always moves: no set of requests can block the engine for good.
        assert (duration_s is not None) == had_requests
        if duration_s is not None:
            assert duration_s > 0
            self.now_s += duration_s
            self.in_step = True

    @precondition(lambda self: self.in_step)
    @rule()
    def finish_step(self) -> None:
        for one in self.engine.finish_step(self.now_s):
            self.got[id(one)] += 1
        self.in_step = False

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.added))
        here = one.finish_reason is None
        assert self.engine.abort(one, self.now_s) == here

    @invariant()
    def blocks_in_use_and_free_add_up(self) -> None:
        pool = self.engine.pool
        references = Counter(block for one in self.added for block in one.blocks)
        assert [pool.references(block) for block in range(pool.n_blocks)] == [
            references[block] for block in range(pool.n_blocks)
        ]
        assert len(references) + pool.n_free == pool.n_blocks

    @invariant()
    def requests_hold_what_they_need_and_no_more(self) -> None:
        for one in self.added:
            if one.finish_reason is not None:
                assert one.blocks == []
            assert one.n_computed <= len(one.blocks) * CONFIG.block_size or one.finish_reason is not None
            assert one.cached_tokens is None or one.cached_tokens < one.n_prompt + one.n_output
            assert one.n_output == self.got[id(one)]

    def teardown(self) -> None:
        if self.in_step:
            self.finish_step()
        for _ in range(10_000):
            self.start_step()
            if not self.in_step:
                break
            self.finish_step()
        assert self.engine.n_requests == 0
        for one in self.added:
            assert one.finish_reason is not None
            if one.finish_reason != FinishReason.ABORT:
                assert one.n_output == one.n_output_wanted
        assert self.engine.pool.n_free == self.engine.pool.n_blocks


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
