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
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

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
        self._max_backlog_bytes = max_backlog_bytes
        # Requests, and events to be set when everything before them is written.
        self._backlog: deque[Pending | threading.Event] = deque()
        # Each is counted up by one side only, so none needs a lock.
        self._n_bytes_in = self._n_dropped = self._n_unkept = 0
        self._n_bytes_out = self._n_failed = 0
        self._paused_until_s: float | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._writer.start()

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
        if self._closing.is_set() or self._n_bytes_in - self._n_bytes_out + item.n_bytes > self._max_backlog_bytes:
            self._n_dropped += 1
            return
        self._n_bytes_in += item.n_bytes
        self._backlog.append(item)
        if not self._wake.is_set():
            self._wake.set()

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
        done = threading.Event()
        self._backlog.append(done)
        self._wake.set()
        done.wait(_CLOSE_S)

    def close(self) -> None:
        """Writes what is left and ends the thread, for a bounded time. Blocks: not for the event loop."""
        self._closing.set()
        self._wake.set()
        self._writer.join(_CLOSE_S)

    # ------------------------------------------------------------------ the thread

    def _write_all(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._closing.wait(_GATHER_S)
            self._wake.clear()
            self._write_backlog()
        self._write_backlog()
        self._files.close()

    def _write_backlog(self) -> None:
        while self._backlog:
            lines: list[bytes] = []
            done: threading.Event | None = None
            while self._backlog and done is None and len(lines) < _MAX_BATCH_LINES:
                item = self._backlog.popleft()
                if isinstance(item, threading.Event):
                    done = item
                elif (made := self._line(item)) is not None:
                    lines.append(made)
            if lines:
                self._write(lines)
            if done is not None:
                done.set()

    def _line(self, item: Pending) -> bytes | None:
        self._n_bytes_out += item.n_bytes
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

    def _write(self, lines: list[bytes]) -> None:
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

    def _is_paused(self) -> bool:
        until_s = self._paused_until_s
        return until_s is not None and self._clock() < until_s

    def _give_way(self) -> None:
        self._closing.wait(_GIVE_WAY_S)


def start_recorder(
    settings: RecordingSettings, *, clock: Callable[[], float], knows_model: Callable[[str], bool]
) -> Recorder:
    """A recorder as configured, its file open. Raises ConfigError; a full disk is no reason not to start."""
    path = Path(settings.path)
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


def default_key_file(path: Path) -> Path:
    """Where the key is when no file is named: beside the recording."""
    return path.with_name(f"{path.name}.key")
