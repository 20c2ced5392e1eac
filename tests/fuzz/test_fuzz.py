"""A few hundred cases of each target, and every case that was ever found."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.__main__ import FOUND, TARGETS
from tests.fuzz.case import Case, Change, Edit, Ending, Finding, changed, shrunk
from tests.fuzz.lane_seeds import plain
from tests.fuzz.lanes import LanesTarget
from tests.fuzz.targets import Target
from tests.fuzz.watch import Watch

# In all, on a busy core, well below 20 s.
N_EXAMPLES = {"prompt": 300, "kv_events": 300, "config": 150, "requests": 300, "answers": 300, "lanes": 300}


class Bench:
    """A target on a loop of its own, for tests that are called by Hypothesis."""

    def __init__(self, make: Callable[[], Target], runner: asyncio.Runner) -> None:
        self._runner = runner
        self._target = make()
        self.corpus, self.words = self._target.corpus, self._target.words
        self._runner.run(self._target.__aenter__())

    def run(self, case: Case) -> None:
        self._runner.run(self._target.run(case))

    def rest(self) -> None:
        self._runner.run(self._target.rest())

    def close(self) -> None:
        self._runner.run(self._target.__aexit__(None, None, None))


@pytest.fixture(params=sorted(TARGETS))
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        one = Bench(TARGETS[request.param], runner)
        try:
            yield one
        finally:
            one.close()


@st.composite
def drawn_cases(draw: st.DrawFn, corpus: Sequence[bytes], words: Sequence[bytes]) -> Case:
    positions = st.integers(0, 1 << 16)
    word = st.sampled_from(words) | st.binary(min_size=1, max_size=8) | st.sampled_from(corpus)
    change = st.builds(Change, st.sampled_from(Edit), positions, st.integers(0, 64), word)
    data = changed(draw(st.sampled_from(corpus)), draw(st.lists(change, max_size=5)))
    cuts = tuple(draw(st.lists(positions, max_size=4)))
    return Case(data, cuts, draw(st.sampled_from(Ending)), draw(positions))


def test_no_bytes_bring_it_down(bench: Bench, request: pytest.FixtureRequest) -> None:
    """Nothing reaches the top, every connection ends or answers, and all that was taken is given back."""
    for data in bench.corpus:
        bench.run(Case(data))

    @settings(
        max_examples=N_EXAMPLES[request.node.callspec.params["bench"]],
        phases=(Phase.generate, Phase.target),
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_cases(bench.corpus, bench.words))
    def holds(case: Case) -> None:
        bench.run(case)

    holds()
    bench.rest()


@pytest.mark.parametrize("path", sorted(FOUND.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_once_holds_now(path: Path) -> None:
    make = TARGETS[path.name.partition("-")[0]]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        bench = Bench(make, runner)
        try:
            for _ in range(20):  # some of it is a matter of timing
                bench.run(Case.from_json(path.read_text(encoding="utf-8")))
            bench.rest()
        finally:
            bench.close()


# The fuzzer itself


async def test_a_case_is_shrunk_to_what_fails() -> None:
    async def fails(case: Case) -> bool:
        return b"bad" in case.data

    case = await shrunk(Case(b"x" * 100 + b"bad" + b"y" * 100, (1, 2), Ending.RESET, 7), fails)

    assert case == Case(b"bad")


def test_a_case_survives_being_kept() -> None:
    case = Case(b"\x00\xff", (3,), Ending.STAY, 9)

    assert Case.from_json(json.dumps(case.to_json())) == case


def test_cuts_change_nothing_but_the_pieces() -> None:
    assert Case(b"abcdef", (2, 4, 2)).pieces == [b"ab", b"cd", b"ef"]


async def test_lanes_are_two() -> None:
    """One fast, one not; else they would be compared in vain."""
    async with LanesTarget() as lanes:
        await lanes.run(Case(plain() + plain()))

        assert lanes.taken == {"fast": 2, "aiohttp": 2}


async def test_an_error_that_is_logged_is_a_finding() -> None:
    async with Watch() as watch:
        logging.getLogger("prefixroute.any").error("a fault")

    with pytest.raises(Finding, match="a fault"):
        watch.check()


async def test_an_exception_that_nobody_fetches_is_a_finding() -> None:
    async def fault() -> None:
        raise LookupError("lost")

    async with Watch() as watch:
        task = asyncio.create_task(fault())
        await asyncio.wait([task])
        del task
        with pytest.raises(Finding, match="lost"):
            await watch.wait_rest()


async def test_a_file_that_stays_open_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.fuzz.watch.PATIENCE_S", 0.01)
    async with Watch() as watch:
        with (tmp_path / "file").open("w"), pytest.raises(Finding, match="1 files stay open"):
            await watch.wait_rest()
