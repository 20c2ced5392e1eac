"""Records finished requests: noted on the event loop, hashed and written by a thread.

- **A request never waits and never fails for it.** The loop appends to a backlog of bounded size, no more; when it is
  full, what comes is dropped and counted.
- **The thread gives way.** Hashing holds the interpreter's lock, and the loop would wait up to its switch interval
  (5 ms) for each turn; so the thread pauses after every slice of about 0.1 ms.
- **A disk that fails or is full costs recordings, nothing else.** One warning, a pause in which nothing is kept, then
  another try. When it works again, that is said too.
"""

import errno
import logging
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

from prefixroute.backlog import Backlog
from prefixroute.config.settings import RecordingSettings
from prefixroute.core.prompt import Prompt
from prefixroute.errors import ConfigError
from prefixroute.record import RequestRecord
from prefixroute.recording.files import RecordingFiles
from prefixroute.recording.form import Header
from prefixroute.recording.key import key_id, read_or_create_key
from prefixroute.recording.prefixes import PrefixHasher
from prefixroute.recording.row import Pending, line

_log = logging.getLogger(__name__)

# Prompts not hashed yet. A thousand of 8,000 tokens: far more than are ever behind while the disk works.
MAX_BACKLOG_BYTES = 32 * 1024 * 1024
# Between two tries of a disk that failed.
PAUSE_S = 10.0
# How long the thread lets requests gather: one wake-up and one write for all of them.
_GATHER_S = 0.05
# How long it lets others run after a slice. Leaves it 60 MB of material a second, 2,000 prompts of 8,000 tokens.
_GIVE_WAY_S = 0.0005
_MAX_BATCH_LINES = 256
# How long the end of the service may be held up by a disk that does not answer.
_CLOSE_S = 2.0

# What an operator mends in the configuration; anything else may pass, and is no reason not to serve.
_CONFIGURATION_ERRORS = frozenset(
    {
        errno.EACCES, errno.EBUSY, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP,
        errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.EPERM, errno.EROFS,
    }
)  # fmt: skip


class Recorder:
    """Writes a line for each request it is told of. `close` it at the end of the service.

    `clock`: monotonic, that of the records. `knows_model`: whether a model's name may be written.
    """

    def __init__(
        self,
        files: RecordingFiles,
        key: bytes,
        block_tokens: int,
        *,
        clock: Callable[[], float],
        knows_model: Callable[[str], bool],
        wall_s: float | None = None,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        """`wall_s`: Unix time now (None: the system's), taken once; from then on the monotonic clock counts."""
        self._files = files
        self._hasher = PrefixHasher(key, block_tokens, self._give_way)
        self._clock = clock
        self._knows_model = knows_model
        self._offset_s = (time.time() if wall_s is None else wall_s) - clock()
        # Each is counted up by one side only, so none needs a lock.
        self._n_dropped = self._n_unkept = self._n_failed = 0
        self._paused_until_s: float | None = None
        self._backlog: Backlog[Pending] = Backlog(
            "recorder",
            self._write,
            size_of=attrgetter("n_bytes"),
            max_size=max_backlog_bytes,
            gather_s=_GATHER_S,
            patience_s=_CLOSE_S,
            max_batch=_MAX_BATCH_LINES,
            at_end=files.close,
        )

    def counts(self) -> dict[str, int]:
        """Requests so far, by what became of them: `written`, `dropped` (backlog full), `failed` (disk)."""
        return {
            "written": self._files.n_written,
            "dropped": self._n_dropped,
            "failed": self._n_failed + self._n_unkept,
        }

    def record(self, record: RequestRecord, prompt: Prompt) -> None:
        """Notes a finished request; of those that ask no engine for a prefill, nothing. Neither blocks nor raises."""
        if not prompt.n_tokens:
            return
        if self._is_paused():
            self._n_unkept += 1
            return
        model = prompt.model
        item = Pending.of(record, prompt, model if model is None or self._knows_model(model) else "other")
        if not self._backlog.put(item):
            self._n_dropped += 1

    def pause(self, error: OSError) -> None:
        """Keeps nothing for a while, because the disk failed."""
        if self._paused_until_s is None:
            _log.warning(
                "recording to %s failed: %s; requests are not recorded until it works again",
                self._files.path,
                error.strerror or error,
            )
        self._paused_until_s = self._clock() + PAUSE_S

    def flush(self) -> None:
        """Waits until what was noted so far is written or given up, for a bounded time. Blocks: not for the loop."""
        self._backlog.flush()

    def close(self) -> None:
        """Writes what is left and ends the thread, for a bounded time. Blocks: not for the event loop."""
        self._backlog.close()

    # ------------------------------------------------------------------ the thread

    def _write(self, items: list[Pending]) -> None:
        lines = [made for item in items if (made := self._line(item)) is not None]
        if not lines:
            return
        n_before = self._files.n_written
        try:
            self._files.write(lines)
        except OSError as error:
            self._n_failed += len(lines) - (self._files.n_written - n_before)
            self.pause(error)
            return
        if self._paused_until_s is not None:
            self._paused_until_s = None
            _log.warning("recording to %s works again", self._files.path)

    def _line(self, item: Pending) -> bytes | None:
        if self._is_paused():
            self._n_failed += 1
            return None
        try:
            return line(item, self._hasher, self._offset_s)
        except Exception as fault:  # noqa: BLE001  the fault of one line must not end recording
            self._n_failed += 1
            # Its text may hold a piece of the request.
            _log.error("a request could not be recorded: %s", type(fault).__name__)
            return None

    def _is_paused(self) -> bool:
        until_s = self._paused_until_s
        return until_s is not None and self._clock() < until_s

    def _give_way(self) -> None:
        self._backlog.rest(_GIVE_WAY_S)


def start_recorder(
    settings: RecordingSettings, *, clock: Callable[[], float], knows_model: Callable[[str], bool]
) -> Recorder:
    """A recorder as configured, its file open. Raises ConfigError; a full disk is no reason not to start."""
    path = Path(settings.path)
    # Before the key, which is made beside the recording: who named one file is not told about another.
    _check_place(path)
    key = read_or_create_key(Path(settings.key_file) if settings.key_file is not None else default_key_file(path))
    files = RecordingFiles(
        path,
        Header(settings.block_tokens, key_id(key)),
        max_file_bytes=settings.max_file_bytes,
        n_files=settings.n_files,
    )
    failed: OSError | None = None
    try:
        files.open()
    except OSError as error:
        if error.errno in _CONFIGURATION_ERRORS:
            raise ConfigError(f"recording.path: {path}: {error.strerror}") from error
        failed = error
    recorder = Recorder(files, key, settings.block_tokens, clock=clock, knows_model=knows_model)
    if failed is not None:
        recorder.pause(failed)
    return recorder


def _check_place(path: Path) -> None:
    try:
        if not path.parent.is_dir():
            problem = f"there is no directory {path.parent} (make it, or choose another path)"
        elif path.is_dir():
            problem = "is a directory (name a file in it)"
        else:
            return
    except OSError as error:
        problem = error.strerror or str(error)
    raise ConfigError(f"recording.path: {path}: {problem}")


def default_key_file(path: Path) -> Path:
    """Where the key is when no file is named: beside the recording."""
    return path.with_name(f"{path.name}.key")
