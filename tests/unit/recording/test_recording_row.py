"""The line of a request: what is in it, and how long its answer is said to be."""

from typing import Any

import orjson
import pytest

from prefixroute.core.policy import Reason
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.record import Outcome, RequestRecord
from prefixroute.recording.prefixes import PrefixHasher
from prefixroute.recording.row import Pending, line, output_tokens

KEY = b"k" * 32


def a_record(**changes: Any) -> RequestRecord:
    record = RequestRecord("req-1", "POST", "/v1/completions", "aiohttp", 50.0, status=200, ttft_s=0.25, duration_s=1.5)
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def test_a_line_has_mooncakes_fields_and_what_was_seen() -> None:
    prompt = read_prompt(Api.COMPLETIONS, b'{"model": "llama", "prompt": "%s"}' % (b"once upon " * 20))
    record = a_record(
        outcome=Outcome.OK,
        upstream="gpu-a",
        reason=Reason.AFFINITY,
        prompt_tokens=50,
        matched_tokens=32,
        cached_tokens=30,
        reported_prompt_tokens=44,
        completion_tokens=7,
    )
    written = line(Pending.of(record, prompt, "llama"), PrefixHasher(KEY, 16), 1_700_000_000.0)
    assert written.endswith(b"}\n")
    row = orjson.loads(written)
    ids = row.pop("hash_ids")
    assert ids == PrefixHasher(KEY, 16).ids(prompt.scope, prompt.key)
    assert len(ids) == 50 // 16
    assert row == {
        "timestamp": 1_700_000_050_000,
        "input_length": 50,
        "output_length": 7,
        "model": "llama",
        "route": "/v1/completions",
        "streamed": False,
        "upstream": "gpu-a",
        "reason": "affinity",
        "matched_tokens": 32,
        "prompt_tokens": 44,
        "cached_tokens": 30,
        "completion_tokens": 7,
        "ttft_ms": 250.0,
        "duration_ms": 1500.0,
        "waited_ms": 0.0,
        "outcome": "ok",
        "status": 200,
    }


@pytest.mark.parametrize(
    ("changes", "n_tokens"),
    [
        ({"completion_tokens": 7, "n_events": 12, "answer_bytes": 3000}, 7),
        ({"n_events": 12, "answer_bytes": 3000}, 12),
        ({"answer_bytes": 3000}, 750),
        ({"answer_bytes": 1}, 1),
        ({"completion_tokens": 0, "answer_bytes": 0}, 1),
        # Broken off: as much as came.
        ({"n_events": 3, "outcome": Outcome.CLIENT_GONE}, 3),
        # Never answered, or with an error.
        ({"n_events": 3, "status": 503}, 0),
        ({"answer_bytes": 100, "status": 400}, 0),
        ({"status": None, "ttft_s": None}, 0),
        ({"status": 200, "ttft_s": None, "outcome": Outcome.CLIENT_GONE}, 0),
    ],
)
def test_the_length_of_an_answer(changes: dict[str, Any], n_tokens: int) -> None:
    assert output_tokens(a_record(**changes), generates=True) == n_tokens


def test_an_answer_that_is_not_made_of_tokens_is_one() -> None:
    prompt = read_prompt(Api.POOLING, b'{"model": "bge", "input": "%s"}' % (b"once upon " * 20))
    item = Pending.of(a_record(answer_bytes=20_000), prompt, "bge")
    row = orjson.loads(line(item, PrefixHasher(KEY, 16), 0.0))
    assert (row["output_length"], row["hash_ids"]) == (1, [])
    assert row["input_length"] == prompt.n_tokens > 0


def test_only_the_key_material_is_kept_of_a_body() -> None:
    prompt = read_prompt(Api.CHAT, b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 10_000))
    item = Pending.of(a_record(), prompt, None)
    held = (item.record, item.model, item.scope, item.material, item.n_tokens, item.generates)
    assert prompt.body not in held
    assert 10_000 <= item.n_bytes < 13_000
