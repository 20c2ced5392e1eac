"""The file of access keys: what it may hold, and that what it holds shows nowhere."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixroute.config.access_keys import AccessKey, access_key_file_warnings, read_access_keys
from prefixroute.config.api_keys import digest_of
from prefixroute.errors import ConfigError

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCY=secret==#"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "access-keys"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_file_has_keys_names_and_limits(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"# who may sign\n\nAKIDNAMELESS {SECRET}\n  alice: AKIDALICE\t{SECRET} \nalice: AKIDOLD another\r\n"
        f"bob: AKIDBOB {SECRET} requests_per_minute=60  in_flight=8\n",
    )
    assert read_access_keys(path) == (
        AccessKey(f"key-{digest_of(b'AKIDNAMELESS').hex()[:8]}", "AKIDNAMELESS", SECRET.encode()),
        AccessKey("alice", "AKIDALICE", SECRET.encode()),
        AccessKey("alice", "AKIDOLD", b"another"),
        AccessKey("bob", "AKIDBOB", SECRET.encode(), 8, 60),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# nobody\n", "holds no key"),
        ("AKIDsecret", "line 1 has no secret, its 2nd word (write ACCESS_KEY_ID SECRET_ACCESS_KEY)"),
        ("alice: AKIDsecret", "line 1 has no secret, its 3rd word"),
        ("alice:", "line 1 has no secret"),
        ("alice:AKID secret", "line 1 has an access key id, its 1st word, of other characters"),
        ("ok: A s\nalice: /secret AKID", "line 2 has an access key id, its 2nd word, of other characters"),
        (f"{'a' * 129} secret", "line 1 has an access key id, its 1st word"),
        ("AKID sécret", "line 1 has a secret, its 2nd word, with characters"),
        ("al ice: AKID secret", "line 1 has a name"),
        ("alice AKID secret", "line 1 has a 3rd word that is not understood"),
        ("alice: AKID secret more", "line 1 has a 4th word that is not understood"),
        ("AKID secret in_flight=0", "N at least 1"),
        ("AKID secret in_flight=1 in_flight=2", "each once"),
        ("a: AKID secret\nb: AKID secret2", "line 2 has an access key id that an earlier line has"),
        ("a: AKID secret\na: AKID2 secret in_flight=1", "line 2 gives a other limits"),
    ],
)
def test_a_wrong_line_is_told_by_its_number_and_never_quoted(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_access_keys(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert "\n" not in message
    assert "secret" not in message.replace("has no secret", "").replace("a secret,", "").replace("the secret)", "")


def test_a_secret_shows_nowhere(tmp_path: Path) -> None:
    keys = read_access_keys(written(tmp_path, f"alice: AKID {SECRET}\n"))
    assert SECRET not in repr(keys)
    assert "AKID" in repr(keys)
    # In the wrong order a secret becomes an id, but no name.
    swapped = read_access_keys(written(tmp_path, "secretwithoutslashes AKIDALICE\n"))
    assert "secret" not in swapped[0].name


def test_what_makes_secrets_easy_to_come_by_is_told_without_them(tmp_path: Path) -> None:
    path = written(tmp_path, f"alice: AKIDALICE {SECRET}\nbob: AKIDBOB hunter2\n")
    path.chmod(0o644)
    opened, short = access_key_file_warnings(path, read_access_keys(path))
    assert opened == (
        f"{path} holds plain secret keys and is open to other users of this machine, its mode is 0644 (chmod 600)"
    )
    assert short.startswith(f"{path} has secret keys of fewer than 16 characters, which can be guessed: bob (")
    assert SECRET not in opened + short
    assert "hunter2" not in opened + short
    path.chmod(0o600)
    assert list(access_key_file_warnings(path, read_access_keys(path))) == [short]


def test_a_file_that_is_not_there_is_told_by_its_setting_because_it_may_be_a_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        read_access_keys(Path("hunter2"))
    assert "there is no file where access_keys_file says" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@given(st.binary(max_size=200) | st.text("ab:# =0\n_infligt", max_size=200).map(str.encode))
def test_any_file_gives_keys_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any-access-keys"
    path.write_bytes(content)
    told = ""
    keys: tuple[AccessKey, ...] = ()
    try:
        keys = read_access_keys(path)
    except ConfigError as error:
        told = str(error)
    assert bool(told) is not bool(keys)
    assert "\n" not in told
    assert all(key.secret and key.key_id.isascii() and key.name.isascii() for key in keys)
