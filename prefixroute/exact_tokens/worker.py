"""The process that renders and encodes: `python -m prefixroute.exact_tokens.worker FD`, a socket to its router.

It takes one job at a time and is ended by the kernel (SIGALRM's default action) when one takes longer than it may,
be it in Python or in a library; and by the end of its input when the router is gone. It writes nothing anywhere else:
what it handles are prompts.
"""

import gc
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

from prefixroute.core.prompt import Api
from prefixroute.errors import ConfigError
from prefixroute.exact_tokens.exact import ExactTokenizer, NotExactError, Options, template_fault
from prefixroute.exact_tokens.frames import HEADER_BYTES, Kind, frame, header

# Reading the largest tokenizers takes 3 s, proving fastokens on them as long again; on a busy machine, more.
LOAD_LIMIT_S = 120.0
# The longest prompt (1 MiB of text in one message) takes 0.3 s by the slower library.
JOB_LIMIT_S = 5.0
# Above what any tokenizer needs. A template that doubles a string forty times should end here, not in swap.
_MAX_DATA_BYTES = 6 * 2**30

_APIS = {Kind.CHAT: Api.CHAT, Kind.COMPLETIONS: Api.COMPLETIONS, Kind.INVOCATIONS: Api.INVOCATIONS}


def main(fd: int) -> None:
    """Serves the router at the other end of the socket until it closes."""
    # Meant for the router, which may have requests to end yet; its going is ours.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _bound_memory()
    with socket.socket(fileno=fd) as router:
        first = _receive(router)
        if first is None:
            return
        options = json.loads(first[1])
        job_limit_s = options.pop("job_limit_s", JOB_LIMIT_S)
        tokenizer = _load(router, options)
        if tokenizer is None:
            return
        # The first time that the template runs: the limit of a job is long enough, and a loop ends here.
        signal.setitimer(signal.ITIMER_REAL, job_limit_s)
        tokenizer.learn_cuts()
        signal.setitimer(signal.ITIMER_REAL, 0)
        while (job := _receive(router)) is not None:
            signal.setitimer(signal.ITIMER_REAL, job_limit_s)
            n_checks = tokenizer.n_checks
            answer = _answer(tokenizer, *job)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if tokenizer.n_checks != n_checks:
                answer = frame(Kind.CHECKED, b"") + answer
            router.sendall(answer)


def _load(router: socket.socket, options: dict[str, Any]) -> ExactTokenizer | None:
    signal.setitimer(signal.ITIMER_REAL, LOAD_LIMIT_S)
    try:
        tokenizer = ExactTokenizer(
            Options(**options), on_fault=lambda what: router.sendall(frame(Kind.FAULT, what.encode()))
        )
    except ConfigError as error:
        router.sendall(frame(Kind.FAILED, str(error).encode()))
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    # What was read stays for good: the collector need not look through it again and again.
    gc.collect()
    gc.freeze()
    facts: dict[str, str] = {"library": tokenizer.library, "remark": tokenizer.remark}
    router.sendall(frame(Kind.READY, json.dumps(facts).encode()))
    return tokenizer


def _answer(tokenizer: ExactTokenizer, kind: Kind, body: bytes) -> bytes:
    try:
        return frame(Kind.TOKENS, tokenizer.encode(_APIS[kind], body))
    except NotExactError as error:
        return frame(Kind.NOT_EXACT, str(error).encode())
    except Exception as error:  # noqa: BLE001  a template may raise anything; the next prompt may be fine
        return frame(Kind.TEMPLATE_ERROR, template_fault(error).encode())


def _receive(router: socket.socket) -> tuple[Kind, bytes] | None:
    """The next frame; None when the router is gone."""
    head = _exactly(router, HEADER_BYTES)
    if head is None:
        return None
    n_bytes, kind = header(head)
    payload = _exactly(router, n_bytes)
    return None if payload is None else (kind, payload)


def _exactly(router: socket.socket, n_bytes: int) -> bytes | None:
    data = bytearray(n_bytes)
    view, n_read = memoryview(data), 0
    while n_read < n_bytes:
        n = router.recv_into(view[n_read:])
        if n == 0:
            return None
        n_read += n
    return bytes(data)


def _bound_memory() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _MAX_DATA_BYTES if most == resource.RLIM_INFINITY else min(most, _MAX_DATA_BYTES)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    except (ValueError, OSError):
        return  # a platform that does not bound it


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Threads of the libraries are nobody's business any more.
    os._exit(0)
