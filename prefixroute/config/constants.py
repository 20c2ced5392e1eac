"""Settings → the core's constants: dataclasses whose fields are settings of the same name."""

from collections.abc import Callable
from inspect import signature
from typing import TypeVar

from prefixroute.config.routing import ExpectedLatencySettings
from prefixroute.config.tables import Table
from prefixroute.core.held import HoldConstants

T = TypeVar("T")


def constants(kind: Callable[..., T], table: Table) -> T:
    """A dataclass of the core's constants, each from the setting of the same name."""
    return kind(**{name: getattr(table, name) for name in signature(kind).parameters})


def hold_constants(table: ExpectedLatencySettings) -> HoldConstants | None:
    """None: no request is ever held."""
    return constants(HoldConstants, table) if table.max_held else None
