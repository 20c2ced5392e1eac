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
import re
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


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One entry. The limits: None leaves it to `limits.per_key_*`."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    max_in_flight: int | None = None
    requests_per_minute: int | None = None


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


def _entry(text: str) -> ApiKey:
    """Raises ValueError with what is wrong, to be read after the line's number."""
    name, colon, rest = text.partition(": ")
    if not colon:
        name, rest = "", text
    elif _NAME.fullmatch(name) is None:
        raise ValueError("has a name of other characters than A-Z a-z 0-9 . _ - (or of more than 64)")
    key, *options = rest.split()
    if key.startswith("sha256:"):
        if _HEX.fullmatch(key.removeprefix("sha256:")) is None:
            raise ValueError("has no SHA-256 behind sha256: (64 hexadecimal digits)")
        digest = bytes.fromhex(key.removeprefix("sha256:"))
    elif _KEY.fullmatch(key) is None:
        raise ValueError(
            "has a key with characters that keys in this file cannot have (a name is followed by a colon and a space; "
            "a key that has a colon itself is written as sha256:HEX)"
        )
    else:
        digest = digest_of(key.encode("ascii"))
    limits: dict[str, int] = {}
    for option in options:
        parts = _OPTION.fullmatch(option)
        if parts is None or parts[1] in limits:
            raise ValueError("may have in_flight=N and requests_per_minute=N behind the key, each once (N at least 1)")
        limits[parts[1]] = int(parts[2])
    return ApiKey(
        name or f"key-{digest.hex()[:_DIGEST_SHOWN]}",
        digest,
        limits.get("in_flight"),
        limits.get("requests_per_minute"),
    )
