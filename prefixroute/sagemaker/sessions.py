"""Stateful sessions: which instance holds which session, from the container's word that it began until it ends.

State is in one server's memory, so a session's requests go there and nowhere else.
"""

from collections import OrderedDict
from typing import NamedTuple


class Home(NamedTuple):
    """Where a session lives."""

    instance: str
    variant: str
    component: str | None


class Sessions:
    """Of all endpoints, the `max_sessions` that were used last. Times are seconds since 1970."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._homes: OrderedDict[tuple[str, str], tuple[Home, float | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def configure(self, max_sessions: int) -> None:
        """Another bound; what is above it goes, least used first."""
        self._max_sessions = max_sessions
        while len(self._homes) > max_sessions:
            self._homes.popitem(last=False)

    def opened(self, endpoint: str, session: str, home: Home, expires_s: float | None) -> None:
        """A container began a session, or prolonged it. `expires_s`: when it ends; None: it does not say."""
        key = endpoint, session
        self._homes[key] = home, expires_s
        self._homes.move_to_end(key)
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)

    def closed(self, endpoint: str, session: str) -> None:
        """A container ended a session."""
        self._homes.pop((endpoint, session), None)

    def home(self, endpoint: str, session: str, now_s: float, *, touch: bool = True) -> Home | None:
        """Where the session lives; None: there is none of this id, or it has expired. `touch`: this is a use of it."""
        key = endpoint, session
        entry = self._homes.get(key)
        if entry is None:
            return None
        home, expires_s = entry
        if expires_s is not None and now_s >= expires_s:
            if touch:
                del self._homes[key]
            return None
        if touch:
            self._homes.move_to_end(key)
        return home

    def forget(self, instance: str) -> None:
        """The instance is no more, and its sessions with it."""
        for key in [key for key, (home, _) in self._homes.items() if home.instance == instance]:
            del self._homes[key]
