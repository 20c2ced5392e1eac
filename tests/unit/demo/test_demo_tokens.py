from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixroute.demo.engine.request import FinishReason
from prefixroute.demo.server import tokens
from prefixroute.demo.server.tokens import TextRequest

PROMPT = tokens.encode("Tell me about prefix caching. ") * 4


def ask(prompt: bytes = PROMPT, max_tokens: int = 256, **options: Any) -> TextRequest:
    return TextRequest(prompt, max_tokens=max_tokens, block_size=16, seed=1, **options)


@given(st.text())
def test_text_becomes_tokens_and_text_again(text: str) -> None:
    encoded = tokens.encode(text)
    assert tokens.count(encoded) == -(-len(text.encode()) // 4)
    assert tokens.decode(encoded) == text
    assert tokens.from_ids(tokens.to_ids(encoded)) == encoded


def test_special_tokens_are_spelled_out_and_cannot_be_forged() -> None:
    assert tokens.decode(tokens.USER + tokens.encode("hi") + tokens.END) == "<|user|>hi<|end|>"
    assert tokens.encode("<|user|>") != tokens.USER


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "x", None])
def test_ids_outside_the_vocabulary_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="a token id is an integer"):
        tokens.from_ids([1, bad])  # type: ignore[list-item]


def test_block_hashes_stand_for_all_that_went_before() -> None:
    text = tokens.encode("abcd" * 64)
    changed = tokens.encode("Abcd" + "abcd" * 63)
    hashes = tokens.block_hashes(text, 16, 1)
    assert len(hashes) == 4
    assert len(set(hashes)) == 4
    assert tokens.block_hashes(text[:-4], 16, 1) == hashes[:3]
    assert not set(tokens.block_hashes(changed, 16, 1)) & set(hashes)


def test_model_and_salt_keep_prompts_apart() -> None:
    seeds = {tokens.chain_seed("a", None), tokens.chain_seed("b", None), tokens.chain_seed("a", "tenant")}
    assert len(seeds) == 3


def test_an_answer_tokenizes_to_what_it_was_made_of() -> None:
    one = ask(max_tokens=500, ignore_eos=True)
    assert tokens.count(one.text) == 500
    assert tokens.encode(one.text.decode()) == one.text


def test_answers_depend_on_prompt_and_variant_only() -> None:
    assert ask().text == ask().text
    assert ask().text != ask(PROMPT + tokens.encode("more")).text
    assert ask().text != ask(variant=1).text
    # A limit cuts an answer short; it does not change it.
    assert ask(max_tokens=500, ignore_eos=True).text.startswith(ask(max_tokens=7).text)


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 900}])
def test_an_exact_length_can_be_asked_for(options: dict[str, Any]) -> None:
    one = ask(max_tokens=900, **options)
    assert one.n_output_wanted == 900
    assert tokens.count(one.text) == 900
    assert one.last_reason == FinishReason.LENGTH


def test_an_answer_that_stops_by_itself_ends_with_a_token_without_text() -> None:
    one = ask(max_tokens=100_000)
    assert one.last_reason == FinishReason.STOP
    assert tokens.count(one.text) == one.n_output_wanted - 1


def test_answers_are_about_as_long_as_stated() -> None:
    prompts = [tokens.encode(f"question {i}") for i in range(2_000)]
    lengths = sorted(tokens.Answer(prompt).draw_n_tokens() for prompt in prompts)
    assert lengths[1_000] == pytest.approx(tokens.ANSWER_TOKENS_MEDIAN, rel=0.1)
    assert sum(lengths) / len(lengths) == pytest.approx(255, rel=0.1)
