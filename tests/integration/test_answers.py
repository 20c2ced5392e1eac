"""What was answered is remembered: the next turn of real clients matches it, whatever the dialect, streamed or not."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anthropic
import openai
import pytest

from prefixroute.app import App
from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Finished = Callable[[], list[dict[str, Any]]]
Json = dict[str, Any]

MODEL = "demo-model"
BLOCK_BYTES = 256 * 4
AS_JSON = [("Content-Type", "application/json")]
QUESTION = "What is a prefix cache? " * 60
# Exactly so many words of four bytes.
LONG: Json = {"ignore_eos": True}
N_WORDS = 700
EXPLAINED = {"response_headers": True, "routing": {"strategy": "expected_latency"}}


@pytest.fixture
async def app(serve: Serve) -> AsyncIterator[App]:
    """A router before two simulated servers. A conversation that is not kept together would match half of the time."""
    config = ServerConfig(EngineConfig(speed=1_000.0))
    async with (
        SimulatedServer(config) as one,
        SimulatedServer(config) as two,
        serve(one.url, two.url, **EXPLAINED) as app,
    ):
        yield app


@pytest.fixture
async def gpt(app: App) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="sk-none", max_retries=0) as client:
        yield client


def matched(headers: Any) -> int:
    return int(headers["x-prefixroute-matched-tokens"])


def assert_matches_the_answer(n_matched: int, answer: str) -> None:
    """All of question and answer but a rest, and the marks between them."""
    n_bytes = len(QUESTION) + len(answer)
    assert len(answer) >= 2 * BLOCK_BYTES
    assert n_bytes - BLOCK_BYTES < n_matched * 4 <= n_bytes + 100


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_chat(gpt: openai.AsyncOpenAI, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Json = {"model": MODEL, "max_tokens": N_WORDS, "extra_body": LONG}
    if streamed:
        text = ""
        async for chunk in await gpt.chat.completions.create(messages=messages, stream=True, **asked):
            text += chunk.choices[0].delta.content or ""
        messages.append({"role": "assistant", "content": text})
    else:
        message = (await gpt.chat.completions.create(messages=messages, **asked)).choices[0].message
        text = message.content or ""
        messages.append(message)
    messages.append({"role": "user", "content": "And a suffix?"})
    raw = await gpt.chat.completions.with_raw_response.create(messages=messages, model=MODEL, max_tokens=1)
    assert_matches_the_answer(matched(raw.headers), text)
    usage = raw.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    # The engine holds what it is thought to hold.
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= matched(raw.headers)


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_completions(gpt: openai.AsyncOpenAI, streamed: bool) -> None:
    asked: Json = {"model": MODEL, "prompt": QUESTION, "max_tokens": N_WORDS, "extra_body": LONG}
    if streamed:
        text = "".join([chunk.choices[0].text async for chunk in await gpt.completions.create(stream=True, **asked)])
    else:
        text = (await gpt.completions.create(**asked)).choices[0].text
    raw = await gpt.completions.with_raw_response.create(model=MODEL, prompt=f"{QUESTION}{text} more", max_tokens=1)
    assert_matches_the_answer(matched(raw.headers), text)


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_responses_that_are_sent_back(gpt: openai.AsyncOpenAI, streamed: bool) -> None:
    asked: Json = {"model": MODEL, "input": QUESTION, "max_output_tokens": N_WORDS, "extra_body": LONG}
    if streamed:
        async with gpt.responses.stream(**asked) as stream:
            response: Any = await stream.get_final_response()
    else:
        response = await gpt.responses.create(**asked)
    history = [{"role": "user", "content": QUESTION}, *response.output, {"role": "user", "content": "And a suffix?"}]
    raw = await gpt.responses.with_raw_response.create(model=MODEL, input=history, max_output_tokens=1)
    assert_matches_the_answer(matched(raw.headers), response.output_text)


@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropic_messages(app: App, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Json = {"model": MODEL, "messages": messages, "max_tokens": N_WORDS, "extra_body": LONG}
    async with anthropic.AsyncAnthropic(base_url=app.url, api_key="sk-none", max_retries=0) as claude:
        if streamed:
            async with claude.messages.stream(**asked) as stream:
                message: anthropic.types.Message = await stream.get_final_message()
        else:
            message = await claude.messages.create(**asked)
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "And a suffix?"}]
        raw = await claude.messages.with_raw_response.create(model=MODEL, messages=messages, max_tokens=1)
    block = message.content[0]
    assert block.type == "text"
    assert_matches_the_answer(matched(raw.headers), block.text)


async def test_sagemaker_invocations(app: App) -> None:
    async with RawClient(app.url) as client:
        messages: list[Json] = [{"role": "user", "content": QUESTION}]
        asked = {"model": MODEL, "messages": messages, "max_tokens": N_WORDS, **LONG}
        answer = await client.request("POST", "/invocations", json.dumps(asked).encode(), AS_JSON)
        message = json.loads(answer.body)["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "And a suffix?"}]
        answer = await client.request("POST", "/invocations", json.dumps({**asked, "max_tokens": 1}).encode(), AS_JSON)
    assert_matches_the_answer(int(answer.header("x-prefixroute-matched-tokens") or 0), message["content"])


# ---------------------------------------------------------------------- answers that are not remembered

BODY = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "stream": True}).encode()
CHAT = "/v1/chat/completions"
START = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n%s\r\n"
SAID = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"word " * 1_000)
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
N_QUESTION_BLOCKS = 1
N_BLOCKS = (len(QUESTION) + 5_000) // BLOCK_BYTES


async def whole(call: Call) -> None:
    await call.send(START % b"")
    for piece in (SAID, END, b""):
        await call.send_chunk(piece)


async def encoded(call: Call) -> None:
    # It says so; what it sends does not matter.
    await call.send(START % b"Content-Encoding: gzip\r\n")
    for piece in (SAID, END, b""):
        await call.send_chunk(piece)


async def fails_in_the_stream(call: Call) -> None:
    await call.send(START % b"")
    for piece in (SAID, b'data: {"error":{"message":"CUDA"}}\n\ndata: [DONE]\n\n', b""):
        await call.send_chunk(piece)


async def breaks_off(call: Call) -> None:
    await call.send(START % b"")
    await call.send_chunk(SAID + END)
    call.close()


async def goes_on(call: Call) -> None:
    await call.send(START % b"")
    await call.send_chunk(SAID + END)
    await call.wait_disconnected()


async def test_a_whole_answer_is_remembered_once_it_is_whole(serve: Serve) -> None:
    async with FakeUpstream(whole) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        for _ in range(2):
            assert (await client.request("POST", CHAT, BODY)).status == 200
        assert app.router.index.n_blocks(0) == N_BLOCKS > N_QUESTION_BLOCKS


@pytest.mark.parametrize("script", [encoded, fails_in_the_stream])
async def test_what_cannot_be_known_is_not(serve: Serve, script: Callable[[Call], Awaitable[None]]) -> None:
    async with FakeUpstream(script) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.request("POST", CHAT, BODY)
        assert app.router.index.n_blocks(0) == N_QUESTION_BLOCKS


async def test_an_answer_that_breaks_off_is_not_remembered(serve: Serve, until: Until, finished: Finished) -> None:
    async with FakeUpstream(breaks_off) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, BODY) + BODY)
        assert not (await client.answer()).complete
        await until(lambda: len(finished()) == 1)
        assert app.router.index.n_blocks(0) == N_QUESTION_BLOCKS


async def test_a_client_that_leaves_mid_answer_leaves_the_prompt_alone(
    serve: Serve, until: Until, finished: Finished
) -> None:
    async with FakeUpstream(goes_on) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(head("POST", CHAT, BODY) + BODY)
        await client.begin()
        await client.chunk()
        client.close()
        await upstream.calls[0].wait_disconnected()
        await until(lambda: len(finished()) == 1)
        assert app.router.index.n_blocks(0) == N_QUESTION_BLOCKS
