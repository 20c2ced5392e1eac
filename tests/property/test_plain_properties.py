"""The fast lane's reading of heads, against aiohttp's parser and against itself: recognised is as good as read."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import assume, example, given
from hypothesis import strategies as st

from prefixroute.http.body import FramingError, check_head
from prefixroute.http.front.full import FullArrival
from prefixroute.http.front.plain import Plain, read_plain
from prefixroute.http.headers import forwarded, identified, rendered
from prefixroute.http.routes import READ_PATHS
from tests.fuzz import lane_seeds

MAX_BYTES = 65_536
LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"

blanks = st.sampled_from([b" ", b" ", b" ", b"", b"\t", b"  ", b" \t "])
names = st.sampled_from(
    b"Content-Length content-length Host x-request-id X-Request-ID Authorization x-api-key Connection Content-Type "
    b"Transfer-Encoding Expect Upgrade TE X-A x-b Cookie X-Session-Id X_D Trailer Content-Encoding".split()
)
values = st.sampled_from(
    b"5 7 0 05 +5 5,5 99999999999999999999 a keep-alive close chunked gzip multipart/x 100-continue h2c \xff".split()
) | st.binary(max_size=6)
fields = st.builds(
    lambda name, before, value, after: name + b":" + before + value + after, names, blanks, values, blanks
)
odd_lines = st.sampled_from([line.removesuffix(b"\r\n") for line in lane_seeds.LINES]) | st.binary(max_size=12)
targets = st.sampled_from([*READ_PATHS, b"/v1/models", b"/v1/chat/completions?a", b"*"])
# Mostly plain, or nearly so.
plain_values = st.from_regex(rb"[\t -~\x80-\xff]{0,12}", fullmatch=True)
plain_fields = st.builds(
    lambda name, before, value: name + b":" + before + value,
    st.from_regex(rb"[Xx]-[A-Za-z!#$%&'*+.^_`|~-]{1,6}", fullmatch=True)
    | st.sampled_from(
        [b"Authorization", b"X-Api-Key", b"x-request-id", b"X-Request-ID", b"Content-Type", b"Connection"]
    ),
    blanks,
    plain_values | st.sampled_from([b"keep-alive", b"application/json", b"id", b"Bearer key"]),
)


def _name(line: bytes) -> bytes:
    return line.partition(b":")[0].lower()


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Heads that are plain, or would be but for a line or a byte."""
    lines = draw(st.lists(plain_fields, max_size=5, unique_by=_name))
    length = b"".join([draw(st.sampled_from([b"Content-Length:", b"content-length:"])), draw(blanks)])
    lines.insert(draw(st.integers(0, len(lines))), length + b"%d" % draw(st.integers(1, 999)) + draw(blanks))
    lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from([b"Host: a", b"HOST:\ta:80 ", b"host:"])))
    if draw(st.integers(0, 3)) == 0:
        lines.insert(draw(st.integers(0, len(lines))), draw(fields | odd_lines))
    data = b"POST %s HTTP/1.1\r\n" % draw(targets) + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + draw(st.binary(max_size=2) | st.sampled_from([b"\r\n", b"\n", b" "])) + data[at + 1 :]
    return data


def read(data: bytes) -> Plain | None:
    found = read_plain(data, MAX_BYTES)
    return None if found is None else found[0]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


class _Client:
    """A connection that nobody answers on."""

    transport = None
    is_ending = False


def parsed(loop: asyncio.AbstractEventLoop, data: bytes) -> list[Any]:
    """What aiohttp makes of it, with the limits that the full connection sets: messages and their bodies."""
    parser = HttpRequestParser(
        BaseProtocol(loop),
        loop,
        2**16,
        max_line_size=MAX_BYTES,
        max_field_size=MAX_BYTES,
        auto_decompress=False,
    )
    messages, _, _ = parser.feed_data(data)
    return list(messages)


@given(heads())
def test_what_is_plain_is_the_same_request_to_aiohttp(loop: asyncio.AbstractEventLoop, data: bytes) -> None:
    plain = read(data)
    assume(plain is not None)
    assert plain is not None
    head, request_id, n_head, n_body = plain
    data = data[:n_head]
    body = b"x" * n_body
    ((message, content),) = parsed(loop, data + body)
    full = FullArrival(message, content, _Client())  # type: ignore[arg-type]  # nobody asks it
    assert (full.head.method, full.head.target, full.head.minor) == (head.method, head.target, head.minor)
    assert list(full.head.headers) == head.headers
    assert (full.length, full.keep_alive, full.request_id) == (n_body, True, request_id)
    assert (message.chunked, message.upgrade) == (False, False)
    assert (content.total_bytes, content.is_eof()) == (n_body, True)
    check_head(full.head)  # raises nothing
    # And one byte less is not all of it.
    ((_, content),) = parsed(loop, data + body[1:])
    assert not content.is_eof()


@given(heads())
def test_what_aiohttp_refuses_is_not_plain(loop: asyncio.AbstractEventLoop, data: bytes) -> None:
    try:
        found = parsed(loop, data)
        refused = not found
        for message, content in found:
            check_head(FullArrival(message, content, _Client()).head)  # type: ignore[arg-type]  # nobody asks it
    except (HttpProcessingError, FramingError):
        refused = True
    if refused:
        assert read(data) is None


@given(heads(), st.sampled_from(["made-up", "0" * 32]))
def test_what_goes_on_is_what_the_full_lane_sends_on(data: bytes, made_up: str) -> None:
    plain = read(data)
    assume(plain is not None)
    assert plain is not None
    head, request_id, _, _ = plain
    name = request_id or made_up
    assert head.fields_for(name) == rendered(identified(forwarded(head.headers), name))


# What varies between two requests of a client, and what must not.
_second = st.sampled_from(
    [
        b"id",
        b"other",
        b"i" * 128,
        b"i" * 129,
        b"",
        b"a b",
        b"5",
        b"12",
        b"0",
        b"05",
        b" 5",
        b"5 ",
        b"\xff",
        b"a\rb",
        b"a\nb",
    ]
) | st.binary(max_size=4)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A head, and the same with another value or two, or with a change somewhere, or any other."""
    first = draw(heads())
    second = first
    for _ in range(draw(st.integers(0, 2))):
        lines = second.split(b"\r\n")
        at = draw(st.integers(0, len(lines) - 1))
        name, colon, _ = lines[at].partition(b":")
        if colon and draw(st.booleans()):
            lines[at] = name + colon + draw(blanks) + draw(_second)
        elif draw(st.booleans()):
            lines.insert(at, draw(plain_fields))
        second = b"\r\n".join(lines)
    if draw(st.integers(0, 7)) == 0:
        second = draw(heads())
    return first, second + draw(st.binary(max_size=8))


@given(pairs())
@example((LINE + b"Host: a\r\nx-request-id:b\r\nContent-Length: 5\r\n\r\n",) * 2)
def test_what_is_recognised_is_what_would_be_read(pair: tuple[bytes, bytes]) -> None:
    first, second = pair
    found = read_plain(first, MAX_BYTES)
    assume(found is not None and found[1] is not None)
    assert found is not None
    assert found[1] is not None
    again = found[1].again(second)
    if again is None:
        return
    fresh = read(second)
    assert fresh is not None
    assert again[1:] == fresh[1:]
    head, other = again[0], fresh[0]
    assert (head.method, head.target, head.path, head.minor) == (other.method, other.target, other.path, other.minor)
    assert head.route is other.route

    def same(headers: Any) -> list[tuple[bytes, bytes]]:
        return [one for one in headers if one[0].lower() not in (b"content-length", b"x-request-id")]

    assert same(head.headers) == same(other.headers)
    assert head.has_credentials == other.has_credentials
    name = again[1] or "made-up"
    assert head.fields_for(name) == other.fields_for(name)


credentials = st.from_regex(rb"[!-~]{8,24}", fullmatch=True)


@given(
    st.sampled_from([b"Authorization: Bearer ", b"authorization:basic ", b"x-api-key: ", b"API-KEY:", b"Cookie: a="]),
    credentials,
    st.lists(plain_fields, max_size=3),
    st.integers(0, 23),
    st.integers(1, 255),
    st.booleans(),
)
def test_no_other_key_is_taken_for_the_one_before(
    name: bytes, key: bytes, lines: list[bytes], at: int, change: int, is_last: bool
) -> None:
    at %= len(key)
    other = key[:at] + bytes([key[at] ^ change]) + key[at + 1 :]

    def of(value: bytes) -> bytes:
        both = [name + value, *lines] if not is_last else [*lines, name + value]
        return LINE + b"Host: a\r\nContent-Length: 5\r\n" + b"".join(one + b"\r\n" for one in both) + b"\r\n"

    found = read_plain(of(key), MAX_BYTES)
    assume(found is not None and found[1] is not None)
    assert found is not None
    assert found[1] is not None
    for wrong in (other, key[:-1], key + b"x", key + b" ", b"", key.swapcase()):
        if wrong != key:
            assert found[1].again(of(wrong)) is None
