"""What a simulated fleet is asked: requests as lengths and block hashes, in the order they come."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimRequest:
    """`arrival_s`: seconds after the beginning; of a follow-up, the client's pause after the answer before.

    `after`: place in the workload of the request whose answer a follow-up waits for; it stands before this one.
    `hashes`: chained ids of the full blocks of prompt and answer; equal ids mean equal prefixes. Those of the answer
    may be left out: then no later prompt contains it.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hashes: Sequence[int]
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """`block_tokens`: what each hash stands for, in the engines' caches too."""

    name: str
    block_tokens: int
    requests: Sequence[SimRequest]
