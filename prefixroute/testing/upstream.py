"""A model server at the level of bytes: it answers what its script writes, when the script writes it."""

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

Script = Callable[["Call"], Awaitable[None]]

# What a server that is told to read by hand takes from its socket at a time: little, so that senders feel it.
_READ_BYTES = 65_536


class Call:
    """One request as it arrived, and the means to answer it. Header names keep their case; the body is unframed."""

    def __init__(self, connection: "_Connection", method: str, target: str, headers: list[tuple[str, str]]) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = b""
        self.reused = connection.n_calls > 0
        """Whether the connection had carried a call before."""
        self._connection = connection

    def header(self, name: str) -> str | None:
        """The first value of a header, by name in any case."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def all_headers(self, name: str) -> list[str]:
        """Every value of a header, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    async def send(self, data: bytes) -> None:
        """Writes bytes as they are."""
        self._connection.writer.write(data)
        await self._connection.writer.drain()

    async def send_chunk(self, data: bytes) -> None:
        """Writes one chunk of a chunked answer; an empty one is its end."""
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def read(self, n: int) -> bytes:
        """The next `n` bytes after the head, framing included. Only of a server that reads by hand."""
        return await self._connection.source.readexactly(n)

    async def read_body(self) -> bytes:
        """The whole body, unframed. Only of a server that reads by hand."""
        self.body = await self._connection.body_of(self)
        return self.body

    def close(self) -> None:
        """Closes the connection in an orderly way, wherever the answer stands."""
        self._connection.writer.close()

    def half_close(self) -> None:
        """Says that nothing more will be sent, and keeps the connection."""
        self._connection.writer.write_eof()

    def reset(self) -> None:
        """Resets the connection (RST)."""
        self._connection.reset()

    def reset_at_next(self) -> None:
        """Lets the connection wait for another request, and resets it at its first byte, as one that crosses a close.

        That request counts as no call.
        """
        self._connection.is_stale = True

    async def wait_disconnected(self) -> None:
        """Until the other side has closed."""
        await self._connection.gone.wait()


class FakeUpstream:
    """Listens on a free loopback port while its context is open. Calls of `script` are kept in `calls`, in order.

    Probes (`GET /health`, `/metrics` and `/v1/models` without a request id) are answered by the fake itself unless
    `script_all` is set. `by_hand`: `script` is called once the head is here and reads the body itself; nothing is read
    ahead, so a sender is held up, and a peer that leaves is noticed by reading only. What a script raises comes out
    where the context ends.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: tuple[str, ...] = ("m",),
        script_all: bool = False,
        by_hand: bool = False,
    ) -> None:
        self.script: Script = script or json_answer({"ok": True})
        self.models = models
        self.adapters: dict[str, str] = {}
        """Listed besides: name → the model that it adapts."""
        self.health_status = 200
        self.health: Script | None = None
        """What answers `GET /health`, if not that status."""
        self.api_key: str | None = None
        """The bearer key without which it answers nothing but 401."""
        self.calls: list[Call] = []
        self.port = 0
        self.n_connections_ever = 0
        self._script_all = script_all
        self._by_hand = by_hand
        self._server: asyncio.Server | None = None
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self._probes: Counter[str] = Counter()
        self._faults: list[BaseException] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def n_connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    @property
    def n_probes(self) -> int:
        """Requests that it answered itself."""
        return self._probes.total()

    @property
    def bodies(self) -> list[bytes]:
        """Of all calls, in order."""
        return [call.body for call in self.calls]

    async def wait_calls(self, n: int) -> list[Call]:
        """Until `script` has been called `n` times in all."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.calls) >= n)
        return self.calls

    async def wait_probed(self, n: int = 1) -> None:
        """Until `n` probes have found it well: then their prober went on to ask for its metrics."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._probes["/metrics"] >= n)

    async def wait_connections(self, n: int) -> None:
        """Until exactly `n` connections are open."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._connections) == n)

    async def start(self) -> None:
        """Listens: on the port it had before, if any, so that it can come back."""
        limit = _READ_BYTES if self._by_hand else 2**20
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=limit, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Refuses connections from now on; those that are open stay so. `start` takes that back."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def stop(self) -> None:
        """Refuses connections from now on and resets those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._connections.values())
        for connection in tuple(self._connections):
            connection.reset()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()
        if self._faults and exc is None:
            raise self._faults[0]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer, by_hand=self._by_hand)
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("outside a task")
        self._connections[connection] = task
        self.n_connections_ever += 1
        await self._tell()
        watch = asyncio.create_task(connection.pump())
        try:
            while (call := await connection.next_call()) is not None:
                await self._answer(call)
                if writer.is_closing():
                    break
                if connection.is_stale:
                    await connection.source.read(1)
                    connection.reset()
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other side left, or the server was stopped
        except Exception as fault:  # noqa: BLE001  a script's fault is the test's
            self._faults.append(fault)
        finally:
            watch.cancel()
            connection.gone.set()
            writer.close()
            del self._connections[connection]
            await self._tell()

    async def _answer(self, call: Call) -> None:
        own = self._own(call)
        if own is None:
            self.calls.append(call)
            await self._tell()
            await self.script(call)
        else:
            self._probes[call.target] += 1
            await self._tell()
            await own(call)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _own(self, call: Call) -> Script | None:
        if self.api_key is not None and call.header("authorization") != f"Bearer {self.api_key}":
            return json_answer({"error": {"message": "who are you?"}}, status=401)
        # The router puts a request id on everything that it forwards.
        if self._script_all or call.header("x-request-id") is not None:
            return None
        match call.target:
            case "/health":
                return self.health or json_answer({}, status=self.health_status)
            case "/v1/models":
                listed = [{"id": name} for name in self.models]
                listed += [{"id": name, "parent": parent} for name, parent in self.adapters.items()]
                return json_answer({"object": "list", "data": listed})
            case "/metrics":
                return json_answer({}, status=404)
        return None


class _Connection:
    """Reads ahead all the time (unless by hand), so that a peer that leaves is noticed during silence too."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, by_hand: bool) -> None:
        self.writer = writer
        self.gone = asyncio.Event()
        self.n_calls = 0
        self.is_stale = False
        self.source = reader if by_hand else asyncio.StreamReader(limit=2**20)
        self._reader = reader
        self._by_hand = by_hand

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        # A closing transport has none.
        if raw is not None and raw.fileno() != -1:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def pump(self) -> None:
        if self._by_hand:
            return
        try:
            while data := await self._reader.read(_READ_BYTES):
                self.source.feed_data(data)
        except ConnectionError:
            pass
        finally:
            self.gone.set()
            self.source.feed_eof()

    async def next_call(self) -> Call | None:
        try:
            head = await self.source.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        call = Call(self, method, target, headers)
        self.n_calls += 1
        if not self._by_hand:
            call.body = await self.body_of(call)
        return call

    async def body_of(self, call: Call) -> bytes:
        if call.header("transfer-encoding") is not None:
            return await self._chunked()
        return await self.source.readexactly(int(call.header("content-length") or 0))

    async def _chunked(self) -> bytes:
        body = bytearray()
        while size := int((await self.source.readuntil(b"\r\n")).partition(b";")[0], 16):
            body += await self.source.readexactly(size)
            await self.source.readexactly(2)
        while await self.source.readuntil(b"\r\n") != b"\r\n":
            pass
        return bytes(body)


@asynccontextmanager
async def black_hole() -> AsyncIterator[str]:
    """A port that answers no connection: its queue is full and nobody takes from it."""
    loop = asyncio.get_running_loop()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        queued = [socket.socket() for _ in range(4)]
        tries = []
        for one in queued:
            one.setblocking(False)
            tries.append(asyncio.create_task(loop.sock_connect(one, listening.getsockname())))
        await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            for task in tries:
                task.cancel()
            await asyncio.gather(*tries, return_exceptions=True)
            for one in queued:
                one.close()


def json_answer(body: object, *, status: int = 200, headers: str = "") -> Script:
    """A script that answers JSON with a Content-Length. `headers`: further lines, each ending in CRLF."""
    return raw_answer(json.dumps(body).encode(), status=status, headers=f"content-type: application/json\r\n{headers}")


def raw_answer(body: bytes, *, status: int = 200, headers: str = "") -> Script:
    """A script that answers `body` with a Content-Length. `headers`: further lines, each ending in CRLF."""

    async def script(call: Call) -> None:
        head = f"HTTP/1.1 {status} Status\r\n{headers}content-length: {len(body)}\r\n\r\n".encode("latin-1")
        await call.send(head + (b"" if call.method == "HEAD" else body))

    return script
