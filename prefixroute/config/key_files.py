"""What files of keys have in common: lines, names, limits, and how wrong ones are told.

One key a line; empty lines and lines that begin with # count for nothing. In front of a key there may be its NAME and a
colon, behind it `in_flight=N` and `requests_per_minute=N`. Keys of one name are one caller (an old key and the new one,
say): they share its limits. Messages hold a line's number and never what is on it.
"""

import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from prefixroute.config.secrets import read_secret
from prefixroute.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OPTION = re.compile(r"(in_flight|requests_per_minute)=([1-9][0-9]{0,8})")
# 16 random letters and digits are some 95 bits; what is shorter is often a word.
_SHORT_CHARS = 16
_MAX_NAMED = 5


class _Entry(Protocol):
    """What is on a line."""

    @property
    def name(self) -> str: ...
    @property
    def max_in_flight(self) -> int | None: ...
    @property
    def requests_per_minute(self) -> int | None: ...


_EntryT = TypeVar("_EntryT", bound=_Entry)


def read_entries(
    path: Path, setting: str, word: str, entry_of: Callable[[str], _EntryT], identity: Callable[[_EntryT], Hashable]
) -> tuple[_EntryT, ...]:
    """What is on the lines of the file that `setting` names, at least one, none twice. Raises ConfigError.

    `word`: what `identity` gives, which no two entries may share. `entry_of` raises ValueError with what is wrong with
    a line, to be read after the line's number.
    """
    entries: dict[Hashable, _EntryT] = {}
    by_name: dict[str, _EntryT] = {}
    for number, line in enumerate(read_secret(path, setting).splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            entry = entry_of(text)
        except ValueError as error:
            raise ConfigError(f"{path}: line {number} {error}") from None
        if identity(entry) in entries:
            raise ConfigError(f"{path}: line {number} has {word} that an earlier line has (keep one of them)")
        first = by_name.setdefault(entry.name, entry)
        if (first.max_in_flight, first.requests_per_minute) != (entry.max_in_flight, entry.requests_per_minute):
            raise ConfigError(
                f"{path}: line {number} gives {entry.name} other limits than an earlier line "
                "(keys of one name share their limits)"
            )
        entries[identity(entry)] = entry
    if not entries:
        raise ConfigError(f"{path}: holds no key, so it lets nobody in (write one key a line)")
    return tuple(entries.values())


def named(text: str) -> tuple[str, list[str]]:
    """The name on a line, empty where there is none, and the words behind it. Raises ValueError."""
    name, colon, rest = text.partition(": ")
    if not colon:
        return "", text.split()
    if _NAME.fullmatch(name) is None:
        raise ValueError("has a name of other characters than A-Z a-z 0-9 . _ - (or of more than 64)")
    return name, rest.split()


def limits(options: Sequence[str], n_before: int) -> tuple[int | None, int | None]:
    """`in_flight` and `requests_per_minute` in the words behind a key. Raises ValueError.

    `n_before`: so many words are in front of them. A word is told by its number: any may be a key, or a piece of one.
    """
    found: dict[str, int] = {}
    for number, option in enumerate(options, start=n_before + 1):
        parts = _OPTION.fullmatch(option)
        if parts is None or parts[1] in found:
            hint = "; sha256sum writes a - behind the digest: leave it out" if option == "-" else ""
            raise ValueError(
                f"has a {nth(number)} word that is not understood (behind the key there may be in_flight=N and "
                f"requests_per_minute=N, each once, N at least 1{hint})"
            )
        found[parts[1]] = int(parts[2])
    return found.get("in_flight"), found.get("requests_per_minute")


def warnings_of(
    path: Path, plain: Sequence[tuple[str, int]], what: str, hint: str, otherwise: str = ""
) -> Iterator[str]:
    """What makes it easy to come by the keys that a file has in plain: `plain`, each one's name and length.

    `what`: they are called; `hint`: a command that makes a good one; `otherwise`: what to do instead of chmod.
    """
    if plain and os.name == "posix":
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            yield (
                f"{path} holds plain {what} and is open to other users of this machine, its mode is {mode:04o} "
                f"(chmod 600{otherwise})"
            )
    short = [name for name, n_chars in plain if n_chars < _SHORT_CHARS]
    if short:
        more = len(short) - _MAX_NAMED
        names = ", ".join(short[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        yield (
            f"{path} has {what} of fewer than {_SHORT_CHARS} characters, which can be guessed: {names} "
            f"({hint} makes a good one)"
        )


def nth(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
