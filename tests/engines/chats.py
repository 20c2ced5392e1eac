"""Chats by the OpenAI SDK, and what was told of them."""

import openai
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from tests.engines.tiny_model import NAME

# Longer than the router's blocks, so that it knows the prompt again.
SYSTEM = "You answer in few words, and only about caches. " * 40
QUESTION = "What is a prefix cache?"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": QUESTION},
]

Told = list[tuple[object, ...]]
"""What a client was told, step by step. Of streams, all of the text at once: how an engine cuts it depends on how busy
the machine is."""


def told(text: object, usage: CompletionUsage | None) -> tuple[object, ...]:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return text, usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens


async def chats(gpt: openai.AsyncOpenAI) -> Told:
    """The same question twice, and streamed."""
    found: Told = []
    for _ in range(2):
        chat = await gpt.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, temperature=0)
        found.append(told(chat.choices[0].message.content, chat.usage))
    stream = await gpt.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = [chunk async for chunk in stream]
    found.append(told("".join(piece.choices[0].delta.content or "" for piece in pieces), last.usage))
    assert found[1][3] == found[2][3] != 0, "cached: or else nothing was routed by its prefix"
    return found
