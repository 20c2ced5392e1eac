"""`read_prompt` on anything, and what holds for every conversation."""

import copy
import itertools
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from prefixroute.core import scan
from prefixroute.core.prompt import MAX_PARSED_BYTES, Api, NoKeyCause, Prompt, read_prompt

Body = dict[str, Any]

apis = st.sampled_from(Api)
texts = st.text(st.characters(codec="utf-8"), max_size=40)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
REAL_BODIES: list[Body] = [
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "u"}, IMAGE]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "42"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "max_tokens": 5,
    },
    {"model": "m", "prompt": [[1, 2], [3]], "suffix": "x", "prompt_embeds": None, "lora_request": {"name": "l"}},
    {
        "model": "m",
        "instructions": "s",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]},
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "42"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        ],
        "reasoning": {"effort": "low"},
        "previous_response_id": "resp",
    },
    {
        "model": "m",
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "iVBO"}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "4"}]}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {}, "cache_control": {}}],
    },
    {"inputs": "x", "parameters": {"max_new_tokens": 5, "adapter_id": "l"}},
    {"text": ["x"], "image_data": ["AAAA"], "lora_path": ["l"], "sampling_params": {"max_new_tokens": 5}},
]


@st.composite
def mutated_bodies(draw: st.DrawFn) -> bytes:
    """A real body with some of its values, wherever they are, replaced by arbitrary JSON."""
    body = copy.deepcopy(draw(st.sampled_from(REAL_BODIES)))
    for _ in range(draw(st.integers(0, 3))):
        at: Any = body
        while True:
            name = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            inner = at[name]
            if isinstance(inner, dict | list) and inner and draw(st.booleans()):
                at = inner
            else:
                at[name] = draw(json_values)
                break
    return orjson.dumps(body)


def check(prompt: Prompt) -> None:
    assert (prompt.no_key is None) is (prompt.key != b"")
    assert prompt.n_tokens * 4 >= len(prompt.key)
    assert prompt.max_tokens is None or prompt.max_tokens >= 0
    repr(prompt)
    for n in (-1, 0, 1, 7, 10_000):
        prefix = prompt.prefix_bytes(n)
        if prompt.messages is None:
            assert prefix == prompt.body[: max(n, 0)]
        else:
            assert len(prefix.decode(errors="replace")) <= max(n, 0)


@given(apis, st.binary(max_size=200), st.booleans())
def test_random_bytes_never_raise(api: Api, body: bytes, encoded: bool) -> None:
    check(read_prompt(api, body, encoded=encoded))


@given(apis, json_values)
def test_arbitrary_json_never_raises(api: Api, value: Any) -> None:
    check(read_prompt(api, orjson.dumps(value)))


@given(apis, mutated_bodies())
def test_bodies_with_odd_values_never_raise(api: Api, body: bytes) -> None:
    check(read_prompt(api, body))


@given(apis, mutated_bodies(), st.integers(0, 2000), st.binary(max_size=3))
def test_damaged_bodies_never_raise(api: Api, body: bytes, at: int, damage: bytes) -> None:
    check(read_prompt(api, body[:at] + damage + body[at + 1 :]))


@given(apis, mutated_bodies(), st.sampled_from([b" ", b"\xff", b'"', b"{", b"]", b"A", b'"model":"x",']))
def test_big_bodies_never_raise(api: Api, body: bytes, padding: bytes) -> None:
    padding *= MAX_PARSED_BYTES // len(padding) + 1
    for big in (body + padding, padding + body, body[:-1] + padding + body[-1:]):
        check(read_prompt(api, big))


@given(mutated_bodies(), st.booleans())
def test_a_field_that_is_found_in_a_big_body_is_the_one_that_is_there(body: bytes, in_front: bool) -> None:
    filler = {"messages": [{"role": "user", "content": "lorem ipsum " * 100_000}]}
    parsed = {name: value for name, value in orjson.loads(body).items() if name != "messages"}
    found = scan.edge_fields(orjson.dumps({**parsed, **filler} if in_front else {**filler, **parsed}))
    assert {name: parsed[name] for name in found} == found
    assert "model" not in parsed or "model" in found


parts = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    texts.map(lambda data: {"type": "image_url", "image_url": {"url": data}}),
)
calls = st.lists(
    st.builds(lambda name, text: {"function": {"name": name, "arguments": text}}, texts, texts), max_size=2
)
system_messages = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["system", "developer"]), texts
)
chat_turns = st.one_of(
    st.builds(lambda content: {"role": "user", "content": content}, texts | st.lists(parts, max_size=3)),
    st.builds(
        lambda content, thought, made: {
            "role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": made,
        },
        st.none() | texts, st.none() | texts, calls,
    ),
    st.builds(lambda name, text: {"role": "tool", "tool_call_id": name, "content": text}, texts, texts),
)  # fmt: skip
blocks = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}),
    texts.map(lambda text: {"type": "thinking", "thinking": text}),
    texts.map(lambda data: {"type": "image", "source": {"type": "base64", "data": data}}),
    st.builds(lambda name, value: {"type": "tool_use", "name": name, "input": value}, texts, json_values),
    texts.map(lambda text: {"type": "tool_result", "tool_use_id": "c", "content": text}),
)
claude_turns = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant"]),
    texts | st.lists(blocks, max_size=3),
)
items = st.one_of(
    chat_turns,
    st.builds(lambda name, text: {"type": "function_call", "name": name, "arguments": text}, texts, texts),
    st.builds(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, texts),
    st.builds(lambda text: {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}, texts),
)
no_tools: st.SearchStrategy[Body] = st.just({})
tools = no_tools | st.lists(json_values, max_size=2).map(lambda values: {"tools": values})


def assert_each_turn_begins_with_the_one_before(api: Api, field: str, turns: list[Body], rest: Body) -> None:
    """`turns[0]` is there from the start; system messages in front of it belong to `rest[field]`."""
    lead = rest.get(field, [])
    keys = [read_prompt(api, orjson.dumps({**rest, field: lead + turns[:n]})).key for n in range(1, len(turns) + 1)]
    for shorter, longer in itertools.pairwise(keys):
        assert shorter != b""
        assert longer.startswith(shorter)


@given(st.lists(system_messages, max_size=2), st.lists(chat_turns, min_size=1, max_size=6), tools)
def test_a_chat_grows_at_its_end(lead: list[Body], turns: list[Body], more: Body) -> None:
    assert_each_turn_begins_with_the_one_before(Api.CHAT, "messages", turns, {"messages": lead, **more})


@given(texts | st.lists(blocks, max_size=2), st.lists(claude_turns, min_size=1, max_size=6), tools)
def test_anthropic_messages_grow_at_their_end(system: Any, turns: list[Body], more: Body) -> None:
    assert_each_turn_begins_with_the_one_before(Api.MESSAGES, "messages", turns, {"system": system, **more})


@given(st.none() | texts, st.lists(items, min_size=1, max_size=6), tools)
def test_a_response_input_grows_at_its_end(instructions: Any, turns: list[Body], more: Body) -> None:
    rest = {"instructions": instructions, **more}
    assert_each_turn_begins_with_the_one_before(Api.RESPONSES, "input", turns, rest)


@given(texts, texts)
def test_a_completion_grows_at_its_end(prompt: str, more: str) -> None:
    shorter, longer = (
        read_prompt(Api.COMPLETIONS, orjson.dumps({"prompt": text})).key for text in (prompt, prompt + more)
    )
    assert longer.startswith(shorter)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_token_ids_are_four_bytes_each(ids: list[int]) -> None:
    prompt = read_prompt(Api.COMPLETIONS, orjson.dumps({"prompt": ids}))
    assert [int.from_bytes(prompt.key[i : i + 4], "little") for i in range(0, len(prompt.key), 4)] == ids
    assert prompt.n_tokens == len(ids)


@given(st.lists(chat_turns, max_size=5), st.integers(0, 200))
def test_prefix_bytes_is_the_beginning_of_all_the_text(turns: list[Body], n: int) -> None:
    prompt = read_prompt(Api.CHAT, orjson.dumps({"messages": turns}))
    whole = ""
    for turn in turns:
        content = turn["content"] or ""
        whole += content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    expected = whole[:n].encode() if whole else prompt.body[:n]
    assert prompt.prefix_bytes(n) == expected


@given(texts, texts, texts)
def test_names_never_run_together_in_a_scope(model: str, salt: str, other: str) -> None:
    def scope(**fields: str) -> bytes:
        return read_prompt(Api.CHAT, orjson.dumps(fields)).scope

    assert (scope(model=model, cache_salt=salt) == scope(model=other)) is (model == other and not salt)
    assert (scope(model=model) == scope(cache_salt=salt)) is (not model and not salt)


@given(st.binary(max_size=200))
def test_an_encoded_body_is_never_opened(body: bytes) -> None:
    assert read_prompt(Api.CHAT, body, encoded=True).no_key is NoKeyCause.ENCODED
