"""Section G of the failure cases: routing, as it shows in who got what, the access log and the metrics."""

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.upstream import Script, json_answer
from tests.conformance.harness import CHAT, JSON, OK, Finished, Serve, chat, scrape, silent

OURS = {"routing": {"strategy": "expected_latency"}}
LONG = "long system prompt " * 2_000
BLIND = ["random", "round_robin", "least_outstanding_requests", "prefix_aware", "expected_latency"]


async def fast(call: Call) -> None:
    await call.send(OK)


@asynccontextmanager
async def fleet(n: int, script: Script = fast, **options: Any) -> AsyncIterator[list[FakeUpstream]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeUpstream(script, **options)) for _ in range(n)]


async def ask(app: App, body: bytes, target: str = CHAT) -> int:
    async with RawClient(app.url) as client:
        return (await client.request("POST", target, body, [JSON])).status


async def health(app: App) -> int:
    async with RawClient(app.url) as client:
        return (await client.request("GET", "/health")).status


async def listed(app: App) -> None:
    """Until all have said which models they serve."""
    assert app.admin_url is not None
    async with RawClient(app.admin_url) as admin:
        while not all(one["models"] for one in json.loads((await admin.request("GET", "/instances")).body)):
            await asyncio.sleep(0)


def shares(instances: list[FakeUpstream]) -> list[int]:
    return [len(one.calls) for one in instances]


class Gathering:
    """A script that answers nobody until `n` have come, to whichever instance."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._all = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        self._n -= 1
        if self._n <= 0:
            self._all.set()
        await self._all.wait()
        await call.send(OK)


# ---------------------------------------------------------------------- O54: a hot prefix


@pytest.mark.parametrize("n_instances", [3, 8])
@pytest.mark.parametrize("strategy", ["expected_latency", "prefix_aware"])
async def test_o54_everyone_shares_a_prompt_and_nobody_is_idle(serve: Serve, strategy: str, n_instances: int) -> None:
    n = 20 * n_instances
    script = Gathering(n)
    async with fleet(n_instances, script) as instances, serve(*instances, routing={"strategy": strategy}) as app:
        # A short one of all: what is shared is computed once on each, and then costs nothing.
        async with asyncio.TaskGroup() as group:
            for i in range(n):
                group.create_task(ask(app, chat(f"You are helpful. {'x' * 3000} {i}")))
        assert sum(shares(instances)) == n
        assert min(shares(instances)) >= 1
        # With as many in flight as here, no instance has more than twice its part.
        assert max(shares(instances)) <= 2 * n / n_instances


# ---------------------------------------------------------------------- O55: one hot worker


async def test_o55_a_stuck_instance_takes_no_conversations_from_the_others(serve: Serve, finished: Finished) -> None:
    async with fleet(3) as instances:
        stuck = instances[2]
        stuck.models = ("m", "pinned")
        async with serve(*instances, **OURS) as app:
            await listed(app)
            homes = {}
            for name in "abcdef":
                before = shares(instances)
                assert await ask(app, chat(name + LONG)) == 200
                homes[name] = next(i for i, (a, b) in enumerate(zip(before, shares(instances), strict=True)) if a != b)
            mine = {name: home for name, home in homes.items() if home != 2}
            assert mine
            n_before = len(stuck.calls)
            stuck.script = silent
            clients = [RawClient(app.url) for _ in range(50)]
            async with AsyncExitStack() as stack:
                for client in clients:
                    await stack.enter_async_context(client)
                    body = chat("stuck", model="pinned")
                    await client.send(
                        b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
                    )
                    await client.send(body)
                n_before = len(stuck.calls)
                await stuck.wait_calls(n_before or 1)
                for name, home in mine.items():
                    n_home = shares(instances)[home]
                    assert await ask(app, chat(name + LONG)) == 200
                    assert shares(instances)[home] == n_home + 1, name


# ---------------------------------------------------------------------- O56: equals


@pytest.mark.parametrize("strategy", BLIND)
async def test_o56_cold_prompts_on_an_idle_fleet_are_spread(serve: Serve, strategy: str) -> None:
    n = 60
    async with fleet(3) as instances, serve(*instances, routing={"strategy": strategy}) as app:
        for i in range(n):
            assert await ask(app, chat(f"{i} cold " * 100)) == 200
        # 60 throws of a die with three sides give one side fewer than 5 less often than once in a million.
        assert min(shares(instances)) >= 5, shares(instances)


async def test_o56_load_counts_from_the_decision(serve: Serve) -> None:
    """Not from the first byte: one that is still silent is as busy as one that talks."""
    settings = {"routing": {"strategy": "least_outstanding_requests"}}
    async with fleet(2, silent) as instances, serve(*instances, **settings) as app, AsyncExitStack() as stack:
        for _ in range(10):
            client = await stack.enter_async_context(RawClient(app.url))
            await client.send(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
            # By the answer to this one, the one before has been decided.
            assert await health(app) == 200
        for one in instances:
            await one.wait_calls(5)
        assert shares(instances) == [5, 5]


# ---------------------------------------------------------------------- O57: a herd


@pytest.mark.parametrize("strategy", BLIND[1:])
async def test_o57_a_burst_right_after_the_start_is_spread(serve: Serve, strategy: str) -> None:
    n = 30
    script = Gathering(n)
    async with fleet(3, script) as instances, serve(*instances, routing={"strategy": strategy}) as app:
        async with asyncio.TaskGroup() as group:
            for i in range(n):
                group.create_task(ask(app, chat(f"{i} herd " * 50)))
        assert sum(shares(instances)) == n
        assert max(shares(instances)) <= 0.6 * n, shares(instances)


# ---------------------------------------------------------------------- O58: unequal instances


async def test_o58_a_slow_instance_gets_less_and_is_not_dead(serve: Serve) -> None:
    n_clients, n_each = 24, 6

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.3)
        await call.send(OK)

    async def quick(call: Call) -> None:
        await asyncio.sleep(0.03)
        await call.send(OK)

    async with fleet(3, quick) as instances, serve(*instances, **OURS) as app:
        instances[2].script = slow

        async def client(k: int) -> None:
            for i in range(n_each):
                assert await ask(app, chat(f"{k} {i} distinct " * 100)) == 200

        async with asyncio.TaskGroup() as group:
            for k in range(n_clients):
                group.create_task(client(k))
        n_slow = len(instances[2].calls)
        assert 0 < n_slow < n_clients * n_each / 4, shares(instances)
        series = await scrape(app)
        assert series['prefixroute_upstream_state{state="up",upstream="gpu-2"}'] == 1.0


# ---------------------------------------------------------------------- O59: a bounded map


async def test_o59_the_map_stops_growing(serve: Serve) -> None:
    limit = 2**20
    sizes = []
    limits = {"index_bytes": limit}
    routing = {"strategy": "expected_latency", "block_tokens": 16}
    async with fleet(2) as instances, serve(*instances, routing=routing, limits=limits) as app:
        async with RawClient(app.url) as client:
            for i in range(400):
                await client.request("POST", CHAT, chat(f"{i:08} " * 900), [JSON])
                if i % 50 == 49:
                    sizes.append((await scrape(app))["prefixroute_index_bytes"])
            assert max(sizes) <= limit
            assert sizes[-1] <= sizes[len(sizes) // 2] * 1.1
            # What came last is still known: the oldest gave way.
            await client.request("POST", CHAT, chat(f"{399:08} " * 900), [JSON])
        assert (await scrape(app))["prefixroute_matched_tokens_total"] > 0


# ---------------------------------------------------------------------- O60: a restarted instance


async def test_o60_an_instance_that_was_gone_is_thought_empty(serve: Serve, finished: Finished) -> None:
    async with fleet(2) as instances, serve(*instances, **OURS, health={"eject_s": 0.05}) as app:
        await ask(app, chat(LONG))
        home = 0 if instances[0].calls else 1
        await ask(app, chat(LONG))
        assert finished()[-1]["matched_tokens"] > 0
        await instances[home].stop()
        assert await ask(app, chat(LONG)) == 200
        assert (await scrape(app))[f'prefixroute_index_blocks{{upstream="gpu-{home}"}}'] == 0.0
        await instances[home].start()
        # No flood at its return: the conversation stays where it went.
        await asyncio.sleep(0.2)
        for _ in range(5):
            await ask(app, chat(LONG))
        assert finished()[-1]["upstream"] == f"gpu-{1 - home}"


# ---------------------------------------------------------------------- O61: every shape has a key

TEXT = "a shared beginning " * 400
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": TEXT}]}),
    "chat, developer": (CHAT, {"messages": [{"role": "developer", "content": TEXT}, {"role": "user", "content": "x"}]}),
    "chat, parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}),
    "chat, tools": (
        CHAT,
        {
            "tools": [{"type": "function", "function": {"name": "f", "description": TEXT, "parameters": {"a": 1}}}],
            "messages": [{"role": "user", "content": "x"}],
        },
    ),
    "chat, tool results": (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": TEXT}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": TEXT},
            ]
        },
    ),
    "completions": ("/v1/completions", {"prompt": TEXT}),
    "completions, a batch": ("/v1/completions", {"prompt": [TEXT, "other"]}),
    "completions, ids": ("/v1/completions", {"prompt": list(range(5_000))}),
    "completions, batches of ids": ("/v1/completions", {"prompt": [list(range(5_000)), [1, 2]]}),
    "responses": ("/v1/responses", {"input": TEXT}),
    "responses, instructions": ("/v1/responses", {"instructions": TEXT, "input": "x"}),
    "responses, items": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]},
    ),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}]}),
    "messages, system": ("/v1/messages", {"system": TEXT, "messages": [{"role": "user", "content": "x"}]}),
    "messages, system blocks": (
        "/v1/messages",
        {"system": [{"type": "text", "text": TEXT}], "messages": [{"role": "user", "content": "x"}]},
    ),
    "invocations": ("/invocations", {"messages": [{"role": "user", "content": TEXT}]}),
    "invocations, prompt": ("/invocations", {"prompt": TEXT}),
    "generate": ("/generate", {"inputs": TEXT}),
    "generate, text": ("/generate", {"text": TEXT}),
    "generate, prompt": ("/generate", {"prompt": TEXT}),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_o61_a_prompt_of_any_shape_is_known_again(serve: Serve, finished: Finished, shape: str) -> None:
    target, fields = SHAPES[shape]
    body = json.dumps({"model": "m", **fields}).encode()
    async with fleet(2) as instances, serve(*instances, **OURS) as app:
        for _ in range(2):
            assert await ask(app, body, target) == 200
        series = await scrape(app)
    first, second = finished()
    assert first["matched_tokens"] == 0
    assert second["matched_tokens"] > 0.5 * second["prompt_tokens"] > 0
    assert second["upstream"] == first["upstream"]
    # To be observed: how much matched, and that nothing had no key.
    assert series["prefixroute_matched_tokens_total"] == second["matched_tokens"]
    assert not [key for key, n in series.items() if "prompts_without_key_total" in key and n]


@pytest.mark.parametrize("target", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"])
async def test_o61_what_has_no_key_is_counted(serve: Serve, target: str) -> None:
    async with fleet(2) as instances, serve(*instances, **OURS) as app:
        for body in (b"{", b"[]", b"{}"):
            assert await ask(app, body, target) == 200
        series = await scrape(app)
    for cause in ("not_json", "not_an_object", "no_prompt"):
        assert series[f'prefixroute_prompts_without_key_total{{cause="{cause}"}}'] == 1.0


# ---------------------------------------------------------------------- O62: images and audio


def picture(seed: int, n_bytes: int = 300_000) -> str:
    return "data:image/png;base64," + base64.b64encode(bytes([seed]) * n_bytes).decode()


MEDIA: dict[str, Callable[[int], dict[str, Any]]] = {
    "image": lambda n: {"type": "image_url", "image_url": {"url": picture(n)}},
    "image by address": lambda n: {"type": "image_url", "image_url": {"url": f"https://pictures.test/{n}.png"}},
    "audio": lambda n: {"type": "input_audio", "input_audio": {"data": picture(n)[22:], "format": "wav"}},
    "video": lambda n: {"type": "video_url", "video_url": {"url": picture(n)}},
}


@pytest.mark.parametrize("kind", MEDIA)
async def test_o62_media_take_part_in_the_key(serve: Serve, finished: Finished, kind: str) -> None:
    def body(n: int) -> bytes:
        parts = [MEDIA[kind](n), {"type": "text", "text": TEXT}]
        return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()

    async with fleet(2) as instances, serve(*instances, **OURS) as app:
        for n in (1, 2, 1):
            assert await ask(app, body(n)) == 200
    one, other, again = finished()
    assert (one["matched_tokens"], again["matched_tokens"] > 1_000) == (0, True)
    # All that is behind another picture is another prompt.
    assert other["matched_tokens"] < 500
    assert again["upstream"] == one["upstream"]


# ---------------------------------------------------------------------- O63: adapters and aliases

NAMES = ["base", "lora-a", "org/base:tag", "org/base:tag@sha256", "Base", "base ", "модель", "a" * 1000]


async def test_o63_each_model_name_has_keys_of_its_own_and_passes_unchanged(serve: Serve, finished: Finished) -> None:
    async with fleet(1) as instances, serve(*instances, **OURS) as app:
        bodies = [
            json.dumps({"model": name, "messages": [{"role": "user", "content": TEXT}]}).encode() for name in NAMES
        ]
        for body in bodies * 2:
            assert await ask(app, body) == 200
        assert instances[0].bodies == bodies * 2
    matched = [line["matched_tokens"] > 0 for line in finished()]
    assert matched == [False] * len(NAMES) + [True] * len(NAMES)


async def test_o63_an_unknown_model_is_the_instances_to_refuse(serve: Serve) -> None:
    refusal = {"error": {"message": "The model `x` does not exist.", "code": 404}}
    async with fleet(2, json_answer(refusal, status=404)) as instances, serve(*instances, **OURS) as app:
        async with RawClient(app.url) as client:
            answer = await client.request("POST", CHAT, chat(model="x"), [JSON])
            assert (answer.status, json.loads(answer.body)) == (404, refusal)
        assert sum(shares(instances)) == 1


async def test_o63_a_request_goes_to_who_lists_its_model(serve: Serve) -> None:
    async with FakeUpstream(models=("a",)) as one, FakeUpstream(models=("org/b:tag",)) as two:
        two.adapters = {"lora-a": "org/b:tag"}
        async with serve(one, two, **OURS) as app:
            await listed(app)
            for model in ("org/b:tag", "lora-a"):
                for _ in range(3):
                    assert await ask(app, chat(model=model)) == 200
        assert shares([one, two]) == [0, 6]


# ---------------------------------------------------------------------- O64: a fault in deciding


class _Broken:
    def pick(self, *_: object) -> None:
        raise ZeroDivisionError

    def record(self, *_: object) -> None:
        raise ZeroDivisionError


async def test_o64_a_policy_that_fails_costs_no_request_and_is_counted(
    serve: Serve, expected_errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_errors.append("strategy custom failed")
    module = ModuleType("somebodys_policy")
    module.make = _Broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_policy", module)
    routing = {"strategy": "custom", "custom": {"factory": "somebodys_policy:make"}}
    n = 20
    async with fleet(2, Gathering(n)) as instances, serve(*instances, routing=routing) as app:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(app, chat(str(i)))) for i in range(n)]
        assert [task.result() for task in tasks] == [200] * n
        assert shares(instances) == [n / 2, n / 2]
        assert (await scrape(app))["prefixroute_policy_faults_total"] >= n


@pytest.mark.parametrize("strategy", [*BLIND, "session", "kv_aware"])
async def test_o64_no_shape_of_a_request_is_too_odd(serve: Serve, strategy: str) -> None:
    odd = [
        *(b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{}", b'{"model":null}', b'{"model":5,"messages":"x"}'),
        *(b'{"messages":[{"content":[{"type":"image_url"}]}]}', b'{"messages":[{"role":1}]}', b'{"prompt":[[[1]]]}'),
        *(b'{"prompt":[-1,1e400,99999999999999999999]}', b'{"input":[{"type":"x"}]}', b'{"system":[[]]}'),
        *(
            b'{"messages":[{"content":"\\ud800"}],"model":"\\ud800"}',
            b'{"messages":' + b"[" * 2000 + b"]" * 2000 + b"}",
        ),
        *(b'{"model":"m","messages":[{"role":"user","content":"a","content":"b"}]}', b"\x00" * 1000),
    ]
    async with fleet(2) as instances, serve(*instances, routing={"strategy": strategy}) as app:
        async with RawClient(app.url) as client:
            for target in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/generate"):
                for body in odd:
                    assert (await client.request("POST", target, body, [JSON])).status == 200, body
        assert sorted(instances[0].bodies + instances[1].bodies) == sorted(odd * 6)
        assert (await scrape(app))["prefixroute_policy_faults_total"] == 0.0


# ---------------------------------------------------------------------- O65: work on the event loop


async def test_o65_a_stream_goes_on_between_huge_prompts(serve: Serve) -> None:
    """In lockstep: each event is read before the next is sent, while the prompts are being looked at."""
    go_on: asyncio.Queue[bytes] = asyncio.Queue()

    async def beats(call: Call) -> None:
        if call.target != "/beat":
            await call.send(OK)
            return
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while piece := await go_on.get():
            await call.send_chunk(piece)
        await call.send_chunk(b"")

    async with fleet(2, beats) as instances, serve(*instances, **OURS) as app, RawClient(app.url) as heart:
        await heart.send(b"GET /beat HTTP/1.1\r\nHost: a\r\n\r\n")
        await heart.begin()
        n_beats = 0
        prompts = [asyncio.create_task(ask(app, chat(f"{i}" + "word " * 100_000))) for i in range(10)]
        while not all(task.done() for task in prompts):
            go_on.put_nowait(b"beat")
            assert await heart.chunk() == b"beat"
            n_beats += 1
        go_on.put_nowait(b"")
        assert await heart.chunk() == b""
        assert [task.result() for task in prompts] == [200] * 10
        # The loop was never all the prompts', from the first to the last.
        assert n_beats > 1
