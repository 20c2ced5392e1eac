"""A model server that fails as it is told: `python -m tests.chaos.instance PORT JOURNAL`.

Every request for a completion is written to the journal before it is answered, by its marker, so that a kill loses no
count. Lines on standard input set the mode; each is confirmed by a line. Only `refuse` and `black_hole` touch probes.
"""

import asyncio
import os
import re
import socket
import struct
import sys
import time
from enum import Enum
from pathlib import Path

EVENTS = 4
# Long enough that a fault finds requests under way.
_PAUSE_S = 0.015
# Between events, where many streams are to be open at a time.
_SLOW_S = 1.0
_PIECE_BYTES = 65_536
_RESET = struct.pack("ii", 1, 0)
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_MARKER = re.compile(rb"\r\nx-request-id: (\S+)", re.IGNORECASE)


class Mode(Enum):
    NORMAL = "normal"
    GARBAGE = "garbage"
    RESET_HEAD = "reset_head"
    RESET_BODY = "reset_body"
    RESET_CHUNKS = "reset_chunks"
    CLOSE_IDLE = "close_idle"
    UNANSWERED = "unanswered"
    BUSY = "busy"
    REFUSE = "refuse"
    BLACK_HOLE = "black_hole"


def answer_of(marker: str, *, streamed: bool) -> bytes:
    """The whole body of a good answer."""
    if not streamed:
        return b'{"marker":"%s"}' % marker.encode()
    events = b"".join(_event(marker, n) for n in range(EVENTS))
    return events + b"data: [DONE]\n\n"


def _event(marker: str, n: int) -> bytes:
    return b'data: {"marker":"%s","n":%d}\n\n' % (marker.encode(), n)


class _Instance:
    def __init__(self, port: int, journal: Path) -> None:
        self._port = port
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._mode = Mode.NORMAL
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._hole: list[socket.socket] = []

    async def run(self) -> None:
        await self._listen()
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print("ready", flush=True)
        while line := await reader.readline():
            await self._enter(Mode(line.decode().strip()))
            print("done", flush=True)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=512)

    async def _enter(self, mode: Mode) -> None:
        self._mode = mode
        for one in self._hole:
            one.close()
        self._hole = []
        if mode in (Mode.REFUSE, Mode.BLACK_HOLE):
            if self._server is not None:
                self._server.close()
                self._server = None
            for writer in self._writers:
                writer.close()
            if mode is Mode.BLACK_HOLE:
                self._dig()
        elif self._server is None or not self._server.is_serving():
            await self._listen()

    def _dig(self) -> None:
        """A socket whose queue is full: whoever connects from now on hears nothing."""
        hole = socket.socket()
        hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hole.bind(("127.0.0.1", self._port))
        hole.listen(0)
        self._hole.append(hole)
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self._port))
            self._hole.append(filler)

    def _write_down(self, *words: str) -> None:
        # The clock is the machine's, so that journals of several instances can be put in order.
        os.write(self._journal, f"{' '.join(words)} {time.monotonic_ns()}\n".encode())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        n = 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length, marker = _LENGTH.search(head), _MARKER.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if marker is None or not head.startswith(b"POST"):
                    await self._say(writer, _whole(b'{"object":"list","data":[{"id":"m"}]}'))
                    continue
                name = marker[1].decode()
                self._write_down("got", name, "reused" if n else "fresh", self._mode.value)
                n += 1
                if head.startswith(b"POST /flood"):
                    await self._flood(writer, int(body))
                elif not await self._answer(writer, name, b'"stream":true' in body, slow=b'"slow":true' in body):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _flood(self, writer: asyncio.StreamWriter, n_bytes: int) -> None:
        await self._say(writer, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % n_bytes)
        for _ in range(0, n_bytes, _PIECE_BYTES):
            await self._say(writer, bytes(min(n_bytes, _PIECE_BYTES)))
            n_bytes -= _PIECE_BYTES

    async def _answer(self, writer: asyncio.StreamWriter, name: str, streamed: bool, *, slow: bool) -> bool:
        """Whether the connection goes on."""
        mode = self._mode
        await asyncio.sleep(_PAUSE_S)
        # One that has refused meanwhile says nothing more, so it has not begun.
        if mode is Mode.UNANSWERED or writer.is_closing():
            return False
        self._write_down("began", name)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        match mode:
            case Mode.GARBAGE:
                await self._say(writer, b"\x16\x03\x01 this is no HTTP\r\n\r\n")
                return False
            case Mode.RESET_HEAD:
                await self._say(writer, head[:30])
            case Mode.RESET_BODY:
                await self._say(writer, _whole(answer_of(name, streamed=False))[:-5])
            case Mode.RESET_CHUNKS:
                await self._say(writer, head + _chunk(_event(name, 0)) + _chunk(_event(name, 1)))
            case Mode.BUSY:
                await self._say(writer, _whole(b"{}", b"503 Busy"))
                return True
            case _ if streamed:
                await self._say(writer, head)
                for n in range(EVENTS):
                    await asyncio.sleep(_SLOW_S if slow else _PAUSE_S)
                    await self._say(writer, _chunk(_event(name, n)))
                await self._say(writer, _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                return mode is not Mode.CLOSE_IDLE
            case _:
                await self._say(writer, _whole(answer_of(name, streamed=False)))
                return mode is not Mode.CLOSE_IDLE
        # What was said reaches the router before the reset does.
        await asyncio.sleep(_PAUSE_S)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
        return False

    @staticmethod
    async def _say(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()


def _whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


if __name__ == "__main__":
    asyncio.run(_Instance(int(sys.argv[1]), Path(sys.argv[2])).run())
