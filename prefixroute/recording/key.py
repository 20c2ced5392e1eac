"""The key of a recording: who does not have it cannot test guesses of a prompt against hashes.

A file with 64 hexadecimal digits, made when it is not there. The same key makes the same hashes, so recordings of
several runs and several routers join.
"""

import os
import secrets
import stat
from hashlib import blake2b
from pathlib import Path

from prefixroute.errors import ConfigError

KEY_BYTES = 32
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
# The digits, and whatever blanks an editor or a secret store leaves around them.
_MAX_FILE_BYTES = 1024


def read_or_create_key(path: Path) -> bytes:
    """The key in `path`, which is made, readable by its owner only, if it is not there. Raises ConfigError."""
    try:
        if not path.exists():
            _create(path)
        return _read(path)
    except OSError as error:
        raise ConfigError(f"recording.key_file: {path}: {error.strerror or error}") from error


def key_id(key: bytes) -> str:
    """Tells keys apart, and tells nothing about them."""
    return blake2b(key=key, digest_size=8, person=b"prefixroute-key").hexdigest()


def _create(path: Path) -> None:
    # Whole or not at all: routers that start at the same time all read the one that was first.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w", encoding="ascii") as out:
            out.write(secrets.token_bytes(KEY_BYTES).hex() + "\n")
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links: two first starts at once may each keep their own key
            draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    # Not to be held up by a pipe that nobody writes.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"recording.key_file: {path}: is not a regular file")
        # As PostgreSQL has it: secrets that root mounts for a group are common, and no worse.
        allowed = 0o640 if status.st_uid == 0 else 0o600
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077 & ~allowed:
            raise ConfigError(
                f"recording.key_file: {path}: others than its owner have access (its mode is {mode:04o}; chmod 600 it)"
            )
        content = file.read(_MAX_FILE_BYTES + 1)
    text = content.decode("ascii", "replace").strip()
    if len(content) > _MAX_FILE_BYTES or len(text) != 2 * KEY_BYTES or not _HEX_DIGITS.issuperset(text):
        raise ConfigError(
            f"recording.key_file: {path}: must hold {2 * KEY_BYTES} hexadecimal digits and nothing else "
            f"(name a file that is not there to have one made, or write one: openssl rand -hex {KEY_BYTES})"
        )
    return bytes.fromhex(text)
