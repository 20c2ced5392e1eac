"""Each fault for a moment, with real processes; `python -m tests.chaos` takes longer. And the judge itself."""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import FAULTS, run
from tests.chaos.judge import Allowed, Asked, Delivery, Verdict, judge


@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_costs_no_more_than_the_rules_allow(name: str, tmp_path: Path) -> None:
    outcome = await run(FAULTS[name], tmp_path, per_second=60, fault_s=0.5, calm_s=0.25)

    assert outcome.faults == []
    assert outcome.verdict.forbidden == []
    assert outcome.recovered
    assert outcome.verdict.n_answered > 0
    assert outcome.verdict.n_asked == outcome.verdict.n_answered + outcome.verdict.n_lost


# The judge

ALLOWED = Allowed(frozenset({"gpu-b"}), 10.0, 20.0, losses=frozenset({"unanswered"}))


def asked(**changes: Any) -> Asked:
    fields: dict[str, Any] = {"status": 200, "whole": True, "sound": True, **changes}
    return Asked("m-1", False, 11.0, 12.0, **fields) if "began_s" not in fields else Asked("m-1", False, **fields)


def record(**changes: Any) -> dict[str, Any]:
    return {"upstream": "gpu-b", "outcome": "broken", "attempts": "unanswered", **changes}


def verdict(one: Asked, *seen: Delivery, **changes: Any) -> Verdict:
    return judge([one], {"m-1": seen}, {"m-1": record(**changes)}, ALLOWED)


LOST = asked(status=502, sound=False)


def test_a_loss_by_the_rules_is_allowed() -> None:
    assert verdict(LOST).n_lost == 1
    assert verdict(LOST).forbidden == []


@pytest.mark.parametrize(
    ("one", "changes", "words"),
    [
        (LOST, {"upstream": "gpu-a"}, "nothing was wrong"),
        (LOST, {"attempts": "stale"}, "could be repeated"),
        (LOST, {"outcome": "ok"}, "counted as answered"),
        (asked(status=502, sound=False, began_s=21.0, ended_s=22.0), {}, "while nothing was wrong"),
        (asked(status=502, sound=False, began_s=8.0, ended_s=9.0), {}, "while nothing was wrong"),
        (asked(sound=False), {}, "looks right"),
        (asked(), {"outcome": "ok"}, "answered by nobody"),
    ],
)
def test_any_other_loss_is_not(one: Asked, changes: dict[str, Any], words: str) -> None:
    (told,) = verdict(one, **changes).forbidden

    assert words in told


def test_a_request_that_is_counted_nowhere_is_told() -> None:
    assert "counts it nowhere" in judge([asked()], {}, {}, ALLOWED).forbidden[0]


def test_a_stale_connections_request_may_be_delivered_again() -> None:
    seen = Delivery("gpu-b", True, "normal"), Delivery("gpu-b", False, "normal", began=True)

    one = verdict(asked(), *seen, outcome="ok", attempts="stale,answered")

    assert (one.n_second, one.forbidden) == (1, [])


@pytest.mark.parametrize(
    "first", [Delivery("gpu-b", True, "normal", began=True), Delivery("gpu-b", False, "normal")], ids=["begun", "fresh"]
)
def test_any_other_second_delivery_is_not(first: Delivery) -> None:
    one = verdict(asked(), first, Delivery("gpu-c", False, "normal"), outcome="ok", attempts="unanswered,answered")

    assert "delivered again" in one.forbidden[0]


def test_a_delivery_without_an_attempt_is_told() -> None:
    seen = Delivery("gpu-b", True, "normal"), Delivery("gpu-c", False, "normal")

    assert "but attempts are answered" in verdict(asked(), *seen, outcome="ok", attempts="answered").forbidden[0]
