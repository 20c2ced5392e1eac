"""One prompt per body grammar, and which spellings mean the same prompt."""

import base64
import random
from array import array
from typing import Any

import orjson
import pytest

from prefixroute.core.content import MAX_MEDIA_KEY_BYTES
from prefixroute.core.prompt import MAX_PARSED_BYTES, Api, NoKeyCause, Prompt, read_prompt

Body = dict[str, Any]

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "What is a prefix?"}
ANSWER = {"role": "assistant", "content": "The beginning."}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
CLAUDE_TOOL = {"name": "look_up", "input_schema": {"type": "object"}}


def read(api: Api, body: Body, **more: Any) -> Prompt:
    return read_prompt(api, orjson.dumps(body), **more)


def key(api: Api, body: Body) -> bytes:
    prompt = read(api, body)
    assert prompt.no_key is None
    assert prompt.n_tokens == -(-len(prompt.key) // 4)
    return prompt.key


def chat(*messages: Body, **more: Any) -> bytes:
    return key(Api.CHAT, {"model": "m", "messages": list(messages), **more})


def user(*parts: Body) -> Body:
    return {"role": "user", "content": list(parts)}


def text(value: str) -> Body:
    return {"type": "text", "text": value}


def image(data: str) -> Body:
    return {"type": "image_url", "image_url": {"url": data}}


def data_url(n_bytes: int, seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(random.Random(seed).randbytes(n_bytes)).decode()


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, {"messages": [USER]}),
        (Api.CHAT, {"messages": [{"role": "developer", "content": [text("Be brief.")]}, USER], "tools": [TOOL]}),
        (Api.COMPLETIONS, {"prompt": "Once upon a time"}),
        (Api.RESPONSES, {"input": "Hello"}),
        (Api.RESPONSES, {"instructions": "Be brief.", "input": [{"type": "message", **USER}]}),
        (Api.MESSAGES, {"system": "Be brief.", "messages": [USER], "max_tokens": 5}),
        (Api.MESSAGES, {"system": [text("Be brief.")], "messages": [user(text("Hello"))], "tools": [CLAUDE_TOOL]}),
        (Api.INVOCATIONS, {"messages": [USER]}),
        (Api.INVOCATIONS, {"prompt": "Hello"}),
        (Api.INVOCATIONS, {"inputs": "Hello", "parameters": {"max_new_tokens": 5}}),
        (Api.GENERATE, {"prompt": "Hello"}),
        (Api.GENERATE, {"inputs": "Hello"}),
        (Api.GENERATE, {"text": "Hello"}),
        (Api.GENERATE, {"text": ["Hello"]}),
        (Api.GENERATE, {"input_ids": [1, 2, 3]}),
        (Api.GENERATE, {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5}}),
    ],
)  # fmt: skip
def test_every_body_shape_has_a_key_and_counts_four_bytes_of_it_as_a_token(api: Api, body: Body) -> None:
    assert key(api, body)
    assert read(api, {**body, "model": "org/base:tag"}).model == "org/base:tag"


class TestChat:
    def test_one_text_part_is_the_string(self) -> None:
        assert chat(user(text("Hello"))) == chat({"role": "user", "content": "Hello"})

    def test_developer_is_system(self) -> None:
        assert chat({**SYSTEM, "role": "developer"}, USER) == chat(SYSTEM, USER)

    def test_system_then_tools_then_turns(self) -> None:
        rendered = chat(SYSTEM, USER, tools=[TOOL], chat_template_kwargs={"enable_thinking": False})
        order = [b"You are terse.", b"look_up", b"enable_thinking", b"What is a prefix?"]
        assert sorted(order, key=rendered.index) == order
        assert rendered == chat(SYSTEM, USER, chat_template_kwargs={"enable_thinking": False}, tools=[TOOL])

    def test_a_system_message_among_the_turns_stays_there(self) -> None:
        rendered = chat(USER, SYSTEM)
        assert rendered.index(b"What is a prefix?") < rendered.index(b"You are terse.")

    @pytest.mark.parametrize(
        "more",
        [
            {"tools": [TOOL]},
            {"functions": [{"name": "look_up"}]},
            {"documents": [{"title": "t", "text": "d"}]},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low"},
        ],
    )
    def test_what_templates_render_is_in_the_key(self, more: Body) -> None:
        assert chat(USER, **more) != chat(USER)

    @pytest.mark.parametrize(
        "more",
        [
            {"temperature": 0.5, "n": 2, "stop": ["x"], "user": "u", "logprobs": True, "unknown": [{}]},
            {"response_format": {"type": "json_object"}, "tool_choice": "none"},
            {"tools": []},
        ],
    )
    def test_what_templates_do_not_render_is_not(self, more: Body) -> None:
        assert chat(USER, **more) == chat(USER)

    def test_different_conversations_have_different_keys(self) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        result = {"role": "tool", "tool_call_id": "1", "content": "42"}
        conversations: list[list[Body]] = [
            [USER],
            [{**USER, "role": "assistant"}],
            [{**USER, "name": "ann"}],
            [SYSTEM, USER],
            [USER, ANSWER],
            [{**USER, "content": "What is a prefix?The beginning."}],
            [user(text("What is a "), text("prefix?"))],
            [USER, {**ANSWER, "reasoning_content": "hm"}],
            [USER, {**ANSWER, "refusal": None, "content": [{"type": "refusal", "refusal": "No."}]}],
            [USER, {"role": "assistant", "content": None, "tool_calls": [call]}],
            [USER, {"role": "assistant", "content": None, "tool_calls": [call, call]}],
            [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result],
            [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
            [USER, {"role": "observer", "content": "x"}],
        ]
        assert len({chat(*conversation) for conversation in conversations}) == len(conversations)

    def test_ids_of_calls_and_spellings_of_reasoning_leave_no_trace(self) -> None:
        function = {"name": "f", "arguments": "{}"}
        one, two = (
            chat(USER, {"role": "assistant", "tool_calls": [{"id": i, "function": function}], "content": None})
            for i in ("call_1", "call_2")
        )
        assert one == two
        assert chat({**ANSWER, "reasoning": "hm"}) == chat({**ANSWER, "reasoning_content": "hm"})

    def test_arguments_may_be_an_object(self) -> None:
        call = {"function": {"name": "f", "arguments": {"a": 1}}}
        assert b'{"a":1}' in chat({"role": "assistant", "tool_calls": [call, "odd"]})

    def test_odd_messages_are_looked_over(self) -> None:
        prompt = read(Api.CHAT, {"messages": [1, None, [], {"role": 5}, {"content": 7, "role": []}, {"role": "user"}]})
        assert prompt.key
        assert read(Api.CHAT, {"messages": [USER, {"role": "user", "content": 7}]}).key.startswith(chat(USER))

    def test_a_tool_without_parameters_is_no_error(self) -> None:
        assert chat(USER, tools=[{"type": "function", "function": {"name": "f"}}, "odd"])


class TestMedia:
    def test_different_images_before_the_same_text_part_the_keys_there(self) -> None:
        one = chat(SYSTEM, user(image(data_url(9000, 1)), text("Describe.")))
        two = chat(SYSTEM, user(image(data_url(9000, 2)), text("Describe.")))
        assert one != two
        assert one.startswith(chat(SYSTEM))
        assert two.startswith(chat(SYSTEM))

    @pytest.mark.parametrize(
        ("n_chars", "n_key_bytes"), [(1, 16), (100, 100), (4096, 4096), (900_000, MAX_MEDIA_KEY_BYTES)]
    )
    def test_a_medium_takes_its_own_size_up_to_a_bound(self, n_chars: int, n_key_bytes: int) -> None:
        separators = 1
        grown = len(chat(user(image("x" * n_chars)))) - len(chat(user()))
        assert grown == n_key_bytes + separators

    def test_an_address_alone_is_the_object_with_it(self) -> None:
        assert chat(user({"type": "image_url", "image_url": "http://a/b.png", "detail": "low"})) == chat(
            user(image("http://a/b.png"))
        )

    def test_an_item_known_by_uuid_may_come_without_its_bytes(self) -> None:
        named = {**image(data_url(9000, 1)), "uuid": "photo-1"}
        assert chat(user(named)) == chat(user({"type": "image_url", "image_url": None, "uuid": "photo-1"}))
        assert chat(user(named)) != chat(user({**named, "uuid": "photo-2"}))

    def test_every_kind_takes_part(self) -> None:
        parts: list[Body] = [
            {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
            {"type": "video_url", "video_url": {"url": "http://a/v.mp4"}},
            {"type": "file", "file": {"file_id": "file-1"}},
            {"type": "file", "file": {"file_data": "JVBE", "filename": "a.pdf"}},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}},
            {"type": "image", "source": {"type": "url", "url": "http://a/i.png"}},
            {"type": "document", "source": {"type": "text", "data": "A document."}},
            {"type": "input_image", "image_url": "http://a/input.png"},
            {"type": "image_embeds", "image_embeds": ["a", "b"]},
            {"type": "unheard_of", "value": {"deep": [1]}},
            {"type": ["odd"]},
            {},
        ]
        assert len({chat(user(part)) for part in parts}) == len(parts)


class TestMessages:
    def test_a_system_string_is_one_text_block(self) -> None:
        string: Body = {"system": "Be brief.", "messages": [USER]}
        assert key(Api.MESSAGES, string) == key(Api.MESSAGES, {**string, "system": [text("Be brief.")]})

    def test_cache_control_leaves_no_trace(self) -> None:
        def body(**mark: Any) -> Body:
            source = {"type": "base64", "media_type": "image/png", "data": "iVBO"}
            use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}, **mark}
            result = {"type": "tool_result", "tool_use_id": "1", "content": [{**text("42"), **mark}], **mark}
            return {
                "system": [{**text("Be brief."), **mark}],
                "tools": [{**CLAUDE_TOOL, **mark}, CLAUDE_TOOL],
                "messages": [
                    user({**text("Hello"), **mark}, {"type": "image", "source": source, **mark}),
                    {"role": "assistant", "content": [use]},
                    user(result, {"type": "unheard_of", "x": 1, **mark}),
                ],
            }

        assert key(Api.MESSAGES, body(cache_control={"type": "ephemeral"})) == key(Api.MESSAGES, body())

    def test_a_tool_result_string_is_one_text_block(self) -> None:
        def body(content: Any) -> Body:
            return {"messages": [user({"type": "tool_result", "tool_use_id": "1", "content": content})]}

        assert key(Api.MESSAGES, body("42")) == key(Api.MESSAGES, body([text("42")]))
        assert key(Api.MESSAGES, body("42")) != key(Api.MESSAGES, body("43"))

    def test_the_block_that_changes_with_every_request_of_claude_code_is_left_out(self) -> None:
        def body(call: int) -> Body:
            billing = text(f"x-anthropic-billing-header: cc_version=2.1; cch={call};")
            return {"system": [billing, text("You are an agent.")], "messages": [USER]}

        assert key(Api.MESSAGES, body(1)) == key(Api.MESSAGES, body(2))
        assert b"You are an agent." in key(Api.MESSAGES, body(1))

    def test_odd_system_blocks_are_no_error(self) -> None:
        assert key(Api.MESSAGES, {"system": ["Be brief.", 5, {}, {"text": 5}], "messages": [USER]})

    def test_thinking_takes_part(self) -> None:
        def body(thought: str) -> Body:
            block = {"type": "thinking", "thinking": thought, "signature": "s"}
            return {"messages": [USER, {"role": "assistant", "content": [block, text("Yes.")]}]}

        assert key(Api.MESSAGES, body("a")) != key(Api.MESSAGES, body("b"))

    @pytest.mark.parametrize(
        "content",
        [
            b"[" * 900 + b"]" * 900,
            b'[{"type":"tool_result","content":' * 100 + b"[]" + b"}]" * 100,
            b'[{"type":"tool_result","content":' * 400 + b"[]" + b"}]" * 400,
        ],
    )
    def test_deep_nesting_is_no_error(self, content: bytes) -> None:
        assert read_prompt(Api.MESSAGES, b'{"messages":[{"role":"user","content":' + content + b"}]}").key


class TestResponses:
    def test_input_string_message_and_part_are_one_prompt(self) -> None:
        inputs: list[Any] = [
            "Hello",
            [{"role": "user", "content": "Hello"}],
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        ]
        assert len({key(Api.RESPONSES, {"input": given}) for given in inputs}) == 1

    def test_every_item_takes_part(self) -> None:
        items: list[Body] = [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "42"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "43"}]},
            {"type": "custom_tool_call", "call_id": "1", "name": "g", "input": "x"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "ah"}], "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]},
            {"type": "web_search_call", "id": "ws", "action": {"query": "q"}},
            {"type": "item_reference", "id": "msg_1"},
        ]
        assert len({key(Api.RESPONSES, {"input": [item]}) for item in items}) == len(items)

    def test_a_stored_response_stands_between_instructions_and_input(self) -> None:
        body: Body = {"instructions": "Be brief.", "input": "And then?"}
        follow_up = read(Api.RESPONSES, {**body, "previous_response_id": "resp_1"})
        assert follow_up.previous_response_id == "resp_1"
        assert follow_up.key != key(Api.RESPONSES, body)
        assert read(Api.RESPONSES, {**body, "previous_response_id": 5}).previous_response_id is None

    def test_reasoning_effort_takes_part(self) -> None:
        one, two = (key(Api.RESPONSES, {"input": "x", "reasoning": {"effort": e}}) for e in ("low", "high"))
        assert one != two


def test_the_same_prompt_has_one_key_in_chat_responses_and_messages() -> None:
    as_chat = chat(SYSTEM, USER, ANSWER)
    system = SYSTEM["content"]
    assert key(Api.RESPONSES, {"instructions": system, "input": [USER, ANSWER]}) == as_chat
    assert key(Api.MESSAGES, {"system": system, "messages": [USER, ANSWER]}) == as_chat


class TestCompletions:
    def test_a_batch_is_known_by_its_first_and_counted_whole(self) -> None:
        prompt = read(Api.COMPLETIONS, {"prompt": ["a" * 40, "b" * 41]})
        assert (prompt.key, prompt.n_tokens) == (b"a" * 40, 10 + 11)

    def test_token_ids_are_packed_in_four_bytes_each(self) -> None:
        prompt = read(Api.COMPLETIONS, {"prompt": [1, 2, 2**32 - 1]})
        assert prompt.key == bytes.fromhex("0100000002000000ffffffff")
        assert prompt.n_tokens == 3

    def test_a_batch_of_token_ids(self) -> None:
        prompt = read(Api.COMPLETIONS, {"prompt": [[7, 8], [9], "abcd", None]})
        assert (prompt.key, prompt.n_tokens) == (array("I", [7, 8]).tobytes(), 2 + 1 + 1 + 1)

    @pytest.mark.parametrize("ids", [[-1, 2], [1, 2**32], [1, True], [1, 2.5], [1, "a"], [None, {}]])
    def test_odd_token_ids_are_counted_but_not_keyed(self, ids: list[Any]) -> None:
        prompt = read(Api.COMPLETIONS, {"prompt": ids})
        assert (prompt.key, prompt.n_tokens, prompt.no_key) == (b"", 2, NoKeyCause.NO_PROMPT)

    def test_embeddings_have_no_key(self) -> None:
        prompt = read(Api.COMPLETIONS, {"prompt": "Hello", "prompt_embeds": ["A" * 100_000]})
        assert (prompt.key, prompt.no_key) == (b"", NoKeyCause.NO_PROMPT)
        assert 0 < prompt.n_tokens < 100

    def test_the_suffix_leaves_no_trace(self) -> None:
        assert key(Api.COMPLETIONS, {"prompt": "a", "suffix": "b"}) == key(Api.COMPLETIONS, {"prompt": "a"})


class TestGenerate:
    def test_images_of_sglang_take_part(self) -> None:
        plain, one, two, list_of_one = (
            key(Api.GENERATE, {"text": "<image> What?", **more})
            for more in ({}, {"image_data": "AAAA"}, {"image_data": "BBBB"}, {"image_data": ["AAAA"]})
        )
        assert len({plain, one, two}) == 3
        assert one == list_of_one


class TestInvocations:
    def test_dispatches_by_shape(self) -> None:
        assert key(Api.INVOCATIONS, {"messages": [USER], "system": "x", "prompt": "y"}) == chat(USER)
        assert key(Api.INVOCATIONS, {"messages": None, "prompt": "y", "input": "z"}) == b"y"

    @pytest.mark.parametrize("body", [{"input": "embed me"}, {"query": "q", "documents": ["d"]}])
    def test_pooling_goes_by_load(self, body: Body) -> None:
        prompt = read(Api.INVOCATIONS, body)
        assert (prompt.key, prompt.no_key) == (b"", NoKeyCause.NOT_ROUTED)

    def test_other_shapes_have_no_prompt(self) -> None:
        assert read(Api.INVOCATIONS, {"instances": [1]}).no_key is NoKeyCause.NO_PROMPT


class TestNoKey:
    @pytest.mark.parametrize("api", [Api.POOLING, Api.TOKENIZE, Api.OTHER])
    def test_routes_that_go_by_load_still_say_their_model(self, api: Api) -> None:
        prompt = read(api, {"model": "m", "input": "Hello", "prompt": "Hello"})
        assert (prompt.model, prompt.key, prompt.no_key) == ("m", b"", NoKeyCause.NOT_ROUTED)
        assert (prompt.n_tokens > 0) is (api is Api.POOLING)

    @pytest.mark.parametrize(
        ("body", "cause"),
        [
            (b"", NoKeyCause.NOT_JSON),
            (b"{", NoKeyCause.NOT_JSON),
            (b"\xff\xfe", NoKeyCause.NOT_JSON),
            (b'{"messages":[{"role":"user","content":"\xff"}]}', NoKeyCause.NOT_JSON),
            (b'{"messages":[{"role":"user","content":"\\ud800"}]}', NoKeyCause.NOT_JSON),
            (b'{"a":NaN}', NoKeyCause.NOT_JSON),
            (b'{"a":1e999}', NoKeyCause.NOT_JSON),
            (b"[" * 50_000, NoKeyCause.NOT_JSON),
            (b"[]", NoKeyCause.NOT_AN_OBJECT),
            (b'"x"', NoKeyCause.NOT_AN_OBJECT),
            (b"{}", NoKeyCause.NO_PROMPT),
            (b'{"messages":[]}', NoKeyCause.NO_PROMPT),
            (b'{"messages":"hello"}', NoKeyCause.NO_PROMPT),
            (b'{"messages":[1,2]}', NoKeyCause.NO_PROMPT),
        ],
    )
    def test_says_why(self, body: bytes, cause: NoKeyCause) -> None:
        prompt = read_prompt(Api.CHAT, body)
        assert (prompt.key, prompt.no_key) == (b"", cause)

    @pytest.mark.parametrize(
        ("api", "body"),
        [
            (Api.COMPLETIONS, {}),
            (Api.COMPLETIONS, {"prompt": ""}),
            (Api.COMPLETIONS, {"prompt": []}),
            (Api.COMPLETIONS, {"prompt": {"text": "x"}}),
            (Api.RESPONSES, {"instructions": "Be brief."}),
            (Api.RESPONSES, {"input": ""}),
            (Api.RESPONSES, {"input": {"a": 1}}),
            (Api.MESSAGES, {"system": "Be brief."}),
            (Api.GENERATE, {"image_data": "AAAA"}),
            (Api.GENERATE, {"inputs": {"text": "x"}, "image_data": "AAAA"}),
        ],
    )
    def test_a_missing_or_odd_prompt(self, api: Api, body: Body) -> None:
        assert read(api, body).no_key is NoKeyCause.NO_PROMPT

    def test_a_body_with_a_content_encoding_is_not_opened(self) -> None:
        prompt = read(Api.CHAT, {"model": "m", "messages": [USER]}, encoded=True)
        assert (prompt.model, prompt.key, prompt.no_key) == (None, b"", NoKeyCause.ENCODED)
        assert prompt.n_tokens > 0


class TestFields:
    def test_scope_tells_models_adapters_and_salts_apart(self) -> None:
        bodies: list[Body] = [
            {},
            {"model": "m"},
            {"model": "m2"},
            {"cache_salt": "m"},
            {"lora_path": "m"},
            {"extra_key": "m"},
            {"model": "m", "lora_name": "l"},
            {"model": "m", "lora_request": {"lora_name": "l2", "lora_int_id": 1}},
            {"model": "m", "parameters": {"adapter_id": "l3"}},
            {"model": "m", "cache_salt": "l"},
            {"model": 'm","l', "cache_salt": None},
        ]
        scopes = {read(Api.COMPLETIONS, {"prompt": "x", **body}).scope for body in bodies}
        assert len(scopes) == len(bodies)

    def test_scope_tells_tenants_apart(self) -> None:
        body: Body = {"prompt": "x", "model": "m"}
        prompts = [read(Api.COMPLETIONS, body, tenant=tenant) for tenant in (b"", b"a" * 32, b"b" * 32)]
        assert len({prompt.scope for prompt in prompts}) == 3
        assert len({prompt.key for prompt in prompts}) == 1
        assert "aaaa" not in repr(prompts[1])

    def test_scope_is_blind_to_how_an_adapter_is_given(self) -> None:
        one, two, three = (
            read(Api.GENERATE, {"text": "x", **more}).scope
            for more in ({"lora_path": "l"}, {"lora_path": ["l", "l2"]}, {"lora_request": {"name": "l"}})
        )
        assert one == two == three

    @pytest.mark.parametrize("model", [None, 5, ["m"], {"m": 1}, "", True])
    def test_a_model_that_is_no_name_is_none(self, model: Any) -> None:
        assert read(Api.CHAT, {"model": model, "messages": [USER]}).model is None

    def test_of_duplicate_keys_the_last_wins_escaped_or_not(self) -> None:
        assert read_prompt(Api.CHAT, b'{"model":"allowed","mod\\u0065l":"blocked"}').model == "blocked"

    @pytest.mark.parametrize(("value", "stream"), [(True, True), (False, False), (1, False), ("true", False)])
    def test_stream(self, value: Any, stream: bool) -> None:
        assert read(Api.CHAT, {"stream": value}).stream is stream

    @pytest.mark.parametrize(
        ("body", "max_tokens"),
        [
            ({}, None),
            ({"max_tokens": 5}, 5),
            ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
            ({"max_output_tokens": 7}, 7),
            ({"max_new_tokens": 8}, 8),
            ({"parameters": {"max_new_tokens": 9}}, 9),
            ({"sampling_params": {"max_new_tokens": 10}}, 10),
            ({"max_tokens": True}, None),
            ({"max_tokens": -1}, None),
            ({"max_tokens": 5.0}, None),
            ({"max_tokens": 2**63}, None),
            ({"parameters": 5}, None),
        ],
    )
    def test_max_tokens(self, body: Body, max_tokens: int | None) -> None:
        assert read(Api.GENERATE, body).max_tokens == max_tokens

    def test_ids_are_handed_through(self) -> None:
        prompt = read(Api.CHAT, {}, session_id="s", prefix_aware_id="p")
        assert (prompt.session_id, prompt.prefix_aware_id) == ("s", "p")

    def test_repr_tells_no_secrets(self) -> None:
        assert "prefix?" not in repr(read(Api.CHAT, {"messages": [USER], "cache_salt": "prefix?"}))


class TestPrefixBytes:
    def test_chat_is_the_text_of_the_messages(self) -> None:
        messages = [
            {"role": "system", "content": "héllo "},
            user(image("http://a"), text("wörld"), text("!")),
            {"role": "assistant", "content": None, "tool_calls": []},
            5,
        ]
        prompt = read(Api.CHAT, {"messages": messages, "tools": [TOOL]})
        assert prompt.prefix_bytes(8) == "héllo wö".encode()
        assert prompt.prefix_bytes(100) == "héllo wörld!".encode()

    @pytest.mark.parametrize("api", [Api.INVOCATIONS, Api.COMPLETIONS, Api.MESSAGES, Api.OTHER])
    def test_anything_else_is_the_body(self, api: Api) -> None:
        body = orjson.dumps({"messages": [USER]})
        assert read_prompt(api, body).prefix_bytes(10) == body[:10]
        assert read_prompt(api, body).prefix_bytes(10_000) == body

    @pytest.mark.parametrize("body", [b"not json at all", orjson.dumps({"messages": [user(image("http://a/b.png"))]})])
    def test_chat_without_text_is_the_body(self, body: bytes) -> None:
        assert read_prompt(Api.CHAT, body).prefix_bytes(10) == body[:10]

    def test_nothing_asked_for_is_nothing(self) -> None:
        prompt = read(Api.CHAT, {"messages": [USER]})
        assert prompt.prefix_bytes(0) == prompt.prefix_bytes(-1) == b""


class TestBigBodies:
    LONG = "It was a dark and stormy night. " * 40_000

    def test_text_is_its_own_key_up_to_the_bound(self) -> None:
        body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": self.LONG}]})
        prompt = read_prompt(Api.CHAT, body)
        assert prompt.key == body[:MAX_PARSED_BYTES]
        assert prompt.n_tokens == -(-len(body) // 4)
        assert prompt.no_key is None
        assert prompt.prefix_bytes(20) == body[:20]

    @pytest.mark.parametrize("front", [True, False])
    def test_fields_are_found_in_front_of_the_prompt_and_behind_it(self, front: bool) -> None:
        small: Body = {"model": 'org/"m"', "stream": True, "max_tokens": 5, "cache_salt": "s", "tools": [TOOL]}
        large: Body = {"messages": [{"role": "user", "content": self.LONG}]}
        prompt = read(Api.CHAT, {**small, **large} if front else {**large, **small})
        assert (prompt.model, prompt.stream, prompt.max_tokens) == ('org/"m"', True, 5)
        assert prompt.scope == read(Api.CHAT, small).scope

    def test_the_last_of_two_models_wins(self) -> None:
        body = orjson.dumps({"model": "first", "prompt": self.LONG})
        assert read_prompt(Api.COMPLETIONS, body[:-1] + b',"model": "last"}\n').model == "last"

    @pytest.mark.parametrize(
        "body",
        [
            {"messages": [{"model": "inner", "content": LONG}]},
            {"messages": [{"role": "user", "content": LONG}], "metadata": {"model": "inner"}},
            {"metadata": {"model": "inner"}, "prompt": LONG},
            {"prompt": LONG + '", "model": "inner"'},
            {"prompt": '", "model": "inner", "messages": [' + LONG},
            {"messages": [LONG, {"model": "inner"}]},
        ],
    )
    def test_a_model_inside_of_something_is_not_the_model(self, body: Body) -> None:
        assert read(Api.CHAT, body).model is None

    @pytest.mark.parametrize("api", [Api.CHAT, Api.POOLING])
    def test_an_image_counts_as_an_image(self, api: Api) -> None:
        message = user(image(data_url(4_000_000, 1)), text("Describe."))
        prompt = read(api, {"model": "m", "messages": [message]})
        assert prompt.model == "m"
        assert 1024 <= prompt.n_tokens < 5000
        assert len(prompt.key) < 3 * MAX_MEDIA_KEY_BYTES

    def test_different_images_have_different_keys_and_share_what_is_before_them(self) -> None:
        one, two = (
            read(Api.CHAT, {"messages": [SYSTEM, user(image(data_url(900_000, seed)), text("Describe."))]}).key
            for seed in (1, 2)
        )
        assert one != two
        before = one[: one.index(b'"url":"') + 7]
        assert two.startswith(before)

    def test_the_next_turn_shares_what_came_before(self) -> None:
        def turn(*messages: Body) -> Prompt:
            first = user(image(data_url(500_000, 1)), text(self.LONG[:500_000]))
            return read(Api.CHAT, {"messages": [first, *messages], "model": "m"})

        one, two = turn(USER), turn(USER, ANSWER, user(image(data_url(500_000, 2))))
        assert two.key.startswith(one.key[: one.key.index(b'],"model"')])

    def test_small_images_and_one_that_is_cut_off_fold_too(self) -> None:
        photos = [image(data_url(50_000, seed)) for seed in range(20)]
        body = orjson.dumps({"messages": [user(*photos, image(data_url(50_000, 20)))]})
        prompt = read_prompt(Api.CHAT, body[:-1000])
        assert 21 * 1024 <= prompt.n_tokens < 22 * 1024
        assert read(Api.CHAT, {"messages": [user(*photos[1:], *photos)]}).key[:2000] != prompt.key[:2000]

    def test_long_strings_that_are_no_base64_stay(self) -> None:
        body = orjson.dumps({"prompt": "a" * 2_000_000})
        assert read_prompt(Api.COMPLETIONS, body).key == body[:MAX_PARSED_BYTES]

    @pytest.mark.parametrize("junk", [b"[", b'"', b"\xff", b" ", b"{" * 3, b'{"model":', b'{"messages":['])
    def test_junk_is_no_error(self, junk: bytes) -> None:
        prompt = read_prompt(Api.CHAT, junk * (MAX_PARSED_BYTES // len(junk) + 2))
        assert prompt.model is None
        assert (prompt.no_key is NoKeyCause.NOT_AN_OBJECT) is not junk.startswith(b"{")


@pytest.mark.parametrize(
    ("api", "start", "item", "end"),
    [
        (Api.CHAT, b'{"model":"m","messages":[', b"{},", b"{}]}"),
        (Api.CHAT, b'{"model":"m","messages":[{"content":[', b'{"type":"x"},', b"1]}]}"),
        (Api.CHAT, b'{"model":"m","messages":[{"content":[', b"[" * 500 + b"]" * 500 + b",", b"1]}]}"),
        (Api.COMPLETIONS, b'{"model":"m","prompt":[', b"[1],", b"[1]]}"),
    ],
)
def test_a_body_of_very_many_items_is_not_parsed(api: Api, start: bytes, item: bytes, end: bytes) -> None:
    """Rendering all of them would hold up every other stream for most of a second."""
    body = start + item * (900_000 // len(item)) + end
    prompt = read_prompt(api, body)
    assert prompt.model == "m"
    assert prompt.key == body[: len(prompt.key)]
    assert len(prompt.key) > 500_000
    assert prompt.messages is None


@pytest.mark.parametrize(
    ("body", "are_ids"),
    [
        ({"token_ids": [1, 2, 3]}, True),
        ({"token_ids": [1, 2, 3], "prompt": "not looked at"}, True),
        ({"token_ids": [1, 2, 3], "features": {"mm_hashes": {}}}, False),
        ({"token_ids": [1, 2, 3], "image_data": ["aa"]}, False),
        ({"token_ids": [], "prompt": "x"}, False),
        ({"token_ids": [[1], [2]]}, False),
        ({"token_ids": "123"}, False),
        ({"prompt": "x"}, False),
        ({"input_ids": [1, 2, 3]}, False),
    ],
)
def test_ids_of_a_generate_body_are_the_engines_own(body: dict[str, Any], are_ids: bool) -> None:
    assert read_prompt(Api.GENERATE, orjson.dumps(body)).is_token_ids is are_ids


def test_a_long_list_of_token_ids_is_parsed() -> None:
    ids = list(range(131_072))
    prompt = read_prompt(Api.COMPLETIONS, orjson.dumps({"model": "m", "prompt": ids}))
    assert prompt.n_tokens == len(ids)


def test_of_very_many_images_only_the_first_make_the_key() -> None:
    def key(n: int) -> bytes:
        return read(Api.GENERATE, {"text": "a", "image_data": [f"image {i}" for i in range(n)]}).key

    assert key(10) != key(20)
    assert key(1024) == key(5000)
