"""One cell of a comparison: which requests, on which fleet, with which strategy. Described, then run."""

from dataclasses import dataclass, field, replace

from prefixroute.demo.engine import EngineConfig
from prefixroute.errors import ConfigError
from prefixroute.sim import strategies
from prefixroute.sim.calibration import Setting, context_tokens
from prefixroute.sim.load import only_fitting
from prefixroute.sim.report import Figures, summarise
from prefixroute.sim.run import FleetShape, Outage, Simulation
from prefixroute.sim.sources import Source
from prefixroute.sim.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Variant:
    """What is wrong with the fleet. `slow`: instance and factor of its speed, the others having 1."""

    slow: tuple[tuple[int, float], ...] = ()
    outages: tuple[Outage, ...] = ()

    def __str__(self) -> str:
        slow = [f"i{instance} at {factor:g}" for instance, factor in self.slow]
        dead = [f"i{outage.instance} dies at {outage.at_s:g} s for {outage.for_s:g} s" for outage in self.outages]
        return ", ".join(slow + dead)


@dataclass(frozen=True, slots=True)
class Cell:
    """`load` in units of `calibration`, or `rate` in requests per second: exactly one of the two is needed to run, and
    `with_rate` makes the second of the first."""

    source: Source
    strategy: str
    n_requests: int = 12_000
    n_instances: int = 8
    load: float | None = 1.0
    rate: float | None = None
    seed: int = 0
    variant: Variant = field(default_factory=Variant)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __str__(self) -> str:
        at = f"load {self.load:g}" if self.load is not None else f"{self.rate or 0:g} requests/s"
        parts = [self.source.name, self.strategy, at, f"{self.n_instances} instances", f"seed {self.seed}"]
        return ", ".join([*parts, *filter(None, [str(self.variant)])])

    def setting(self) -> Setting:
        """What its load 1.0 depends on."""
        return Setting(self.source, self.n_requests, self.n_instances, self.engine)

    def with_rate(self, full_rate: float) -> "Cell":
        """`full_rate`: requests per second of load 1.0."""
        return self if self.load is None else replace(self, rate=self.load * full_rate)


def run_cell(cell: Cell) -> Figures:
    """Its `rate` must be known. Raises ConfigError for what cannot be simulated, and what strategy or run raise."""
    return measure(cell, strategies.strategy(cell.strategy))


def measure(cell: Cell, strategy: Strategy) -> Figures:
    """The same with `strategy` instead of the one that `cell` names."""
    if cell.rate is None:
        raise ConfigError(f"{cell}: its rate is not known yet")
    made = cell.source.make(cell.n_requests, cell.rate, cell.seed)
    workload = only_fitting(made, context_tokens(cell.engine, made))
    if not workload.requests:
        raise ConfigError(f"{cell.source.name}: no request fits into a server")
    speeds = [1.0] * cell.n_instances
    for instance, factor in cell.variant.slow:
        speeds[instance] = factor
    done = Simulation(
        workload,
        FleetShape(speeds, cell.engine, cell.variant.outages),
        strategy.make,
        seed=cell.seed,
        load_constants=strategy.load_constants,
        hold=strategy.hold,
        guard=strategy.guard,
        sampling=strategy.sampling,
    ).run()
    return summarise(
        workload,
        done,
        n_instances=cell.n_instances,
        kv_tokens=cell.engine.kv_tokens,
        n_left_out=len(made.requests) - len(workload.requests),
    )
