"""What messages prove: gaps, repeats, restarts, replays and turnover, without a socket."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import pytest

from prefixroute.core.exact import ExactIndex
from prefixroute.core.kv_sources import Trust
from prefixroute.kv_events.tracker import Tracker
from prefixroute.kv_events.turnover import WINDOW_BLOCKS

SIZE = 2
NOW_S = 1_000.0


def stored(first: int, n_blocks: int = 1, parent: int | None = None) -> dict[str, Any]:
    """Blocks `first` and on; block n has the tokens n, n."""
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


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """Counts its messages and keeps the last `buffer`, as vLLM does."""

    def __init__(self, buffer: int = 1_000) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.n = 0
        self._buffer = buffer

    def says(self, *events: Any, time_s: float = NOW_S) -> tuple[int, bytes]:
        return self.says_bytes(msgpack.packb([time_s, list(events), 0]))

    def says_bytes(self, payload: bytes) -> tuple[int, bytes]:
        message = self.n, payload
        self.n += 1
        self.sent = [*self.sent, message][-self._buffer :]
        return message


class Listener:
    """A tracker, and what became of it."""

    def __init__(self, publisher: Publisher | None = None) -> None:
        self.publisher = publisher
        """Who answers replays; None: nobody."""
        self.index = ExactIndex(seed=1, max_bytes=1 << 20)
        self.source = self.index.open(0)
        self.told: list[tuple[int, str]] = []
        self.asked: list[int] = []
        self.tracker = Tracker(
            self.index,
            self.source,
            can_replay=publisher is not None,
            wall_clock=lambda: NOW_S + 0.25,
            tell=lambda level, message: self.told.append((level, message)),
        )

    def hears(self, *messages: tuple[int, bytes]) -> None:
        for message in messages:
            self.tracker.live(*message)
            self.replay()

    def replay(self, *, drops: Sequence[int] = ()) -> None:
        """Answers until no replay is wanted. `drops`: positions in the first answer that do not arrive."""
        while self.publisher is not None and self.tracker.replay_from is not None:
            start = self.tracker.replay_begins()
            self.asked.append(start)
            assert len(self.asked) < 50
            answer = [message for message in self.publisher.sent if message[0] >= start]
            for position, message in enumerate(answer):
                if position not in drops and not self.tracker.replayed(*message):
                    break
            else:
                self.tracker.replay_ended()
            drops = ()

    def connect(self) -> None:
        self.tracker.connected()
        self.replay()

    def trust(self) -> Trust:
        return self.source.trust

    @property
    def held(self) -> set[int]:
        return set(self.source.keys)


@pytest.fixture
def publisher() -> Publisher:
    return Publisher()


@pytest.fixture
def listener(publisher: Publisher) -> Iterator[Listener]:
    """Connected from the beginning, with replay."""
    one = Listener(publisher)
    one.connect()
    yield one
    assert one.index.n_blocks(0) == len(one.held)


# Beginning


def test_nothing_is_known_before_the_connection() -> None:
    assert Listener(Publisher()).trust() is Trust.CONNECTING


def test_who_hears_the_first_message_knows_all(publisher: Publisher) -> None:
    listener = Listener()
    listener.connect()
    assert listener.trust() is Trust.PARTIAL

    listener.hears(publisher.says(stored(1)))
    assert listener.trust() is Trust.TRUSTED
    assert listener.held == {1}
    assert listener.source.counts.lag_s == 0.25


def test_who_comes_late_gets_the_past_replayed(publisher: Publisher) -> None:
    publisher.says(stored(1, 3))
    publisher.says(removed(3))
    listener = Listener(publisher)
    listener.connect()
    assert listener.asked == [0]
    assert listener.trust() is Trust.TRUSTED
    assert listener.held == {1, 2}


def test_a_server_that_published_nothing_yet_holds_nothing(listener: Listener, publisher: Publisher) -> None:
    assert listener.trust() is Trust.TRUSTED
    listener.hears(publisher.says(stored(1)))
    assert listener.trust() is Trust.TRUSTED
    assert listener.asked == [0]


def test_who_comes_too_late_knows_a_part() -> None:
    publisher = Publisher(buffer=2)
    for n in range(4):
        publisher.says(stored(n))
    listener = Listener(publisher)
    listener.connect()
    assert listener.trust() is Trust.PARTIAL
    assert listener.held == {2, 3}


def test_an_emptied_cache_is_known_whole(publisher: Publisher) -> None:
    publisher.says(stored(1))
    listener = Listener()
    listener.connect()
    listener.hears(publisher.says(stored(2)))
    assert listener.trust() is Trust.PARTIAL

    listener.hears(publisher.says(stored(3), CLEARED, stored(4)))
    assert listener.trust() is Trust.TRUSTED
    assert listener.held == {4}


def test_after_a_turnover_all_is_known(publisher: Publisher) -> None:
    publisher.says(stored(1))
    listener = Listener()
    listener.connect()
    listener.hears(publisher.says(stored(1_000, WINDOW_BLOCKS)))
    assert listener.trust() is Trust.PARTIAL, "nothing of it was evicted yet"

    listener.hears(publisher.says(removed(1), stored(2_000, WINDOW_BLOCKS)))
    assert listener.trust() is Trust.PARTIAL, "only what was there before was"

    listener.hears(publisher.says(removed(1_000 + WINDOW_BLOCKS - 1), stored(3_000, WINDOW_BLOCKS - 1)))
    assert listener.trust() is Trust.PARTIAL, "the window is not full"

    listener.hears(publisher.says(stored(4_000)))
    assert listener.trust() is Trust.TRUSTED


def test_what_is_always_in_use_is_not_known_by_turnover(publisher: Publisher) -> None:
    publisher.says(stored(1))
    listener = Listener()
    listener.connect()
    for n in range(20):
        own, of_old = 1_000 * (n + 1), 1_000_000 * (n + 1)
        listener.hears(publisher.says(stored(own, 100), removed(own + 99), stored(of_old, 10, parent=1)))
    assert listener.trust() is Trust.PARTIAL
    assert listener.source.counts.orphan_blocks == 200


# Gaps


def test_a_gap_is_repaired_by_a_replay(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)))
    publisher.says(stored(2))
    publisher.says(removed(1))
    listener.hears(publisher.says(stored(3)))
    assert listener.asked == [0, 0], "from the last message that was had"
    assert listener.trust() is Trust.TRUSTED
    assert listener.held == {2, 3}
    assert listener.source.counts.gaps == 1


def test_nothing_is_trusted_while_a_replay_is_awaited(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)))
    publisher.says(stored(2))
    listener.tracker.live(*publisher.says(stored(3)))
    assert listener.trust() is Trust.REPLAYING
    assert listener.index.trust(0) is not Trust.TRUSTED


def test_messages_that_come_again_after_a_replay_change_nothing(listener: Listener, publisher: Publisher) -> None:
    messages = [publisher.says(stored(n)) for n in range(3)] + [publisher.says(removed(0)), publisher.says(stored(0))]
    listener.hears(messages[0], messages[2], messages[1], messages[3], messages[3], messages[4], messages[0])
    assert listener.held == {0, 1, 2}
    assert not listener.source.repeats
    assert listener.trust() is Trust.TRUSTED
    assert (listener.source.counts.gaps, listener.source.counts.restarts) == (1, 0)


def test_a_gap_without_replay_loses_all(publisher: Publisher) -> None:
    listener = Listener()
    listener.connect()
    listener.hears(publisher.says(stored(1)))
    publisher.says(removed(1))
    listener.hears(publisher.says(stored(2)))
    assert listener.trust() is Trust.PARTIAL
    assert listener.held == {2}
    assert listener.told == [(logging.WARNING, "lost messages 1 to 1 of its KV events (1 so far)")]


def test_a_gap_longer_than_the_buffer_loses_all() -> None:
    publisher = Publisher(buffer=2)
    listener = Listener(publisher)
    listener.connect()
    listener.hears(publisher.says(stored(1)))
    for n in range(2, 5):
        publisher.says(stored(n))
    listener.hears(publisher.says(stored(5)))
    assert listener.trust() is Trust.PARTIAL
    assert listener.held == {4, 5}


def test_numbers_that_were_never_used_are_no_loss(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)))
    publisher.n += 1  # a step without a message
    listener.hears(publisher.says(stored(2)))
    assert listener.trust() is Trust.TRUSTED
    assert listener.held == {1, 2}


def test_a_message_that_the_replay_dropped_is_asked_for_again(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)))
    for n in range(2, 7):
        publisher.says(stored(n))
    listener.tracker.live(*publisher.says(stored(7)))
    listener.replay(drops=(3, 4))
    assert listener.trust() is Trust.TRUSTED
    assert listener.held == {1, 2, 3, 4, 5, 6, 7}


def test_many_unused_numbers_do_not_mean_as_many_replays(publisher: Publisher) -> None:
    for n in range(40):
        publisher.says(stored(n))
        publisher.n += n % 2
    listener = Listener(publisher)
    listener.connect()
    assert len(listener.held) == 40
    assert len(listener.asked) < 6


def test_a_replay_that_breaks_off_is_asked_for_again_then_given_up(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)))
    publisher.says(stored(2))
    listener.tracker.live(*publisher.says(stored(3)))
    tracker = listener.tracker
    assert tracker.replay_begins() == 0
    tracker.replay_failed()
    assert tracker.replay_from == 0
    assert tracker.replay_begins() == 0
    tracker.replay_failed()
    assert tracker.replay_from is None
    assert listener.trust() is Trust.PARTIAL
    assert listener.held == set()

    listener.hears(publisher.says(stored(4)))
    assert listener.held == {4}
    tracker.retry()
    listener.replay()
    assert listener.trust() is Trust.TRUSTED
    assert listener.held == {1, 2, 3, 4}


def test_a_replay_without_end_is_asked_for_once(publisher: Publisher) -> None:
    publisher.says(stored(1))
    listener = Listener(publisher)
    tracker = listener.tracker
    tracker.connected()
    tracker.replay_begins()
    for message in publisher.sent:
        assert tracker.replayed(*message)
    tracker.replay_endless()
    assert listener.trust() is Trust.PARTIAL
    assert listener.held == set()

    publisher.n = 7
    tracker.live(*publisher.says(stored(2)))
    publisher.n = 10
    tracker.live(*publisher.says(stored(3)))
    assert listener.held == {3}
    tracker.live(*publisher.sent[-1])
    tracker.live(10, publisher.sent[-2][1])
    assert listener.held == {2}
    for _ in range(3):
        tracker.retry()
        tracker.disconnected()
        tracker.connected()
    assert tracker.replay_from is None
    assert listener.trust() is Trust.PARTIAL

    # Another process may do better.
    tracker.emptied(NOW_S + 60)
    assert listener.trust() is Trust.REPLAYING


def test_a_retry_that_fails_costs_nothing(publisher: Publisher) -> None:
    listener = Listener(publisher)
    listener.tracker.connected()
    for _ in range(2):
        listener.tracker.replay_begins()
        listener.tracker.replay_failed()
    listener.hears(publisher.says(stored(1)))
    assert listener.trust() is Trust.TRUSTED, "it was the first message"
    listener.tracker.retry()
    assert listener.tracker.replay_from is None, "all is known"


# Restarts


def test_numbers_that_begin_anew_are_a_restart(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)), publisher.says(stored(2)))
    listener.publisher = reborn = Publisher()
    listener.hears(reborn.says(stored(9)))
    assert listener.held == {9}
    assert listener.trust() is Trust.TRUSTED
    assert listener.source.counts.restarts == 1


def test_a_restart_that_is_heard_of_late_is_replayed(listener: Listener, publisher: Publisher) -> None:
    listener.hears(*[publisher.says(stored(n)) for n in range(5)])
    listener.publisher = reborn = Publisher()
    reborn.says(stored(10))
    listener.hears(reborn.says(stored(11)))
    assert listener.held == {10, 11}
    assert listener.trust() is Trust.TRUSTED


def test_a_new_process_that_has_caught_up_is_no_gap(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)), publisher.says(stored(2)))
    listener.tracker.disconnected()
    listener.publisher = reborn = Publisher()
    for n in range(10, 15):
        reborn.says(stored(n))
    listener.connect()
    assert listener.held == set(range(10, 15))
    assert listener.trust() is Trust.TRUSTED


def test_a_new_process_that_said_less_is_a_restart(listener: Listener, publisher: Publisher) -> None:
    listener.hears(*[publisher.says(stored(n)) for n in range(5)])
    listener.tracker.disconnected()
    assert listener.trust() is Trust.CONNECTING
    listener.publisher = Publisher()
    listener.connect()
    assert listener.held == set()
    assert listener.trust() is Trust.TRUSTED


def test_a_connection_that_comes_back_goes_on_where_it_was(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)))
    listener.tracker.disconnected()
    publisher.says(stored(2))
    listener.connect()
    assert listener.held == {1, 2}
    assert listener.trust() is Trust.TRUSTED
    assert listener.source.counts.restarts == 0


def test_without_replay_a_restart_from_the_first_message_is_known_whole(publisher: Publisher) -> None:
    listener = Listener()
    listener.connect()
    listener.hears(publisher.says(stored(1)), publisher.says(stored(2)))
    listener.hears(Publisher().says(stored(9)))
    assert listener.held == {9}
    assert listener.trust() is Trust.TRUSTED


# What the prober hears


def test_sleep_empties(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)))
    listener.tracker.emptied(None)
    assert listener.held == set()
    assert listener.trust() is Trust.TRUSTED


def test_a_new_process_that_the_stream_knows_already_is_no_news(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1), time_s=500.0))
    listener.tracker.emptied(started_s=490.0)
    assert listener.held == {1}
    assert listener.trust() is Trust.TRUSTED


def test_a_new_process_that_the_stream_has_not_heard_of_empties(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1), time_s=500.0))
    listener.publisher = Publisher()
    listener.tracker.emptied(started_s=600.0)
    assert listener.held == set()
    assert listener.trust() is Trust.REPLAYING
    listener.replay()
    assert listener.trust() is Trust.TRUSTED


# Garbage


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b'{"no": "msgpack"}', msgpack.packb([1, [5], 0])])
def test_what_cannot_be_read_ends_trust(listener: Listener, publisher: Publisher, garbage: bytes) -> None:
    listener.hears(publisher.says(stored(1)))
    listener.hears(publisher.says_bytes(garbage))
    assert listener.trust() is Trust.PARTIAL
    assert listener.held == set()
    assert listener.source.counts.undecodable == 1
    assert [level for level, _ in listener.told] == [logging.WARNING]

    listener.hears(publisher.says(CLEARED, stored(2)))
    assert listener.trust() is Trust.TRUSTED
    assert listener.held == {2}


def test_garbage_is_told_ever_more_rarely(listener: Listener, publisher: Publisher) -> None:
    for _ in range(1_000):
        listener.tracker.garbled()
    assert listener.source.counts.undecodable == 1_000
    assert len(listener.told) == 10


def test_blocks_that_cannot_be_read_cost_trust_but_no_removal(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1, 2)))
    listener.hears(publisher.says({**stored(5), "token_ids": ["x"]}, removed(2)))
    assert listener.trust() is Trust.PARTIAL
    assert listener.held == {1}


def test_kinds_of_events_that_are_not_known_change_nothing(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)), publisher.says({"type": "BlockMoved", "to": "CPU"}))
    assert listener.trust() is Trust.TRUSTED
    assert listener.source.counts.unknown == 1


def test_a_model_without_layers_that_keep_the_prefix_is_not_trusted(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says({**stored(1), "kv_cache_spec_kind": "mamba", "group_idx": 0}))
    assert listener.trust() is Trust.PARTIAL
    listener.hears(publisher.says({**stored(1), "kv_cache_spec_kind": "full_attention", "group_idx": 1}))
    assert listener.trust() is Trust.TRUSTED


def test_a_fault_begins_anew(listener: Listener, publisher: Publisher) -> None:
    listener.hears(publisher.says(stored(1)))
    listener.tracker.faulted()
    listener.tracker.disconnected()
    assert listener.held == set()
    listener.connect()
    assert listener.held == {1}
    assert listener.trust() is Trust.TRUSTED
