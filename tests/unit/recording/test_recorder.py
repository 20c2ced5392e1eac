"""The recorder: nothing of it on the caller's thread, a bounded backlog, and disks that fail."""

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from prefixroute.config.settings import RecordingSettings
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.errors import ConfigError
from prefixroute.record import RequestRecord
from prefixroute.recording.files import RecordingFiles
from prefixroute.recording.form import Header
from prefixroute.recording.prefixes import SLICE_BYTES, PrefixHasher
from prefixroute.recording.recorder import PAUSE_S, Recorder, start_recorder
from prefixroute.recording.row import Pending, line

KEY = b"k" * 32
PROMPT = read_prompt(Api.COMPLETIONS, b'{"model": "llama", "prompt": "%s"}' % (b"once upon a time " * 100))

Make = Callable[..., Recorder]


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Disk(RecordingFiles):
    """Real files on a disk that can be told to stall or to fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Header(16, "0"), max_file_bytes=2**20, n_files=2)
        self.error: OSError | None = None
        self.n_tries = 0
        self.writing = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def write(self, lines: Iterable[bytes]) -> None:
        self.n_tries += 1
        self.writing.set()
        self.goes_on.wait()
        if self.error is not None:
            raise self.error
        super().write(lines)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "rec.jsonl")


@pytest.fixture
def make(disk: Disk, clock: Clock) -> Iterator[Make]:
    made: list[Recorder] = []

    def make(**changes: Any) -> Recorder:
        options: dict[str, Any] = {"clock": clock, "knows_model": lambda model: model == "llama", "wall_s": 5000.0}
        made.append(Recorder(disk, KEY, 16, **{**options, **changes}))
        return made[-1]

    yield make
    disk.goes_on.set()
    for one in made:
        one.close()


def a_record(number: int = 0) -> RequestRecord:
    return RequestRecord(f"req-{number}", "POST", "/v1/completions", "aiohttp", 1000.0 + number)


def rows(disk: Disk) -> list[dict[str, Any]]:
    return [orjson.loads(row) for row in disk.path.read_bytes().splitlines()[1:]]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def counts(written: int = 0, dropped: int = 0, failed: int = 0) -> dict[str, int]:
    return {"written": written, "dropped": dropped, "failed": failed}


def test_closing_writes_what_is_left(make: Make, disk: Disk) -> None:
    recorder = make()
    for number in range(1000):
        recorder.record(a_record(number), PROMPT)
    recorder.close()
    assert recorder.counts() == counts(written=1000)
    # Unix time is that of the start and what the monotonic clock says since.
    assert [row["timestamp"] for row in rows(disk)] == [(5000 + number) * 1000 for number in range(1000)]


def test_hashing_and_writing_are_another_threads(make: Make, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    ids = PrefixHasher.ids

    def noted(self: PrefixHasher, scope: bytes, material: bytes) -> list[int]:
        threads.append(threading.current_thread().name)
        return ids(self, scope, material)

    monkeypatch.setattr(PrefixHasher, "ids", noted)
    disk.goes_on.clear()
    recorder = make()
    recorder.record(a_record(), PROMPT)
    assert disk.writing.wait(5)
    # The disk stands still, and whoever records does not notice.
    for number in range(99):
        recorder.record(a_record(number), PROMPT)
    assert threads == ["recorder"]
    disk.goes_on.set()
    recorder.close()
    assert set(threads) == {"recorder"}
    assert recorder.counts() == counts(written=100)


def test_the_thread_gives_way_between_slices(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make()
    slices: list[None] = []
    monkeypatch.setattr(recorder._hasher, "_between", lambda: slices.append(None))
    n_bytes = 0
    for number in range(120):
        recorder.record(a_record(number), PROMPT)
        n_bytes += len(PROMPT.key) // 64 * 64
    recorder.close()
    assert len(slices) == n_bytes // SLICE_BYTES == 3


def test_a_backlog_that_is_full_drops_and_keeps_to_its_bound(make: Make, disk: Disk) -> None:
    disk.goes_on.clear()
    n_bytes = Pending.of(a_record(), PROMPT, "llama").n_bytes
    recorder = make(max_backlog_bytes=10 * n_bytes)
    recorder.record(a_record(), PROMPT)
    assert disk.writing.wait(5)
    for number in range(50):
        recorder.record(a_record(number), PROMPT)
    # What is being written still counts.
    assert recorder.counts() == counts(dropped=41)
    disk.goes_on.set()
    recorder.flush()
    recorder.record(a_record(), PROMPT)
    recorder.close()
    assert recorder.counts() == counts(written=11, dropped=41)
    recorder.record(a_record(), PROMPT)
    assert recorder.counts() == counts(written=11, dropped=42)


def test_what_asks_for_no_prefill_is_not_recorded(make: Make, disk: Disk) -> None:
    recorder = make()
    for api, body in ((Api.OTHER, b""), (Api.TOKENIZE, b'{"prompt": "hello"}'), (Api.CHAT, b"no JSON")):
        recorder.record(a_record(), read_prompt(api, body))
    recorder.close()
    assert recorder.counts() == counts()


def test_a_model_that_nobody_lists_is_not_named(make: Make, disk: Disk) -> None:
    recorder = make()
    for model in (b'"llama"', b'"the client wrote this"', b"null"):
        recorder.record(a_record(), read_prompt(Api.COMPLETIONS, b'{"prompt": "hello there", "model": %s}' % model))
    recorder.close()
    assert [row["model"] for row in rows(disk)] == ["llama", "other", None]


def test_a_disk_that_fails_is_told_once_and_tried_again_after_a_pause(
    make: Make, disk: Disk, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recorder = make()
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    recorder.record(a_record(), PROMPT)
    recorder.flush()
    for number in range(5):
        recorder.record(a_record(number), PROMPT)
    recorder.flush()
    assert recorder.counts() == counts(failed=6)
    # While it pauses, nothing is kept and nothing is tried.
    assert disk.n_tries == 1

    clock.now_s += PAUSE_S
    recorder.record(a_record(), PROMPT)
    recorder.flush()
    assert (disk.n_tries, recorder.counts()) == (2, counts(failed=7))
    failed = f"recording to {disk.path} failed: No space left on device; requests are not recorded until it works again"
    assert warnings(caplog) == [failed]

    clock.now_s += PAUSE_S
    disk.error = None
    recorder.record(a_record(7), PROMPT)
    recorder.flush()
    recorder.record(a_record(8), PROMPT)
    recorder.close()
    assert recorder.counts() == counts(written=2, failed=7)
    assert warnings(caplog) == [failed, f"recording to {disk.path} works again"]
    assert [row["timestamp"] for row in rows(disk)] == [5_007_000, 5_008_000]


def test_what_waited_behind_a_disk_that_then_failed_is_not_tried(make: Make, disk: Disk) -> None:
    disk.goes_on.clear()
    recorder = make()
    recorder.record(a_record(), PROMPT)
    assert disk.writing.wait(5)
    for number in range(1000):
        recorder.record(a_record(number), PROMPT)
    disk.error = OSError(errno.EIO, "Input/output error")
    disk.goes_on.set()
    recorder.flush()
    assert (disk.n_tries, recorder.counts()) == (1, counts(failed=1001))


def test_a_fault_in_one_line_costs_that_line_and_is_told_without_its_text(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails_at_first(item: Pending, *rest: Any) -> bytes:
        if item.record.request_id == "req-0":
            raise ValueError("a piece of the prompt")
        return line(item, *rest)

    monkeypatch.setattr("prefixroute.recording.recorder.line", fails_at_first)
    recorder = make()
    for number in range(3):
        recorder.record(a_record(number), PROMPT)
    recorder.close()
    assert recorder.counts() == counts(written=2, failed=1)
    assert warnings(caplog) == ["a request could not be recorded: ValueError"]


# ---------------------------------------------------------------------- as configured


def start(path: Path, **settings: Any) -> Recorder:
    table = RecordingSettings.model_validate({"path": str(path), **settings})
    return start_recorder(table, clock=Clock(), knows_model=lambda model: True)


def recorded(recorder: Recorder, prompt: Prompt = PROMPT) -> None:
    recorder.record(a_record(), prompt)
    recorder.close()
    assert recorder.counts() == counts(written=1)


def test_runs_with_the_same_key_write_the_same_ids(tmp_path: Path) -> None:
    path = tmp_path / "rec.jsonl"
    for _ in range(2):
        recorded(start(path))
    head, first, second = map(orjson.loads, path.read_bytes().splitlines())
    assert head.keys() == {"format", "version", "block_tokens", "key_id"}
    assert head["block_tokens"] == 128
    assert first["hash_ids"] == second["hash_ids"]
    assert len(first["hash_ids"]) == 1700 // 4 // 128
    assert (tmp_path / "rec.jsonl.key").stat().st_mode & 0o777 == 0o600


def test_a_directory_that_is_missing_is_named_and_not_the_key(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "rec.jsonl"
    with pytest.raises(ConfigError) as caught:
        start(path)
    assert str(caught.value) == (
        f"recording.path: {path}: there is no directory {tmp_path}/missing (make it, or choose another path)"
    )


def test_a_directory_is_no_recording_and_gets_no_key(tmp_path: Path) -> None:
    (tmp_path / "rec").mkdir()
    with pytest.raises(ConfigError, match=r"rec: is a directory \(name a file in it\)$"):
        start(tmp_path / "rec")
    assert [path.name for path in tmp_path.iterdir()] == ["rec"]


def test_a_path_that_cannot_even_be_looked_at_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    with pytest.raises(ConfigError, match=rf"^recording\.path: {path}: File name too long$"):
        start(path)


def test_block_size_and_key_file_are_settings(tmp_path: Path) -> None:
    recorded(start(tmp_path / "a", key_file=str(tmp_path / "key"), block_tokens=64))
    recorded(start(tmp_path / "b", key_file=str(tmp_path / "key"), block_tokens=128))
    fine, coarse = (orjson.loads((tmp_path / name).read_bytes().splitlines()[1])["hash_ids"] for name in "ab")
    assert fine[1::2] == coarse
    assert not (tmp_path / "a.key").exists()


def test_what_the_operator_must_mend_is_one_clear_line(tmp_path: Path) -> None:
    foreign = tmp_path / "report.txt"
    foreign.write_text("figures\n")
    with pytest.raises(ConfigError, match=rf"^recording\.path: {foreign}: is there already and no recording"):
        start(foreign)
    key_file = tmp_path / "missing" / "key"
    with pytest.raises(ConfigError, match=rf"^recording\.key_file: {key_file}: No such file or directory$"):
        start(tmp_path / "rec.jsonl", key_file=str(key_file))


def test_a_disk_that_is_full_at_the_start_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: RecordingFiles) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordingFiles, "open", full)
    recorder = start(tmp_path / "rec.jsonl")
    recorder.record(a_record(), PROMPT)
    recorder.close()
    assert recorder.counts() == counts(failed=1)
    assert len(warnings(caplog)) == 1
