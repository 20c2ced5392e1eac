"""Memory that large bodies took goes back to the system when they are gone.

glibc raises its threshold for own mappings to the size of whatever large block was freed last. After one body of
20 MB, bodies come out of the heap, where any small block that outlives them keeps all of it resident.
"""

import ctypes
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Bodies above it have a mapping of their own, which costs page faults: more than a chat needs, less than images.
_MMAP_BYTES = 4 * 1024 * 1024
_TRIM_BYTES = 8 * 1024 * 1024


def bound_heap() -> bool:
    """Fixes both thresholds for this process; False where there is no glibc to be told."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # musl has no such trouble
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))


def give_back() -> None:
    """Gives back what is free in the middle of the heap: the pieces in which large bodies come leave holes there.

    Takes some milliseconds, during which others wait for memory: now and then, and not on the event loop.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
