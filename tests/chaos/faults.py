"""The faults, and one run of each: calm, the fault, and what comes after it, under load all the time."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.instance import Mode
from tests.chaos.judge import Allowed, Verdict, judge
from tests.chaos.load import Load
from tests.chaos.stand import NAMES, PATIENCE_S, Stand

VICTIM = "gpu-b"
_SETTINGS: Mapping[str, Any] = {
    # In turns, so that every fault is met, and who is back is seen to be. The rules are the same for all strategies.
    "routing": {"strategy": "round_robin"},
    "upstream": {"connect_timeout_s": 0.5, "first_byte_timeout_s": 4.0, "idle_timeout_s": 4.0},
    "limits": {"wait_for_instance_s": 20.0},
}
# A request that was sent may be lost with its connection; one whose answer had begun, too.
_DIED = frozenset({"unanswered", "broken"})


@dataclass(frozen=True, slots=True)
class Fault:
    """`inject` and `lift` act on the victims. `empties`: the victims' caches are gone with it."""

    name: str
    inject: Callable[[Stand, Sequence[str]], Awaitable[None]]
    lift: Callable[[Stand, Sequence[str]], Awaitable[None]]
    losses: frozenset[str] = frozenset()
    repeats: frozenset[str] = frozenset()
    victims: tuple[str, ...] = (VICTIM,)
    empties: bool = False
    goes_out: bool = False
    """Whether probes take the victims out, so that nobody new may suffer until they are back."""
    longest_s: float = float("inf")
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    fault: str
    verdict: Verdict
    recovered: bool
    calm_p95_ms: float
    faults: list[str]
    """What else went wrong."""

    @property
    def is_good(self) -> bool:
        return not self.faults and not self.verdict.forbidden and self.recovered


def _mode(mode: Mode) -> Callable[[Stand, Sequence[str]], Awaitable[None]]:
    async def enter(stand: Stand, victims: Sequence[str]) -> None:
        for name in victims:
            await stand[name].enter(mode)

    return enter


async def _kill(stand: Stand, victims: Sequence[str]) -> None:
    await asyncio.gather(*(stand[name].kill() for name in victims))


async def _start(stand: Stand, victims: Sequence[str]) -> None:
    await asyncio.gather(*(stand[name].start() for name in victims))


async def _restart(stand: Stand, victims: Sequence[str]) -> None:
    await _kill(stand, victims)
    await _start(stand, victims)


async def _nothing(stand: Stand, victims: Sequence[str]) -> None:
    pass


def _signal(number: int) -> Callable[[Stand, Sequence[str]], Awaitable[None]]:
    async def send(stand: Stand, victims: Sequence[str]) -> None:
        for name in victims:
            stand[name].signal(number)

    return send


def _of_mode(mode: Mode, **more: Any) -> Fault:
    return Fault(mode.value, _mode(mode), _mode(Mode.NORMAL), **more)


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("killed", _kill, _start, _DIED, empties=True, goes_out=True),
        Fault("hangs", _signal(signal.SIGSTOP), _signal(signal.SIGCONT), frozenset({"timeout"}), goes_out=True),
        Fault("restarts", _restart, _nothing, _DIED),
        _of_mode(Mode.GARBAGE, losses=frozenset({"broken"})),
        _of_mode(Mode.RESET_HEAD, losses=frozenset({"broken"})),
        _of_mode(Mode.RESET_BODY, losses=frozenset({"broken"})),
        _of_mode(Mode.RESET_CHUNKS, losses=frozenset({"broken"})),
        _of_mode(Mode.CLOSE_IDLE),
        _of_mode(Mode.UNANSWERED, losses=frozenset({"unanswered"})),
        Fault(
            "unanswered_repeated",
            _mode(Mode.UNANSWERED),
            _mode(Mode.NORMAL),
            losses=frozenset({"unanswered"}),
            repeats=frozenset({"unanswered"}),
            settings={"retry": {"unanswered": "inference"}},
        ),
        _of_mode(Mode.BUSY, losses=frozenset({"answered"}), repeats=frozenset({"busy"})),
        _of_mode(Mode.REFUSE, losses=_DIED, empties=True),
        _of_mode(Mode.BLACK_HOLE, losses=_DIED),
        # For so long the waiting room (`limits.max_waiting`) holds 200 requests a second: all of them are answered.
        Fault("fleet_down", _kill, _start, _DIED, victims=NAMES, empties=True, longest_s=4.0),
    )
}  # fmt: skip


async def run(fault: Fault, folder: Path, *, per_second: float, fault_s: float, calm_s: float) -> Outcome:
    """One fault, from `calm_s` of calm to as much after it."""
    faults: list[str] = []
    victims = fault.victims
    async with Stand(folder, {**_SETTINGS, **fault.settings}) as stand:
        async with Load(stand.url, per_second, fault.name.replace("_", "-")) as load:
            await asyncio.sleep(calm_s)
            n_calm = len(load.asked)
            from_s = time.monotonic()
            await fault.inject(stand, victims)
            if fault.goes_out:
                for name in victims:
                    await stand.wait_out(name)
            # From now on nobody new may suffer.
            out_s = time.monotonic() if fault.goes_out else float("inf")
            if fault.empties:
                await _check_maps(stand, victims, faults)
            left_s = min(fault_s, fault.longest_s) - (time.monotonic() - from_s)
            await asyncio.sleep(max(0.0, left_s))
            lifted_s = time.monotonic()
            await fault.lift(stand, victims)
            until_s = time.monotonic()
            await stand.wait_up(NAMES)
            # By itself: it is given requests again.
            recovered = await _is_used(stand, victims)
            await asyncio.sleep(calm_s)
        metrics = await stand.metrics()
        code = await stand.stop_router()
        if code:
            faults.append(f"the router ended with {code}")
        faults += [f"the router logged: {error}" for error in stand.errors()]
        for series, value in metrics.items():
            if value and series[0] in ("in_flight", "pending_prefill_tokens", "waiting", "held_requests"):
                faults.append(f"{series} is {value:g} in the end")
        deliveries, records = stand.deliveries(), stand.records()
    allowed = Allowed(frozenset(victims), from_s, until_s, fault.losses, fault.repeats)
    verdict = judge(load.asked, deliveries, records, allowed)
    calm = judge(load.asked[:n_calm], deliveries, records, allowed)
    n_counted = sum(n for name, n in metrics.items() if name[0] == "requests_total")
    if n_counted != len(load.asked):
        faults.append(f"{len(load.asked)} requests, but {n_counted:g} are counted")
    late = [one for one in load.asked if out_s < one.began_s < lifted_s and not one.is_answered]
    faults += [f"{one.marker}: lost after the victim had been taken out" for one in late]
    return Outcome(fault.name, verdict, recovered, calm.p95_ms(), faults)


async def _check_maps(stand: Stand, victims: Sequence[str], faults: list[str]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                metrics = await stand.metrics()
                if not any(metrics[("index_blocks", name)] for name in victims):
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        faults.append("the victim's map is not gone")


async def _is_used(stand: Stand, victims: Sequence[str]) -> bool:
    def counts() -> list[int]:
        seen = [one.instance for of in stand.deliveries().values() for one in of]
        return [seen.count(name) for name in victims]

    before = counts()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while any(now <= then for now, then in zip(counts(), before, strict=True)):
                await asyncio.sleep(0.1)
    except TimeoutError:
        return False
    return True
