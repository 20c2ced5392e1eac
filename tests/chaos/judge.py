"""What may be lost and what may be sent twice (`prefixroute/http/retry.py`), held against what happened. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as its client saw it. `status` None: no head of an answer; `whole`: ended as its framing says."""

    marker: str
    streamed: bool
    began_s: float
    ended_s: float
    status: int | None
    whole: bool
    sound: bool
    """Whether the body is the one that this request should get."""

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and self.whole and self.sound


@dataclass(slots=True)
class Delivery:
    """One request as an instance saw it."""

    instance: str
    reused: bool
    mode: str
    at_ns: int = 0
    began: bool = False
    """Whether a byte of an answer was sent."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """`losses`: last attempts after which a request may be lost on `victims`."""

    victims: frozenset[str]
    from_s: float
    until_s: float
    losses: frozenset[str] = frozenset()
    repeats: frozenset[str] = frozenset()
    """Modes in which a delivery may be followed by another one, besides a stale connection's."""


@dataclass(slots=True)
class Verdict:
    n_asked: int = 0
    n_answered: int = 0
    n_lost: int = 0
    """As the rules allow."""
    n_second: int = 0
    """Second deliveries, as the rules allow."""
    forbidden: list[str] = field(default_factory=list)
    elsewhere_ms: list[float] = field(default_factory=list)
    """Times of whole answers of other instances than the victims."""

    def p95_ms(self) -> float:
        return quantiles(self.elsewhere_ms, n=20)[-1] if len(self.elsewhere_ms) > 1 else 0.0


def judge(
    asked: Sequence[Asked],
    deliveries: Mapping[str, Sequence[Delivery]],
    records: Mapping[str, Mapping[str, Any]],
    allowed: Allowed,
) -> Verdict:
    """`records`: what the router's access log says, by marker."""
    verdict = Verdict(n_asked=len(asked))
    for one in asked:
        record = records.get(one.marker)
        if record is None:
            verdict.forbidden.append(f"{one.marker}: the router counts it nowhere")
            continue
        _judge_answer(verdict, one, record, allowed)
        _judge_deliveries(verdict, one, deliveries.get(one.marker, ()), record, allowed)
    return verdict


def _judge_answer(verdict: Verdict, one: Asked, record: Mapping[str, Any], allowed: Allowed) -> None:
    upstream = record["upstream"]
    if one.is_answered:
        verdict.n_answered += 1
        if upstream not in allowed.victims:
            verdict.elsewhere_ms.append((one.ended_s - one.began_s) * 1_000)
        return
    told = f"{one.marker}: {one.status}, {record['outcome']} on {upstream} after {record['attempts']}"
    if one.status == 200 and one.whole:
        verdict.forbidden.append(f"{told}: a wrong answer that looks right")
    elif record["outcome"] == "ok":
        verdict.forbidden.append(f"{told}: lost, and counted as answered")
    elif upstream not in allowed.victims:
        verdict.forbidden.append(f"{told}: lost where nothing was wrong")
    elif (record["attempts"] or "").split(",")[-1] not in allowed.losses:
        verdict.forbidden.append(f"{told}: lost though it could be repeated")
    elif one.ended_s < allowed.from_s or one.began_s > allowed.until_s:
        verdict.forbidden.append(f"{told}: lost while nothing was wrong")
    else:
        verdict.n_lost += 1


def _judge_deliveries(
    verdict: Verdict, one: Asked, seen: Sequence[Delivery], record: Mapping[str, Any], allowed: Allowed
) -> None:
    if one.is_answered and not seen:
        verdict.forbidden.append(f"{one.marker}: answered by nobody")
    for earlier in seen[:-1]:
        if earlier.mode in allowed.repeats or (earlier.reused and not earlier.began):
            verdict.n_second += 1
        else:
            verdict.forbidden.append(f"{one.marker}: delivered again after {earlier}")
    if len(seen) > len((record["attempts"] or "").split(",")):
        verdict.forbidden.append(f"{one.marker}: {len(seen)} deliveries, but attempts are {record['attempts']}")
