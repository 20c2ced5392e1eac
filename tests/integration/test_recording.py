"""A router that records: what is in the file after real requests, and what is not."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from prefixroute.app import App
from prefixroute.errors import ConfigError
from prefixroute.sim.traces import read_trace
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import json_answer

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

SECRET = "Violets are blue and PLANTED in rows. "
USAGE = {"prompt_tokens": 90, "completion_tokens": 33, "prompt_tokens_details": {"cached_tokens": 16}}
ANSWER = {"choices": [{"message": {"content": "PLANTED answer"}}], "usage": USAGE}


def chat(text: str, **fields: Any) -> bytes:
    return json.dumps({"model": "base", "messages": [{"role": "user", "content": text}], **fields}).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rec.jsonl"


def table(path: Path, **changes: Any) -> dict[str, Any]:
    return {"path": str(path), "block_tokens": 16, **changes}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()[1:]]


async def stream(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for number in range(9):
        await call.send_chunk(b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number)
    await call.send_chunk(b"")


async def test_a_request_becomes_a_line_and_none_of_its_text(serve: Serve, path: Path) -> None:
    async with (
        FakeUpstream(json_answer(ANSWER), models=("base",)) as upstream,
        serve(upstream, recording=table(path)) as app,
        RawClient(app.url) as client,
    ):
        body = chat(SECRET * 10, user="PLANTED-user", metadata={"PLANTED": "PLANTED"})
        headers = [("Authorization", "Bearer PLANTED"), ("x-session-id", "PLANTED"), ("x-request-id", "PLANTED-id")]
        assert (await client.request("POST", "/v1/chat/completions?PLANTED=1", body, headers)).status == 200
        assert (await client.request(body=chat(SECRET * 10, model="PLANTED-model"))).status == 200
        assert (await client.request("GET", "/v1/PLANTED")).status == 200
        assert app.recorder is not None
        await asyncio.to_thread(app.recorder.flush)
        exposition = app.metrics.exposition()[0].decode()
    assert 'prefixroute_recorded_requests_total{outcome="written"} 2.0' in exposition
    content = path.read_bytes()
    for word in ("PLANTED", "Violets", "blue", "rows"):
        assert word.encode() not in content
    first, second = rows(path)
    n_tokens = first["input_length"]
    assert (n_tokens, len(first["hash_ids"])) == (pytest.approx(len(SECRET) * 10 / 4, rel=0.1), n_tokens // 16)
    expected = {
        "output_length": 33,
        "prompt_tokens": 90,
        "completion_tokens": 33,
        "cached_tokens": 16,
        "model": "base",
        "route": "/v1/chat/completions",
        "upstream": "gpu-0",
        "streamed": False,
        "outcome": "ok",
        "status": 200,
    }
    assert first.items() >= expected.items()
    # A model that nobody lists is no name to keep, and shares no cache.
    assert second["model"] == "other"
    assert set(first["hash_ids"]).isdisjoint(second["hash_ids"])
    # Whatever else is text is from a closed set.
    words = {word for row in (first, second) for word in row.values() if isinstance(word, str)}
    assert words == {"base", "other", "/v1/chat/completions", "gpu-0", "turn", "ok"}


async def test_a_conversation_shows_as_a_shared_prefix_and_runs_join(serve: Serve, path: Path) -> None:
    async with FakeUpstream(json_answer(ANSWER), models=("base",)) as upstream:
        runs = ((path, SECRET * 10), (path, SECRET * 10 + "And then?"), (path.with_name("o"), SECRET * 10))
        for place, text in runs:
            async with serve(upstream, recording=table(place)) as app, RawClient(app.url) as client:
                assert (await client.request(body=chat(text))).status == 200
    trace = read_trace(path)
    first, second = trace.requests
    assert trace.block_tokens == 16
    n = len(first.hash_ids) - 1
    assert n > 4
    assert first.hash_ids[:n] == second.hash_ids[:n]
    # Another key: nothing to compare.
    (other,) = read_trace(path.with_name("o")).requests
    assert set(other.hash_ids).isdisjoint(first.hash_ids)
    with pytest.raises(ConfigError, match="another key"):
        read_trace([path, path.with_name("o")])


async def test_a_stream_that_reports_no_usage_is_measured_by_its_events(serve: Serve, path: Path) -> None:
    async with (
        FakeUpstream(stream) as upstream,
        serve(upstream, recording=table(path)) as app,
        RawClient(app.url) as client,
    ):
        await client.request(body=chat("hello", stream=True))
    (row,) = rows(path)
    assert (row["streamed"], row["output_length"], row["completion_tokens"]) == (True, 9, None)
    assert 0 < row["ttft_ms"] <= row["duration_ms"]


async def test_what_failed_is_recorded_without_an_answer(serve: Serve, path: Path, until: Until) -> None:
    busy = json_answer({"error": "busy"}, status=503)

    async def never(call: Call) -> None:
        await call.wait_disconnected()

    for script in (busy, never):
        async with FakeUpstream(script) as upstream, serve(upstream, recording=table(path)) as app:
            async with RawClient(app.url) as client:
                if script is busy:
                    assert (await client.request(body=chat("hello"))).status == 503
                else:
                    body = chat("hello")
                    await client.send(head("POST", "/v1/chat/completions", body) + body)
                    await upstream.wait_calls(1)
            await until(lambda: app.proxy.n_active == 0)
    assert [(row["outcome"], row["output_length"]) for row in rows(path)] == [("server_error", 0), ("client_gone", 0)]
    assert all(re.fullmatch("[a-z_]+", row["reason"]) for row in rows(path))


async def test_a_recording_that_cannot_be_begun_is_told_before_anything_listens(serve: Serve, path: Path) -> None:
    path.write_text("figures\n")
    async with FakeUpstream() as upstream:
        with pytest.raises(ConfigError, match="is there already and no recording"):
            async with serve(upstream, recording=table(path)):
                pass
    assert path.read_text() == "figures\n"
