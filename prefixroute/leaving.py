"""Instances that were taken out of the fleet: when they can be turned off without cutting an answer short."""

import logging
from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)


class Leaving:
    """`under_way`: names of removed instances that have requests under way still, and how many."""

    def __init__(self, under_way: Callable[[], Mapping[str, int]]) -> None:
        self._under_way = under_way
        self._names: set[str] = set()

    def removed(self, name: str) -> None:
        """It is out of the fleet now."""
        if self._under_way().get(name):
            self._names.add(name)
        else:
            _log.info("%s has left: no request is under way there", name)

    def look(self) -> None:
        """A request is over. Costs nothing while nobody is leaving."""
        if not self._names:
            return
        over = self._names - self._under_way().keys()
        self._names -= over
        for name in sorted(over):
            _log.info("%s has left: its last request is over", name)
