"""What it costs to remember answers: `python -m benchmarks.answers --help`.

Streams of a token an event, as vLLM writes them, go through the watcher piece by piece. `kept` is what a piece costs
that is only kept; `read` what all of an answer's pieces cost together, that being spread over the stream; `longest` the
longest single stop of it for everybody else; `end` what is left to do when the answer is whole: the rest, the key
material, the chain of hashes, the index. With the garbage collector off; medians over the rounds.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter_ns

import orjson

from benchmarks.tables import markdown
from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance
from prefixroute.core.policies.blind import LeastOutstanding
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.core.router import Router
from prefixroute.demo import words
from prefixroute.http.transcript import Transcript

HEADINGS = ("answer", "bytes a piece", "kept, µs a piece", "read, µs a piece", "longest, ms", "end, ms")
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
HEAD = {"id": f"chatcmpl-{'0123456789abcdef' * 2}", "object": "chat.completion.chunk", "created": 1753900000}
QUESTION = [{"role": "user", "content": words.text("question", 2_000)}]


def chat(texts: Sequence[str]) -> list[bytes]:
    def event(text: str, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish, "token_ids": None}
        return b"data: %b\n\n" % orjson.dumps({**HEAD, "model": "meta-llama/Llama-3.1-8B", "choices": [choice]})

    return [*map(event, texts), event("", "stop"), b"data: [DONE]\n\n"]


def messages(texts: Sequence[str]) -> list[bytes]:
    events: list[dict[str, object]] = [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": t}} for t in texts),
        {"type": "message_stop"},
    ]
    return [b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), orjson.dumps(event)) for event in events]


def responses(texts: Sequence[str]) -> list[bytes]:
    place = {"item_id": f"msg_{'0123456789abcdef' * 2}", "output_index": 0, "content_index": 0, "logprobs": []}
    part = {"type": "output_text", "text": "".join(texts), "annotations": []}
    item = {"type": "message", "role": "assistant", "content": [part]}
    events: list[dict[str, object]] = [
        *({"type": "response.output_text.delta", **place, "delta": text} for text in texts),
        {"type": "response.completed", "response": {"status": "completed", "output": [item]}},
    ]
    return [b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), orjson.dumps(event)) for event in events]


def document(texts: Sequence[str]) -> list[bytes]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "".join(texts)}, "finish_reason": "stop"}
    return [orjson.dumps({**HEAD, "choices": [choice]})]


Answer = tuple[str, Api, dict[str, object], Callable[[Sequence[str]], list[bytes]]]
ANSWERS: list[Answer] = [
    ("chat", Api.CHAT, {"messages": QUESTION}, chat),
    ("messages", Api.MESSAGES, {"messages": QUESTION}, messages),
    ("responses", Api.RESPONSES, {"input": QUESTION}, responses),
    ("chat, not streamed", Api.CHAT, {"messages": QUESTION}, document),
]


def measured(prompt: Prompt, pieces: Sequence[bytes], router: Router) -> tuple[float, float, float, float]:
    """One answer: µs of a piece that is kept, of all pieces, ms of the longest one, and of the end."""
    clock = perf_counter_ns
    headers = SSE if len(pieces) > 1 else JSON
    transcript = Transcript.of(prompt, headers)
    assert transcript is not None
    with router.lease(router.read(prompt), now_s=0.0) as lease:
        began_ns = clock()
        for piece in pieces:
            transcript.see(piece)
        read_ns = clock() - began_ns
        began_ns = clock()
        material = transcript.material()
        assert material is not None
        lease.computed(router.continued(lease.request, material))
        end_ns = clock() - began_ns
    transcript = Transcript.of(prompt, headers)
    assert transcript is not None
    each_ns = []
    for piece in pieces:
        began_ns = clock()
        transcript.see(piece)
        each_ns.append(clock() - began_ns)
    few = pieces[:50]
    transcript = Transcript.of(prompt, headers)
    assert transcript is not None
    began_ns = clock()
    for piece in few:
        transcript.see(piece)
    kept_ns = (clock() - began_ns) / len(few)
    return kept_ns / 1e3, read_ns / len(pieces) / 1e3, max(each_ns) / 1e6, end_ns / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.answers", description="The cost of remembering answers."
    )
    parser.add_argument("--tokens", type=int, default=2_000, help="of an answer (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="(default %(default)s)")
    options = parser.parse_args(arguments)
    texts = [words.text(f"{number}", 1) for number in range(options.tokens)]
    router = Router([Instance("gpu-0", "http://10.0.0.1:8000", 0)], LeastOutstanding(), BlockHasher(256, 7), Random(7))
    router.fleet.probe_passed("gpu-0")
    rows = []
    gc.disable()
    for name, api, body, make in ANSWERS:
        prompt, pieces = read_prompt(api, orjson.dumps(body)), make(texts)
        rounds = [measured(prompt, pieces, router) for _ in range(options.rounds)]
        kept, read, longest, end = (statistics.median(figures) for figures in zip(*rounds, strict=True))
        size = sum(map(len, pieces)) / len(pieces)
        rows.append([name, f"{size:,.0f}", f"{kept:.2f}", f"{read:.2f}", f"{longest:.2f}", f"{end:.2f}"])
    print(markdown(HEADINGS, rows))


if __name__ == "__main__":
    main()
