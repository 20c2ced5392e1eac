"""A client at the level of bytes: sends what it is given, reads what comes."""

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """An answer as it came: status line, headers in order and case, unframed body, and the bytes of all of it."""

    status: int
    reason: str
    headers: Headers
    body: bytes
    raw: bytes
    complete: bool
    """Whether the framing said that it was at its end."""
    trailers: Headers = field(default_factory=list)
    interim: tuple["RawAnswer", ...] = ()
    """The 1xx answers that came before, in order."""

    def header(self, name: str) -> str | None:
        """The first value of a header, by name in any case."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def all_headers(self, name: str) -> list[str]:
        """Every value of a header, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower()]


class RawClient:
    """One connection to a base URL, open while its context is. `read_bytes`: a small receive buffer, so it is slow."""

    def __init__(self, url: str, *, read_bytes: int | None = None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or 80
        self._read_bytes = read_bytes

    async def __aenter__(self) -> Self:
        raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        raw.setblocking(False)
        limit = 2**22
        if self._read_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._read_bytes)
            limit = self._read_bytes
        try:
            await asyncio.get_running_loop().sock_connect(raw, (self._host, self._port))
        except BaseException:
            raw.close()
            raise
        self.reader, self.writer = await asyncio.open_connection(sock=raw, limit=limit)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def close(self) -> None:
        """Leaves, wherever the answer stands."""
        self.writer.close()

    def reset(self) -> None:
        """Leaves without a word (RST)."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def half_close(self) -> None:
        """Says that nothing more will be sent, and goes on listening."""
        self.writer.write_eof()

    async def send(self, data: bytes) -> None:
        """Writes bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def request(
        self,
        method: str = "POST",
        target: str = "/v1/chat/completions",
        body: bytes | None = None,
        headers: Headers | None = None,
    ) -> RawAnswer:
        """Sends a request with Host and, for a body, Content-Length; reads its answer."""
        await self.send(head(method, target, body, headers) + (body or b""))
        return await self.answer(method)

    async def begin(self) -> RawAnswer:
        """Reads the head of an answer, and 1xx ones before it; its body is there to be read by `chunk` or `read`."""
        interim: list[RawAnswer] = []
        while True:
            answer = _parsed(await self.reader.readuntil(b"\r\n\r\n"))
            if answer.status >= 200 or answer.status == 101:
                return replace(answer, interim=tuple(interim))
            interim.append(answer)

    async def chunk(self) -> bytes:
        """Reads one chunk of a chunked body; empty at its end. Raises IncompleteReadError when it breaks off."""
        return (await self._chunk())[1]

    async def read(self, n: int) -> bytes:
        """Reads `n` bytes as they are. Raises IncompleteReadError when they break off."""
        return await self.reader.readexactly(n)

    async def wait_closed(self) -> bytes:
        """Until the other side has closed or reset the connection; what it still sent."""
        rest = bytearray()
        with suppress(ConnectionError):
            while piece := await self.reader.read(65_536):
                rest += piece
        return bytes(rest)

    async def answer(self, method: str = "POST") -> RawAnswer:
        """Reads one answer, and 1xx ones before it. One that breaks off is given as far as it came.

        Raises ValueError when it is framed in more than one way.
        """
        begun = await self.begin()
        raw = bytearray(begun.raw)
        codings, lengths = begun.all_headers("transfer-encoding"), begun.all_headers("content-length")
        if len(codings) + len(lengths) > 1 or codings not in ([], ["chunked"]):
            raise ValueError(f"more than one framing: {codings} {lengths}")
        trailers: Headers = []
        if method == "HEAD" or begun.status in (101, 204, 304):
            body, complete = b"", True
        elif codings:
            body, complete = await self._chunked(raw, trailers)
        elif lengths:
            body, complete = await self._exactly(raw, int(lengths[0]))
        else:
            body, complete = await self._to_the_end(raw)
        return replace(begun, body=body, raw=bytes(raw), complete=complete, trailers=trailers)

    async def _exactly(self, raw: bytearray, n: int) -> tuple[bytes, bool]:
        try:
            body, complete = await self.reader.readexactly(n), True
        except asyncio.IncompleteReadError as error:
            body, complete = error.partial, False
        except ConnectionError:
            body, complete = b"", False
        raw += body
        return body, complete

    async def _to_the_end(self, raw: bytearray) -> tuple[bytes, bool]:
        body = bytearray()
        try:
            while piece := await self.reader.read(65_536):
                body += piece
            complete = True
        except ConnectionError:
            complete = False
        raw += body
        return bytes(body), complete

    async def _chunked(self, raw: bytearray, trailers: Headers) -> tuple[bytes, bool]:
        body = bytearray()
        try:
            while True:
                framed, piece = await self._chunk()
                raw += framed
                if not piece:
                    trailers += _fields(framed.split(b"\r\n", 1)[1])
                    return bytes(body), True
                body += piece
        except (asyncio.IncompleteReadError, ConnectionError):
            return bytes(body), False

    async def _chunk(self) -> tuple[bytes, bytes]:
        line = await self.reader.readuntil(b"\r\n")
        if not (n_bytes := int(line.partition(b";")[0], 16)):
            # The last one, and trailers behind it up to an empty line.
            while (field := await self.reader.readuntil(b"\r\n")) != b"\r\n":
                line += field
            return line + field, b""
        framed = await self.reader.readexactly(n_bytes + 2)
        return line + framed, framed[:-2]


def head(method: str, target: str, body: bytes | None, headers: Headers | None = None) -> bytes:
    """A request's head, with Host and, for a body, Content-Length."""
    lines = [f"{method} {target} HTTP/1.1", "Host: router.test"]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers or []]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def chunked(*pieces: bytes) -> bytes:
    """A chunked body of these pieces, its end included."""
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def _parsed(start: bytes) -> RawAnswer:
    first, _, fields = start.partition(b"\r\n")
    _, code, reason = (first.decode("latin-1") + " ").split(" ", 2)
    return RawAnswer(int(code), reason.strip(), _fields(fields), b"", start, complete=False)


def _fields(block: bytes) -> Headers:
    lines = block.decode("latin-1").split("\r\n")
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines if line)]
