from typing import Any

import pytest

from prefixroute.demo.server import prompts, tokens
from prefixroute.demo.server.api_errors import ApiError, BadRequestError

QUESTION = {"role": "user", "content": "What is a prefix?"}
ANSWER = "kal duv gis "


def test_a_turn_and_its_answer_are_the_start_of_the_next_turn() -> None:
    first = prompts.chat_prompt({"messages": [{"role": "system", "content": "Be brief"}, QUESTION]})
    conversation = [
        {"role": "system", "content": "Be brief"},
        QUESTION,
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And a suffix?"},
    ]
    second = prompts.chat_prompt({"messages": conversation})
    assert second.startswith(first + tokens.encode(ANSWER) + tokens.END)


def test_a_conversation_is_the_same_prompt_in_every_dialect() -> None:
    chat = prompts.chat_prompt({"messages": [{"role": "system", "content": "Be brief"}, QUESTION]})
    parts = [{"type": "text", "text": "What is a prefix?"}]
    assert chat == prompts.messages_prompt(
        {"system": [{"type": "text", "text": "Be brief"}], "messages": [{"role": "user", "content": parts}]}
    )
    turns = prompts.responses_turns(
        {
            "input": [
                {"role": "developer", "content": "Be brief"},
                {"role": "user", "content": [{"type": "input_text", "text": "What is a prefix?"}]},
            ]
        }
    )
    assert chat == prompts.render(turns)


def test_tools_come_first_and_calls_are_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    plain = prompts.chat_prompt({"messages": [QUESTION]})
    with_tools = prompts.chat_prompt({"messages": [QUESTION], "tools": tools})
    assert with_tools.endswith(plain)
    assert b"look_up" in with_tools

    called = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert b"look_up" in prompts.chat_prompt({"messages": called})


def test_tool_results_are_turns_of_their_own_in_every_dialect() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "42"}]}
    anthropic = prompts.messages_prompt(
        {"messages": [{"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]}
    )
    openai = prompts.chat_prompt({"messages": [{"role": "tool", "content": "42"}, {"role": "user", "content": "So?"}]})
    items = [{"type": "function_call_output", "output": "42"}, {"role": "user", "content": "So?"}]
    assert anthropic == openai == prompts.render(prompts.responses_turns({"input": items}))


def test_different_images_make_different_prompts() -> None:
    def prompt(url: str) -> bytes:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        return prompts.chat_prompt({"messages": [{"role": "user", "content": parts}]})

    assert prompt("data:image/png;base64,AAAA") == prompt("data:image/png;base64,AAAA")
    assert prompt("data:image/png;base64,AAAA") != prompt("data:image/png;base64,BBBB")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("abcd", [b"abcd"]),
        (["abcd", "efgh"], [b"abcd", b"efgh"]),
        ([1, 2], [b"\1\0\0\0\2\0\0\0"]),
        ([[1], [2]], [b"\1\0\0\0", b"\2\0\0\0"]),
    ],
)
def test_completions_take_texts_and_token_ids(given: object, expected: list[bytes]) -> None:
    assert prompts.completion_prompts({"prompt": given}) == expected


@pytest.mark.parametrize("given", [None, "", [], {}, 5, [None], [1, "a"], [[-1]], [["a"]]])
def test_other_completion_prompts_are_refused(given: object) -> None:
    with pytest.raises(BadRequestError):
        prompts.completion_prompts({"prompt": given})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"content": "hello"}]},
    ],
)
def test_bodies_without_messages_are_refused(body: dict[str, Any]) -> None:
    for read in (prompts.chat_prompt, prompts.messages_prompt):
        with pytest.raises(ApiError) as caught:
            read(body)
        assert caught.value.status == 400


def test_responses_want_an_input() -> None:
    with pytest.raises(BadRequestError):
        prompts.responses_turns({})
