"""The simulated engine behind vLLM's HTTP surface."""

from prefixroute.demo.server.config import ServerConfig
from prefixroute.demo.server.simulated import SimulatedServer

__all__ = ["ServerConfig", "SimulatedServer"]
