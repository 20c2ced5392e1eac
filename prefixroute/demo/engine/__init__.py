"""A simulated vLLM engine: scheduler and prefix cache, on a clock that is an argument. Pure."""

from prefixroute.demo.engine.config import EngineConfig
from prefixroute.demo.engine.request import EngineRequest, FinishReason
from prefixroute.demo.engine.scheduler import Engine

__all__ = ["Engine", "EngineConfig", "EngineRequest", "FinishReason"]
