"""How many requests' decisions are kept, and which."""

from prefixroute.core.fleet import Instance
from prefixroute.core.policy import Candidate, Decision, Reason
from prefixroute.http.decisions import MAX_CANDIDATES, Decisions
from prefixroute.record import Decided, RequestRecord


def decided(
    decisions: Decisions, request_id: str, n_candidates: int = 2, again: RequestRecord | None = None
) -> RequestRecord:
    record = again or RequestRecord(request_id, "POST", "other", "aiohttp", 0.0)
    candidates = [Candidate(Instance(f"gpu-{i}", f"http://gpu-{i}", i)) for i in range(n_candidates)]
    record.decisions.append(Decided(0.0, candidates, Decision(candidates[0], Reason.COLD)))
    decisions.note(record)
    return record


def test_the_last_requests_are_kept() -> None:
    decisions = Decisions(2)
    records = [decided(decisions, str(i)) for i in range(3)]
    assert [decisions.find(str(i)) for i in range(3)] == [None, *records[1:]]
    assert len(decisions) == 2


def test_a_second_decision_makes_a_request_the_newest() -> None:
    decisions = Decisions(2)
    first = decided(decisions, "first")
    decided(decisions, "second")
    decided(decisions, "first", again=first)
    decided(decisions, "third")
    assert decisions.find("second") is None
    assert decisions.find("first") is first


def test_an_id_used_again_stands_for_the_newest_request() -> None:
    decisions = Decisions(2)
    decided(decisions, "same")
    newest = decided(decisions, "same")
    assert decisions.find("same") is newest
    assert len(decisions) == 1


def test_candidates_are_bounded_in_all() -> None:
    decisions = Decisions(10_000)
    n = MAX_CANDIDATES // 1_000
    first = decided(decisions, "0", 500)
    decided(decisions, "0", 500, again=first)
    for i in range(1, n):
        decided(decisions, str(i), 1_000)
    assert len(decisions) == n
    decided(decisions, "one more", 1)
    assert decisions.find("0") is None
    assert len(decisions) == n
    # However many an instance has, the last one is kept, and all that is gone is forgotten.
    decided(decisions, "large", MAX_CANDIDATES + 1)
    assert len(decisions) == 1
    for i in range(n):
        decided(decisions, str(i), 1_000)
    assert len(decisions) == n


def test_none_is_kept_when_none_is_wanted() -> None:
    decisions = Decisions(0)
    decided(decisions, "first")
    assert decisions.find("first") is None
