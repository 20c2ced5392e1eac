"""The file of `listen.api_keys_file`: who may use the data port.

One key a line (`key_files` has the rules of such files):

    KEY
    NAME: KEY
    NAME: sha256:HEX
    NAME: sha256:HEX in_flight=8 requests_per_minute=60

A plain key is hashed as it is read, so that memory holds digests only. NAME is what logs call the key; one without is
called by the beginning of its digest.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixroute.config.key_files import limits, named, nth, read_entries, warnings_of

_HEX = re.compile(r"[0-9a-fA-F]{64}")
# Printable, and without what separates.
_KEY = re.compile(r"[!-9;-~]{1,4096}")
_DIGEST_SHOWN = 8


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


def name_of(digest: bytes) -> str:
    """What a key without a name is called."""
    return f"key-{digest.hex()[:_DIGEST_SHOWN]}"


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in a file, at least one. Raises ConfigError."""
    return read_entries(path, "api_keys_file", "a key", _entry, lambda key: key.digest)


def key_file_warnings(path: Path, keys: Sequence[ApiKey]) -> Iterator[str]:
    """What makes it easy to come by the keys that a file holds. Holds none of them."""
    plain = [(key.name, key.plain_chars) for key in keys if key.plain_chars is not None]
    return warnings_of(path, plain, "keys", "openssl rand -hex 24", ", or write the keys as sha256:HEX")


def _entry(text: str) -> ApiKey:
    """Raises ValueError with what is wrong, to be read after the line's number."""
    name, words = named(text)
    # How many words there are up to the key.
    n_words = 2 if name else 1
    key, *options = words
    plain_chars = None
    if key.startswith("sha256:"):
        if _HEX.fullmatch(key.removeprefix("sha256:")) is None:
            raise ValueError(f"has no SHA-256 behind sha256: in its {nth(n_words)} word (64 hexadecimal digits)")
        digest = bytes.fromhex(key.removeprefix("sha256:"))
    elif _KEY.fullmatch(key) is None:
        raise ValueError(
            f"has a key, its {nth(n_words)} word, with characters that keys in this file cannot have "
            "(a name is followed by a colon and a space; a key that has a colon itself is written as sha256:HEX)"
        )
    else:
        digest = digest_of(key.encode("ascii"))
        plain_chars = len(key)
    return ApiKey(name or name_of(digest), digest, *limits(options, n_words), plain_chars)
