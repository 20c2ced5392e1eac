"""The plain case: each line of its grammar, and what is no line of it."""

import pytest

from prefixroute.http.front.plain import Plain, PlainHead, read_plain
from prefixroute.http.headers import MAX_HEADERS
from prefixroute.http.routes import READ_PATHS

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: router\r\n"
LENGTH = b"Content-Length: 5\r\n"
MAX_BYTES = 65_536


def read(data: bytes, max_header_bytes: int = MAX_BYTES) -> Plain | None:
    found = read_plain(data, max_header_bytes)
    return None if found is None else found[0]


def recognised(data: bytes) -> PlainHead:
    found = read_plain(data, MAX_BYTES)
    assert found is not None
    assert found[1] is not None
    return found[1]


def with_lines(*lines: bytes) -> bytes:
    """A plain head with these lines, each in its own place among the others."""
    return LINE + HOST + b"".join(line + b"\r\n" for line in lines) + LENGTH + b"\r\n"


def test_a_plain_request_is_read_as_it_stands() -> None:
    data = (
        LINE + b"hOsT:router:80\r\nX-B: \t a  b\t \r\nx-a:\xff\r\nContent-length: 17\r\nX-Empty:\r\n\r\nbody and more"
    )
    plain = read(data)
    assert plain is not None
    head, request_id, n_head, n_body = plain
    assert (head.method, head.target, head.path, head.minor) == (
        "POST",
        "/v1/chat/completions",
        "/v1/chat/completions",
        1,
    )
    assert head.headers == [
        (b"hOsT", b"router:80"),
        (b"X-B", b"a  b"),
        (b"x-a", b"\xff"),
        (b"Content-length", b"17"),
        (b"X-Empty", b""),
    ]
    assert (request_id, data[n_head:], n_body) == (None, b"body and more", 17)
    assert head.is_plain
    assert head.fields_for("id")[0] == b"X-B: a  b\r\nx-a: \xff\r\nX-Empty: \r\nx-request-id: id\r\n"


@pytest.mark.parametrize("target", sorted(READ_PATHS))
def test_every_target_whose_body_is_read_is_known(target: bytes) -> None:
    plain = read(b"POST %s HTTP/1.1\r\n" % target + HOST + LENGTH + b"\r\n")
    assert plain is not None
    assert plain[0].target == target.decode()


@pytest.mark.parametrize(
    ("target", "is_known"),
    [
        (b"/endpoints/bot/invocations", True),
        (b"/endpoints/%s/invocations-response-stream" % (b"b" * 63), True),
        (b"/endpoints/bot/openai/v1/chat/completions", True),
        (b"/endpoints/bot/inference-components/one/openai/v1/completions", True),
        (b"/endpoints/bot/async-invocations", False),
        (b"/endpoints/bot/invocations/", False),
        (b"/endpoints//invocations", False),
        (b"/endpoints/bot/openai/v1/models", False),
        (b"/endpoints/bot/openai/v1/../v1/completions", False),
        (b"/endpoints/%s/invocations" % (b"b" * 240), False),
    ],
)
def test_what_is_read_of_endpoints_is_known_too(target: bytes, is_known: bool) -> None:
    plain = read(b"POST %s HTTP/1.1\r\n" % target + HOST + LENGTH + b"\r\n")
    assert (plain is not None and plain[0].target == target.decode()) is is_known


def test_a_simple_query_goes_along() -> None:
    plain = read(b"POST /v1/messages?beta=true HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n")
    assert plain is not None
    assert (plain[0].target, plain[0].path) == ("/v1/messages?beta=true", "/v1/messages")


@pytest.mark.parametrize("query", [b"?", b"?beta=true", b"?a=b&c=d:e/../f~g,h", b"?" + b"a" * 256])
def test_a_simple_query_goes_on_as_sent(query: bytes) -> None:
    plain = read(LINE.replace(b" HTTP", query + b" HTTP") + HOST + LENGTH + b"\r\n")
    assert plain is not None
    assert (plain[0].target, plain[0].path) == ("/v1/chat/completions" + query.decode(), "/v1/chat/completions")


@pytest.mark.parametrize(
    "line",
    [
        b"GET /v1/chat/completions HTTP/1.1\r\n",
        b"PUT /v1/chat/completions HTTP/1.1\r\n",
        b"post /v1/chat/completions HTTP/1.1\r\n",
        b"POST /v1/chat/completions HTTP/1.0\r\n",
        b"POST /v1/chat/completions HTTP/1.2\r\n",
        b"POST /v1/chat/completions HTTP/2.0\r\n",
        b"POST /v1/chat/completions http/1.1\r\n",
        b"POST /v1/chat/completions HTTP/1.1\n",
        b"POST /v1/chat/completions HTTP/1.1 \r\n",
        b"POST /v1/chat/completions  HTTP/1.1\r\n",
        b"POST  /v1/chat/completions HTTP/1.1\r\n",
        b"POST\t/v1/chat/completions HTTP/1.1\r\n",
        b" POST /v1/chat/completions HTTP/1.1\r\n",
        b"\r\nPOST /v1/chat/completions HTTP/1.1\r\n",
        b"POST /v1/chat/completions\r\n",
        b"POST /v1/chat/completions/ HTTP/1.1\r\n",
        b"POST //v1/chat/completions HTTP/1.1\r\n",
        b"POST /v1/./chat/completions HTTP/1.1\r\n",
        b"POST /v1/chat/%63ompletions HTTP/1.1\r\n",
        b"POST /v1/chat/completions?a=%20b HTTP/1.1\r\n",
        b"POST /v1/chat/completions?a#b HTTP/1.1\r\n",
        b"POST /v1/chat/completions?a?b HTTP/1.1\r\n",
        b"POST /v1/chat/completions?%s HTTP/1.1\r\n" % (b"a" * 257),
        b"POST /v1/chat/completions# HTTP/1.1\r\n",
        b"POST http://router/v1/chat/completions HTTP/1.1\r\n",
        b"POST * HTTP/1.1\r\n",
        b"POST /v1/models HTTP/1.1\r\n",
        b"POST /health HTTP/1.1\r\n",
        b"POST /sleep HTTP/1.1\r\n",
        b"POST /v1/audio/transcriptions HTTP/1.1\r\n",
        b"POST /v1/responses/resp_1/cancel HTTP/1.1\r\n",
        b"POST /unknown HTTP/1.1\r\n",
    ],
)
def test_another_request_line_is_in_doubt(line: bytes) -> None:
    assert read(LINE + HOST + LENGTH + b"\r\n") is not None
    assert read(line + HOST + LENGTH + b"\r\n") is None


@pytest.mark.parametrize(
    "line",
    [
        b"Content-Encoding: gzip",
        b"content-encoding: identity",
        b"Expect: 100-continue",
        b"HTTP2-Settings: AAMAAABkAARAAAAA",
        b"Keep-Alive: timeout=5",
        b"Proxy-Connection: keep-alive",
        b"TE: trailers",
        b"Trailer: X-Sum",
        b"TRANSFER-ENCODING: chunked",
        b"Transfer-Encoding:",
        b"Upgrade: h2c",
        b"Connection: close",
        b"Connection: keep-alive, x-hop",
        b"Connection: upgrade",
        b"Connection:",
        b"Content-Type: multipart/form-data; boundary=b",
        b"content-type:\tMultipart/Mixed",
        b"Content-Length: 5",
        b"content-length: 6",
        b"Host: router",
        b"hOST: other",
        b"X-Twice: 1\r\nx-tWICE: 2",
        b"x-request-id: a\r\nx-request-id: a",
        b"Authorization: Bearer a\r\nAuthorization: Bearer b",
        b"X-Nul: a\x00b",
        b"X-Esc: a\x1bb",
        b"X-Del: a\x7fb",
        b"X-Cr: a\rb",
        b"X-Lf: a\nb",
        b"X-Lf: a\n",
        b"X-Fold: a\r\n b",
        b"X-Fold: a\r\n\tb",
        b" X-Begin: a",
        b"X-Space : a",
        b"X-Tab\t: a",
        b"X Inner: a",
        b"X(: a",
        b"X\xc3: a",
        b": a",
        b"no colon",
        b"",
    ],
)
def test_a_doubtful_line_among_the_headers_puts_the_request_in_doubt(line: bytes) -> None:
    assert read(with_lines(b"X-Any: a")) is not None
    assert read(with_lines(line)) is None
    assert read(LINE + HOST + LENGTH + line + b"\r\n\r\n") is None or not line


@pytest.mark.parametrize(
    "line",
    [
        b"Connection: keep-alive",
        b"connection:Keep-Alive\t",
        b"Content-Type: application/json",
        b"Content-Type: text/multipart/",
        b"X-Tab: a\tb",
        b"X-Obs: \x80\xff",
        b"X-Blank: \t ",
        b"X-Colons: a:b: c",
        b"!#$%&'*+.^_`|~-0: a",
        b"Proxy-Authorization: Basic YTpi",
        b"Cookie: a=b; c=d",
        b"X-Content-Length: 9",
        b"x-request-id: a b",
        b"x-request-id: " + b"i" * 129,
        b"x-request-id: " + b"i" * 200,
        b"x-request-id:",
    ],
)
def test_an_odd_line_is_no_doubt(line: bytes) -> None:
    assert read(with_lines(line)) is not None


@pytest.mark.parametrize(
    "value",
    [b"", b" ", b"0", b"05", b"00", b"+5", b"-5", b"5 5", b"5,5", b"5, 5", b"0x5", b"5.0", b"1e1", b"\xb2", b"9" * 10],
)
def test_a_length_that_is_no_plain_number_is_in_doubt(value: bytes) -> None:
    assert read(LINE + HOST + b"Content-Length: %s\r\n\r\n" % value) is None


@pytest.mark.parametrize("line", [b"Content-Length:5", b"Content-Length:\t5 ", b"CONTENT-LENGTH:   5\t"])
def test_blanks_around_a_length_are_none_of_it(line: bytes) -> None:
    plain = read(LINE + HOST + line + b"\r\n\r\n")
    assert plain is not None
    assert plain[3] == 5


@pytest.mark.parametrize("host", [b"a,b", b"a b", b"http://a", b"a/b", b"a:b", b"user@a", b"a:1:2"])
def test_a_host_that_names_none_is_in_doubt(host: bytes) -> None:
    assert read(LINE + b"Host: %s\r\n" % host + LENGTH + b"\r\n") is None


def test_host_and_length_have_to_be_there() -> None:
    assert read(LINE + HOST + b"\r\n") is None
    assert read(LINE + LENGTH + b"\r\n") is None
    assert read(LINE + b"\r\n") is None


def test_half_a_head_is_in_doubt_wherever_it_ends() -> None:
    data = with_lines(b"x-request-id: a", b"X-Any: b")
    assert [n for n in range(len(data)) if read(data[:n]) is not None] == []
    assert read(data) is not None


def test_a_body_may_be_there_in_part_or_have_more_behind() -> None:
    head = with_lines()
    for body in (b"", b"12", b"12345", b"12345POST "):
        plain = read(head + body)
        assert plain is not None
        assert plain[2:] == (len(head), 5)


def test_a_head_that_is_long_as_a_whole_is_in_doubt() -> None:
    data = with_lines(b"X-Long: " + b"a" * 1_000)
    assert read(data, len(data)) is not None
    assert read(data, len(data) - 1) is None


def test_more_headers_than_a_message_may_have_are_in_doubt() -> None:
    lines = [b"X-%d: a" % i for i in range(MAX_HEADERS - 2)]
    assert read(with_lines(*lines)) is not None
    assert read(with_lines(*lines, b"X-More: a")) is None


# The same head again


@pytest.mark.parametrize(
    "line", [b"Content-Length: 5", b"CONTENT-LENGTH: 5", b"Content-Length:5", b"Content-Length:  5 "]
)
@pytest.mark.parametrize("before", [b"", b"X-Request-ID: one\r\n", b"x-request-id:one\r\n"])
@pytest.mark.parametrize("after", [b"", b"X-Any: a\r\n"])
def test_the_very_same_head_is_read_the_same_if_it_is_recognised(line: bytes, before: bytes, after: bytes) -> None:
    data = LINE + HOST + before + line + b"\r\n" + after + b"\r\n12345"
    again = recognised(data).again(data)
    # Written with a single blank, as everybody does, it is.
    if b": 5\r\n" in data and before != b"x-request-id:one\r\n":
        assert again is not None
    if again is not None:
        fresh = read(data)
        assert fresh is not None
        assert (again[0].headers, again[1:]) == (fresh[0].headers, fresh[1:])


def test_length_and_id_may_be_others() -> None:
    first = with_lines(b"X-Request-Id: one", b"Authorization: Bearer key")
    known = recognised(first)
    second = first.replace(b"one", b"the-other").replace(b"Length: 5", b"Length: 12345")
    again = known.again(second + b"body")
    assert again is not None
    head, request_id, n_head, n_body = again
    assert (request_id, n_head, n_body) == ("the-other", len(second), 12_345)
    assert head.fields_for("the-other")[0] == b"X-Request-Id: the-other\r\nAuthorization: Bearer key\r\n"
    # And what was asked once is no state.
    assert known.again(first) == (head, "one", len(first), 5)


@pytest.mark.parametrize(
    "value", [b"0", b"05", b"", b" 5", b"5 ", b"+5", b"5\t", b"\t5", b"9" * 10, b"5\n", b"5\rX: y"]
)
def test_a_length_that_is_in_doubt_is_so_again(value: bytes) -> None:
    first = with_lines()
    assert recognised(first).again(first.replace(b" 5\r\n", b" %s\r\n" % value)) is None


@pytest.mark.parametrize(
    "value", [b"", b" ", b"a b", b" a", b"a ", b"i" * 129, b"\xc3", b'"', b"\\", b"a\x00", b"a\tb", b"a\nb"]
)
def test_an_id_that_is_unfit_is_read_anew(value: bytes) -> None:
    first = with_lines(b"x-request-id: one")
    assert recognised(first).again(first.replace(b"one", value)) is None


def test_a_head_whose_id_is_unfit_is_recognised_by_nothing() -> None:
    """What takes its place stands at another one, so a fit id would too."""
    found = read_plain(with_lines(b"x-request-id: a b"), MAX_BYTES)
    assert found is not None
    assert found[1] is None


def test_any_other_byte_is_not_the_same_head() -> None:
    first = with_lines(b"x-request-id: one", b"Authorization: Bearer secret", b"X-Session-Id: s")
    known = recognised(first)
    varies = {*range(first.index(b"one"), first.index(b"one") + 3), first.index(b" 5\r\n") + 1}
    for at in set(range(len(first))) - varies:
        for byte in (first[at] ^ 1, first[at] ^ 0x20, ord("x")):
            other = first[:at] + bytes([byte]) + first[at + 1 :]
            assert other == first or known.again(other) is None, other


@pytest.mark.parametrize(
    "change",
    [
        (b"Authorization: Bearer secret\r\n", b""),
        (b"\r\n\r\n", b"\r\nX-More: a\r\n\r\n"),
        (b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"),
        (b"x-request-id: one", b"x-request-id: one\r\nx-request-id: two"),
        (b"Content-Length: 5", b"Content-Length: 5\r\nContent-Length: 6"),
        (b"x-request-id: one", b"X-Request-Id: one"),
        (b"x-request-id: one\r\n", b""),
        (b"/v1/chat/completions", b"/v1/completions"),
        (b"secret", b"secret2"),
        (b"secret", b"secre"),
    ],
)
def test_a_head_with_more_or_less_is_another(change: tuple[bytes, bytes]) -> None:
    first = with_lines(b"x-request-id: one", b"Authorization: Bearer secret")
    other = first.replace(*change)
    assert other != first
    assert recognised(first).again(other) is None


def test_half_a_head_is_not_recognised() -> None:
    first = with_lines(b"x-request-id: one", b"X-Any: a")
    known = recognised(first)
    assert [n for n in range(len(first)) if known.again(first[:n]) is not None] == []
