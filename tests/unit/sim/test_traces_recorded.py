"""The reader of recordings: files that belong together, files that do not, and files whose writer died."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefixroute.errors import ConfigError
from prefixroute.recording.form import Header
from prefixroute.sim.traces import Trace, TraceRequest, read_trace

HEADER = Header(64, "0123456789abcdef")
# When the recording began, in ms.
T0 = 1_700_000_000_000


def line(after_ms: float, input_length: int = 100, output_length: int = 5, **changes: Any) -> bytes:
    ids = list(range(input_length // 64))
    row = {"timestamp": T0 + after_ms, "input_length": input_length, "output_length": output_length, "hash_ids": ids}
    return json.dumps({**row, "model": "m", "ttft_ms": None, **changes}).encode() + b"\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rec.jsonl"


def write(path: Path, *lines: bytes, header: Header = HEADER) -> Path:
    path.write_bytes(header.line() + b"".join(lines))
    return path


def arrivals(trace: Trace) -> list[float]:
    return [request.arrival_s for request in trace.requests]


def problem_of(*paths: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_trace(paths)
    return str(caught.value)


def test_a_recording_says_its_block_size_and_begins_at_its_first_request(path: Path) -> None:
    write(path, line(1_500, 200, 7, hash_ids=[3, 9, 2**63 - 1]), line(2_000, 63))
    assert read_trace(path) == Trace(
        [TraceRequest(0.0, 200, 7, (3, 9, 2**63 - 1)), TraceRequest(0.5, 63, 5, ())], block_tokens=64
    )


def test_times_are_taken_as_they_are_and_put_in_order(path: Path) -> None:
    """Lines are written when requests end; and what came at once did come at once."""
    write(path, line(9_000), line(0), line(0), line(3_000, input_length=128))
    trace = read_trace(path)
    assert arrivals(trace) == pytest.approx([0, 0, 3, 9])
    assert trace.requests[2].input_tokens == 128
    assert arrivals(read_trace(path, limit=3)) == pytest.approx([0, 0, 3])


def test_ids_may_cover_less_than_the_prompt(path: Path) -> None:
    write(path, line(0, 1_000, hash_ids=[]), line(0, 1_000, hash_ids=[1]))
    assert [request.hash_ids for request in read_trace(path).requests] == [(), (1,)]


def test_rotated_files_are_one_trace(path: Path) -> None:
    write(path, line(2_000), line(3_000))
    write(path.with_name("rec.jsonl.1"), line(1_000))
    write(path.with_name("rec.jsonl.2"), line(0))
    # Of another key, and only namesakes; then one too many.
    write(path.with_name("rec.jsonl.3"), line(0), header=Header(64, "f" * 16))
    write(path.with_name("rec.jsonl.5"), line(0))
    assert arrivals(read_trace(path)) == pytest.approx([0, 1, 2, 3])
    # Named or not, each counts once.
    assert len(read_trace([path, path.with_name("rec.jsonl.2")]).requests) == 4
    assert arrivals(read_trace(path.with_name("rec.jsonl.2"))) == [0]


def test_runs_with_the_same_key_are_one_trace(path: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", line(500))
    write(path, line(0), line(1_000))
    assert arrivals(read_trace([path, other])) == pytest.approx([0, 0.5, 1])


def test_files_that_were_put_together_are_one_trace(path: Path) -> None:
    path.write_bytes((HEADER.line() + line(0)) + (HEADER.line() + line(1_000)))
    assert arrivals(read_trace(path)) == pytest.approx([0, 1])


@pytest.mark.parametrize(
    ("header", "what"), [(Header(64, "f" * 16), "key"), (Header(128, HEADER.key_id), "block_tokens")]
)
def test_files_that_do_not_compare_are_refused(path: Path, tmp_path: Path, header: Header, what: str) -> None:
    write(path, line(0))
    other = write(tmp_path / "other.jsonl", line(0, 128, hash_ids=[1]), header=header)
    assert (
        problem_of(path, other)
        == f"{other}: beside {path}: was recorded with another {what}, so that ids do not compare"
    )
    path.write_bytes(HEADER.line() + line(0) + header.line())
    assert problem_of(path) == f"{path}, line 3: was recorded with another {what}, so that ids do not compare"


def test_other_traces_join_nothing(path: Path, tmp_path: Path) -> None:
    write(path, line(0))
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_bytes(line(0, hash_ids=[1]))
    for paths in ((path, mooncake), (mooncake, path), (mooncake, tmp_path / ".." / tmp_path.name / "m2.jsonl")):
        (tmp_path / "m2.jsonl").write_bytes(mooncake.read_bytes())
        assert "has no header of a recording, and other traces cannot be joined" in problem_of(*paths)


@pytest.mark.parametrize("left", [b"{", line(1)[:-30], b'{"timestamp": 17000'])
def test_a_line_cut_short_at_the_end_of_a_file_is_told_and_left_out(path: Path, left: bytes) -> None:
    write(path, line(2_000), left)
    write(path.with_name("rec.jsonl.1"), line(0), left)
    trace = read_trace(path)
    assert arrivals(trace) == pytest.approx([0, 2])
    assert trace.notes == (f"{path}, line 3: cut short, left out", f"{path}.1, line 3: cut short, left out")


def test_a_last_line_that_only_lacks_its_end_counts(path: Path) -> None:
    write(path, line(0), line(1_000).rstrip())
    trace = read_trace(path)
    assert arrivals(trace) == pytest.approx([0, 1])
    assert trace.notes == ()


def test_what_was_never_answered_is_left_out_and_counted(path: Path) -> None:
    write(path, line(0, output_length=0, status=503), line(500), line(1_000, output_length=0))
    trace = read_trace(path)
    assert arrivals(trace) == [0]
    assert trace.notes == ("2 requests were not answered and are left out: the lengths of answers are unknown",)


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (b"{\n", "not JSON"),
        (b"[]\n", "not an object"),
        (b"[]", "cut short"),
        (b'{"timestamp": 1}\n', "input_length is missing"),
        (line(0, timestamp=-1), "timestamp must be a number"),
        (line(0, input_length=0, hash_ids=[]), "input_length must be an integer from 1"),
        (line(0, output_length=-1), "output_length must be an integer from 1"),
        (line(0, hash_ids=[1, 2**64]), "hash_ids must be a list of integers|not JSON"),
        (line(0, 127, hash_ids=[1, 2]), "hash_ids has 2 ids, but 127 tokens are 1 full blocks"),
        (b'{"format": "other"}\n', "format is not 'prefixroute-recording'"),
    ],
)
def test_a_broken_line_is_named_with_its_file_and_what_is_wrong(path: Path, broken: bytes, what: str) -> None:
    if what == "cut short":
        assert read_trace(write(path, line(0), broken)).notes == (f"{path}, line 3: cut short, left out",)
        return
    write(path, line(0), broken, line(1))
    with pytest.raises(ConfigError, match=rf"^{path}, line 3: .*({what})"):
        read_trace(path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"format": "other"}, "format is not 'prefixroute-recording'"),
        ({"version": 2}, "version is not 1, the only one that is understood here"),
        ({"block_tokens": 0}, "block_tokens must be an integer from 1 to 65536"),
        ({"block_tokens": True}, "block_tokens must be an integer from 1 to 65536"),
        ({"key_id": 5}, "key_id must be text of 1 to 64 characters"),
    ],
)
def test_a_header_that_is_not_understood_is_told(path: Path, changes: dict[str, Any], what: str) -> None:
    path.write_text(json.dumps({**json.loads(HEADER.line()), **changes}) + "\n")
    assert problem_of(path) == f"{path}, line 1: {what}"


def test_a_recording_without_answers_is_refused(path: Path) -> None:
    assert problem_of(write(path)) == f"{path}: there are no answered requests in it"
    assert problem_of(write(path, line(0, output_length=0))) == f"{path}: there are no answered requests in it"
