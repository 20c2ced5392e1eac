"""One run: a workload, a strategy and a fleet of simulated engines, on virtual time.

The router here is the one that serves: its policy sees what it would see live, and nothing else. An event is an
arrival, the end of an engine's steps, a probe, or an instance that dies or returns; between events nothing happens,
so decoding is computed in closed form.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance, ProbeFailure
from prefixroute.core.guard import GuardConstants
from prefixroute.core.held import Held, HoldConstants
from prefixroute.core.lease import Lease
from prefixroute.core.load import LoadConstants
from prefixroute.core.policy import Policy
from prefixroute.core.request import Request
from prefixroute.core.router import Router
from prefixroute.core.survey import Sampling
from prefixroute.demo.engine import Engine, EngineConfig, EngineRequest
from prefixroute.errors import NoInstanceError, TooManyRequestsError
from prefixroute.sim.prompt import SimPrompt
from prefixroute.sim.workload import SimRequest, Workload

# A long answer is a few thousand steps.
_LONGEST_LEAP = 1_000_000
# As the real prober's defaults.
_PROBE_EVERY_S = 2.0
# How often held requests are looked at beside first bytes and ends of answers.
_RELEASE_EVERY_S = 0.1
# A client that was refused comes again after this.
_RETRY_S = 1.0
_ROUTER_BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Outage:
    """An instance that dies at `at_s`, and is back, empty, `for_s` later."""

    instance: int
    at_s: float
    for_s: float = 60.0


@dataclass(frozen=True, slots=True)
class FleetShape:
    """`speeds`: of each instance, as a factor."""

    speeds: Sequence[float]
    engine: EngineConfig = field(default_factory=EngineConfig)
    outages: Sequence[Outage] = ()


@dataclass(slots=True)
class Done:
    """How one request went. Times in seconds since it first arrived."""

    arrived_s: float
    input_tokens: int
    output_tokens: int
    instance: int = -1
    cached_tokens: int = 0
    matched_tokens: int = 0
    ttft_s: float = float("nan")
    e2e_s: float = float("nan")
    n_attempts: int = 0


class _Attempt(EngineRequest):
    """One request on one engine."""

    __slots__ = ("index", "lease", "told")

    def __init__(self, index: int, request: SimRequest, lease: Lease) -> None:
        super().__init__(request.input_tokens, request.output_tokens, request.hashes)
        self.index = index
        self.lease = lease
        self.told = False


class Simulation:
    """Made for one `run`. `make_policy` gets this simulation: baselines that poll engines do it through `gauges`."""

    def __init__(
        self,
        workload: Workload,
        shape: FleetShape,
        make_policy: "Callable[[Simulation], Policy]",
        *,
        seed: int = 0,
        load_constants: LoadConstants | None = None,
        hold: HoldConstants | None = None,
        guard: GuardConstants | None = None,
        sampling: Sampling | None = None,
        streamed: bool = True,
        on_done: Callable[[Done], None] | None = None,
    ) -> None:
        self.workload = workload
        self.shape = shape
        self.now_s = 0.0
        n = len(shape.speeds)
        self.engines = [self._engine(i) for i in range(n)]
        # The router's blocks are whole multiples of the workload's, as near to its own default as that allows.
        self._stride = max(1, _ROUTER_BLOCK_TOKENS // workload.block_tokens)
        self.router = Router(
            [Instance(f"i{i}", f"http://i{i}", i) for i in range(n)],
            make_policy(self),
            BlockHasher(self._stride * workload.block_tokens, 0),
            Random(f"router {seed}"),
            index_bytes=1 << 40,
            load_constants=load_constants,
            hold=hold,
            guard=guard,
            sampling=sampling,
            capacities={f"i{i}": shape.engine.kv_tokens for i in range(n)},
        )
        for i in range(n):
            self.router.fleet.probe_passed(f"i{i}")
        self.done = [Done(0.0, r.input_tokens, r.output_tokens) for r in workload.requests]
        self._streamed = streamed
        self._on_done = on_done
        self._alive = [True] * n
        self._stepping = [0] * n
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()
        self._followers: dict[int, list[int]] = {}
        self._requests: dict[int, Request] = {}
        self._n_left = len(workload.requests)
        self._release_due = False

    def _engine(self, instance: int) -> Engine[_Attempt]:
        base = self.shape.engine
        changed = {name: getattr(base, name) for name in EngineConfig.__slots__}
        changed |= {"block_size": self.workload.block_tokens, "speed": base.speed * self.shape.speeds[instance]}
        return Engine(EngineConfig(**changed))

    def run(self) -> list[Done]:
        """All requests, in the workload's order, each answered."""
        for index, request in enumerate(self.workload.requests):
            if request.after is None:
                self._at(request.arrival_s, self._arrive, index)
            else:
                self._followers.setdefault(request.after, []).append(index)
        for outage in self.shape.outages:
            self._at(outage.at_s, self._die, outage.instance)
            self._at(outage.at_s + outage.for_s, self._return, outage.instance)
        while self._n_left:
            self.now_s, _, act, arguments = heappop(self._events)
            act(*arguments)
        return self.done

    def _at(self, at_s: float, act: Callable[..., None], *arguments: object) -> None:
        heappush(self._events, (at_s, next(self._order), act, arguments))

    # ------------------------------------------------------------------ requests

    def _arrive(self, index: int) -> None:
        request = self.workload.requests[index]
        self.done[index].arrived_s = self.now_s
        n_blocks = request.input_tokens // self.workload.block_tokens
        chain = request.hashes[self._stride - 1 : n_blocks : self._stride]
        prompt = SimPrompt(
            None,
            b"",
            b"key",
            request.input_tokens,
            stream=self._streamed,
            hashes=request.hashes[:n_blocks],
            block_tokens=self.workload.block_tokens,
            number=index,
        )
        self._requests[index] = Request(prompt, chain, request.input_tokens)
        self._enter(index)

    def _enter(self, index: int) -> None:
        def granted(lease: Lease | None) -> None:
            if lease is None:
                self._at(self.now_s, self._enter, index)
            else:
                self._send(index, lease)

        try:
            entered = self.router.enter(self._requests[index], now_s=self.now_s, grant=granted)
        except (NoInstanceError, TooManyRequestsError):
            self._at(self.now_s + _RETRY_S, self._enter, index)
            return
        if isinstance(entered, Held):
            self._look_later()
        else:
            self._send(index, entered)

    def _send(self, index: int, lease: Lease) -> None:
        tried: set[str] = set()
        while not self._alive[lease.instance.slot]:
            # Nothing listens there.
            tried.add(lease.instance.name)
            lease.refused()
            self.router.connect_failed(lease.instance.name, self.now_s, timed_out=False)
            lease.end()
            try:
                lease = self.router.lease(self._requests[index], now_s=self.now_s, without=tried)
            except NoInstanceError:
                self._at(self.now_s + _RETRY_S, self._enter, index)
                return
        slot = lease.instance.slot
        done = self.done[index]
        done.n_attempts += 1
        done.instance = slot
        done.matched_tokens = lease.decision.candidate.matched_tokens
        engine = self.engines[slot]
        engine.add(_Attempt(index, self.workload.requests[index], lease), self.now_s)
        if not self._stepping[slot]:
            self._step(slot)
        elif (left_s := engine.cut(self.now_s)) is not None:
            self._stepping[slot] = number = next(self._order)
            self._at(self.now_s + left_s, self._stepped, slot, number)

    def _step(self, slot: int) -> None:
        duration_s = self.engines[slot].start_step(self.now_s, _LONGEST_LEAP)
        if duration_s is None:
            self._stepping[slot] = 0
        else:
            self._stepping[slot] = number = next(self._order)
            self._at(self.now_s + duration_s, self._stepped, slot, number)

    def _stepped(self, slot: int, number: int) -> None:
        if self._stepping[slot] != number:
            return  # it was cut, or the instance died
        changed = False
        for attempt in self.engines[slot].finish_step(self.now_s):
            ended = attempt.finish_reason is not None
            if not attempt.told and (self._streamed or ended):
                attempt.told = changed = True
                attempt.lease.first_byte(self.now_s, learn=True)
            if ended:
                changed = True
                self._end(attempt)
        self._step(slot)
        if changed and len(self.router.held):
            self.router.release(self.now_s)
            self._look_later()

    def _end(self, attempt: _Attempt) -> None:
        index, request, done = attempt.index, self.workload.requests[attempt.index], self.done[attempt.index]
        done.cached_tokens = attempt.cached_tokens or 0
        done.ttft_s = (attempt.first_token_s or 0.0) - done.arrived_s
        done.e2e_s = self.now_s - done.arrived_s
        # The last token of an answer is told, and never put in.
        n_blocks = (request.input_tokens + request.output_tokens - 1) // self.workload.block_tokens
        attempt.lease.computed(request.hashes[self._stride - 1 : n_blocks : self._stride])
        attempt.lease.end()
        del self._requests[index]
        self._n_left -= 1
        if self._on_done is not None:
            self._on_done(done)
        for follower in self._followers.get(index, ()):
            self._at(self.now_s + self.workload.requests[follower].arrival_s, self._arrive, follower)

    def _look_later(self) -> None:
        if not self._release_due and len(self.router.held):
            self._release_due = True
            self._at(self.now_s + _RELEASE_EVERY_S, self._look)

    def _look(self) -> None:
        self._release_due = False
        self.router.release(self.now_s)
        self._look_later()

    # ------------------------------------------------------------------ instances

    def _die(self, slot: int) -> None:
        engine = self.engines[slot]
        self._alive[slot] = False
        self._stepping[slot] = 0
        self.engines[slot] = self._engine(slot)
        for attempt in engine.requests:
            attempt.lease.end()
            self._at(self.now_s, self._enter, attempt.index)  # its client asks again
        self._at(self.now_s + _PROBE_EVERY_S, self._probe, slot)

    def _return(self, slot: int) -> None:
        self._alive[slot] = True

    def _probe(self, slot: int) -> None:
        name = self.router.fleet.instances[slot].name
        if self._alive[slot]:
            # Two good ones in a row, as the prober asks for.
            self.router.fleet.probe_passed(name)
            self.router.fleet.probe_passed(name)
            return
        self.router.probe_failed(name, ProbeFailure.REFUSED)
        self._at(self.now_s + _PROBE_EVERY_S, self._probe, slot)
