"""The simulated server over real sockets, a thousand times faster than the hardware it stands for."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import ClientResponse, ClientSession, ServerDisconnectedError
from prometheus_client.parser import text_string_to_metric_families

from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer
from prefixroute.demo.server.fleet import run_demo_server, serve_fleet
from prefixroute.errors import ConfigError

FAST = EngineConfig(speed=1_000.0)
# A step of this one takes a minute and more: whatever it is asked for stays in flight.
STUCK = EngineConfig(speed=0.0001)
SYSTEM = {"role": "system", "content": "You answer in few words. " * 40}
QUESTION = {"role": "user", "content": "What is a prefix cache?"}
CHAT = {"model": "demo-model", "messages": [SYSTEM, QUESTION], "max_tokens": 40, "ignore_eos": True}


@pytest.fixture
async def server() -> AsyncIterator[SimulatedServer]:
    async with SimulatedServer(ServerConfig(FAST, adapters=("lora-a",))) as running:
        yield running


@pytest.fixture
async def stuck() -> AsyncIterator[SimulatedServer]:
    async with SimulatedServer(ServerConfig(STUCK)) as running:
        yield running


@pytest.fixture
async def client(server: SimulatedServer) -> AsyncIterator[ClientSession]:
    async with ClientSession(server.url) as session:
        yield session


async def post(client: ClientSession, path: str, body: dict[str, Any], status: int = 200) -> Any:
    async with client.post(path, json=body) as response:
        assert response.status == status
        return await response.json()


async def read_events(response: ClientResponse) -> list[dict[str, Any]]:
    """The data of all events; those with names have the same name inside."""
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        *names, data = block.split("\n")
        data = data.removeprefix("data: ")
        if data == "[DONE]":
            assert block == text.removesuffix("\n\n").split("\n\n")[-1]
            continue
        event = json.loads(data)
        assert names in ([], [f"event: {event.get('type')}"])
        events.append(event)
    return events


async def stream(client: ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        return await read_events(response)


# Chat


async def test_a_chat_completion_has_vllms_shape(client: ClientSession) -> None:
    async with client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "abc"}) as response:
        body = await response.json()
    assert body["id"] == "chatcmpl-abc"
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["content"]) == 4 * 40
    usage = body["usage"]
    assert usage["completion_tokens"] == 40
    assert usage["total_tokens"] == usage["prompt_tokens"] + 40
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_the_next_turn_finds_prompt_and_answer_in_the_cache(client: ClientSession) -> None:
    first = await post(client, "/v1/chat/completions", CHAT)
    said = first["choices"][0]["message"]
    conversation = [SYSTEM, QUESTION, said, {"role": "user", "content": "And who evicts it?"}]
    second = await post(client, "/v1/chat/completions", {**CHAT, "messages": conversation})

    # All that was computed: the prompt, and the answer but its last token; in full blocks.
    computed = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


async def test_a_chat_stream_gives_the_same_answer_piece_by_piece(client: ClientSession) -> None:
    whole = await post(client, "/v1/chat/completions", CHAT)
    events = await stream(client, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})

    first, *deltas, last, usage = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(deltas) == 39
    assert {event["choices"][0]["finish_reason"] for event in deltas} == {None}
    assert last["choices"][0]["finish_reason"] == "length"
    text = "".join(event["choices"][0]["delta"]["content"] for event in [*deltas, last])
    assert text == whole["choices"][0]["message"]["content"]
    assert usage["choices"] == []
    n_prompt = whole["usage"]["prompt_tokens"]
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == (n_prompt - 1) // 16 * 16
    assert {event["id"] for event in events} == {first["id"]}


async def test_an_answer_may_stop_by_itself(client: ClientSession) -> None:
    body = {**CHAT, "ignore_eos": False, "max_tokens": None, "max_completion_tokens": 50_000}
    whole = await post(client, "/v1/chat/completions", body)
    assert whole["choices"][0]["finish_reason"] == "stop"
    # The token that ends it has no text.
    assert len(whole["choices"][0]["message"]["content"]) == 4 * (whole["usage"]["completion_tokens"] - 1)
    last = (await stream(client, "/v1/chat/completions", body))[-1]
    assert last["choices"][0]["delta"]["content"] == ""
    assert last["choices"][0]["finish_reason"] == "stop"


async def test_a_limit_of_256_tokens_is_the_default(client: ClientSession) -> None:
    for number in range(10):
        body = await post(client, "/v1/completions", {"prompt": f"number {number}"})
        assert body["usage"]["completion_tokens"] <= 256


async def test_several_choices_are_interleaved_and_end_together(client: ClientSession) -> None:
    events = await stream(client, "/v1/chat/completions", {**CHAT, "n": 3})
    texts = ["", "", ""]
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"]["content"]
    assert len(set(texts)) == 3
    assert {len(text) for text in texts} == {160}
    whole = await post(client, "/v1/chat/completions", {**CHAT, "n": 3})
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    assert whole["usage"]["completion_tokens"] == 120


async def test_an_old_client_gets_its_stream_unframed(server: SimulatedServer) -> None:
    body = json.dumps({**CHAT, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
    head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    answer_head, _, events = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert b"chunked" not in answer_head.lower()
    assert all(event.startswith(b"data: ") for event in events.removesuffix(b"\n\n").split(b"\n\n"))
    assert events.endswith(b"data: [DONE]\n\n")


async def test_stream_interval_gathers_tokens_after_the_first() -> None:
    config = ServerConfig(FAST, stream_interval=10)
    async with SimulatedServer(config) as server, ClientSession(server.url) as client:
        events = await stream(client, "/v1/completions", {"prompt": "x", "max_tokens": 25, "ignore_eos": True})
    assert [len(event["choices"][0]["text"]) // 4 for event in events] == [1, 10, 10, 4]


# Other dialects


async def test_completions_take_lists_and_token_ids(client: ClientSession) -> None:
    prompt = {"prompt": ["one", "two"], "max_tokens": 3, "ignore_eos": True}
    body = await post(client, "/v1/completions", prompt)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == 2
    ids = (await post(client, "/tokenize", {"prompt": "one"}))["tokens"]
    again = await post(client, "/v1/completions", {**prompt, "prompt": ids})
    assert again["choices"][0]["text"] == body["choices"][0]["text"]


async def test_messages_stream_their_events_in_order(client: ClientSession) -> None:
    body = {"model": "demo-model", "system": SYSTEM["content"], "messages": [QUESTION], "max_tokens": 5}
    whole = await post(client, "/v1/messages", body)
    events = await stream(client, "/v1/messages", body)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 5,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in events[2:7]) == whole["content"][0]["text"]
    counted = (await post(client, "/v1/messages/count_tokens", body))["input_tokens"]
    usage = events[-2]["usage"]
    assert usage["cache_read_input_tokens"] == (counted - 1) // 16 * 16
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_responses_are_kept_by_id_and_can_be_followed_up(client: ClientSession) -> None:
    asked = {"instructions": "Be brief.", "input": "What is a prefix?" * 20, "max_output_tokens": 30}
    first = await post(client, "/v1/responses", {**asked, "ignore_eos": True})
    assert first["status"] == "incomplete"
    async with client.get(f"/v1/responses/{first['id']}") as response:
        assert await response.json() == first

    follow_up = {**asked, "input": "And a suffix?", "previous_response_id": first["id"]}
    second = await post(client, "/v1/responses", follow_up)
    computed = first["usage"]["total_tokens"] - 1
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == computed // 16 * 16

    body = await post(client, "/v1/responses", {**follow_up, "previous_response_id": "resp_no"}, status=404)
    assert body["error"]["type"] == "invalid_request_error"
    async with client.get("/v1/responses/resp_no") as response:
        assert response.status == 404


async def test_a_responses_stream_is_numbered_and_ends_with_the_response(client: ClientSession) -> None:
    events = await stream(client, "/v1/responses", {"input": "Hi", "max_output_tokens": 4, "ignore_eos": True})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    final = events[-1]["response"]
    text = "".join(event["delta"] for event in events[4:8])
    assert final["output"][0]["content"][0]["text"] == text
    async with client.get(f"/v1/responses/{final['id']}") as response:
        assert await response.json() == final


async def test_a_background_response_can_be_cancelled(stuck: SimulatedServer) -> None:
    async with ClientSession(stuck.url) as client:
        begun = await post(client, "/v1/responses", {"input": "Think.", "background": True})
        assert begun["status"] in ("queued", "in_progress")
        assert stuck.engine.n_requests == 1
        cancelled = await post(client, f"/v1/responses/{begun['id']}/cancel", {})
        assert cancelled["status"] == "cancelled"
        assert stuck.engine.n_requests == 0
        await post(client, f"/v1/responses/{begun['id']}/cancel", {}, status=400)


async def test_invocations_go_by_the_shape_of_the_body(client: ClientSession) -> None:
    assert (await post(client, "/invocations", CHAT))["object"] == "chat.completion"
    assert (await post(client, "/invocations", {"prompt": "x"}))["object"] == "text_completion"
    assert (await post(client, "/invocations", {"input": "x"}))["object"] == "list"
    await post(client, "/invocations", {"inputs": "x"}, status=400)


async def test_official_clients_understand_the_answers(server: SimulatedServer) -> None:
    messages: Any = [QUESTION]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as chat:
        answers = await chat.chat.completions.create(model="demo-model", messages=messages, max_tokens=5, stream=True)
        assert [chunk.choices[0].finish_reason async for chunk in answers][-1] == "length"
        vectors = await chat.embeddings.create(model="demo-model", input=["a", "b"])
        assert sum(x * x for x in vectors.data[1].embedding) == pytest.approx(1.0, rel=1e-5)
        async with chat.responses.stream(model="demo-model", input="Hi") as events:
            assert (await events.get_final_response()).output_text
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as claude,
        claude.messages.stream(model="demo-model", messages=messages, max_tokens=5) as said,
    ):
        assert (await said.get_final_message()).stop_reason == "max_tokens"


# Refusals


async def test_an_unknown_model_is_404_in_the_dialect_of_the_route(client: ClientSession) -> None:
    body = await post(client, "/v1/chat/completions", {**CHAT, "model": "gpt-9"}, status=404)
    assert body == {
        "error": {
            "message": "The model `gpt-9` does not exist. Valid aliases: demo-model.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }
    body = await post(client, "/v1/messages", {**CHAT, "model": "gpt-9"}, status=404)
    assert body["type"] == "error"
    assert body["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize("data", [b"{", b"", b"[]", b'"x"', b"{}", b'{"messages": 5}'])
async def test_a_bad_body_is_400(client: ClientSession, data: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with client.post("/v1/chat/completions", data=data, headers=headers) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("Bad Request", 400)


async def test_a_body_that_is_no_text_is_refused_by_the_framework(client: ClientSession) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        async with client.post(path, data=b"\xff\xfe", headers={"Content-Type": "application/json"}) as response:
            assert response.status == 400
            assert await response.json() == {"detail": "There was an error parsing the body"}


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"max_tokens": "many"}, {"n": 0}, {"cache_salt": ""}, {"max_tokens": 10**6}]
)
async def test_parameters_that_cannot_be_are_400(client: ClientSession, wrong: dict[str, Any]) -> None:
    await post(client, "/v1/chat/completions", {**CHAT, **wrong}, status=400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}),
        ("/v1/messages", {"messages": [QUESTION]}),
        ("/v1/responses", {}),
    ],
)
async def test_other_routes_refuse_what_they_cannot_do(client: ClientSession, path: str, body: dict[str, Any]) -> None:
    assert (await post(client, path, body, status=400))["error"]["code"] == 400


async def test_other_content_types_are_refused_as_by_vllm(client: ClientSession) -> None:
    async with client.post("/v1/completions", data=b'{"prompt": "x"}') as response:
        assert response.status == 400


async def test_a_prompt_that_can_never_fit_is_400() -> None:
    config = ServerConfig(EngineConfig(speed=1_000.0, kv_tokens=160))
    async with SimulatedServer(config) as server, ClientSession(server.url) as client:
        body = await post(client, "/v1/completions", {"prompt": "four" * 161}, status=400)
        assert body["error"]["message"].startswith("This model's maximum context length is 160 tokens.")
        whole = await post(client, "/v1/completions", {"prompt": "four" * 150, "min_tokens": 500})
        assert whole["usage"]["completion_tokens"] == 10


async def test_a_full_queue_is_503_without_retry_after() -> None:
    config = ServerConfig(EngineConfig(speed=0.0001, max_num_queued_reqs=1))
    async with SimulatedServer(config) as server, ClientSession(server.url) as client:
        first = asyncio.create_task(post(client, "/v1/completions", {"prompt": "x"}))
        await server.wait_until(lambda engine: engine.n_requests == 1)
        async with client.post("/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert "Retry-After" not in response.headers
            assert (await response.json())["error"]["code"] == 503
        await server.stop()
        assert (await first)["choices"][0]["finish_reason"] == "abort"


async def test_unknown_paths_and_methods_are_answered_as_by_vllm(client: ClientSession) -> None:
    assert await post(client, "/v1/nothing", {}, status=404) == {"detail": "Not Found"}
    async with client.get("/v1/chat/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert await response.json() == {"detail": "Method Not Allowed"}


# Cache


async def test_salts_and_adapters_share_nothing(client: ClientSession) -> None:
    async def cached(**fields: str) -> int:
        body = await post(client, "/v1/chat/completions", {**CHAT, **fields})
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    for fields in ({}, {"cache_salt": "tenant"}, {"model": "lora-a"}):
        assert await cached(**fields) == 0
        assert await cached(**fields) > 0


async def test_development_mode_resets_and_sleeps(server: SimulatedServer, client: ClientSession) -> None:
    await post(client, "/v1/chat/completions", CHAT)
    assert await post(client, "/reset_prefix_cache", {}) == {"success": True}
    body = await post(client, "/v1/chat/completions", CHAT)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    async with client.post("/sleep?level=1") as response:
        assert response.status == 200
    async with client.get("/is_sleeping") as response:
        assert await response.json() == {"is_sleeping": True}
    waiting = asyncio.create_task(post(client, "/v1/chat/completions", CHAT))
    await server.wait_until(lambda engine: engine.n_waiting == 1)
    async with client.post("/wake_up") as response:
        assert response.status == 200
    assert (await waiting)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("path", ["/sleep", "/sleep?level=0", "/pause"])
async def test_sleep_and_pause_end_what_is_under_way(stuck: SimulatedServer, path: str) -> None:
    async with ClientSession(stuck.url) as client:
        asking = asyncio.create_task(post(client, "/v1/chat/completions", CHAT))
        await stuck.wait_until(lambda engine: engine.n_requests == 1)
        async with client.post(path) as response:
            assert response.status == 200
        assert (await asking)["choices"][0]["finish_reason"] == "abort"


# Disconnects and ends


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_frees_its_blocks_at_once(stuck: SimulatedServer, streamed: bool) -> None:
    async with ClientSession(stuck.url) as client:
        asking = asyncio.create_task(stream(client, "/v1/chat/completions", {**CHAT, "stream": streamed}))
        await stuck.wait_until(lambda engine: engine.n_running == 1)
        assert stuck.engine.kv_usage_ratio > 0
        asking.cancel()
        await stuck.wait_until(lambda engine: engine.n_requests == 0)
    assert stuck.engine.pool.n_free == stuck.engine.pool.n_blocks
    assert 'finished_reason="abort",model_name="demo-model"} 1.0' in stuck.service.metrics_page().decode()


async def test_a_client_that_leaves_between_tokens_is_noticed() -> None:
    async with SimulatedServer() as server, ClientSession(server.url) as client:
        body = {**CHAT, "max_tokens": 100_000, "stream": True}
        async with client.post("/v1/chat/completions", json=body) as response:
            await response.content.readany()
            assert server.engine.n_running == 1
            response.close()
        await server.wait_until(lambda engine: engine.n_requests == 0)


async def test_stop_ends_streams_with_abort() -> None:
    async with SimulatedServer() as server, ClientSession(server.url) as client:
        body = {**CHAT, "max_tokens": 100_000, "stream": True}
        async with client.post("/v1/chat/completions", json=body) as response:
            await server.wait_until(lambda engine: engine.counters.generation_tokens > 2)
            await server.stop()
            events = await read_events(response)
    assert events[-1]["choices"][0]["finish_reason"] == "abort"


async def test_crash_breaks_connections() -> None:
    server = SimulatedServer(ServerConfig(STUCK))
    await server.start()
    async with ClientSession(server.url) as client:
        asking = asyncio.create_task(post(client, "/v1/chat/completions", CHAT))
        await server.wait_until(lambda engine: engine.n_running == 1)
        await server.crash()
        with pytest.raises((ServerDisconnectedError, ConnectionResetError)):
            await asking


async def test_a_restarted_server_is_empty(server: SimulatedServer) -> None:
    async with ClientSession(server.url) as client:
        await post(client, "/v1/chat/completions", CHAT)
    started_s = server.service.start_time_s
    await server.stop()
    await server.start()
    assert server.engine.pool.n_cached == 0
    assert server.service.start_time_s > started_s


# Operation


async def test_health_can_be_made_to_fail(server: SimulatedServer, client: ClientSession) -> None:
    async def status(method: str, path: str) -> int:
        async with client.request(method, path) as response:
            return response.status

    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        server.fail_health = False
        assert await status(method, path) == 200
        server.fail_health = lambda: True
        assert await status(method, path) == 503
    assert await status("GET", "/v1/models") == 200
    server.set_ready(False)
    assert await status("GET", "/v1/models") == 503
    assert await status("GET", "/metrics") == 200


async def test_models_and_adapters_are_listed(client: ClientSession) -> None:
    async with client.get("/v1/models") as response:
        base, adapter = (await response.json())["data"]
    assert (base["id"], base["parent"], base["max_model_len"]) == ("demo-model", None, 131_072)
    assert (adapter["id"], adapter["parent"]) == ("lora-a", "demo-model")


async def test_tokenize_and_detokenize_are_inverse(client: ClientSession) -> None:
    there = await post(client, "/tokenize", {"prompt": "Zwölf Boxkämpfer"})
    assert there["count"] == len(there["tokens"]) == 5
    back = await post(client, "/detokenize", {"tokens": there["tokens"]})
    assert back == {"prompt": "Zwölf Boxkämpfer"}
    chat = await post(client, "/tokenize", {"messages": [QUESTION]})
    counted = await post(client, "/v1/chat/completions", {"messages": [QUESTION]})
    assert chat["count"] == counted["usage"]["prompt_tokens"]


async def test_version_and_load_answer(stuck: SimulatedServer) -> None:
    async with ClientSession(stuck.url) as client:
        asking = asyncio.create_task(post(client, "/v1/completions", {"prompt": "x"}))
        await stuck.wait_until(lambda engine: engine.n_requests == 1)
        async with client.get("/load") as response:
            assert await response.json() == {"server_load": 1}
        async with client.get("/version") as response:
            assert set(await response.json()) == {"version"}
        asking.cancel()
        await stuck.wait_until(lambda engine: engine.n_requests == 0)


async def test_metrics_are_vllms(client: ClientSession) -> None:
    for _ in range(2):
        await post(client, "/v1/chat/completions", CHAT)
    async with client.get("/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=1.0.0; charset=utf-8"
        page = await response.text()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    values = {sample.name: sample.value for sample in samples}
    for sample in samples:
        if sample.name.startswith("vllm:"):
            assert sample.labels.get("model_name", "demo-model") == "demo-model"
            assert sample.labels.get("engine", "0") == "0"
    assert values["process_start_time_seconds"] > 1e9
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:kv_cache_usage_perc"] == 0
    assert values["vllm:generation_tokens_total"] == 80
    assert values["vllm:prefix_cache_queries_total"] == values["vllm:prompt_tokens_total"]
    n_prompt = values["vllm:prompt_tokens_total"] / 2
    assert values["vllm:prefix_cache_hits_total"] == (n_prompt - 1) // 16 * 16
    assert values["vllm:prompt_tokens_cached_total"] == (n_prompt - 1) // 16 * 16
    assert values["vllm:num_preemptions_total"] == 0
    assert values["vllm:time_to_first_token_seconds_count"] == 2
    assert values["vllm:e2e_request_latency_seconds_count"] == 2
    ends = [sample for sample in samples if sample.name == "vllm:request_success_total"]
    assert {end.labels["finished_reason"]: end.value for end in ends} == {"stop": 0, "length": 2, "abort": 0}
    (cache,) = (sample.labels for sample in samples if sample.name == "vllm:cache_config_info")
    assert cache["block_size"] == "16"
    assert cache["num_gpu_blocks"] == "25000"
    assert cache["enable_prefix_caching"] == "True"


# Fleets


async def test_a_fleet_serves_on_ports_of_its_own() -> None:
    async with serve_fleet([ServerConfig(FAST, model=f"model-{index}") for index in range(3)]) as servers:
        assert len({server.url for server in servers}) == 3
        for index, server in enumerate(servers):
            async with ClientSession(server.url) as client:
                body = await post(client, "/v1/completions", {"prompt": "x", "max_tokens": 1})
                assert body["model"] == f"model-{index}"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_an_address_that_cannot_be_used_is_one_clear_line(taken_port: int, host: str) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match=f"^cannot listen on {host}:{taken_port}: ") as caught:
        run_demo_server(host, taken_port, 2, say=said.append)
    assert "\n" not in str(caught.value)
    assert said == []


def test_a_busy_port_is_named_with_what_to_do(taken_port: int) -> None:
    with pytest.raises(ConfigError) as caught:
        run_demo_server("127.0.0.1", taken_port, 2, say=lambda _: None)
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{taken_port}: port {taken_port} is in use "
        "(stop what listens there, or give another --port; 0 takes any free ones)"
    )


def test_ports_beyond_the_last_one_are_refused() -> None:
    """uvloop would take them modulo 65,536."""

    def say(line: str) -> None:
        raise AssertionError(line)

    with pytest.raises(ConfigError, match=r"^cannot listen on 127\.0\.0\.1:65536: there is no such port$"):
        run_demo_server("127.0.0.1", 65_535, 2, ServerConfig(FAST), say=say)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_server_runs_until_a_signal(number: signal.Signals) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            # Signals reach the main thread, which is the one that serves.
            threading.Thread(target=os.kill, args=(os.getpid(), number)).start()

    run_demo_server("127.0.0.1", 0, 2, ServerConfig(FAST), say=say)
    assert [line.split(" at ")[0] for line in said] == ["simulated vLLM server ready"] * 2
