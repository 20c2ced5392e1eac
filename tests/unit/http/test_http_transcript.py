"""Answers as they go by: cut anywhere, of any length, and never kept whole."""

import json
import tracemalloc

import pytest

from prefixroute.core.canonical import turns_key
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.http.events import events_of
from prefixroute.http.transcript import Transcript

SSE = [(b"Content-Type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
CHAT = read_prompt(Api.CHAT, b'{"messages":[{"role":"user","content":"?"}]}')


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x" * 40, "choices": [choice]}).encode() + b"\n\n"


def material(prompt: Prompt, headers: list[tuple[bytes, bytes]], *pieces: bytes) -> bytes | None:
    transcript = Transcript.of(prompt, headers)
    assert transcript is not None
    for piece in pieces:
        transcript.see(piece)
    return transcript.material()


def said(text: str) -> bytes:
    return turns_key([{"role": "assistant", "content": text}])


# Comments, fields that are none of ours, data of several lines, no space after the colon, both line ends.
STREAM = (
    b": ping\n\n" + event("Gr\u00fc\u00df ") + b"id: 7\nevent: x\nretry: 1\n"
    b'data: {"choices":\ndata: [{"delta": {"content": "dich"}}]}\n\n'
    b'data:{"choices":[{"delta":{"content":"!"}}]}\r\n\r\n: bye\r\n\r\n\n'
    + event("", "stop").replace(b"\n", b"\r\n")
    + b"data: [DONE]\n\n"
)


def test_a_stream_may_be_cut_anywhere() -> None:
    expected = said("Gr\u00fc\u00df dich!")
    assert material(CHAT, SSE, STREAM) == expected
    assert material(CHAT, SSE, *(STREAM[at : at + 1] for at in range(len(STREAM)))) == expected
    at_once, _ = events_of(STREAM)
    for at in range(len(STREAM) + 1):
        assert material(CHAT, SSE, STREAM[:at], STREAM[at:]) == expected
        # As it is when a piece is the last to be read together with others.
        found, rest = events_of(STREAM[:at])
        assert found + events_of(rest + STREAM[at:])[0] == at_once


def test_deltas_that_follow_one_another_are_one_event() -> None:
    texts = [" a", ' "b"', "\\", "\n", "", " c"]
    found, rest = events_of(b"".join([*map(event, texts), event("", "stop"), b"data: [DO"]))
    assert rest == b"data: [DO"
    said = [json.loads(one)["choices"][0]["delta"]["content"] for one in found]
    assert "".join(said) == "".join(texts)
    assert len(found) < len(texts)
    assert len(events_of(b"".join(map(event, texts)), by_deltas=False)[0]) == len(texts)


def test_a_text_is_not_appended_where_it_does_not_end_its_delta() -> None:
    """The string that a text goes on in must be the same one."""
    alike, other = event("a"), event("b").replace(b'"b"', b'"b", "reasoning": "c"')
    alone = [json.loads(one[6:]) for one in (alike, other, alike)]
    for data in (alike + other + alike, alike + alike + other + alike + alike):
        found, _ = events_of(data)
        deltas = [json.loads(one)["choices"][0]["delta"] for one in found]
        assert alone[1]["choices"][0]["delta"] in deltas
        assert {*"".join(delta["content"] for delta in deltas)} == {"a", "b"}
        assert len(deltas) == 3


def test_a_long_response_is_read_at_its_end() -> None:
    prompt = read_prompt(Api.RESPONSES, b'{"input":"?"}')
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}
    end = {"type": "response.completed", "response": {"status": "completed", "output": [item]}}
    delta = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"Hi"}\n\n'
    stream = delta * 1_000 + b"event: response.completed\ndata: %b\n\n" % json.dumps(end).encode()
    for n in (1, 7, 100, 1_000):
        pieces = [stream[at : at + n] for at in range(0, len(stream), n)]
        assert material(prompt, SSE, *pieces) == turns_key([item])
        assert material(prompt, SSE, *(piece.replace(b"\n", b"\r\n") for piece in pieces)) == turns_key([item])


def test_a_text_that_is_sent_whole_again_and_again_is_not_appended() -> None:
    prompt = read_prompt(Api.GENERATE, b'{"text":"?"}')
    events = [b'data: {"text":"%b"}\n\n' % text for text in (b"H", b"He", b"Hel")]
    assert material(prompt, SSE, *events, b"data: [DONE]\n\n") == b"Hel"


def test_an_event_without_its_last_line_end_counts() -> None:
    assert material(CHAT, SSE, event("Hi", "stop").rstrip()) == said("Hi")


def test_an_answer_that_is_no_stream_is_a_document() -> None:
    document = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Hi"}}]}).encode()
    assert material(CHAT, JSON, document[:9], document[9:]) == said("Hi")
    assert material(CHAT, [], document) == said("Hi")
    assert material(CHAT, SSE, document) is None
    assert material(CHAT, JSON, event("Hi", "stop")) is None
    assert material(CHAT, JSON) is None


def test_a_long_stream_is_read_as_it_goes_and_not_kept() -> None:
    words = [f" word{n}" for n in range(20_000)]
    stream = b"".join([*map(event, words), event("", "stop")])
    transcript = Transcript.of(CHAT, SSE)
    assert transcript is not None
    tracemalloc.start()
    for at in range(0, len(stream), 1_000):
        transcript.see(stream[at : at + 1_000])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 2.6 MB of events, of which their words are 1.2 MB as strings.
    assert most < 2_500_000
    assert transcript.material() == said("".join(words))


def test_a_stream_without_end_is_given_up() -> None:
    piece = event("x" * 10_000)
    assert material(CHAT, SSE, *[piece] * 1_600, event("", "stop")) is not None
    assert material(CHAT, SSE, *[piece] * 1_700, event("", "stop")) is None


@pytest.mark.parametrize("short", [b"\n", b"\r\n", b":\n\n", b"data:\n\n", b"data: {}\n\n", b'"text":"x"\n\n'])
@pytest.mark.parametrize("piece_bytes", [4_096, 262_144])
def test_a_flood_of_short_events_is_given_up(monkeypatch: pytest.MonkeyPatch, short: bytes, piece_bytes: int) -> None:
    n_bytes = 0

    def counted(data: bytes, *, by_deltas: bool = True) -> tuple[list[bytes], bytes]:
        nonlocal n_bytes
        n_bytes += len(data)
        return events_of(data, by_deltas=by_deltas)

    monkeypatch.setattr("prefixroute.http.transcript.events_of", counted)
    piece = short * (piece_bytes // len(short))
    assert material(CHAT, SSE, *[piece] * (2**20 // piece_bytes), event("Hi", "stop")) is None
    assert n_bytes <= 300_000


def test_some_short_events_do_no_harm() -> None:
    assert material(CHAT, SSE, b":\n\n" * 500, event("Hi"), b"\n" * 500, event("!", "stop")) == said("Hi!")
    shortest = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    assert material(CHAT, SSE, *[shortest] * 20_000, event("", "stop")) == said("x" * 20_000)


@pytest.mark.parametrize("headers", [SSE, JSON])
def test_what_is_too_long_to_be_read_at_once_is_given_up(headers: list[tuple[bytes, bytes]]) -> None:
    long = event("x" * 300_000, "stop")
    if headers is JSON:
        long = json.dumps({"choices": [{"message": {"content": "x" * 300_000}}]}).encode()
    assert material(CHAT, headers, long) is None
    assert material(CHAT, headers, *(long[at : at + 1_000] for at in range(0, len(long), 1_000))) is None
    assert material(CHAT, headers, long, event("Hi", "stop")) is None


def test_an_answer_that_will_not_follow_its_prompt_is_not_watched() -> None:
    prompt = read_prompt(Api.COMPLETIONS, b'{"prompt":[1,2,3]}')
    assert Transcript.of(prompt, JSON) is None


def test_a_long_event_in_small_pieces_is_not_looked_through_at_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    n_bytes = 0

    def counted(data: bytes, *, by_deltas: bool = True) -> tuple[list[bytes], bytes]:
        nonlocal n_bytes
        n_bytes += len(data)
        return events_of(data, by_deltas=by_deltas)

    monkeypatch.setattr("prefixroute.http.transcript.events_of", counted)
    stream = event("long " * 40_000) + event("", "stop")
    found = material(CHAT, SSE, *(stream[at : at + 64] for at in range(0, len(stream), 64)))
    assert found == said("long " * 40_000)
    assert n_bytes < 4 * len(stream)
