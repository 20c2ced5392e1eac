"""One request, as it went: what access log, metrics, recordings and `/decisions` are made of.

Holds nothing a client wrote except the request id, which is checked where it comes in: no header, query or prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from prefixroute.core.policy import Candidate, Decision, Reason
from prefixroute.core.prompt import NoKeyCause

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Those that are told by name, in records and log; any other is `other`."""


class Outcome(Enum):
    """How a request ended. Closed: values are metric labels."""

    # Members are equal to themselves only. Enum's own hash is a function in Python, and each request is counted by it.
    __hash__ = object.__hash__

    OK = "ok"
    """An answer below 400 was relayed whole."""
    CLIENT_ERROR = "client_error"
    """An instance's 4xx was relayed whole."""
    SERVER_ERROR = "server_error"
    """An instance's 5xx was relayed whole."""
    REFUSED = "refused"
    """Answered 4xx by the router itself."""
    LOCAL = "local"
    """Answered by the router itself, as it should: health, the model list."""
    NO_INSTANCE = "no_instance"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    BROKEN = "broken"
    """The instance broke off: 502, or a broken stream when the answer had begun."""
    CLIENT_GONE = "client_gone"
    CUT_OFF = "cut_off"
    """It did not end within the router's own stop (`drain_timeout_s`)."""
    FAULT = "fault"
    """The router's own fault: 500."""


class AttemptOutcome(Enum):
    """How one attempt on one instance ended. Closed: values are metric labels."""

    __hash__ = object.__hash__  # as above

    ANSWERED = "answered"
    BUSY = "busy"
    """429 or 503: another instance may be tried."""
    UNREACHABLE = "unreachable"
    STALE = "stale"
    """A reused connection closed before a byte of the answer."""
    UNANSWERED = "unanswered"
    """A fresh connection died after the request was sent, before a byte of the answer."""
    TIMEOUT = "timeout"
    BROKEN = "broken"
    """The answer broke off after it had begun."""
    ABANDONED = "abandoned"
    """The client left."""


class Decided(NamedTuple):
    """One decision for a request, and what it was made from."""

    at_s: float
    """Since the request began."""
    candidates: Sequence[Candidate]
    decision: Decision


@dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes; complete when it is handed on. Times in seconds, sizes in bytes."""

    request_id: str
    method: str
    route: str
    """From the closed set of routes, never the path itself."""
    lane: str
    began_s: float
    """Monotonic."""
    model: str | None = None
    """As the request names it, if not at excessive length: not for labels."""
    outcome: Outcome = Outcome.FAULT
    status: int | None = None
    """What the client was told; None when it left before."""
    error: str | None = None
    """Code of the error that ended it."""
    key: str | None = None
    """Name of the API key it came with, as the key file has it."""
    client: str | None = None
    """Address of the client; None unless `log.client_address`."""
    streamed: bool = False
    body_bytes: int = 0
    """Of the request's body, as many as came: fewer than announced where it was refused or broke off."""
    answer_bytes: int = 0
    duration_s: float = 0.0
    ttft_s: float | None = None
    """Until the first byte of the answer's body was passed on."""
    waited_s: float = 0.0
    """In the waiting room, because nobody could take it."""
    held_s: float = 0.0
    """Held by the router, because its instance was busy with the prompts of others."""
    decision_s: float | None = None
    """Of the last decision: chain, match, pick, record."""
    reason: Reason | None = None
    upstream: str | None = None
    """Name of the instance that was tried last."""
    prompt_tokens: int = 0
    """Estimated."""
    matched_tokens: int = 0
    """Predicted to be cached on `upstream`."""
    cached_tokens: int | None = None
    """As the instance reported."""
    reported_prompt_tokens: int | None = None
    """As the instance reported, together with `cached_tokens`."""
    completion_tokens: int | None = None
    """As the instance reported."""
    n_events: int = 0
    """Events of a streamed answer: about one for each token."""
    no_key: NoKeyCause | None = None
    attempts: list[AttemptOutcome] = field(default_factory=list)
    decisions: list[Decided] = field(default_factory=list)
    """Each attempt has one; a repeat on the same instance has none of its own."""
    strategy: str | None = None
    """By which it was routed, if not by the router's own."""
    is_over: bool = False
