"""Several simulated servers in one process: for tests, and for `prefixroute demo-server`."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from prefixroute.demo.server import SimulatedServer
from prefixroute.demo.server.config import ServerConfig
from prefixroute.errors import ConfigError


@asynccontextmanager
async def serve_fleet(
    configs: Sequence[ServerConfig], host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[list[SimulatedServer]]:
    """One server for each of `configs`: on `port` and those after it, or on free ports if it is 0.

    Raises ConfigError if an address cannot be listened on; those started by then are stopped.
    """
    async with AsyncExitStack() as stack:
        servers: list[SimulatedServer] = []
        for index, config in enumerate(configs):
            server = SimulatedServer(config)
            await _start(server, host, port + index if port else 0)
            stack.push_async_callback(server.stop)
            servers.append(server)
        yield servers


def run_demo_server(
    host: str,
    port: int,
    n: int,
    config: ServerConfig | None = None,
    *,
    say: Callable[[str], object] = print,
) -> None:
    """Serve `n` servers alike until SIGINT or SIGTERM. A second signal ends the process at once.

    `say` gets one line for each server that is ready. Raises ConfigError if an address is taken.
    """
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(_serve_until_signal(host, port, [config or ServerConfig()] * n, say))


async def _serve_until_signal(
    host: str, port: int, configs: Sequence[ServerConfig], say: Callable[[str], object]
) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def stop(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        stopped.set()

    async with serve_fleet(configs, host, port) as servers:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        for server in servers:
            say(f"simulated vLLM server ready at {server.url} (model {server.config.model})")
        await stopped.wait()


async def _start(server: SimulatedServer, host: str, port: int) -> None:
    if port > 65_535:  # uvloop would take it modulo 65,536
        raise ConfigError(f"cannot listen on {host}:{port}: there is no such port")
    try:
        await server.start(host, port)
    except OSError as error:
        # asyncio puts the address into `strerror`; a name that cannot be resolved has a negative number.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} is in use (stop what listens there, or give another --port; 0 takes any free ones)"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error


def _new_event_loop() -> asyncio.AbstractEventLoop:
    if sys.platform != "win32":
        try:
            import uvloop
        except ImportError:
            pass
        else:
            return uvloop.new_event_loop()
    return asyncio.new_event_loop()
