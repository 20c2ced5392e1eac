"""What a worker process and its router say to each other: frames of a length, a kind and a payload.

Both ends are ours and of one version; what does not fit is a fault of the other end, which is then given up.
"""

import struct
from enum import IntEnum

_HEADER = struct.Struct("!IB")
HEADER_BYTES = _HEADER.size
# A body of 1 MiB goes out; four bytes a token come back, and a token has a byte at least.
MAX_PAYLOAD_BYTES = 8 * 2**20


class Kind(IntEnum):
    """What a frame is. From the router: START, CHAT … INVOCATIONS. From the worker: all others."""

    START = 1  # options, JSON
    CHAT = 2  # a request's body
    COMPLETIONS = 3
    INVOCATIONS = 4
    READY = 10  # facts, JSON: see `worker`
    FAILED = 11  # the files cannot be used: a message
    TOKENS = 20  # ids, four bytes each
    NOT_EXACT = 21  # cannot be told exactly: a reason
    TEMPLATE_ERROR = 22  # the template raised: kind and line
    FAULT = 30  # said before the answer: a live check failed, a message
    CHECKED = 31  # said before the answer: a live check was made


def frame(kind: Kind, payload: bytes) -> bytes:
    """One frame."""
    return _HEADER.pack(len(payload), kind) + payload


def header(data: bytes | bytearray) -> tuple[int, Kind]:
    """Length of the payload, and kind, from `HEADER_BYTES` bytes at the front of `data`. Raises ValueError."""
    n_bytes, kind = _HEADER.unpack_from(data)
    if n_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {n_bytes} bytes")
    return n_bytes, Kind(kind)
