"""Compares proxies on one machine: `python -m benchmarks.proxy --help`. README.md says how to read it.

Everybody is measured in turn, in every round, in an order that is reversed each second round; who is not
measured is paused. Only the loopback is used.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bodies import write_bodies
from benchmarks.load import LOCKSTEP, WORKLOADS, LoadGenerator, Workload, build_programs
from benchmarks.peers import Peer, RunningPeer, known_peers, started
from benchmarks.processes import BenchmarkError, peak_rss_bytes, raise_open_files_limit, reset_peak_rss, waited_s
from benchmarks.tables import BASELINE, Measurement, Results, detail_table, notes, summary_table
from benchmarks.venvs import describe_python
from benchmarks.verdicts import verdict_table

WORK = Path(__file__).parent / ".work"


@dataclass(frozen=True, slots=True)
class Cores:
    proxy: int
    load: int


def name_list(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))


def workload_list(text: str) -> list[Workload]:
    unknown = [name for name in name_list(text) if name not in WORKLOADS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)} (there are {', '.join(WORKLOADS)})")
    return [WORKLOADS[name] for name in name_list(text)]


def peer_to_start(text: str) -> Peer:
    name, _, rest = text.partition(":")
    port, _, command = rest.partition(":")
    if not (name and port.isdecimal() and command):
        raise argparse.ArgumentTypeError(f"not NAME:PORT:COMMAND: {text}")
    return Peer(name, int(port), tuple(shlex.split(command)))


def core_pair(text: str) -> Cores:
    allowed = os.sched_getaffinity(0)
    numbers = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(numbers) != 2 or not set(numbers) <= allowed:
        raise argparse.ArgumentTypeError(f"not PROXY,LOAD out of the cores {sorted(allowed)}: {text}")
    return Cores(*numbers)


def first_cores() -> Cores:
    allowed = sorted(os.sched_getaffinity(0))
    return Cores(proxy=allowed[0], load=allowed[1] if len(allowed) > 1 else allowed[0])


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a positive number: {text}")
    return int(text)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proxy", description="Compare proxies: CPU, latency, memory, errors."
    )
    parser.add_argument(
        "--peers",
        type=name_list,
        default="direct,relay,nginx,prefixroute,prefixroute-aiohttp,vllm-router",
        metavar="NAME,…",
        help="default: %(default)s; '' for none but --start; further: vllm-router-cache, haproxy",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PROGRAM",
        help="runs PrefixRoute; has to have what requirements.txt lists; default: this one",
    )
    parser.add_argument(
        "--start",
        type=peer_to_start,
        action="append",
        default=[],
        metavar="NAME:PORT:COMMAND",
        help="another proxy, listening on PORT in front of http://127.0.0.1:8101 … 8104; may be repeated",
    )
    parser.add_argument(
        "--tests",
        type=workload_list,
        default=",".join(WORKLOADS),
        metavar="NAME,…",
        help="default: %(default)s",
    )
    parser.add_argument("--rounds", type=positive_int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--cores",
        type=core_pair,
        default=first_cores(),
        metavar="PROXY,LOAD",
        help="default: the first two that this process may use",
    )
    parser.add_argument(
        "--load-spins",
        action="store_true",
        help="the load generator does not sleep, so that no proxy pays for waking it (see README.md)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="every measurement; default: in benchmarks/.work/results"
    )
    return parser


def choose_peers(names: Sequence[str], to_start: Sequence[Peer], known: dict[str, Peer]) -> list[Peer]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchmarkError(f"unknown peers: {', '.join(unknown)} (there are {', '.join(known)})")
    peers = [known[name] for name in names] + list(to_start)
    if len({peer.name for peer in peers}) < len(peers) or len({peer.port for peer in peers}) < len(peers):
        raise BenchmarkError("two peers have the same name or port")
    if not peers:
        raise BenchmarkError("no peers to measure")
    return peers


def measure_peer(
    running: RunningPeer, workloads: Sequence[Workload], load: LoadGenerator, round_number: int
) -> list[Measurement]:
    peer = running.peer
    measurements = []
    with running.resumed() as pids:
        for workload in workloads:
            port, measured_pids = peer.port, pids
            if workload.interval_us == LOCKSTEP and peer.lockstep_port is not None:
                port, measured_pids = peer.lockstep_port, []
            reset_peak_rss(pids)
            waits_s = {pid: waited_s(pid) for pid in (load.pid, *pids)}
            began_s = time.monotonic()
            sample = load.run(workload, port, measured_pids)
            took_s = time.monotonic() - began_s
            running.check_alive()
            measurements.append(
                Measurement(
                    peer=peer.name,
                    workload=workload.name,
                    round=round_number,
                    sample=sample,
                    peak_rss_bytes=peak_rss_bytes(pids),
                    waited_ratio=max(waited_s(pid) - before_s for pid, before_s in waits_s.items()) / took_s,
                )
            )
    return measurements


def measure(
    peers: Sequence[Peer],
    workloads: Sequence[Workload],
    rounds: int,
    cores: Cores,
    into: list[Measurement],
    *,
    load_spins: bool = False,
) -> None:
    """All rounds. `into` grows by a round at a time, so that an interrupted run has a result."""
    only_baseline = [workload for workload in workloads if workload.name == "ttft"]
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(LoadGenerator(WORK, cores.load, spins=load_spins))
        plan = [(stack.enter_context(started(peer, WORK, cores.proxy)), workloads) for peer in peers]
        if only_baseline and BASELINE not in {peer.name for peer in peers}:
            baseline = known_peers(WORK)[BASELINE]
            plan.insert(0, (stack.enter_context(started(baseline, WORK, cores.proxy)), only_baseline))
        # First of all when the stack unwinds: a second Ctrl-C must not leave processes behind.
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.SIG_IGN)
        for round_number in range(rounds):
            finished: list[Measurement] = []
            for running, own_workloads in plan if round_number % 2 == 0 else reversed(plan):
                print(f"round {round_number + 1} of {rounds}: {running.peer.name}", file=sys.stderr)
                finished += measure_peer(running, own_workloads, load, round_number)
            into += finished


def machine(cores: Cores, python: str) -> dict[str, object]:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "n_cores": os.cpu_count(),
        "proxy_core": cores.proxy,
        "load_core": cores.load,
        "kernel": platform.release(),
        "python": python,
    }


def write_json(
    path: Path,
    started_at: datetime.datetime,
    peers: Sequence[Peer],
    cores: Cores,
    results: Results,
    *,
    python: str,
    load_spins: bool,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "started_at": started_at.isoformat(timespec="seconds"),
        "machine": machine(cores, python),
        "load_spins": load_spins,
        "commands": {peer.name: shlex.join(peer.command) for peer in peers},
        "workloads": [asdict(WORKLOADS[name]) for name in results.workloads],
        "measurements": [asdict(measurement) for measurement in results.measurements],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def report(results: Results, cores: Cores, *, python: str, load_spins: bool) -> str:
    facts = machine(cores, python)
    place = (
        f"proxy on core {cores.proxy}, load on core {cores.load}"
        if cores.proxy != cores.load
        else f"proxy and load share core {cores.proxy}: compare CPU only"
    )
    lines = [
        f"{facts['cpu']}, Linux {facts['kernel']}, Python {facts['python']}; {place}; rounds: {results.n_rounds}.",
        *(["", "The load generator did not sleep (`--load-spins`)."] if load_spins else []),
        "",
        verdict_table(results),
        "",
        summary_table(results),
        "",
        detail_table(results),
    ]
    lines += ["", *(f"- {note}" for note in notes(results, one_core=cores.proxy == cores.load))]
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code. A run that is interrupted or fails reports the rounds it has finished."""
    started_at = datetime.datetime.now(datetime.UTC)
    cores: Cores = arguments.cores
    if cores.proxy == cores.load and arguments.load_spins:
        raise BenchmarkError("--load-spins would take the proxy's only core: it needs two")
    if cores.proxy == cores.load:
        print("proxy and load share one core: times and rates say little, CPU does", file=sys.stderr)
    for folder in ("bodies", "bin", "logs"):
        (WORK / folder).mkdir(parents=True, exist_ok=True)
    peers = choose_peers(arguments.peers, arguments.start, known_peers(WORK, arguments.python))
    raise_open_files_limit()
    python = describe_python(arguments.python)
    build_programs(WORK / "bin")
    for peer in peers:
        peer.require_installed()
    write_bodies(WORK / "bodies")
    measurements: list[Measurement] = []
    exit_code = 0
    try:
        measure(peers, arguments.tests, arguments.rounds, cores, measurements, load_spins=arguments.load_spins)
    except KeyboardInterrupt:
        exit_code = 130
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        exit_code = 1
    if measurements:
        results = Results(measurements)
        path = arguments.json or WORK / "results" / f"proxy-{started_at:%Y%m%d-%H%M%S}.json"
        write_json(path, started_at, peers, cores, results, python=python, load_spins=arguments.load_spins)
        print(report(results, cores, python=python, load_spins=arguments.load_spins))
        print(f"every measurement: {path}", file=sys.stderr)
    return exit_code


def main() -> int:
    # Stopped by another program, it cleans up as it does on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.platform != "linux":
        print("this benchmark needs Linux", file=sys.stderr)
        return 1
    try:
        return run(argument_parser().parse_args())
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
