"""The configuration, read again: when asked to (SIGHUP), and when a file of it has changed.

Files are watched by looking at them: it works on every file system, for renames over the file and for the directories
that Kubernetes swaps by a link. A change counts once two looks in a row saw the same, so that a file is not read while
it is being written. What is wrong with it changes nothing, and is told once; the next change is another try.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prefixroute.config.live import Change, files_named
from prefixroute.config.settings import Settings
from prefixroute.errors import ConfigError
from prefixroute.metrics import ReloadOutcome

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_MAX_NAMED = 10

# Of each file: device, inode, size, time of change in nanoseconds; None: it is not there.
_Looks = dict[Path, tuple[int, int, int, int] | None]


class ConfigSource:
    """Where a configuration comes from: `read` makes it of `path` (None: no file), environment and command line.

    `read_outranked`: instances in the file that do not count, because the command line names some.
    """

    def __init__(
        self, path: Path | None, read: Callable[[], Settings], read_outranked: Callable[[], object] = lambda: None
    ) -> None:
        self.path = path
        self._read = read
        self._read_outranked = read_outranked
        self._outranked: object = None
        self._outranked_told: object = None
        self._files: set[Path] = set()
        self.asked = asyncio.Event()
        """Set when it is to be loaded again as soon as may be."""
        self._seen: _Looks = {}
        self._last: _Looks | None = None

    @property
    def has_files(self) -> bool:
        return self.path is not None or bool(self._files)

    def ask(self) -> None:
        """Has it loaded again."""
        self.asked.set()

    def load(self) -> Settings:
        """The configuration as it is now. Raises ConfigError. Reads files: not for the event loop."""
        # Before they are read: what changes meanwhile is a change.
        seen = self._seen = _look(self._all_files())
        settings = self._read()
        self._outranked = self._read_outranked()
        self._files = set(files_named(settings))
        self._seen = {path: seen[path] if path in seen else _look_at(path) for path in self._all_files()}
        return settings

    def tell_outranked(self) -> None:
        """Says which instances count, when those in the file are others than at the last time."""
        if self._outranked and self._outranked != self._outranked_told:
            _log.warning("the instances on the command line count, not those in %s (fleet.instances)", self.path)
        self._outranked_told = self._outranked

    def has_changed(self) -> bool:
        """Whether a file is another than was loaded, and has been so since the last look. Not for the event loop."""
        looks = _look(self._all_files())
        last, self._last = self._last, looks
        return looks != self._seen and looks == last

    def _all_files(self) -> Iterable[Path]:
        return self._files if self.path is None else self._files | {self.path}


class Reloader:
    """Reads `source` again and hands it to `apply`, which says what changed; `run` does it all.

    `prepare` does what can fail or takes time, in a thread: `apply` gets what it makes of the settings.

    `note`: gets each outcome. `is_watching`: whether a change of a file is enough, or somebody has to ask.
    """

    def __init__(
        self,
        source: ConfigSource,
        apply: Callable[[Any], Change],
        *,
        prepare: Callable[[Settings], Any] = lambda settings: settings,
        note: Callable[[ReloadOutcome], None],
        is_watching: Callable[[], bool],
        on_begin: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._source = source
        self._apply = apply
        self._prepare = prepare
        self._note = note
        self._is_watching = is_watching
        self._on_begin = on_begin
        self._on_end = on_end
        self._look_every_s = look_every_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            is_asked = await self._wait_asked()
            if not is_asked and not (self._is_watching() and await asyncio.to_thread(self._source.has_changed)):
                continue
            self._on_begin()
            try:
                if is_asked and not self._source.has_files:
                    _log.warning("nothing to reload: it was started without a configuration file (--config)")
                else:
                    self._note(await self.reload())
            finally:
                self._on_end()

    async def reload(self) -> ReloadOutcome:
        """Reads it now. What is wrong is logged, and changes nothing."""
        prepared = None
        try:
            prepared = await asyncio.to_thread(lambda: self._prepare(self._source.load()))
            change = self._apply(prepared)
        except ConfigError as error:
            first, *more = str(error).splitlines()
            _log.error("the configuration is not taken up, the one before stays in force: %s", first)
            for line in more:
                _log.error("the configuration is not taken up: %s", line)
            return ReloadOutcome.REFUSED
        except Exception:  # noqa: BLE001  one odd file must not end the watch
            if prepared is not None:
                _log.exception("a fault while the configuration was taken up: some of it is in force (restart)")
                return ReloadOutcome.REFUSED
            _log.exception("the configuration is not taken up, the one before stays in force: fault while reading it")
            return ReloadOutcome.REFUSED
        if change.needs_restart:
            _log.warning("these settings have changed and need a restart: %s", ", ".join(change.needs_restart))
        self._source.tell_outranked()
        if not change.changed:
            but = " that can be taken up" if change.needs_restart else ""
            _log.info("the configuration was read again: nothing has changed%s", but)
            return ReloadOutcome.UNCHANGED
        joined = f"; joined: {_named(change.joined)}" if change.joined else ""
        left = f"; left: {_named(change.left)}" if change.left else ""
        _log.info("the configuration was taken up; changed: %s%s%s", ", ".join(change.changed), joined, left)
        return ReloadOutcome.APPLIED

    async def _wait_asked(self) -> bool:
        """Waits until somebody asks. False: it is time for the next look."""
        try:
            async with asyncio.timeout(self._look_every_s):
                await self._source.asked.wait()
        except TimeoutError:
            return False
        self._source.asked.clear()
        return True


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _look(paths: Iterable[Path]) -> _Looks:
    return {path: _look_at(path) for path in paths}


def _look_at(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
