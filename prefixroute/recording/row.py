"""A finished request → its line. Lengths, times, hashes, and names from closed sets: no text, no header, no client."""

from typing import Any, NamedTuple

import orjson

from prefixroute.core.blocks import BYTES_PER_TOKEN
from prefixroute.core.prompt import NoKeyCause, Prompt
from prefixroute.record import RequestRecord
from prefixroute.recording.prefixes import PrefixHasher

# What an item holds beside its material, at most: record, names, and the objects themselves.
_ITEM_BYTES = 2048
# Of each candidate of each of its decisions, which the record keeps.
_CANDIDATE_BYTES = 256


class Pending(NamedTuple):
    """A request that waits to be hashed and written. Keeps its key material alive, and nothing else of its body."""

    record: RequestRecord
    model: str | None
    """A name that an instance lists, or `other`; None if there was none."""
    scope: bytes
    material: bytes
    n_tokens: int
    """Of the prompt, estimated as the ids count them: four bytes each."""
    generates: bool
    """Whether its answer is made of tokens; embeddings and scores are not."""
    n_bytes: int
    """Memory that it keeps, about."""

    @classmethod
    def of(cls, record: RequestRecord, prompt: Prompt, model: str | None) -> "Pending":
        scope, key = prompt.scope, prompt.key
        generates = prompt.no_key is not NoKeyCause.NOT_ROUTED
        n_candidates = sum([len(decided.candidates) for decided in record.decisions])
        n_bytes = len(key) + len(scope) + _ITEM_BYTES + _CANDIDATE_BYTES * n_candidates
        return cls(record, model, scope, key, prompt.n_tokens, generates, n_bytes)


def line(item: Pending, hasher: PrefixHasher, offset_s: float) -> bytes:
    """The request's line. `offset_s`: what makes the record's monotonic times Unix times."""
    record = item.record
    row: dict[str, Any] = {
        "timestamp": round((record.began_s + offset_s) * 1000),
        "input_length": item.n_tokens,
        "output_length": output_tokens(record, generates=item.generates),
        "hash_ids": hasher.ids(item.scope, item.material),
        "model": item.model,
        "route": record.route,
        "streamed": record.streamed,
        "upstream": record.upstream,
        "reason": record.reason.value if record.reason is not None else None,
        "matched_tokens": record.matched_tokens,
        "prompt_tokens": record.reported_prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "ttft_ms": _ms(record.ttft_s),
        "duration_ms": _ms(record.duration_s),
        "waited_ms": _ms(record.waited_s),
        "outcome": record.outcome.value,
        "status": record.status,
    }
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def output_tokens(record: RequestRecord, *, generates: bool) -> int:
    """Tokens of the answer, or of as much of it as came; 0: there was none, or it was an error.

    As the instance reported, else estimated: an event of a stream is one token, other answers have four bytes a token.
    """
    if record.ttft_s is None or record.status is None or record.status >= 400:
        return 0
    if not generates:  # a prefill and nothing more
        return 1
    return max(1, record.completion_tokens or record.n_events or record.answer_bytes // BYTES_PER_TOKEN)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
