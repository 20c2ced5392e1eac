"""Which files are read, and what is said of those that cannot be used."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixroute.errors import ConfigError
from prefixroute.exact_tokens.exact import ExactTokenizer, Options
from prefixroute.exact_tokens.load import read_files

ModelDir = Callable[..., Path]


def test_a_directory_and_its_tokenizer_json_mean_the_same(model_dir: ModelDir) -> None:
    directory = model_dir()
    assert read_files(str(directory)) == read_files(str(directory / "tokenizer.json"))


def test_a_template_file_stands_above_the_configuration_and_the_operators_above_both(model_dir: ModelDir) -> None:
    directory = model_dir()
    assert "<|im_start|>" in read_files(str(directory)).templates["default"]
    (directory / "chat_template.jinja").write_text("file")
    assert read_files(str(directory)).templates == {"default": "file"}
    own = directory / "own.jinja"
    own.write_text("own")
    assert read_files(str(directory), str(own)).templates == {"default": "own"}


def test_named_templates_are_kept_apart(model_dir: ModelDir) -> None:
    directory = model_dir()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools: {{ tools }}"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_files(str(directory)).templates == {"default": "plain", "tool_use": "tools: {{ tools }}"}


def test_special_tokens_may_be_objects(model_dir: ModelDir) -> None:
    directory = model_dir()
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_files(str(directory)).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.path: there is no .*tokenizer\.json"):
        read_files(str(tmp_path))


def test_a_missing_template_is_named(model_dir: ModelDir) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.chat_template: there is no nowhere\.jinja"):
        read_files(str(model_dir()), "nowhere.jinja")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"model": 1}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_tokenizer_is_said_to_be_none(model_dir: ModelDir, data: bytes) -> None:
    directory = model_dir()
    (directory / "tokenizer.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"tokenizer\.path: .*tokenizer\.json"):
        ExactTokenizer(Options(str(directory)))


def test_a_broken_configuration_is_named(model_dir: ModelDir) -> None:
    directory = model_dir()
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is no JSON"):
        read_files(str(directory))


def test_a_template_with_a_mistake_is_named_with_its_line(model_dir: ModelDir) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.chat_template: .*TemplateSyntaxError in line 2"):
        ExactTokenizer(Options(str(model_dir(template="{{ messages }}\n{% for %}"))))
