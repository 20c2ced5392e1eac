"""Stateful sessions: which instance holds which session, from the container's word that it began until it ends.

State is in one server's memory, so a session's requests go there and nowhere else.
"""

from collections import OrderedDict
from typing import NamedTuple

_Key = tuple[str, str]
"""Endpoint and session."""


class Home(NamedTuple):
    """Where a session lives."""

    instance: str
    variant: str
    component: str | None


class Sessions:
    """Of all endpoints, the `max_sessions` that were used last. Times are seconds since 1970."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._homes: OrderedDict[_Key, tuple[Home, float | None]] = OrderedDict()
        self._by_instance: dict[str, set[_Key]] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def configure(self, max_sessions: int) -> None:
        """Another bound; what is above it goes, least used first."""
        self._max_sessions = max_sessions
        self._trim()

    def opened(self, endpoint: str, session: str, home: Home, expires_s: float | None) -> None:
        """A container began a session, or prolonged it. `expires_s`: when it ends; None: it does not say."""
        key = endpoint, session
        self._drop(key)
        self._homes[key] = home, expires_s
        self._by_instance.setdefault(home.instance, set()).add(key)
        self._trim()

    def closed(self, endpoint: str, session: str) -> None:
        """A container ended a session."""
        self._drop((endpoint, session))

    def home(self, endpoint: str, session: str, now_s: float, *, touch: bool = True) -> Home | None:
        """Where the session lives; None: there is none of this id, or it has expired. `touch`: this is a use of it."""
        key = endpoint, session
        entry = self._homes.get(key)
        if entry is None:
            return None
        home, expires_s = entry
        if expires_s is not None and now_s >= expires_s:
            if touch:
                self._drop(key)
            return None
        if touch:
            self._homes.move_to_end(key)
        return home

    def forget(self, instance: str) -> None:
        """The instance is no more, and its sessions with it."""
        for key in self._by_instance.pop(instance, ()):
            del self._homes[key]

    def _trim(self) -> None:
        while len(self._homes) > self._max_sessions:
            self._drop(next(iter(self._homes)))

    def _drop(self, key: _Key) -> None:
        entry = self._homes.pop(key, None)
        if entry is None:
            return
        instance = entry[0].instance
        keys = self._by_instance[instance]
        keys.discard(key)
        if not keys:
            del self._by_instance[instance]
