"""What a thread writes, so that the event loop never waits for a disk, or for whoever reads a pipe.

- Whoever puts something in neither blocks nor fails; what would pass the bound is refused.
- The thread writes many things at a time: one wake-up and one write for all that gathered meanwhile.
- Its end is bounded: something that never finishes writing holds neither `flush` nor `close` up for long.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """Things that wait for `write`, which its thread calls with at most `max_batch` of them, in their order.

    `write` raises nothing. `size_of`: what a thing counts, until it is written, of `max_size`. `gather_s`: how long
    things may gather. `patience_s`: how long `flush` and `close` may wait. `at_end`: the last that the thread does.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[list[T]], None],
        *,
        size_of: Callable[[T], int],
        max_size: int,
        gather_s: float,
        patience_s: float,
        max_batch: int = sys.maxsize,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._write = write
        self._size_of = size_of
        self._max_size = max_size
        self._gather_s = gather_s
        self._patience_s = patience_s
        self._max_batch = max_batch
        self._at_end = at_end
        # Things, and events to be set when everything before them is written.
        self._waiting: deque[T | threading.Event] = deque()
        # Each is counted up by one side only, so neither needs a lock.
        self._size_in = 0
        self._size_out = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, thing: T) -> bool:
        """Never blocks; by one thread at a time. False: it was refused, for want of room or because of `close`."""
        size = self._size_of(thing)
        if self._closing.is_set() or self._size_in - self._size_out + size > self._max_size:
            return False
        self._size_in += size
        self._waiting.append(thing)
        if not self._wake.is_set():
            self._wake.set()
        return True

    def flush(self) -> None:
        """Waits until what was put in so far is written, for a bounded time. Blocks: not for the event loop."""
        if not self._closing.is_set():
            written = threading.Event()
            self._waiting.append(written)
            self._wake.set()
            written.wait(self._patience_s)

    def close(self) -> None:
        """Has the rest written and ends the thread, for a bounded time. Blocks: not for the event loop."""
        self._closing.set()
        self._wake.set()
        self._thread.join(self._patience_s)

    def rest(self, time_s: float) -> bool:
        """A pause, for `write` to take. Once it closes there is none. Returns whether it does."""
        return self._closing.wait(time_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._closing.wait(self._gather_s)
            self._wake.clear()
            self._write_waiting()
        self._write_waiting()
        self._at_end()

    def _write_waiting(self) -> None:
        while self._waiting:
            batch: list[T] = []
            written: threading.Event | None = None
            while self._waiting and written is None and len(batch) < self._max_batch:
                thing = self._waiting.popleft()
                if isinstance(thing, threading.Event):
                    written = thing
                else:
                    batch.append(thing)
            if batch:
                self._write(batch)
                self._size_out += sum(map(self._size_of, batch))
            if written is not None:
                written.set()
