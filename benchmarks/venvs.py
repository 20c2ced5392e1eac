"""Python environments: that of PrefixRoute, and those of programs from the package registry.

The latter have a virtual environment each, made when it is first asked for.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import BenchmarkError

CHECKOUT = Path(__file__).parent.parent
INSTALL_S = 600.0
DESCRIBE_S = 60.0
# Imports all that is needed to serve. How an interpreter was built decides how fast it is, and none can be asked that.
DESCRIBE = """
import platform, timeit
import prefixroute.cli
best_s = min(timeit.repeat("sum(i * i for i in range(10000))", number=1, repeat=200))
print(f"{platform.python_version()} ({best_s * 1e3:.2f} ms for the sum of 10,000 squares)")
"""
LOG_TAIL_LINES = 6


def describe_python(python: str) -> str:
    """Version and speed of the interpreter that is to run PrefixRoute. Raises `BenchmarkError` when it cannot."""
    if shutil.which(python) is None:
        raise BenchmarkError(f"--python: there is no program {python}")
    done = subprocess.run(
        [python, "-c", DESCRIBE], cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=DESCRIBE_S
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it is no Python"])[-1]
        raise BenchmarkError(f"--python: {python} cannot run PrefixRoute: {why}\nIt needs what requirements.txt lists")
    return done.stdout.strip()


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def require_package(package: str, folder: Path) -> None:
    """Installs the newest `package` into `folder`, once; by uv where there is one. Raises `BenchmarkError`."""
    whole = folder / ".whole"
    if whole.exists():
        return
    print(f"installing {package} into {folder} (once)", file=sys.stderr)
    # One that was interrupted, or moved.
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = str(python_of(folder))
    if shutil.which("uv") is not None:
        commands = [
            ["uv", "venv", "-q", "--python", sys.executable, str(folder)],
            ["uv", "pip", "install", "-q", "--python", python, package],
        ]
    else:
        commands = [
            [sys.executable, "-m", "venv", str(folder)],
            [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", package],
        ]
    for command in commands:
        _run(command, package)
    whole.touch()


def _run(command: list[str], package: str) -> None:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{package} was not installed within {INSTALL_S:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        tail = done.stdout.splitlines()[-LOG_TAIL_LINES:]
        raise BenchmarkError("\n".join([f"{package} cannot be installed: {' '.join(command)} says", *tail]))
