"""Run in the environment `clients`, with the URL of a server: chats by LangChain's OpenAI model, told as JSON."""

import asyncio
import json
import sys

from langchain_core.messages import AIMessage, BaseMessage  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]

MESSAGES = [
    ("system", "You answer in few words, and only about caches. " * 40),
    ("human", "What is a prefix cache?"),
]


def told(message: BaseMessage) -> dict[str, object]:
    assert isinstance(message, AIMessage)
    usage = message.usage_metadata
    return {
        "text": message.content,
        "prompt_tokens": usage["input_tokens"],
        "cached_tokens": usage.get("input_token_details", {}).get("cache_read", 0),
    }


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=model,
        temperature=0,
        max_tokens=12,
        max_retries=0,
        stream_usage=True,
    )
    whole = chat.invoke(MESSAGES)
    first, *others = chat.stream(MESSAGES)
    for piece in others:
        first += piece
    at_once = asyncio.run(chat.abatch([MESSAGES, MESSAGES]))
    print(json.dumps([told(message) for message in (whole, first, *at_once)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
