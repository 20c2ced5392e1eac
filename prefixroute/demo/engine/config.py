"""Sizes and speeds of a simulated engine."""

from dataclasses import dataclass

from prefixroute.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine can hold and how fast it is. Assumed, not measured: an 8B model on an H100."""

    block_size: int = 16
    # 80 GB less weights and activations, at 128 KiB a token (32 layers * 8 KV heads * 128 * K and V * fp16).
    kv_tokens: int = 400_000
    max_model_len: int = 131_072
    max_num_batched_tokens: int = 8_192
    max_num_seqs: int = 256
    # Requests waiting and running; above it new ones are refused (vLLM's --max-num-queued-reqs). None: no limit.
    max_num_queued_reqs: int | None = None
    enable_prefix_caching: bool = True
    # Of each token found in the cache, the share of its prefill that it costs all the same: 1 is a cache whose hits
    # are reported and bring nothing.
    cached_cost_ratio: float = 0.0
    prefill_tokens_per_s: float = 16_000.0
    # Attention makes a token at this position cost twice what one at position 0 costs.
    prefill_slowdown_tokens: float = 32_768.0
    # Any step reads the weights once (16 GB at 3.3 TB/s, and launch overhead).
    step_s: float = 0.007
    step_per_sequence_s: float = 30e-6
    # KV bytes read for each token that a decoding sequence attends to.
    step_per_token_s: float = 52e-9
    # All times are divided by it.
    speed: float = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes and speeds with which nothing could ever be computed."""
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs", "prefill_tokens_per_s", "speed"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be above 0")
        if self.context_tokens < 2:
            raise ConfigError(f"kv_tokens {self.kv_tokens} or max_model_len {self.max_model_len} is too small")

    @property
    def n_blocks(self) -> int:
        return self.kv_tokens // self.block_size

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus answer that one request may have: the model's limit, or all of the cache."""
        return min(self.max_model_len, self.n_blocks * self.block_size)

    def prefill_s(self, n_cached: int, n_new: int) -> float:
        """Time to compute `n_new` tokens of a prompt after `n_cached` ones. Chunks add up to the whole."""
        slowdown = 1 + (n_cached + n_new / 2) / self.prefill_slowdown_tokens
        return n_new * slowdown / self.prefill_tokens_per_s / self.speed

    def step_time_s(self, prefill_s: float, n_decoding: int, decoding_tokens: int) -> float:
        """Time of one step: `prefill_s` in all, and `n_decoding` sequences with `decoding_tokens` in all."""
        decode_s = n_decoding * self.step_per_sequence_s + decoding_tokens * self.step_per_token_s
        return (self.step_s + decode_s) / self.speed + prefill_s
