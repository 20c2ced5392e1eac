"""The prompt of a simulated request, of which only lengths and block hashes are known."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixroute.core.blocks import BYTES_PER_TOKEN
from prefixroute.core.prompt import Prompt


@dataclass(slots=True)
class SimPrompt(Prompt):
    """Stands for text it does not have: policies that compare beginnings compare ids of blocks instead.

    `hashes`: of the full blocks of the prompt, `block_tokens` each. `number`: another one for each request.
    """

    hashes: Sequence[int] = field(default=(), repr=False)
    block_tokens: int = 1
    number: int = 0

    def prefix_bytes(self, n: int) -> bytes:
        """Equal for two prompts when their first `n` bytes are, at four bytes a token, rounded up to whole blocks.

        Made when asked for, eight bytes a block: as text it would be up to 64 KiB for every request in flight. A
        prompt that ends before `n` has something of its own there, which nobody shares: its number stands for it.
        """
        n_blocks = -(-max(n, 0) // (self.block_tokens * BYTES_PER_TOKEN))
        ids = array("Q", self.hashes[:n_blocks])
        if len(ids) < n_blocks:
            ids.append(self.number)
        return ids.tobytes()
