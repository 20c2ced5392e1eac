"""What a thread writes, so that the event loop never waits for a disk, or for whoever reads a pipe.

- Whoever puts something in neither blocks nor fails; what would pass the bound is refused.
- The thread writes many things at a time: one wake-up and one write for all that gathered meanwhile.
- Its end is bounded: something that never finishes writing holds neither `flush` nor `close` up for long.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

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
        self._waiting: deque[Any] = deque()
        # How many of those events there may be, so that nobody has to look for them among the things.
        self._marks: deque[threading.Event] = deque()
        # Counted up by those who put, and by the thread. Neither takes a lock, which would cost several times the rest:
        # between reading and writing one nothing is called, and there the interpreter switches to no other thread.
        self._size_in = 0
        self._size_out = 0
        self._wake = threading.Event()
        # Whether it is set and whether it closes, for `put`, which has no time to ask: a flag is read ten times faster.
        self._is_awake = False
        self._is_closing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, thing: T) -> bool:
        """Never blocks. False: it was refused, for want of room or because of `close`."""
        size = self._size_of(thing)
        if self._size_in - self._size_out + size > self._max_size or self._is_closing:
            return False
        self._size_in += size
        self._waiting.append(thing)
        if not self._is_awake:
            self._is_awake = True
            self._wake.set()
        return True

    def flush(self) -> None:
        """Waits until what was put in so far is written, for a bounded time. Blocks: not for the event loop."""
        if not self._is_closing:
            written = threading.Event()
            self._marks.append(written)
            self._waiting.append(written)
            self._wake.set()
            written.wait(self._patience_s)

    def close(self) -> None:
        """Has the rest written and ends the thread, for a bounded time. Blocks: not for the event loop."""
        self._is_closing = True
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
            # After it: who puts something in between is not forgotten, because what waits is looked at next.
            self._is_awake = False
            self._write_waiting()
        self._write_waiting()
        self._at_end()

    def _write_waiting(self) -> None:
        waiting = self._waiting
        while n_waiting := min(len(waiting), self._max_batch):
            # Marks come before what they mark: without any, none is among those counted.
            if not self._marks:
                self._write_batch([waiting.popleft() for _ in range(n_waiting)])
            elif isinstance(waiting[0], threading.Event):
                self._marks.popleft()
                waiting.popleft().set()
            else:
                n_before_mark = next(
                    (n for n in range(n_waiting) if isinstance(waiting[n], threading.Event)), n_waiting
                )
                self._write_batch([waiting.popleft() for _ in range(n_before_mark)])

    def _write_batch(self, batch: list[T]) -> None:
        self._write(batch)
        self._size_out += sum(map(self._size_of, batch))
