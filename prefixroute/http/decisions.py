"""The last requests' decisions, for `/decisions/{request_id}`: records, which hold no prompt, in order of decision.

A request is here from its first decision on, so that one under way can be asked about. Bounded in requests and in
candidates: a candidate and its score take up to 350 bytes, which for a fleet of eight is 3 KB a request.
"""

from collections import OrderedDict

from prefixroute.record import RequestRecord

MAX_CANDIDATES = 64_000
"""Of all decisions that are kept: 22 MB. Above it the oldest requests go, however few are left."""
# Who waits in the waiting room may be decided on again and again.
MAX_OF_ONE_REQUEST = 16


class Decisions:
    """At most `max_requests` of them; an id that is used again stands for the newest request."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._n_candidates = 0

    def __len__(self) -> int:
        return len(self._records)

    def find(self, request_id: str) -> RequestRecord | None:
        """The request's record: filled in further while it is under way."""
        return self._records.get(request_id)

    def configure(self, max_requests: int) -> None:
        """Another bound; the oldest above it go."""
        self.max_requests = max_requests
        self._trim()

    def note(self, record: RequestRecord) -> None:
        """A decision was added to `record`."""
        if not self.max_requests:
            return
        records = self._records
        known = records.pop(record.request_id, None)
        if known is record:
            self._n_candidates += len(record.decisions[-1].candidates)
        else:
            if known is not None:
                self._n_candidates -= _n_candidates(known)
            self._n_candidates += _n_candidates(record)
        records[record.request_id] = record
        self._trim()

    def _trim(self) -> None:
        records = self._records
        while len(records) > self.max_requests or (self._n_candidates > MAX_CANDIDATES and len(records) > 1):
            self._n_candidates -= _n_candidates(records.popitem(last=False)[1])


def _n_candidates(record: RequestRecord) -> int:
    decisions = record.decisions
    if len(decisions) == 1:  # nearly always
        return len(decisions[0].candidates)
    return sum([len(decided.candidates) for decided in decisions])
