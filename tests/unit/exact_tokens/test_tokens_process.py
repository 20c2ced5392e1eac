"""One worker process: what keeps it from being started is told so that its keeper tries again."""

import errno
import os
import socket

import pytest

from prefixroute.exact_tokens.options import Options
from prefixroute.exact_tokens.process import WorkerGoneError, WorkerProcess


async def test_without_free_descriptors_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def socketpair() -> tuple[socket.socket, socket.socket]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", socketpair)
    worker = WorkerProcess(lambda: None, lambda _kind, _text: None)
    with pytest.raises(WorkerGoneError, match="no process can be started"):
        await worker.start(Options("nowhere"))
    assert await worker.close() == "its process was never started"
