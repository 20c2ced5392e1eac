"""Templates of known families, rendered with tools and calls, and what a template can do wrong.

What is rendered here was compared with a vLLM 0.32 server that was sent the same templates: the token ids it told, of
100 conversations a family.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from prefixroute.core.prompt import Api
from prefixroute.exact_tokens.exact import ExactTokenizer, NotExactError, Options, template_fault
from prefixroute.exact_tokens.probes import CONVERSATIONS

ModelDir = Callable[..., Path]
DATA = Path(__file__).parents[2] / "data" / "templates"
FAMILIES = ("deepseek", "gemma", "llama3", "mistral", "qwen25", "qwen3")

HI = {"messages": [{"role": "user", "content": "hi"}]}


def tokenizer(directory: Path, **options: Any) -> ExactTokenizer:
    # The proof of the fast library takes longer than all else here.
    return ExactTokenizer(Options(str(directory), library="tokenizers", **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_with_tools_and_calls_reads_as_transformers_renders_it(model_dir: ModelDir, family: str) -> None:
    text = tokenizer(model_dir(family)).render(CONVERSATIONS["calls"])
    assert text == (DATA / f"{family}.calls.txt").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_probe_has_tokens_in_every_family(model_dir: ModelDir, family: str) -> None:
    exact = tokenizer(model_dir(family))
    assert all(exact.encode(Api.CHAT, orjson.dumps(body)) for body in CONVERSATIONS.values())


def test_the_generation_prompt_is_there_unless_it_is_declined(model_dir: ModelDir) -> None:
    exact = tokenizer(model_dir())
    assert exact.render(HI).endswith("<|im_start|>assistant\n")
    assert exact.render({**HI, "add_generation_prompt": False}).endswith("hi<|im_end|>\n")


def test_a_final_message_to_be_continued_is_left_open(model_dir: ModelDir) -> None:
    open_end = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [*HI["messages"], {"role": "assistant", "content": "Well, "}]
    assert tokenizer(model_dir()).render({"messages": messages, **open_end}).endswith("assistant\nWell, ")
    # This family's template strips what it renders.
    assert tokenizer(model_dir("gemma")).render({"messages": messages, **open_end}).endswith("model\nWell,")


def test_a_final_message_cannot_be_continued_and_answered(model_dir: ModelDir) -> None:
    with pytest.raises(NotExactError):
        tokenizer(model_dir()).render({**HI, "continue_final_message": True})


def test_json_is_not_escaped_for_html_and_generation_marks_count_as_their_body(model_dir: ModelDir) -> None:
    source = (
        "{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}{% for x in [1] %}{% break %}{% endfor %}"
    )
    body = {"messages": [{"role": "user", "content": "<é&'>"}]}
    assert tokenizer(model_dir(template=source)).render(body) == '"<é&\'>"'


def test_a_template_for_tools_is_taken_when_there_are_tools(model_dir: ModelDir) -> None:
    directory = model_dir()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    exact = tokenizer(directory)
    assert exact.render(HI) == "plain"
    assert exact.render({**HI, "tools": CONVERSATIONS["tools"]["tools"]}) == "1 tools"


def test_operators_variables_reach_the_template(model_dir: ModelDir) -> None:
    exact = tokenizer(model_dir("qwen3"), chat_template_kwargs={"enable_thinking": False})
    assert exact.render(HI).endswith("<think>\n\n</think>\n\n")
    assert exact.render({**HI, "chat_template_kwargs": {"enable_thinking": True}}).endswith("assistant\n")


def test_what_a_template_raises_is_named_by_kind_and_line_without_the_prompt(model_dir: ModelDir) -> None:
    exact = tokenizer(model_dir(template="\n{{ raise_exception('no ' + messages[0].content) }}"))
    with pytest.raises(Exception, match="no hi") as caught:
        exact.encode(Api.CHAT, orjson.dumps(HI))
    assert template_fault(caught.value) == "TemplateError in line 2"


def test_without_a_template_completions_are_exact_all_the_same(model_dir: ModelDir) -> None:
    directory = model_dir()
    (directory / "tokenizer_config.json").write_text("{}")
    exact = tokenizer(directory)
    assert exact.encode(Api.COMPLETIONS, b'{"prompt":"hi"}')
    with pytest.raises(NotExactError):
        exact.encode(Api.CHAT, orjson.dumps(HI))


def test_completions_begin_with_the_special_token_unless_told_not_to(model_dir: ModelDir) -> None:
    exact = tokenizer(model_dir("llama3"))
    bare = exact.encode(Api.COMPLETIONS, b'{"prompt":"hi","add_special_tokens":false}')
    assert exact.encode(Api.COMPLETIONS, b'{"prompt":["hi","there"]}') == (8192).to_bytes(4, "little") + bare


def test_token_ids_are_exact_as_they_are(model_dir: ModelDir) -> None:
    exact = tokenizer(model_dir())
    assert exact.encode(Api.INVOCATIONS, b'{"prompt":[1,256]}') == bytes((1, 0, 0, 0, 0, 1, 0, 0))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{", b"{}", b'{"prompt":1}', b'{"prompt":[true]}', b'{"prompt":[-1]}', b'{"prompt":[]}',
        b'{"prompt":"x","truncate_prompt_tokens":3}', b'{"prompt":"x","prompt_embeds":"x"}',
    ],
)  # fmt: skip
def test_odd_completions_are_left_to_bytes(model_dir: ModelDir, body: bytes) -> None:
    with pytest.raises(NotExactError):
        tokenizer(model_dir()).encode(Api.COMPLETIONS, body)


def test_half_a_surrogate_pair_in_a_calls_arguments_is_left_to_bytes(model_dir: ModelDir) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}]
    body = {"messages": [*HI["messages"], {"role": "assistant", "content": "", "tool_calls": calls}]}
    with pytest.raises(NotExactError):
        tokenizer(model_dir("qwen25")).encode(Api.CHAT, orjson.dumps(body))
