"""Lines in files of bounded size and number: `NAME`, and before it `NAME.1`, `NAME.2`, … up to the oldest.

- Never more than `n_files` × `max_file_bytes` bytes.
- Every file begins with the header. A run goes on in the file of the one before if that has the same header.
- Lines are whole. Half a line that a full disk or a killed process left is cut off before anything is added.
- What is there and was not written by this module is never touched, and two processes never write one file. Where
  an older file would have to go, that ends the recording.
- Whoever moves the file away, to look at it, has it: a new one is begun.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prefixroute.recording.form import Header, header_of

_MAX_HEADER_BYTES = 4096
_TAIL_BYTES = 64 * 1024


class RecordingFiles:
    """Not for several threads at a time. `open` and `write` raise OSError; after that, `write` begins anew."""

    def __init__(self, path: Path, header: Header, *, max_file_bytes: int, n_files: int) -> None:
        self.path = path
        self.n_written = 0
        """Lines so far, headers not counted."""
        self._header = header
        self._max_file_bytes = max_file_bytes
        self._n_files = n_files
        self._file: int | None = None
        self._size = 0

    def open(self) -> None:
        """Makes ready to write. What an OSError's text says is for the operator."""
        self._n_older()  # better now than when the file is full
        # Not to be held up by a pipe that nobody reads.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.open(self.path, flags, 0o600)
        try:
            self._begin(self._file)
        except OSError:
            self.close()
            raise

    def write(self, lines: Iterable[bytes]) -> None:
        """Adds lines, each with its newline. Those that `n_written` does not count then are in no file."""
        if self._file is None or self._is_elsewhere(self._file):
            self.close()
            self.open()
        batch: list[bytes] = []
        n_bytes = 0
        for line in lines:
            if self._size + n_bytes + len(line) > self._max_file_bytes:
                self._add(batch)
                self._rotate()
                batch, n_bytes = [], 0
            batch.append(line)
            n_bytes += len(line)
        self._add(batch)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _begin(self, file: int) -> None:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "is being written by another process (give each router its own)") from None
        except OSError:  # a file system without locks
            pass
        self._size = status.st_size
        ours = self._header.line()
        head = os.pread(file, _MAX_HEADER_BYTES, 0)
        first, newline, _ = head.partition(b"\n")
        if not newline and ours.startswith(head):  # empty, or cut off at once
            os.ftruncate(file, 0)
            self._size = 0
            self._append(file, ours)
        elif not newline or (header := header_of(first)) is None:
            raise OSError(errno.EEXIST, "is there already and no recording (choose another path)")
        elif header != self._header:
            self._rotate()
        else:
            self._cut_half_line(file)

    def _cut_half_line(self, file: int) -> None:
        end = self._size
        while end > 0:
            begin = max(0, end - _TAIL_BYTES)
            newline = os.pread(file, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < self._size:
            os.ftruncate(file, end)
            self._size = end

    def _add(self, lines: list[bytes]) -> None:
        if lines and self._file is not None:
            self._append(self._file, b"".join(lines))
            self.n_written += len(lines)

    def _append(self, file: int, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            # All or nothing; if not even that can be done, `open` will.
            with suppress(OSError):
                os.ftruncate(file, self._size)
            self.close()
            raise
        self._size += len(data)

    def _rotate(self) -> None:
        self.close()
        last = self._n_older()
        # Left by a run that kept more, and the one that is too old now.
        for number in range(max(1, self._n_files - 1), last + 1):
            self._numbered(number).unlink(missing_ok=True)
        for number in range(min(last, self._n_files - 2), -1, -1):
            with suppress(FileNotFoundError):
                os.replace(self._numbered(number), self._numbered(number + 1))
        self.open()

    def _n_older(self) -> int:
        """Older files, numbered without a gap. Raises OSError when one of these is no recording."""
        number = 1
        while self._has_ours(number):
            number += 1
        return number - 1

    def _has_ours(self, number: int) -> bool:
        """Whether there is an older file of this number. Raises OSError for one that is no recording."""
        try:
            file = os.open(self._numbered(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            if stat.S_ISREG(os.fstat(file).st_mode):
                first, _, _ = os.pread(file, _MAX_HEADER_BYTES, 0).partition(b"\n")
                if header_of(first) is not None:
                    return True
        finally:
            os.close(file)
        raise OSError(errno.EEXIST, f"{self._numbered(number)} is in the way and no recording")

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _is_elsewhere(self, file: int) -> bool:
        """Whether the open file is no longer the one at `path`."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(file))
        except FileNotFoundError:
            return True
