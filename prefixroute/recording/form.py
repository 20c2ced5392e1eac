"""The format of a recording, as writer and reader share it: JSON lines, the first of which says what they are.

Every other line is one request: Mooncake's fields (`timestamp` in ms, here since 1970; `input_length` and
`output_length` in tokens; `hash_ids`) and what else was seen. Two rules differ from Mooncake's:

- `hash_ids` are for *full* blocks only, of the header's `block_tokens`. So there are at most `input_length //
  block_tokens` of them; fewer where the router saw less of a prompt than it counted, none for a prompt without a key.
- Lines stand in the order in which requests ended; times may go back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import orjson

FORMAT = "prefixroute-recording"
VERSION = 1
MAX_BLOCK_TOKENS = 65_536
_MAX_KEY_ID_CHARS = 64


@dataclass(frozen=True, slots=True)
class Header:
    """What must be equal before two files' ids mean the same. `key_id` tells keys apart and nothing about them."""

    block_tokens: int
    key_id: str

    def line(self) -> bytes:
        row = {"format": FORMAT, "version": VERSION, "block_tokens": self.block_tokens, "key_id": self.key_id}
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Self:
        """Of a line's object. Raises ValueError with what is wrong."""
        if row.get("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT!r}")
        if row.get("version") != VERSION:
            raise ValueError(f"version is not {VERSION}, the only one that is understood here")
        block_tokens, key_id = row.get("block_tokens"), row.get("key_id")
        if type(block_tokens) is not int or not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise ValueError(f"block_tokens must be an integer from 1 to {MAX_BLOCK_TOKENS}")
        if not isinstance(key_id, str) or not 1 <= len(key_id) <= _MAX_KEY_ID_CHARS:
            raise ValueError(f"key_id must be text of 1 to {_MAX_KEY_ID_CHARS} characters")
        return cls(block_tokens, key_id)


def header_of(line: bytes) -> Header | None:
    """The header in a line; None if it is none of ours."""
    try:
        row = orjson.loads(line)
        return Header.parse(row) if isinstance(row, dict) else None
    except ValueError:  # orjson's is one
        return None
