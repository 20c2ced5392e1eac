"""What the messages of one publisher prove about its cache. No I/O: `stream` brings the messages.

A publisher counts its messages from 0, in every process anew. What is known is *complete* when nothing can be in the
cache that no message told us of. It becomes so

- from message 0 on, live or out of the publisher's replay buffer;
- when the cache is emptied;
- by turnover (`turnover`), for those who came late or lost something.

It ceases to be so when messages were lost for good, could not be read, or tell of blocks behind unknown ones too often.
Until then it is partial: a lower bound, which nobody is shown.

- **Gap.** The message is dropped and a replay asked for, which brings it again. The replay starts with the last message
  that we had: only if that comes back, byte for byte, is the publisher the same and its buffer long enough. A hole in a
  replay may be a message that never was (a step of the engine without one), or one that ZeroMQ dropped: the next replay
  starts right before it and tells.
- **Repeat.** A number that was had before, with the same bytes: passed over.
- **Restart.** A number that was had before, with other bytes; or the prober heard of a new process: all is forgotten.
- **Reconnect.** The same question as after a gap. Without a replay endpoint, the next number answers it.
"""

import logging
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from prefixroute.core.exact import ExactIndex
from prefixroute.core.kv_blocks import Cleared
from prefixroute.core.kv_sources import Source, Trust
from prefixroute.kv_events.codec import Batch, UndecodableError, decode
from prefixroute.kv_events.turnover import Turnover

# More than can wait in the subscriber's queue while a replay is read, which brings the same ones.
RECENT_MESSAGES = 4_096
# Holes that proved to be no loss, after which others are taken for the same.
_PROVEN_HOLES = 3
# Replays that broke off, one after another, after which what is missing counts as lost.
_MAX_FAILURES = 2
# Clocks of one machine: a process reports its start before its first batch.
_SAME_START_S = 1.0

Tell = Callable[[int, str], None]


class Tracker:
    """Follows one publisher and keeps the index's `source` true to it.

    `replay_from`: number of the message from which a replay should be asked for now; None: none is wanted. Until it
    is answered, `live` must not be called.
    """

    def __init__(
        self, index: ExactIndex, source: Source, *, can_replay: bool, wall_clock: Callable[[], float], tell: Tell
    ) -> None:
        self.replay_from: int | None = None
        self._index = index
        self._source = source
        self._has_replay = self._can_replay = can_replay
        self._wall_clock = wall_clock
        self._tell = tell
        self._linked = False
        self._complete = False
        # Number of the last message; None: not known; -1: the next one is the first.
        self._last: int | None = None
        self._recent: dict[int, int] = {}
        self._began_s: float | None = None
        # Of the replay under way.
        self._n_replayed = 0
        self._rebuild = False
        self._n_failures = 0
        self._gave_up = False
        self._n_proven_holes = 0
        self._turnover = Turnover(source.counts)

    @property
    def is_complete(self) -> bool:
        """Whether all that the cache holds is known, as far as the last message."""
        return self._complete

    # ------------------------------------------------------------------ the connection

    def connected(self) -> None:
        """Messages can arrive from now on; some may have been missed."""
        self._linked = True
        if self._can_replay:
            self._ask()
        self._show()

    def disconnected(self) -> None:
        self._linked = False
        self.replay_from = None
        self._show()

    # ------------------------------------------------------------------ messages

    def live(self, number: int, payload: bytes) -> None:
        """A message as it was published."""
        last = self._last
        if last is None:
            self._begin(number)
        elif number > last + 1:
            self._source.counts.gaps += 1
            if self._can_replay:
                self._ask()
                self._show()
                return
            self._warn(self._source.counts.gaps, f"lost messages {last + 1} to {number - 1} of its KV events")
            self._lose()
        elif number <= last:
            if self._recent.get(number) == xxh3_64_intdigest(payload):
                return
            self._restarted()
            if number and self._can_replay:
                self._show()
                return
            self._begin(number)
        self._take(number, payload)
        self._show()

    def garbled(self) -> None:
        """A message without a number, or none at all."""
        self._spoil("sent a message that is no KV event")
        self._show()

    def _begin(self, number: int) -> None:
        self._complete = number == 0
        self._last = number - 1

    # ------------------------------------------------------------------ replay

    def replay_begins(self) -> int:
        """A replay is asked for: the number to start from."""
        self._n_replayed = 0
        return self.replay_from or 0

    def replayed(self, number: int, payload: bytes) -> bool:
        """A message out of the buffer. False: the rest is of no use, ask again."""
        last = self._last
        if not self._rebuild and last is not None and number < last:
            return True  # more than was asked for
        self._n_replayed += 1
        if self._n_replayed == 1:
            if self._rebuild:
                self._forget()
                self._begin(number)
            elif number == last:
                if self._recent.get(number) == xxh3_64_intdigest(payload):
                    return True
                self._restarted()
                return False
            else:
                self._tell(logging.WARNING, f"no longer has the KV events after message {last}")
                self._lose()
                self._last = number - 1
        elif last is not None and number > last + 1:
            # The second message follows the first at once: nothing can have been dropped between them.
            if self._n_replayed > 2 and self._n_proven_holes < _PROVEN_HOLES:
                self._ask()
                return False
            self._n_proven_holes += 1
        elif last is not None and number <= last:
            return True
        self._take(number, payload)
        return True

    def replay_ended(self) -> None:
        """The buffer's end was reached."""
        self.replay_from = None
        self._n_failures = 0
        self._gave_up = False
        if not self._n_replayed:
            if not self._rebuild:
                # Whoever published the last message that we had would have it.
                self._restarted()
                self._show()
                return
            self._forget()
            self._begin(0)
        self._show()

    def replay_failed(self) -> None:
        """It broke off, or never began. After a second time without it, what is missing counts as lost."""
        self._n_failures += 1
        if self._n_failures < _MAX_FAILURES:
            if self._n_replayed:
                self._ask()
        else:
            self._n_failures = 0
            self._gave_up = True
            self.replay_from = None
            if self._n_replayed or not self._rebuild:
                self._lose()
                self._last = None
        self._show()

    def replay_endless(self) -> None:
        """It came and came: what is missing counts as lost, and none is asked for again, of this process."""
        self._can_replay = self._gave_up = False
        self._n_failures = 0
        self.replay_from = None
        self._lose()
        self._last = None
        self._show()

    def retry(self) -> None:
        """All that the buffer holds is asked for, if it did not answer before."""
        if self._gave_up and self._linked and not self._complete and self.replay_from is None:
            self._ask(rebuild=True)
            self._show()

    def _ask(self, *, rebuild: bool = False) -> None:
        last = self._last
        self._rebuild = rebuild or last is None or last < 0
        self.replay_from = 0 if last is None or self._rebuild else last

    # ------------------------------------------------------------------ what others know

    def emptied(self, started_s: float | None) -> None:
        """The instance sleeps, or (`started_s`, by its wall clock) is a new process since then."""
        if started_s is None:
            self._index.clear(self._source)
        elif self._began_s is None or self._began_s < started_s - _SAME_START_S:
            self._can_replay = self._has_replay
            self._restarted()
        self._show()

    def faulted(self) -> None:
        """What is known may be wrong: it begins anew."""
        self._forget()
        self._show()

    # ------------------------------------------------------------------ knowledge

    def _take(self, number: int, payload: bytes) -> None:
        self._last = number
        self._recent[number] = xxh3_64_intdigest(payload)
        while len(self._recent) > RECENT_MESSAGES:
            del self._recent[next(iter(self._recent))]
        try:
            batch = decode(payload)
        except UndecodableError as error:
            self._spoil(f"sent KV events that cannot be read ({error})")
            return
        if number == 0:
            self._began_s = batch.time_s
        self._apply(batch)

    def _apply(self, batch: Batch) -> None:
        index, source = self._index, self._source
        counts = source.counts
        if batch.time_s is not None:
            counts.lag_s = max(0.0, self._wall_clock() - batch.time_s)
        counts.unknown += batch.n_unknown
        if batch.n_bad:
            counts.undecodable += batch.n_bad - 1
            self._spoil("sent a KV event that cannot be read")
        for event in batch.events:
            index.apply(source, event)
            if isinstance(event, Cleared):
                self._complete = True
                self._turnover.begin()
        if batch.n_bad_stored:
            counts.undecodable += batch.n_bad_stored
            self._warn(counts.undecodable, "stored blocks in a way that cannot be read")
            self._complete = False
            self._turnover.begin()
        else:
            self._complete = self._turnover.look(self._complete)

    def _spoil(self, message: str) -> None:
        self._source.counts.undecodable += 1
        self._warn(self._source.counts.undecodable, message)
        self._lose()

    def _warn(self, n_times: int, message: str) -> None:
        """The first time, then ever more rarely: every message may be one."""
        if n_times & (n_times - 1) == 0:
            self._tell(logging.WARNING, f"{message} ({n_times} so far)")

    def _lose(self) -> None:
        """Something happened that is not known, and never will be."""
        self._index.clear(self._source)
        self._complete = False
        self._turnover.begin()

    def _forget(self) -> None:
        self._lose()
        self._last = None
        self._recent.clear()
        self._began_s = None

    def _restarted(self) -> None:
        self._source.counts.restarts += 1
        self._tell(logging.INFO, "publishes its KV events anew: what was known of its cache is forgotten")
        self._forget()
        if self._can_replay and self._linked:
            self._ask(rebuild=True)

    def _show(self) -> None:
        if not self._linked:
            trust = Trust.CONNECTING
        elif self.replay_from is not None:
            trust = Trust.REPLAYING
        elif self._complete and (self._source.block_tokens or not self._source.skipped):
            trust = Trust.TRUSTED
        else:
            trust = Trust.PARTIAL
        self._index.set_trust(self._source, trust)
