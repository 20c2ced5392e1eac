"""Files of a recording: bounded, whole lines only, and never somebody else's."""

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixroute.recording.files import RecordingFiles
from prefixroute.recording.form import Header

HEADER = Header(128, "0123456789abcdef")
OTHER = Header(128, "fedcba9876543210")
HEAD = HEADER.line()


def files_of(path: Path, header: Header = HEADER, *, max_file_bytes: int = 1000, n_files: int = 3) -> RecordingFiles:
    return RecordingFiles(path, header, max_file_bytes=max_file_bytes, n_files=n_files)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rec.jsonl"


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Writes of this process beyond so many bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def numbered(lines: range) -> list[bytes]:
    return [b'{"line": %d}\n' % number for number in lines]


def write_all(files: RecordingFiles, lines: list[bytes]) -> None:
    files.write(lines)
    files.close()


def test_a_file_begins_with_its_header_and_is_its_owners(path: Path) -> None:
    write_all(files_of(path), numbered(range(2)))
    assert path.read_bytes() == HEAD + b'{"line": 0}\n{"line": 1}\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_next_run_goes_on_in_the_same_file(path: Path) -> None:
    for number in range(3):
        write_all(files_of(path), numbered(range(number, number + 1)))
    assert path.read_bytes() == HEAD + b"".join(numbered(range(3)))
    assert not path.with_name("rec.jsonl.1").exists()


@pytest.mark.parametrize("n_at_once", [1, 7, 500])
def test_size_and_number_of_files_are_bounded_and_the_newest_lines_stay(path: Path, n_at_once: int) -> None:
    files = files_of(path)
    lines = numbered(range(1000, 1500))
    for begin in range(0, len(lines), n_at_once):
        files.write(lines[begin : begin + n_at_once])
        assert sum(one.stat().st_size for one in path.parent.iterdir()) <= 3 * 1000
    files.close()
    assert files.n_written == 500
    assert sorted(os.listdir(path.parent)) == ["rec.jsonl", "rec.jsonl.1", "rec.jsonl.2"]
    kept: list[bytes] = []
    for name in ("rec.jsonl.2", "rec.jsonl.1", "rec.jsonl"):
        content = path.with_name(name).read_bytes()
        assert len(content) <= 1000
        head, *rest = content.splitlines(keepends=True)
        assert head == HEAD
        kept += rest
    assert kept == lines[-len(kept) :]
    # Two files are full, but for a line.
    assert len(kept) > 2 * (1000 - len(HEAD)) // len(lines[0]) - 2


def test_a_run_that_keeps_fewer_files_takes_the_others_away(path: Path) -> None:
    write_all(files_of(path, n_files=6), numbered(range(1000, 1500)))
    assert len(os.listdir(path.parent)) == 6
    write_all(files_of(path, n_files=2), numbered(range(1000, 1100)))
    assert sorted(os.listdir(path.parent)) == ["rec.jsonl", "rec.jsonl.1"]


def test_a_file_of_another_key_is_kept_as_an_older_one(path: Path) -> None:
    write_all(files_of(path), numbered(range(2)))
    write_all(files_of(path, OTHER), numbered(range(2, 3)))
    assert path.read_bytes() == OTHER.line() + b'{"line": 2}\n'
    assert path.with_name("rec.jsonl.1").read_bytes() == HEAD + b"".join(numbered(range(2)))


@pytest.mark.parametrize("left", [b"{", b'{"line": 1', b"x" * 200_000])
def test_half_a_line_left_by_a_killed_run_is_cut_off(path: Path, left: bytes) -> None:
    path.write_bytes(HEAD + b'{"line": 0}\n' + left)
    write_all(files_of(path, max_file_bytes=2**20), numbered(range(1, 2)))
    assert path.read_bytes() == HEAD + b"".join(numbered(range(2)))


@pytest.mark.parametrize("n_bytes", [0, 1, len(HEAD) - 1])
def test_half_a_header_left_by_a_killed_run_is_written_again(path: Path, n_bytes: int) -> None:
    path.write_bytes(HEAD[:n_bytes])
    write_all(files_of(path), numbered(range(1)))
    assert path.read_bytes() == HEAD + b'{"line": 0}\n'


@pytest.mark.parametrize(
    "content", [b"a report\n", b"a report", b"{}\n", b'{"format": "x"}\n', b"\x00" * 9, b"[1]\n", b"x" * 9000]
)
def test_what_is_no_recording_is_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(OSError, match="is there already and no recording") as caught:
        files_of(path).open()
    assert caught.value.errno == errno.EEXIST
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["rec.jsonl"]


def test_two_do_not_write_one_file(path: Path) -> None:
    first = files_of(path)
    first.write(numbered(range(1)))
    with pytest.raises(OSError, match="is being written by another process"):
        files_of(path).open()
    first.write(numbered(range(1, 2)))
    first.close()
    write_all(files_of(path), numbered(range(2, 3)))
    assert path.read_bytes() == HEAD + b"".join(numbered(range(3)))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place, what in ((tmp_path / "pipe", "is not a regular file"), (tmp_path, "Is a directory")):
        with pytest.raises(OSError, match=what):
            files_of(place).open()
    with pytest.raises(FileNotFoundError):
        files_of(tmp_path / "missing" / "rec.jsonl").open()


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_after_the_file_was_taken_away_a_new_one_is_begun(path: Path, how: str) -> None:
    files = files_of(path)
    files.write(numbered(range(1)))
    if how == "moved":
        path.rename(path.with_name("taken.jsonl"))
    else:
        path.unlink()
    files.write(numbered(range(1, 2)))
    files.close()
    assert path.read_bytes() == HEAD + b'{"line": 1}\n'


def test_a_full_disk_leaves_whole_lines_and_writing_goes_on_when_there_is_room(path: Path) -> None:
    files = files_of(path, max_file_bytes=2**20)
    files.write(numbered(range(1)))
    limit = path.stat().st_size + 30
    with largest_file(limit), pytest.raises(OSError, match="File too large"):
        files.write(numbered(range(1, 100)))
    assert files.n_written == 1
    assert path.read_bytes() == HEAD + b'{"line": 0}\n'
    files.write(numbered(range(1, 3)))
    files.close()
    assert files.n_written == 3
    assert path.read_bytes() == HEAD + b"".join(numbered(range(3)))


def test_a_disk_without_room_for_the_header_leaves_an_empty_file_to_go_on_with(path: Path) -> None:
    files = files_of(path)
    with largest_file(10), pytest.raises(OSError, match="File too large"):
        files.open()
    assert path.read_bytes() == b""
    write_all(files, numbered(range(1)))
    assert path.read_bytes() == HEAD + b'{"line": 0}\n'


def test_a_rotation_that_fails_loses_nothing_that_was_written(path: Path) -> None:
    files = files_of(path, n_files=2)
    lines = numbered(range(1000, 1100))
    in_the_way = path.with_name("rec.jsonl.1")
    files.write(lines[:1])
    in_the_way.mkdir()
    for _ in range(2):
        with pytest.raises(FileExistsError):
            files.write(lines[files.n_written :])
    n_written = files.n_written
    assert 0 < n_written < 100
    assert path.read_bytes() == HEAD + b"".join(lines[:n_written])
    in_the_way.rmdir()
    write_all(files, lines[n_written:])
    assert files.n_written == 100
    kept = [one.read_bytes().removeprefix(HEAD) for one in (in_the_way, path)]
    assert b"".join(kept) == b"".join(lines)


@pytest.mark.parametrize("content", ["notes of somebody else\n", ""])
def test_a_numbered_file_that_is_no_recording_is_neither_moved_nor_overwritten(path: Path, content: str) -> None:
    other = path.with_name("rec.jsonl.2")
    write_all(files_of(path), numbered(range(1000, 1100)))
    other.write_text(content)
    with pytest.raises(OSError, match=r"rec\.jsonl\.2 is in the way and no recording"):
        files_of(path).open()
    assert other.read_text() == content
    other.unlink()
    files = files_of(path)
    files.open()
    other.write_text(content)  # while it is recording
    with pytest.raises(OSError, match=r"rec\.jsonl\.2 is in the way and no recording"):
        files.write(numbered(range(1000, 1500)))
    files.close()
    assert other.read_text() == content


def test_a_gap_among_older_files_is_filled_and_none_overwritten(path: Path) -> None:
    write_all(files_of(path, n_files=5), numbered(range(1000, 1300)))
    third = path.with_name("rec.jsonl.3").read_bytes()
    path.with_name("rec.jsonl.2").unlink()
    files = files_of(path, n_files=5)
    while not path.with_name("rec.jsonl.2").exists():
        files.write(numbered(range(1000, 1001)))
    files.close()
    assert path.with_name("rec.jsonl.3").read_bytes() == third
