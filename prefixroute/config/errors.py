"""What pydantic found wrong, in the words of someone who edits a configuration file.

Each problem is one line, `where.it.is: what is wrong (what to do)`. A value is quoted only where a secret has
no business being, and never whole if it is long.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from prefixroute.config.settings import Settings
from prefixroute.config.tables import SettingError, Table, fields_by_key, table_in
from prefixroute.config.words import cut, did_you_mean, nearest, shown

Where = tuple[str | int, ...]

# A number of as many digits is quoted.
_MAX_DIGITS = 60

_KINDS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text (put it in quotes)",
}
_SHAPES = {
    "tuple_type": "must be a list",
    "model_type": "must be a table of settings",
    "dict_type": "must be a table",
}
_BOUNDS = {
    "greater_than_equal": ("must be at least", "ge"),
    "greater_than": ("must be more than", "gt"),
    "less_than_equal": ("must be at most", "le"),
}


def describe(error: ValidationError, sources: Mapping[Where, str | None]) -> list[str]:
    """One line for each problem. `sources`: the environment variable that set a path, None if another source did."""
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        if not _follows_from_another(detail):
            where, what = _problem(detail)
            lines.append(f"{_path(where)}{_origin(where, sources)}: {what}")
    return lines


def _follows_from_another(detail: ErrorDetails) -> bool:
    """Whether what is at fault has a line of its own."""
    # A name is to be made from a URL, which is wrong; a list is empty once the wrong items are out.
    return detail["type"] == "default_factory_not_called" or (detail["type"] == "too_short" and bool(detail["input"]))


def _problem(detail: ErrorDetails) -> tuple[Where, str]:
    where, kind, value, context = detail["loc"], detail["type"], detail["input"], detail.get("ctx", {})
    table, field = _declared(where)
    if kind == "extra_forbidden":
        key = str(where[-1])
        if table is None:
            return where, "unknown setting"
        return where, table.foreign.get(key) or "unknown setting" + did_you_mean(key, fields_by_key(table))
    if kind == "missing":
        return where, "is required"
    if kind in _SHAPES:
        return where, f"{_SHAPES[kind]}, not {_shape(value)}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return where, f"{words} {_value(context[bound])}, not {_value(value)}"
    if kind in _KINDS or kind == "literal_error":
        choices = _choices(field)
        what = _KINDS.get(kind, f"must be one of {', '.join(choices)}")
        hint = ""
        if value is None:
            hint = " (leave it out for the default)"
        elif isinstance(value, str) and (near := nearest(value, choices)):
            hint = f"; did you mean '{near}'?"
        # Text is where keys are put by mistake.
        given = _shape(value) if kind == "string_type" else _value(value)
        return where, f"{what}, not {given}{hint}"
    cause = context.get("error")
    if isinstance(cause, SettingError):
        return (*where, *cause.where), str(cause)
    if kind == "finite_number":
        return where, "must be a finite number"
    if kind == "too_short":
        hint = "" if field is not None and field.is_required() else " (leave it out for the default)"
        return where, f"must not be an empty list{hint}"
    if kind == "too_long":
        return where, f"must be a list of at most {context['max_length']}"
    return where, str(cause) if cause is not None else shown(detail["msg"])


def _declared(where: Where) -> tuple[type[Table] | None, FieldInfo | None]:
    """The table that `where` is a key of, and the field there; None for what is not declared."""
    table: type[Table] | None = None
    field: FieldInfo | None = None
    inner: type[Table] | None = Settings
    for key in where:
        if isinstance(key, str):
            table = inner
            field = None if table is None else fields_by_key(table).get(key)
            inner = None if field is None else table_in(field.annotation)
    return table, field


def _choices(field: FieldInfo | None) -> list[str]:
    annotation = None if field is None else field.annotation
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def _path(where: Where) -> str:
    text = ""
    for key in where:
        text += f"[{key}]" if isinstance(key, int) else f".{shown(key)}"
    return text.removeprefix(".") or "configuration"


def _origin(where: Where, sources: Mapping[Where, str | None]) -> str:
    prefixes = (where[:length] for length in range(len(where), 0, -1))
    name = next((sources[prefix] for prefix in prefixes if prefix in sources), None)
    return "" if name is None else f" (from {name})"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return repr(cut(value))
    if isinstance(value, float):
        return repr(int(value) if value.is_integer() and abs(value) < 1e15 else value)
    if type(value) is int and abs(value) < 10**_MAX_DIGITS:
        return repr(value)
    return _shape(value)


def _shape(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return "text"
        case int() | float():
            return "a number"
        case Mapping():
            return "a table"
        case list() | tuple():
            return "a list"
        case _:
            return "something else"
