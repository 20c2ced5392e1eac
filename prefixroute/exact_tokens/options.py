"""What a worker is told when it starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """Where the files are, and how they are used: as in `TokenizerSettings`."""

    path: str
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    library: str = "auto"
    cache_bytes: int = 64 * 2**20
    check_every: int = 256
