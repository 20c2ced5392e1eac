"""The reader of traces: what it makes of good lines, and what it says of bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefixroute.errors import ConfigError
from prefixroute.sim.traces import Trace, TraceRequest, parse_trace, read_trace


def line(timestamp: float = 0, input_length: int = 600, output_length: int = 5, **changes: Any) -> bytes:
    ids = list(range(-(-input_length // 512)))
    row = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": ids}
    return json.dumps({**row, **changes}).encode() + b"\n"


def arrivals(*timestamps_ms: float, limit: int | None = None) -> list[float]:
    return [request.arrival_s for request in parse_trace(map(line, timestamps_ms), "trace", limit).requests]


def test_a_line_becomes_a_request() -> None:
    trace = parse_trace([line(1_500, 600, 7, hash_ids=[3, 9])], "trace")
    assert trace == Trace([TraceRequest(1.5, 600, 7, (3, 9))], 512)


def test_empty_lines_and_further_fields_are_passed_over() -> None:
    assert len(parse_trace([line(), b"\n", line(1, type="text"), b""], "trace").requests) == 2


def test_requests_of_one_tick_are_spread_evenly_over_it() -> None:
    assert arrivals(0, 0, 0, 3_000, 3_000) == pytest.approx([0, 1, 2, 3, 4.5])


def test_a_tick_that_lasts_longer_is_spread_over_three_seconds() -> None:
    assert arrivals(0, 0, 9_000) == pytest.approx([0, 1.5, 9])


def test_exact_times_stay_as_they_are() -> None:
    assert arrivals(0, 40, 277, 471) == pytest.approx([0, 0.04, 0.277, 0.471])


def test_a_limit_does_not_move_the_requests_before_it() -> None:
    assert arrivals(0, 0, 0, 3_000, limit=2) == pytest.approx([0, 1])
    assert arrivals(0, 3_000, 3_000, limit=2) == pytest.approx([0, 3])
    assert arrivals(0, 0, limit=9) == pytest.approx([0, 1.5])


def test_what_comes_after_the_limit_is_not_looked_at() -> None:
    lines = [line(0), line(3_000), line(6_000), b"garbage"]
    assert len(parse_trace(lines, "trace", limit=2).requests) == 2


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (b"{", "not JSON"),
        (b"[]", "not an object"),
        (b"\xff\xfe", "not JSON"),
        (b'{"timestamp": 1}', "input_length is missing"),
        (line(timestamp=-1), "timestamp must be a number"),
        (line(timestamp=True), "timestamp must be a number"),
        (line(timestamp="3"), "timestamp must be a number"),  # type: ignore[arg-type]  # that is the case
        (line(input_length=0, hash_ids=[]), "input_length must be an integer from 1"),
        (line(output_length=0), "output_length must be an integer from 1"),
        (line(output_length=2**40), "output_length must be an integer from 1"),
        (line(hash_ids="12"), "hash_ids must be a list of integers"),
        (line(hash_ids=[1, -2]), "hash_ids must be a list of integers"),
        (line(hash_ids=[1, True]), "hash_ids must be a list of integers"),
        (line(hash_ids=[1, 2**64]), "hash_ids must be a list of integers|not JSON"),
        (line(hash_ids=[1]), "hash_ids has 1 ids, but 600 tokens are 2 blocks"),
    ],
)
def test_a_broken_line_is_named_with_its_file_and_what_is_wrong(broken: bytes, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"^my\.jsonl, line 2: .*({what})"):
        parse_trace([line(), broken], "my.jsonl")


def test_time_does_not_go_back() -> None:
    with pytest.raises(ConfigError, match="line 3: timestamp is earlier"):
        arrivals(0, 3_000, 0)


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="no requests"):
        parse_trace([b"\n"], "trace")


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match=f"^{tmp_path}: Is a directory"):
        read_trace(tmp_path)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line(0) + line(0) + line(3_000))
    assert [request.arrival_s for request in read_trace(path).requests] == pytest.approx([0, 1.5, 3])
