"""Secrets by environment or file, never by value: keys for instances, the token of the admin port.

Messages name the variable or the file, and never hold what is in it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from prefixroute.config.file import read_text
from prefixroute.config.settings import AdminSettings, InstanceSettings
from prefixroute.errors import ConfigError


def api_key(instance: InstanceSettings, environ: Mapping[str, str] | None = None) -> str | None:
    """The bearer key for `instance`; None if it needs none. Raises ConfigError, which never holds the key."""
    return secret("api_key", instance.api_key_env, instance.api_key_file, environ)


def admin_token(admin: AdminSettings, environ: Mapping[str, str] | None = None) -> str | None:
    """The token of the admin port; None if it needs none. Raises ConfigError, which never holds the token."""
    return secret("token", admin.token_env, admin.token_file, environ)


def read_secret(path: Path, setting: str) -> str:
    """A file's text. Raises ConfigError, without the path where nothing is there: it may be a key put in its place."""
    if not path.exists():
        raise ConfigError(
            f"there is no file where {setting} says (write the file's path there, and the secret into the file; a "
            "relative path in a configuration file counts from where that file is)"
        )
    return read_text(path)


def secret(kind: str, variable: str | None, path: str | None, environ: Mapping[str, str] | None = None) -> str | None:
    """The secret in a file, or in an environment variable; None when neither is named. Raises ConfigError.

    `kind`: what the settings `kind_env` and `kind_file` hold.
    """
    word = kind.rpartition("_")[2]
    if path is not None:
        text = read_secret(Path(path), f"{kind}_file")
        return _checked(text, f"the file {path}", f"is empty (write the {word} into it)")
    if variable is None:
        return None
    text = (os.environ if environ is None else environ).get(variable, "")
    hint = f"is not set (set it to the {word}, or leave {kind}_env out)"
    return _checked(text, f"the environment variable {variable}", hint)


def _checked(text: str, holder: str, hint: str) -> str:
    # Files, and variables made from files, often end in a newline.
    found = text.strip()
    if not found:
        raise ConfigError(f"{holder} {hint}")
    if not (found.isascii() and found.isprintable()):
        raise ConfigError(f"{holder} has characters that a header cannot carry")
    return found
