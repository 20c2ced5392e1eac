"""What tests of the command share: requests to it, streams through it, its end."""

import asyncio
import json
import socket
from signal import SIGTERM

import pytest

from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig
from prefixroute.testing.client import RawAnswer, RawClient, head
from prefixroute.testing.upstream import Call, Script
from tests.command import Command

FAST = ServerConfig(EngineConfig(speed=1_000.0))
STORY = "once upon a time there was a router " * 200
# Nobody listens there, nor may.
NOWHERE = "http://127.0.0.1:1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def get(url: str, target: str) -> RawAnswer:
    async with RawClient(url) as client:
        return await client.request("GET", target)


def chat_body(text: str = STORY) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 3, "ignore_eos": True}).encode()


async def chat(url: str, text: str = STORY) -> RawAnswer:
    async with RawClient(url) as client:
        answer = await client.request(body=chat_body(text), headers=[("Content-Type", "application/json")])
    assert answer.status == 200
    assert json.loads(answer.body)["usage"]["completion_tokens"] == 3
    return answer


def begin_stream(then: asyncio.Event) -> Script:
    """A script that streams a piece, and its end after `then`."""

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await call.send_chunk(b"data: first\n\n")
        await then.wait()
        await call.send_chunk(b"data: last\n\n")
        await call.send_chunk(b"")

    return script


async def open_stream(client: RawClient) -> None:
    """Asks for a stream and reads its first piece."""
    body = chat_body()
    await client.send(head("POST", "/v1/chat/completions", body) + body)
    await client.reader.readuntil(b"data: first\n\n\r\n")


async def assert_refused(url: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        await get(url, "/health")


async def stop(command: Command) -> None:
    """Ends it in good order; standard output was left to others."""
    command.signal(SIGTERM)
    assert await command.wait_exit() == (0, "")


async def read_rest(client: RawClient) -> bytes:
    """What else comes, up to the end or a reset."""
    received = bytearray()
    try:
        while piece := await client.reader.read(65_536):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


def assert_broken(rest: bytes) -> None:
    """Of a chunked answer: it does not look complete."""
    assert not rest.endswith(b"0\r\n\r\n")
