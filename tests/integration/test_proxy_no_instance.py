"""When nobody can take a request: the waiting room, fail open, health, the joined list of models."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.core.fleet import ProbeFailure
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import Script, json_answer, raw_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Finished = Callable[[], list[dict[str, Any]]]

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"
SOON = {"eject_s": 0.01, "eject_max_s": 0.02}
NO_WAIT = {"wait_for_instance_s": 0.0}


# ---------------------------------------------------------------------- the waiting room


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("target", [CHAT, "/v1/audio/transcriptions"])
async def test_a_request_waits_for_an_instance_that_comes_back(
    serve: Serve, until: Until, finished: Finished, n: int, target: str
) -> None:
    """Everybody refuses, so it is the fleet that is away, however many attempts are left."""
    fakes = [FakeUpstream() for _ in range(n)]
    for fake in fakes:
        await fake.start()
    async with serve(*fakes, health=SOON, limits={"wait_for_instance_s": 60.0}) as app, RawClient(app.url) as client:
        for fake in fakes:
            await fake.stop()
        await client.send(head("POST", target, BODY) + BODY)
        await until(lambda: app.metrics.waiting() == 1)
        await fakes[-1].start()
        assert (await client.answer()).status == 200
        assert fakes[-1].bodies == [BODY]
        line = finished()[0]
        assert line["attempts"].endswith("unreachable,answered")
        assert line["waited_ms"] > 0
    for fake in fakes:
        await fake.stop()


async def test_waiting_ends_the_moment_that_an_instance_is_given_back(serve: Serve, until: Until) -> None:
    limits = {"wait_for_instance_s": 60.0}
    everything = lists("b")
    async with (
        FakeUpstream(everything) as one,
        FakeUpstream(everything) as two,
        serve(one, two, limits=limits, admin={"port": 0}) as app,
    ):
        app.router.fleet.drain("gpu-0")
        app.router.fleet.drain("gpu-1")
        clients = [RawClient(app.url) for _ in range(3)]
        requests = [head("POST", CHAT, BODY) + BODY, head("GET", "/x", None), head("GET", "/v1/models", None)]
        for client, request in zip(clients, requests, strict=True):
            await client.__aenter__()
            await client.send(request)
        await until(lambda: app.metrics.waiting() == 3)
        assert app.admin_url is not None
        async with RawClient(app.admin_url) as operator:
            assert (await operator.request("POST", "/instances/gpu-1/undrain", b"")).status == 200
        for client in clients:
            assert (await client.answer()).status == 200
            await client.__aexit__(None, None, None)
        assert one.calls == []


@pytest.mark.parametrize("target", [CHAT, "/v1/messages", "/v1/messages/batches", "/v1/embeddings", "/unknown"])
async def test_waiting_ends_in_the_words_of_the_route(serve: Serve, finished: Finished, target: str) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, limits={"wait_for_instance_s": 0.02}) as app,
        RawClient(app.url) as client,
    ):
        await upstream.stop()
        answer = await client.request("POST", target, BODY)
        assert answer.status == 503
        assert int(answer.header("retry-after") or 0) >= 1
        assert answer.header("content-type") == "application/json"
        assert answer.header("x-request-id") == finished()[0]["request_id"]
        document = json.loads(answer.body)
        if target.startswith("/v1/messages"):
            assert (document["type"], document["error"]["type"]) == ("error", "overloaded_error")
        else:
            assert document["error"]["code"] == "no_instance"
        assert (finished()[0]["outcome"], finished()[0]["status"]) == ("no_instance", 503)
        # The client may ask again on the same connection, unless its body is still on the way.
        if answer.header("connection") is None:
            assert (await client.request("GET", "/health")).status == 503


async def test_few_may_wait(serve: Serve, until: Until) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, limits={"wait_for_instance_s": 60.0, "max_waiting": 1}) as app,
    ):
        await upstream.stop()
        async with RawClient(app.url) as first, RawClient(app.url) as second:
            await first.send(head("POST", CHAT, BODY) + BODY)
            await until(lambda: app.metrics.waiting() == 1)
            answer = await second.request(body=BODY)
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "no_instance")
            assert app.metrics.waiting() == 1


async def test_a_crowd_that_waited_is_served(serve: Serve, until: Until, finished: Finished) -> None:
    """Whoever comes back gets one request first; its answer lets the others in."""
    n = 40
    async with (
        FakeUpstream() as upstream,
        serve(upstream, health=SOON, limits={"wait_for_instance_s": 60.0}) as app,
    ):
        await upstream.stop()
        clients = [RawClient(app.url) for _ in range(n)]
        await asyncio.gather(*(client.__aenter__() for client in clients))
        for client in clients:
            await client.send(head("POST", CHAT, BODY) + BODY)
        await until(lambda: app.metrics.waiting() == n)
        await upstream.start()
        answers = await asyncio.gather(*(client.answer() for client in clients))
        assert {answer.status for answer in answers} == {200}
        await asyncio.gather(*(client.__aexit__(None, None, None) for client in clients))
        assert len(upstream.calls) == n
        assert app.metrics.waiting() == 0


# ---------------------------------------------------------------------- fail open, health


async def test_an_instance_that_only_fails_to_answer_probes_is_still_used(serve: Serve) -> None:
    async with FakeUpstream() as one, FakeUpstream() as other, serve(one, other, limits=NO_WAIT) as app:
        for _ in range(5):
            for name in ("gpu-0", "gpu-1"):
                app.router.probe_failed(name, ProbeFailure.TIMEOUT)
        async with RawClient(app.url) as client:
            assert (await client.request(body=BODY)).status == 200
            assert (await client.request("GET", "/health")).status == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/health/", "//ping", "/health?x=1"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_is_the_routers_own(serve: Serve, finished: Finished, path: str, method: str) -> None:
    async with FakeUpstream() as one, FakeUpstream() as other, serve(one, other) as app, RawClient(app.url) as client:
        answer = await client.request(method, path)
        assert (answer.status, answer.header("content-type")) == (200, "application/json")
        app.router.probe_failed("gpu-0", ProbeFailure.REFUSED)
        for _ in range(3):
            app.router.probe_failed("gpu-1", ProbeFailure.REFUSED)
        # One that may serve is enough.
        assert (await client.request(method, path)).status == 200
        for _ in range(3):
            app.router.probe_failed("gpu-0", ProbeFailure.REFUSED)
        assert (await client.request(method, path)).status == 503
        app.router.fleet.probe_passed("gpu-1")
        app.router.fleet.probe_passed("gpu-1")
        assert (await client.request(method, path)).status == 200
        assert one.calls == other.calls == []
        assert [line["outcome"] for line in finished()] == ["local", "local", "no_instance", "local"]


async def test_health_asked_for_by_post_is_the_instances(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request("POST", "/ping", b"")).status == 200
        assert [call.target for call in upstream.calls] == ["/ping"]


# ---------------------------------------------------------------------- the list of models


def lists(*names: str, **more: object) -> Script:
    return json_answer({"object": "list", "data": [{"id": name, **more} for name in names]})


async def test_models_of_all_instances_are_joined(serve: Serve, finished: Finished) -> None:
    async with (
        FakeUpstream(lists("base", "lora/a:1", root="one")) as one,
        FakeUpstream(lists("base", "b", root="two")) as two,
        serve(one, two) as app,
        RawClient(app.url) as client,
    ):
        credentials = [
            ("Authorization", "Bearer sk-1"),
            ("X-Api-Key", "k"),
            ("Accept-Encoding", "gzip"),
            ("If-None-Match", "x"),
        ]
        answer = await client.request("GET", "/v1/models?limit=1", headers=credentials)
        document = json.loads(answer.body)
        assert document["object"] == "list"
        assert [(model["id"], model["root"]) for model in document["data"]] == [
            ("base", "one"), ("lora/a:1", "one"), ("b", "two"),
        ]  # fmt: skip
        for call in one.calls + two.calls:
            assert (call.method, call.target) == ("GET", "/v1/models?limit=1")
            assert call.header("authorization") == "Bearer sk-1"
            assert call.header("x-api-key") == "k"
            # A list that is compressed or left out could not be joined.
            assert call.header("accept-encoding") is None
            assert call.header("if-none-match") is None
        assert (await client.request("HEAD", "/v1/models")).header("content-length") == str(len(answer.body))
        assert [line["outcome"] for line in finished()] == ["local", "local"]


async def closes(call: Call) -> None:
    call.reset()


ODD = {
    "dead": closes,
    "data is null": json_answer({"data": None}),
    "no object": json_answer([1]),
    "no JSON": raw_answer(b"<html>"),
    "not UTF-8": raw_answer(b'{"data":["\xff"]}'),
    "compressed": raw_answer(gzip.compress(b'{"data":[]}'), headers="Content-Encoding: gzip\r\n"),
    "endless": raw_answer(b"[" * 5_000_000),
    "an error": json_answer({"error": "x"}, status=500),
    "odd entries": json_answer({"data": [None, 1, "x", {}, {"id": None}, {"id": "b"}]}),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_an_instance_that_talks_nonsense_is_left_out(serve: Serve, odd: Script) -> None:
    async with (
        FakeUpstream(odd) as one,
        FakeUpstream(lists("b")) as two,
        serve(one, two) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request("GET", "/v1/models")
        assert answer.status == 200
        assert [model["id"] for model in json.loads(answer.body)["data"]] == ["b"]


async def test_models_are_listed_without_an_instance_that_is_down(serve: Serve) -> None:
    async with FakeUpstream() as one, FakeUpstream(lists("b")) as two, serve(one, two) as app:
        await one.stop()
        async with RawClient(app.url) as client:
            for _ in range(2):
                answer = await client.request("GET", "/v1/models")
                assert [model["id"] for model in json.loads(answer.body)["data"]] == ["b"]
                app.router.connect_failed("gpu-0", 0.0, timed_out=False)


async def test_when_all_refuse_to_list_their_models_a_refusal_is_the_answer(serve: Serve, finished: Finished) -> None:
    refuses = raw_answer(
        b"who are you?", status=401, headers="WWW-Authenticate: Bearer\r\nContent-Type: text/plain\r\n"
    )
    async with FakeUpstream(refuses) as one, FakeUpstream(refuses) as two, serve(one, two) as app:
        async with RawClient(app.url) as client:
            answer = await client.request("GET", "/v1/models")
            assert (answer.status, answer.body) == (401, b"who are you?")
            assert (answer.header("www-authenticate"), answer.header("content-type")) == ("Bearer", "text/plain")
        assert finished()[0]["outcome"] == "client_error"


@pytest.mark.parametrize(("script", "status"), [(ODD["data is null"], 502), (closes, 503)])
async def test_when_nobody_lists_models_it_is_said(serve: Serve, script: Script, status: int) -> None:
    async with (
        FakeUpstream(script) as one,
        FakeUpstream(script) as two,
        serve(one, two) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request("GET", "/v1/models")
        assert answer.status == status
        assert json.loads(answer.body)["error"]["type"] in ("server_error", "service_unavailable")
        assert (answer.header("retry-after") is not None) == (status == 503)


async def test_the_only_instances_list_is_forwarded_whole(serve: Serve) -> None:
    odd = b'{"object":"list","data":[{"id":"m"}],"has_more":false, "x" : 1}'
    async with (
        FakeUpstream(raw_answer(odd, headers="X-Own: 1\r\n")) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request("GET", "/v1/models", headers=[("Accept-Encoding", "gzip")])
        assert (answer.body, answer.header("x-own")) == (odd, "1")
        assert upstream.calls[0].header("accept-encoding") == "gzip"


async def test_another_method_on_the_list_of_models_goes_on(serve: Serve) -> None:
    async with FakeUpstream() as one, FakeUpstream() as two, serve(one, two) as app, RawClient(app.url) as client:
        assert (await client.request("OPTIONS", "/v1/models")).status == 200
        assert (await client.request("GET", "/v1/models/m")).status == 200
        assert len(one.calls) + len(two.calls) == 2
