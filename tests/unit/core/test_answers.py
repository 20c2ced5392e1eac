"""What answers of each dialect add to the next turn's key, and which of them add nothing."""

import json
from typing import Any

import pytest

from prefixroute.core.answers import reader_of
from prefixroute.core.canonical import turns_key
from prefixroute.core.prompt import Api, read_prompt

Json = dict[str, Any]


def of_document(api: Api, document: Any, prompt_key: bytes = b"key") -> bytes | None:
    reader = reader_of(api)
    assert reader is not None
    reader.document(document if isinstance(document, bytes) else json.dumps(document).encode())
    return reader.material(prompt_key)


def of_events(api: Api, *events: Any, prompt_key: bytes = b"key") -> bytes | None:
    reader = reader_of(api)
    assert reader is not None
    for event in events:  # each by itself
        reader.events([event if isinstance(event, bytes) else json.dumps(event).encode()])
    return reader.material(prompt_key)


def said(text: str, **more: Any) -> bytes:
    return turns_key([{"role": "assistant", "content": text, **more}])


def chat(delta: Json | None, finish: str | None = None, **more: Any) -> Json:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}


STOP = chat({}, "stop")
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


# ---------------------------------------------------------------------- chat


def test_a_chat_is_said_by_deltas() -> None:
    events = [chat({"role": "assistant", "content": ""}), chat({"content": "Hel"}), chat({"content": "lo"}), STOP]
    usage = {"choices": [], "usage": {"prompt_tokens": 1}}
    assert of_events(Api.CHAT, *events, usage, b"[DONE]") == said("Hello")
    # Of an answer cut by max_tokens, the client has as much.
    assert of_events(Api.CHAT, *events[:-1], chat({"content": "!"}, "length")) == said("Hello!")


def test_calls_of_tools_come_by_index_and_mixed() -> None:
    def call(index: int, **function: str) -> Json:
        return chat({"tool_calls": [{"index": index, "function": function}]})

    events = [
        chat({"role": "assistant", "content": None}),
        call(0, name="f", arguments=""),
        call(1, name="g", arguments="{}"),
        call(0, arguments='{"a"'),
        call(0, arguments=": 1}"),
        chat({}, "tool_calls"),
    ]
    other = {"function": {"name": "g", "arguments": "{}"}}
    assert of_events(Api.CHAT, *events) == said("", tool_calls=[CALL, other])


def test_only_the_first_choice_counts() -> None:
    second = {"choices": [{"index": 1, "delta": {"content": "B"}, "finish_reason": "stop"}]}
    assert of_events(Api.CHAT, second, chat({"content": "A"}), second, STOP) == said("A")
    assert of_events(Api.CHAT, chat({"content": "A"}), second) is None
    choices = [{"index": n, "message": {"content": text}} for n, text in ((1, "B"), (0, "A"))]
    assert of_document(Api.CHAT, {"choices": choices}) == said("A")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_count_only_with_calls_which_templates_keep_them_for(name: str) -> None:
    thought, words, call = chat({name: "Hm."}), chat({"content": "Yes."}), chat({"tool_calls": [{"index": 0, **CALL}]})
    assert of_events(Api.CHAT, thought, words, STOP) is None
    assert of_events(Api.CHAT, thought, call, STOP) == said("", reasoning="Hm.", tool_calls=[CALL])
    whole: Json = {"role": "assistant", "content": "Yes.", name: "Hm."}
    assert of_document(Api.CHAT, {"choices": [{"message": whole}]}) is None
    whole["tool_calls"] = [CALL]
    assert of_document(Api.CHAT, {"choices": [{"message": whole}]}) == turns_key([whole])


def test_thoughts_within_the_text_are_thoughts() -> None:
    assert of_events(Api.CHAT, chat({"content": "<think>Hm.</thi"}), chat({"content": "nk>Yes."}), STOP) is None
    text = {"type": "text", "text": "Hm.</think>Yes."}
    assert of_document(Api.MESSAGES, {"content": [text]}) is None
    message: Json = {"type": "message", "role": "assistant", "content": [{**text, "type": "output_text"}]}
    assert of_document(Api.RESPONSES, {"output": [message]}) is None


def test_no_reasoning_at_all_leaves_no_trace() -> None:
    message: Json = {
        "role": "assistant",
        "content": "Yes.",
        "reasoning": None,
        "reasoning_content": "",
        "tool_calls": [],
    }
    assert of_document(Api.CHAT, {"choices": [{"message": message}]}) == said("Yes.")


@pytest.mark.parametrize(
    "events",
    [
        [],
        [chat({"content": "Hel"})],  # a clean end without a reason for it
        [chat({"content": "Hel"}), {"error": {"message": "CUDA"}}, b"[DONE]"],
        [chat({"content": "Hel"}), b'{"choices":[{"ind', STOP],
        [chat({"content": "Hel"}), b"\xff", STOP],
        [chat({"content": [{"type": "text", "text": "Hel"}]}), STOP],
        [chat(None), STOP],
        [chat({"content": "x", "tool_calls": [{"function": {}}]}), STOP],
        [chat({"tool_calls": ["x"]}), STOP],
        [STOP],
        [[], 1, None],
    ],
)
def test_what_is_not_sound_adds_nothing(events: list[Any]) -> None:
    assert of_events(Api.CHAT, *events) is None


# ---------------------------------------------------------------------- completions and generate


def test_a_completion_goes_on_where_the_prompt_ends() -> None:
    events = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("Hel", "lo")]
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    assert of_events(Api.COMPLETIONS, *events, end, b"[DONE]") == b"Hello"
    assert of_events(Api.COMPLETIONS, *events, b"[DONE]") is None
    assert of_document(Api.COMPLETIONS, {"choices": [{"index": 0, "text": "Hello"}]}) == b"Hello"


def test_a_prompt_that_is_given_back_is_no_answer() -> None:
    assert of_document(Api.COMPLETIONS, {"choices": [{"text": "Say: Hi"}]}, b"Say: ") == b"Hi"
    assert of_document(Api.GENERATE, {"text": ["Say: Hi"]}, b"Say: ") == b"Hi"


@pytest.mark.parametrize(
    "document",
    [
        {"text": ["Hello", "another"]},  # vLLM
        {"text": "Hello", "meta_info": {"finish_reason": {"type": "stop"}}},  # SGLang
        {"generated_text": "Hello"},  # Text Generation Inference
        [{"generated_text": "Hello"}],
        b'{"text": ["He"]}\n{"text": ["Hello"]}\n',  # vLLM, streamed: a document a line
        json.dumps({"text": ["Hello"]}, indent=1).encode(),
    ],
)
def test_generate_in_all_its_forms(document: Any) -> None:
    assert of_document(Api.GENERATE, document) == b"Hello"


def test_the_last_event_of_generate_has_the_whole_text() -> None:
    tgi = [{"token": {"text": "Hel"}, "generated_text": None}, {"token": {"text": "lo"}, "generated_text": "Hello"}]
    assert of_events(Api.GENERATE, *tgi) == b"Hello"
    assert of_events(Api.GENERATE, tgi[0]) is None
    assert of_events(Api.GENERATE, {"text": "Hel"}, {"text": "Hello"}, b"[DONE]") == b"Hello"


# ---------------------------------------------------------------------- messages


def block(index: int, begun: Json, *deltas: Json) -> list[Json]:
    return [
        {"type": "content_block_start", "index": index, "content_block": begun},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


TEXT = block(0, {"type": "text", "text": ""}, *({"type": "text_delta", "text": text} for text in ("Let me ", "see.")))
END = {"type": "message_stop"}


def test_a_message_is_made_of_blocks() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    pieces = ['{"place"', ': "Oslo"}']
    called = block(1, use, *({"type": "input_json_delta", "partial_json": piece} for piece in pieces))
    expected = [{"type": "text", "text": "Let me see."}, {**use, "input": {"place": "Oslo"}}]
    material = turns_key([{"role": "assistant", "content": expected}])
    assert of_events(Api.MESSAGES, {"type": "message_start"}, *TEXT, {"type": "ping"}, *called, END) == material
    assert of_document(Api.MESSAGES, {"content": expected}) == material


def test_a_thinking_block_counts_only_with_a_call() -> None:
    thought = block(0, {"type": "thinking", "thinking": ""}, {"type": "thinking_delta", "thinking": "Hm."})
    text = block(1, {"type": "text", "text": "Yes."})
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    assert of_events(Api.MESSAGES, *thought, *text, END) is None
    assert of_events(Api.MESSAGES, *thought, *block(1, use), END) == turns_key(
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, use]}]
    )


@pytest.mark.parametrize(
    "events",
    [
        TEXT,
        [*TEXT, {"type": "error", "error": {"type": "api_error"}}, END],
        [*block(0, {"type": "tool_use", "name": "f"}, {"type": "input_json_delta", "partial_json": '{"cut'}), END],
        [*block(0, {"type": "unheard_of"}, {"type": "text_delta", "text": "x"}), END],
        [*TEXT[1:], END],
        [{"type": ["x"]}, END],
        [END],
    ],
)
def test_messages_that_are_not_sound_add_nothing(events: list[Any]) -> None:
    assert of_events(Api.MESSAGES, *events) is None


# ---------------------------------------------------------------------- responses

MESSAGE: Json = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
FUNCTION_CALL: Json = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
THOUGHT: Json = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


@pytest.mark.parametrize("end", ["response.completed", "response.incomplete"])
def test_a_response_is_told_whole_at_its_end(end: str) -> None:
    delta = {"type": "response.output_text.delta", "delta": '"response.completed" is the last'}
    response = {"status": end.partition(".")[2], "output": [MESSAGE, FUNCTION_CALL]}
    material = turns_key([MESSAGE, FUNCTION_CALL])
    assert of_events(Api.RESPONSES, delta, {"type": end, "response": response}) == material
    assert of_document(Api.RESPONSES, response) == material
    assert of_events(Api.RESPONSES, delta) is None


def test_a_reasoning_item_counts_only_with_a_call() -> None:
    assert of_document(Api.RESPONSES, {"output": [THOUGHT, MESSAGE]}) is None
    assert of_document(Api.RESPONSES, {"output": [THOUGHT, FUNCTION_CALL]}) == turns_key([THOUGHT, FUNCTION_CALL])


@pytest.mark.parametrize(
    "response",
    [
        {"status": "queued", "output": []},
        {"status": "failed", "output": [MESSAGE]},
        {"status": "completed", "output": [MESSAGE, {"type": "web_search_call"}]},
        {"status": "completed", "output": ["x"]},
        {"status": "completed"},
    ],
)
def test_responses_that_are_not_sound_add_nothing(response: Json) -> None:
    assert of_document(Api.RESPONSES, response) is None
    assert of_events(Api.RESPONSES, {"type": "response.completed", "response": response} | response) is None or (
        response["status"] == "failed"  # no server says both
    )


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.GENERATE, Api.MESSAGES, Api.RESPONSES])
@pytest.mark.parametrize("garbage", [b"", b"x", b"\xff", b"[]", b"null", b"{}", b"[[]]", b"[" * 2_000])
def test_garbage_adds_nothing(api: Api, garbage: bytes) -> None:
    assert of_document(api, garbage) is None
    assert of_events(api, garbage) is None


@pytest.mark.parametrize("api", [Api.POOLING, Api.TOKENIZE, Api.OTHER, Api.INVOCATIONS])
def test_answers_that_are_no_text_have_no_reader(api: Api) -> None:
    assert reader_of(api) is None


# ---------------------------------------------------------------------- whose answers follow


ASKED = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("api", "body", "answered_as"),
    [
        (Api.CHAT, {"messages": ASKED}, Api.CHAT),
        (Api.CHAT, {"messages": [*ASKED, {"role": "assistant", "content": "It is"}]}, None),
        (Api.CHAT, {"messages": []}, None),
        (Api.MESSAGES, {"messages": ASKED}, Api.MESSAGES),
        (Api.MESSAGES, {"messages": [*ASKED, {"role": "assistant", "content": "{"}]}, None),
        (Api.RESPONSES, {"input": "?"}, Api.RESPONSES),
        (Api.RESPONSES, {"input": ASKED}, Api.RESPONSES),
        (Api.RESPONSES, {"input": "?", "previous_response_id": "resp_1"}, None),
        (Api.COMPLETIONS, {"prompt": "?"}, Api.COMPLETIONS),
        (Api.COMPLETIONS, {"prompt": ["?", "!"]}, Api.COMPLETIONS),
        (Api.COMPLETIONS, {"prompt": [1, 2]}, None),
        (Api.COMPLETIONS, {"prompt": [[1, 2]]}, None),
        (Api.GENERATE, {"inputs": "?"}, Api.GENERATE),
        (Api.GENERATE, {"input_ids": [1], "text": "?"}, None),
        (Api.INVOCATIONS, {"messages": ASKED}, Api.CHAT),
        (Api.INVOCATIONS, {"prompt": "?"}, Api.COMPLETIONS),
        (Api.INVOCATIONS, {"inputs": "?"}, Api.GENERATE),
        (Api.INVOCATIONS, {"input": "?"}, None),
        (Api.POOLING, {"input": "?"}, None),
    ],
)
def test_a_prompt_tells_whether_its_answer_follows_it(api: Api, body: Json, answered_as: Api | None) -> None:
    assert read_prompt(api, json.dumps(body).encode()).answered_as is answered_as


def test_a_prompt_too_long_to_be_parsed_does_not_go_on() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 2_000_000}]}).encode()
    prompt = read_prompt(Api.CHAT, body)
    assert prompt.key
    assert prompt.answered_as is None
