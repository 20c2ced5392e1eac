"""The file of `sagemaker.access_keys_file`: whose AWS signatures the endpoint paths take.

One access key a line (`key_files` has the rules of such files):

    ACCESS_KEY_ID SECRET_ACCESS_KEY
    NAME: ACCESS_KEY_ID SECRET_ACCESS_KEY
    NAME: ACCESS_KEY_ID SECRET_ACCESS_KEY in_flight=8 requests_per_minute=60

To verify a signature takes the secret itself: there is no digest to write instead, so this file is for its owner's eyes
only. The pairs are the router's own and need not be of any AWS account. NAME is what logs call the key; one without is
called by the beginning of its id's digest, as two words in the wrong order would put a secret into logs.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefixroute.config.api_keys import ApiKey, digest_of, name_of, read_api_keys
from prefixroute.config.key_files import limits, named, nth, read_entries, warnings_of
from prefixroute.config.settings import Settings
from prefixroute.errors import ConfigError

# AWS's have letters and digits only, 16 to 128.
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Printable, and no space. AWS's have 40.
_SECRET = re.compile(r"[!-~]{1,4096}")


@dataclass(frozen=True, slots=True)
class AccessKey:
    """One entry. The limits: None leaves it to `limits.per_key_*`."""

    name: str
    key_id: str
    secret: bytes = field(repr=False)
    max_in_flight: int | None = None
    requests_per_minute: int | None = None


def read_access_keys(path: Path) -> tuple[AccessKey, ...]:
    """The access keys in a file, at least one. Raises ConfigError."""
    return read_entries(path, "access_keys_file", "an access key id", _entry, lambda key: key.key_id)


def read_access_keys_of(settings: Settings, api_keys: Sequence[ApiKey] | None = None) -> tuple[AccessKey, ...] | None:
    """As configured; None: without a file. `api_keys`: of `listen.api_keys_file`, where they are read already.

    Raises ConfigError, also where a name has other limits there: keys of one name are one caller.
    """
    file, api_file = settings.sagemaker.access_keys_file, settings.listen.api_keys_file
    if file is None:
        return None
    keys = read_access_keys(Path(file))
    if api_keys is None:
        try:
            api_keys = () if api_file is None else read_api_keys(Path(api_file))
        except ConfigError:
            api_keys = ()  # which is told where they are read
    limits = {key.name: (key.max_in_flight, key.requests_per_minute) for key in api_keys}
    for key in keys:
        own = key.max_in_flight, key.requests_per_minute
        if limits.get(key.name, own) != own:
            raise ConfigError(
                f"{file}: {key.name} has other limits than in {api_file} (keys of one name share their limits)"
            )
    return keys


def access_key_file_warnings(path: Path, keys: Sequence[AccessKey]) -> Iterator[str]:
    """What makes it easy to come by the secrets that a file holds. Holds none of them."""
    return warnings_of(path, [(key.name, len(key.secret)) for key in keys], "secret keys", "openssl rand -base64 30")


def _entry(text: str) -> AccessKey:
    """Raises ValueError with what is wrong, to be read after the line's number."""
    name, words = named(text)
    # How many words there are up to the secret.
    n_words = 3 if name else 2
    if len(words) < 2:
        raise ValueError(f"has no secret, its {nth(n_words)} word (write ACCESS_KEY_ID SECRET_ACCESS_KEY)")
    key_id, secret, *options = words
    if _KEY_ID.fullmatch(key_id) is None:
        raise ValueError(
            f"has an access key id, its {nth(n_words - 1)} word, of other characters than A-Z a-z 0-9 . _ - (or of "
            "more than 128; a name is followed by a colon and a space, and the id stands before the secret)"
        )
    if _SECRET.fullmatch(secret) is None:
        raise ValueError(f"has a secret, its {nth(n_words)} word, with characters that are not printable ASCII")
    found = limits(options, n_words)
    return AccessKey(name or name_of(digest_of(key_id.encode("ascii"))), key_id, secret.encode("ascii"), *found)
