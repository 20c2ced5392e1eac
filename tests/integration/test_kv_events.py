"""KV events over real ZeroMQ sockets, from a publisher like vLLM's that loses, repeats and reorders what it says."""

import asyncio
import logging
import threading
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack
import pytest
import zmq

from prefixroute.core.exact import ExactIndex
from prefixroute.core.fleet import Instance
from prefixroute.core.kv_sources import Trust
from prefixroute.instance_facts import EventSource
from prefixroute.kv_events import stream
from prefixroute.kv_events.service import KvEvents
from prefixroute.kv_events.sources import Address
from prefixroute.kv_events.stream import Patience
from prefixroute.testing import FakeUpstream
from prefixroute.testing.upstream import json_answer

SIZE = 2
NOW_S = 1_000.0
END = b"\xff" * 8
PATIENCE = Patience(replay_s=0.3, retry_s=0.1, retry_max_s=0.2)
INSTANCES = [Instance(f"gpu-{slot}", "http://127.0.0.1:1", slot) for slot in range(3)]

Until = Callable[[Callable[[], bool]], Awaitable[None]]
Message = tuple[int, bytes]


def bound_to(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()


def message(number: int, *events: Any) -> Message:
    return number, msgpack.packb([NOW_S, list(events), 0])


class Publisher:
    """vLLM's publisher: a PUB socket, and a ROUTER socket over the last messages, which a thread answers."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        where: str,
        buffer: Sequence[Message] = (),
        connects: bool = False,
        with_topic: bool = True,
    ) -> None:
        self._context = context
        self._connects = connects
        self._with_topic = with_topic
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.buffer = list(buffer)
        self.n = len(self.buffer)
        self.replays: list[int] = []
        """Numbers from which replays were asked for."""
        self.deaf = False
        """Takes replay requests and does not answer."""
        self.endless_pause_s: float | None = None
        """Between messages of a replay that never ends; None: it ends."""
        # A PUB socket that tells who subscribes.
        self._pub = context.socket(zmq.XPUB)
        self._n_subscribed = 0
        self._router = context.socket(zmq.ROUTER)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.LINGER, 0)
        if connects:
            self._pub.connect(where)
            self._router.bind("tcp://127.0.0.1:*")
            self.endpoint = where
        else:
            self._pub.bind(where)
            self.endpoint = bound_to(self._pub)
            self._router.bind(where if where.endswith("*") else f"{where}-replay")
        self.replay_endpoint = bound_to(self._router)
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._pub.close()
        self._router.close()

    @property
    def address(self) -> Address:
        return Address(self.endpoint, self.replay_endpoint, bind=self._connects)

    @property
    def is_subscribed(self) -> bool:
        while self._pub.poll(0):
            self._n_subscribed += 1 if self._pub.recv().startswith(b"\1") else -1
        return self._n_subscribed > 0

    def makes(self, *events: Any) -> Message:
        """The next message, which can be replayed from now on."""
        with self._lock:
            made = message(self.n, *events)
            self.buffer.append(made)
            self.n += 1
        return made

    def sends(self, *messages: Message) -> None:
        for number, payload in messages:
            self.sends_frames(b"kv-events", number.to_bytes(8), payload)

    def sends_frames(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def says(self, *events: Any) -> None:
        self.sends(self.makes(*events))

    def _answer(self) -> None:
        while not self._stop.is_set():
            if self._router.poll(5):
                peer, _, start = self._router.recv_multipart()
                self.replays.append(int.from_bytes(start))
                if self.deaf:
                    continue
                with self._lock:
                    buffered = [m for m in self.buffer if m[0] >= int.from_bytes(start)]
                n_invented = 0
                while self.endless_pause_s is not None and not self._stop.wait(self.endless_pause_s):
                    invented = message(n_invented, stored(n_invented))
                    self._router.send_multipart([peer, b"", invented[0].to_bytes(8), invented[1]])
                    n_invented += 1
                topic, no_topic = ([b"kv-events"], [b""]) if self._with_topic else ([], [])
                for number, payload in buffered:
                    self._router.send_multipart([peer, b"", *topic, number.to_bytes(8), payload])
                self._router.send_multipart([peer, b"", *no_topic, END, b""])


def stored(first: int, n_blocks: int = 1, parent: int | None = None) -> dict[str, Any]:
    names = list(range(first, first + n_blocks))
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": [token for name in names for token in (name,) * SIZE],
        "block_size": SIZE,
    }


def removed(*names: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names)}


class Following:
    """The service on an index, and what it knows of an instance."""

    def __init__(self, index: ExactIndex, service: KvEvents, until: Until) -> None:
        self.index = index
        self.service = service
        self._until = until

    def trust(self, slot: int = 0) -> Trust:
        return self.index.trust(slot)

    def held(self, slot: int = 0) -> set[int]:
        return {name for source in self.index.sources(slot) for name in source.keys}

    async def wait_connected(self, publisher: Publisher) -> None:
        """Until nothing that is published gets lost any more."""
        await self._until(lambda: publisher.is_subscribed and self.trust() is not Trust.CONNECTING)

    async def wait_trust(self, trust: Trust, slot: int = 0) -> None:
        await self._until(lambda: self.index.trust(slot) is trust)

    async def wait_held(self, *names: int, slot: int = 0) -> None:
        await self._until(lambda: self.held(slot) == {*names} and self.trust(slot) is not Trust.REPLAYING)


@pytest.fixture
def context() -> Any:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.fixture(params=["tcp", "ipc"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/kv"


@pytest.fixture
def tcp() -> str:
    return "tcp://127.0.0.1:*"


Follow = Callable[..., Any]


@pytest.fixture
def follow(until: Until) -> Follow:
    @asynccontextmanager
    async def following(*addresses: Address, patience: Patience = PATIENCE) -> AsyncIterator[Following]:
        index = ExactIndex(seed=1, max_bytes=1 << 24)
        service = KvEvents(
            index,
            INSTANCES,
            {INSTANCES[slot].name: [address] for slot, address in enumerate(addresses)},
            patience=patience,
            wall_clock=lambda: NOW_S + 0.5,
        )
        async with asyncio.timeout(20):
            task = asyncio.create_task(service.run())
            try:
                yield Following(index, service, until)
            finally:
                task.cancel()
                await asyncio.wait([task])
        assert task.cancelled()
        assert [index.trust(i.slot) for i in INSTANCES] == [Trust.OFF] * len(INSTANCES)
        assert index.n_bytes == 0

    return following


# Connection


async def test_who_listens_from_the_beginning_knows_all(
    context: zmq.Context[zmq.Socket[bytes]], where: str, follow: Follow
) -> None:
    with Publisher(context, where=where) as publisher:
        async with follow(publisher.address) as following:
            await following.wait_connected(publisher)
            publisher.says(stored(1, 3))
            publisher.says(stored(4, parent=3))
            publisher.says(removed(3, 4))
            await following.wait_held(1, 2)
            await following.wait_trust(Trust.TRUSTED)
            prompt = following.index.prompt(array("I", [1, 1, 2, 2, 3, 3, 4]).tobytes())
            assert following.index.match(prompt) == {0: 4}
            counts = following.index.counts(0)
            assert (counts.stored, counts.removed, counts.lag_s) == (2, 1, 0.5)


@pytest.mark.parametrize("with_topic", [True, False], ids=["topic", "no topic"])
async def test_who_comes_late_is_told_the_past(
    context: zmq.Context[zmq.Socket[bytes]], tcp: str, follow: Follow, with_topic: bool
) -> None:
    with Publisher(context, where=tcp, with_topic=with_topic) as publisher:
        for n in range(2_500):
            publisher.says(stored(n))
        async with follow(publisher.address) as following:
            await following.wait_trust(Trust.TRUSTED)
            await following.wait_connected(publisher)
            assert following.held() == set(range(2_500))
            publisher.says(removed(*range(2_499)))
            await following.wait_held(2_499)


async def test_without_replay_only_the_first_message_proves_anything(
    context: zmq.Context[zmq.Socket[bytes]], tcp: str, follow: Follow
) -> None:
    with Publisher(context, where=tcp) as publisher:
        async with follow(Address(publisher.endpoint)) as following:
            await following.wait_connected(publisher)
            assert following.trust() is Trust.PARTIAL
            publisher.says(stored(1))
            await following.wait_held(1)
            assert following.trust() is Trust.TRUSTED
            assert publisher.replays == []


async def test_a_publisher_that_connects_to_us(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, follow: Follow
) -> None:
    where = f"ipc://{tmp_path}/bound"
    with Publisher(context, where=where, connects=True) as publisher:
        async with follow(publisher.address) as following:
            await following.wait_connected(publisher)
            publisher.says(stored(1))
            publisher.says(stored(2))
            await following.wait_held(1, 2)


async def test_an_instance_that_joins_is_followed_and_one_that_leaves_is_not(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, follow: Follow, until: Until
) -> None:
    with (
        Publisher(context, where=f"ipc://{tmp_path}/first") as first,
        Publisher(context, where=f"ipc://{tmp_path}/second") as second,
    ):
        async with follow(first.address) as following:
            await following.wait_connected(first)
            first.says(stored(1))
            await following.wait_held(1)
            following.service.add(Instance("gpu-new", "http://127.0.0.1:1", 7), [second.address])
            await until(lambda: second.is_subscribed and following.trust(7) is not Trust.CONNECTING)
            second.says(stored(1))
            await following.wait_held(1, slot=7)
            prompt = following.index.prompt(array("I", [1, 1, 9]).tobytes())
            assert following.index.match(prompt) == {0: 2, 7: 2}

            following.service.remove("gpu-0")
            following.index.remove(0)
            assert following.index.match(prompt) == {7: 2}
            # What it says from now on goes nowhere, and its name may be another's.
            first.says(stored(2))
            following.service.add(Instance("gpu-0", "http://127.0.0.1:1", 8), [second.address])
            await following.wait_held(1, slot=8)
            assert following.held(0) == set()
            for name, slot in (("gpu-0", 8), ("gpu-new", 7)):
                following.service.remove(name)
                following.index.remove(slot)
            assert following.index.n_bytes == 0


async def test_an_instance_that_is_not_there_yet(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, follow: Follow, until: Until
) -> None:
    where = f"ipc://{tmp_path}/kv"
    async with follow(Address(where, f"{where}-replay")) as following:
        await until(lambda: following.trust() is Trust.CONNECTING)
        with Publisher(context, where=where, buffer=[message(0, stored(1))]):
            await following.wait_held(1)
            assert following.trust() is Trust.TRUSTED


async def test_a_lost_connection_ends_trust_and_its_return_brings_it_back(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, follow: Follow
) -> None:
    where = f"ipc://{tmp_path}/kv"
    async with follow(Address(where, f"{where}-replay")) as following:
        with Publisher(context, where=where, buffer=[message(0, stored(1))]) as publisher:
            await following.wait_held(1)
            old = publisher.buffer
        await following.wait_trust(Trust.CONNECTING)
        assert following.held() == {1}

        # The same process behind a network that was away.
        with Publisher(context, where=where, buffer=[*old, message(1, stored(2))]):
            await following.wait_held(1, 2)
            assert following.trust() is Trust.TRUSTED
            assert following.index.counts(0).restarts == 0
        await following.wait_trust(Trust.CONNECTING)

        # Another one, whose numbers have passed ours.
        with Publisher(context, where=where, buffer=[message(n, stored(10 + n)) for n in range(5)]):
            await following.wait_held(*range(10, 15))
            assert following.trust() is Trust.TRUSTED
            assert following.index.counts(0).restarts == 1


# What goes wrong on the way


async def test_lost_messages_are_replayed(context: zmq.Context[zmq.Socket[bytes]], where: str, follow: Follow) -> None:
    with Publisher(context, where=where) as publisher:
        async with follow(publisher.address) as following:
            await following.wait_connected(publisher)
            publisher.says(stored(1))
            await following.wait_held(1)
            publisher.makes(stored(2))
            publisher.makes(removed(1))
            publisher.says(stored(3))
            await following.wait_held(2, 3)
            assert following.trust() is Trust.TRUSTED
            assert publisher.replays[-1] == 0


async def test_repeats_and_disorder_change_nothing(
    context: zmq.Context[zmq.Socket[bytes]], tcp: str, follow: Follow
) -> None:
    with Publisher(context, where=tcp) as publisher:
        async with follow(publisher.address) as following:
            await following.wait_connected(publisher)
            publisher.says(stored(0))
            await following.wait_held(0)
            messages = [publisher.makes(stored(n)) for n in range(1, 9)] + [publisher.makes(removed(4))]
            for number in (1, 3, 2, 2, 4, 8, 7, 6, 5, 9, 1, 9):
                publisher.sends(messages[number - 1])
            publisher.says(stored(99))
            await following.wait_held(0, 1, 2, 3, 5, 6, 7, 8, 99)
            assert following.trust() is Trust.TRUSTED
            assert following.index.counts(0).restarts == 0
            assert not any(source.repeats for source in following.index.sources(0))


async def test_a_replay_that_does_not_come_costs_trust_until_it_does(
    context: zmq.Context[zmq.Socket[bytes]], tcp: str, follow: Follow
) -> None:
    with Publisher(context, where=tcp) as publisher:
        publisher.deaf = True
        publisher.makes(stored(1))
        async with follow(publisher.address) as following:
            await following.wait_trust(Trust.PARTIAL)
            publisher.deaf = False
            await following.wait_trust(Trust.TRUSTED)
            assert following.held() == {1}


@pytest.mark.parametrize("pause_s", [0.0, 0.05], ids=["flood", "trickle"])
async def test_a_replay_without_end_is_cut_off_and_live_events_count(
    context: zmq.Context[zmq.Socket[bytes]],
    tcp: str,
    follow: Follow,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pause_s: float,
) -> None:
    monkeypatch.setattr(stream, "MAX_REPLAY_MESSAGES", 500)
    with Publisher(context, where=tcp) as publisher:
        publisher.endless_pause_s = pause_s
        async with follow(publisher.address, patience=replace(PATIENCE, catch_up_s=1.0)) as following:
            await following.wait_trust(Trust.PARTIAL)
            await until(lambda: publisher.is_subscribed)
            publisher.n = 10_000
            publisher.says(stored(1))
            await following.wait_held(1)
            # A gap is a loss now, and no reason to ask again.
            publisher.makes(stored(2))
            publisher.says(stored(3))
            await following.wait_held(3)
            assert following.trust() is Trust.PARTIAL
            assert publisher.replays == [0]
    assert caplog.text.count("replays its KV events without end") == 1


async def test_a_restart_forgets_what_was(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, follow: Follow
) -> None:
    where = f"ipc://{tmp_path}/kv"
    async with follow(Address(where, f"{where}-replay")) as following:
        with Publisher(context, where=where, buffer=[message(n, stored(n)) for n in range(5)]):
            await following.wait_held(*range(5))
        with Publisher(context, where=where, buffer=[message(0, stored(7))]):
            await following.wait_held(7)
            assert following.trust() is Trust.TRUSTED


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"kv-events", b"1", b""],
        [b"kv-events", (1).to_bytes(8), b"\xc1 garbage"],
        [b"\x00" * 1_000] * 5,
        [b"kv-events", (1).to_bytes(8), b"\x91" * 100_000],
    ],
    ids=["empty", "short number", "no msgpack", "other frames", "deep"],
)
async def test_garbage_ends_trust_and_nothing_else(
    context: zmq.Context[zmq.Socket[bytes]],
    tcp: str,
    follow: Follow,
    frames: Sequence[bytes],
    caplog: pytest.LogCaptureFixture,
    until: Until,
) -> None:
    caplog.set_level(logging.INFO)
    with Publisher(context, where=tcp) as publisher, Publisher(context, where=tcp) as other:
        async with follow(publisher.address, other.address) as following:
            await following.wait_connected(publisher)
            await following.wait_connected(other)
            publisher.says(stored(1))
            other.says(stored(1))
            await following.wait_held(1, slot=0)
            await following.wait_held(1, slot=1)
            publisher.sends_frames(*frames)
            await following.wait_trust(Trust.PARTIAL)
            assert following.trust(1) is Trust.TRUSTED
            publisher.n = 2
            publisher.sends(publisher.makes({"type": "AllBlocksCleared"}, stored(5)))
            await following.wait_held(5)
            await following.wait_trust(Trust.TRUSTED)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("gpu-0" in line and ("cannot be read" in line or "no KV event" in line) for line in warnings)
    assert not [r for r in caplog.records if r.levelno > logging.WARNING]


async def test_a_port_that_is_taken_is_told_and_tried_again(
    context: zmq.Context[zmq.Socket[bytes]], follow: Follow, caplog: pytest.LogCaptureFixture, until: Until
) -> None:
    with context.socket(zmq.PULL) as occupant:
        occupant.bind("tcp://127.0.0.1:*")
        taken = bound_to(occupant)
        async with follow(Address(taken, bind=True)) as following:
            await until(lambda: "Address already in use" in caplog.text)
            assert following.trust() is Trust.CONNECTING


# Discovery, and what the prober hears


async def test_sources_that_an_instance_tells_are_followed_and_replaced(
    context: zmq.Context[zmq.Socket[bytes]], tcp: str, follow: Follow
) -> None:
    with Publisher(context, where=tcp) as first, Publisher(context, where=tcp) as second:
        async with follow() as following:
            assert following.trust() is Trust.OFF
            # As vLLM tells it: all addresses of its machine.
            told = [
                EventSource(p.endpoint.replace("127.0.0.1", "*"), p.replay_endpoint.replace("127.0.0.1", "*"))
                for p in (first, second)
            ]
            following.service.told_sources("gpu-0", told)
            first.makes(stored(1))
            second.makes(stored(2))
            await following.wait_held(1, 2)
            await following.wait_trust(Trust.TRUSTED)
            (rank, _) = following.index.sources(0)

            following.service.told_sources("gpu-0", list(told))
            following.service.told_sources("gpu-0", told[1:])
            await following.wait_held(2)
            assert rank not in list(following.index.sources(0))


async def test_what_the_prober_hears_reaches_the_stream(
    context: zmq.Context[zmq.Socket[bytes]], tcp: str, follow: Follow
) -> None:
    with Publisher(context, where=tcp) as publisher:
        async with follow(publisher.address) as following:
            await following.wait_connected(publisher)
            publisher.says(stored(1))
            await following.wait_held(1)
            following.service.emptied("gpu-0", None)
            assert following.held() == set()
            assert following.trust() is Trust.TRUSTED

            following.service.emptied("gpu-0", NOW_S + 60)
            assert following.trust() is Trust.REPLAYING
            await following.wait_held(1)
            following.service.emptied("gpu-1", None)


# The whole router


async def test_a_router_asks_its_instances_for_their_events(
    context: zmq.Context[zmq.Socket[bytes]], tcp: str, serve: Any, until: Until
) -> None:
    with Publisher(context, where=tcp) as publisher:
        publisher.makes(stored(1))
        sources = {"0": {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint, "topic": ""}}
        async with (
            FakeUpstream(json_answer(sources)) as upstream,
            serve(upstream, instance={"kv_events": "auto"}) as app,
        ):
            assert app.exact is not None
            await until(lambda: app.exact.trust(0) is Trust.TRUSTED)
            body = app.metrics.exposition()[0].decode()
    assert 'prefixroute_kv_events_total{event="stored",upstream="gpu-0"} 1.0' in body
    assert 'prefixroute_kv_events_state{state="trusted",upstream="gpu-0"} 1.0' in body
    assert 'prefixroute_kv_events_state{state="partial",upstream="gpu-0"} 0.0' in body
    assert 'prefixroute_exact_index_blocks{upstream="gpu-0"} 1.0' in body
    assert 'prefixroute_kv_events_gaps_total{upstream="gpu-0"} 0.0' in body
