"""The collector's policy holds for the whole process, so it is tried in one of its own."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
from prefixroute.collector import THRESHOLDS, settle

class Node:
    def __init__(self):
        self.itself = self

old = [Node() for _ in range(1000)]
settle()
assert gc.get_threshold() == THRESHOLDS
assert gc.get_freeze_count() > 1000
assert not any(one is old[0] for one in gc.get_objects()), "what was there is looked at again"

first = weakref.ref(Node())
assert first() is not None
kept = [Node() for _ in range(2 * THRESHOLDS[0])]
assert first() is None, "garbage stays for good"
"""


def test_what_was_there_is_left_alone_and_later_garbage_is_found() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
