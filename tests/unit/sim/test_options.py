"""Options of the command: read as meant, and one clear line for what is not understood."""

from pathlib import Path
from typing import Any

import pytest

from prefixroute.errors import ConfigError
from prefixroute.sim.cell import Variant
from prefixroute.sim.options import SimulateOptions, parse_seeds, parse_source, parse_strategies
from prefixroute.sim.run import Outage
from prefixroute.sim.sources import FromTrace, Generated
from prefixroute.sim.strategies import NAMES


def options(**changed: Any) -> SimulateOptions:
    return SimulateOptions(**{"traces": ["chat"], "strategies": "random", **changed})


def test_defaults() -> None:
    (cell,) = options().cells()
    assert (cell.source, cell.strategy, cell.n_requests, cell.n_instances) == (Generated("chat"), "random", 12_000, 8)
    assert (cell.load, cell.rate, cell.seed, cell.variant, cell.engine.kv_tokens) == (1.0, None, 0, Variant(), 400_000)


def test_lists_are_multiplied() -> None:
    asked = options(traces=["chat", "rag"], strategies="random,preble", instances="2,8", load="0.5,1", seeds="0-2")
    cells = asked.cells()
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 2 * 3
    assert [cell.strategy for cell in cells[:4]] == ["random", "random", "random", "preble"]


def test_a_rate_instead_of_a_load() -> None:
    assert [(cell.load, cell.rate) for cell in options(rate="2,3.5").cells()] == [(None, 2.0), (None, 3.5)]


def test_what_is_wrong_with_the_fleet() -> None:
    (cell,) = options(slow=["0.4", "i3=2"], kill=["i0@120", "i1@5:30"]).cells()
    assert cell.variant == Variant(((0, 0.4), (3, 2.0)), (Outage(0, 120.0, 60.0), Outage(1, 5.0, 30.0)))


def test_commas_in_strategies() -> None:
    text = "random, expected_latency:hold_s=1,max_held=5 ,preble:eviction_weight=0.1,dynamo"
    assert parse_strategies(text) == [
        "random",
        "expected_latency:hold_s=1,max_held=5",
        "preble:eviction_weight=0.1",
        "dynamo",
    ]
    assert parse_strategies("all") == list(NAMES)


def test_seeds() -> None:
    assert parse_seeds("0,5-7, 9") == [0, 5, 6, 7, 9]


def test_a_file_is_a_trace_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat").write_text("")
    monkeypatch.chdir(tmp_path)
    assert parse_source("./chat") == FromTrace((Path("chat"),))
    assert parse_source("chat") == Generated("chat")
    assert FromTrace((Path("a/b.jsonl"),)).name == "b"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"traces": ["chatt"]}, "'chatt' is no file and no generated workload; did you mean 'chat'"),
        ({"traces": ["chat", "chat"]}, "a trace is named twice"),
        ({"strategies": "randon"}, "--strategies: strategy 'randon' is unknown; did you mean 'random'"),
        ({"strategies": "random,random"}, "--strategies: a strategy is named twice"),
        ({"strategies": ""}, "--strategies: strategy '' is unknown"),
        ({"strategies": "preble:x=1"}, "--strategies: strategy 'preble:x=1': unknown parameter x"),
        ({"instances": "0"}, "--instances: '0' is no whole number from 1 to 1,024"),
        ({"instances": "eight"}, "--instances: 'eight' is no whole number"),
        ({"load": "0"}, "--load: '0' is no number above 0"),
        ({"load": "1,1.0"}, "--load: a value is named twice"),
        ({"load": "1,"}, "--load: '' is no number above 0"),
        ({"rate": "nan"}, "--rate: 'nan' is no number above 0"),
        ({"load": "1", "rate": "1"}, "--load and --rate cannot be combined"),
        ({"seeds": "1-"}, "--seeds: '1-' is no number and no range"),
        ({"seeds": "-1"}, "--seeds: '-1' is no number"),
        ({"seeds": "3-1"}, "--seeds: '3-1' goes backwards"),
        ({"seeds": "0-99999"}, "is longer than 1,000 seeds"),
        ({"seeds": "1,0-2"}, "--seeds: a seed is named twice"),
        ({"slow": ["x"]}, "--slow: 'x' is no number above 0"),
        ({"slow": ["i8=0.5"]}, "--slow: 'i8' is none of the instances i0 to i7"),
        ({"slow": ["0=0.5"]}, "--slow: '0' is none of the instances"),
        ({"kill": ["i0"]}, "--kill: 'i0' is not written i0@120"),
        ({"kill": ["i2@5"], "instances": "2,8"}, "--kill: 'i2' is none of the instances i0 to i1"),
        ({"kill": ["i0@5:x"]}, "--kill: 'x' is no number above 0"),
        ({"kv_tokens": 10}, "kv_tokens 10 or max_model_len"),
    ],
)
def test_mistakes(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        options(**changed).cells()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"rate": "1e-300"}, "--rate"),
        ({"rate": "1e9"}, "--rate"),
        ({"load": "1e300"}, "--load"),
        ({"slow": ["i0=1e-9"]}, "--slow"),
        ({"kill": ["i0@1:1e300"]}, "--kill"),
    ],
)
def test_numbers_beyond_which_no_time_can_be_told(changed: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: .* is not within 0.000001 and 1,000,000$"):
        options(**changed).cells()
