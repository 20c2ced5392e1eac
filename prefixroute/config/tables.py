"""What all tables of settings are made of."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

LogLevel = Literal["debug", "info", "warning", "error"]

# Longer than any sensible wait, and short enough for every timer API.
Seconds = Annotated[float, Field(gt=0, le=86_400)]
SecondsFromZero = Annotated[float, Field(ge=0, le=86_400)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
Port = Annotated[int, Field(ge=0, le=65_535)]
CapacityTokens = Annotated[int, Field(ge=1, le=10**12)]

_NAME = re.compile(r"[A-Za-z0-9._:\[\]-]{1,64}")
_MAX_FILE_PATH = 4096


class SettingError(ValueError):
    """A value is wrong. `where`: path of the culprit below the value being validated."""

    def __init__(self, message: str, *where: str | int) -> None:
        super().__init__(message)
        self.where = where


class Table(BaseModel):
    """A mapping of settings."""

    # By alias: what is dumped can be validated again.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)

    foreign: ClassVar[Mapping[str, str]] = {}
    """Keys that people bring from elsewhere and that mean nothing here, with what to say of each."""

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: Any) -> Any:
        # `routing:` with every line below it commented out reads as null.
        return {} if value is None else value


class PathMark:
    """In a text's annotation: it is a path on this machine. In a file it counts from the file's directory."""


def _file_path(path: str) -> str:
    # One line: a certificate or key pasted where its file's name belongs is refused rather than echoed.
    if not path or len(path) > _MAX_FILE_PATH or not path.isprintable() or path.endswith("/"):
        raise SettingError("must be the path of a file")
    return path


def _short_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise SettingError("must be 1 to 64 characters out of A-Z a-z 0-9 . _ : - [ ]")
    return name


AnyPath = Annotated[str, PathMark]
FilePath = Annotated[str, PathMark, AfterValidator(_file_path)]
# Of an instance or a machine, as metrics and logs can hold it.
ShortName = Annotated[str, AfterValidator(_short_name)]


def fields_by_key(table: type[Table]) -> dict[str, FieldInfo]:
    """The fields of a table by their keys in a file, which some tables spell otherwise than their attributes."""
    return {field.alias or name: field for name, field in table.model_fields.items()}


def is_path(field: FieldInfo) -> bool:
    """Whether a setting is a path; it may be null."""
    return PathMark in field.metadata or any(
        PathMark in getattr(inner, "__metadata__", ()) for inner in get_args(field.annotation)
    )


def table_in(annotation: Any) -> type[Table] | None:
    """The table in a field's type: alone, or null, or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation
    return next(filter(None, map(table_in, get_args(annotation))), None)
