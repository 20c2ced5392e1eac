"""What changes an engine for everybody is closed, however it is spelt, unless the operator opens it."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]

PATHS = [
    # vLLM
    "/sleep",
    "/wake_up",
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/collective_rpc",
    "/scale_elastic_ep",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/abort_requests",
    "/server_info",
    # SGLang
    "/flush_cache",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/init_weights_update_group",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/abort_request",
    "/set_internal_state",
    "/configure_logging",
    # llama.cpp
    "/lora-adapters",
    "/models/load",
    "/models/unload",
    "/props",
    "/slots/0",
]

SPELLINGS = [
    "{path}",
    "{path}?level=1",
    "{path}/",
    "{path}//?x",
    "/{path}",
    "//{path}//",
    "/.{path}",
    "/..{path}",
    "/v1/..{path}",
    "/a/b/../..{path}/.",
    "/a/%2e%2e{path}",
    "http://router.test{path}",
    "HTTPS://router.test:1{path}?x",
    "http://router.test/{path}/",
    "http://user@[::1]/a/..{path}",
    "{encoded}",
    "{all_encoded}",
    "%2F{bare}",
]


def spelt(spelling: str, path: str) -> str:
    target = spelling.format(
        path=path,
        bare=path[1:],
        encoded=f"/%{ord(path[1]):02x}{path[2:]}",
        all_encoded="/" + "".join(f"%{ord(character):02X}" for character in path[1:]),
    )
    return target if target.startswith(("/", "http", "HTTP")) else "/" + target


async def test_engine_control_is_closed_however_it_is_spelt(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for path in PATHS:
            for spelling in SPELLINGS:
                target = spelt(spelling, path)
                answer = await client.request("POST", target, b"")
                assert (answer.status, target) == (403, target)
                error = json.loads(answer.body)["error"]
                assert (error["code"], error["type"]) == ("forbidden", "permission_error")
                assert path.strip("/") not in answer.raw.decode()
        assert upstream.calls == []
        assert {(line["outcome"], line["error"]) for line in finished()} == {("refused", "forbidden")}


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_engine_control_is_closed_to_any_method(serve: Serve, method: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request(method, "/sleep")).status == 403
        assert (await client.request(method, "/slots/0?action=erase")).status == (
            200 if method in ("GET", "HEAD", "OPTIONS") else 403
        )
        assert len(upstream.calls) == (1 if method in ("GET", "HEAD", "OPTIONS") else 0)


async def test_a_refused_body_costs_the_instance_nothing(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", "/v1/load_lora_adapter", b"x" * 100) + b"x" * 50)
        answer = await client.answer()
        assert answer.status == 403
        # So little is read and thrown away, and the connection goes on.
        await client.send(b"x" * 50)
        assert (await client.request("GET", "/x")).status == 200
        assert [call.target for call in upstream.calls] == ["/x"]
        await client.send(head("POST", "/v1/load_lora_adapter", bytes(1_000_000), None))
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (403, "close")


async def test_engine_control_is_open_where_the_operator_says_so(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(upstream, engine_control="allow") as app:
        async with RawClient(app.url) as client:
            for path in PATHS:
                assert (await client.request("POST", path, b"{}")).status == 200
        assert [call.target for call in upstream.calls] == PATHS


@pytest.mark.parametrize(
    ("path", "status", "is_forgotten"),
    [
        ("/sleep?level=1", 200, True),
        ("/reset_prefix_cache", 200, True),
        ("/flush_cache/", 200, True),
        ("/reset_prefix_cache", 500, False),
        ("/wake_up", 200, False),
        ("/v1/load_lora_adapter", 200, False),
    ],
)
async def test_what_an_engine_was_told_to_forget_is_forgotten_here(
    serve: Serve, path: str, status: int, is_forgotten: bool
) -> None:
    """At once: probes would tell half a minute later, and of a sleep that is over by then never."""
    upstream = FakeUpstream()

    async def script(call: Call) -> None:
        await json_answer({}, status=status if call.target == path else 200)(call)

    upstream.script = script
    async with upstream, serve(upstream, engine_control="allow") as app, RawClient(app.url) as client:
        story = json.dumps({"model": "m", "messages": [{"role": "user", "content": "long " * 2_000}]}).encode()
        assert (await client.request(body=story)).status == 200
        slot = app.router.fleet.instances[0].slot
        assert app.router.index.n_blocks(slot) > 0
        assert (await client.request("POST", path, b"")).status == status
        assert (app.router.index.n_blocks(slot) == 0) is is_forgotten


@pytest.mark.parametrize(
    "target",
    [
        "/v1/sleep",
        "/sleeping",
        "/is_sleeping",
        "/asleep",
        "/sleep/x",
        "/%2573leep",
        "/x://y/sleep",
        "/sleep%3Fx",
        "/x?/sleep",
        "/slots",
        "/v1/models/load",
    ],
)
async def test_other_paths_are_nobodys_business(serve: Serve, target: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream) as app, RawClient(app.url) as client:
        assert (await client.request("POST", target, b"")).status == 200
        assert upstream.calls[0].target == target
