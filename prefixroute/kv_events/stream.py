"""Messages of one publisher over ZeroMQ: SUB for what happens, DEALER for what was missed.

While a replay is read, new messages wait in the SUB socket's queue. A publisher sends nothing while its engine is
idle, so that silence says nothing: the connection itself is watched, with ZeroMQ's heartbeats.

Sockets are read without `zmq.asyncio`, whose futures cost more than the messages: an engine sends one each step, and a
fleet of them thousands a second. `_Bell` rings when one of them may have something, and each is read until it is empty.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from prefixroute.core.kv_sources import Source, Trust
from prefixroute.kv_events.sources import Address
from prefixroute.kv_events.tracker import Tell, Tracker

# Messages that may wait here; beyond that the publisher drops them, and the gap is noticed.
QUEUE_MESSAGES = 1_000
# Of one catching up, and what may wait of it here: more than the largest replay buffer that docs/kv-events.md advises
# (100,000). A publisher that goes on and on would take the memory, and never be followed live.
MAX_REPLAY_MESSAGES = 250_000
# A step of a large engine that admits many long prompts takes a few megabytes.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# After so many messages in a row the event loop gets its turn: decoding one takes some 50 µs.
_TURN_MESSAGES = 16
_NUMBER_BYTES = 8
_END = b"\xff" * _NUMBER_BYTES

_Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, seconds."""

    # vLLM looks for replay requests between the steps of its engine.
    replay_s: float = 5.0
    # For all that was missed: 100,000 messages take some 5 s while nothing else goes on.
    catch_up_s: float = 60.0
    # Before a replay that did not answer is asked for again; doubles up to the maximum.
    retry_s: float = 10.0
    retry_max_s: float = 600.0


class Stream:
    """Moves messages from a publisher to its tracker until cancelled. Raises zmq.ZMQError for an unusable address."""

    def __init__(
        self,
        tracker: Tracker,
        source: Source,
        address: Address,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        tell: Tell,
        patience: Patience | None = None,
    ) -> None:
        self._tracker = tracker
        self._source = source
        self._address = address
        self._context = context
        self._tell = tell
        self._patience = patience or Patience()
        self._n_peers = 0
        self._told = Trust.CONNECTING
        self._bell = _Bell()
        # Of the catching up under way, which may take several replays. `_until_s` None: there is none.
        self._n_replayed = 0
        self._until_s: float | None = None

    def emptied(self, started_s: float | None) -> None:
        """As `Tracker.emptied`; a replay that follows from it begins at once."""
        self._tracker.emptied(started_s)
        self._bell.ring()

    def faulted(self) -> None:
        """`run` ended by a fault: what is known may be wrong."""
        self._tracker.faulted()
        self._n_peers = 0

    async def run(self) -> None:
        with self._context.socket(zmq.SUB) as sub:
            _set(sub, {zmq.RCVHWM: QUEUE_MESSAGES, zmq.HEARTBEAT_IVL: 5_000, zmq.HEARTBEAT_TIMEOUT: 15_000})
            sub.subscribe(self._address.topic)
            monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            try:
                if self._address.bind:
                    sub.bind(self._address.endpoint)
                else:
                    sub.connect(self._address.endpoint)
                with self._bell.on(sub), self._bell.on(monitor):
                    await self._follow(sub, monitor)
            finally:
                sub.disable_monitor()
                monitor.close(0)
                self._tracker.disconnected()

    async def _follow(self, sub: _Socket, monitor: _Socket) -> None:
        retry_s = self._patience.retry_s
        self._until_s = None
        while True:
            self._bell.mute()
            # The connection first: what is in the queue may need a replay before it.
            while _is_readable(monitor):
                self._linked(sub, recv_monitor_message(monitor)["event"])
            if self._tracker.replay_from is not None:
                await self._replay()
            elif self._read(sub):
                await asyncio.sleep(0)
            elif not await self._bell.rung(retry_s):
                self._tracker.retry()
                retry_s = min(2 * retry_s, self._patience.retry_max_s)
            if self._tracker.replay_from is None:
                self._until_s = None
            self._report()

    def _linked(self, sub: _Socket, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._n_peers += 1
            self._tracker.connected()
        elif self._n_peers:
            self._n_peers -= 1
            if not self._n_peers:
                # What it said before it left.
                for _ in range(QUEUE_MESSAGES):
                    if not self._read(sub):
                        break
                self._tracker.disconnected()

    def _read(self, sub: _Socket) -> bool:
        """Takes what is in the queue, for one turn of the event loop. False: there is no more."""
        for _ in range(_TURN_MESSAGES):
            if not _is_readable(sub):
                return False
            message = _message(sub.recv_multipart())
            if message is None:
                self._tracker.garbled()
            else:
                self._tracker.live(*message)
            if self._tracker.replay_from is not None:
                break
        return True

    # ------------------------------------------------------------------ replay

    async def _replay(self) -> None:
        """Asks once for what the tracker wants."""
        n_before = self._begin_replay()
        # A socket of its own: nothing of an earlier answer comes with this one. The publisher drops what is not taken.
        with self._context.socket(zmq.DEALER) as dealer, self._bell.on(dealer):
            _set(dealer, {zmq.RCVHWM: MAX_REPLAY_MESSAGES})
            dealer.connect(self._address.replay_endpoint or "")
            start = self._tracker.replay_begins()
            dealer.send_multipart([b"", start.to_bytes(_NUMBER_BYTES)])
            while await self._has_more(dealer):
                frames = dealer.recv_multipart()
                if len(frames) >= 3 and frames[-2] == _END and not frames[-1]:
                    self._tracker.replay_ended()
                    return
                message = _message(frames)
                if message is None:
                    break
                self._n_replayed += 1
                if self._is_endless():
                    return
                if not self._tracker.replayed(*message):
                    return
                if self._n_replayed % _TURN_MESSAGES == 0:
                    await asyncio.sleep(0)
        n_messages = self._n_replayed - n_before
        self._tell(logging.WARNING, f"gives no whole replay of its KV events ({n_messages} messages came)")
        self._tracker.replay_failed()

    def _begin_replay(self) -> int:
        """Messages that came so far of this catching up."""
        if self._until_s is None:
            self._until_s = asyncio.get_running_loop().time() + self._patience.catch_up_s
            self._n_replayed = 0
        return self._n_replayed

    def _is_endless(self) -> bool:
        """Whether enough is enough: then it is told, and the tracker goes on with what is published from now on."""
        until_s = self._until_s or 0.0
        if self._n_replayed <= MAX_REPLAY_MESSAGES and asyncio.get_running_loop().time() < until_s:
            return False
        self._tell(
            logging.WARNING,
            f"replays its KV events without end ({self._n_replayed} messages so far): it is asked for none again, "
            "and what it says from now on counts",
        )
        self._tracker.replay_endless()
        return True

    async def _has_more(self, dealer: _Socket) -> bool:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._patience.replay_s
        while True:
            self._bell.mute()
            if _is_readable(dealer):
                return True
            # Others ring too.
            left_s = until_s - loop.time()
            if left_s <= 0 or not await self._bell.rung(left_s):
                return _is_readable(dealer)

    def _report(self) -> None:
        trust = self._source.trust
        if trust is not self._told and trust is not Trust.REPLAYING:
            self._told = trust
            level = logging.INFO if trust is Trust.TRUSTED else logging.WARNING
            self._tell(level, f"KV events: {_WORDS[trust]}")


_WORDS = {
    Trust.CONNECTING: "not connected; the estimated map serves",
    Trust.OVER_LIMIT: "more blocks than limits.exact_index_bytes allows; the estimated map serves",
    Trust.PARTIAL: "what it holds is known in part only; the estimated map serves",
    Trust.TRUSTED: "what it holds is known",
}


def _message(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Number and payload; None: it is no message. Replies have an empty frame before, and the topic or not."""
    if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
        return None
    return int.from_bytes(frames[-2]), frames[-1]


def _set(socket: _Socket, options: dict[int, int]) -> None:
    for option, value in {**options, zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES, zmq.IPV6: 1, zmq.LINGER: 0}.items():
        socket.setsockopt(option, value)


def _is_readable(socket: _Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class _Bell:
    """Rings when a ZeroMQ socket may have become readable.

    ZeroMQ signals a change, not a state: whoever waits must have muted the bell first and then found nothing to read.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()

    def mute(self) -> None:
        self._event.clear()

    async def rung(self, timeout_s: float) -> bool:
        """Waits. False: it did not ring in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def on(self, socket: _Socket) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # A socket that is closed has no number any more.
        number = socket.fileno()
        loop.add_reader(number, self.ring)
        try:
            yield
        finally:
            loop.remove_reader(number)
