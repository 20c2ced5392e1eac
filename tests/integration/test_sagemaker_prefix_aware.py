"""SageMaker's PREFIX_AWARE through a running router, each of its rules beside what would nearly be it."""

import json
from typing import Any

import pytest

from tests.integration.aws import runtime
from tests.integration.stand import (
    LENGTH,
    OPENAI,
    PATHS,
    STREAM,
    THRESHOLD,
    StandWith,
    aware,
    chat,
    component,
    endpoint,
    rule,
    variant,
    within,
)

# ------------------------------------------------------------------ PREFIX_AWARE: what of a request is its prefix


def bot() -> dict[str, Any]:
    return endpoint("bot", variant(routing=aware()))


def with_byte(at: int, byte: bytes, n: int = 2_000) -> bytes:
    """A body that differs from another at one byte at most."""
    return b"a" * at + byte + b"a" * (n - at - 1)


@pytest.mark.parametrize("path", ["invocations", STREAM])
async def test_of_a_body_the_first_bytes_count(stand: StandWith, path: str) -> None:
    async with stand(bot()) as s:
        share = s.share_a_prefix
        assert await share("bot", with_byte(LENGTH, b"1"), with_byte(LENGTH, b"2"), path=path)
        assert not await share("bot", with_byte(LENGTH - 1, b"1"), with_byte(LENGTH - 1, b"2"), path=path)
        assert not await share("bot", with_byte(0, b"1"), with_byte(0, b"2"), path=path)


@pytest.mark.parametrize("path", ["invocations", STREAM])
async def test_of_a_body_bytes_count_and_not_characters(stand: StandWith, path: str) -> None:
    def body(same: int, end: str) -> bytes:
        return b'{"messages":[{"content":"' + ("é" * same + end * 600 + '"}]}').encode()

    async with stand(bot()) as s:
        # 25 bytes, and 500 characters of two bytes: 1,025 bytes, and 525 characters.
        assert await s.share_a_prefix("bot", body(500, "è"), body(500, "ê"), path=path)
        assert not await s.share_a_prefix("bot", body(498, "è"), body(498, "ù€"), path=path)
        # At byte 1,023 a character begins, of whose two bytes the first is the same in both.
        assert body(499, "è")[:LENGTH] == body(499, "ê")[:LENGTH]
        assert await s.share_a_prefix("bot", body(499, "è"), body(499, "ê"), path=path)


async def test_a_body_that_is_shorter_than_the_length_counts_whole(stand: StandWith) -> None:
    async with stand(bot()) as s:
        assert await s.share_a_prefix("bot", b"short", b"short")
        assert not await s.share_a_prefix("bot", b"shorter", b"shorter, and more")
        assert not await s.share_a_prefix("bot", b"one end: a", b"one end: b")
        # All of it, and no more than that: the longer one's first bytes are the shorter one's.
        assert not await s.share_a_prefix("bot", b"b" * (LENGTH - 1), b"b" * LENGTH)
        assert await s.share_a_prefix("bot", b"c" * LENGTH, b"c" * (LENGTH + 1))


@pytest.mark.parametrize("path", ["invocations", STREAM])
async def test_a_body_counts_as_it_is_written(stand: StandWith, path: str) -> None:
    text = "x" * 2_000
    plain = {"model": "m", "messages": [{"role": "user", "content": text}]}
    near_misses: list[dict[str, Any]] = [
        {"model": "n", "messages": plain["messages"]},
        {"messages": plain["messages"], "model": "m"},
        {"model": "m", "messages": [{"role": "system", "content": text}]},
        {"model": "m", "messages": [{"role": "user", "name": "eve", "content": text}]},
    ]
    async with stand(bot()) as s:
        for near in near_misses:
            assert not await s.share_a_prefix("bot", json.dumps(plain).encode(), json.dumps(near).encode(), path=path)
        spaced = json.dumps(plain, indent=1).encode()
        assert not await s.share_a_prefix("bot", json.dumps(plain).encode(), spaced, path=path)
        # What is behind the prefix is no part of it, be it the model.
        behind = [json.dumps({**plain, "model": model}).encode() for model in ("m", "n")]
        turned = [json.dumps({"messages": plain["messages"], "model": model}).encode() for model in ("m", "n")]
        assert not await s.share_a_prefix("bot", *behind, path=path)
        assert await s.share_a_prefix("bot", *turned, path=path)


async def test_a_body_need_not_be_json(stand: StandWith) -> None:
    async with stand(bot()) as s:
        assert await s.share_a_prefix("bot", b"\x00\xff" * 600 + b"1", b"\x00\xff" * 600 + b"2")
        assert not await s.share_a_prefix("bot", b"\x00\xff" * 500 + b"1", b"\x00\xff" * 500 + b"2")


async def test_on_the_openai_path_characters_of_the_messages_text_count(stand: StandWith) -> None:
    async with stand(bot()) as s:

        async def share(first: str, second: str) -> bool:
            return await s.share_a_prefix("bot", chat(first), chat(second), path=OPENAI)

        assert await share("a" * LENGTH + "1", "a" * LENGTH + "2")
        assert not await share("b" * (LENGTH - 1) + "1", "b" * (LENGTH - 1) + "2")
        # Of two or four bytes each, written out or escaped: characters they are.
        assert await share("é" * LENGTH + "1", "é" * LENGTH + "2")
        assert not await share("é" * (LENGTH - 1) + "1", "é" * (LENGTH - 1) + "2")
        assert await share("😀" * LENGTH + "1", "😀" * LENGTH + "2")
        assert not await share("😀" * (LENGTH - 1) + "1", "😀" * (LENGTH - 1) + "2")
        assert not await share("short", "short, and more")
        assert await share("short as well", "short as well")


async def test_on_the_openai_path_nothing_but_the_text_counts(stand: StandWith) -> None:
    text = "x" * 900
    turns = [{"role": "system", "content": text}, {"role": "user", "content": "y" * 200}]
    plain: dict[str, Any] = {"model": "m", "messages": turns}
    equals = [
        json.dumps(plain, indent=2).encode(),
        json.dumps({"stream": False, "temperature": 0.5, "messages": turns, "model": "m"}).encode(),
        json.dumps({**plain, "model": "another"}).encode(),
        json.dumps({"messages": turns}).encode(),
        json.dumps({**plain, "tools": [{"type": "function", "function": {"name": "f"}}]}).encode(),
        json.dumps(
            {**plain, "messages": [{"content": t["content"], "name": "eve", "role": "user"} for t in turns]}
        ).encode(),
        json.dumps(
            {**plain, "messages": [{**turns[0], "content": [{"type": "text", "text": text}]}, turns[1]]}
        ).encode(),
    ]
    async with stand(bot()) as s:
        for same in equals:
            assert await s.share_a_prefix("bot", json.dumps(plain).encode(), same, path=OPENAI), same
        # The text of all messages together has the length, and the last of them is in it: 900 characters and 124.
        for letter in "xé":
            for at, shares in ((124, True), (123, False)):
                first = {"role": "system", "content": letter * 900}
                ends = [[first, {"role": "user", "content": "z" * at + end}] for end in "12"]
                bodies = [json.dumps({"model": "m", "messages": messages}).encode() for messages in ends]
                assert await s.share_a_prefix("bot", *bodies, path=OPENAI) is shares


async def test_on_an_inference_component_s_openai_path_characters_count_too(stand: StandWith) -> None:
    of = {"path": OPENAI, "of": "lora"}
    lora = component("lora", ("left", 0), ("right", 1))
    async with stand(endpoint("bot", variant(routing=aware()), components=[lora])) as s:
        assert await s.share_a_prefix("bot", chat("é" * LENGTH + "1"), chat("é" * LENGTH + "2", model="n"), **of)
        assert not await s.share_a_prefix("bot", chat("é" * 1_023 + "1"), chat("é" * 1_023 + "2"), **of)
        assert await s.share_a_prefix("bot", b"1" * LENGTH + b"1", b"1" * LENGTH + b"2", of="lora")


# ------------------------------------------------------------------ PREFIX_AWARE: where a prefix goes


@pytest.mark.parametrize("path", PATHS)
async def test_reaching_the_threshold_spills_and_a_spill_does_not_move_the_prefix(stand: StandWith, path: str) -> None:
    body = chat("a prefix")
    async with stand(bot()) as s:
        home = await s.hold("bot", body, path=path)
        for _ in range(THRESHOLD - 2):
            assert await s.hold("bot", body, path=path) == home
        # One below the threshold it stays, though others are idle.
        assert await s.send("bot", body, path=path) == home
        assert await s.hold("bot", body, path=path) == home
        for _ in range(6):
            assert await s.send("bot", body, path=path) != home
        await s.let_go()
        for _ in range(THRESHOLD - 1):
            await s.hold(f"on-{home}")
        assert await s.send("bot", body, path=path) == home


async def test_the_threshold_counts_all_that_is_in_flight_on_the_instance_and_nothing_that_is_over(
    stand: StandWith,
) -> None:
    body = chat("a prefix")
    other = endpoint("other", variant("some", 0, 1, 2, routing=aware()))
    async with stand(bot(), other) as s:
        home = await s.send("bot", body)
        for _ in range(2 * THRESHOLD):
            assert await s.send("bot", body) == home
        for _ in range(THRESHOLD):
            await s.hold(f"on-{home}")
        assert await s.send("bot", body) != home
        # And each endpoint has prefixes of its own.
        assert await s.send("other", body) != home


async def test_a_spill_goes_where_fewest_are_in_flight(stand: StandWith) -> None:
    async with stand(bot(), n=4) as s:
        home = await s.send("bot", b"p")
        idle, *others = [n for n in range(4) if n != home]
        for n in others:
            await s.hold(f"on-{n}")
        for _ in range(THRESHOLD):
            await s.hold(f"on-{home}")
        for _ in range(6):
            assert await s.send("bot", b"p") == idle
        # Elsewhere it is, even where that is busier than the prefix's own instance.
        for n in (idle, idle, idle, idle, *others * 4):
            await s.hold(f"on-{n}")
        for _ in range(6):
            assert await s.send("bot", b"p") == idle


async def test_a_new_prefix_starts_where_fewest_are_in_flight(stand: StandWith) -> None:
    async with stand(bot()) as s:
        await s.hold("on-0")
        await s.hold("on-2")
        for n in range(8):
            assert await s.send("bot", b"prefix %d" % n) == 1
        await s.let_go()
        await s.hold("on-1")
        for n in range(8):
            assert await s.send("bot", b"prefix %d" % n) == 1


async def test_where_one_instance_can_serve_no_prefix_is_remembered(stand: StandWith) -> None:
    async with stand(endpoint("bot", variant("two", 0, 1, routing=aware()))) as s:
        s.app.router.fleet.drain("gpu-1")
        assert await s.send("bot", b"p") == 0
        s.app.router.fleet.undrain("gpu-1")
        await s.hold("on-0")
        assert await s.send("bot", b"p") == 1
        # From now on it is.
        await s.let_go()
        await s.hold("on-1")
        assert await s.send("bot", b"p") == 1


# ------------------------------------------------------------------ PREFIX_AWARE: the id


@pytest.mark.parametrize("path", PATHS)
async def test_the_id_separates_applications_that_share_a_prefix(stand: StandWith, path: str) -> None:
    async with stand(bot()) as s:

        async def share(one: str | None, other: str | None) -> bool:
            first = {"path": path, "identity": one}
            return await s.share_a_prefix("bot", body, body, first_options=first, path=path, identity=other)

        for n, (one, other, shares) in enumerate(
            [
                ("app-1", "app-1", True),
                ("app-1", "app-2", False),
                ("app-1", None, False),
                (None, "app-1", False),
                ("app-1", "APP-1", False),
                ("a" * 64, "a" * 63 + "b", False),
                ("an app of two words", "an app of two words", True),
            ]
        ):
            body = chat(f"prefix {n}")
            assert await share(one, other) is shares, (one, other)


async def test_the_id_is_what_aws_s_own_client_calls_it(stand: StandWith) -> None:
    async with stand(bot()) as s, runtime(s.app.url) as aws:
        home = await s.send("bot", b"p", identity="app")
        await s.hold(f"on-{home}")
        n_calls = len(s.fakes[home].calls)
        await aws.invoke(b"p", EndpointName="bot", PrefixAwareId="app")
        await aws.stream(b"p", EndpointName="bot", PrefixAwareId="app")
        assert len(s.fakes[home].calls) == n_calls + 2
        await aws.invoke(b"p", EndpointName="bot", PrefixAwareId="another")
        await aws.stream(b"p", EndpointName="bot")
        assert len(s.fakes[home].calls) == n_calls + 2


async def test_the_same_id_with_another_prefix_is_another_prefix(stand: StandWith) -> None:
    async with stand(bot()) as s:
        assert not await s.share_a_prefix("bot", b"one", b"other", identity="app")
        # Nor does what stands behind the id go into it.
        assert not await s.share_a_prefix(
            "bot", b"pp" + b"x", b"p" + b"x", first_options={"identity": "a"}, identity="ap"
        )


@pytest.mark.parametrize("strategy", ["LEAST_OUTSTANDING_REQUESTS", "KV_AWARE"])
async def test_only_prefix_aware_reads_the_id(stand: StandWith, strategy: str) -> None:
    async with stand(endpoint("bot", variant(routing=rule(strategy)))) as s:
        assert not await s.share_a_prefix("bot", b"p", b"p", identity="app")


async def test_random_does_not_read_the_id(stand: StandWith) -> None:
    async with stand(endpoint("bot", variant())) as s:
        found, _ = await s.spread("bot", 150, b"p", identity="app")
        assert all(within(150, 1 / 3, found[n]) for n in range(3)), found


# ------------------------------------------------------------------ PREFIX_AWARE: another configuration


async def test_homes_survive_a_reload_of_the_same_rule(stand: StandWith) -> None:
    async with stand(bot(), endpoint("other", variant())) as s:
        home = await s.send("bot", b"p")
        s.configure(endpoint("bot", variant(routing=aware(), weight=7)), endpoint("new", variant()))
        await s.hold(f"on-{home}")
        assert await s.send("bot", b"p") == home


@pytest.mark.parametrize(
    "routing",
    [aware(length=LENGTH + 1), aware(threshold=THRESHOLD + 1), rule("LEAST_OUTSTANDING_REQUESTS")],
    ids=["length", "threshold", "strategy"],
)
async def test_homes_vanish_with_another_rule(stand: StandWith, routing: dict[str, Any]) -> None:
    async with stand(bot()) as s:
        home = await s.send("bot", b"p")
        s.configure(endpoint("bot", variant(routing=routing)))
        await s.hold(f"on-{home}")
        assert await s.send("bot", b"p") != home


async def test_homes_vanish_with_the_variant_s_name(stand: StandWith) -> None:
    async with stand(bot()) as s:
        home = await s.send("bot", b"p")
        s.configure(endpoint("bot", variant("new", routing=aware())))
        await s.hold(f"on-{home}")
        assert await s.send("bot", b"p") != home


async def test_a_prefix_whose_instance_leaves_the_variant_moves(stand: StandWith) -> None:
    async with stand(endpoint("bot", variant("all", 0, 1, 2, routing=aware()))) as s:
        home = await s.send("bot", b"p")
        stay, fuller = [n for n in range(3) if n != home]
        s.configure(endpoint("bot", variant("all", stay, fuller, routing=aware())))
        await s.hold(f"on-{fuller}")
        assert await s.send("bot", b"p") == stay
        await s.let_go()
        await s.hold(f"on-{stay}")
        assert await s.send("bot", b"p") == stay
