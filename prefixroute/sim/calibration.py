"""Load 1.0: the rate at which random spreading makes the p90 of TTFT three times that of idle servers.

A rate in requests per second says little: prompts differ, and what they share. This unit means the same on every
trace, and on every fleet: how busy the servers would be without a router that knows prefixes. It is found by
bisection over runs, so it costs about ten of them; a `Calibration` keeps what it has found.
"""

from dataclasses import astuple, dataclass, field
from itertools import pairwise
from math import ceil, sqrt
from pathlib import Path

import orjson

from prefixroute.core.policies.blind import RandomPolicy
from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.report import percentile, write_json
from prefixroute.errors import ConfigError
from prefixroute.sim.load import only_fitting
from prefixroute.sim.run import Done, FleetShape, Simulation
from prefixroute.sim.sources import Source
from prefixroute.sim.workload import Workload

SLOWDOWN = 3.0
# Runs of other seeds differ by more.
_PRECISION = 1.02
_STEP = 1.5
# Beyond these many steps of that, waiting does not depend on the rate.
_MAX_STEPS = 20
# A few thousand requests wait more or less by chance: as many seeds are taken together as make up this many requests.
# Always the same ones: cells that differ in their seed only are run at the same rate.
_ENOUGH_REQUESTS = 6_000
_MAX_SEEDS = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """What load 1.0 depends on. Instances are equal and healthy: a slow one does not lower the rate."""

    source: Source
    n_requests: int
    n_instances: int
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __str__(self) -> str:
        return f"load 1.0 of {self.source.name}, {self.n_requests:,} requests on {self.n_instances} instances"

    def key(self) -> str:
        engine = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in astuple(self.engine))
        return f"{self.source.key()}|{self.n_requests}|{self.n_instances}|{engine}"


class Calibration:
    """Rates found, by setting. `path`: a JSON file that keeps them; it need not exist."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises ConfigError for a file that is none of ours."""
        self._path = path
        self._rates: dict[str, float] = {}
        if path is not None and path.exists():
            self._rates = _read(path)

    def known(self, setting: Setting) -> float | None:
        return self._rates.get(setting.key())

    def keep(self, setting: Setting, rate: float) -> None:
        """Written at once: whoever interrupts a grid keeps what has been found."""
        self._rates[setting.key()] = rate
        if self._path is not None:
            write_json(self._path, {"rates": self._rates})

    def rate(self, setting: Setting) -> float:
        """Requests per second of load 1.0."""
        rate = self.known(setting)
        if rate is None:
            rate = calibrate(setting)
            self.keep(setting, rate)
        return rate


def calibrate(setting: Setting) -> float:
    """Requests per second of load 1.0, in about ten runs. Raises ConfigError if nobody ever waits so long."""
    requests = _workload(setting, 1.0, 0).requests
    if not requests:
        raise ConfigError(f"{setting.source.name}: no request fits into a server")
    mean_s = sum(setting.engine.prefill_s(0, request.input_tokens) for request in requests) / len(requests)
    # Somewhat less than the servers could compute without a cache.
    rate = 0.7 * setting.n_instances / mean_s
    factor = 1 / _STEP if _is_over(setting, rate) else _STEP
    tried = [rate * factor**n for n in range(_MAX_STEPS)]
    for before, after in pairwise(tried):
        if _is_over(setting, after) != (factor < 1):
            low, high = sorted((before, after))
            break
    else:
        raise ConfigError(
            f"{setting.source.name}: {len(requests):,} requests on {setting.n_instances} instances never wait"
            f" {SLOWDOWN:g} times as long as on idle ones, so there is no load 1.0:"
            " ask for more requests, or give a rate"
        )
    while high / low > _PRECISION:
        middle = sqrt(low * high)
        if _is_over(setting, middle):
            high = middle
        else:
            low = middle
    return sqrt(low * high)


def idle_ttft_s(engine: EngineConfig, input_tokens: int) -> float:
    """Time to first token of a prompt that is alone on an empty server."""
    n_steps = -(-input_tokens // engine.max_num_batched_tokens)
    return engine.prefill_s(0, input_tokens) + n_steps * engine.step_s / engine.speed


def _is_over(setting: Setting, rate: float) -> bool:
    shape = FleetShape([1.0] * setting.n_instances, setting.engine)
    done: list[Done] = []
    for seed in range(min(_MAX_SEEDS, ceil(_ENOUGH_REQUESTS / setting.n_requests))):
        done += Simulation(_workload(setting, rate, seed), shape, lambda _: RandomPolicy(), seed=seed).run()
    idle_s = percentile(sorted(idle_ttft_s(setting.engine, one.input_tokens) for one in done), 0.9)
    busy_s = percentile(sorted(one.ttft_s for one in done), 0.9)
    return (busy_s or 0.0) > SLOWDOWN * (idle_s or 0.0)


def _workload(setting: Setting, rate: float, seed: int) -> Workload:
    workload = setting.source.make(setting.n_requests, rate, seed)
    return only_fitting(workload, context_tokens(setting.engine, workload))


def context_tokens(engine: EngineConfig, workload: Workload) -> int:
    """What one server can hold of one request, whose blocks are the workload's."""
    return min(engine.max_model_len, engine.kv_tokens // workload.block_tokens * workload.block_tokens)


def _read(path: Path) -> dict[str, float]:
    try:
        rates = orjson.loads(path.read_bytes())["rates"]
        return {str(key): float(rate) for key, rate in rates.items()}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError):
        raise ConfigError(f"{path}: is no file of calibrations") from None
