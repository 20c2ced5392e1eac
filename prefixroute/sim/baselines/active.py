"""Prompts under way on each instance, as Dynamo's router counts them: prefill and KV, from dispatch on."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixroute.core.policy import Facts
from prefixroute.core.prompt import Prompt
from prefixroute.sim.baselines.maps import router_block_tokens

if TYPE_CHECKING:
    from prefixroute.sim.run import Simulation


@dataclass(slots=True)
class _Sent:
    # Kept for its identity, by which it is known in the engine.
    prompt: Prompt
    chain: tuple[int, ...]
    tail_tokens: int
    prefill_tokens: int


class ActiveTokens:
    """Prefill of what was sent and has no first token yet, and the blocks of all that was sent and has not ended.

    A block that several requests share counts once. Answers are not counted (the source's default).
    """

    def __init__(self, sim: "Simulation") -> None:
        self._sim = sim
        n = len(sim.engines)
        self._sent: list[dict[int, _Sent]] = [{} for _ in range(n)]
        self._blocks: list[Counter[int]] = [Counter() for _ in range(n)]
        self._tail_tokens = [0] * n

    def sent(self, facts: Facts, slot: int, prefill_tokens: int) -> None:
        """The prompt goes to `slot`, where so much of it must be computed."""
        if (before := self._sent[slot].pop(id(facts.prompt), None)) is not None:
            self._end(slot, before)
        chain = tuple(facts.chain)
        tail_tokens = facts.n_tokens - len(chain) * router_block_tokens(self._sim)
        self._sent[slot][id(facts.prompt)] = _Sent(facts.prompt, chain, tail_tokens, prefill_tokens)
        self._blocks[slot].update(chain)
        self._tail_tokens[slot] += tail_tokens

    def settle(self) -> None:
        """Takes out what has ended, as answers tell a router. To be called before asking."""
        for slot, engine in enumerate(self._sim.engines):
            sent = self._sent[slot]
            if not sent:
                continue
            begun = {id(one.lease.request.prompt): one.first_token_s is not None for one in engine.requests}
            for key, one in list(sent.items()):
                if key not in begun:
                    del sent[key]
                    self._end(slot, one)
                elif begun[key]:
                    one.prefill_tokens = 0

    def prefill_tokens(self, slot: int) -> int:
        return sum(one.prefill_tokens for one in self._sent[slot].values())

    def kv_tokens(self, slot: int, facts: Facts) -> int:
        """KV that would be in use there with this prompt."""
        blocks = self._blocks[slot]
        n_new = sum(block not in blocks for block in facts.chain)
        return (len(blocks) + n_new) * router_block_tokens(self._sim) + self._tail_tokens[slot]

    def _end(self, slot: int, one: _Sent) -> None:
        blocks = self._blocks[slot]
        for block in one.chain:
            if blocks[block] > 1:
                blocks[block] -= 1
            else:
                del blocks[block]
        self._tail_tokens[slot] -= one.tail_tokens
