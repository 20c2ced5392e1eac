"""Clients that people use, through a router before two vLLM servers: all they are told is what a third one, asked
directly, tells them, down to the tokens that were cached."""

import asyncio
import json
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import MessageParam
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from prefixroute.app import App
from tests.engines.answers import REQUEST_ID, gist, without_variable
from tests.engines.chats import MESSAGES, QUESTION, SYSTEM, Told, chats, told
from tests.engines.conftest import require
from tests.engines.install import CLIENTS
from tests.engines.routers import before
from tests.engines.scraping import total
from tests.engines.servers import VllmServer
from tests.engines.tiny_model import NAME

ASKED: list[MessageParam] = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
LANGCHAIN = Path(__file__).with_name("langchain_chat.py")
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


@pytest.fixture
async def app(vllm: list[VllmServer]) -> AsyncIterator[App]:
    async with before(vllm[:2]) as app:
        yield app


# The OpenAI SDK


async def completions(gpt: openai.AsyncOpenAI) -> Told:
    found: Told = []
    for prompt in (SYSTEM, [SYSTEM, SYSTEM + QUESTION]):
        whole = await gpt.completions.create(model=NAME, prompt=prompt, max_tokens=6, temperature=0)
        found.append(told([choice.text for choice in whole.choices], whole.usage))
    stream = await gpt.completions.create(
        model=NAME, prompt=SYSTEM, max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = [chunk async for chunk in stream]
    found.append(told("".join(piece.choices[0].text for piece in pieces), last.usage))
    return found


async def tools(gpt: openai.AsyncOpenAI) -> Told:
    """A call that is asked for, whole and streamed, and a conversation that goes on with what it brought."""
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": MESSAGES,
        "max_tokens": 60,
        "temperature": 0,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    }
    whole = await gpt.chat.completions.create(**asked)
    message = whole.choices[0].message
    found = [told((message.content, message.tool_calls, whole.choices[0].finish_reason), whole.usage)]
    stream = await gpt.chat.completions.create(**asked, stream=True)
    calls = [
        (call.function.name, call.function.arguments)
        async for chunk in stream
        for call in chunk.choices[0].delta.tool_calls or []
        if call.function is not None
    ]
    (name, _), *_ = calls
    assert name == "get_weather"
    found.append((name, "".join(piece or "" for _, piece in calls)))
    history: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"place":"Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "Rain. " * 100},
    ]
    for turn in ("And tomorrow?", "And then?"):
        history.append({"role": "user", "content": turn})
        answer = await gpt.chat.completions.create(**{**asked, "messages": history, "tool_choice": "auto"})
        found.append(told(answer.choices[0].message.content, answer.usage))
    return found


async def responses(gpt: openai.AsyncOpenAI) -> Told:
    """Made, found again, gone on with, and streamed."""
    asked: dict[str, Any] = {"model": NAME, "instructions": SYSTEM, "max_output_tokens": 9, "temperature": 0}
    first = await gpt.responses.create(input=QUESTION, **asked)
    again = await gpt.responses.retrieve(first.id)
    assert (again.id, again.output_text) == (first.id, first.output_text)
    second = await gpt.responses.create(input="And a suffix?", previous_response_id=first.id, **asked)
    assert second.previous_response_id == first.id
    async with gpt.responses.stream(input=QUESTION, **asked) as stream:
        kinds = dict.fromkeys([event.type async for event in stream])
        third = await stream.get_final_response()
    assert (await gpt.responses.retrieve(third.id)).output_text == third.output_text
    usages = [answer.usage for answer in (first, second, third)]
    assert all(usages)
    return [
        *((answer.output_text,) for answer in (first, second, third)),
        *((usage.input_tokens, usage.input_tokens_details.cached_tokens) for usage in usages if usage is not None),
        tuple(kinds),
    ]


async def refusals(gpt: openai.AsyncOpenAI) -> Told:
    """What has no such endpoint, model, response or meaning."""
    asks: list[Callable[[], Awaitable[object]]] = [
        lambda: gpt.embeddings.create(model=NAME, input=QUESTION),
        lambda: gpt.moderations.create(model=NAME, input=QUESTION),
        lambda: gpt.chat.completions.create(model="gpt-9", messages=MESSAGES),
        lambda: gpt.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=-1),
        lambda: gpt.chat.completions.create(model=NAME, messages=[], max_tokens=1),
        lambda: gpt.completions.create(model=NAME, prompt=SYSTEM * 100, max_tokens=1),
        lambda: gpt.responses.retrieve("resp_unknown"),
    ]
    found: Told = []
    for ask in asks:
        with pytest.raises(openai.APIStatusError) as raised:
            await ask()
        found.append((type(raised.value), raised.value.status_code, raised.value.body))
    return found


@pytest.mark.parametrize("scenario", [chats, completions, tools, responses, refusals])
async def test_the_openai_sdk(app: App, direct: str, scenario: Callable[[openai.AsyncOpenAI], Awaitable[Told]]) -> None:
    found = []
    for url in (direct, app.url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as gpt:
            assert [model.id async for model in gpt.models.list()] == [NAME]
            found.append(await scenario(gpt))
    assert found[1] == found[0]


# The Anthropic SDK


async def messages(claude: anthropic.AsyncAnthropic) -> Told:
    asked: dict[str, Any] = {"model": NAME, "system": SYSTEM, "messages": ASKED}
    counted = await claude.messages.count_tokens(**asked)
    found: Told = [(counted.input_tokens,)]
    for _ in range(2):
        message = await claude.messages.create(**asked, max_tokens=8, extra_body=GREEDY)
        usage = message.usage
        n_cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        assert usage.input_tokens + n_cached == counted.input_tokens
        found.append(said(message))
    async with claude.messages.stream(**asked, max_tokens=8, extra_body=GREEDY) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert final.content[0].type == "text"
    assert final.content[0].text == text
    found.append(said(final))
    assert final.usage.cache_read_input_tokens, "cached: or else nothing was routed by its prefix"
    return found


def said(message: Any) -> tuple[object, ...]:
    (block,), usage = message.content, message.usage
    cached = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return block.text, usage.input_tokens, *cached, usage.output_tokens, message.stop_reason


async def refused_messages(claude: anthropic.AsyncAnthropic) -> Told:
    found: Told = []
    asks: list[dict[str, Any]] = [{"model": "claude-9", "max_tokens": 1}, {"model": NAME, "max_tokens": -1}]
    for ask in asks:
        with pytest.raises(anthropic.APIStatusError) as raised:
            await claude.messages.create(messages=ASKED, **ask)
        found.append((type(raised.value), raised.value.status_code, raised.value.body))
    return found


@pytest.mark.parametrize("scenario", [messages, refused_messages])
async def test_the_anthropic_sdk(
    app: App, direct: str, scenario: Callable[[anthropic.AsyncAnthropic], Awaitable[Told]]
) -> None:
    found = []
    for url in (direct, app.url):
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
            found.append(await scenario(claude))
    assert found[1] == found[0]


# LangChain


async def test_langchains_openai_chat_model(app: App, direct: str) -> None:
    require(CLIENTS)
    found = [await run(str(CLIENTS.python), str(LANGCHAIN), url, NAME) for url in (direct, app.url)]
    assert json.loads(found[1]) == json.loads(found[0])
    cached = [answer["cached_tokens"] for answer in json.loads(found[1])]
    assert [n > 0 for n in cached] == [False, True, True, True]


# curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/messages", "/invocations"])
async def test_curl(app: App, direct: str, tmp_path: Path, target: str, stream: bool) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 9, "temperature": 0, "stream": stream}
    if target == "/v1/messages":
        body |= {"system": SYSTEM, "messages": ASKED}
    elif stream:
        body["stream_options"] = {"include_usage": True}
    (tmp_path / "body.json").write_text(json.dumps(body))
    # As in documentation; and behind the body, what it was told of it.
    curl = [
        *("curl", "--silent", "--show-error", "--fail", "--no-buffer", "--noproxy", "*"),
        *("--header", "Content-Type: application/json", "--header", f"X-Request-Id: {REQUEST_ID}"),
        *("--data-binary", f"@{tmp_path / 'body.json'}", "--write-out", "%{http_code} %{content_type}"),
    ]
    found = [await run(*curl, f"{url}{target}") for url in (direct, app.url)]
    if stream:
        assert gist(found[1]) == gist(found[0])
    else:
        assert without_variable(found[1]) == without_variable(found[0])
    assert found[1].startswith(b"data: " if target != "/v1/messages" else b"event: ") == stream
    assert await total(app.admin_url, "prefixroute_requests_total", outcome="ok", route=target) == 1


async def run(*command: str) -> bytes:
    """What a program wrote. It fails the test if it fails."""
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out
