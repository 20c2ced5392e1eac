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
        if slot in self._told or not request.chain or candidate.exact:
            return
        factor = capacity_factor(
            candidate.matched_tokens,
            cached_tokens,
            request.n_tokens,
            max(1, round(self._block_tokens * request.token_scale)),
            is_full=self._index.n_blocks(slot) >= self._index.capacity_blocks(slot),
        )
        if factor != 1.0:
            least, most = self._default // _LEARNED_RANGE, self._default * _LEARNED_RANGE
            self._resize(slot, min(most, max(least, round(self.by_slot[slot] * factor))))

    def _resize(self, slot: int, tokens: int) -> None:
        if tokens != self.by_slot[slot]:
            self.by_slot[slot] = tokens
            self._index.resize(slot, self._blocks(tokens))
            if self._ladder is not None:
                self._ladder.resize(self.fleet_blocks)

    def _blocks(self, tokens: int) -> int:
        return max(1, tokens // self._block_tokens)
