"""What the core costs one request, from its body to the end of its lease: `python -m benchmarks.cycle --help`.

The calls are those of the proxy, in their order: read the prompt, make it comparable, enter, answered, first byte, the
answer's continuation, computed, reported, end. The router is as configured by default, its maps are full, and eight
requests are in flight at any time (one, of long bodies: more would be held). Every second request is streamed. *Cold*:
nobody has seen the conversation. *Warm*: its previous turn was answered just before.

A figure is the least over the passes, as a mean over the bodies: what disturbs the machine makes it only longer. Other
figures of other runs, of an older tree for instance, are comparable when both run in turns.
"""

import argparse
import gc
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter_ns

from benchmarks.bodies import MODEL, make_text
from benchmarks.tables import markdown
from prefixroute.build import make_router
from prefixroute.config.settings import Settings
from prefixroute.core.lease import Lease
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.core.router import Router

SEED = 7
TURN_BYTES = 500
MAX_TURNS = 15
N_SYSTEM_PROMPTS = 8
LONG_BYTES = 64 << 10
SIZES = {
    "2–8 KB": (2 << 10, 3 << 10, 4 << 10, 6 << 10, 8 << 10) * 4,
    "32 KB": (32 << 10,) * 8,
    "500 KB": (500 << 10,) * 4,
}
STEPS = (
    *("read_prompt", "Router.read", "Router.enter", "answered", "first_byte"),
    *("continued", "computed", "reported", "end", "**all**"),
)
# What 630 bytes of an answer become in the next turn's key.
ANSWER = b"\x1eassistant\x1f" + b"word of the answer " * 33


def conversation(size_bytes: int, system_prompt: str, rng: Random, *, streamed: bool) -> tuple[bytes, bytes]:
    """A chat body of about this size, and what it was one turn earlier."""
    n_turns = max(1, min(MAX_TURNS, (size_bytes - len(system_prompt)) // TURN_BYTES))
    n_turns -= 1 - n_turns % 2  # the user has the last word
    messages = [{"role": "system", "content": system_prompt}]
    turn_bytes = (size_bytes - len(system_prompt)) // n_turns - len('{"role": "assistant", "content": ""}, ')
    messages += [
        {"role": "assistant" if turn % 2 else "user", "content": make_text(turn_bytes, rng)} for turn in range(n_turns)
    ]
    options = {"temperature": 0.7, "max_tokens": 256} | ({"stream": True} if streamed else {})
    now, before = ({"model": MODEL, "messages": m} | options for m in (messages, messages[:-2] or messages))
    return json.dumps(now).encode(), json.dumps(before).encode()


def make_full_router(n_instances: int) -> Router:
    rng = Random(SEED)
    urls = [{"url": f"http://10.0.0.{n}:8000"} for n in range(n_instances)]
    router = make_router(Settings.model_validate({"fleet": {"instances": urls}}), rng, seed=SEED)
    for instance in router.fleet.instances:
        router.fleet.probe_passed(instance.name)
        router.fleet.learned_models(instance.name, frozenset({MODEL}))
        router.index.record([rng.getrandbits(64) for _ in range(4_000)], instance.slot)
    router.audit.ladder.dispatched([rng.getrandbits(64) for _ in range(300_000)])
    return router


@dataclass(slots=True)
class Run:
    """One workload on one router."""

    router: Router
    bodies: Sequence[tuple[bytes, bytes]]
    max_flying: int
    now_s: float = 1_000.0
    flying: deque[tuple[int | None, list[int], Lease]] = field(default_factory=deque)
    least_ns: list[list[int]] = field(default_factory=list)

    def go(self, n_passes: int, *, warm: bool) -> list[float]:
        """µs of each of `STEPS`."""
        self.least_ns = [[1 << 60] * len(STEPS) for _ in self.bodies]
        gc.collect()
        gc.disable()
        try:
            for n in range(n_passes):
                # Another tenant in each pass: what the last one left is nobody's prefix.
                tenant = n.to_bytes(8)
                if warm:
                    for _, before in self.bodies:
                        self.begin(None, before, tenant)
                for number, (body, _) in enumerate(self.bodies):
                    self.begin(number, body, tenant)
            while self.flying:
                self.finish(*self.flying.popleft())
        finally:
            gc.enable()
        return [sum(step) / len(self.bodies) / 1_000 for step in zip(*self.least_ns, strict=True)]

    def begin(self, number: int | None, body: bytes, tenant: bytes) -> None:
        """`number` None: not to be timed."""
        # As fast as a fleet of four computes it, so that nobody is held.
        self.now_s += max(0.02, len(body) / 12_000)
        router, clock = self.router, perf_counter_ns
        t0 = clock()
        prompt = read_prompt(Api.CHAT, body, session_id=None, prefix_aware_id=None, encoded=False, tenant=tenant)
        t1 = clock()
        request = router.read(prompt, None)
        t2 = clock()
        lease = router.enter(request, now_s=self.now_s, grant=lambda _lease: None)
        t3 = clock()
        if not isinstance(lease, Lease):
            raise TypeError("the request is held: there is too much load")
        t4 = clock()
        lease.answered()
        t5 = clock()
        lease.first_byte(self.now_s + len(body) / 48_000, learn=True)
        t6 = clock()
        self.flying.append((number, [t1 - t0, t2 - t1, t3 - t2, t5 - t4, t6 - t5], lease))
        if len(self.flying) > self.max_flying:
            self.finish(*self.flying.popleft())

    def finish(self, number: int | None, took_ns: list[int], lease: Lease) -> None:
        clock = perf_counter_ns
        t0 = clock()
        chain = self.router.continued(lease.request, ANSWER)
        t1 = clock()
        lease.computed(chain)
        t2 = clock()
        lease.reported(lease.decision.candidate.matched_tokens, lease.request.n_tokens)
        t3 = clock()
        lease.end()
        t4 = clock()
        if number is not None:
            took_ns += (t1 - t0, t2 - t1, t3 - t2, t4 - t3)
            took_ns.append(sum(took_ns))
            self.least_ns[number] = list(map(min, self.least_ns[number], took_ns))


def measured_us(name: str, n_instances: int, n_passes: int, *, warm: bool) -> list[float]:
    sizes, rng = SIZES[name], Random(SEED)
    system_prompts = [make_text(min(sizes) // 3, rng) for _ in range(N_SYSTEM_PROMPTS)]
    bodies = [
        conversation(size, system_prompts[n % N_SYSTEM_PROMPTS], rng, streamed=n % 2 == 0)
        for n, size in enumerate(sizes)
    ]
    run = Run(make_full_router(n_instances), bodies, max_flying=1 if max(sizes) > LONG_BYTES else 8)
    return run.go(n_passes, warm=warm)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cycle", description="Cost of one request in the core, µs, step by step."
    )
    parser.add_argument("--instances", type=int, nargs="+", default=[4, 32], help="fleet sizes (default 4 32)")
    parser.add_argument("--passes", type=int, default=60, help="passes over all bodies (default %(default)s)")
    options = parser.parse_args(arguments)
    for name in SIZES:
        columns = {
            f"{'warm' if warm else 'cold'}, {n} instances": measured_us(name, n, options.passes, warm=warm)
            for n in options.instances
            for warm in (False, True)
        }
        rows = [
            [step, *(f"{figure:,.1f}" for figure in figures)]
            for step, *figures in zip(STEPS, *columns.values(), strict=True)
        ]
        print(markdown([f"{name}, µs", *columns], rows), end="\n\n")


if __name__ == "__main__":
    main()
