"""What a policy sees and what it says.

A policy is a rule in code that picks one candidate. It gets facts as values and is blind to clock, network and
globals. A policy that needs another fact gets a field here; nobody asks which policy is running.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Protocol

from prefixroute.core.fleet import Instance
from prefixroute.core.prompt import Prompt


class Reason(Enum):
    """Why a candidate was picked. Closed: values are metric labels."""

    AFFINITY = "affinity"
    """It holds the longest match."""
    SPILL = "spill"
    """Another candidate holds a longer match, but going there costs more."""
    COLD = "cold"
    """No candidate holds any of it."""
    LOAD = "load"
    """By load alone: the strategy or the request knows no prefix."""
    SESSION = "session"
    """Its session lives there."""
    STORED = "stored"
    """It made the stored response that the request names."""
    TURN = "turn"
    """It was its turn, or its lot."""
    CUSTOM = "custom"
    """A policy of the user's own."""
    FALLBACK = "fallback"
    """The policy failed: by load."""


class Candidate:
    """An instance that may take this request, and what is known of it at this moment.

    Work is prefill in tokens at the start of a prompt (see `load.prefill_work`).
    """

    __slots__ = (
        "capacity_tokens",
        "exact",
        "head_progress",
        "held_work",
        "in_flight",
        "in_flight_tokens",
        "instance",
        "machine",
        "matched_tokens",
        "pending_work",
        "prefill_rate",
        "work",
    )

    def __init__(
        self,
        instance: Instance,
        matched_tokens: int = 0,
        work: float = 1.0,
        in_flight: int = 0,
        in_flight_tokens: int = 0,
        pending_work: float = 0.0,
        head_progress: float = 0.0,
        prefill_rate: float = 12_000.0,
        capacity_tokens: int = 1_000_000,
        held_work: float = 0.0,
        exact: bool = False,
        machine: str = "",
    ) -> None:
        self.instance = instance
        self.matched_tokens = matched_tokens
        """Leading tokens of the prompt that it is thought to hold."""
        self.work = work
        """Prefill work that the request would be here: what is not matched, at least one token."""
        self.in_flight = in_flight
        """Requests there; where it is a copy, those of its model."""
        self.in_flight_tokens = in_flight_tokens
        """Prompt tokens of its requests in flight."""
        self.pending_work = pending_work
        """Work of its requests that have had no first byte yet."""
        self.head_progress = head_progress
        """Work already done on the oldest of those."""
        self.prefill_rate = prefill_rate
        """Learned speed, tokens of work per second."""
        self.capacity_tokens = capacity_tokens
        """Size of its KV cache."""
        self.held_work = held_work
        """Work of requests that the router holds back, which will go there before this one."""
        self.exact = exact
        """Whether the instance itself said what it holds (KV events), beside what was just sent there."""
        self.machine = machine
        """What it runs on, where it is one of several copies of a model there; empty: a machine of its own."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__ if name != "instance")
        return f"Candidate({self.instance.name}, {fields})"


@dataclass(slots=True)
class Facts:
    """What is known at the decision besides the candidates. Read-only, as `Prompt` is."""

    prompt: Prompt
    n_tokens: int
    """Length of the prompt, tokens."""
    now_s: float
    fleet_rate: float = 12_000.0
    """Prefill speed of the fleet, tokens of work per second."""
    mean_work: float = 2_000.0
    """Running mean of the work dispatched, tokens."""
    chain: Sequence[int] = ()
    """Hashes of the prompt's full blocks."""
    held_work: float = 0.0
    """Work of all requests that the router holds back, tokens."""
    is_retry: bool = False
    """Whether others have been tried, who are no candidates any more."""


@dataclass(slots=True)
class Decision:
    """Read-only, as `Prompt` is.

    `scores`: cost of each candidate in expected seconds, in the order given; None when the policy has none.
    """

    candidate: Candidate
    reason: Reason
    scores: Sequence[float] | None = None

    @property
    def instance(self) -> Instance:
        return self.candidate.instance


class Policy(Protocol):
    """Picks one candidate. Blind to clock, network and globals."""

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        """Picks from `candidates`, which is never empty. Changes nothing: a dry run calls it too."""
        ...

    def record(self, facts: Facts, decision: Decision) -> None:
        """The decision was carried out: the place for a policy to remember it."""
        ...


class StatelessPolicy:
    """Base of policies that remember nothing."""

    def record(self, facts: Facts, decision: Decision) -> None:
        """Nothing to remember."""


def least_outstanding(candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """The candidate with fewest requests in flight, ties at random: equal instances share cold prompts evenly."""
    least = min(c.in_flight for c in candidates)
    return rng.choice([c for c in candidates if c.in_flight == least])
