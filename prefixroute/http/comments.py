"""Comment lines in event streams that are silent, for hops between us and the client that cut silent connections.

Off unless configured: with it, bytes are no longer only the instance's. A comment stands between complete events only
(never inside one that is under way), only in `text/event-stream`, and only where nobody counts the body's bytes.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefixroute.http.headers import RawHeaders, first

COMMENT = b": keep-alive\n\n"
# How an event ends (WHATWG HTML, 9.2.5), in the order of lengths.
_EVENT_ENDS = (b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r\n")
_LONGEST_END = 4


def may_have_comments(status: int, headers: RawHeaders) -> bool:
    """Whether an answer is an event stream that a comment does not change the meaning of."""
    kind = (first(headers, b"content-type") or b"").split(b";")[0].strip().lower()
    return (
        status == 200
        and kind == b"text/event-stream"
        and first(headers, b"content-length") is None
        and first(headers, b"content-encoding") is None
    )


class Comments:
    """Of one answer: tell it each piece with `saw` before it is sent."""

    def __init__(self, interval_s: float, put: Callable[[bytes], None], *, is_held: Callable[[], bool]) -> None:
        """`is_held`: whether the client is slower than the stream; then the silence is its own."""
        self._interval_s = interval_s
        self._put = put
        self._is_held = is_held
        self._loop = asyncio.get_running_loop()
        self._tail = b""
        self._is_between = True
        self._since_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def saw(self, piece: bytes) -> None:
        """More of the stream."""
        tail = piece[-_LONGEST_END:]
        if len(tail) < _LONGEST_END:
            tail = (self._tail + tail)[-_LONGEST_END:]
        self._tail = tail
        self._is_between = tail.endswith(_EVENT_ENDS)
        self._since_s = self._loop.time()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Comments are sent while this is open."""
        self._timer = self._loop.call_later(self._interval_s, self._check)
        try:
            yield
        finally:
            self._timer.cancel()

    def _check(self) -> None:
        now_s = self._loop.time()
        if self._is_between and now_s - self._since_s >= self._interval_s and not self._is_held():
            try:
                self._put(COMMENT)
            except ConnectionError:
                return  # the client has gone: whoever sends the answer is told so, too
            self._since_s = now_s
        left_s = self._since_s + self._interval_s - now_s
        # An event that is under way for long is looked at again: its end may come and be followed by silence.
        self._timer = self._loop.call_later(left_s if left_s > 0 else self._interval_s, self._check)
