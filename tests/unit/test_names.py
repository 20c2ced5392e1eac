"""Look-ups of names: one at a time for each, whoever asks, and old answers while a new one takes long."""

import asyncio
import socket
from typing import Any

import pytest

from prefixroute.names import KEPT_S, Names

HERE = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))
THERE = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 1))


class Lookups:
    """Stands for the loop's own, which would ask a name server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        self.found: Any = [HERE]
        self.may_end = asyncio.Event()
        self.may_end.set()
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self.look_up)

    async def look_up(self, host: str, port: int, **_: Any) -> Any:
        self.n += 1
        await self.may_end.wait()
        if isinstance(self.found, OSError):
            raise self.found
        return self.found


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_burst_is_one_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups, names = Lookups(monkeypatch), Names()
    lookups.may_end.clear()
    asking = [asyncio.create_task(names.addresses("gpu", 1)) for _ in range(200)]
    await asyncio.sleep(0)
    lookups.may_end.set()
    assert await asyncio.gather(*asking) == [[HERE]] * 200
    assert await names.addresses("gpu", 1) == [HERE]
    assert lookups.n == 1


async def test_who_leaves_takes_the_look_up_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups, names = Lookups(monkeypatch), Names()
    lookups.may_end.clear()
    one, other = (asyncio.create_task(names.addresses("gpu", 1)) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.sleep(0)
    lookups.may_end.set()
    assert await other == [HERE]
    assert lookups.n == 1


async def test_addresses_are_asked_for_again_in_time_or_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups, clock = Lookups(monkeypatch), Clock()
    names = Names(clock)
    assert await names.addresses("gpu", 1) == [HERE]
    lookups.found = [THERE]
    assert await names.addresses("gpu", 1) == [HERE]
    clock.now_s += KEPT_S
    assert await names.addresses("gpu", 1) == [THERE]
    lookups.found = [HERE]
    names.doubt("gpu", 1)
    assert await names.addresses("gpu", 1) == [HERE]
    assert lookups.n == 3


async def test_old_addresses_serve_while_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups, clock = Lookups(monkeypatch), Clock()
    names = Names(clock)
    await names.addresses("gpu", 1)
    clock.now_s += KEPT_S
    lookups.may_end.clear()
    for _ in range(3):
        assert await names.addresses("gpu", 1) == [HERE]
    assert lookups.n == 2
    lookups.found = socket.gaierror(socket.EAI_AGAIN, "try again")
    lookups.may_end.set()
    assert await names.addresses("gpu", 1) == [HERE]


async def test_a_name_that_nobody_knows_is_not_asked_for_by_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups, clock = Lookups(monkeypatch), Clock()
    names = Names(clock)
    lookups.found = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    for _ in range(5):
        with pytest.raises(socket.gaierror, match="not known"):
            await names.addresses("gpu", 1)
    assert lookups.n == 1
    lookups.found = [HERE]
    clock.now_s += 1.0
    assert await names.addresses("gpu", 1) == [HERE]
