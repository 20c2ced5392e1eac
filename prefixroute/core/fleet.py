"""Facts about instances: who they are, whether they can serve, which models they have.

The fleet applies events (a probe's outcome, a connection that could not be made, an answer) and says who may
take a request. States and what moves them:

    STARTING ──good probe, or an answer──▶ UP   not heard of yet: tried like UP, so that a request need not wait
    UP ──`fall` failed probes──▶ DOWN           DOWN ──`rise` good probes──▶ UP (one, when it was never up)
    any ──connect failure──▶ EJECTED ──a request after the pause, or a good probe──▶ HALF_OPEN ──an answer──▶ UP
    HALF_OPEN takes one request at a time, its trial; a connect failure ejects again, with twice the pause.

Draining is intent, not health: no new requests, whatever the state.

An instance that joins a fleet at work is STARTING as well, but gets a request before its first good probe only when
nobody else could take it: others need not find out at their clients' cost that it is not there yet.

Fail open: a server that is busy with a huge prompt may not answer its health check, and neither may its
neighbours. Probes that time out while others do too are not believed, and when nobody is up, everybody who does
not refuse connections may be tried. One that is there, but is not trusted, is tried then as well, because the attempt
is what tells a client why; it never counts as one that can serve.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class State(Enum):
    """What is known of an instance's health. Values are metric labels."""

    STARTING = "starting"
    UP = "up"
    HALF_OPEN = "half_open"
    DOWN = "down"
    EJECTED = "ejected"


# Python 3.11 takes as long to find a member of an enum as to call a function: these are asked for by every request.
_UP, _EJECTED, _HALF_OPEN = State.UP, State.EJECTED, State.HALF_OPEN


class ProbeFailure(Enum):
    """Why a probe failed. Values appear in logs and on the admin port."""

    REFUSED = "refused"
    TIMEOUT = "timeout"
    STATUS = "status"
    UNTRUSTED = "untrusted"
    """Its certificate was refused, or it speaks no TLS. Waiting changes nothing."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One model server. `slot`: its number in index and load, never given to another; `models` None: learned by
    asking it."""

    name: str
    url: str
    slot: int
    models: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class HealthConstants:
    """How many probes turn a state, and how long an ejected instance pauses (seconds, doubling up to the maximum)."""

    fall: int = 3
    rise: int = 2
    eject_s: float = 1
    eject_max_s: float = 30


class InstanceState:
    """What the fleet knows of one instance. Read-only outside this module."""

    __slots__ = (
        "_ejected_until_s",
        "_n_failed",
        "_n_passed",
        "_pause_s",
        "_trial",
        "_was_up",
        "draining",
        "failure",
        "instance",
        "joining",
        "last_probe",
        "models",
        "reason",
        "state",
    )

    def __init__(self, instance: Instance, pause_s: float, *, joining: bool = False) -> None:
        self.instance = instance
        self.state = State.STARTING
        self.joining = joining
        self.draining = False
        self.failure: ProbeFailure | None = None
        """What took it out, or keeps it out; None while its state says all."""
        self.last_probe: ProbeFailure | None = None
        """How the last probe failed; None: it passed, or there was none yet."""
        self.reason: str | None = None
        """The last probe's failure in words, for people."""
        self.models = instance.models
        self._n_failed = 0
        self._n_passed = 0
        self._ejected_until_s = 0.0
        self._pause_s = pause_s
        # Number of the request under way that tries a half-open instance; 0: none does.
        self._trial = 0
        self._was_up = False


class Fleet:
    """All instances, in the order given."""

    def __init__(self, instances: Iterable[Instance], health: HealthConstants | None = None) -> None:
        self._health = health or HealthConstants()
        self._states = {i.name: InstanceState(i, self._health.eject_s) for i in instances}
        # Rebuilt on every event that changes it, so that a decision only filters.
        self._by_model: dict[str | None, tuple[InstanceState, ...]] = {}
        # By model as well: who may take a request, where everybody is UP, so that neither time nor trials matter.
        self._ready: dict[str | None, list[Instance]] = {}
        self._n_trials = 0
        self._next_slot = max((s.instance.slot for s in self._states.values()), default=-1) + 1

    @property
    def instances(self) -> Sequence[Instance]:
        return [state.instance for state in self._states.values()]

    def state(self, name: str) -> InstanceState:
        """Raises KeyError for a name that is not in the fleet."""
        return self._states[name]

    def states(self) -> Iterable[InstanceState]:
        return self._states.values()

    def has(self, instance: Instance) -> bool:
        """Whether it is in the fleet still; another one of its name does not count."""
        state = self._states.get(instance.name)
        return state is not None and state.instance.slot == instance.slot

    # ------------------------------------------------------------------ who belongs to it

    def add(self, name: str, url: str, models: frozenset[str] | None = None) -> Instance:
        """A new instance joins, in a slot that nobody had before. Raises ValueError for a name that is there."""
        if name in self._states:
            raise ValueError(f"{name} is in the fleet already")
        instance = Instance(name, url, self._next_slot, models)
        self._next_slot += 1
        self._states[name] = InstanceState(instance, self._health.eject_s, joining=True)
        self._changed()
        return instance

    def remove(self, name: str) -> Instance:
        """The instance leaves. Raises KeyError for a name that is not there."""
        instance = self._states.pop(name).instance
        self._changed()
        return instance

    def set_models(self, name: str, models: frozenset[str] | None) -> None:
        """Another list of models is configured; None: they are learned from now on, and until then what was known."""
        state = self._states[name]
        state.instance = replace(state.instance, models=models)
        if models is not None:
            state.models = models
        self._changed()

    def configure(self, health: HealthConstants) -> None:
        """Other constants from now on. Pauses under way stay as they are."""
        self._health = health

    # ------------------------------------------------------------------ who may serve

    def candidates(
        self,
        model: str | None,
        now_s: float,
        without: Collection[str] = (),
        among: Collection[str] | None = None,
    ) -> list[Instance]:
        """Who may take a request for `model` now, best health only; empty when nobody may. Changes nothing.

        `without`: names of instances that this request has tried. `among`: names of those that it is for; None: all.
        The list is not to be changed.
        """
        if not without and among is None:
            # What nobody lists has no entry of its own: there are no more of them than models that are listed.
            ready, known = self._ready, model if model in self._by_model else None
            if known in ready:
                return ready[known]
        serving = self._serving(model, among)
        up = _UP
        if not without and among is None and all(s.state is up or s.draining for s in serving):
            fit = [s.instance for s in serving if not s.draining]
            self._ready[model if model in self._by_model else None] = fit
            return fit
        fit = [s.instance for s in serving if (s.state is up or self._may_be_tried(s, now_s)) and not s.draining]
        if without:
            fit = [instance for instance in fit if instance.name not in without]
        if fit:
            return fit
        return [
            s.instance
            for s in serving
            if not s.draining and self._may_be_last_resort(s, now_s) and s.instance.name not in without
        ]

    def can_serve(self, now_s: float) -> bool:
        """Whether any request could be given to someone now. Changes nothing."""
        return any(
            not s.draining
            and (
                s.state is State.UP
                or (s.state is State.HALF_OPEN and s.failure is not ProbeFailure.UNTRUSTED)
                or (
                    s.failure not in (ProbeFailure.REFUSED, ProbeFailure.UNTRUSTED)
                    and (s.state is State.DOWN or (s.state is State.EJECTED and now_s >= s._ejected_until_s))
                )
            )
            for s in self._states.values()
        )

    def is_starting(self, among: Collection[str] | None = None) -> bool:
        """Whether none of these instances, of which there are some, has ever been up; `among` None: of all."""
        states = [s for s in self._states.values() if among is None or s.instance.name in among]
        return bool(states) and not any(s._was_up for s in states)

    def next_return_s(self) -> float | None:
        """When the first ejected instance may be tried again (monotonic seconds); None: none is, or all such drain."""
        ejected = (s for s in self._states.values() if s.state is State.EJECTED and not s.draining)
        return min((s._ejected_until_s for s in ejected), default=None)

    def knows_model(self, model: str) -> bool:
        """Whether some instance says that it serves `model`: a bound on what may become a metric label."""
        return model in self._by_models()

    def _serving(self, model: str | None, among: Collection[str] | None) -> Sequence[InstanceState]:
        """Instances that have the model or may have it; all for a model nobody lists: the server answers for itself.

        `among`: as if there were no others.
        """
        by_model = self._by_models()
        serving = by_model.get(model) or by_model[None]
        if among is None:
            return serving
        return [s for s in serving if s.instance.name in among] or [
            s for s in by_model[None] if s.instance.name in among
        ]

    def _by_models(self) -> dict[str | None, tuple[InstanceState, ...]]:
        """Each model that somebody lists, and who has it or may have it; None: everybody."""
        by_model = self._by_model
        if not by_model:
            everybody = by_model[None] = tuple(self._states.values())
            for name in {name for s in everybody for name in s.models or ()}:
                by_model[name] = tuple(s for s in everybody if s.models is None or name in s.models)
        return by_model

    def _changed(self) -> None:
        """Who serves what is asked anew."""
        self._by_model.clear()
        self._ready.clear()

    def _may_be_tried(self, state: InstanceState, now_s: float) -> bool:
        match state.state:
            case State.STARTING:
                return not state.joining
            case State.HALF_OPEN:
                return not state._trial
            case State.EJECTED:
                # While its probes fail too, a request would only pay for finding out again.
                return now_s >= state._ejected_until_s and state.failure is None
            case _:
                return False

    def _may_be_last_resort(self, state: InstanceState, now_s: float) -> bool:
        if state.state is State.DOWN:
            return state.failure is not ProbeFailure.REFUSED
        if state.state is State.STARTING:
            return True
        return state.state is State.EJECTED and now_s >= state._ejected_until_s

    # ------------------------------------------------------------------ events

    def taken(self, name: str) -> int:
        """The instance was given a request. Returns the number of the trial that it is; 0: none."""
        state = self._states[name]
        if state.state is _EJECTED:  # a candidate, so its pause is over
            self._half_open(state)
        if state.state is not _HALF_OPEN:
            return 0
        self._n_trials += 1
        state._trial = self._n_trials
        return state._trial

    def released(self, name: str, trial: int) -> None:
        """A request on the instance is over, whatever came of it. `trial` as `taken` returned it."""
        state = self._states.get(name)
        if state is not None and state._trial == trial:
            state._trial = 0

    def answered(self, name: str) -> None:
        """The instance gave a sound answer (not 5xx). Evidence of life, unless its own health check says otherwise."""
        state = self._states.get(name)
        if state is not None:
            self._answered(state)

    def answered_by(self, instance: Instance) -> None:
        """As `answered`, if the instance is in the fleet still."""
        state = self._states.get(instance.name)
        if state is not None and state.instance.slot == instance.slot:
            self._answered(state)

    def _answered(self, state: InstanceState) -> None:
        state._n_failed = 0
        state._trial = 0
        # Of a certificate the health check has the last word, too: the answer may come by a connection made before.
        if state.state is not _UP and state.failure not in (ProbeFailure.STATUS, ProbeFailure.UNTRUSTED):
            self._up(state)

    def connect_failed(self, name: str, now_s: float) -> None:
        """A connection could not be made: refused, unreachable, or silence until the connect limit."""
        state = self._states.get(name)
        if state is None:
            return
        if state.state is State.EJECTED and now_s < state._ejected_until_s:
            return  # one of many that failed together: they count once
        state.state = State.EJECTED
        self._ready.clear()
        state._trial = 0
        state._n_passed = 0
        state._ejected_until_s = now_s + state._pause_s
        state._pause_s = min(state._pause_s * 2, self._health.eject_max_s)

    def probe_passed(self, name: str) -> None:
        state = self._states[name]
        state.last_probe = state.reason = None
        state._n_failed = 0
        state._n_passed += 1
        if state.state is State.EJECTED:
            state.failure = None
            self._half_open(state)
        if state.state is not State.UP and state._n_passed >= (self._health.rise if state._was_up else 1):
            self._up(state)

    def probe_failed(self, name: str, failure: ProbeFailure, reason: str | None = None) -> bool:
        """Returns whether this is the first news of a cause that empties the instance's cache.

        `reason`: the failure in words, for people.
        """
        state = self._states[name]
        state._n_passed = 0
        state.last_probe, state.reason = failure, reason
        if failure is ProbeFailure.TIMEOUT and self._most_time_out():
            return False
        state._n_failed += 1
        if state.state in (State.DOWN, State.EJECTED):
            # A silent server that now refuses has died; one that now answers 503 is there again, and unwell.
            died = failure is ProbeFailure.REFUSED and state.failure is not ProbeFailure.REFUSED
            state.failure = failure
            return died
        if state._n_failed < self._fall(state, failure):
            return False
        state.state = State.DOWN
        self._ready.clear()
        state.failure = failure
        return failure is not ProbeFailure.TIMEOUT

    def drain(self, name: str) -> None:
        """No new requests for the instance; those under way finish."""
        self._states[name].draining = True
        self._ready.clear()

    def undrain(self, name: str) -> None:
        self._states[name].draining = False
        self._ready.clear()

    def learned_models(self, name: str, models: frozenset[str]) -> None:
        """What the instance lists. A configured list stays."""
        state = self._states[name]
        if state.instance.models is None and state.models != models:
            state.models = models
            self._changed()

    def _fall(self, state: InstanceState, failure: ProbeFailure) -> int:
        # An instance that was never up and refuses, or is not trusted, is not there yet: there is nothing to protect
        # from a blip.
        is_absent = failure in (ProbeFailure.REFUSED, ProbeFailure.UNTRUSTED)
        return 1 if not state._was_up and is_absent else self._health.fall

    def _most_time_out(self) -> bool:
        n_silent = sum(s.last_probe is ProbeFailure.TIMEOUT for s in self._states.values())
        return n_silent >= 2 and 2 * n_silent >= len(self._states)

    def _half_open(self, state: InstanceState) -> None:
        state.state = State.HALF_OPEN
        self._ready.clear()
        state._trial = 0

    def _up(self, state: InstanceState) -> None:
        state.state = State.UP
        self._ready.clear()
        state.joining = False
        state._was_up = True
        state.failure = None
        state._trial = 0
        state._pause_s = self._health.eject_s
