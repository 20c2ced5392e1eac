"""What all tables of settings are made of."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
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


class SettingError(ValueError):
    """A value is wrong. `where`: path of the culprit below the value being validated."""

    def __init__(self, message: str, *where: str | int) -> None:
        super().__init__(message)
        self.where = where


class Table(BaseModel):
    """A mapping of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: Any) -> Any:
        # `routing:` with every line below it commented out reads as null.
        return {} if value is None else value


class PathMark:
    """In a text's annotation: it is a path on this machine. In a file it counts from the file's directory."""


AnyPath = Annotated[str, PathMark]


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
