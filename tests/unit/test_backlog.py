"""The thread that writes: order, bounds, and an end that a write which never returns does not hold up."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixroute.backlog import Backlog

Make = Callable[..., Backlog[str]]


class Writer:
    """What was written, by batch. Can be made to stand still."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[str] = set()
        self.ended = threading.Event()
        self.writing = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def write(self, batch: list[str]) -> None:
        self.threads.add(threading.current_thread().name)
        self.writing.set()
        self.goes_on.wait()
        self.batches.append(batch)


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def make(writer: Writer) -> Iterator[Make]:
    made: list[Backlog[str]] = []

    def make(**changes: Any) -> Backlog[str]:
        options: dict[str, Any] = {"size_of": len, "max_size": 100, "gather_s": 0.001, "patience_s": 5.0}
        made.append(Backlog("writer", writer.write, at_end=writer.ended.set, **{**options, **changes}))
        return made[-1]

    yield make
    writer.goes_on.set()
    for one in made:
        one.close()


def test_what_gathered_is_written_together_in_its_order_by_another_thread(make: Make, writer: Writer) -> None:
    backlog = make()
    writer.goes_on.clear()
    assert backlog.put("a")
    assert writer.writing.wait(5)
    assert all(backlog.put(text) for text in "bcde")
    writer.goes_on.set()
    backlog.flush()
    assert writer.batches == [["a"], ["b", "c", "d", "e"]]
    assert writer.threads == {"writer"}


def test_a_batch_is_bounded(make: Make, writer: Writer) -> None:
    backlog = make(max_batch=2)
    writer.goes_on.clear()
    for text in "abcdef":
        backlog.put(text)
    writer.goes_on.set()
    backlog.flush()
    assert "".join(map("".join, writer.batches)) == "abcdef"
    assert max(map(len, writer.batches)) <= 2


def test_what_is_not_written_yet_is_bounded_what_is_being_written_included(make: Make, writer: Writer) -> None:
    backlog = make(max_size=10)
    writer.goes_on.clear()
    assert backlog.put("x" * 6)
    assert writer.writing.wait(5)
    assert not backlog.put("y" * 5)
    assert backlog.put("z" * 4)
    writer.goes_on.set()
    backlog.flush()
    assert backlog.put("y" * 10)


def test_closing_writes_the_rest_and_then_nothing_is_taken(make: Make, writer: Writer) -> None:
    backlog = make(gather_s=60.0)
    backlog.put("a")
    backlog.close()
    assert writer.batches == [["a"]]
    assert writer.ended.is_set()
    assert not backlog.put("b")
    # Neither waits for a thread that is gone.
    backlog.flush()
    backlog.close()


def test_a_write_that_never_returns_holds_nobody_up_for_long(make: Make, writer: Writer) -> None:
    backlog = make(patience_s=0.01)
    writer.goes_on.clear()
    backlog.put("a")
    backlog.flush()
    backlog.close()
    assert writer.batches == []
    assert not writer.ended.is_set()


def test_a_rest_ends_when_it_closes(make: Make, writer: Writer) -> None:
    rested: list[bool] = []
    resting = threading.Event()

    def write(batch: list[str]) -> None:
        resting.set()
        rested.append(backlog.rest(60.0))

    writer.write = write  # type: ignore[method-assign]
    backlog = make()
    assert not backlog.rest(0.0)
    backlog.put("a")
    assert resting.wait(5)
    backlog.close()
    assert rested == [True]
