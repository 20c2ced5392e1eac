"""Clients that people use, through the router: the SDKs of OpenAI and Anthropic, curl, Prometheus' own parser."""

import asyncio
import hashlib
import json
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import MessageParam, ToolParam
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from prefixroute.app import App, running
from prefixroute.config import Settings
from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer
from prefixroute.testing.client import RawClient, head
from prefixroute.testing.upstream import Call, FakeUpstream, Script, json_answer

MODEL = "demo-model"
FAST = EngineConfig(speed=1_000.0)
NOWHERE = "http://127.0.0.1:1"
SYSTEM = "You answer in few words, and only about caches. " * 60
QUESTION = "What is a prefix cache?"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": QUESTION},
]
ASKED: list[MessageParam] = [{"role": "user", "content": QUESTION}]
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The weather at a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


@asynccontextmanager
async def routing(*urls: str, strategy: str = "expected_latency", **changes: Any) -> AsyncIterator[App]:
    """A router before the instances at `urls`, named gpu-0, gpu-1, …, which says who answered."""
    settings = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        # Told rather than learned, so that counting by model begins with the first request.
        "fleet": {"instances": [{"url": url, "name": f"gpu-{n}", "models": [MODEL]} for n, url in enumerate(urls)]},
        "routing": {"strategy": strategy},
        "response_headers": True,
        "limits": {"wait_for_instance_s": 0},
        **changes,
    }
    async with running(Settings.model_validate(settings), environ={}) as app:
        yield app


@pytest.fixture
async def servers() -> AsyncIterator[Sequence[SimulatedServer]]:
    async with AsyncExitStack() as stack:
        configs = (ServerConfig(FAST), ServerConfig(FAST, adapters=("lora-a",)))
        yield [await stack.enter_async_context(SimulatedServer(config)) for config in configs]


@pytest.fixture
async def router(servers: Sequence[SimulatedServer]) -> AsyncIterator[App]:
    async with routing(*(server.url for server in servers)) as app:
        yield app


def openai_client(app: App) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="sk-none", max_retries=0)


def anthropic_client(app: App) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=app.url, api_key="sk-none", max_retries=0)


@pytest.fixture
async def gpt(router: App) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(router) as client:
        yield client


@pytest.fixture
async def claude(router: App) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_client(router) as client:
        yield client


# The OpenAI SDK


async def test_openai_chat(gpt: openai.AsyncOpenAI) -> None:
    completion = await gpt.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=7)
    assert completion.choices[0].message.role == "assistant"
    assert completion.choices[0].message.content
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 7
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


async def test_openai_streams_the_same_chat_with_usage(gpt: openai.AsyncOpenAI) -> None:
    whole = await gpt.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=7)
    chunks = [
        chunk
        async for chunk in await gpt.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=7, stream=True, stream_options={"include_usage": True}
        )
    ]
    *deltas, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    assert text == whole.choices[0].message.content


async def test_openai_sees_the_request_id_and_the_decision(gpt: openai.AsyncOpenAI) -> None:
    own = await gpt.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "req-of-mine.7"}
    )
    assert own.request_id == "req-of-mine.7"
    assert own.parse().id == "chatcmpl-req-of-mine.7"
    assert own.headers["x-prefixroute-reason"] == "cold"

    made = await gpt.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert made.request_id
    assert made.request_id != own.request_id
    assert made.headers["x-prefixroute-reason"] == "affinity"
    assert int(made.headers["x-prefixroute-matched-tokens"]) > 0


async def test_openai_completions_and_embeddings(gpt: openai.AsyncOpenAI) -> None:
    completion = await gpt.completions.create(model=MODEL, prompt=["once", "upon"], max_tokens=3)
    assert [choice.index for choice in completion.choices] == [0, 1]
    pieces = [c async for c in await gpt.completions.create(model=MODEL, prompt="once", max_tokens=3, stream=True)]
    assert "".join(piece.choices[0].text for piece in pieces) == completion.choices[0].text

    # The SDK asks for base64 where nothing else is said.
    vectors = await gpt.embeddings.create(model=MODEL, input=["a", "b"])
    plain = await gpt.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
    for vector, expected in zip(vectors.data, plain.data, strict=True):
        assert vector.embedding == pytest.approx(expected.embedding, rel=1e-6)


async def test_openai_lists_the_models_of_the_whole_fleet(gpt: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in gpt.models.list()] == [MODEL, "lora-a"]


async def test_openai_lists_the_models_of_a_lone_instance(servers: Sequence[SimulatedServer]) -> None:
    async with routing(servers[1].url) as app, openai_client(app) as gpt:
        models = [model async for model in gpt.models.list()]
        assert [model.id for model in models] == [MODEL, "lora-a"]
        assert models[0].owned_by == "vllm"


async def test_openai_responses_stay_with_the_instance_that_made_them(servers: Sequence[SimulatedServer]) -> None:
    """Under a strategy that would send each request to the other one, which knows nothing of them."""
    async with routing(*(s.url for s in servers), strategy="round_robin") as app, openai_client(app) as gpt:
        raw = await gpt.responses.with_raw_response.create(model=MODEL, input=QUESTION, max_output_tokens=9)
        home, first = raw.headers["x-prefixroute-instance"], raw.parse()
        assert first.output_text

        for _ in range(3):
            found = await gpt.responses.with_raw_response.retrieve(first.id)
            assert found.headers["x-prefixroute-instance"] == home
            assert found.headers["x-prefixroute-reason"] == "stored"
            assert found.parse().output_text == first.output_text

        follow_up = await gpt.responses.with_raw_response.create(
            model=MODEL, input="And a suffix?", previous_response_id=first.id, max_output_tokens=9
        )
        assert follow_up.headers["x-prefixroute-instance"] == home
        second = follow_up.parse()
        assert second.previous_response_id == first.id
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.total_tokens
        assert (await gpt.responses.retrieve(second.id)).id == second.id


async def test_openai_streamed_responses_are_found_again(servers: Sequence[SimulatedServer]) -> None:
    async with routing(*(s.url for s in servers), strategy="round_robin") as app, openai_client(app) as gpt:
        for _ in servers:
            async with gpt.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=9) as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                final = await stream.get_final_response()
            assert "".join(deltas) == final.output_text
            for _ in servers:
                assert (await gpt.responses.retrieve(final.id)).output_text == final.output_text


async def test_openai_reads_what_an_instance_refuses(gpt: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        await gpt.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=0)
    with pytest.raises(openai.NotFoundError, match="The model `gpt-9` does not exist") as missing:
        await gpt.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.request_id
    with pytest.raises(openai.NotFoundError, match="'resp_unknown' not found"):
        await gpt.responses.retrieve("resp_unknown")


Ask = Callable[[openai.AsyncOpenAI], Any]


def ask_chat(gpt: openai.AsyncOpenAI) -> Any:
    return gpt.chat.completions.create(model=MODEL, messages=MESSAGES)


def ask_stream(gpt: openai.AsyncOpenAI) -> Any:
    return gpt.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)


def ask_response(gpt: openai.AsyncOpenAI) -> Any:
    return gpt.responses.create(model=MODEL, input=QUESTION)


def ask_embedding(gpt: openai.AsyncOpenAI) -> Any:
    return gpt.embeddings.create(model=MODEL, input=QUESTION)


@pytest.mark.parametrize("ask", [ask_chat, ask_stream, ask_response, ask_embedding])
async def test_openai_reads_that_there_is_no_instance(ask: Ask) -> None:
    async with routing(NOWHERE) as app, openai_client(app) as gpt:
        with pytest.raises(openai.InternalServerError, match="no instance can take the request") as raised:
            await ask(gpt)
    error = raised.value
    assert error.status_code == 503
    assert (error.type, error.code) == ("service_unavailable", "no_instance")
    assert int(error.response.headers["retry-after"]) >= 1
    assert error.request_id


async def test_openai_reads_what_the_router_refuses(servers: Sequence[SimulatedServer]) -> None:
    limits = {"max_body_bytes": 2_000}
    async with routing(servers[0].url, limits=limits) as app, openai_client(app) as gpt:
        with pytest.raises(openai.APIStatusError, match="longer than 2000 bytes") as too_large:
            await ask_chat(gpt)
        assert too_large.value.status_code == 413
        assert (too_large.value.type, too_large.value.code) == ("invalid_request_error", "body_too_large")
        with pytest.raises(openai.PermissionDeniedError, match="controls the engine") as closed:
            await gpt.post("/load_lora_adapter", cast_to=object)
        assert closed.value.code == "forbidden"


CHUNK = b'data: {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "demo-model", "choices": []}\n\n'


async def break_off(call: Call) -> None:
    call.reset()


async def break_in_the_middle(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await call.send_chunk(CHUNK)
    call.close()


BUSY = json_answer({"error": {"message": "slow down", "type": "rate_limit", "code": "busy"}}, status=429)


@pytest.mark.parametrize(
    ("script", "kind", "code"),
    [
        (BUSY, openai.RateLimitError, "busy"),
        (break_off, openai.InternalServerError, "upstream_broken"),
    ],
)
async def test_openai_reads_how_instances_fail(script: Script, kind: type[openai.APIStatusError], code: str) -> None:
    async with (
        FakeUpstream(script) as one,
        FakeUpstream(script) as other,
        routing(one.url, other.url) as app,
        openai_client(app) as gpt,
    ):
        with pytest.raises(kind) as raised:
            await ask_chat(gpt)
    assert raised.value.code == code


async def test_openai_notices_a_stream_that_breaks_off() -> None:
    async with FakeUpstream(break_in_the_middle) as upstream, routing(upstream.url) as app, openai_client(app) as gpt:
        chunks = aiter(await ask_stream(gpt))
        assert (await anext(chunks)).id == "x"
        # Never a clean end.
        with pytest.raises(openai.APIConnectionError):
            await anext(chunks)


async def test_openai_leaving_a_stream_ends_it_at_the_instance() -> None:
    async def never_end(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await call.send_chunk(CHUNK)
        await call.wait_disconnected()

    async with FakeUpstream(never_end) as upstream, routing(upstream.url) as app, openai_client(app) as gpt:
        stream = await ask_stream(gpt)
        async for _ in stream:
            break
        await stream.close()
        await upstream.calls[0].wait_disconnected()
        await app.proxy.wait_idle()
        samples = await scrape(app)
        assert samples["prefixroute_client_disconnects_total"][()] == 1
        assert set(samples["prefixroute_in_flight"].values()) == {0}


# The Anthropic SDK


async def test_anthropic_messages_whole_and_streamed(claude: anthropic.AsyncAnthropic) -> None:
    whole = await claude.messages.create(model=MODEL, system=SYSTEM, messages=ASKED, max_tokens=5)
    (block,) = whole.content
    assert block.type == "text"
    async with claude.messages.stream(model=MODEL, system=SYSTEM, messages=ASKED, max_tokens=5) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == block.text
    assert final.usage.cache_read_input_tokens
    assert final.usage.cache_read_input_tokens + final.usage.input_tokens == whole.usage.input_tokens


async def test_anthropic_counts_tokens(claude: anthropic.AsyncAnthropic) -> None:
    counted = await claude.messages.count_tokens(model=MODEL, system=SYSTEM, messages=ASKED)
    message = await claude.messages.create(model=MODEL, system=SYSTEM, messages=ASKED, max_tokens=1)
    assert counted.input_tokens == message.usage.input_tokens


async def test_anthropic_conversations_with_tools_stay_where_they_began(claude: anthropic.AsyncAnthropic) -> None:
    system: list[Any] = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    conversation: list[MessageParam] = [{"role": "user", "content": [{"type": "text", "text": "How is it in Oslo?"}]}]
    homes, cached = set(), []
    for turn in range(3):
        raw = await claude.messages.with_raw_response.create(
            model=MODEL, system=system, messages=conversation, tools=[WEATHER], max_tokens=20
        )
        homes.add(raw.headers["x-prefixroute-instance"])
        cached.append((await raw.parse()).usage.cache_read_input_tokens or 0)
        use = f"toolu_{turn}"
        conversation += [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": use, "name": "get_weather", "input": {"place": "Oslo"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use, "content": "Rain. " * 100}]},
        ]
    assert len(homes) == 1
    assert cached[0] == 0
    assert 0 < cached[1] < cached[2]


async def test_anthropic_reads_what_an_instance_refuses(claude: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be positive"):
        await claude.messages.create(model=MODEL, messages=ASKED, max_tokens=0)
    with pytest.raises(anthropic.NotFoundError, match="The model `claude-9` does not exist"):
        await claude.messages.create(model="claude-9", messages=ASKED, max_tokens=1)


@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropic_reads_that_there_is_no_instance(streamed: bool) -> None:
    async with routing(NOWHERE) as app, anthropic_client(app) as claude:
        with pytest.raises(anthropic.InternalServerError) as raised:
            await claude.messages.create(model=MODEL, messages=ASKED, max_tokens=1, stream=streamed)
        with pytest.raises(anthropic.InternalServerError):
            await claude.messages.count_tokens(model=MODEL, messages=ASKED)
    error = raised.value
    assert error.status_code == 503
    assert error.body == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no instance can take the request"},
    }
    assert int(error.response.headers["retry-after"]) >= 1


async def test_anthropic_reads_what_the_router_refuses(servers: Sequence[SimulatedServer]) -> None:
    limits = {"max_body_bytes": 2_000}
    async with routing(servers[0].url, limits=limits) as app, anthropic_client(app) as claude:
        with pytest.raises(anthropic.APIStatusError, match="longer than 2000 bytes") as raised:
            await claude.messages.create(model=MODEL, system=SYSTEM, messages=ASKED, max_tokens=1)
    assert raised.value.status_code == 413
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["error"]["type"] == "request_too_large"


async def test_anthropic_reads_that_an_instance_broke_off() -> None:
    async with FakeUpstream(break_off) as upstream, routing(upstream.url) as app, anthropic_client(app) as claude:
        with pytest.raises(anthropic.InternalServerError) as raised:
            await claude.messages.create(model=MODEL, messages=ASKED, max_tokens=1)
    assert raised.value.status_code == 502
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["error"]["type"] == "api_error"


# Expect: 100-continue with a large body, which curl sends so by default


async def say_digest(call: Call) -> None:
    assert call.header("expect") is None
    await json_answer({"digest": hashlib.sha256(call.body).hexdigest()})(call)


@pytest.fixture
def large_body() -> bytes:
    return json.dumps({"model": MODEL, "prompt": "0123456789abcdef" * 131_072}).encode()


# Read whole for routing; and streamed up.
TARGETS = ["/v1/completions", "/v1/unknown"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed; the next test covers the protocol")
@pytest.mark.parametrize("target", TARGETS)
async def test_curl_waits_for_100_continue(large_body: bytes, tmp_path: Path, target: str) -> None:
    (tmp_path / "body.json").write_bytes(large_body)
    async with FakeUpstream(say_digest) as upstream, routing(upstream.url) as app:
        curl = await asyncio.create_subprocess_exec(
            *("curl", "--silent", "--verbose", "--noproxy", "*", "--data-binary", "@body.json"),
            # Longer than any test: without the interim answer it would wait.
            *("--expect100-timeout", "600", "--header", "Expect: 100-continue", f"{app.url}{target}"),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            cwd=tmp_path,
        )
        out, err = await curl.communicate()
    assert curl.returncode == 0
    assert json.loads(out) == {"digest": hashlib.sha256(large_body).hexdigest()}
    assert err.count(b"< HTTP/1.1 100 Continue") == 1


@pytest.mark.parametrize("target", TARGETS)
async def test_a_client_that_waits_is_told_to_continue(large_body: bytes, target: str) -> None:
    async with FakeUpstream(say_digest) as upstream, routing(upstream.url) as app, RawClient(app.url) as client:
        await client.send(head("POST", target, large_body, [("Expect", "100-continue")]))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(large_body)
        answer = await client.answer()
    assert json.loads(answer.body) == {"digest": hashlib.sha256(large_body).hexdigest()}


# Prometheus


async def scrape(app: App) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by sample name and labels, as Prometheus' own parser reads them."""
    assert app.admin_url is not None
    async with RawClient(app.admin_url) as client:
        answer = await client.request("GET", "/metrics")
    assert answer.status == 200
    assert (answer.header("content-type") or "").startswith("text/plain; version=")
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


async def test_metrics_add_up_to_what_was_sent(router: App, gpt: openai.AsyncOpenAI) -> None:
    sent: Counter[tuple[str, str, str]] = Counter()
    reasons: Counter[str] = Counter()
    n_cached = n_prompt = n_matched = 0
    for topic in ("caches", "routers"):
        homes = set()
        for turn in range(3):
            raw = await gpt.chat.completions.with_raw_response.create(
                model=MODEL, messages=[{"role": "user", "content": f"{topic} {SYSTEM} {turn}"}], max_tokens=2
            )
            usage = raw.parse().usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            # The same prefix: the same instance, which has it.
            homes.add(raw.headers["x-prefixroute-instance"])
            assert (cached > 0) == (turn > 0)
            n_cached += cached
            n_prompt += usage.prompt_tokens
            n_matched += int(raw.headers["x-prefixroute-matched-tokens"])
            reasons[raw.headers["x-prefixroute-reason"]] += 1
            sent["/v1/chat/completions", MODEL, "ok"] += 1
        assert len(homes) == 1

    chunks = [
        chunk
        async for chunk in await gpt.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=2, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    n_cached += chunks[-1].usage.prompt_tokens_details.cached_tokens or 0
    n_prompt += chunks[-1].usage.prompt_tokens
    reasons["cold"] += 1
    sent["/v1/chat/completions", MODEL, "ok"] += 1
    for model, label in (("gpt-9", "other"), ("gpt-10", "other")):
        with pytest.raises(openai.NotFoundError):
            await gpt.embeddings.create(model=model, input="x")
        reasons["load"] += 1
        sent["pooling", label, "client_error"] += 1
    assert [model.id async for model in gpt.models.list()]
    sent["/v1/models", "none", "local"] += 1
    with pytest.raises(openai.PermissionDeniedError):
        await gpt.post("/load_lora_adapter", cast_to=object)
    sent["other", "none", "refused"] += 1

    samples = await scrape(router)
    counted: Counter[tuple[str, str, str]] = Counter()
    for labels, value in samples["prefixroute_requests_total"].items():
        by_name = dict(labels)
        counted[by_name["route"], by_name["model"], by_name["outcome"]] += int(value)
    assert counted == sent
    durations = samples["prefixroute_request_duration_seconds_count"]
    assert sum(durations.values()) == sent.total()
    decisions = {dict(labels)["reason"]: value for labels, value in samples["prefixroute_decisions_total"].items()}
    assert {reason: value for reason, value in decisions.items() if value} == reasons
    assert samples["prefixroute_cached_tokens_total"][()] == n_cached > 0
    assert samples["prefixroute_reported_prompt_tokens_total"][()] == n_prompt
    assert samples["prefixroute_matched_tokens_total"][()] == n_matched > 0
    assert samples["prefixroute_attempts_total"][("outcome", "answered"),] == reasons.total()
    assert set(samples["prefixroute_in_flight"].values()) == {0}
    assert samples["prefixroute_policy_faults_total"][()] == 0


async def test_metrics_count_what_failed() -> None:
    async with FakeUpstream(break_off) as upstream, routing(upstream.url, NOWHERE) as app, openai_client(app) as gpt:
        for _ in range(4):
            with pytest.raises(openai.InternalServerError):
                await ask_chat(gpt)
        samples = await scrape(app)
    (labels, value) = next(iter(samples["prefixroute_requests_total"].items()))
    assert dict(labels).items() >= {"route": "/v1/chat/completions", "outcome": "broken", "upstream": "gpu-0"}.items()
    assert value == 4
    attempts = {dict(labels)["outcome"]: value for labels, value in samples["prefixroute_attempts_total"].items()}
    assert attempts["unanswered"] == 4
    assert set(samples["prefixroute_in_flight"].values()) == {0}
