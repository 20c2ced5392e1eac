"""Plays a workload against a server: conversations come when they come, each waits for its answers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from prefixroute.demo.client import MeasuringClient, Sample, sleep_until
from prefixroute.demo.workload import Conversation


async def drive(
    conversations: Sequence[Conversation],
    client: MeasuringClient,
    *,
    model: str,
    speed: float,
    on_turns: Callable[[int], object] = lambda _: None,
) -> list[Sample]:
    """One sample for each request, in the order in which they ended; times as measured.

    All times of the workload are divided by `speed`. A conversation whose answer fails ends there. `on_turns` is
    told how many turns are over.
    """
    samples: list[Sample] = []
    began_s = time.perf_counter()

    async def converse(place: int, conversation: Conversation) -> None:
        session = {"x-session-id": f"conversation-{place}"}
        due_s = began_s + conversation.arrival_s / speed
        messages: list[dict[str, Any]] = [{"role": "system", "content": conversation.system}]
        for number, turn in enumerate(conversation.turns):
            due_s += turn.think_s / speed
            await sleep_until(due_s)
            messages.append({"role": "user", "content": turn.user})
            body = _body(model, messages, turn.answer_tokens)
            send_delay_s = time.perf_counter() - due_s
            sample = await client.stream("/v1/chat/completions", body, session)
            due_s = time.perf_counter()
            samples.append(replace(sample, send_delay_s=send_delay_s))
            if sample.error is not None:
                on_turns(len(conversation.turns) - number)
                return
            messages.append({"role": "assistant", "content": sample.text})
            on_turns(1)

    async with asyncio.TaskGroup() as tasks:
        for place, conversation in enumerate(conversations):
            tasks.create_task(converse(place, conversation))
    return samples


def _body(model: str, messages: list[dict[str, Any]], answer_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": messages,
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
