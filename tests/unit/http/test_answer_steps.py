"""Reading answers is a matter of milliseconds: what would take longer is not read."""

import orjson
import pytest

from prefixroute.core.prompt import MAX_PARSED_ITEMS, Api, read_prompt
from prefixroute.http.events import FloodError, events_of
from prefixroute.http.transcript import Transcript
from prefixroute.http.wire.bodies import ChunkedBody
from prefixroute.http.wire.heads import MalformedError

PROMPT = read_prompt(Api.CHAT, b'{"messages":[{"role":"user","content":"?"}]}')


def material(kind: bytes, *pieces: bytes) -> bytes | None:
    transcript = Transcript.of(PROMPT, [(b"content-type", kind)])
    assert transcript is not None
    for piece in pieces:
        transcript.see(piece)
    return transcript.material()


@pytest.mark.parametrize(("n", "is_read"), [(MAX_PARSED_ITEMS - 10, True), (MAX_PARSED_ITEMS + 1, False)])
def test_a_document_of_very_many_objects_is_not_read(n: int, is_read: bool) -> None:
    # Not a part of what was said.
    padding = "x" * 70_000
    choice = {"message": {"content": "Hi"}, "logprobs": [{}] * n, "finish_reason": "stop", "padding": padding}
    said = material(b"application/json", orjson.dumps({"choices": [choice]}))
    assert (said is not None) is is_read


@pytest.mark.parametrize(("n", "is_read"), [(MAX_PARSED_ITEMS - 10, True), (MAX_PARSED_ITEMS + 1, False)])
def test_nor_is_such_an_event(n: int, is_read: bool) -> None:
    choice = {"delta": {"content": "Hi"}, "logprobs": [{}] * n, "finish_reason": "stop", "padding": "x" * 70_000}
    said = material(b"text/event-stream", b"data: %b\n\n" % orjson.dumps({"choices": [choice]}))
    assert (said is not None) is is_read


def test_events_far_shorter_than_any_are_not_gone_through() -> None:
    with pytest.raises(FloodError):
        events_of(b'data: {"choices":[]}           \n\n' * 8_000)


def test_so_many_chunks_are_read_at_once() -> None:
    body, payload, n_steps = ChunkedBody(), b"", 0
    data = b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\nrest"
    while data:
        piece = body.feed(data)
        assert len(piece) <= 2_048
        payload, data, n_steps = payload + piece, body.unfed, n_steps + 1
    assert (payload, body.is_done, body.rest, n_steps) == (b"x" * 10_000, True, b"rest", 5)


@pytest.mark.parametrize(
    "garbage",
    [
        b"g\r\nhi\r\n",
        b"2\r\nhiX\r\n",
        b"2" * 5_000,
        b"0\r\nno trailer\r\n\r\n",
        b"0\r\nX: %s" % (b"y" * 70_000),
    ],
)
@pytest.mark.parametrize("before", [b"3\r\nabc\r\n", b"1\r\na\r\n2\r\nbc\r\n"])
def test_what_comes_before_garbage_counts(before: bytes, garbage: bytes) -> None:
    body = ChunkedBody()
    payload = body.feed(before + garbage)
    assert payload.startswith(b"abc")
    assert (body.is_done, body.chunks) == (False, None)
    with pytest.raises(MalformedError):
        body.feed(body.unfed)
    assert not body.is_done
