"""The file of `listen.api_keys_file`: who may use the data port.

One key a line; empty lines and lines that begin with # count for nothing:

    KEY
    NAME: KEY
    NAME: sha256:HEX
    NAME: sha256:HEX in_flight=8 requests_per_minute=60

A plain key is hashed as it is read, so that memory holds digests only. NAME is what logs call the key; one without is
called by the beginning of its digest. Keys of one name are one caller (an old key and the new one, say): they share
its limits. Messages hold a line's number and never what is on it.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixroute.config.secrets import read_secret
from prefixroute.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")
# Printable, and without what separates.
_KEY = re.compile(r"[!-9;-~]{1,4096}")
_OPTION = re.compile(r"(in_flight|requests_per_minute)=([1-9][0-9]{0,8})")
_DIGEST_SHOWN = 8
# 16 random letters and digits are some 95 bits; what is shorter is often a word.
_SHORT_CHARS = 16
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One entry. The limits: None leaves it to `limits.per_key_*`."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    max_in_flight: int | None = None
    requests_per_minute: int | None = None
    plain_chars: int | None = None
    """Length of the key where the file has it in plain; None: it has the digest."""


def digest_of(key: bytes) -> bytes:
    """What stands for a key. Plain SHA-256: keys are long and random, and every request pays for it."""
    return hashlib.sha256(key).digest()


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in a file, at least one. Raises ConfigError."""
    keys: dict[bytes, ApiKey] = {}
    by_name: dict[str, ApiKey] = {}
    for number, line in enumerate(read_secret(path, "api_keys_file").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            key = _entry(text)
        except ValueError as error:
            raise ConfigError(f"{path}: line {number} {error}") from None
        if key.digest in keys:
            raise ConfigError(f"{path}: line {number} has a key that an earlier line has (keep one of them)")
        first = by_name.setdefault(key.name, key)
        if (first.max_in_flight, first.requests_per_minute) != (key.max_in_flight, key.requests_per_minute):
            raise ConfigError(
                f"{path}: line {number} gives {key.name} other limits than an earlier line "
                "(keys of one name share their limits)"
            )
        keys[key.digest] = key
    if not keys:
        raise ConfigError(f"{path}: holds no key, so nobody could use the data port (write one key a line)")
    return tuple(keys.values())


def key_file_warnings(path: Path, keys: Sequence[ApiKey]) -> Iterator[str]:
    """What makes it easy to come by the keys that a file holds. Holds none of them."""
    plain = [key for key in keys if key.plain_chars is not None]
    if plain and os.name == "posix":
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            yield (
                f"{path} holds plain keys and is open to other users of this machine, its mode is {mode:04o} "
                "(chmod 600, or write the keys as sha256:HEX)"
            )
    short = [key.name for key in plain if key.plain_chars is not None and key.plain_chars < _SHORT_CHARS]
    if short:
        more = len(short) - _MAX_NAMED
        names = ", ".join(short[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        yield (
            f"{path} has keys of fewer than {_SHORT_CHARS} characters, which can be guessed: {names} "
            "(openssl rand -hex 24 makes a good one)"
        )


def _entry(text: str) -> ApiKey:
    """Raises ValueError with what is wrong, to be read after the line's number."""
    name, colon, rest = text.partition(": ")
    if not colon:
        name, rest = "", text
    elif _NAME.fullmatch(name) is None:
        raise ValueError("has a name of other characters than A-Z a-z 0-9 . _ - (or of more than 64)")
    key, *options = rest.split()
    # Words are told by their number: any of them may be a key, or a piece of one.
    n_before = 1 if colon else 0
    plain_chars = None
    if key.startswith("sha256:"):
        if _HEX.fullmatch(key.removeprefix("sha256:")) is None:
            raise ValueError(f"has no SHA-256 behind sha256: in its {_nth(n_before + 1)} word (64 hexadecimal digits)")
        digest = bytes.fromhex(key.removeprefix("sha256:"))
    elif _KEY.fullmatch(key) is None:
        raise ValueError(
            f"has a key, its {_nth(n_before + 1)} word, with characters that keys in this file cannot have "
            "(a name is followed by a colon and a space; a key that has a colon itself is written as sha256:HEX)"
        )
    else:
        digest = digest_of(key.encode("ascii"))
        plain_chars = len(key)
    limits: dict[str, int] = {}
    for number, option in enumerate(options, start=n_before + 2):
        parts = _OPTION.fullmatch(option)
        if parts is None or parts[1] in limits:
            hint = "; sha256sum writes a - behind the digest: leave it out" if option == "-" else ""
            raise ValueError(
                f"has a {_nth(number)} word that is not understood (behind the key there may be in_flight=N and "
                f"requests_per_minute=N, each once, N at least 1{hint})"
            )
        limits[parts[1]] = int(parts[2])
    return ApiKey(
        name or f"key-{digest.hex()[:_DIGEST_SHOWN]}",
        digest,
        limits.get("in_flight"),
        limits.get("requests_per_minute"),
        plain_chars,
    )


def _nth(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
