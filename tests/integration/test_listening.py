"""Ports: who calls is let in, together, and again after the machine has run out of descriptors."""

import asyncio
import resource
import socket

import pytest

from prefixroute.errors import ListenError
from prefixroute.http.front import listen, listening


class Guest(asyncio.Protocol):
    """Somebody who was let in."""

    here: list["Guest"]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.here.append(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.here.remove(self)


def guests() -> type[Guest]:
    return type("Guests", (Guest,), {"here": []})


def call(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


async def until_there_are(kind: type[Guest], n: int) -> None:
    async with asyncio.timeout(20):
        while len(kind.here) != n:
            await asyncio.sleep(0.01)


async def test_all_who_wait_are_let_in_within_some_turns() -> None:
    kind = guests()
    listener = await listen(kind, "127.0.0.1", 0)
    # The system takes their calls while the loop is busy.
    callers = [call(listener.port) for _ in range(100)]
    n_turns = 0
    while len(kind.here) < len(callers):
        n_turns += 1
        await asyncio.sleep(0)
    # One in a turn would be a hundred.
    assert n_turns < 50
    listener.close()
    for one in callers:
        one.close()
    await until_there_are(kind, 0)


async def test_when_it_is_closed_nobody_comes_and_nobody_has_to_leave() -> None:
    kind = guests()
    listener = await listen(kind, "127.0.0.1", 0)
    caller = call(listener.port)
    await until_there_are(kind, 1)
    listener.close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        call(listener.port)
    caller.close()
    await until_there_are(kind, 0)


async def test_a_name_is_listened_on_at_its_addresses() -> None:
    kind = guests()
    listener = await listen(kind, "localhost", 0)
    caller = socket.create_connection(("localhost", listener.port), timeout=10)
    await until_there_are(kind, 1)
    caller.close()
    listener.close()


async def test_a_port_that_is_taken_is_told() -> None:
    kind = guests()
    listener = await listen(kind, "127.0.0.1", 0)
    with pytest.raises(ListenError, match="another process listens there"):
        await listen(kind, "127.0.0.1", listener.port)
    listener.close()


async def test_without_descriptors_callers_wait_and_are_let_in_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "_PAUSE_S", 0.05)
    kind = guests()
    listener = await listen(kind, "127.0.0.1", 0)
    caller = call(listener.port)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (caller.fileno() + 1, hard))
    try:
        async with asyncio.timeout(20):
            while not caplog.records:
                await asyncio.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "nobody is let in for 0.05 s: Too many open files" in caplog.text
    await until_there_are(kind, 1)
    caller.close()
    listener.close()
