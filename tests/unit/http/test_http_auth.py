"""Keys, their limits, and who is told apart from whom: no socket, no clock."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixroute.config.api_keys import ApiKey, digest_of, key_file_warnings, read_api_keys
from prefixroute.errors import ConfigError, UnauthorizedError
from prefixroute.http.arrival import RequestHead
from prefixroute.http.auth import AdminToken, ApiKeys, KeyLimitError, tenant_of

SECURITY = Path(__file__).parents[3] / "docs" / "security.md"
KEY = b"sk-alice-0123456789abcdef"
OTHER = b"sk-bob-0123456789abcdef"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(clock: Clock) -> ApiKeys:
    keys = ApiKeys(clock)
    keys.use([ApiKey("alice", digest_of(KEY)), ApiKey("bob", digest_of(OTHER))])
    return keys


def head(headers: list[tuple[bytes, bytes]]) -> RequestHead:
    return RequestHead("POST", "/v1/chat/completions", 1, headers)


def bearer(key: bytes) -> RequestHead:
    return head([(b"Host", b"x"), (b"Authorization", b"Bearer " + key)])


def test_a_head_that_comes_again_is_let_in_by_the_keys_there_are_now(keys: ApiKeys) -> None:
    same = bearer(KEY)
    assert keys.enter(same).name == keys.enter(same).name == "alice"
    keys.use([ApiKey("carol", digest_of(KEY))])
    assert keys.enter(same).name == "carol"
    keys.use([ApiKey("bob", digest_of(OTHER))])
    with pytest.raises(UnauthorizedError):
        keys.enter(same)


@pytest.mark.parametrize(
    "header",
    [
        (b"Authorization", b"Bearer " + KEY),
        (b"authorization", b"bearer   " + KEY + b" "),
        (b"AUTHORIZATION", b"BEARER " + KEY),
        (b"x-api-key", KEY),
        (b"X-Api-Key", b" " + KEY),
        (b"api-key", KEY),
    ],
)
def test_a_key_is_found_in_each_header_that_brings_keys_and_goes_no_further(
    keys: ApiKeys, header: tuple[bytes, bytes]
) -> None:
    visit = keys.enter(head([(b"Host", b"x"), header, (b"X-Own", b"1")]))
    assert (visit.name, visit.head.headers) == ("alice", [(b"Host", b"x"), (b"X-Own", b"1")])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"Authorization", b"Bearer " + KEY[:-1])],
        [(b"Authorization", b"Bearer " + KEY + b"x")],
        [(b"Authorization", b"Bearer " + KEY.upper())],
        [(b"Authorization", b"Basic " + KEY)],
        [(b"Authorization", KEY)],
        [(b"Authorization", b"Bearer")],
        [(b"Authorization", b"Bearer ")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer " + KEY)],
        [(b"x-api-key", digest_of(KEY))],
        [(b"x-api-key", digest_of(KEY).hex().encode())],
        [(b"x-api-key", b"sha256:" + digest_of(KEY).hex().encode())],
        [(b"Cookie", KEY)],
        [(b"Proxy-Authorization", b"Bearer " + KEY)],
    ],
)
def test_what_is_no_key_lets_nobody_in(keys: ApiKeys, headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(UnauthorizedError) as caught:
        keys.enter(head(headers))
    assert KEY.decode() not in str(caught.value)


def test_every_key_of_ours_is_taken_out_and_no_other(keys: ApiKeys) -> None:
    foreign = (b"Authorization", b"Bearer sk-of-the-instance")
    visit = keys.enter(head([foreign, (b"x-api-key", OTHER), (b"api-key", KEY), (b"X-Api-Key", b"wrong")]))
    assert (visit.name, visit.head.headers) == ("bob", [foreign, (b"X-Api-Key", b"wrong")])


def test_before_any_key_is_known_nobody_is_let_in(clock: Clock) -> None:
    with pytest.raises(UnauthorizedError):
        ApiKeys(clock).enter(bearer(b""))


def test_only_digests_are_held(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"alice: " + KEY)
    keys = ApiKeys(clock)
    entries = read_api_keys(file)
    keys.use(entries)
    assert KEY.decode() not in repr(entries)
    assert digest_of(KEY) in keys._by_digest
    assert keys.enter(bearer(KEY)).name == "alice"


# Limits


def test_requests_under_way_are_bounded_and_given_back(keys: ApiKeys, clock: Clock) -> None:
    keys.use([ApiKey("alice", digest_of(KEY)), ApiKey("bob", digest_of(OTHER))], max_in_flight=2)
    visits = [keys.enter(bearer(KEY)) for _ in range(2)]
    with pytest.raises(KeyLimitError) as caught:
        keys.enter(bearer(KEY))
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "key_limit_exceeded", 1)
    keys.enter(bearer(OTHER))  # who has limits of its own
    visits[0].leave(clock.now_s)
    keys.enter(bearer(KEY))
    assert (keys.in_flight("alice"), keys.in_flight("bob"), keys.in_flight("nobody")) == (2, 1, 0)


def test_retry_after_tells_when_a_request_of_the_key_will_have_ended(keys: ApiKeys, clock: Clock) -> None:
    keys.use([ApiKey("alice", digest_of(KEY), max_in_flight=1)])
    for _ in range(50):
        visit = keys.enter(bearer(KEY))
        clock.now_s += 12
        visit.leave(clock.now_s)
    keys.enter(bearer(KEY))
    with pytest.raises(KeyLimitError) as caught:
        keys.enter(bearer(KEY))
    assert caught.value.retry_after_s == 12
    assert str(caught.value) == "this key has 1 request under way, its limit"


def test_a_minute_has_so_many_requests_and_retry_after_is_honest(keys: ApiKeys, clock: Clock) -> None:
    keys.use([ApiKey("alice", digest_of(KEY), requests_per_minute=6)])

    def send() -> None:
        keys.enter(bearer(KEY)).leave(clock.now_s)

    for _ in range(6):
        send()
    with pytest.raises(KeyLimitError) as caught:
        send()
    wait_s = caught.value.retry_after_s
    assert wait_s == 10
    clock.now_s += wait_s - 0.01
    with pytest.raises(KeyLimitError):
        send()
    clock.now_s += 0.01
    send()
    with pytest.raises(KeyLimitError):
        send()
    # No more than a minute's worth gathers.
    clock.now_s += 3600
    for _ in range(6):
        send()
    with pytest.raises(KeyLimitError):
        send()
    assert keys.in_flight("alice") == 0


def test_a_request_that_is_refused_for_those_under_way_uses_up_nothing(keys: ApiKeys, clock: Clock) -> None:
    keys.use([ApiKey("alice", digest_of(KEY), max_in_flight=1, requests_per_minute=2)])
    visit = keys.enter(bearer(KEY))
    for _ in range(5):
        with pytest.raises(KeyLimitError):
            keys.enter(bearer(KEY))
    visit.leave(clock.now_s)
    keys.enter(bearer(KEY))


def test_own_limits_come_before_those_for_all(keys: ApiKeys) -> None:
    entries = [ApiKey("alice", digest_of(KEY), max_in_flight=2), ApiKey("bob", digest_of(OTHER))]
    keys.use(entries, max_in_flight=1, requests_per_minute=100)
    keys.enter(bearer(KEY))
    keys.enter(bearer(KEY))
    keys.enter(bearer(OTHER))
    with pytest.raises(KeyLimitError):
        keys.enter(bearer(OTHER))


def test_other_keys_keep_what_is_under_way_and_what_is_used_up(keys: ApiKeys, clock: Clock) -> None:
    old = [ApiKey("alice", digest_of(KEY), max_in_flight=2, requests_per_minute=2)]
    keys.use(old)
    visit = keys.enter(bearer(KEY))
    # The same caller with a new key beside the old one; bob is gone.
    keys.use([*old, ApiKey("alice", digest_of(b"new"), max_in_flight=2, requests_per_minute=2)])
    with pytest.raises(UnauthorizedError):
        keys.enter(bearer(OTHER))
    again = keys.enter(bearer(b"new"))
    assert keys.in_flight("alice") == 2
    visit.leave(clock.now_s)
    again.leave(clock.now_s)
    assert keys.in_flight("alice") == 0
    with pytest.raises(KeyLimitError):  # two of two in this minute, with either key
        keys.enter(bearer(b"new"))
    keys.use([ApiKey("alice", digest_of(b"new"))])
    keys.enter(bearer(b"new"))
    with pytest.raises(UnauthorizedError):
        keys.enter(bearer(KEY))


# The file


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_file_has_keys_names_digests_and_limits(tmp_path: Path) -> None:
    digest = digest_of(KEY)
    path = written(
        tmp_path,
        f"# who may come\n\nsk-plain\n  alice: {KEY.decode()} \nalice: sha256:{digest_of(b'old').hex().upper()}\n"
        f"bob: sha256:{digest_of(OTHER).hex()} in_flight=8  requests_per_minute=60\r\nsha256:{digest_of(b'z').hex()}\n",
    )
    assert read_api_keys(path) == (
        ApiKey(f"key-{digest_of(b'sk-plain').hex()[:8]}", digest_of(b"sk-plain"), plain_chars=8),
        ApiKey("alice", digest, plain_chars=len(KEY)),
        ApiKey("alice", digest_of(b"old")),
        ApiKey("bob", digest_of(OTHER), 8, 60),
        ApiKey(f"key-{digest_of(b'z').hex()[:8]}", digest_of(b"z")),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# nobody\n", "holds no key"),
        ("alice:sk-secret", "line 1 has a key, its 1st word, with characters"),
        ("alice: sk-sécret", "line 1 has a key, its 2nd word, with characters"),
        ("ok\nal ice: sk-secret", "line 2 has a name"),
        ("alice: sk-secret more", "line 1 has a 3rd word that is not understood"),
        ("sk-secret more", "line 1 has a 2nd word that is not understood"),
        ("alice: sk-secret in_flight=1 secret", "line 1 has a 4th word that is not understood"),
        ("alice: sk-secret in_flight=0", "line 1 has a 3rd word that is not understood"),
        (f"alice: sha256:{'0' * 64}  -", "N at least 1; sha256sum writes a - behind the digest: leave it out)"),
        ("alice: sk-secret in_flight=1 in_flight=2", "each once"),
        ("alice: sha256:sk-secret", "line 1 has no SHA-256 behind sha256: in its 2nd word"),
        ("alice: ", "line 1"),
        ("sk-sécret", "line 1 has a key, its 1st word, with characters"),
        ("a: sk-secret\nb: sk-secret", "line 2 has a key that an earlier line has"),
        ("a: sk-secret\na: sk-secret2 in_flight=1", "line 2 gives a other limits"),
    ],
)
def test_a_wrong_line_is_told_by_its_number_and_never_quoted(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_api_keys(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert "\n" not in message
    assert "secret" not in message


def test_what_makes_keys_easy_to_come_by_is_told_without_them(tmp_path: Path) -> None:
    path = written(tmp_path, f"alice: {KEY.decode()}\nbob: sk-secret\nsha256:{digest_of(OTHER).hex()}\n")
    path.chmod(0o640)
    opened, short = key_file_warnings(path, read_api_keys(path))
    assert opened.startswith(f"{path} holds plain keys and is open to other users of this machine, its mode is 0640 ")
    assert short.startswith(f"{path} has keys of fewer than 16 characters, which can be guessed: bob (")
    assert "secret" not in opened + short
    path.chmod(0o600)
    assert list(key_file_warnings(path, read_api_keys(path))) == [short]
    # Digests may be read: they are no keys. How long these were is nobody's to know.
    path = written(tmp_path, f"sha256:{digest_of(b'short').hex()}\n")
    path.chmod(0o644)
    assert not list(key_file_warnings(path, read_api_keys(path)))


def test_the_documented_command_makes_a_digest_that_the_file_takes(tmp_path: Path) -> None:
    documented = next(line.partition("printf")[2] for line in SECURITY.read_text().splitlines() if "sha256sum" in line)
    made = subprocess.run(
        ["sh", "-c", f"printf{documented}"], env={**os.environ, "KEY": KEY.decode()}, check=True, capture_output=True
    )
    (key,) = read_api_keys(written(tmp_path, f"bob: sha256:{made.stdout.decode()}"))
    assert key.digest == digest_of(KEY)


def test_a_file_that_is_not_there_is_told_by_its_setting_because_it_may_be_a_key() -> None:
    with pytest.raises(ConfigError) as caught:
        read_api_keys(Path("sk-secret"))
    assert "there is no file where api_keys_file says" in str(caught.value)
    assert "sk-secret" not in str(caught.value)


@given(st.one_of(st.binary(max_size=200), st.text("ab:# =0\nsha256_infligt", max_size=200).map(str.encode)))
def test_any_file_gives_keys_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any-keys"
    path.write_bytes(content)
    told = ""
    keys: tuple[ApiKey, ...] = ()
    try:
        keys = read_api_keys(path)
    except ConfigError as error:
        told = str(error)
    assert bool(told) is not bool(keys)
    assert "\n" not in told
    assert all(len(key.digest) == 32 and key.name.isascii() for key in keys)


# Tokens and tenants


def test_the_admin_token_admits_who_brings_it() -> None:
    token = AdminToken("t0ken")
    assert token.admits(bearer(b"t0ken").headers)
    assert not token.admits(bearer(b"t0kem").headers)
    assert not token.admits([])
    token.use("other")
    assert not token.admits(bearer(b"t0ken").headers)
    assert AdminToken().admits([])


def test_tenants_are_told_apart_by_the_key_they_bring() -> None:
    assert tenant_of(bearer(KEY).headers) == tenant_of([(b"x-api-key", KEY)]) != tenant_of(bearer(OTHER).headers)
    assert tenant_of([(b"Host", b"x"), (b"Authorization", b"Basic abc")]) == b""
