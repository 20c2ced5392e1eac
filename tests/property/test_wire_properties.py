"""Framings: whatever the cuts, the payload is the same, and what is no framing is refused without another error."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from prefixroute.http.wire.bodies import ChunkedBody
from prefixroute.http.wire.heads import MalformedError, parse_answer_head

pieces = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
fields = st.lists(
    st.tuples(st.from_regex(rb"X-[a-z]{1,5}", fullmatch=True), st.from_regex(rb"[a-z]{0,5}", fullmatch=True))
)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({0, len(data), *(n % (len(data) + 1) for n in at)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@given(pieces, fields, st.binary(max_size=10), st.lists(st.integers(0, 10_000), max_size=12))
def test_chunks_come_out_as_they_went_in(
    payload: list[bytes], trailers: list[tuple[bytes, bytes]], rest: bytes, at: list[int]
) -> None:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in payload)
    framed += b"0\r\n" + b"".join(b"%s: %s\r\n" % field for field in trailers) + b"\r\n"
    body = ChunkedBody()
    out = b""
    for part in cut(framed, at):
        assert not body.is_done
        out += body.feed(part)
    assert body.is_done
    assert out == b"".join(payload)
    assert body.trailers == trailers
    whole = ChunkedBody()
    assert whole.feed(framed + rest) == out
    assert whole.rest == rest


def plainly_decoded(chunks: bytes) -> tuple[bytes, bool]:
    """The payload of whole chunks, and whether the last one is among them, read as simply as can be."""
    payload = b""
    while chunks:
        line, _, chunks = chunks.partition(b"\r\n")
        assert line.isalnum()
        n_bytes = int(line, 16)
        payload += chunks[:n_bytes]
        assert chunks[n_bytes : n_bytes + 2] == b"\r\n"
        chunks = chunks[n_bytes + 2 :]
        if not n_bytes:
            assert not chunks
            return payload, True
    return payload, False


chunk_heads = st.sampled_from([b"%x\r\n", b"%X\r\n", b"0%x\r\n", b"%x;a=b\r\n", b"%x \r\n"])


@given(
    st.lists(st.tuples(chunk_heads, st.binary(min_size=1, max_size=20)), max_size=6),
    st.sampled_from([b"0\r\n\r\n", b"00\r\n\r\n", b"0;a\r\n\r\n", b"0\r\nA: b\r\n\r\n", b"0\r\n\r\nrest"]),
    st.lists(st.integers(0, 10_000), max_size=6),
)
def test_chunks_that_are_written_as_they_came_say_what_the_payload_says(
    chunks: list[tuple[bytes, bytes]], end: bytes, at: list[int]
) -> None:
    body = ChunkedBody()
    for part in cut(b"".join(b"%s%s\r\n" % (head % len(piece), piece) for head, piece in chunks) + end, at):
        if body.is_done:
            break
        piece = body.feed(part)
        if body.chunks is not None:
            assert plainly_decoded(body.chunks) == (piece, body.is_done)


@given(st.lists(st.sampled_from([b"0", b"1", b"a", b"\r", b"\n", b"\r\n", b";", b"x", b" ", b"\x00"]), max_size=30))
def test_no_bytes_are_worse_than_malformed(data: list[bytes]) -> None:
    body = ChunkedBody()
    try:
        for part in data:
            if body.is_done:
                break
            body.feed(part)
    except MalformedError:
        return
    whole = ChunkedBody()
    whole.feed(b"".join(data))
    assert whole.is_done == body.is_done


@given(st.lists(st.sampled_from([b"HTTP/1.1 200 OK", b"A", b": ", b"b", b"\r\n", b"\n", b" ", b"\r", b"\x00", b":"])))
def test_a_head_is_read_whole_or_refused(parts: list[bytes]) -> None:
    block = b"".join(parts) + b"\r\n\r\n"
    end = block.index(b"\r\n\r\n") + 4
    try:
        head = parse_answer_head(block[:end])
    except MalformedError:
        return
    for name, value in head.headers:
        assert not set(name) & set(b" \t\r\n:\x00")
        assert not set(value) & set(b"\r\n\x00")
        assert value == value.strip(b" \t")
