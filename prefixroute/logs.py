r"""Lines on standard error: `key=value` for people, or JSON for machines.

- **The event loop never waits for whoever reads them.** Standard error is often a pipe, and a stalled reader
  (a log driver, a paused terminal) would stop every stream. So lines are made where they arise and written by a
  thread, many at a time, from a backlog of bounded size; above it lines are dropped and counted.
- **One record, one line**, except for tracebacks in text. Whatever could end a line, move a cursor or turn text
  around is escaped, wherever it comes from.
- **Nothing a client wrote.** Of a request only what is from closed sets, its checked id, and a model name that an
  instance lists. Of a foreign exception only its type and place: its text may quote a header or a body.
"""

import asyncio
import json
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TextIO

from prefixroute.backlog import Backlog
from prefixroute.errors import PrefixRouteError

# Lines not written yet. Above 20,000 requests, which no reader is that much behind for a good reason.
MAX_BACKLOG_CHARS = 8 * 1024 * 1024
MAX_MESSAGE_CHARS = 8192
MAX_FRAMES = 40
MAX_EXCEPTIONS = 10
# How long the writer lets lines gather: one wake-up and one write for all of them.
_GATHER_S = 0.02
# How long the end of the service may be held up by a reader that does not read.
_FLUSH_S = 1.0

# Controls (C0, DEL, C1), line and paragraph separators, bidirectional marks, lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_is_plain = re.compile(r"[!#-<>-\[\]-~]+").fullmatch
_MILLISECONDS = tuple(f".{n:03d}Z" for n in range(1000))
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def configure_logs(log_format: Literal["text", "json"], level: str, stream: TextIO | None = None) -> "LineHandler":
    """Sends all logging to `stream` (standard error). A second call replaces the first one's handler.

    Close the handler at the end of the service: it writes what is left.
    """
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, LineHandler):
            root.removeHandler(handler)
            handler.close()
    handler = LineHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root.addHandler(handler)
    set_level(level)
    return handler


def flush_logs() -> None:
    """Waits until what was logged so far is written, for a bounded time, before an end that closes nothing."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def set_level(level: str) -> None:
    """From now on, the least severe level that is written."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for library in ("aiohttp", "asyncio"):
        # Below warnings they tell of single connections and callbacks.
        logging.getLogger(library).setLevel(max(root.level, logging.WARNING))


def log_loop_exception(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For `loop.set_exception_handler`: the default one prints the exception's text and the task's arguments."""
    exception = context.get("exception")
    logging.getLogger("asyncio").error("%s", context.get("message", "unhandled exception"), exc_info=exception or False)


def only_line_handler(logger: logging.Logger, level: int) -> "LineHandler | None":
    """The handler that a line of `logger` goes to, if there is no other and no filter, and it takes this level."""
    found: logging.Handler | None = None
    at: logging.Logger | None = logger
    while at is not None:
        if at.handlers:
            if found is not None or len(at.handlers) > 1:
                return None
            found = at.handlers[0]
        at = at.parent if at.propagate else None
    # Not one derived from it: who knows what that does with a record.
    if type(found) is not LineHandler or found.level > level or found.filters or logger.filters:
        return None
    return found


class LineHandler(logging.Handler):
    """Formats records where they arise and has a thread write them; see the module's rules."""

    def __init__(self, stream: TextIO, *, max_backlog_chars: int = MAX_BACKLOG_CHARS) -> None:
        super().__init__()
        self.n_dropped = 0
        """Lines that the reader was too slow for."""
        self._stream = stream
        self._fd = _fd(stream)
        self._n_told = 0
        self._backlog: Backlog[str] = Backlog(
            "log-writer",
            self._write_lines,
            size_of=len,
            max_size=max_backlog_chars,
            gather_s=_GATHER_S,
            patience_s=_FLUSH_S,
            at_end=lambda: self._write_lines([]),
        )

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  arguments that do not fit the message: no reason to fail what was logged
            line = f"a record of {record.name} at {record.filename}:{record.lineno} could not be formatted\n"
        self.write_line(line)

    def write_line(self, line: str) -> None:
        """A line that is made already, with its end; past level and filters. By any thread."""
        if not self._backlog.put(line):
            self.n_dropped += 1

    def flush(self) -> None:
        """Waits until what was logged so far is written, for a bounded time. Blocks: not for the event loop."""
        self._backlog.flush()

    def close(self) -> None:
        """Writes what is left, for a bounded time, and stops the thread. Later records are dropped."""
        self._backlog.close()
        super().close()

    def _write_lines(self, lines: list[str]) -> None:
        dropped = [self._dropped_line()] if self.n_dropped > self._n_told else []
        try:
            self._write("".join(lines + dropped))
        except (OSError, ValueError):
            self.n_dropped += len(lines) + len(dropped)  # nobody listens any more

    def _write(self, text: str) -> None:
        if self._fd is None:
            self._stream.write(text)
            self._stream.flush()
            return
        # Past the stream and its lock: a write that never ends would hold it, and the interpreter aborts at exit
        # when it cannot flush standard error.
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # whoever started us shares the pipe and does not block on it
                if self._backlog.rest(_GATHER_S):
                    raise

    def _dropped_line(self) -> str:
        n_dropped = self.n_dropped
        message = f"{n_dropped - self._n_told} lines were dropped: nobody read them in time"
        self._n_told = n_dropped
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, message, None, None))


class _LineFormatter(logging.Formatter):
    """What both formats share: the time, the message with its bound, and tracebacks without foreign texts."""

    def __init__(self) -> None:
        super().__init__()
        self._second = (-1, "")

    def time_text(self, at_s: float) -> str:
        """Unix time as lines have it."""
        # Two threads at the turn of a second both store a pair that is right.
        second, text = self._second
        since_s = at_s - second
        if not 0 <= since_s < 1:
            second = int(at_s)
            since_s = at_s - second
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = (second, text)
        return text + _MILLISECONDS[int(since_s * 1000)]

    def _message(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if len(message) > MAX_MESSAGE_CHARS:
            return f"{message[:MAX_MESSAGE_CHARS]}… ({len(message)} characters)"
        return message


class TextFormatter(_LineFormatter):
    """`TIME level logger: message key=value …`; None is left out; a traceback follows, each line behind `  | `."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.time_text(record.created)} {record.levelname.lower()} {record.name}"
        line = f"{head}: {escaped(self._message(record))}{text_pairs(getattr(record, 'fields', {}))}"
        if record.exc_info and record.exc_info[1] is not None:
            line += "".join([f"\n  | {escaped(part)}" for part in traceback_lines(record.exc_info[1])])
        return line + "\n"


class JsonFormatter(_LineFormatter):
    """One object a line, ASCII only: `time`, `level`, `logger`, `message`, the fields, and `exception`."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = json.JSONEncoder(separators=(",", ":"), default=str).encode

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.time_text(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = "\n".join(traceback_lines(record.exc_info[1]))
        return self.encode(line) + "\n"


def escaped(text: str) -> str:
    """`text` on one line, without anything that a terminal or a log reader could obey."""
    return _UNSAFE.sub(_escape, text)


def traceback_lines(exception: BaseException) -> list[str]:
    """The exception and what led to it, the first cause first: types and places, texts only of our own errors and
    the operating system's. Bounded in frames and exceptions."""
    return [line for part in list(_chain(exception))[:MAX_EXCEPTIONS][::-1] for line in _one_traceback(part)]


def _chain(exception: BaseException) -> Iterator[BaseException]:
    """The exception, its causes, and the members of groups; each once."""
    seen: set[int] = set()
    to_see: list[BaseException | None] = [exception]
    while to_see:
        one = to_see.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        to_see.append(one.__cause__ if one.__suppress_context__ else one.__context__)
        if isinstance(one, BaseExceptionGroup):
            to_see += reversed(one.exceptions)


def _one_traceback(exception: BaseException) -> Iterator[str]:
    place = exception.__traceback__
    frames: deque[str] = deque(maxlen=MAX_FRAMES)
    while place is not None:
        code = place.tb_frame.f_code
        frames.append(f"  {code.co_filename}:{place.tb_lineno} in {code.co_qualname}")
        place = place.tb_next
    yield from frames
    kind = type(exception)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(exception, PrefixRouteError):
        yield f"{name}: {exception}"
    elif isinstance(exception, OSError) and exception.strerror:
        yield f"{name}: {exception.strerror}"
    else:
        yield name


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return _SHORT_ESCAPES.get(character) or (
        f"\\x{ord(character):02x}" if ord(character) < 0x100 else f"\\u{ord(character):04x}"
    )


def text_pairs(fields: Mapping[str, object]) -> str:
    """` key=value` for each field that is not None."""
    return "".join([f" {key}={text_value(value)}" for key, value in fields.items() if value is not None])


def text_value(value: object) -> str:
    """A value as text has it."""
    if value is True:
        return "true"
    if value is False:
        return "false"
    return quoted(str(value))


def quoted(text: str) -> str:
    """`text` as it is, or in quotes where it could be taken for more than one word."""
    if _is_plain(text):
        return text
    return '"' + escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _fd(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # in memory, or closed
        return None
