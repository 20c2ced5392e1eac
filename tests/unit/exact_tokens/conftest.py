"""Model directories: the small tokenizer, with the special tokens and the chat template of a known family."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "data"

ModelDir = Callable[..., Path]

_DEEPSEEK_TOOLS = (
    *("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"),
    *("outputs▁begin", "output▁begin", "output▁end", "outputs▁end"),
)
# Added tokens of each family; the first begins a prompt, if it is one that does.
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "qwen25": ("<tool_call>", "</tool_call>"),
    "qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    "mistral": (
        *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "deepseek": (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),  # noqa: RUF001
        *(f"<｜tool▁{name}｜>" for name in _DEEPSEEK_TOOLS),  # noqa: RUF001
    ),
}
_BOS = {"llama3": "<|begin_of_text|>", "mistral": "<s>", "gemma": "<bos>", "deepseek": "<｜begin▁of▁sentence｜>"}  # noqa: RUF001
_EOS = {"llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<eos>", "deepseek": "<｜end▁of▁sentence｜>"}  # noqa: RUF001


@pytest.fixture
def table() -> dict[str, Any]:
    """The small tokenizer.json, parsed."""
    return _table()


@pytest.fixture
def add_token() -> Callable[..., None]:
    """`add_token(table, content, number, …)`: puts in an added token, special unless said otherwise."""

    def add(table: dict[str, Any], content: str, number: int, **flags: bool) -> None:
        table["added_tokens"].append(_added_token(content, number, **flags))

    return add


def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(gzip.decompress((DATA / "tiny_llama" / "tokenizer.json.gz").read_bytes()))
    return table


def _added_token(content: str, number: int, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **off, "special": True, **flags}


@pytest.fixture
def model_dir(tmp_path: Path) -> ModelDir:
    """`model_dir(family=None, template=None)`: a directory as a model has it; the small model's own without a family.

    `template` replaces the chat template.
    """

    def make(family: str | None = None, template: str | None = None) -> Path:
        to = tmp_path / (family or "tiny")
        to.mkdir()
        table = _table()
        config: dict[str, Any] = json.loads((DATA / "tiny_llama" / "tokenizer_config.json").read_text())
        if family is not None:
            first = 8192
            contents = FAMILIES[family]
            for i, content in enumerate(contents):
                is_control = not content.strip("</>").startswith(("tool_", "think"))
                table["added_tokens"].append(_added_token(content, first + i, special=is_control))
            config["bos_token"], config["eos_token"] = _BOS.get(family), _EOS.get(family, "<|im_end|>")
            if family in _BOS:
                table["post_processor"] = _begins_with(_BOS[family], first + contents.index(_BOS[family]))
            del config["chat_template"]
            (to / "chat_template.jinja").write_text((DATA / "templates" / f"{family}.jinja").read_text())
        if template is not None:
            (to / "chat_template.jinja").write_text(template)
        (to / "tokenizer.json").write_text(json.dumps(table))
        (to / "tokenizer_config.json").write_text(json.dumps(config))
        return to

    return make


def _begins_with(token: str, number: int) -> dict[str, Any]:
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
