"""Pieces and their cache, the two libraries, and the checks on live prompts."""

import json
import sysconfig
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from prefixroute.exact_tokens import sample
from prefixroute.exact_tokens.cache import ENTRY_BYTES, TokenCache
from prefixroute.exact_tokens.encode import Encoder, cut_tokens
from prefixroute.exact_tokens.equality import first_difference, proven_library
from prefixroute.exact_tokens.libraries import Fastokens, Library, Tokenizers

Table = dict[str, Any]
AddToken = Callable[..., None]
TURNS = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"


class Counting:
    """A library that keeps what it was asked to encode."""

    def __init__(self, library: Library) -> None:
        self.name = library.name
        self.texts: list[str] = []
        self._library = library

    def encode(self, texts: Sequence[str], *, special: bool) -> list[bytes]:
        self.texts += texts
        return self._library.encode(texts, special=special)


class Wrong(Counting):
    """A library that leaves out the last token of texts with an é in them."""

    def encode(self, texts: Sequence[str], *, special: bool) -> list[bytes]:
        encoded = super().encode(texts, special=special)
        return [ids[:-4] if "é" in text else ids for text, ids in zip(texts, encoded, strict=True)]


@pytest.fixture
def reference(table: Table) -> Tokenizers:
    return Tokenizers(json.dumps(table))


def encoder(library: Library, reference: Library, **options: object) -> Encoder:
    return Encoder(library, reference, ["<|im_start|>", "<|im_end|>"], **{"cache_bytes": 10**6, **options})  # type: ignore[arg-type]


# Libraries


def test_fastokens_encodes_the_whole_sample_as_tokenizers_does(reference: Tokenizers, table: Table) -> None:
    library, remark = proven_library(reference, json.dumps(table), ["<|im_start|>", "<|im_end|>"])
    assert (library.name, remark) == ("fastokens", "fastokens is equal on the whole sample")


def test_fastokens_encodes_english_and_code_of_the_standard_library_alike(reference: Tokenizers, table: Table) -> None:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::6]
    texts = [file.read_text(errors="ignore") for file in files]
    assert sum(map(len, texts)) > 500_000
    assert first_difference(reference, Fastokens(json.dumps(table)), texts) is None


def test_the_sample_is_large_and_repeats() -> None:
    texts = list(sample.texts())
    assert sum(map(len, texts)) > 700_000
    assert texts == list(sample.texts())


def test_a_library_that_differs_is_found_out(reference: Tokenizers) -> None:
    assert first_difference(reference, Wrong(reference), ["plain", "café"]) == "café"


def test_a_tokenizer_that_fastokens_cannot_handle_stays_with_tokenizers(reference: Tokenizers) -> None:
    library, remark = proven_library(reference, '{"model": {"type": "none"}}', [])
    assert library is reference
    assert "does not support" in remark


def test_truncation_and_padding_of_the_file_do_not_count(reference: Tokenizers, table: Table) -> None:
    table = deepcopy(table)
    table["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    table["padding"] = {**padding, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    texts = ["a", "a long text of many tokens"]
    for library in (Tokenizers(json.dumps(table)), Fastokens(json.dumps(table))):
        assert library.encode(texts, special=True) == reference.encode(texts, special=True)


# Pieces


def test_of_the_next_turn_only_what_is_new_is_encoded(reference: Tokenizers) -> None:
    counting = Counting(reference)
    encoding = encoder(counting, reference)
    first = encoding.encode(TURNS)
    counting.texts.clear()
    longer = TURNS + "<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
    assert encoding.encode(longer) == reference.encode([longer], special=False)[0]
    assert encoding.encode(longer).startswith(first)
    assert counting.texts == ["<|im_start|>user\nand now?", "<|im_start|>assistant\n"]


def test_a_cut_is_made_only_where_it_is_sure(table: Table, add_token: AddToken) -> None:
    add_token(table, "<|sep|>", 8192)
    add_token(table, "<|sep|>x", 8193)  # longer, found first where both begin: harmless
    add_token(table, "a<|mid", 8194)  # reaches into the next one
    add_token(table, "<|mid|>", 8195)
    add_token(table, "<|strip|>", 8196, lstrip=True)
    add_token(table, "<|norm|>", 8197, normalized=True)
    add_token(table, "<plain>", 8198, special=False)
    add_token(table, "((<|in|>))", 8199)
    add_token(table, "<|in|>", 8200)
    library = Tokenizers(json.dumps(table))
    everything = ["".join(token["content"] for token in table["added_tokens"])]
    cuts = cut_tokens(library.added_tokens(), everything, library)
    assert set(cuts) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|sep|>", "<|sep|>x", "a<|mid", "((<|in|>))"}
    assert cut_tokens(library.added_tokens(), ["<|im_end|>"], library) == ["<|im_end|>"]


def test_nothing_is_cut_where_a_token_looks_at_its_neighbours(table: Table, add_token: AddToken) -> None:
    add_token(table, "word", 8192, single_word=True)
    library = Tokenizers(json.dumps(table))
    assert cut_tokens(library.added_tokens(), [TURNS], library) == []


# Checks


def test_a_live_check_that_fails_ends_the_use_of_the_library(reference: Tokenizers) -> None:
    faults: list[str] = []
    encoding = encoder(Wrong(reference), reference, check_every=2, on_fault=faults.append)
    text = "<|im_start|>user\ncafé"
    truth = reference.encode([text], special=False)[0]
    assert encoding.encode(text) != truth
    assert encoding.encode(text) == truth
    assert encoding.library is reference
    assert (encoding.n_checks, len(faults)) == (1, 1)
    assert "café" not in faults[0]


def test_a_cut_that_proves_wrong_is_made_no_more(reference: Tokenizers) -> None:
    faults: list[str] = []
    encoding = Encoder(reference, reference, ["he"], cache_bytes=10**6, check_every=1, on_fault=faults.append)
    assert encoding.encode(" then") == reference.encode([" then"], special=False)[0]
    assert len(faults) == 1
    assert encoding.encode(" then") == reference.encode([" then"], special=False)[0]
    assert len(faults) == 1


# The cache


def test_the_cache_keeps_within_its_bytes_and_forgets_what_was_not_used() -> None:
    cache = TokenCache(10 * (ENTRY_BYTES + 40))
    keys = [cache.digest(str(i)) for i in range(11)]
    for key in keys[:10]:
        cache.put(key, bytes(40))
    assert cache.get(keys[0]) == bytes(40)
    cache.put(keys[10], bytes(40))
    assert len(cache) == 10
    assert cache.n_bytes <= 10 * (ENTRY_BYTES + 40)
    assert cache.get(keys[1]) is None
    assert cache.get(keys[0]) == bytes(40)


def test_a_piece_that_would_push_out_all_others_is_not_kept() -> None:
    cache = TokenCache(4000)
    cache.put(cache.digest("a"), bytes(1001))
    assert (len(cache), cache.n_bytes) == (0, 0)


def test_digests_differ_between_processes() -> None:
    assert TokenCache(1000).digest("a") != TokenCache(1000).digest("a")
