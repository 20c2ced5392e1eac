"""Configuration files: text in, plain data out, and one line on what is wrong otherwise.

YAML is read by the rules of YAML 1.2, so that JSON means the same in both: `no` is text, 08080 is a number,
1e3 too. Refused, since each hides what a file says: duplicate keys, aliases, tags, several documents, numbers
that are not finite.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import yaml
from yaml.reader import ReaderError

from prefixroute.errors import ConfigError

# A fleet of a thousand instances takes a tenth of it.
MAX_FILE_BYTES = 2**20
# The settings nest to 4; the rest is for the options of custom policies.
_MAX_DEPTH = 64

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_PREFIXED_INTEGER = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


class _Mark(Protocol):
    @property
    def line(self) -> int: ...
    @property
    def column(self) -> int: ...


class TextError(ValueError):
    """The text is not what its format allows. The message holds line and column."""


def read_file(path: Path) -> dict[str, Any]:
    """The table in a YAML or (by its suffix .json) JSON file; an empty file is an empty table. Raises ConfigError."""
    text = read_text(path)
    try:
        data = parse_json(text) if path.suffix.lower() == ".json" else parse_yaml(text)
    except TextError as error:
        raise ConfigError(f"{path}: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else "a single value"
        raise ConfigError(f"{path}: must be a table of settings such as 'listen: {{port: 8080}}', not {kind}")
    return data


def parse_json(text: str) -> Any:
    """The value of a JSON text; None for an empty one. Raises TextError."""
    if not text.strip():
        return None
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_not_finite, parse_float=_float, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise TextError(f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise TextError("is nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; None for an empty one. Raises TextError."""
    data = None
    n_documents = 0
    # Events rather than PyYAML's own objects: those know neither duplicates nor what was quoted.
    events: Iterator[yaml.Event] = iter(yaml.parse(text, Loader=yaml.BaseLoader))
    try:
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                n_documents += 1
                if n_documents > 1:
                    raise _at(event.start_mark, "a second document begins (keep one)")
                data = _value(next(events), events)
        return data
    except yaml.MarkedYAMLError as error:
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise _at(error.problem_mark or error.context_mark, f"not YAML: {problem}") from None
    except TextError:
        raise
    except (ValueError, OverflowError):  # PyYAML lets them out for an escape beyond Unicode, such as "\UFFFFFFFF"
        raise TextError("not YAML: it has an escape for a character that does not exist") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise TextError(f"line {line}: not text: it has the character U+{ord(text[error.position]):04X}") from None


def read_text(path: Path) -> str:
    """A small file's text, as UTF-8. Raises ConfigError, which holds its path and nothing of the text."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        tried = "" if path.is_absolute() else f" in the working directory, {Path.cwd()}"
        raise ConfigError(f"{path}: no such file{tried}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory (name the file in it)") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is longer than 1 MiB, which no configuration is")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def _value(event: yaml.Event, events: Iterator[yaml.Event], depth: int = 0) -> Any:
    """The value that begins with `event`; takes the rest of it off `events`."""
    if depth > _MAX_DEPTH:
        raise _at(event.start_mark, "is nested too deeply")
    # Aliases are how a small file grows large.
    if isinstance(event, yaml.AliasEvent):
        raise _at(event.start_mark, f"alias *{event.anchor} is not supported (write the value out)")
    if getattr(event, "tag", None) is not None:
        raise _at(event.start_mark, "tags (words that begin with !) are not supported")
    if isinstance(event, yaml.MappingStartEvent):
        table: dict[str, Any] = {}
        while not isinstance(key_event := next(events), yaml.MappingEndEvent):
            key = _value(key_event, events, depth + 1)
            if not isinstance(key, str):
                raise _at(key_event.start_mark, "a key must be text (put it in quotes)")
            if key in table:
                raise _at(key_event.start_mark, f"{key[:64]!r} is set twice (keep one)")
            table[key] = _value(next(events), events, depth + 1)
        return table
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Any] = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            items.append(_value(item, events, depth + 1))
        return items
    scalar = cast("yaml.ScalarEvent", event)
    plain, _ = scalar.implicit
    try:
        # PyYAML leaves the two halves of an escaped character of JSON apart, such as "\ud83d\ude00".
        text = scalar.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return _scalar(text) if plain else text
    except TextError as error:
        raise _at(scalar.start_mark, str(error)) from None


def _scalar(text: str) -> Any:
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text) or _PREFIXED_INTEGER.fullmatch(text):
        return _integer(text)
    return _float(text) if _FLOAT.fullmatch(text) else text


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise TextError(f"{key[:64]!r} is set twice in one object (keep one)")
        table[key] = value
    return table


def _integer(text: str) -> int:
    if len(text) > 100:
        raise TextError("has a whole number of more than 100 digits")
    return int(text, 0 if "x" in text or "o" in text else 10)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise TextError("has a number too large to hold")
    return value


def _not_finite(text: str) -> NoReturn:
    raise TextError(f"has {text} for a number")


def _at(mark: _Mark | None, message: str) -> TextError:
    return TextError(message if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {message}")
