"""A model's tokenizer files: `tokenizer.json`, and beside it the special tokens and the chat template.

Names and precedence as `transformers` has them, since the engine loads them so.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefixroute.errors import ConfigError

# The largest known (256 k entries with merges) has 35 MB; a template, 20 kB.
MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_TEXT_BYTES = 2**20

DEFAULT = "default"
TOOL_USE = "tool_use"

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What was read. `templates`: sources by name, `default` among them; empty when there is none."""

    tokenizer_json: str = field(repr=False)
    templates: Mapping[str, str] = field(repr=False)
    special_tokens: Mapping[str, str]
    """Variables that templates see, such as `bos_token`."""


def read_files(path: str, chat_template: str | None = None) -> TokenizerFiles:
    """Reads the model directory `path`, or the tokenizer.json that it names and what lies beside it.

    `chat_template`: a file that replaces the model's own. Raises ConfigError, whose message names the file.
    """
    given = Path(path)
    tokenizer = given / "tokenizer.json" if given.is_dir() else given
    text = _text(tokenizer, "tokenizer.path", MAX_TOKENIZER_BYTES)
    if text is None:
        raise ConfigError(f"tokenizer.path: there is no {tokenizer} (a tokenizer.json, or the directory that has it)")
    config = _table(tokenizer.parent / "tokenizer_config.json")
    if chat_template is None:
        templates = _templates(tokenizer.parent, config)
    else:
        source = _text(Path(chat_template), "tokenizer.chat_template", MAX_TEXT_BYTES)
        if source is None:
            raise ConfigError(f"tokenizer.chat_template: there is no {chat_template}")
        templates = {DEFAULT: source}
    special = _table(tokenizer.parent / "special_tokens_map.json") | config
    return TokenizerFiles(text, templates, _special_tokens(special))


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    where = "tokenizer.path"
    source = _text(directory / "chat_template.jinja", where, MAX_TEXT_BYTES)
    templates = {}
    if source is not None:
        templates[DEFAULT] = source
        for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            templates[file.stem] = _text(file, where, MAX_TEXT_BYTES) or ""
        return templates
    given = _table(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(given, str):
        return {DEFAULT: given}
    for entry in given if isinstance(given, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            templates[str(entry.get("name"))] = entry["template"]
    return templates if DEFAULT in templates else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _table(file: Path) -> dict[str, Any]:
    text = _text(file, "tokenizer.path", MAX_TEXT_BYTES * 16)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer.path: {file} is no JSON ({error})") from error
    return value if isinstance(value, dict) else {}


def _text(file: Path, where: str, max_bytes: int) -> str | None:
    """Text of the file; None when there is none."""
    try:
        with file.open("rb") as opened:
            data = opened.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{where}: {file} cannot be read ({error.strerror})") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{where}: {file} has more than {max_bytes} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {file} is no UTF-8 text") from error
