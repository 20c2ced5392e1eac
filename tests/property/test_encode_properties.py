"""A prompt in pieces has the ids it has whole, whatever stands between the cuts, in tokenizers of every make."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixroute.exact_tokens.encode import Encoder, cut_tokens
from prefixroute.exact_tokens.libraries import Fastokens, Library, Tokenizers

DATA = Path(__file__).parents[1] / "data" / "tiny_llama" / "tokenizer.json.gz"

# Tokens that a template would put between messages, and such as get in their way.
TURN = ["<|im_start|>", "<|im_end|>", "<|sep|>", "[INST]"]
ODD = ["<|sep|>x", "<|strip|>", "<|norm|>", "<tool_call>", "INST"]

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTES, "use_regex": False}]}


MAKES: dict[str, dict[str, Any]] = {
    "byte level": {},
    "as Llama 3": {"pre_tokenizer": _split(_LLAMA_3)},
    "as Qwen 2": {"pre_tokenizer": _split(_LLAMA_3.replace("{1,3}", "")), "normalizer": {"type": "NFC"}},
    "byte level with a space in front": {"pre_tokenizer": {**_BYTES, "add_prefix_space": True}},
    "a mark at the very first word": {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    },
    "a mark at every piece": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
    },
    "normalized and stripped": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "NFC"},
                {"type": "Lowercase"},
                {"type": "Strip", "strip_left": True, "strip_right": True},
            ],
        }
    },
}

texts = st.lists(
    st.one_of(
        st.sampled_from([*TURN, *ODD, " ", "\n", "\n\n", "user", "the ", "<|", "|>", "x", "é", "e\u0301"]),
        st.text(max_size=20),
    ),
    max_size=20,
).map("".join)


def make(name: str) -> str:
    table: dict[str, Any] = json.loads(gzip.decompress(DATA.read_bytes())) | MAKES[name]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    own = {"<|strip|>": {"lstrip": True, "rstrip": True}, "<|norm|>": {"normalized": True}, "INST": {"special": False}}
    for i, content in enumerate([*TURN[2:], *ODD]):
        token = {"id": 8192 + i, "content": content, "special": True, **flags, **own.get(content, {})}
        table["added_tokens"].append(token)
    return json.dumps(table)


@pytest.fixture(scope="module", params=MAKES)
def libraries(request: pytest.FixtureRequest) -> tuple[Tokenizers, list[Library]]:
    table = make(request.param)
    reference = Tokenizers(table)
    try:
        return reference, [reference, Fastokens(table)]
    except ValueError:  # a make that it does not support
        return reference, [reference]


@given(prompts=st.lists(texts, min_size=1, max_size=4))
def test_pieces_put_together_are_the_whole(libraries: tuple[Tokenizers, list[Library]], prompts: list[str]) -> None:
    reference, all_libraries = libraries
    cuts = cut_tokens(reference.added_tokens(), ["".join(TURN)], reference)
    assert "<|im_start|>" in cuts
    for library in all_libraries:
        encoder = Encoder(library, reference, cuts, cache_bytes=4096)
        for prompt in [*prompts, *prompts]:
            assert encoder.encode(prompt) == library.encode([prompt], special=False)[0]
            assert encoder.encode(prompt, special=True) == library.encode([prompt], special=True)[0]
