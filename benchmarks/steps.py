"""The longest stops of the event loop, by what is sent and answered: `python -m benchmarks.steps --help`.

The router serves in this process, as its command would; clients and an instance are another process. A step is one call
by the loop: of a callback, of a task up to its next await, of a protocol. It is timed in CPU time of the loop's thread:
what disturbs the machine makes it only longer, so the least of the rounds counts. Asyncio's own loop is timed as a
whole, reading and writing sockets included; of uvloop's, which is compiled, the calls are, and apart from them the time
between two calls, in which it reads, writes and polls (`loop`, of several connections maybe).

Of the longest step of each kind, what took most of it is told: some functions are timed in it, what they call included.
"""

import argparse
import asyncio
import base64
import gc
import http.client
import logging
import multiprocessing
import os
import random
import sys
from asyncio.events import Handle
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from time import thread_time_ns
from typing import Any

import orjson
import uvloop

from benchmarks.bodies import MODEL, make_text
from benchmarks.tables import markdown
from prefixroute import collector, memory
from prefixroute.access_log import AccessLog
from prefixroute.app import App, running
from prefixroute.config.settings import Settings
from prefixroute.core import canonical, index, ladder, prompt, scan
from prefixroute.core.answer_reader import AnswerReader
from prefixroute.core.blocks import BlockHasher
from prefixroute.core.router import Router
from prefixroute.http import admin, admin_views, ask, models, response, transcript, usage
from prefixroute.http.front.fast import FastConnection
from prefixroute.http.front.full import FullConnection
from prefixroute.http.upstream.link import Link
from prefixroute.http.upstream.sending import Sending
from prefixroute.logs import configure_logs
from prefixroute.testing.upstream import Call, FakeUpstream

SEED = 7
LIMIT_MS = 5.0
KB, MB = 1 << 10, 1 << 20
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, GENERATE, EMBEDDINGS = "/v1/responses", "/generate", "/v1/embeddings"
EXPLAIN = "/explain"
SHORT = "short"

# ---------------------------------------------------------------------- timing


class Stopwatch:
    """Times steps, and in them what is named. Of the longest one since `reset`, says what it was."""

    def __init__(self) -> None:
        self._depth = 0
        self._began_ns = 0
        self._ended_ns = thread_time_ns()
        self._parts: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        self.longest_ns = 0
        self.between_ns = 0
        self.what = ""
        self.parts: dict[str, int] = {}
        self.n_above = 0
        """Steps above the limit."""

    def step(self, name: Callable[[], str], call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """`call`, as a step unless it is a part of one."""
        if self._depth:
            return call(*arguments, **named)
        self._depth = 1
        self._parts.clear()
        self._began_ns = began_ns = thread_time_ns()
        self.between_ns = max(self.between_ns, began_ns - self._ended_ns)
        try:
            return call(*arguments, **named)
        finally:
            self._depth = 0
            self._ended_ns = ended_ns = thread_time_ns()
            took_ns = ended_ns - began_ns
            if took_ns > LIMIT_MS * 1e6:
                self.n_above += 1
            if took_ns > self.longest_ns:
                self.longest_ns, self.what, self.parts = took_ns, name(), dict(self._parts)

    def time(self, holder: Any, name: str) -> None:
        """From now on a function is timed where it is a part of a step."""
        label = f"{getattr(holder, '__name__', holder).rpartition('.')[2]}.{name}"
        timed = self._timed(label, getattr(holder, name))
        setattr(holder, name, staticmethod(timed) if isinstance(holder.__dict__.get(name), staticmethod) else timed)

    def time_garbage(self, phase: str, _info: object) -> None:
        """For `gc.callbacks`."""
        if phase == "start":
            self._gc_began_ns = thread_time_ns()
        elif self._depth:
            self._add("garbage", thread_time_ns() - self._gc_began_ns)

    def _timed(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began_ns = thread_time_ns()
            try:
                return call(*arguments, **named)
            finally:
                self._add(label, thread_time_ns() - began_ns)

        return timed

    def _add(self, label: str, took_ns: int) -> None:
        self._parts[label] = self._parts.get(label, 0) + took_ns

    def told(self) -> str:
        """What the longest step was."""
        most = sorted(self.parts.items(), key=lambda part: -part[1])[:4]
        return ", ".join([self.what, *(f"{name} {ns / 1e6:.1f}" for name, ns in most if ns > 100_000)])


PARTS: Sequence[tuple[Any, Sequence[str]]] = (
    (ask, ("read_fields", "read_prompt")),
    (admin, ("read_prompt", "encode", "_json")),
    (admin_views, ("record_view",)),
    (prompt, ("is_parsable", "_parsed_key", "_unparsed_key")),
    (canonical, ("chat_key", "_conversation", "_packed")),
    (scan, ("folded", "edge_fields", "sampled_tokens")),
    (BlockHasher, ("chain", "continued", "rest")),
    (index.PrefixIndex, ("record", "match", "forget")),
    (ladder.Ladder, ("dispatched",)),
    (Router, ("read", "lease", "enter", "explain")),
    (Link, ("_feed", "abort")),
    (Sending, ("write", "write_large")),
    (usage.UsageWatch, ("see", "usage")),
    (transcript.Transcript, ("see", "material")),
    (transcript, ("events_of",)),
    (AnswerReader, ("events", "document")),
    (response.RawResponse, ("_write", "put")),
    (models, ("_entries", "joined_models")),
    (AccessLog, ("note",)),
)
PROTOCOL_CALLS = (
    "connection_made",
    "data_received",
    "eof_received",
    "connection_lost",
    "pause_writing",
    "resume_writing",
)


def name_of(callback: Any) -> str:
    """Of a callback: its own, or its task's coroutine's."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine: Any = owner.get_coro()
        while (inner := getattr(coroutine, "cr_await", None)) is not None and hasattr(inner, "cr_code"):
            coroutine = inner
        return f"task {coroutine.__qualname__}"
    return getattr(callback, "__qualname__", repr(callback))


class TimedUvloop(uvloop.Loop):
    """Times what it is told to call, whatever that is. Protocols are timed where they are."""

    watch: Stopwatch

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon(
            partial(self.watch.step, partial(name_of, callback), callback), *arguments, context=context
        )

    def call_soon_threadsafe(self, callback: Any, *arguments: Any, context: Any = None) -> Any:  # type: ignore[override]
        timed = partial(self.watch.step, partial(name_of, callback), callback)
        return super().call_soon_threadsafe(timed, *arguments, context=context)

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> Any:  # type: ignore[override]
        timed = partial(self.watch.step, partial(name_of, callback), callback)
        return super().call_later(delay, timed, *arguments, context=context)

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> Any:  # type: ignore[override]
        timed = partial(self.watch.step, partial(name_of, callback), callback)
        return super().call_at(when, timed, *arguments, context=context)


def time_protocols(watch: Stopwatch) -> None:
    for protocol in (FastConnection, FullConnection, Link):
        for name in PROTOCOL_CALLS:
            call = getattr(protocol, name)
            label = f"{protocol.__name__}.{name}"

            def timed(*arguments: Any, _call: Any = call, _label: str = label) -> Any:
                return watch.step(lambda: _label, _call, *arguments)

            setattr(protocol, name, timed)


def time_handles(watch: Stopwatch) -> None:
    run = Handle._run

    def timed(handle: Any) -> None:
        callback = handle._callback
        watch.step(partial(name_of, callback), run, handle)

    Handle._run = timed  # type: ignore[method-assign, assignment]  # as all loops' handles are run


# ---------------------------------------------------------------------- what is sent and answered


@dataclass(frozen=True, slots=True)
class Kind:
    """One exchange. `answer`: a name in `ANSWERS`. `plane`: which port."""

    name: str
    body: Callable[..., bytes]
    target: str = CHAT
    answer: str = SHORT
    headers: tuple[tuple[str, str], ...] = ()
    chunk_bytes: int = 0
    """Sent in chunks of so many; 0: with a length."""
    method: str = "POST"
    is_admin: bool = False


def _rng() -> random.Random:
    return random.Random(SEED)


@cache
def _words() -> str:
    return make_text(256 * KB, _rng())


def text(n_bytes: int) -> str:
    words = _words()
    return (words * (n_bytes // len(words) + 1))[:n_bytes]


def chat(*contents: object, **more: object) -> bytes:
    messages = [{"role": "assistant" if n % 2 else "user", "content": content} for n, content in enumerate(contents)]
    return orjson.dumps({"model": MODEL, "messages": messages, **more})


def filled(n_bytes: int, inner: str, *, before: str = '{"model":"m","messages":[', after: str = "]}") -> bytes:
    """`inner`, comma after comma."""
    n = max(1, (n_bytes - len(before) - len(after)) // (len(inner.encode()) + 1))
    return (before + ",".join([inner] * n) + after).encode()


def images(n_images: int, n_bytes: int) -> bytes:
    urls = [base64.b64encode(_rng().randbytes(n_bytes * 3 // 4)).decode() for _ in range(n_images)]
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}} for url in urls]
    return chat([{"type": "text", "text": "What is this?"}, *parts])


def tools(n: int) -> bytes:
    one = {"type": "string", "description": text(120), "enum": ["a", "b"]}
    made = [
        {"type": "function", "function": {"name": f"f{i}", "description": text(400), "parameters": {
            "type": "object", "properties": {f"p{j}": one for j in range(8)}, "required": ["p0"]}}}
        for i in range(n)
    ]  # fmt: skip
    return chat("Do it.", tools=made)


def ids(n: int, top: int = 128_000) -> list[int]:
    rng = _rng()
    return [rng.randrange(top) for _ in range(n)]


def anthropic(n_bytes: int, n_turns: int) -> bytes:
    blocks = [
        {"role": "assistant" if n % 2 else "user", "content": [{"type": "text", "text": text(n_bytes // n_turns)}]}
        for n in range(n_turns)
    ]
    system = [{"type": "text", "text": text(4 * KB), "cache_control": {"type": "ephemeral"}}]
    return orjson.dumps({"model": MODEL, "system": system, "messages": blocks, "max_tokens": 100})


def responses_input(n_bytes: int, n_items: int) -> bytes:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text(n_bytes // n_items)}]}
        for _ in range(n_items)
    ]
    return orjson.dumps({"model": MODEL, "input": items})


def multipart(n_bytes: int) -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n%s\r\n--x--\r\n' % _rng().randbytes(n_bytes)


def _kinds() -> Iterator[Kind]:
    for size, label in (
        *((1 * KB, "1 KB"), (8 * KB, "8 KB"), (32 * KB, "32 KB"), (64 * KB, "64 KB"), (256 * KB, "256 KB")),
        *((500 * KB, "500 KB"), (1000 * KB, "1 MB, parsed"), (1100 * KB, "1.1 MB, not parsed"), (4 * MB, "4 MB")),
        *((10 * MB, "10 MB"), (25 * MB, "25 MB"), (63 * MB, "63 MB")),
    ):
        yield Kind(f"one text, {label}", lambda size=size: chat(text(size)))
    yield Kind("1,000 turns, 200 KB", lambda: chat(*([text(200)] * 999)))
    yield Kind("1,000 turns, 1 MB", lambda: chat(*([text(950)] * 999)))
    yield Kind("10,000 turns, 25 MB", lambda: chat(*([text(2_500)] * 9_999)))
    yield Kind("5,000 short turns, parsed", lambda: chat(*(["Yes."] * 4_999)))
    yield Kind("16,000 short turns", lambda: chat(*(["Yes."] * 15_999)))
    yield Kind("3,000 turns of three parts", lambda: chat(*([[{"type": "text", "text": "Yes."}] * 3] * 2_999)))
    yield Kind("100 tools", lambda: tools(100))
    yield Kind("500 tools, 1 MB", lambda: tools(430))
    yield Kind("tools with cache_control", lambda: tools(430).replace(b'"type":"function"', b'"cache_control":{}'))
    yield Kind("5,000 tools, 12 MB", lambda: tools(5_000))
    for encoded in (500 * KB, 1000 * KB, 5 * MB, 25 * MB):
        yield Kind(f"one image, {encoded / MB:.1f} MB", lambda encoded=encoded: images(1, encoded))
    yield Kind("200 images, 25 MB", lambda: images(200, 125 * KB))
    yield Kind("8 images, 1 MB", lambda: images(8, 120 * KB))
    for n in (10_000, 100_000, 130_000, 500_000):
        yield Kind(f"{n:,} token ids", lambda n=n: orjson.dumps({"model": MODEL, "prompt": ids(n)}), COMPLETIONS)
    yield Kind("500,000 small token ids, 1 MB", lambda: orjson.dumps({"prompt": ids(500_000, 9)}), COMPLETIONS)
    yield Kind("4,000,000 token ids, 25 MB", lambda: orjson.dumps({"prompt": ids(4_000_000)}), COMPLETIONS)
    yield Kind("a batch of 1,000 texts", lambda: orjson.dumps({"prompt": [text(1000)] * 1000}), COMPLETIONS)
    yield Kind("a batch of texts, 25 MB", lambda: orjson.dumps({"prompt": [text(1000)] * 25_000}), COMPLETIONS)
    yield Kind("a batch of 200,000 words", lambda: orjson.dumps({"prompt": ["a"] * 200_000}), COMPLETIONS)
    yield Kind("a batch of 1,000 ids", lambda: orjson.dumps({"prompt": [ids(150)] * 1000}), COMPLETIONS)
    yield Kind("generate, ids", lambda: orjson.dumps({"input_ids": ids(130_000)}), GENERATE)
    yield Kind("embeddings, 25 MB", lambda: orjson.dumps({"input": [text(1000)] * 25_000}), EMBEDDINGS)
    yield Kind("embeddings, 1 MB of words", lambda: orjson.dumps({"input": ["a"] * 240_000}), EMBEDDINGS)
    for n_bytes in (1000 * KB, 25 * MB):
        named = f"{n_bytes / MB:.0f} MB"
        yield Kind(f"Anthropic, {named}", partial(anthropic, n_bytes, 400), MESSAGES)
        yield Kind(f"Responses, {named}", partial(responses_input, n_bytes, 400), RESPONSES)
        yield Kind(
            f"lists in lists, {named}", lambda n=n_bytes: b'{"messages":[' + b"[" * (n // 2) + b"]" * (n // 2) + b"]}"
        )
        yield Kind(f"invalid JSON, {named}", lambda n=n_bytes: chat(text(n))[:-2])
        yield Kind(f"not an object, {named}", lambda n=n_bytes: orjson.dumps([text(n)]))
        yield Kind(f"no JSON at all, {named}", lambda n=n_bytes: text(n).encode())
        yield Kind(
            f"escapes, {named}", lambda n=n_bytes: filled(n, r'{"role":"user","content":"' + r"\u00e9\n\"" * 300 + '"}')
        )
        yield Kind(
            f"astral escapes, {named}", lambda n=n_bytes: filled(n, '{"content":"' + r"\ud83d\ude00" * 300 + '"}')
        )
        yield Kind(
            f"Chinese, {named}", lambda n=n_bytes: filled(n, '{"role":"user","content":"' + "人之初性本善" * 100 + '"}')
        )
        yield Kind(f"one text, one emoji, {named}", lambda n=n_bytes: chat(text(n - 100) + "😀"))
        yield Kind(f"backslashes, {named}", lambda n=n_bytes: chat("\\" * (n // 2 - 100)))
        yield Kind(f"objects in a list, {named}", lambda n=n_bytes: filled(n, "{}"))
        yield Kind(f"lists in a list, {named}", lambda n=n_bytes: filled(n, "[]"))
        yield Kind(f"digits, {named}", lambda n=n_bytes: filled(n, "1"))
        yield Kind(f"floats, {named}", lambda n=n_bytes: filled(n, "1.2345678901234567"))
        yield Kind(f"nulls, {named}", lambda n=n_bytes: filled(n, "null"))
        yield Kind(f"empty strings, {named}", lambda n=n_bytes: filled(n, '""'))
        yield Kind(
            f"fields, {named}",
            lambda n=n_bytes: filled(n, '"a":1', before='{"messages":[{"role":"user","content":"x"}],', after="}"),
        )
        yield Kind(f"quotes, {named}", lambda n=n_bytes: chat('"model":' * (n // 10)))
        yield Kind(f"fields in front, {named}", lambda n=n_bytes: b'{"x":[' + b'"prompt":{},' * (n // 12) + b"]}")
        yield Kind(f"gzip, {named}", lambda n=n_bytes: _rng().randbytes(n), headers=(("Content-Encoding", "gzip"),))
        yield Kind(f"chunked upload, {named}", lambda n=n_bytes: chat(text(n)), chunk_bytes=64 * KB)
        multi = (("Content-Type", "multipart/form-data; boundary=x"),)
        yield Kind(f"multipart, {named}", partial(multipart, n_bytes), "/v1/audio/transcriptions", headers=multi)
        yield Kind(f"unknown path, {named}", lambda n=n_bytes: text(n).encode(), "/v1/other")
    for name, inner in (
        ("objects", "{}"),
        ("objects in objects", '{"a":{}}'),
        ("lists", "[]"),
        ("messages", '{"role":"u","content":"x"}'),
        ("calls", '{"role":"assistant","tool_calls":[{},{},{}]}'),
        ("parts", '{"role":"user","content":[{},{},{}]}'),
        ("odd roles", '{"role":1,"type":"x","a":[1]}'),
        ("ids", "[1,2,3]"),
        ("media", '{"role":"user","content":[{"a":1}]}'),
    ):
        for n in (64 * KB, 256 * KB):
            yield Kind(f"{n // KB} KB of {name}", lambda n=n, inner=inner: filled(n, inner))
        n_items = 16_000 // (inner.count("{") + inner.count("["))
        yield Kind(f"as many {name} as are parsed", lambda n=n_items, inner=inner: filled(n * (len(inner) + 1), inner))
    yield Kind("64 KB of tools", lambda: filled(64 * KB, "{}", before='{"messages":[{}],"tools":['))
    yield Kind("tools: objects, 16,000", lambda: filled(48_000, "{}", before='{"messages":[{}],"tools":['))
    yield Kind("tiny chunks up, 256 KB", lambda: chat(text(256 * KB)), chunk_bytes=1)
    for answer in ANSWERS:
        if answer != SHORT:
            stream = {"stream": True} if "stream" in answer else {}
            yield Kind(f"answer: {answer}", lambda stream=stream: chat("Hello", **stream), answer=answer)
    yield Kind("answer: stream of responses, huge", lambda: orjson.dumps({"input": "Hi", "stream": True}), RESPONSES,
               answer="a responses stream, its last event 4 MB")  # fmt: skip
    yield Kind("model lists, 4 MB", lambda: b"", "/v1/models", answer="models", method="GET")
    yield Kind("GET /metrics", lambda: b"", "/metrics", method="GET", is_admin=True)
    yield Kind("GET /decisions", lambda: b"", "/decisions/steps-last", method="GET", is_admin=True)
    yield Kind("GET /instances", lambda: b"", "/instances", method="GET", is_admin=True)
    for n_bytes in (500 * KB, 1000 * KB, 25 * MB):
        yield Kind(f"explain, {n_bytes / MB:.1f} MB", lambda n=n_bytes: chat(text(n)), EXPLAIN, is_admin=True)
    yield Kind("explain, 1 MB of objects", lambda: filled(1000 * KB, "{}"), EXPLAIN, is_admin=True)
    yield Kind("explain, 1 MB of digits", lambda: filled(1000 * KB, "1"), EXPLAIN, is_admin=True)


USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 50,
    "total_tokens": 150,
    "prompt_tokens_details": {"cached_tokens": 10},
}


def document(content: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return orjson.dumps({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": USAGE})


def event(delta: object, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1753900000, "model": MODEL}
    return b"data: %b\n\n" % orjson.dumps({**head, "choices": [choice]})


def ended(events: bytes) -> bytes:
    return events + event({"content": ""}, "stop") + b"data: [DONE]\n\n"


def token_events(n_bytes: int) -> bytes:
    rng = _rng()
    some = b"".join(event({"content": " " + "".join(rng.choices("abcdefgh\\n", k=4))}) for _ in range(1000))
    return ended(some * (n_bytes // len(some) + 1))


def call_events(n_bytes: int) -> bytes:
    some = b"".join(
        event({"tool_calls": [{"index": n, "function": {"name": "f", "arguments": '{"a":'}}]}) for n in range(1000)
    )
    return ended(some * (n_bytes // len(some) + 1))


def responses_last(n_bytes: int) -> bytes:
    part = {"type": "output_text", "text": text(n_bytes), "annotations": []}
    done = {"status": "completed", "output": [{"type": "message", "role": "assistant", "content": [part]}]}
    return b"data: %b\n\n" % orjson.dumps({"type": "response.completed", "response": done})


ANSWERS: dict[str, Callable[[], bytes]] = {
    SHORT: lambda: document("word of the answer " * 20),
    "a document, 250 KB": lambda: document(text(250 * KB)),
    "a document, 4 MB": lambda: document(text(4 * MB)),
    "a document, 25 MB": lambda: document(text(25 * MB)),
    "a document of objects, 250 KB": lambda: b'{"choices":[{"message":{"content":[' + b"{}," * 80_000 + b"{}]}}]}",
    "a document of digits, 250 KB": lambda: b'{"choices":[{"message":{"content":[' + b"1," * 120_000 + b"1]}}]}",
    "a document of escapes, 250 KB": lambda: document('é\n"' * 60_000).replace("é".encode(), rb"\u00e9")[:260_000],
    "a stream, 500 tokens": lambda: token_events(100 * KB),
    "a stream, 16 MB of tokens": lambda: token_events(16 * MB),
    "a stream, 1 MB of calls": lambda: call_events(1 * MB),
    "a stream, events of 1 MB": lambda: ended(event({"content": text(1 * MB)}) * 25),
    "a stream, events of 200 KB": lambda: ended(event({"content": text(200 * KB)}) * 60),
    "a stream, events of objects": lambda: ended(event({"x": [{}] * 60_000}) * 60),
    "a stream, one event of 25 MB": lambda: ended(event({"content": text(25 * MB)})),
    "a stream, tiny events, 8 MB": lambda: b"data: 1\n\n" * 900_000,
    "a stream, small events, 8 MB": lambda: b'data: {"choices":[]}           \n\n' * 250_000,
    "a stream, empty lines, 8 MB": lambda: b"\n" * (8 * MB),
    "a stream, CRs, 8 MB": lambda: b"\r\n" * (4 * MB),
    "a stream, comments, 8 MB": lambda: b":\n\n" * (8 * MB // 3),
    "a stream in chunks of 1 byte": lambda: token_events(256 * KB),
    "a responses stream, its last event 4 MB": lambda: responses_last(4 * MB),
    "a responses stream, its last event 200 KB": lambda: responses_last(200 * KB),
    "models": lambda: filled(3_900 * KB, '{"id":"m"}', before='{"data":[', after="]}"),
}


# ---------------------------------------------------------------------- the other process


class World:
    """Clients and an instance. Told by a pipe what to do next."""

    def __init__(self) -> None:
        self._answers: dict[str, bytes] = {}

    def _answer(self, name: str) -> bytes:
        if name not in self._answers:
            body = ANSWERS[name]()
            kind = b"text/event-stream" if "stream" in name else b"application/json"
            head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n" % kind
            if "stream" in name:
                n = 1 if "1 byte" in name else 256 * KB
                chunks = [
                    b"%x\r\n%s\r\n" % (len(body[at : at + n]), body[at : at + n]) for at in range(0, len(body), n)
                ]
                self._answers[name] = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n"
            else:
                self._answers[name] = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        return self._answers[name]

    async def script(self, call: Call) -> None:
        await call.send(self._answer(call.header("x-answer") or SHORT))

    async def serve(self, pipe: Connection) -> None:
        async with FakeUpstream(self.script) as one, FakeUpstream(self.script) as other:
            pipe.send([one.url, other.url])
            await asyncio.to_thread(self._clients, pipe)

    def _clients(self, pipe: Connection) -> None:
        while (order := pipe.recv()) is not None:
            port, kind_name, rounds = order
            kind = next(kind for kind in _kinds() if kind.name == kind_name)
            body = kind.body()
            self._answer(kind.answer)
            for _ in range(rounds):
                pipe.recv()
                try:
                    pipe.send(self._ask(port, kind, body))
                except OSError as error:
                    pipe.send(repr(error))

    @staticmethod
    def _ask(port: int, kind: Kind, body: bytes) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Content-Type": "application/json", "x-answer": kind.answer, **dict(kind.headers)}
        headers["X-Request-Id"] = "steps-last"
        if kind.chunk_bytes:
            chunks = (body[at : at + kind.chunk_bytes] for at in range(0, len(body), kind.chunk_bytes))
            framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
            headers["Transfer-Encoding"] = "chunked"
            connection.putrequest(kind.method, kind.target, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(framed)
        else:
            connection.request(kind.method, kind.target, body or None, headers)
        answer = connection.getresponse()
        n_bytes = 0
        while data := answer.read1(256 * KB):
            n_bytes += len(data)
        connection.close()
        return f"{answer.status}, {n_bytes}"


def _world(pipe: Connection) -> None:
    asyncio.run(World().serve(pipe))


# ---------------------------------------------------------------------- measuring


@dataclass(slots=True)
class Longest:
    """Of one kind: ms of its longest step and between two, and what that was."""

    step_ms: float
    between_ms: float
    what: str
    status: str


async def measure(
    app: App, watch: Stopwatch, pipe: Connection, kinds: Sequence[Kind], rounds: int
) -> dict[str, Longest]:
    found: dict[str, Longest] = {}
    for kind in kinds:
        admin_port = app.admin_port or 0
        pipe.send((admin_port if kind.is_admin else app.port, kind.name, rounds))
        for _ in range(rounds):
            await asyncio.sleep(0.05)
            watch.reset()
            pipe.send("now")
            status = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            await asyncio.sleep(0.02)
            longest = Longest(watch.longest_ns / 1e6, watch.between_ns / 1e6, watch.told(), status)
            if kind.name not in found or longest.step_ms < found[kind.name].step_ms:
                found[kind.name] = longest
        one = found[kind.name]
        mark = "!" if one.step_ms > LIMIT_MS else " "
        print(
            f"{mark} {kind.name:45} {one.step_ms:7.2f} {one.between_ms:7.2f}  {one.status:15} {one.what}",
            file=sys.stderr,
        )
    return found


@asynccontextmanager
async def router(urls: Sequence[str], lane: str) -> AsyncIterator[App]:
    settings = Settings.model_validate(
        {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"host": "127.0.0.1", "port": 0},
            "fleet": {"instances": [{"name": f"i{n}", "url": url} for n, url in enumerate(urls)]},
            "lane": lane,
        }
    )
    async with running(settings) as app:
        while not all(state.models for state in app.router.fleet.states()):
            await asyncio.sleep(0.02)
        collector.settle()
        yield app


@contextmanager
def world() -> Iterator[tuple[Connection, list[str]]]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_world, args=(there,), daemon=True)
    process.start()
    there.close()  # so that its end is noticed
    try:
        yield here, here.recv()
    finally:
        here.send(None)
        process.join(10)
        process.kill()


def run(loop: str, lane: str, kinds: Sequence[Kind], rounds: int) -> dict[str, Longest]:
    watch = Stopwatch()
    make: Callable[[], asyncio.AbstractEventLoop]
    if loop == "uvloop":
        TimedUvloop.watch = watch
        time_protocols(watch)
        make = TimedUvloop
    else:
        time_handles(watch)
        make = asyncio.new_event_loop
    for holder, names in PARTS:
        for name in names:
            watch.time(holder, name)
    gc.callbacks.append(watch.time_garbage)

    async def all_of_it(pipe: Connection, urls: list[str]) -> dict[str, Longest]:
        async with router(urls, lane) as app:
            return await measure(app, watch, pipe, kinds, rounds)

    memory.bound_heap()
    with world() as (pipe, urls), open(os.devnull, "w") as nowhere, asyncio.Runner(loop_factory=make) as runner:
        handler = configure_logs("text", "info", nowhere)
        try:
            return runner.run(all_of_it(pipe, urls))
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps",
        description="Longest steps of the event loop, in CPU ms, by kind of exchange.",
    )
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--lane", choices=("auto", "aiohttp"), default="auto")
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many counts (default %(default)s)")
    parser.add_argument("--only", default="", help="kinds with this in their name")
    parser.add_argument("--above", type=float, default=0.0, metavar="MS", help="show no shorter ones")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in _kinds() if options.only in kind.name]
    found = run(options.loop, options.lane, kinds, options.rounds)
    rows = [
        [name, f"{one.step_ms:.2f}", f"{one.between_ms:.2f}", one.what]
        for name, one in sorted(found.items(), key=lambda item: -item[1].step_ms)
        if one.step_ms >= options.above
    ]
    print(
        markdown([f"{options.loop}, {options.lane}", "step, ms", "loop, ms", "the longest step, ms of its parts"], rows)
    )
    return any(one.step_ms > LIMIT_MS for one in found.values())


if __name__ == "__main__":
    sys.exit(main())
