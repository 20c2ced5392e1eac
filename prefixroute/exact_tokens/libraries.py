"""The two tokenizer libraries behind one shape: texts in, packed token ids out.

`fastokens` is several times as fast and packs ids itself, but young: `equality` proves it for each tokenizer, and
`encode` goes on checking it. `tokenizers` is what the engine uses, and so is the truth here.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers

from prefixroute.errors import ConfigError

try:
    import fastokens
except ImportError:  # no wheel for this platform
    fastokens = None


class Library(Protocol):
    """Encodes texts. `name`: of the package."""

    name: str

    def encode(self, texts: Sequence[str], *, special: bool) -> list[bytes]:
        """Ids of each text, four bytes each, little-endian. `special`: with what the tokenizer puts around a prompt.

        Added tokens in the text are recognised either way.
        """
        ...


class Tokenizers:
    """Hugging Face's library. Raises ConfigError for what is no tokenizer.json."""

    name = "tokenizers"

    def __init__(self, tokenizer_json: str) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"tokenizer.path: no tokenizer can be made of tokenizer.json ({error})") from error
        # The engine sets both for each request.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str], *, special: bool) -> list[bytes]:
        # `encode` would hold the interpreter lock, and keeps offsets.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        return [_packed(encoding.ids) for encoding in encodings]

    def added_tokens(self) -> list[Any]:
        """What is found in text before anything else: objects with `content`, `special`, `normalized`, …"""
        return list(self._tokenizer.get_added_tokens_decoder().values())


class Fastokens:
    """Crusoe's library. Raises ValueError for tokenizers that it cannot handle, ImportError where it is missing."""

    name = "fastokens"

    def __init__(self, tokenizer_json: str) -> None:
        if fastokens is None:
            raise ImportError("fastokens is not installed")
        self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str], *, special: bool) -> list[bytes]:
        ids, offsets = self._tokenizer.encode_batch_flat(list(texts), add_special_tokens=special)
        ends = array("Q", offsets)
        if sys.byteorder == "big":
            ends.byteswap()
        return [ids[4 * ends[i] : 4 * ends[i + 1]] for i in range(len(texts))]


def _packed(ids: list[int]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
