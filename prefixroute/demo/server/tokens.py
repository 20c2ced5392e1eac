"""The simulated tokenizer and language model.

A token is four bytes, so a list of tokens is a `bytes` object of four bytes each. Text becomes its UTF-8 bytes;
the last token of a text is filled up with 0xFF, a byte that UTF-8 never uses, so nothing is ambiguous and
everything can be turned back. Special tokens start with 0xFF for the same reason: no text can forge one.

Each text is tokenized by itself, so the next one starts at a token of its own: a conversation that only grows
at its end keeps all its earlier tokens. An answer is made of words of exactly four ASCII characters: sent back
in the next turn, it gives the tokens it was made of.
"""

import struct
from array import array
from collections.abc import Iterable
from hashlib import shake_128
from random import Random

from xxhash import xxh3_64_intdigest

from prefixroute.demo.engine.request import EngineRequest, FinishReason

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**32 - 1

END = b"\xffEND"
SYSTEM = b"\xffSYS"
USER = b"\xffUSR"
ASSISTANT = b"\xffAST"
TOOL = b"\xffTOL"
_SPECIAL_TEXT = {END: "<|end|>", SYSTEM: "<|system|>", USER: "<|user|>", ASSISTANT: "<|assistant|>", TOOL: "<|tool|>"}

_FILLER = b"\xff\xff\xff"

# Answers without a limit of their own: log-normal, so most are short and a few are long. Mean about 255 tokens.
ANSWER_TOKENS_MEDIAN = 200
ANSWER_TOKENS_SIGMA = 0.7


def encode(text: str) -> bytes:
    """`text` as tokens, four bytes each; empty for an empty text."""
    data = text.encode("utf-8", "surrogatepass")
    return data + _FILLER[: -len(data) % TOKEN_BYTES]


def decode(tokens: bytes) -> str:
    """The text of `tokens`. Special tokens are spelled out; what is not UTF-8 becomes U+FFFD."""
    parts: list[str] = []
    text = bytearray()
    for start in range(0, len(tokens), TOKEN_BYTES):
        token = tokens[start : start + TOKEN_BYTES]
        special = _SPECIAL_TEXT.get(token)
        if special is None:
            text += token.rstrip(b"\xff")
            continue
        parts += (text.decode("utf-8", "replace"), special)
        text.clear()
    return "".join([*parts, text.decode("utf-8", "replace")])


def from_ids(ids: Iterable[int]) -> bytes:
    """Token ids as a client sends them. Raises ValueError if one is no token of this vocabulary."""
    numbers = list(ids)
    try:
        return struct.pack(f"<{len(numbers)}I", *numbers)
    except struct.error as error:
        raise ValueError(f"a token id is an integer from 0 to {MAX_TOKEN_ID}") from error


def to_ids(tokens: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens))


def count(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES


def chain_seed(model: str, cache_salt: str | None) -> int:
    """What the chain of block hashes starts from: prompts of two models or salts never share a block."""
    return xxh3_64_intdigest(f"{model}\0{cache_salt or ''}".encode("utf-8", "surrogatepass"))


def block_hashes(tokens: bytes, block_size: int, seed: int) -> list[int]:
    """One hash for each full block; each also stands for everything before it."""
    width = block_size * TOKEN_BYTES
    hashes: list[int] = []
    parent = seed
    for start in range(0, len(tokens) - width + 1, width):
        parent = xxh3_64_intdigest(tokens[start : start + width], parent)
        hashes.append(parent)
    return hashes


def _make_words() -> list[bytes]:
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    words = [a + b + c for a in consonants for b in vowels for c in consonants]
    # Some punctuation, so that answers look like prose.
    endings = [" "] * 11 + [","]
    return [(word + endings[index % len(endings)]).encode() for index, word in enumerate(words)]


_WORDS = _make_words()


class Answer:
    """What the model says to a prompt: decided by the prompt (and `variant`) alone."""

    __slots__ = ("_seed",)

    def __init__(self, prompt: bytes, variant: int = 0) -> None:
        self._seed = xxh3_64_intdigest(prompt, variant)

    def draw_n_tokens(self) -> int:
        """How long it would be if nothing limited it, the end token included."""
        return max(2, round(Random(self._seed).lognormvariate(0.0, ANSWER_TOKENS_SIGMA) * ANSWER_TOKENS_MEDIAN))

    def words(self, n: int) -> bytes:
        """Its first `n` words, one token each."""
        numbers = array("H", shake_128(self._seed.to_bytes(8, "little")).digest(2 * n))
        n_words = len(_WORDS)
        return b"".join([_WORDS[number % n_words] for number in numbers])


class TextRequest(EngineRequest):
    """An engine request with its text: `text` holds the answer's words, four bytes for each token but the end."""

    __slots__ = ("prompt", "text")

    def __init__(
        self,
        prompt: bytes,
        *,
        max_tokens: int,
        block_size: int,
        seed: int,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        variant: int = 0,
    ) -> None:
        """`max_tokens`: of output, at least 1, exactly that many with `ignore_eos`; `seed`: see `chain_seed`."""
        answer = Answer(prompt, variant)
        n_drawn = max_tokens if ignore_eos else max(answer.draw_n_tokens(), min_tokens)
        stops = not ignore_eos and n_drawn < max_tokens
        n_output = n_drawn if stops else max_tokens
        self.prompt = prompt
        self.text = answer.words(n_output - stops)
        # The last token is never an input, so it is never in the cache.
        computed = (prompt + self.text)[: len(prompt) + (n_output - 1) * TOKEN_BYTES]
        super().__init__(
            count(prompt),
            n_output,
            block_hashes(computed, block_size, seed),
            FinishReason.STOP if stops else FinishReason.LENGTH,
        )
