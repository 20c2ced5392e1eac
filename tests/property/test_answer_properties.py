"""Prompt and answer are the beginning of the next turn, whatever was said, however it came, whoever appends it."""

from collections.abc import Callable
from typing import Any

import orjson
from hypothesis import assume, given
from hypothesis import strategies as st

from prefixroute.core.answers import reader_of
from prefixroute.core.blocks import BlockHasher
from prefixroute.core.canonical import turns_key
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.http.events import events_of
from prefixroute.http.transcript import Transcript

Body = dict[str, Any]

# Hypothesis takes it from the code under test; thoughts have a test of their own.
texts = st.text(max_size=30).filter(lambda text: "</think>" not in text)
words = texts.filter(bool)
json_objects = st.dictionaries(
    texts, st.none() | st.booleans() | st.integers(-9, 9) | texts | st.lists(texts), max_size=3
)
tools: st.SearchStrategy[Body] = st.just({}) | st.just({"tools": [{"type": "function", "function": {"name": "f"}}]})
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"Content-Type", b"application/json")]


def cut(draw: st.DrawFn, text: str) -> list[str]:
    """`text` in pieces, as tokens come; none of them is empty."""
    places = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=4)))
    return [piece for a, b in zip([0, *places], [*places, len(text)], strict=True) if (piece := text[a:b])]


def stream(events: list[Body], end: bytes = b"", names: bool = False) -> bytes:
    name = b"event: %b\n"
    heads = [name % event["type"].encode() if names else b"" for event in events]
    return (
        b"".join([b"%bdata: %b\n\n" % (h, orjson.dumps(event)) for h, event in zip(heads, events, strict=True)]) + end
    )


@st.composite
def chats(draw: st.DrawFn) -> tuple[bytes, bytes, Body]:
    """An answer whole, the same as a stream, and its message as vLLM has it."""
    content = draw(st.none() | texts)
    calls: list[Body] = [
        {"id": f"call_{n}", "type": "function", "function": {"name": draw(words), "arguments": draw(texts)}}
        for n in range(draw(st.integers(0, 2)))
    ]
    thought = draw(st.none() | words)
    message: Body = {
        "role": "assistant",
        "content": content,
        **dict.fromkeys(["refusal", "annotations", "audio", "function_call"]),
        "tool_calls": calls,
        "reasoning": thought,
    }
    other = {"index": 1, "message": {"role": "assistant", "content": "another"}, "finish_reason": "stop"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}, *([other] if draw(st.booleans()) else [])]
    whole = orjson.dumps({"id": "chatcmpl-1", "object": "chat.completion", "choices": choices, "usage": {}})

    deltas: list[Body] = [{"role": "assistant", "content": ""}]
    deltas += [{draw(st.sampled_from(["reasoning", "reasoning_content"])): piece} for piece in cut(draw, thought or "")]
    deltas += [{"content": piece, "tool_calls": None} for piece in cut(draw, content or "")]
    for n, call in enumerate(calls):
        function = call["function"]
        first, *more = [*cut(draw, function["arguments"]), ""]
        head = {"index": n, "id": call["id"], "type": "function"}
        deltas.append({"tool_calls": [{**head, "function": {"name": function["name"], "arguments": first}}]})
        deltas += [{"tool_calls": [{"index": n, "function": {"arguments": piece}}]} for piece in more]
    events: list[Body] = []
    for delta in deltas:
        events.append({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        if len(choices) > 1:
            events.append({"choices": [{"index": 1, "delta": {"content": "another"}, "finish_reason": None}]})
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    events.append({"choices": [], "usage": {"prompt_tokens": 1}})
    return whole, stream(events, b"data: [DONE]\n\n"), message


def openai_sdk(message: Body) -> Body:
    """`messages.append(completion.choices[0].message)`: all that came, empty or not."""
    return message


def minimal(message: Body) -> Body:
    """What most frameworks keep. Thoughts with calls are kept by those who know that they have to be."""
    kept: Body = {"role": "assistant", "content": message["content"] or ""}
    if message["tool_calls"]:
        kept["tool_calls"] = message["tool_calls"]
        if message["reasoning"]:
            kept["reasoning_content"] = message["reasoning"]
    return kept


chat_messages = st.lists(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["system", "user"]), texts),
    max_size=3,
).map(lambda turns: [*turns, {"role": "user", "content": "?"}])


def assert_next_turn_begins_so(
    api: Api, body: Body, following: Body, whole: bytes, streamed: bytes, cuts: list[int], *, is_lost: bool
) -> None:
    prompt = read_prompt(api, orjson.dumps(body))
    longer = read_prompt(api, orjson.dumps(following))
    materials = []
    for headers, answer in ((JSON, whole), (SSE, streamed), (SSE, streamed.replace(b"\n", b"\r\n"))):
        transcript = Transcript.of(prompt, headers)
        assert transcript is not None
        places = sorted({at % (len(answer) + 1) for at in cuts})
        for a, b in zip([0, *places], [*places, len(answer)], strict=True):
            transcript.see(answer[a:b])
        materials.append(transcript.material())
    assert materials[0] == materials[1] == materials[2]
    material = materials[0]
    assert (material is None) is is_lost
    if material is None:
        return
    assert longer.key.startswith(prompt.key + material)
    hasher = BlockHasher(3, 7)
    chain = hasher.chain(prompt.scope, prompt.key)
    continued = hasher.continued(prompt.scope, chain, hasher.rest(prompt.key) + material)
    assert continued == hasher.chain(longer.scope, prompt.key + material)
    assert continued == hasher.chain(longer.scope, longer.key)[: len(continued)]


cuts = st.lists(st.integers(0, 10_000), max_size=6)


@given(chat_messages, tools, chats(), st.sampled_from([openai_sdk, minimal]), cuts)
def test_a_chat(
    turns: list[Body],
    more: Body,
    answer: tuple[bytes, bytes, Body],
    client: Callable[[Body], Body],
    places: list[int],
) -> None:
    whole, streamed, message = answer
    thoughts_only = bool(message["reasoning"]) and not message["tool_calls"]
    following = [*turns, client(message), {"role": "user", "content": "and?"}]
    assert_next_turn_begins_so(
        Api.CHAT,
        {"model": "m", "messages": turns, **more},
        {"model": "m", "messages": following, **more},
        whole,
        streamed,
        places,
        is_lost=thoughts_only or not (message["content"] or message["tool_calls"]),
    )


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, bytes, list[Body]]:
    blocks: list[Body] = []
    for kind in draw(st.lists(st.sampled_from(["text", "tool_use", "thinking"]), min_size=1, max_size=4)):
        match kind:
            case "text":
                blocks.append({"type": "text", "text": draw(words)})
            case "tool_use":
                blocks.append({"type": "tool_use", "id": "toolu_1", "name": draw(words), "input": draw(json_objects)})
            case _:
                blocks.append({"type": "thinking", "thinking": draw(words), "signature": "s"})
    events: list[Body] = [{"type": "message_start", "message": {"role": "assistant", "content": []}}, {"type": "ping"}]
    for n, block in enumerate(blocks):
        deltas: list[Body] = []
        if block["type"] == "text":
            begun: Body = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in cut(draw, block["text"])]
        elif block["type"] == "tool_use":
            begun = {**block, "input": {}}
            if block["input"] or draw(st.booleans()):
                text = orjson.dumps(block["input"]).decode()
                deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in cut(draw, text)]
        else:
            begun = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in cut(draw, block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": "s"})
        events.append({"type": "content_block_start", "index": n, "content_block": begun})
        events += [{"type": "content_block_delta", "index": n, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": n})
    events += [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"}]
    whole = orjson.dumps({"type": "message", "role": "assistant", "content": blocks, "stop_reason": "end_turn"})
    return whole, stream(events, names=True), blocks


@given(chat_messages, tools, messages(), st.booleans(), cuts)
def test_anthropic_messages(
    turns: list[Body], more: Body, answer: tuple[bytes, bytes, list[Body]], as_text: bool, places: list[int]
) -> None:
    whole, streamed, blocks = answer
    content: Any = blocks
    if as_text and [block["type"] for block in blocks] == ["text"]:
        content = blocks[0]["text"]
    kinds = {block["type"] for block in blocks}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "it is so"}
    following = [*turns, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    assert_next_turn_begins_so(
        Api.MESSAGES,
        {"model": "m", "system": "be brief", "messages": turns, **more},
        {"model": "m", "system": "be brief", "messages": following, **more},
        whole,
        streamed,
        places,
        is_lost="thinking" in kinds and "tool_use" not in kinds,
    )


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, bytes, list[Body]]:
    items: list[Body] = []
    for kind in draw(st.lists(st.sampled_from(["message", "function_call", "reasoning"]), min_size=1, max_size=4)):
        match kind:
            case "message":
                part = {"type": "output_text", "text": draw(words), "annotations": [], "logprobs": []}
                item = {"type": kind, "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
            case "function_call":
                item = {"type": kind, "id": "fc_1", "call_id": "c", "name": draw(words), "arguments": draw(texts)}
            case _:
                thought = {"type": "reasoning_text", "text": draw(words)}
                item = {"type": kind, "id": "rs_1", "summary": [], "content": [thought]}
        items.append(item)
    response: Body = {"id": "resp_1", "object": "response", "status": "completed", "output": items}
    events: list[Body] = [{"type": "response.created", "response": {**response, "output": []}}]
    events += [{"type": "response.output_text.delta", "delta": piece} for piece in cut(draw, draw(texts))]
    events += [{"type": "response.output_item.done", "output_index": n, "item": item} for n, item in enumerate(items)]
    events.append({"type": "response.completed", "response": response})
    return orjson.dumps(response), stream(events, names=True), items


@given(texts.filter(bool) | chat_messages, responses(), st.booleans(), cuts)
def test_responses(
    given_input: str | list[Body], answer: tuple[bytes, bytes, list[Body]], bare: bool, places: list[int]
) -> None:
    whole, streamed, items = answer
    turns = given_input if isinstance(given_input, list) else [{"role": "user", "content": given_input}]
    kept = [
        {"role": "assistant", "content": item["content"][0]["text"]} if bare and item["type"] == "message" else item
        for item in items
    ]
    kinds = {item["type"] for item in items}
    output = {"type": "function_call_output", "call_id": "c", "output": "it is so"}
    assert_next_turn_begins_so(
        Api.RESPONSES,
        {"model": "m", "instructions": "be brief", "input": given_input},
        {"model": "m", "instructions": "be brief", "input": [*turns, *kept, output]},
        whole,
        streamed,
        places,
        is_lost="reasoning" in kinds and "function_call" not in kinds,
    )


@given(words, words, words, st.booleans(), st.booleans(), cuts, st.data())
def test_completions(
    asked: str, said: str, more: str, is_batch: bool, is_echoed: bool, places: list[int], data: st.DataObject
) -> None:
    assume(not said.startswith(asked))
    shown = asked + said if is_echoed else said
    other = {"index": 1, "text": "another", "finish_reason": "stop"}
    whole = orjson.dumps({"choices": [{"index": 0, "text": shown, "finish_reason": "length"}, other]})
    pieces = data.draw(st.composite(cut)(shown))
    events: list[Body] = [{"choices": [{"index": 0, "text": piece, "finish_reason": None}, other]} for piece in pieces]
    events.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    assert_next_turn_begins_so(
        Api.COMPLETIONS,
        {"model": "m", "prompt": [asked, "else"] if is_batch else asked},
        {"model": "m", "prompt": asked + said + more},
        whole,
        stream(events, b"data: [DONE]\n\n"),
        places,
        is_lost=False,
    )


NAMES = [
    *("choices", "index", "delta", "message", "content", "text", "tool_calls", "function", "name", "arguments"),
    *("type", "output", "role", "reasoning", "finish_reason", "generated_text", "status", "response", "input", "error"),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            texts | st.sampled_from(NAMES),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
SHAPES = [Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES, Api.GENERATE]


@st.composite
def odd_answers(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A sound answer of any dialect, one value of which is another, and the same done to its stream."""
    whole, streamed, _ = draw(st.one_of(chats(), messages(), responses()))
    events = [orjson.loads(event) for event in events_of(streamed)[0] if event != b"[DONE]"]
    document = orjson.loads(whole)
    for at in (document, draw(st.sampled_from(events))):
        while at:
            place = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if isinstance(at[place], dict | list) and at[place] and draw(st.integers(0, 3)):
                at = at[place]  # noqa: PLW2901  one level deeper
            else:
                at[place] = draw(json_values)
                break
    return orjson.dumps(document), b"".join([b"data: " + orjson.dumps(event) + b"\n\n" for event in events])


@given(st.sampled_from(SHAPES), odd_answers() | st.tuples(json_values.map(orjson.dumps), st.binary(max_size=80)))
def test_odd_answers_never_raise(api: Api, answer: tuple[bytes, bytes]) -> None:
    whole, streamed = answer
    for is_stream in (False, True):
        reader = reader_of(api)
        assert reader is not None
        if is_stream:
            reader.events(events_of(streamed + b"\n\n")[0])
        else:
            reader.document(whole)
        assert isinstance(reader.material(b"key"), bytes | None)


@given(st.sampled_from(SHAPES), st.lists(json_values.map(orjson.dumps), max_size=4))
def test_arbitrary_events_never_raise(api: Api, events: list[bytes]) -> None:
    reader = reader_of(api)
    assert reader is not None
    reader.events(events)
    assert isinstance(reader.material(b"key"), bytes | None)


stream_parts = st.sampled_from([b"data:", b" ", b"\n", b"\r\n", b"x", b":", b"event: e", b"\n\n"])


@given(st.lists(texts | st.sampled_from(['"', "\\", '\\"', "\n"]), min_size=1, max_size=12), cuts, st.booleans())
def test_deltas_that_follow_one_another_say_the_same(pieces: list[str], places: list[int], spaced: bool) -> None:
    events: list[Body] = [{"choices": [{"index": 0, "delta": {"content": p}, "finish_reason": None}]} for p in pieces]
    data = stream([*events, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}])
    data = data.replace(b'"content":"', b'"content": "') if spaced else data
    reader = reader_of(Api.CHAT)
    assert reader is not None
    left = b""
    cut_at = sorted({at % (len(data) + 1) for at in places})
    for a, b in zip([0, *cut_at], [*cut_at, len(data)], strict=True):
        found, left = events_of(left + data[a:b])
        reader.events(found)
    said = "".join(pieces)
    assert reader.material(b"") == (turns_key([{"role": "assistant", "content": said}]) if said else None)


@given(st.lists(stream_parts).map(b"".join), cuts)
def test_a_stream_gives_the_same_events_however_it_is_cut(data: bytes, places: list[int]) -> None:
    at_once, rest = events_of(data)
    found, left = [], b""
    cut_at = sorted({at % (len(data) + 1) for at in places})
    for a, b in zip([0, *cut_at], [*cut_at, len(data)], strict=True):
        events, left = events_of(left + data[a:b])
        found += events
    assert found == at_once
    assert left == rest
