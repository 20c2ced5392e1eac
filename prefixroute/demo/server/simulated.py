"""One simulated vLLM server on a port of its own."""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import orjson
from aiohttp import web

from prefixroute.demo.engine import Engine
from prefixroute.demo.server.api_errors import ApiError, UnparsableError, ValidationError
from prefixroute.demo.server.config import ServerConfig
from prefixroute.demo.server.generation_routes import GenerationRoutes
from prefixroute.demo.server.jobs import ServedRequest
from prefixroute.demo.server.operation_routes import OperationRoutes
from prefixroute.demo.server.service import Service

# uvicorn's, under which vLLM runs: an idle connection is closed after so long.
KEEPALIVE_TIMEOUT_S = 5.0
MAX_BODY_BYTES = 1 << 30

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SimulatedServer:
    """`async with SimulatedServer(config) as server:` serves on a free port of the loopback until the end of the
    block; or `start` and `stop` by hand. Each start is a new process to those who look at it: empty cache, zero
    counters, new start time.

    For tests: `fail_health` makes probes fail, `set_ready(False)` everything; `crash` breaks all connections.
    """

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        self.fail_health: bool | Callable[[], bool] = False
        self._ready = True
        self._service: Service | None = None
        self._runner: web.AppRunner | None = None
        self._paths: frozenset[str] = frozenset()
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Base URL; only while it runs."""
        if self._url is None:
            raise RuntimeError("the server has not been started")
        return self._url

    @property
    def service(self) -> Service:
        if self._service is None:
            raise RuntimeError("the server has not been started")
        return self._service

    @property
    def engine(self) -> Engine[ServedRequest]:
        return self.service.engine

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve on `port`, or a free one; its URL. Raises OSError if the port is taken."""
        self._service = Service(self.config)
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answer_refusals])
        app.on_response_prepare.append(_add_headers)
        routes = [*GenerationRoutes(self._service).routes(), *OperationRoutes(self._service, self._is_healthy).routes()]
        app.add_routes(routes)
        self._paths = frozenset(route.path for route in routes)
        self._runner = web.AppRunner(
            app,
            # Without it a client that leaves would be noticed at the next write only.
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            access_log=None,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=1024).start()
        except OSError:
            await self.stop()
            raise
        bound_port = self._runner.addresses[0][1]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"
        return self._url

    async def stop(self) -> None:
        """As vLLM on SIGTERM: no new connections, streams end with the finish reason `abort`."""
        if self._service is not None:
            self._service.abort_all()
        await self._close()

    async def crash(self) -> None:
        """As a killed process: every connection is reset, mid-answer."""
        if self._runner is not None and self._runner.server is not None:
            for connection in self._runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        await self._close()

    def set_ready(self, ready: bool) -> None:
        """While not ready, everything but /metrics answers 503."""
        self._ready = ready

    async def wait_until(self, condition: Callable[[Engine[ServedRequest]], Any]) -> None:
        """Return once `condition(engine)` holds, such as `lambda engine: engine.n_requests == 0`."""
        await self.service.wait_until(condition)

    async def __aenter__(self) -> "SimulatedServer":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._service is not None:
            self._service.close()
        self._runner = None
        self._url = None

    def _is_healthy(self) -> bool:
        failing = self.fail_health() if callable(self.fail_health) else self.fail_health
        return not failing

    @web.middleware
    async def _answer_refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._ready and request.path != "/metrics":
            return _json_error(503, {"detail": "Not ready"})
        try:
            return await handler(request)
        except ApiError as error:
            foreign = isinstance(error, ValidationError | UnparsableError)
            anthropic = request.path.startswith("/v1/messages") and not foreign
            return _json_error(error.status, error.anthropic_body() if anthropic else error.openai_body())
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            if isinstance(error, web.HTTPNotFound) and request.path.rstrip("/") in self._paths:
                # To itself, by the name that the request knows it under.
                return web.Response(
                    status=307, headers={"Location": f"http://{request.host}{request.path.rstrip('/')}"}
                )
            return _json_error(error.status, {"detail": error.reason}, error.headers.get("Allow"))


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """As every answer of vLLM has them."""
    response.headers["Server"] = "uvicorn"
    response.headers["Vary"] = "Origin"


def _json_error(status: int, body: dict[str, object], allow: str | None = None) -> web.Response:
    headers = {"Allow": allow} if allow else None
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json", headers=headers)
