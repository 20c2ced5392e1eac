"""What `prefixroute simulate` was asked for, from text to cells. Mistakes are ConfigErrors that name the option."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from pathlib import Path
from typing import TypeVar

from prefixroute.config.words import did_you_mean
from prefixroute.demo.engine import EngineConfig
from prefixroute.errors import ConfigError
from prefixroute.sim import strategies
from prefixroute.sim.cell import Cell, Variant
from prefixroute.sim.generators import GENERATORS
from prefixroute.sim.run import Outage
from prefixroute.sim.sources import FromTrace, Generated, Source

_DEFAULT_LOAD = 1.0
_MAX_INSTANCES = 1_024
_MAX_SEEDS = 1_000
# Of rates, loads, speeds and times: beyond, floating point no longer tells one moment from the next.
_LEAST, _MOST = 1e-6, 1e6

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """As written on the command line; lists have commas in them.

    `slow` and `kill`: one item each, such as `i0=0.4` and `i0@120:60`; all of them hold in every run.
    """

    traces: Sequence[str]
    strategies: str
    instances: str = "8"
    load: str | None = None
    rate: str | None = None
    seeds: str = "0"
    slow: Sequence[str] = ()
    kill: Sequence[str] = ()
    n_requests: int = 12_000
    kv_tokens: int = 400_000
    cached_cost: float = 0.0
    n_processes: int | None = None
    json_path: Path | None = None
    chart_path: Path | None = None
    calibration_path: Path | None = None

    def cells(self) -> list[Cell]:
        """By trace, instances, load, strategy and seed, in this order of nesting."""
        if self.load is not None and self.rate is not None:
            raise ConfigError("--load and --rate cannot be combined: each says how many requests come")
        sources = _distinct([parse_source(text) for text in self.traces], "a trace")
        names = _distinct(parse_strategies(self.strategies), "--strategies: a strategy")
        fleets = _list("--instances", self.instances, _instances)
        loads: Sequence[float | None] = [None]
        rates: Sequence[float | None] = [None]
        if self.rate is not None:
            rates = _list("--rate", self.rate, _positive)
        else:
            loads = _list("--load", self.load or f"{_DEFAULT_LOAD:g}", _positive)
        variant = Variant(
            tuple(_parse_slow(text, min(fleets)) for text in self.slow),
            tuple(_parse_kill(text, min(fleets)) for text in self.kill),
        )
        engine = EngineConfig(kv_tokens=self.kv_tokens, cached_cost_ratio=self.cached_cost)
        return [
            Cell(source, name, self.n_requests, n_instances, load, rate, seed, variant, engine)
            for source, n_instances, load, rate, name, seed in product(
                sources, fleets, loads, rates, names, parse_seeds(self.seeds)
            )
        ]


def parse_source(text: str) -> Source:
    """A generator by its name, or else a file, which is read later."""
    if text in GENERATORS:
        return Generated(text)
    if not Path(text).is_file():
        hint = did_you_mean(text, GENERATORS)
        raise ConfigError(f"'{text}' is no file and no generated workload{hint}")
    return FromTrace((Path(text),))


def parse_strategies(text: str) -> list[str]:
    """Names with or without parameters. `all`: every one there is.

    Commas separate strategies and parameters alike: what has a `=` and no `:` before it belongs to the one before.
    """
    if text == "all":
        return list(strategies.NAMES)
    names: list[str] = []
    for part in text.split(","):
        item = part.strip()
        if names and ":" in names[-1] and "=" in item and ":" not in item.partition("=")[0]:
            names[-1] += f",{item}"
        else:
            names.append(item)
    for name in names:
        try:
            strategies.strategy(name)
        except ConfigError as error:
            raise ConfigError(f"--strategies: {error}") from None
    return names


def parse_seeds(text: str) -> list[int]:
    """Numbers and ranges of them: `0,1,5-9`."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--seeds: '{part}' is no number and no range such as 0-4")
        begin, end = int(first), int(last) if dash else int(first)
        if not begin <= end < begin + _MAX_SEEDS:
            raise ConfigError(f"--seeds: '{part}' goes backwards or is longer than {_MAX_SEEDS:,} seeds")
        seeds += range(begin, end + 1)
    return _distinct(seeds, "--seeds: a seed")


def _parse_slow(text: str, n_instances: int) -> tuple[int, float]:
    name, equals, factor = text.rpartition("=")
    return _instance("--slow", name if equals else "i0", n_instances), _positive("--slow", factor)


def _parse_kill(text: str, n_instances: int) -> Outage:
    name, at, times = text.partition("@")
    at_s, colon, for_s = times.partition(":")
    if not at:
        raise ConfigError(f"--kill: '{text}' is not written i0@120, or i0@120:60 to have it back 60 s later")
    outage = Outage(_instance("--kill", name, n_instances), _positive("--kill", at_s))
    return Outage(outage.instance, outage.at_s, _positive("--kill", for_s)) if colon else outage


def _instance(option: str, name: str, n_instances: int) -> int:
    number = name.strip().removeprefix("i")
    if not name.strip().startswith("i") or not number.isdecimal() or int(number) >= n_instances:
        raise ConfigError(f"{option}: '{name}' is none of the instances i0 to i{n_instances - 1}")
    return int(number)


def _instances(option: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_INSTANCES:
        raise ConfigError(f"{option}: '{text}' is no whole number from 1 to {_MAX_INSTANCES:,}")
    return int(text)


def _positive(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not isfinite(number) or number <= 0:
        raise ConfigError(f"{option}: '{text}' is no number above 0")
    if not _LEAST <= number <= _MOST:
        raise ConfigError(f"{option}: '{text}' is not within {_LEAST:f} and {_MOST:,.0f}")
    return number


def _list(option: str, text: str, parse: Callable[[str, str], T]) -> list[T]:
    return _distinct([parse(option, part.strip()) for part in text.split(",")], f"{option}: a value")


def _distinct(items: list[T], what: str) -> list[T]:
    if len(set(items)) < len(items):
        raise ConfigError(f"{what} is named twice")
    return items
