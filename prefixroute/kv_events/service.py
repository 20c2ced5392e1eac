"""One stream for each publisher of KV events in the fleet: as configured, or as instances tell while they run."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread

import zmq

from prefixroute.core.exact import ExactIndex
from prefixroute.core.fleet import Instance
from prefixroute.core.kv_sources import Source
from prefixroute.instance_facts import EventSource
from prefixroute.kv_events.sources import Address, discovered
from prefixroute.kv_events.stream import Patience, Stream
from prefixroute.kv_events.tracker import Tracker

# After an address that cannot be used (a port that is taken, say), or a fault.
_AGAIN_S = 5.0


@dataclass(slots=True, eq=False)
class _Running:
    """A publisher that is followed."""

    source: Source
    stream: Stream
    task: asyncio.Task[None] | None = None


class KvEvents:
    """Keeps `index` true to what the instances say. `run` does the work; the rest may be called at any time.

    `addresses`: publishers by instance name, as configured. Others become known by `told_sources`.
    """

    def __init__(
        self,
        index: ExactIndex,
        instances: Iterable[Instance],
        addresses: Mapping[str, Sequence[Address]],
        *,
        patience: Patience | None = None,
        wall_clock: Callable[[], float] = time.time,
        logger: logging.Logger | None = None,
    ) -> None:
        self._index = index
        self._instances = {instance.name: instance for instance in instances}
        self._wanted = {name: tuple(listed) for name, listed in addresses.items()}
        self._followed: dict[str, tuple[Address, ...]] = {}
        self._running: dict[str, list[_Running]] = {}
        self._patience = patience
        self._wall_clock = wall_clock
        self._logger = logger or logging.getLogger(__name__)
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------ who there is

    def add(self, instance: Instance, addresses: Sequence[Address]) -> None:
        """An instance has joined the fleet, or publishes elsewhere; `addresses` as configured, none are found out."""
        self._instances[instance.name] = instance
        self._wanted[instance.name] = tuple(addresses)
        self._changed.set()

    def remove(self, name: str) -> None:
        """The instance leaves the fleet: nothing that it says reaches the index any more."""
        self._instances.pop(name, None)
        self._wanted.pop(name, None)
        self._followed.pop(name, None)
        for running in self._running.get(name, ()):
            if running.task is not None:
                running.task.cancel()
        self._close(name)

    # ------------------------------------------------------------------ what the prober hears

    def told_sources(self, name: str, sources: Sequence[EventSource]) -> None:
        """The instance told who publishes its events. Others than before are followed from now on instead."""
        url = self._instances[name].url
        self._wanted[name] = tuple(discovered(source, url) for source in sources)
        self._changed.set()

    def emptied(self, name: str, started_s: float | None) -> None:
        """The instance sleeps, or is a new process since `started_s` (by its own wall clock)."""
        for running in self._running.get(name, ()):
            running.stream.emptied(started_s)

    # ------------------------------------------------------------------ work

    async def run(self) -> None:
        """Follows all publishers until cancelled."""
        context = zmq.Context()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._changed.clear()
                    for name, addresses in list(self._wanted.items()):
                        if addresses != self._followed.get(name, ()) and self._wanted.get(name) == addresses:
                            await self._follow(name, addresses, context, tasks)
                    await self._changed.wait()
        finally:
            for name in list(self._running):
                self._close(name)
            # It waits for libzmq's own threads, and has been seen to wait for long: nothing of ours depends on it.
            Thread(target=context.destroy, args=(0,), daemon=True).start()

    async def _follow(
        self,
        name: str,
        addresses: tuple[Address, ...],
        context: zmq.Context[zmq.Socket[bytes]],
        tasks: asyncio.TaskGroup,
    ) -> None:
        old = [running.task for running in self._running.get(name, ()) if running.task is not None]
        for task in old:
            task.cancel()
        if old:
            await asyncio.wait(old)
        if self._wanted.get(name) != addresses:
            return  # changed meanwhile: the next turn of `run` sees to it
        self._close(name)
        self._followed[name] = addresses
        self._running[name] = []
        slot = self._instances[name].slot
        for address in addresses:
            running = self._make(name, slot, address, context)
            self._running[name].append(running)
            running.task = tasks.create_task(self._keep(name, running), name=f"KV events {name}")

    def _make(self, name: str, slot: int, address: Address, context: zmq.Context[zmq.Socket[bytes]]) -> _Running:
        def tell(level: int, message: str) -> None:
            self._logger.log(level, "%s %s", name, message, extra={"fields": {"upstream": name}})

        source = self._index.open(slot)
        tracker = Tracker(
            self._index,
            source,
            can_replay=address.replay_endpoint is not None,
            wall_clock=self._wall_clock,
            tell=tell,
        )
        return _Running(source, Stream(tracker, source, address, context, tell=tell, patience=self._patience))

    def _close(self, name: str) -> None:
        for running in self._running.pop(name, ()):
            self._index.close(running.source)

    async def _keep(self, name: str, running: _Running) -> None:
        told = ""
        while True:
            try:
                await running.stream.run()
            except zmq.ZMQError as error:
                if str(error) != told:
                    told = str(error)
                    self._logger.warning(
                        "%s KV events cannot be had: %s", name, error, extra={"fields": {"upstream": name}}
                    )
            except Exception:  # one odd message must not end the events of the whole fleet
                self._logger.exception("%s: fault in its KV events", name)
                running.stream.faulted()
            await asyncio.sleep(_AGAIN_S)
