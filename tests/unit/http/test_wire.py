"""Heads and framings of answers, from bytes."""

import pytest

from prefixroute.http.headers import relayed, rendered
from prefixroute.http.wire.bodies import BodyReader, ChunkedBody, CountedBody, EndlessBody, answer_body
from prefixroute.http.wire.heads import AnswerHead, MalformedError, parse_answer_head


def head_of(*headers: tuple[bytes, bytes], status: int = 200, minor: int = 1) -> AnswerHead:
    return parse_answer_head(b"HTTP/1.%d %d OK\r\n%s\r\n" % (minor, status, rendered(headers)))


def fed(body: BodyReader, data: bytes) -> bytes:
    return b"".join(body.feed(data[at : at + 1]) for at in range(len(data)))


def test_a_head_keeps_order_case_and_repeats() -> None:
    lines = b"B: 1\r\na:2\r\nB:\t 3 \t\r\nEmpty:\r\nBlank: \t\r\nX: \xff a:b\r\n"
    head = parse_answer_head(b"HTTP/1.1 299 Odd  reason\r\n" + lines + b"\r\n")
    assert (head.minor, head.status, head.reason) == (1, 299, b"Odd  reason")
    assert head.headers == [
        (b"B", b"1"),
        (b"a", b"2"),
        (b"B", b"3"),
        (b"Empty", b""),
        (b"Blank", b""),
        (b"X", b"\xff a:b"),
    ]
    assert head.index == {b"b": b"1", b"a": b"2", b"empty": b"", b"blank": b"", b"x": b"\xff a:b"}
    assert head.lines == lines
    assert head.repeats


@pytest.mark.parametrize("line", [b"HTTP/1.0 200 OK", b"HTTP/1.1 200 ", b"HTTP/1.1 200"])
def test_a_status_line_may_be_short(line: bytes) -> None:
    head = parse_answer_head(line + b"\r\n\r\n")
    assert (head.status, head.headers) == (200, [])


@pytest.mark.parametrize(
    "block",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"HTTP/1.1 200 O\x00K\r\n\r\n",
        b"HTTP/1.1 200 OK\nA: b\n\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA B: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n A: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b \r\nC\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\nA: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\rA: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\rc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\nc: d\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: \x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 257 + b"\r\n",
    ],
)
def test_a_head_that_may_be_read_in_two_ways_is_malformed(block: bytes) -> None:
    with pytest.raises(MalformedError):
        parse_answer_head(block)


@pytest.mark.parametrize("end", [b"", b" ", b"x ", b"\x00", b"x\r", b"\n"])
def test_a_long_line_of_blanks_is_read_once(end: bytes) -> None:
    """With the square of its length, this would take minutes."""
    block = b"HTTP/1.1 200 OK\r\nA:" + b" " * 250_000 + end + b"\r\n\r\n"
    try:
        assert parse_answer_head(block).headers == [(b"A", end.strip())]
    except MalformedError:
        assert set(end) & set(b"\x00\r\n")


def test_headers_are_rendered_as_they_are() -> None:
    assert rendered([(b"b", b"1"), (b"A", b"2"), (b"b", b"\xff")]) == b"b: 1\r\nA: 2\r\nb: \xff\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"Date: x\r\nContent-Length: 5\r\n",
        b"Set-Cookie: a\r\nset-cookie: b\r\n",
        b"Transfer-Encoding: chunked\r\nA: b\r\n",
        b"TRANSFER-ENCODING: chunked\r\nContent-Length: 5\r\nA: b\r\n",
        b"Set-Cookie: a\r\nTransfer-Encoding: chunked\r\nSet-Cookie: b\r\n",
        b"A: b\r\nConnection: Close\r\n",
        b"connection: keep-alive\r\nKeep-Alive: timeout=5\r\nA: b\r\n",
        b"Upgrade: x\r\nTE: x\r\nProxy-Connection: x\r\nProxy-Authenticate: x\r\nProxy-Authorization: x\r\nB: c\r\n",
    ],
)
def test_the_lines_that_go_on_are_those_that_pass_one_by_one(lines: bytes) -> None:
    head = parse_answer_head(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n")
    assert head.relayed == rendered(relayed(head.headers))


@pytest.mark.parametrize(
    "lines",
    [
        b"Connection: x\r\nX: y\r\n",
        b"Connection: close, x\r\nX: y\r\n",
        b"Connection: close\r\nConnection: x\r\nX: y\r\n",
        b"Trailer: x\r\n",
        b"Transfer-Encoding: chunked\r\nTrailer: x\r\n",
    ],
)
def test_where_a_line_names_others_each_header_is_looked_at(lines: bytes) -> None:
    assert parse_answer_head(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n").relayed is None


def test_lines_that_go_on_unchanged_are_those_that_came() -> None:
    lines = b"a:b\r\nC:  d \r\n"
    assert parse_answer_head(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n").relayed == lines


@pytest.mark.parametrize(
    ("head", "method", "kind"),
    [
        (head_of((b"content-length", b"5")), b"GET", CountedBody),
        (head_of((b"Transfer-Encoding", b"Chunked")), b"GET", ChunkedBody),
        (head_of(), b"GET", EndlessBody),
        (head_of(minor=0), b"GET", EndlessBody),
    ],
)
def test_the_head_tells_the_framing(head: AnswerHead, method: bytes, kind: type) -> None:
    body = answer_body(head, method)
    assert type(body) is kind
    assert not body.is_done


@pytest.mark.parametrize("headers", [(), ((b"Content-Length", b"5"),), ((b"Transfer-Encoding", b"chunked"),)])
@pytest.mark.parametrize(("status", "method"), [(204, b"GET"), (304, b"GET"), (200, b"HEAD")])
def test_some_answers_have_no_body_whatever_they_say(
    headers: tuple[tuple[bytes, bytes], ...], status: int, method: bytes
) -> None:
    assert answer_body(head_of(*headers, status=status), method).is_done


@pytest.mark.parametrize(
    "headers",
    [
        [(b"Content-Length", b"5"), (b"Transfer-Encoding", b"chunked")],
        [(b"Content-Length", b"5"), (b"content-length", b"5")],
        [(b"Content-Length", b"+5")],
        [(b"Content-Length", b"5, 5")],
        [(b"Content-Length", b"")],
        [(b"Content-Length", b"0x5")],
        [(b"Content-Length", b"\xd9\xa5")],
        [(b"Content-Length", b"9" * 20)],
        [(b"Transfer-Encoding", b"gzip")],
        [(b"Transfer-Encoding", b"gzip, chunked")],
        [(b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"chunked")],
    ],
)
def test_a_framing_that_is_a_matter_of_opinion_is_malformed(headers: list[tuple[bytes, bytes]]) -> None:
    for status, method in ((200, b"GET"), (304, b"GET"), (200, b"HEAD")):
        with pytest.raises(MalformedError):
            answer_body(head_of(*headers, status=status), method)


def test_chunks_of_an_old_version_are_malformed() -> None:
    with pytest.raises(MalformedError):
        answer_body(head_of((b"Transfer-Encoding", b"chunked"), minor=0), b"GET")


def test_a_counted_body_ends_where_it_says() -> None:
    body = CountedBody(5)
    assert (body.feed(b"hel"), body.is_done, body.end_of_connection()) == (b"hel", False, False)
    assert (body.feed(b"lo!"), body.is_done, body.rest) == (b"lo", True, b"!")


def test_an_endless_body_ends_with_its_connection() -> None:
    body = EndlessBody()
    assert (body.feed(b"a"), body.is_done, body.end_of_connection()) == (b"a", False, True)


CHUNKS = b"5;name=value\r\nhello\r\n00a \r\n, world!!!\r\n0\r\nX-Sum: 1\r\nContent-Length: 3\r\n\r\nrest"


def test_chunks_are_the_same_however_they_come() -> None:
    whole = ChunkedBody()
    assert whole.feed(CHUNKS) == b"hello, world!!!"
    single = ChunkedBody()
    assert fed(single, CHUNKS[:-4]) == b"hello, world!!!"
    assert whole.is_done
    assert single.is_done
    assert whole.rest == b"rest"
    assert whole.trailers == single.trailers == [(b"X-Sum", b"1")]


@pytest.mark.parametrize(
    ("data", "piece"),
    [
        (b"5\r\nhello\r\n", b"hello"),
        (b"00A\r\n0123456789\r\n", b"0123456789"),
        (b"5\r\nhello\r\n1\r\n!\r\n", b"hello!"),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"0\r\n\r\n", b""),
        (b"2\r\n\r\n\r\n", b"\r\n"),
    ],
)
def test_whole_chunks_may_be_written_as_they_came(data: bytes, piece: bytes) -> None:
    body = ChunkedBody()
    assert body.feed(b"1\r\nx\r\n") == b"x"
    assert body.feed(data) == piece
    assert body.chunks is data


@pytest.mark.parametrize(
    "data",
    [
        b"5;a=b\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"5\r\nhello\r\n5;a\r\nhello\r\n",
        b"5\r\nhello\r\n5",
        b"5\r\nhello\r\n5\r\nhel",
        b"5\r\nhello\r",
        b"5\r\nhel",
        b"5\r\nhello\r\n0\r\n",
        b"5\r\nhello\r\n0;a\r\n\r\n",
        b"5\r\nhello\r\n0\r\nA: b\r\n\r\n",
        b"5\r\nhello\r\n0\r\n\r\nrest",
    ],
)
def test_anything_else_is_framed_anew(data: bytes) -> None:
    body = ChunkedBody()
    body.feed(data)
    assert body.chunks is None


@pytest.mark.parametrize("begun", [b"5\r\nhel", b"5\r\nhello", b"5\r\nhello\r", b"5\r", b"5"])
def test_chunks_count_as_whole_again_after_one_that_was_cut(begun: bytes) -> None:
    body = ChunkedBody()
    body.feed(begun)
    assert body.chunks is None
    body.feed(b"5\r\nhello\r\n"[len(begun) :])
    assert body.chunks is None
    body.feed(b"1\r\n!\r\n")
    assert body.chunks == b"1\r\n!\r\n"


def test_one_chunk_in_one_piece_is_not_copied() -> None:
    data = b"x" * 100
    body = CountedBody(200)
    assert body.feed(data) is data


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b"1_0\r\n",
        b" 1\r\n",
        b"1 2\r\n",
        b"g\r\n",
        b"11111111111111111\r\n",
        b"1;\x00\r\n",
        b"1\rx\r\n",
        b"1\nx\r\n",
        b"1\r\nxy\r\n",
        b"1\r\nx\n0\r\n\r\n",
        b"1\r\nx\rx",
        b"1;" + b"x" * 5000,
        b"0\r\nno field\r\n\r\n",
        b"0\r\n" + b"A: b\r\n" * 300 + b"\r\n",
        b"0\r\nA: " + b"b" * 70_000,
    ],
)
def test_odd_chunks_are_malformed_however_they_come(data: bytes) -> None:
    body = ChunkedBody()
    with pytest.raises(MalformedError):
        # What came before counts: then it is the rest that is malformed.
        body.feed(body.unfed if body.feed(data) else b"")
    with pytest.raises(MalformedError):
        fed(ChunkedBody(), data)


def test_chunks_that_break_off_are_not_complete() -> None:
    for end in range(len(CHUNKS) - 5):
        body = ChunkedBody()
        body.feed(CHUNKS[:end])
        assert not body.end_of_connection(), CHUNKS[:end]
