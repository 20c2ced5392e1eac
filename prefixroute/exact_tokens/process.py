"""One worker process, as the router sees it: started, asked, and gone."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import cast

from prefixroute.exact_tokens.frames import HEADER_BYTES, Kind, frame, header
from prefixroute.exact_tokens.options import Options

# No keys among them. TZ: templates that show a date should show the engine's.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_TIME")
# One job at a time, on one core: the others are the router's and the engine's.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
# How long a worker that has closed its socket may take to end by itself.
_EXIT_S = 1.0


class WorkerGoneError(Exception):
    """The process ended, or never began."""


class UnusableFilesError(Exception):
    """The tokenizer's files cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's answer to one job."""

    kind: Kind
    payload: bytes


class WorkerProcess(asyncio.Protocol):
    """Takes one job at a time. `start` once, then `ask` while `idle`; `close` at the end.

    A job goes on when its asker leaves: the worker is idle again when it has answered. `on_idle`: called then.
    `on_word(kind, text)`: a live check was made (CHECKED) or failed (FAULT). `gone`: done when the process has ended.
    """

    def __init__(self, on_idle: Callable[[], None], on_word: Callable[[Kind, str], None]) -> None:
        self.idle = False
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_idle = on_idle
        self._on_word = on_word
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._reply: asyncio.Future[Reply] | None = None

    async def start(self, options: Options, *, job_limit_s: float | None = None) -> dict[str, str]:
        """Starts the process; what it says of itself when it is ready. Raises UnusableFilesError, WorkerGoneError."""
        try:
            ours, its = socket.socketpair()
        except OSError as error:
            raise WorkerGoneError(f"no process can be started ({error.strerror})") from error
        ours.setblocking(False)
        # Starting a process takes milliseconds, for which the loop would wait.
        starting = asyncio.ensure_future(asyncio.to_thread(_start, its))
        try:
            self._process = await asyncio.shield(starting)
        except OSError as error:
            ours.close()
            raise WorkerGoneError(f"no process can be started ({error.strerror})") from error
        except asyncio.CancelledError:
            ours.close()
            with suppress(OSError):
                self._process = await starting  # for `close` to end
            raise
        finally:
            its.close()
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        told = asdict(options) | ({} if job_limit_s is None else {"job_limit_s": job_limit_s})
        reply = await self._ask(Kind.START, json.dumps(told).encode())
        if reply.kind is not Kind.READY:
            raise UnusableFilesError(reply.payload.decode(errors="replace"))
        facts: dict[str, str] = json.loads(reply.payload)
        return facts

    async def ask(self, kind: Kind, body: bytes) -> Reply:
        """The answer to one job. Raises WorkerGoneError when the process ends over it."""
        return await self._ask(kind, body)

    async def _ask(self, kind: Kind, payload: bytes) -> Reply:
        if self._transport is None or self.gone.done():
            raise WorkerGoneError("the process has ended")
        self.idle = False
        self._reply = asyncio.get_running_loop().create_future()
        # An asker that leaves must not take the answer's place with it: the next one would get it.
        self._transport.write(frame(kind, payload))
        return await asyncio.shield(self._reply)

    async def close(self) -> str:
        """Ends the process, and waits for that. How it had ended before, if it had, in words."""
        if self._transport is not None:
            self._transport.abort()
        ending = asyncio.ensure_future(asyncio.to_thread(_end, self._process, self.gone.done()))
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending  # no process is left behind
            raise

    # ------------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= HEADER_BYTES:
            try:
                n_bytes, kind = header(self._received)
            except ValueError:
                if self._transport is not None:
                    self._transport.abort()
                return
            end = HEADER_BYTES + n_bytes
            if len(self._received) < end:
                return
            payload = bytes(self._received[HEADER_BYTES:end])
            del self._received[:end]
            self._take(kind, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle = False
        reply, self._reply = self._reply, None
        if reply is not None and not reply.done():
            reply.set_exception(WorkerGoneError("the process has ended"))
            reply.exception()  # whoever asked may have left
        if not self.gone.done():
            self.gone.set_result(None)

    def _take(self, kind: Kind, payload: bytes) -> None:
        if kind in (Kind.FAULT, Kind.CHECKED):
            self._on_word(kind, payload.decode(errors="replace"))
            return
        reply, self._reply = self._reply, None
        if reply is not None and not reply.done():
            reply.set_result(Reply(kind, payload))
        self.idle = True
        self._on_idle()


def _end(process: subprocess.Popen[bytes] | None, is_going: bool) -> str:
    if process is None:
        return "its process was never started"
    if is_going:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_S)
    code = process.poll()
    process.kill()
    process.wait()
    if code == -signal.SIGALRM:
        return "a prompt took its process longer than it may (a template that loops, or a fault of a library)"
    return f"its process ended ({'killed here' if code is None else _in_words(code)})"


def _in_words(code: int) -> str:
    try:
        return f"status {code}" if code >= 0 else signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _start(its: socket.socket) -> subprocess.Popen[bytes]:
    fd = its.fileno()
    return subprocess.Popen(  # noqa: S603  our own interpreter and module
        [sys.executable, "-m", "prefixroute.exact_tokens.worker", str(fd)],
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        # A library that panics prints what it was working on: somebody's prompt.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | _ONE_THREAD,
    )
