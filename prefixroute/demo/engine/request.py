"""What an engine is asked for, and how far it is with it."""

from collections.abc import Sequence
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class EngineRequest:
    """One sequence: what is asked, and how far it is. Fields below the line belong to the engine; read only."""

    __slots__ = (
        "block_hashes",
        "blocks",
        "cached_tokens",
        "finish_reason",
        "finished_s",
        "first_token_s",
        "last_reason",
        "n_computed",
        "n_named",
        "n_new",
        "n_output",
        "n_output_wanted",
        "n_preemptions",
        "n_prompt",
        "queued_s",
        "scheduled_s",
    )

    def __init__(
        self,
        n_prompt: int,
        n_output: int,
        block_hashes: Sequence[int],
        last_reason: FinishReason = FinishReason.LENGTH,
    ) -> None:
        """`block_hashes`: chained, one for each full block of prompt and answer; those left out are not cached.
        `last_reason`: what the request ends with once it has `n_output` tokens."""
        if n_prompt < 1 or n_output < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        self.n_prompt = n_prompt
        self.n_output_wanted = n_output
        self.block_hashes = block_hashes
        self.last_reason = last_reason
        # ---
        self.n_output = 0
        self.n_computed = 0
        self.n_new = 0
        self.blocks: list[int] = []
        self.n_named = 0
        self.n_preemptions = 0
        # Prompt tokens found in the cache when first scheduled; None before.
        self.cached_tokens: int | None = None
        self.queued_s: float | None = None
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def n_tokens(self) -> int:
        """Prompt and output so far."""
        return self.n_prompt + self.n_output
