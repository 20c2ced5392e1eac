"""When a configuration is read again, and what becomes of one that is wrong."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixroute.config import Settings, instances_in_file, load_settings
from prefixroute.config.live import Change, change
from prefixroute.errors import ConfigError
from prefixroute.leaving import Leaving
from prefixroute.metrics import ReloadOutcome
from prefixroute.reload import ConfigSource, Reloader

ONE = "fleet: {instances: [{url: 'http://a:1'}]}\n"
TWO = "fleet: {instances: [{url: 'http://a:1'}, {url: 'http://b:1'}]}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "router.yaml"
    path.write_text(ONE)
    return path


@pytest.fixture
def source(path: Path) -> ConfigSource:
    source = ConfigSource(path, lambda: load_settings(path, environ={}))
    source.load()
    return source


# Files


def test_a_change_counts_when_it_was_seen_twice(source: ConfigSource, path: Path) -> None:
    assert [source.has_changed(), source.has_changed()] == [False, False]
    path.write_text(TWO[:-20])
    assert not source.has_changed()
    # Still being written.
    path.write_text(TWO)
    assert not source.has_changed()
    assert source.has_changed()
    source.load()
    assert [source.has_changed(), source.has_changed()] == [False, False]


def test_what_is_wrong_is_read_once(source: ConfigSource, path: Path) -> None:
    path.write_text("fleet: [")
    assert [source.has_changed(), source.has_changed()] == [False, True]
    with pytest.raises(ConfigError):
        source.load()
    assert [source.has_changed(), source.has_changed()] == [False, False]


def test_a_file_of_the_same_length_and_time_is_another_one(source: ConfigSource, path: Path) -> None:
    was = path.stat()
    new = path.with_suffix(".new")
    new.write_text(ONE.replace("http://a", "http://b"))
    os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
    new.replace(path)
    assert [source.has_changed(), source.has_changed()] == [False, True]


def test_what_changes_while_it_is_read_is_a_change(path: Path) -> None:
    def read() -> Settings:
        settings = load_settings(path, environ={})
        path.write_text(TWO)
        return settings

    source = ConfigSource(path, read)
    assert len(source.load().fleet.instances) == 1
    assert [source.has_changed(), source.has_changed()] == [False, True]


def test_files_that_it_names_are_watched_too_until_it_names_them_no_more(path: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    path.write_text(f"fleet: {{instances: [{{url: 'http://a:1', api_key_file: '{key}'}}]}}\n")
    source = ConfigSource(path, lambda: load_settings(path, environ={}))
    source.load()
    key.write_text("another")
    assert [source.has_changed(), source.has_changed()] == [False, True]
    path.write_text(ONE)
    source.load()
    key.unlink()
    assert [source.has_changed(), source.has_changed()] == [False, False]


# Following


class Following:
    """A reloader at work on settings, and what came of it."""

    def __init__(self, source: ConfigSource) -> None:
        self.settings = source.load()
        self.outcomes: asyncio.Queue[ReloadOutcome] = asyncio.Queue()
        self.n_begun = self.n_ended = 0
        self.reloader = Reloader(
            source,
            self.apply,
            note=self.outcomes.put_nowait,
            is_watching=lambda: self.settings.watch_config,
            on_begin=self.begin,
            on_end=self.end,
            look_every_s=0.01,
        )

    def apply(self, new: Settings) -> Change:
        made = change(self.settings, new)
        self.settings = made.settings
        return made

    def begin(self) -> None:
        self.n_begun += 1

    def end(self) -> None:
        self.n_ended += 1


Follow = Callable[[ConfigSource], "asyncio.Future[None]"]


@asynccontextmanager
async def following(source: ConfigSource) -> AsyncIterator[Following]:
    one = Following(source)
    task = asyncio.create_task(one.reloader.run())
    try:
        async with asyncio.timeout(20):
            yield one
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert one.n_begun == one.n_ended


async def test_a_change_is_taken_up(source: ConfigSource, path: Path) -> None:
    async with following(source) as one:
        path.write_text(TWO)
        assert await one.outcomes.get() is ReloadOutcome.APPLIED
        assert len(one.settings.fleet.instances) == 2


async def test_a_wrong_one_is_told_and_changes_nothing(
    source: ConfigSource, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with following(source) as one:
        before = one.settings
        path.write_text("routing: {stratgy: random, shadow: 7}")
        assert await one.outcomes.get() is ReloadOutcome.REFUSED
        assert one.settings is before
        first, second = [record.getMessage() for record in caplog.records]
        assert first.endswith("stays in force: routing.shadow: must be a list, not a number")
        assert second.endswith("routing.stratgy: unknown setting; did you mean 'strategy'?")
        path.write_text(TWO)
        assert await one.outcomes.get() is ReloadOutcome.APPLIED


async def test_a_fault_in_reading_is_told_and_the_next_one_is_taken_up(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [RuntimeError("once")]

    def read() -> Settings:
        if path.read_text() == TWO and faults:
            raise faults.pop()
        return load_settings(path, environ={})

    source = ConfigSource(path, read)
    async with following(source) as one:
        path.write_text(TWO)
        assert await one.outcomes.get() is ReloadOutcome.REFUSED
        assert "fault while reading it" in caplog.text
        source.ask()
        assert await one.outcomes.get() is ReloadOutcome.APPLIED


async def test_who_asks_is_heard_though_nothing_is_watched(path: Path) -> None:
    path.write_text(f"watch_config: false\n{ONE}")
    source = ConfigSource(path, lambda: load_settings(path, environ={}))
    async with following(source) as one:
        path.write_text(f"watch_config: false\n{TWO}")
        source.ask()
        assert await one.outcomes.get() is ReloadOutcome.APPLIED
        source.ask()
        assert await one.outcomes.get() is ReloadOutcome.UNCHANGED


async def test_without_files_there_is_nothing_to_read(caplog: pytest.LogCaptureFixture) -> None:
    source = ConfigSource(None, Settings)
    async with following(source) as one:
        source.ask()
        while not one.n_ended:
            await asyncio.sleep(0)
        assert one.outcomes.empty()
    assert "nothing to reload" in caplog.text


# What it says


async def test_who_joined_and_who_left_is_said(
    source: ConfigSource, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = load_settings(path, environ={})

    def apply(new: Settings) -> Change:
        nonlocal now
        made = change(now, new)
        now = made.settings
        return made

    caplog.set_level(logging.INFO)
    reloader = Reloader(source, apply, note=lambda _outcome: None, is_watching=lambda: True)
    path.write_text("fleet: {instances: [{url: 'http://a:2', name: 'a:1'}, {url: 'http://b:1'}]}\n")
    await reloader.reload()
    path.write_text(ONE.replace("http://a", "http://b"))
    await reloader.reload()
    await reloader.reload()
    path.write_text(path.read_text() + "listen: {port: 1}\n")
    await reloader.reload()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        "the configuration was taken up; changed: fleet.instances; joined: a:1, b:1; left: a:1",
        "the configuration was taken up; changed: fleet.instances; left: a:1",
        "the configuration was read again: nothing has changed",
        "the configuration was read again: nothing has changed that can be taken up",
    ]


async def test_that_the_command_lines_instances_count_is_said_once_for_each_fleet(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> Settings:
        return load_settings(path, environ={}, overrides={"fleet": {"instances": [{"url": "http://c:1"}]}})

    now = read()
    source = ConfigSource(path, read, lambda: instances_in_file(path))
    source.load()
    reloader = Reloader(source, lambda new: change(now, new), note=lambda _outcome: None, is_watching=lambda: True)
    source.tell_outranked()
    for text in (ONE, TWO, TWO, "", ONE):
        path.write_text(text)
        await reloader.reload()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [f"the instances on the command line count, not those in {path} (fleet.instances)"] * 3


def test_an_instance_has_left_when_its_last_request_is_over(caplog: pytest.LogCaptureFixture) -> None:
    under_way = {"a": 2, "b": 1}
    caplog.set_level(logging.INFO)
    leaving = Leaving(lambda: under_way)
    for name in ("a", "b", "c"):
        leaving.removed(name)
    leaving.look()
    for now in ({"a": 1}, {"a": 1}, {}, {}):
        under_way = now
        leaving.look()
    assert [record.getMessage() for record in caplog.records] == [
        "c has left: no request is under way there",
        "b has left: its last request is over",
        "a has left: its last request is over",
    ]
