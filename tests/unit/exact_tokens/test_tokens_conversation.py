"""What the engine's validation makes of a request before it renders, and what is left to bytes."""

from typing import Any

import pytest

from prefixroute.exact_tokens.conversation import NotExactError, read_conversation, with_content, without_developer

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "arguments": '{"b": 1, "a": 2}'}
CALL = {"type": "function", "id": "c1", "function": FUNCTION, "index": 0}


def chat(*messages: object, **fields: object) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def test_calls_come_in_the_order_of_the_schema_with_parsed_arguments_and_nothing_else() -> None:
    [message] = read_conversation(chat({"role": "assistant", "content": None, "tool_calls": [CALL]})).messages
    [call] = message["tool_calls"]
    assert repr(call) == repr(
        {"id": "c1", "function": {"arguments": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    )


@pytest.mark.parametrize("arguments", ["", None, "{", "[1]", "42", "[" * 100_000])
def test_arguments_that_are_no_object_count_as_empty(arguments: str | None) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    [message] = read_conversation(chat({"role": "assistant", "content": "", "tool_calls": [call]})).messages
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_tools_get_the_fields_they_lack_in_the_order_of_the_schema() -> None:
    tools = [{"function": {"parameters": {"z": 1, "a": 2}, "name": "f"}, "type": "function", "cache_control": {}}]
    conversation = read_conversation(chat(USER, tools=tools))
    assert repr(conversation.tools) == repr(
        [{"type": "function", "function": {"name": "f", "description": None, "parameters": {"z": 1, "a": 2}}}]
    )


def test_unknown_fields_of_messages_are_dropped_and_known_ones_kept() -> None:
    messages = [
        {"role": "user", "content": "hi", "name": "ann", "cache_control": {}},
        {"role": "tool", "content": "x", "tool_call_id": "c1", "extra": 1},
        {"role": "assistant", "content": "y", "reasoning_content": "hm", "refusal": None},
    ]
    assert read_conversation(chat(*messages)).messages == [
        {"role": "user", "content": ["hi"], "name": "ann"},
        {"role": "tool", "content": ["x"], "tool_call_id": "c1"},
        {"role": "assistant", "content": ["y"], "reasoning": "hm", "reasoning_content": "hm"},
    ]


def test_parts_are_joined_for_templates_of_text_and_tools_always_are() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, "b"]
    messages = read_conversation(chat({"role": "user", "content": parts}, {"role": "tool", "content": parts})).messages
    assert [m["content"] for m in with_content(messages, as_parts=False)] == ["a\nb", "a\nb"]
    as_parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert [m["content"] for m in with_content(messages, as_parts=True)] == [as_parts, "a\nb"]


def test_developer_messages_are_joined_into_one_system_message_in_front() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
    ]
    assert without_developer(messages) == [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "hi"},
    ]
    assert without_developer(messages[:2]) == messages[:2]


def test_the_billing_line_of_claude_code_is_left_out() -> None:
    parts = [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "be terse"}]
    assert read_conversation(chat({"role": "system", "content": parts})).messages[0]["content"] == ["be terse"]


def test_variables_of_the_request_stand_above_the_operators_and_effort_turns_thinking_on() -> None:
    body = chat(USER, chat_template_kwargs={"a": 2, "b": None}, reasoning_effort="low")
    assert read_conversation(body, {"a": 1, "b": 1, "c": 1}).variables == {
        "a": 2, "b": 1, "c": 1, "reasoning_effort": "low", "enable_thinking": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        {},
        chat(),
        chat("hi"),
        chat({"role": 1, "content": ""}),
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}),
        chat({"role": "user", "content": [{"type": "text", "text": 1}]}),
        chat({"role": "user", "content": {"text": "hi"}}),
        chat({"role": "assistant", "content": "", "tool_calls": [{"type": "custom"}]}),
        chat({"role": "assistant", "content": "", "tool_calls": "x"}),
        chat({"role": "assistant", "content": "", "tool_calls": [{**CALL, "extra": 1}]}),
        chat({"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {**FUNCTION, "x": 1}}]}),
        chat({"role": "assistant", "content": None, "reasoning": "hm"}),
        chat({"role": "developer", "content": "", "tools": []}),
        chat(USER, tools=[{"type": "web_search"}]),
        chat(USER, tools=[{"type": "function", "function": {"name": "f", "returns": {}}}]),
        chat(USER, tools="x"),
        chat(USER, documents=["x"]),
        chat(USER, chat_template="{{ 1 }}"),
        chat(USER, chat_template_kwargs={"tokenize": True}),
        chat(USER, chat_template_kwargs=[]),
        chat(USER, truncate_prompt_tokens=5),
        chat(USER, add_generation_prompt="yes"),
        chat(USER, kv_transfer_params={"prompt_token_ids": [1]}),
    ],
)
def test_what_is_not_surely_rendered_alike_is_left_to_bytes(body: dict[str, Any]) -> None:
    with pytest.raises(NotExactError):
        read_conversation(body)


def test_reading_changes_nothing_in_the_request() -> None:
    body = chat({"role": "assistant", "content": None, "tool_calls": [CALL]}, tools=[{"function": {"name": "f"}}])
    before = repr(body)
    read_conversation(body)
    assert repr(body) == before
