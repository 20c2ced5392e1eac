"""How large each instance's KV cache is: as told, or as its reports of cached tokens suggest. Maps are sized alike."""

from collections.abc import Mapping, Sequence

from prefixroute.core.feedback import capacity_factor
from prefixroute.core.fleet import Instance
from prefixroute.core.index import PrefixIndex
from prefixroute.core.ladder import Ladder
from prefixroute.core.lease import Lease

DEFAULT_CAPACITY_TOKENS = 1_000_000
"""KV capacity of an instance that does not tell: too large costs less than too small."""

# How far a learned capacity may be from the default, as a factor: no GPU, nor a cache beside it, is outside of it.
_LEARNED_RANGE = 64


class Capacities:
    """Of one fleet, in tokens. Opens a map in `index` for each instance. `known`: by name, where configured."""

    __slots__ = ("_block_tokens", "_default", "_index", "_ladder", "_told", "by_slot")

    def __init__(
        self,
        instances: Sequence[Instance],
        index: PrefixIndex,
        block_tokens: int,
        default_tokens: int,
        known: Mapping[str, int],
    ) -> None:
        self._index = index
        self._block_tokens = block_tokens
        self._default = default_tokens
        # Capacities that are known, and not to be learned.
        self._told = {i.slot for i in instances if i.name in known}
        self._ladder: Ladder | None = None
        self.by_slot = {i.slot: known.get(i.name, default_tokens) for i in instances}
        """Read-only."""
        for slot, tokens in self.by_slot.items():
            index.add(slot, self._blocks(tokens))

    def add(self, slot: int, known_tokens: int | None = None) -> None:
        """An instance joins; `known_tokens` where it is configured."""
        if known_tokens is not None:
            self._told.add(slot)
        self.by_slot[slot] = tokens = self._default if known_tokens is None else known_tokens
        self._index.add(slot, self._blocks(tokens))
        self._tell()

    def remove(self, slot: int) -> None:
        """The instance leaves: its map goes."""
        del self.by_slot[slot]
        self._told.discard(slot)
        self._index.remove(slot)
        self._tell()

    def configure(self, default_tokens: int) -> None:
        """Another size is assumed of instances that do not tell. What was learned from the old one is dropped."""
        if default_tokens != self._default:
            self._default = default_tokens
            for slot in self.by_slot.keys() - self._told:
                self._resize(slot, default_tokens)

    def unknown(self, slot: int) -> None:
        """The size is no longer configured: it is as for an instance that has not told yet."""
        self._told.discard(slot)
        self._resize(slot, self._default)

    def tell(self, ladder: Ladder) -> None:
        """`ladder` is told of changes of `fleet_blocks` from now on."""
        self._ladder = ladder

    @property
    def fleet_blocks(self) -> int:
        """Blocks that all instances hold together."""
        return sum(map(self._blocks, self.by_slot.values()))

    def is_told(self, slot: int) -> bool:
        """Whether configuration or the instance says it; else it is learned from reports."""
        return slot in self._told

    def told(self, slot: int, tokens: int) -> None:
        """The instance told the size: it stands, whatever is reported of hits."""
        if tokens > 0:
            self._told.add(slot)
            self._resize(slot, tokens)

    def reported(self, lease: Lease, cached_tokens: float) -> None:
        """An instance said how much of a prompt was cached, here in the router's tokens."""
        request, candidate, slot = lease.request, lease.decision.candidate, lease.instance.slot
        # What the instance said by itself says nothing of the map that stands for it otherwise.
        if slot in self._told or slot not in self.by_slot or not request.chain or candidate.exact:
            return
        block_tokens, matched_tokens = self._block_tokens, candidate.matched_tokens
        if request.token_scale != 1.0:
            block_tokens = max(1, round(block_tokens * request.token_scale))
        # Whether the map is full matters only where more was cached than it knows of.
        is_full = cached_tokens > matched_tokens and self._index.is_full(slot)
        factor = capacity_factor(matched_tokens, cached_tokens, request.n_tokens, block_tokens, is_full=is_full)
        if factor != 1.0:
            least, most = self._default // _LEARNED_RANGE, self._default * _LEARNED_RANGE
            self._resize(slot, min(most, max(least, round(self.by_slot[slot] * factor))))

    def _resize(self, slot: int, tokens: int) -> None:
        if tokens != self.by_slot[slot]:
            self.by_slot[slot] = tokens
            self._index.resize(slot, self._blocks(tokens))
            self._tell()

    def _tell(self) -> None:
        if self._ladder is not None:
            self._ladder.resize(self.fleet_blocks)

    def _blocks(self, tokens: int) -> int:
        return max(1, tokens // self._block_tokens)
