"""What one simulated server is."""

from dataclasses import dataclass, field

from prefixroute.demo.engine import EngineConfig


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One simulated server."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    model: str = "demo-model"
    # Names of LoRA adapters, served beside the model.
    adapters: tuple[str, ...] = ()
    # vLLM's --stream-interval: after the first token, one event for so many tokens.
    stream_interval: int = 1
    # Answer limit of a request that names none.
    default_max_tokens: int = 256
    max_stored_responses: int = 256

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, *self.adapters)
