"""Inference components: routing by copy, through a running router."""

from collections import Counter
from typing import Any

import pytest

from prefixroute.testing import RawClient, json_answer
from tests.integration.stand import (
    PATHS,
    StandWith,
    aware,
    chat,
    component,
    endpoint,
    rule,
    variant,
)

BESIDE = {0: 1, 1: 0, 2: 3, 3: 2}
"""Of each server, the other one on its machine."""
LORA = component("lora", ("left", 0), ("left", 1), ("right", 2), ("right", 3))


def shared(routing: dict[str, Any]) -> dict[str, Any]:
    """An endpoint with a component on four servers of two machines, and others `other-N` on one of these each."""
    others = [component(f"other-{n}", ("left" if n < 2 else "right", n)) for n in range(4)]
    return endpoint("bot", variant(routing=routing), components=[LORA, *others])


@pytest.mark.parametrize("path", PATHS)
async def test_a_prefix_is_kept_on_one_copy_then_on_its_machine_and_then_goes_elsewhere(
    stand: StandWith, path: str
) -> None:
    body, of = chat("a prefix"), {"path": path, "of": "lora"}
    async with stand(shared(aware(threshold=2)), n=4) as s:
        home = await s.send("bot", body, **of)
        for _ in range(4):
            assert await s.send("bot", body, **of) == home
        assert [await s.hold("bot", body, **of) for _ in range(2)] == [home, home]
        # Beside it, as long as that copy is under the threshold, though those elsewhere are idle.
        beside = BESIDE[home]
        assert [await s.hold("bot", body, **of) for _ in range(2)] == [beside, beside]
        # A copy at the threshold is skipped.
        elsewhere = {0, 1, 2, 3} - {home, beside}
        assert {await s.hold("bot", body, **of) for _ in range(2)} == elsewhere
        # And is so although those elsewhere are busier by now.
        assert Counter([await s.hold("bot", body, **of) for _ in range(8)]) == dict.fromkeys(elsewhere, 4)
        await s.let_go()
        assert await s.hold("bot", body, **of) == home
        assert await s.send("bot", body, **of) == home


async def test_a_copy_on_the_machine_that_is_at_the_threshold_is_skipped_for_another_one_there(
    stand: StandWith,
) -> None:
    lora = component("lora", ("left", 0), ("left", 1), ("left", 2), ("right", 3))
    async with stand(endpoint("bot", variant(routing=aware(threshold=2)), components=[lora]), n=4) as s:
        s.app.router.fleet.drain("gpu-3")
        home = await s.send("bot", b"p", of="lora")
        s.app.router.fleet.undrain("gpu-3")
        reached = [await s.hold("bot", b"p", of="lora") for _ in range(7)]
        assert reached[:2] == [home, home]
        assert Counter(reached[2:6]) == dict.fromkeys({0, 1, 2} - {home}, 2)
        assert reached[6] == 3


async def test_where_all_copies_are_on_one_machine_and_full_the_prefix_s_own_is_still_passed_over(
    stand: StandWith,
) -> None:
    lora = component("lora", ("left", 0), ("left", 1))
    async with stand(endpoint("bot", variant(routing=aware(threshold=2)), components=[lora]), n=2) as s:
        home = await s.hold("bot", b"p", of="lora")
        assert await s.hold("bot", b"p", of="lora") == home
        assert [await s.hold("bot", b"p", of="lora") for _ in range(6)] == [1 - home] * 6


async def test_components_on_one_server_do_not_count_for_each_other(stand: StandWith) -> None:
    async with stand(shared(aware(threshold=2)), n=4) as s:
        home = await s.send("bot", b"p", of="lora")
        for _ in range(4):
            assert await s.hold("bot", b"q", of=f"other-{home}") == home
            await s.hold(f"on-{home}")
        # None of theirs is the copy's own.
        assert [await s.hold("bot", b"p", of="lora") for _ in range(2)] == [home, home]
        assert await s.send("bot", b"p", of="lora") == BESIDE[home]


async def test_components_have_prefixes_of_their_own(stand: StandWith) -> None:
    first, second = (component(name, ("left", 0), ("right", 1)) for name in ("first", "second"))
    async with stand(endpoint("bot", variant(routing=aware()), components=[first, second]), n=2) as s:
        home = await s.send("bot", b"p", of="first")
        # Of `second` there are none in flight: its own requests decide where its prefix goes.
        other = await s.hold("bot", b"q", of="second")
        assert await s.send("bot", b"p", of="second") == 1 - other
        assert await s.send("bot", b"p", of="first") == home


async def test_least_outstanding_goes_by_copy(stand: StandWith) -> None:
    async with stand(shared(rule("LEAST_OUTSTANDING_REQUESTS")), n=4) as s:
        for _ in range(5):
            assert await s.hold("bot", of="other-0") == 0
        # By servers, none of these would go to the first.
        assert Counter([await s.hold("bot", of="lora") for _ in range(8)]) == {0: 2, 1: 2, 2: 2, 3: 2}


async def test_a_copy_s_requests_under_way_count_across_a_reload(stand: StandWith) -> None:
    async with stand(shared(aware(threshold=2)), n=4) as s:
        home = await s.send("bot", b"p", of="lora")
        for _ in range(2):
            assert await s.hold("bot", b"p", of="lora") == home
        s.configure(shared(aware(threshold=2)), limits={"max_decisions": 7})
        assert await s.send("bot", b"p", of="lora") == BESIDE[home]
        await s.let_go()
        assert [await s.hold("bot", b"p", of="lora") for _ in range(2)] == [home, home]
        assert await s.send("bot", b"p", of="lora") == BESIDE[home]


async def test_a_client_that_leaves_frees_its_place_on_the_copy(stand: StandWith) -> None:
    async with stand(shared(aware(threshold=1)), n=4) as s:
        home = await s.hold("bot", b"p", of="lora")
        assert await s.send("bot", b"p", of="lora") == BESIDE[home]
        await s.leave()
        assert await s.send("bot", b"p", of="lora") == home


async def test_a_request_that_goes_on_from_a_busy_copy_counts_on_the_other_alone(stand: StandWith) -> None:
    lora = component("lora", ("left", 0), ("right", 1))
    async with stand(endpoint("bot", variant(routing=aware(threshold=1)), components=[lora]), n=2) as s:
        s.fakes[0].script = json_answer({"busy": True}, status=503)
        async with RawClient(s.app.url) as client:
            while not s.fakes[0].calls:
                prefix = b"prefix %d" % len(s.fakes[1].calls)
                assert (await s.ask(client, "bot", prefix, of="lora")).status == 200
        await s.until(lambda: s.app.proxy.n_active == 0)
        s.fakes[0].script = s.script
        # Nothing is left of them: both copies are idle.
        assert {await s.hold("bot", b"new 1", of="lora"), await s.hold("bot", b"new 2", of="lora")} == {0, 1}
