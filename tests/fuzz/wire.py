"""The two sides of the wire, in front of and behind a whole router in this process."""

import asyncio
import re
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self

from prefixroute.app import App, running
from prefixroute.config import Settings
from prefixroute.testing import RawClient
from tests.fuzz import seeds
from tests.fuzz.case import Case, Ending, Finding
from tests.fuzz.targets import Target
from tests.fuzz.watch import PATIENCE_S, Watch, wait_until

# How long a client that has sent everything listens before it leaves. No promise hangs on it.
_LISTEN_S = 0.003
_NOT_KEPT = struct.pack("ii", 1, 0)
_REQUEST_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ /[^\x00-\x20\x7f]* HTTP/1\.1")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00\r\n]*")
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class _Front:
    """A router, and a watch around it."""

    def __init__(self, **tables: Any) -> None:
        self._tables = tables
        self._stack = AsyncExitStack()
        self._servers: list[asyncio.Server] = []
        self.watch = Watch()
        self.app: App

    async def open(self, *factories: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        for factory in factories:
            server = await loop.create_server(factory, "127.0.0.1", 0)
            self._stack.callback(server.close)
            self._servers.append(server)
        settings = Settings.model_validate(
            {
                "listen": {"port": 0},
                "admin": None,
                "fleet": {
                    "instances": [
                        {"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "models": ["m"]}
                        for server in self._servers
                    ],
                    "health": {"interval_s": 3600.0},
                },
                "limits": {"max_body_bytes": 65_536, "max_header_bytes": 4_096, "wait_for_instance_s": 0.0},
                "drain_timeout_s": 0.0,
                "log": {"access": False},
                **self._tables,
            }
        )
        self.app = await self._stack.enter_async_context(running(settings, environ={}))
        states = self.app.router.fleet.states
        await wait_until(lambda: all(s.state.value == "up" for s in states()), lambda: "the instances are not up")
        await asyncio.sleep(0.05)  # the prober's last question
        await self._stack.enter_async_context(self.watch)

    async def close(self) -> None:
        await self._stack.aclose()

    async def rest(self) -> None:
        app = self.app
        await wait_until(lambda: not app.proxy.n_active, lambda: f"{app.proxy.n_active} requests stay under way")
        for one in app.router.fleet.instances:
            load = app.router.load.of(one.slot)
            if (load.in_flight, load.in_flight_tokens, load.pending_work) != (0, 0, 0.0):
                raise Finding(f"a lease was not given back: {load.in_flight} in flight")
        await self.watch.wait_rest()


class RequestTarget:
    """Bytes as a client sends them. Behind the router, whatever is no plain HTTP/1.1 is a finding."""

    corpus = seeds.REQUESTS
    words = seeds.REQUEST_WORDS

    def __init__(self) -> None:
        # Connections to instances close soon, so that what stays open is a leak.
        self._front = _Front(upstream={"keepalive_s": 0.05})
        self._violations: list[str] = []

    async def __aenter__(self) -> Self:
        await self._front.open(*[lambda: _Witness(self._violations)] * 2)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._front.close()

    async def run(self, case: Case) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S), RawClient(self._front.app.url) as client:
                # A router that refuses what came so far may have closed.
                with suppress(ConnectionError):
                    for piece in case.pieces:
                        if client.writer.transport.is_closing():
                            break
                        client.writer.write(piece)
                        await asyncio.sleep(0)
                        await asyncio.sleep(0)
                    if case.ending is Ending.RESET and not client.writer.transport.is_closing():
                        client.reset()
                    elif case.ending is not Ending.CLOSE:
                        said = await self._listen(client)
                        if said and not said.startswith(b"HTTP/1.1 "):
                            raise Finding(f"an answer that is none: {said[:40]!r}")
        except TimeoutError:
            raise Finding("the connection neither ends nor answers") from None
        if self._violations:
            raise Finding(f"passed on: {self._violations.pop()}")
        self._front.watch.check()

    async def rest(self) -> None:
        await self._front.rest()

    @staticmethod
    async def _listen(client: RawClient) -> bytes:
        said = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_S):
                said += await client.reader.read(65_536)
        if not client.writer.transport.is_closing():
            with suppress(OSError):
                client.half_close()
        return said + await client.wait_closed()


class _Witness(asyncio.Protocol):
    """An instance that takes nothing but plain HTTP/1.1, one request at a time."""

    def __init__(self, violations: list[str]) -> None:
        self._violations = violations
        self._data = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a stream, it is one

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            n = request_bytes(self._data)
        except ValueError as error:
            self._violations.append(f"{error}: {self._data[:200]!r}")
            self._transport.abort()
            return
        if n is None:
            return
        if len(self._data) > n:
            self._violations.append(f"bytes behind the request: {self._data[n:][:200]!r}")
        is_head, self._data = self._data.startswith(b"HEAD "), b""
        self._transport.write(_OK[:-2] if is_head else _OK)


def request_bytes(data: bytes) -> int | None:
    """Length of the request that `data` begins with; None while it is incomplete. Raises ValueError."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    line, *fields = data[:end].split(b"\r\n")
    if _REQUEST_LINE.fullmatch(line) is None:
        raise ValueError("no request line")
    if not all(map(_FIELD.fullmatch, fields)):
        raise ValueError("a line that is no field")
    named = [(name.lower(), value.strip(b" \t")) for name, _, value in (field.partition(b":") for field in fields)]
    values = {name: [value for key, value in named if key == name] for name in _ONCE}
    if len(values[b"host"]) != 1:
        raise ValueError("not one Host")
    lengths, codings = values[b"content-length"], values[b"transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        raise ValueError("more than one framing")
    at = end + 4
    if lengths:
        if not lengths[0].isdigit():
            raise ValueError("a length that is no number")
        at += int(lengths[0])
        return at if len(data) >= at else None
    if codings:
        if codings != [b"chunked"]:
            raise ValueError("a coding that is not chunked")
        return _chunked_end(data, at)
    return at


_ONCE = (b"host", b"content-length", b"transfer-encoding")


def _chunked_end(data: bytes, at: int) -> int | None:
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        if re.fullmatch(rb"[0-9a-f]+", data[at:end]) is None:
            raise ValueError("a chunk without a size")
        size = int(data[at:end], 16)
        at = end + 2 + size + 2
        if len(data) < at:
            return None
        if data[at - 2 : at] != b"\r\n":
            raise ValueError("a chunk longer than its size")
        if not size:
            return at


class AnswerTarget:
    """Bytes as an instance's answer. Whatever they are, the request after it gets its own answer, or none."""

    corpus = seeds.ANSWERS
    words = seeds.ANSWER_WORDS

    def __init__(self) -> None:
        limits = {"keepalive_s": 0.05, "first_byte_timeout_s": 0.05, "idle_timeout_s": 0.05}
        self._front = _Front(upstream=limits, retry={"unanswered": "inference"})
        self._n = 0
        self._cases: dict[bytes, Case] = {}

    async def __aenter__(self) -> Self:
        await self._front.open(*[lambda: _Scripted(self._cases)] * 2)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._front.close()

    async def run(self, case: Case) -> None:
        self._n += 1
        name = b"%d" % self._n
        self._cases[name] = case
        try:
            async with asyncio.timeout(PATIENCE_S), RawClient(self._front.app.url) as client:
                await self._exchange(client, name, case.pick)
        except TimeoutError:
            raise Finding("the connection neither ends nor answers") from None
        finally:
            del self._cases[name]
        self._front.watch.check()

    async def rest(self) -> None:
        # An instance whose answers were all lost may be out for a moment: that is no leak.
        await self._front.rest()

    @staticmethod
    async def _exchange(client: RawClient, name: bytes, pick: int) -> None:
        shape = _SHAPES[pick % len(_SHAPES)]
        method = shape[: shape.index(b" ")].decode()
        is_old = b"HTTP/1.0" in shape
        try:
            await client.send(shape.replace(b"\r\n", b"\r\nHost: a\r\nX-Case: %s\r\n" % name, 1))
            answer = await client.answer(method)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except ValueError as error:
            raise Finding(f"the answer that was relayed is none: {error}") from None
        ends = "close" in (answer.header("connection") or "")
        if not answer.complete or ends or is_old or answer.status == 101:
            return
        nonce = b"after-%s" % name
        try:
            await client.send(b"GET /v1/after HTTP/1.1\r\nHost: a\r\nX-After: %s\r\n\r\n" % nonce)
            after = await client.answer("GET")
        except (asyncio.IncompleteReadError, ConnectionError):
            # Kept, it said: but closing is always allowed.
            return
        except ValueError as error:
            raise Finding(f"the answer after it is none: {error}") from None
        # A busy machine may miss the short limits that are set here: the router's own 504 is an answer, too.
        own = (after.status, after.body) == (200, nonce) or (after.status == 504 and b"upstream_timeout" in after.body)
        if not own:
            raise Finding(f"the request after it got another's answer: {after.raw[:200]!r}")


def _shape(line: bytes, body: bytes, more: bytes = b"") -> bytes:
    return line + b"\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), more, body)


_SHAPES = (
    _shape(b"POST /v1/chat/completions HTTP/1.1", seeds.STREAM),
    _shape(b"POST /v1/chat/completions HTTP/1.1", seeds.CHAT),
    _shape(b"POST /v1/responses HTTP/1.1", b'{"model":"m","input":"hi","store":true}'),
    _shape(b"POST /v1/messages HTTP/1.0", seeds.STREAM),
    _shape(b"POST /upload HTTP/1.1", b"x" * 40, b"Content-Type: text/plain\r\n"),
    b"HEAD /x HTTP/1.1\r\n\r\n",
    b"GET /v1/realtime HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
)


class _Scripted(asyncio.Protocol):
    """An instance that answers a request with the bytes of its case, others as a good one does."""

    def __init__(self, cases: Mapping[bytes, Case]) -> None:
        self._cases = cases
        self._data = b""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a stream, it is one

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        # Requests come from the router, in its own form.
        n = request_bytes(self._data)
        if n is None:
            return
        request, self._data = self._data[:n], self._data[n:]
        if (after := re.search(rb"\r\nx-after: (\S+)", request, re.IGNORECASE)) is not None:
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(after[1]), after[1]))
        elif (name := re.search(rb"\r\nx-case: (\d+)", request, re.IGNORECASE)) is not None:
            case = self._cases.get(name[1])
            if case is not None:
                self._task = asyncio.get_running_loop().create_task(self._answer(case))
        else:
            self._transport.write(_OK)

    async def _answer(self, case: Case) -> None:
        transport = self._transport
        for piece in case.pieces:
            if transport.is_closing():
                return
            transport.write(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if case.ending is Ending.RESET:
            raw = transport.get_extra_info("socket")
            if raw is not None and raw.fileno() != -1:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOT_KEPT)
            transport.abort()
        elif case.ending is not Ending.STAY:
            transport.close()


TARGETS: Mapping[str, Callable[[], Target]] = {"requests": RequestTarget, "answers": AnswerTarget}
