"""Large blocks go back to the system, however large the ones before were."""

import ctypes.util
import subprocess
import sys
from pathlib import Path

import pytest

# What it prints: resident MiB before and after bodies of growing sizes, each outlived by a small block.
PROGRAM = """
import sys
from prefixroute.memory import bound_heap
if sys.argv[1] == "bound":
    assert bound_heap()
def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20
list(map(bytearray, range(1000)))
before = resident_mib()
keep = []
for _ in range(3):
    bodies = []
    for size in range(5, 25):
        bodies.append(bytes(size * 2**20))
        keep.append(bytes(40_000))
    del bodies
print(resident_mib() - before)
"""


def grown_mib(how: str) -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or ctypes.util.find_library("c") is None, reason="needs Linux and a libc"
)
def test_memory_of_large_bodies_goes_back() -> None:
    assert grown_mib("bound") < 30
