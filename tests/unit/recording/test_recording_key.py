"""The key file: made once, kept to its owner, and refused when it cannot be trusted or understood."""

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefixroute.errors import ConfigError
from prefixroute.recording.key import KEY_BYTES, key_id, read_or_create_key

KEY = bytes(range(KEY_BYTES))


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def problem_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_or_create_key(path)
    message = str(caught.value)
    assert message.startswith(f"recording.key_file: {path}: ")
    return message.removeprefix(f"recording.key_file: {path}: ")


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = read_or_create_key(path)
    assert len(key) == KEY_BYTES
    assert read_or_create_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == key.hex() + "\n"
    assert os.listdir(tmp_path) == ["key"]
    assert read_or_create_key(tmp_path / "other") != key


def test_routers_that_start_at_the_same_time_have_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(lambda _: read_or_create_key(path), range(8)))
    assert len(keys) == 1
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("text", [KEY.hex(), f"  {KEY.hex().upper()}\r\n\n"])
def test_a_key_that_was_written_by_hand_is_read(tmp_path: Path, text: str) -> None:
    assert read_or_create_key(written(tmp_path / "key", text)) == KEY


@pytest.mark.parametrize(
    "text", ["", "\n", "secret", KEY.hex()[:-2], KEY.hex() + "00", "g" * 64, "é" * 64, KEY.hex() + " " * 2000 + "x"]
)
def test_what_is_no_key_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    problem = problem_of(written(tmp_path / "key", text))
    assert problem.startswith("must hold 64 hexadecimal digits and nothing else")
    assert not text.strip() or text.strip() not in problem


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o620, 0o666, 0o601])
def test_a_key_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    problem = problem_of(written(tmp_path / "key", KEY.hex(), mode))
    assert problem == f"others than its owner have access (its mode is {mode:04o}; chmod 600 it)"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can own a file as root")
def test_a_secret_that_root_mounts_for_a_group_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path / "key", KEY.hex(), 0o440)
    assert read_or_create_key(path) == KEY
    os.chown(path, 12345, -1)
    assert "others than its owner" in problem_of(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert problem_of(tmp_path) in ("Is a directory", "is not a regular file")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert problem_of(tmp_path / "pipe") == "is not a regular file"
    assert problem_of(tmp_path / "missing" / "key") == "No such file or directory"


def test_the_id_of_a_key_tells_keys_apart_and_is_no_piece_of_them() -> None:
    assert key_id(KEY) == key_id(KEY)
    assert re.fullmatch("[0-9a-f]{16}", key_id(KEY))
    assert key_id(KEY) != key_id(KEY[::-1])
    assert key_id(KEY) not in KEY.hex()
