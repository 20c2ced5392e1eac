"""One timer for many waits: none of them too long, none cut short."""

import asyncio

from prefixroute.http.patience import Patience


class Ended:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.came = asyncio.Event()
        self.at_s = 0.0

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self.at_s = asyncio.get_running_loop().time()
        self.came.set()


async def test_a_wait_ends_when_nothing_is_heard() -> None:
    loop, ended = asyncio.get_running_loop(), Ended()
    began_s = loop.time()
    Patience(loop, ended).wait(0.05, "silent for {:g} s")
    await asyncio.wait_for(ended.came.wait(), 10)
    assert ended.texts == ["silent for 0.05 s"]
    assert ended.at_s - began_s >= 0.05


async def test_what_is_heard_begins_it_again() -> None:
    loop, ended = asyncio.get_running_loop(), Ended()
    patience = Patience(loop, ended)
    patience.wait(0.1, "{}")
    await asyncio.sleep(0.06)
    patience.heard_s = heard_s = loop.time()
    await asyncio.wait_for(ended.came.wait(), 10)
    assert ended.at_s - heard_s >= 0.1


async def test_a_shorter_wait_does_not_last_as_long_as_the_one_before() -> None:
    loop, ended = asyncio.get_running_loop(), Ended()
    patience = Patience(loop, ended)
    patience.wait(3600, "long")
    patience.rest()
    patience.wait(0.01, "short")
    await asyncio.wait_for(ended.came.wait(), 10)
    patience.close()
    assert ended.texts == ["short"]


async def test_a_longer_wait_is_not_cut_short_by_the_timer_of_the_one_before() -> None:
    loop, ended = asyncio.get_running_loop(), Ended()
    patience = Patience(loop, ended)
    patience.wait(0.03, "short")
    patience.rest()
    began_s = loop.time()
    patience.wait(0.2, "long")
    await asyncio.wait_for(ended.came.wait(), 10)
    assert ended.texts == ["long"]
    assert ended.at_s - began_s >= 0.2


async def test_whoever_rests_waits_for_nothing() -> None:
    loop, ended = asyncio.get_running_loop(), Ended()
    patience, closed, endless = Patience(loop, ended), Patience(loop, ended), Patience(loop, ended)
    for one in (patience, closed, endless):
        one.wait(0.01, "{}")
    patience.rest()
    closed.close()
    endless.wait(None, "{}")
    await asyncio.sleep(0.1)
    assert not ended.texts


async def test_waits_that_end_well_share_one_timer() -> None:
    loop = asyncio.get_running_loop()
    n_set = 0
    real = loop.call_later

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal n_set
        n_set += 1
        return real(*args, **kwargs)  # type: ignore[arg-type]

    loop.call_later = counted  # type: ignore[method-assign, assignment]
    patience = Patience(loop, Ended())
    for _ in range(100):
        patience.wait(3600, "{}")
        patience.rest()
    patience.close()
    assert n_set == 1
