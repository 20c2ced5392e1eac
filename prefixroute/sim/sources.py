"""Where a workload comes from, in a form small enough to hand to another process."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import xxhash

from prefixroute.sim import generators
from prefixroute.sim.load import overlay
from prefixroute.sim.traces import Trace, TraceError, read_trace
from prefixroute.sim.workload import Workload


class Source(Protocol):
    """Hashable and picklable."""

    @property
    def name(self) -> str:
        """For people, tables and charts."""
        ...

    def key(self) -> str:
        """Equal for equal requests, in any process and at any time."""
        ...

    def make(self, n_requests: int, rate: float, seed: int) -> Workload:
        """At most `n_requests`, at `rate` requests per second."""
        ...


@dataclass(frozen=True, slots=True)
class Generated:
    """One of the generators. Raises ConfigError when made into a workload, if there is none of that name."""

    name: str

    def key(self) -> str:
        return self.name

    def make(self, n_requests: int, rate: float, seed: int) -> Workload:
        return generators.make(self.name, n_requests, rate, seed)


@dataclass(frozen=True, slots=True)
class FromTrace:
    """Files of one trace, read once in each process. Raises TraceError when they are read."""

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        return self.paths[0].name.removesuffix(".jsonl")

    def key(self) -> str:
        return f"{self.name} {_digest(self.paths)}"

    def make(self, n_requests: int, rate: float, seed: int) -> Workload:
        return overlay(self.trace(), self.name, n_requests, rate, seed)

    def trace(self) -> Trace:
        return _read(self.paths)


@lru_cache(maxsize=4)
def _read(paths: tuple[Path, ...]) -> Trace:
    return read_trace(paths)


@lru_cache(maxsize=16)
def _digest(paths: Sequence[Path]) -> str:
    digest = xxhash.xxh3_64()
    try:
        for path in paths:
            digest.update(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{error.filename}: {error.strerror}") from error
    return digest.hexdigest()
