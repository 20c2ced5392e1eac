"""When an attempt may be repeated. The rules, in one place:

(a) no connection: next instance, any method; nothing was sent.
(b) a reused connection that closed before a byte of the answer: once more on a fresh one to the same instance.
(c) a fresh connection that died unanswered after the request was sent: only if `retry.unanswered` is `inference`, once
    more, on generation and pooling routes; on another instance where there is one.
(d) 429 or 503: next instance; when all that were tried answer so, the last answer is the client's.

After (b) and (c) no kept connection is trusted any more. An answer whose head came in part is broken: neither (b) nor
(c). A body that is streamed cannot be sent again; it goes on a fresh connection, so that (b) cannot happen to it.

All within `retry.max_attempts`; (c) and (d) also within the budget. The dead connection of (b) and its repeat are one
attempt: nothing can have been computed. Waiting for an instance starts the count anew. After the first relayed byte,
head included: never.
"""

# Retries that are always there for a router with little traffic.
_RESERVE = 10.0


class RetryBudget:
    """How much of recent traffic may be repeats: each request pays in `ratio`, each repeat takes one.

    Keeps repeats from multiplying the load of a fleet that is already failing.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._reserve = _RESERVE if ratio > 0 else 0.0
        self._left = self._reserve

    def paid_in(self) -> None:
        """A request came."""
        if self._left < self._reserve:
            self._left = min(self._reserve, self._left + self._ratio)

    def take(self) -> bool:
        """Whether one more repeat is within the budget; counts it if so."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
