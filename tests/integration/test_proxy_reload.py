"""A router whose configuration changes while it works: new requests go by the new one, those under way go on."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.config import Settings
from prefixroute.core.fleet import State
from prefixroute.errors import ConfigError
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import RawAnswer
from prefixroute.testing.upstream import json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"


def changed(app: App, *upstreams: FakeUpstream | dict[str, Any], **tables: Any) -> Settings:
    """As it is, but for these tables, and these instances (gpu-0, gpu-1, …) if there are any."""
    now = app.settings.model_dump()
    if upstreams:
        now["fleet"]["instances"] = [
            one if isinstance(one, dict) else {"url": one.url, "name": f"gpu-{n}"} for n, one in enumerate(upstreams)
        ]
    for name, table in tables.items():
        now[name] = {**now[name], **table} if isinstance(table, dict) else table
    return Settings.model_validate(now)


async def ask(
    app: App, target: str = CHAT, method: str = "POST", body: bytes | None = BODY, **options: Any
) -> RawAnswer:
    async with RawClient(app.url) as client:
        return await client.request(method, target, body=body, **options)


def waits(then: asyncio.Event) -> Callable[[Call], Awaitable[None]]:
    async def script(call: Call) -> None:
        await then.wait()
        await json_answer({"ok": True})(call)

    return script


# Who there is


async def test_a_new_instance_gets_requests_once_a_probe_has_passed(serve: Serve, until: Until) -> None:
    heard = asyncio.Event()
    async with FakeUpstream() as first, FakeUpstream() as second, serve(first) as app:
        second.health = waits(heard)
        app.apply(changed(app, first, second))
        for _ in range(3):
            assert (await ask(app)).status == 200
        assert (len(first.calls), len(second.calls)) == (3, 0)
        heard.set()
        await until(lambda: app.router.fleet.state("gpu-1").state is State.UP)
        for _ in range(2):
            assert (await ask(app)).status == 200
        assert (len(first.calls), len(second.calls)) == (4, 1)


async def test_who_waits_for_anybody_gets_the_new_instance_at_once(serve: Serve, until: Until) -> None:
    nowhere = {"url": "http://127.0.0.1:1", "name": "gpu-0"}
    async with FakeUpstream() as second, serve("http://127.0.0.1:1", limits={"wait_for_instance_s": 3600.0}) as app:
        # Even while nothing is known of it.
        second.health = waits(asyncio.Event())
        waiting = asyncio.create_task(ask(app))
        await until(lambda: app.waiting == 1)
        app.apply(changed(app, nowhere, {"url": second.url, "name": "gpu-1"}))
        assert (await waiting).status == 200


async def test_a_removed_instance_answers_what_it_has_and_is_forgotten(
    serve: Serve, until: Until, finished: Finished
) -> None:
    last = asyncio.Event()
    async with FakeUpstream(waits(last)) as first, FakeUpstream() as second, serve(first) as app:
        under_way = asyncio.create_task(ask(app))
        await first.wait_calls(1)
        app.apply(changed(app, {"url": second.url, "name": "gpu-1"}))
        await second.wait_probed()
        assert (await ask(app)).status == 200
        assert (len(first.calls), len(second.calls)) == (1, 1)
        assert app.router.leaving() == {"gpu-0": 1}
        assert b'prefixroute_in_flight{upstream="gpu-0"} 1.0' in app.metrics.exposition()[0]
        last.set()
        assert (await under_way).status == 200
        await until(lambda: len(finished()) == 2)
        assert (finished()[1]["upstream"], finished()[1]["outcome"]) == ("gpu-0", "ok")
        assert app.router.leaving() == {}
        assert b'"gpu-0"' not in app.metrics.exposition()[0]
        # Its connection was not kept.
        await first.wait_connections(0)


async def test_the_same_name_at_another_address_is_another_instance(serve: Serve, until: Until) -> None:
    last = asyncio.Event()
    async with FakeUpstream(waits(last)) as first, FakeUpstream() as second, serve(first) as app:
        under_way = asyncio.create_task(ask(app))
        await first.wait_calls(1)
        app.parts.stored.record("resp_1", "gpu-0")
        app.apply(changed(app, second))
        await second.wait_probed()
        # What it stores is not what the other one stored.
        assert app.parts.stored.home("resp_1") is None
        slot = app.router.fleet.state("gpu-0").instance.slot
        assert (app.router.load.of(slot).in_flight, app.router.index.n_blocks(slot)) == (0, 0)
        assert b'prefixroute_in_flight{upstream="gpu-0"} 1.0' in app.metrics.exposition()[0]
        assert (await ask(app)).status == 200
        assert len(second.calls) == 1
        last.set()
        await under_way
        assert b'prefixroute_in_flight{upstream="gpu-0"} 0.0' in app.metrics.exposition()[0]


async def test_a_connection_that_fails_to_one_that_left_is_nothing_to_who_has_its_name(
    serve: Serve, until: Until
) -> None:
    """The request goes on to the next instance, which happens to have the same name."""
    async with FakeUpstream() as first, FakeUpstream() as second, serve(first) as app:
        failing = asyncio.Event()

        async def fail(call: Call) -> None:
            await failing.wait()
            call.reset()

        # A kept connection that dies under the request is tried once more, and then refused.
        assert (await ask(app)).status == 200
        first.script = fail
        under_way = asyncio.create_task(ask(app))
        await first.wait_calls(2)
        app.apply(changed(app, second))
        await second.wait_probed()
        seen = []

        async def note(call: Call) -> None:
            seen.append(app.router.fleet.state("gpu-0").state)
            await json_answer({})(call)

        second.script = note
        first.refuse()
        failing.set()
        assert (await under_way).status == 200
        # And not on trial, after a failure that was another's.
        assert seen == [State.UP]


async def test_what_is_known_of_an_instance_stays_when_others_change(serve: Serve) -> None:
    async with FakeUpstream() as first, FakeUpstream() as second, serve(first) as app:
        await ask(
            app, body=json.dumps({"model": "m", "messages": [{"role": "user", "content": "long " * 2000}]}).encode()
        )
        app.router.fleet.drain("gpu-0")
        n_blocks = app.router.index.n_blocks(0)
        assert n_blocks > 0
        app.apply(changed(app, {"url": first.url, "name": "gpu-0", "models": ["m", "n"]}, second))
        state = app.router.fleet.state("gpu-0")
        assert (state.instance.slot, state.draining, state.state) == (0, True, State.UP)
        assert app.router.index.n_blocks(0) == n_blocks
        assert app.router.fleet.knows_model("n")
        app.apply(changed(app, {"url": first.url, "name": "gpu-0", "capacity_tokens": 5120}, second))
        assert (app.router.capacity_tokens("gpu-0"), app.router.is_capacity_told("gpu-0")) == (5120, True)
        app.apply(changed(app, first, second))
        assert not app.router.is_capacity_told("gpu-0")


async def test_a_new_instance_can_be_drained_and_a_removed_one_cannot(serve: Serve) -> None:
    async with FakeUpstream() as first, FakeUpstream() as second, serve(first, admin={"port": 0}) as app:

        async def drain(name: str) -> int:
            async with RawClient(app.admin_url or "") as admin:
                return (await admin.request("POST", f"/instances/{name}/drain", body=b"")).status

        assert [await drain("gpu-0"), await drain("gpu-1")] == [200, 404]
        app.apply(changed(app, {"url": second.url, "name": "gpu-1"}))
        assert [await drain("gpu-0"), await drain("gpu-1")] == [404, 200]


async def test_labels_do_not_grow_with_every_instance_that_ever_was(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        for n in range(600):
            app.apply(changed(app, {"url": upstream.url, "name": f"pod-{n}"}))
            if n % 100 == 0:
                assert (await ask(app)).status == 200
        text = app.metrics.exposition()[0].decode()
        assert {line.partition('upstream="')[2].partition('"')[0] for line in text.splitlines()} <= {
            "",
            "pod-599",
            "none",
        }


# By what it is decided, and within what


async def test_another_strategy_decides_from_now_on(serve: Serve, finished: Finished) -> None:
    headers = [("x-user", "one")]
    async with FakeUpstream() as first, FakeUpstream() as second, serve(first, second) as app:
        await ask(app, headers=headers)
        app.apply(changed(app, routing={"strategy": "session", "session": {"header": "x-user"}}))
        for _ in range(3):
            await ask(app, headers=headers)
        assert [line["reason"] for line in finished()] == ["turn", "session", "session", "session"]
        assert len({line["upstream"] for line in finished()[1:]}) == 1
        assert b'strategy="session"' in app.metrics.exposition()[0]


async def test_a_policy_keeps_its_memory_when_nothing_of_it_changes(serve: Serve, finished: Finished) -> None:
    routing = {"strategy": "prefix_aware"}
    async with FakeUpstream() as first, FakeUpstream() as second, serve(first, second, routing=routing) as app:
        await ask(app)
        app.apply(changed(app, routing={"default_capacity_tokens": 5120}, response_headers=True))
        assert app.router.capacity_tokens("gpu-0") == 5120
        await ask(app)
        app.apply(changed(app, routing={"prefix_aware": {"concurrency_threshold": 2}}))
        await ask(app)
        assert [line["reason"] for line in finished()] == ["cold", "affinity", "cold"]


async def test_who_is_held_goes_when_nobody_is_held_any_more(serve: Serve, until: Until) -> None:
    hold = {"strategy": "expected_latency", "expected_latency": {"hold_s": 0.001}}
    go_on = asyncio.Event()
    # More than would not be held by default.
    body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"%s"}]}' % (b"long " * 40_000)
    async with FakeUpstream(waits(go_on)) as first, serve(first, routing=hold) as app:
        requests = [asyncio.create_task(ask(app, body=body)) for _ in range(2)]
        await until(lambda: len(app.router.held) == 1)
        app.apply(changed(app, routing={"strategy": "round_robin"}))
        await until(lambda: len(app.router.held) == 0)
        await first.wait_calls(2)
        go_on.set()
        assert [answer.status for answer in await asyncio.gather(*requests)] == [200, 200]


async def test_who_is_held_for_a_removed_instance_goes_to_another(serve: Serve, until: Until) -> None:
    hold = {"strategy": "expected_latency", "expected_latency": {"hold_s": 0.001}}
    go_on = asyncio.Event()
    body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"%s"}]}' % (b"long " * 2000)
    async with FakeUpstream(waits(go_on)) as first, FakeUpstream() as second, serve(first, routing=hold) as app:
        requests = [asyncio.create_task(ask(app, body=body)) for _ in range(3)]
        await until(lambda: len(app.router.held) == 2)
        app.apply(changed(app, {"url": second.url, "name": "gpu-1"}))
        await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        go_on.set()
        assert [answer.status for answer in await asyncio.gather(*requests)] == [200, 200, 200]
        assert (len(first.calls), len(second.calls)) == (1, 2)


@pytest.mark.parametrize(
    ("tables", "before", "after"),
    [
        ({"limits": {"max_body_bytes": 1024}}, 200, 413),
        ({"response_headers": True}, None, "gpu-0"),
        ({"engine_control": "allow"}, 403, 200),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
async def test_limits_and_permissions_are_those_of_the_moment(
    serve: Serve, tables: dict[str, Any], before: object, after: object
) -> None:
    async def see() -> object:
        if "limits" in tables:
            return (await ask(app, body=b"x" * 2000)).status
        if "engine_control" in tables:
            return (await ask(app, "/reset_prefix_cache")).status
        return (await ask(app)).header("x-prefixroute-instance")

    async with FakeUpstream() as upstream, serve(upstream) as app:
        assert await see() == before
        app.apply(changed(app, **tables))
        assert await see() == after


async def test_limits_of_time_hold_for_requests_that_begin_now(serve: Serve, finished: Finished) -> None:
    go_on = asyncio.Event()
    async with FakeUpstream(waits(go_on)) as upstream, serve(upstream) as app:
        patient = asyncio.create_task(ask(app))
        await upstream.wait_calls(1)
        app.apply(changed(app, upstream={"first_byte_timeout_s": 0.01}))
        assert (await ask(app)).status == 504
        app.apply(changed(app, upstream={"first_byte_timeout_s": None}))
        go_on.set()
        assert (await patient).status == 200


async def test_connections_made_by_other_limits_are_kept_no_longer(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        await ask(app)
        await upstream.wait_connections(1)
        app.apply(changed(app, upstream={"idle_timeout_s": 5.0}))
        await ask(app)
        assert upstream.n_connections == 1
        app.apply(changed(app, upstream={"keepalive_s": 5.0}))
        await upstream.wait_connections(0)
        assert (await ask(app)).status == 200


async def test_an_instance_is_tried_as_often_as_the_new_limit_says(serve: Serve, finished: Finished) -> None:
    busy = json_answer({}, status=503)
    async with FakeUpstream(busy) as first, FakeUpstream(busy) as second, serve(first, second) as app:
        await ask(app)
        app.apply(changed(app, retry={"max_attempts": 1}))
        await ask(app)
        assert [line["attempts"].count(",") for line in finished()] == [1, 0]


async def test_probes_follow_the_new_settings(serve: Serve, until: Until) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        fleet = {"health": {"interval_s": 3600.0, "path": "/livez"}}
        app.apply(changed(app, fleet=fleet))
        instance = app.router.fleet.state("gpu-0").instance
        # By hand: the next one is an hour away.
        await app.parts.prober.probe_once(instance)
        assert upstream.calls[-1].target == "/livez"


async def test_sizes_are_cut_to_the_new_bounds(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app:
        for _ in range(3):
            await ask(app)
        assert len(app.parts.decisions) == 3
        app.apply(changed(app, limits={"max_decisions": 1}))
        assert len(app.parts.decisions) == 1


async def test_levels_of_the_log_change(serve: Serve, caplog: pytest.LogCaptureFixture, finished: Finished) -> None:
    root = logging.getLogger()
    level = root.level
    try:
        async with FakeUpstream() as upstream, serve(upstream) as app:
            app.apply(changed(app, log={"level": "warning"}))
            assert root.level == logging.WARNING
            await ask(app)
            assert finished() == []
            app.apply(changed(app, log={"level": "debug", "access": False}))
            assert root.level == logging.DEBUG
            await ask(app)
            assert finished() == []
    finally:
        root.setLevel(level)


# All or nothing


async def test_what_cannot_be_made_changes_nothing(serve: Serve) -> None:
    async with FakeUpstream() as first, FakeUpstream() as second, serve(first) as app:
        before = app.settings
        custom = {"strategy": "custom", "custom": {"factory": "no_such_module:make", "options": {}}}
        with pytest.raises(ConfigError, match="no_such_module"):
            app.apply(changed(app, second, routing=custom, response_headers=True))
        assert app.settings is before
        assert [i.url for i in app.router.fleet.instances] == [first.url]
        assert (await ask(app)).header("x-prefixroute-instance") is None


async def test_under_traffic_no_change_costs_a_request(serve: Serve, finished: Finished) -> None:
    """Instances come and go all the time, but one."""
    async with FakeUpstream() as first, FakeUpstream() as second, FakeUpstream() as third, serve(first) as app:
        stop = asyncio.Event()

        async def client() -> int:
            n = 0
            async with RawClient(app.url) as connection:
                while not stop.is_set():
                    assert (await connection.request("POST", CHAT, body=BODY)).status == 200
                    n += 1
            return n

        clients = [asyncio.create_task(client()) for _ in range(8)]
        fleets = [(first, second), (first, third), (first, second, third), (third, first), (first,)]
        for turn in range(40):
            app.apply(changed(app, *fleets[turn % len(fleets)]))
            n = len(finished())
            while len(finished()) < n + 8:
                await asyncio.sleep(0)
        stop.set()
        assert min(await asyncio.gather(*clients)) > 0
        assert {line["outcome"] for line in finished()} == {"ok"}
