"""Which instance holds which stored response: `/v1/responses` keeps state in one server's memory."""

from collections import OrderedDict


class StoredResponses:
    """Response id → instance name, for the `max_entries` used last."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._homes: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def configure(self, max_entries: int) -> None:
        """Another bound; what is above it goes, least used first."""
        self._max_entries = max_entries
        while len(self._homes) > max_entries:
            self._homes.popitem(last=False)

    def forget(self, instance: str) -> None:
        """The instance is no more. Whoever has its name next holds other responses."""
        for response_id in [one for one, home in self._homes.items() if home == instance]:
            del self._homes[response_id]

    def record(self, response_id: str, instance: str) -> None:
        self._homes[response_id] = instance
        self._homes.move_to_end(response_id)
        if len(self._homes) > self._max_entries:
            self._homes.popitem(last=False)

    def home(self, response_id: str | None) -> str | None:
        """The instance that made the response; None when it is not known."""
        if response_id is None or response_id not in self._homes:
            return None
        self._homes.move_to_end(response_id)
        return self._homes[response_id]
