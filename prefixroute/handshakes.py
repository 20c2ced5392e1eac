"""TLS handshakes with clients that failed: counted all, told seldom enough that nobody can fill the log with them."""

import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0


class FailedHandshakes:
    """Of one port. `plane`: which one, for people; `count`: called for each of them."""

    def __init__(self, plane: str, count: Callable[[], None], clock: Callable[[], float]) -> None:
        self._plane = plane
        self._count = count
        self._clock = clock
        self._told_s: float | None = None
        self._n_untold = 0

    def failed(self, cause: str) -> None:
        """One failed, by this cause."""
        self._count()
        now_s = self._clock()
        if self._told_s is not None and now_s - self._told_s < TELL_EVERY_S:
            self._n_untold += 1
            return
        more = f" (and {self._n_untold} more since the last such line)" if self._n_untold else ""
        _log.warning("a TLS handshake on the %s port failed: %s%s", self._plane, cause, more)
        self._told_s, self._n_untold = now_s, 0
