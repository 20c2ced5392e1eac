"""What really went to an instance: a tap on the wire, and a reader that knows no leniency."""

import asyncio
import re
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from prefixroute.testing.client import Headers

_REQUEST_LINE = re.compile(rb"([A-Z]+) (/[\x21-\x7e]*) HTTP/1\.1")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([\x20-\x7e\x80-\xff\t]*)")
_SIZE = re.compile(rb"[0-9a-f]+")
_READ_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Sent:
    """A request as it went over the wire."""

    method: str
    target: str
    headers: Headers
    body: bytes

    def all_headers(self, name: str) -> list[str]:
        """Every value of a header, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    @property
    def is_probe(self) -> bool:
        # The router puts a request id on everything that it forwards.
        return not self.all_headers("x-request-id")


class Tapped(Protocol):
    """A server on this machine."""

    @property
    def port(self) -> int: ...


class Wiretap:
    """Sits before an upstream, passes bytes both ways, and keeps what was sent to it. Serve its `url`."""

    def __init__(self, upstream: Tapped) -> None:
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._recorded: list[bytearray] = []

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def sent(self) -> list[Sent]:
        """Requests sent so far, but for probes. Raises AssertionError when a server could read them in two ways."""
        return [one for connection in self.connections for one in connection]

    @property
    def connections(self) -> list[list[Sent]]:
        """The same by the connection that they came on; none without any."""
        by_connection = [[one for one in requests_of(bytes(wire)) if not one.is_probe] for wire in self._recorded]
        return [connection for connection in by_connection if connection]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = bytearray()
        self._recorded.append(wire)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there_reader, there = await asyncio.open_connection("127.0.0.1", self._upstream.port)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, there, wire))
                both.create_task(_pump(there_reader, writer, bytearray()))
        except asyncio.CancelledError:
            # The test is over. asyncio's server would tell of a cancelled handler as of a fault.
            pass
        finally:
            there.close()
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
    try:
        while data := await reader.read(_READ_BYTES):
            record += data
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def requests_of(wire: bytes) -> list[Sent]:
    """The requests in `wire`, one behind the other, whole, and nothing else.

    Raises AssertionError where any of it is not exactly as a sender must write it (RFC 9112).
    """
    found = []
    while wire:
        head, separator, wire = wire.partition(b"\r\n\r\n")
        assert separator, f"a head without an end: {head!r}"
        first, *lines = head.split(b"\r\n")
        line = _REQUEST_LINE.fullmatch(first)
        assert line is not None, f"no request line: {first!r}"
        fields = [_FIELD.fullmatch(field) for field in lines]
        assert None not in fields, f"a line that is no field: {lines}"
        headers = [(field[1].decode(), field[2].decode("latin-1")) for field in fields if field is not None]
        sent = Sent(line[1].decode(), line[2].decode(), headers, b"")
        body, wire = _body_of(sent, wire)
        found.append(Sent(sent.method, sent.target, headers, body))
    return found


def _body_of(sent: Sent, wire: bytes) -> tuple[bytes, bytes]:
    lengths, codings = sent.all_headers("content-length"), sent.all_headers("transfer-encoding")
    assert len(lengths) + len(codings) <= 1, f"more than one framing: {lengths} {codings}"
    assert len(sent.all_headers("host")) == 1, "not one Host"
    if lengths:
        assert re.fullmatch("0|[1-9][0-9]*", lengths[0]), f"an odd length: {lengths[0]}"
        n = int(lengths[0])
        assert len(wire) >= n, "a body that is not whole"
        return wire[:n], wire[n:]
    if not codings:
        return b"", wire
    assert codings == ["chunked"], f"an odd coding: {codings[0]}"
    body = bytearray()
    while True:
        line, _, wire = wire.partition(b"\r\n")
        assert _SIZE.fullmatch(line), f"no size of a chunk: {line!r}"
        n = int(line, 16)
        assert wire[n : n + 2] == b"\r\n", "a chunk that is longer than its size, or trailers"
        piece, wire = wire[:n], wire[n + 2 :]
        if not n:
            return bytes(body), wire
        body += piece
