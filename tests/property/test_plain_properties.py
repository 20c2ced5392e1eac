"""The fast lane's reading of heads, against aiohttp's parser and against itself: recognised is as good as read."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from prefixroute.http.body import FramingError, check_head
from prefixroute.http.front.adapter import FullArrival
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
endings = st.sampled_from([b"", b"", b"", b" ", b"\t "])
odd_lines = st.sampled_from([line.removesuffix(b"\r\n") for line in lane_seeds.LINES]) | st.binary(max_size=12)
texts = st.from_regex(rb"[!-~\x80-\xff]([\t -~\x80-\xff]{0,10}[!-~\x80-\xff])?", fullmatch=True)
ids = st.sampled_from([b"id", b"other", b"i" * 128, b"a-b_c.d"])
# Names, each with values that are in no doubt.
plain_fields = st.one_of(
    st.tuples(st.from_regex(rb"[Xx]-[A-Za-z!#$%&'*+.^_`|~-]{1,6}", fullmatch=True), texts | st.just(b"")),
    st.tuples(st.sampled_from([b"Authorization", b"X-Api-Key", b"api-key", b"Cookie"]), texts),
    st.tuples(st.sampled_from([b"x-request-id", b"X-Request-ID"]), ids | ids | texts),
    st.tuples(st.just(b"Content-Type"), st.sampled_from([b"application/json", b"text/plain", b""])),
    st.tuples(st.just(b"Connection"), st.sampled_from([b"keep-alive", b"Keep-Alive"])),
)


OF_ENDPOINTS = (
    b"/endpoints/a/invocations",
    b"/endpoints/%s/invocations-response-stream" % (b"long-" * 12),
    b"/endpoints/a-b/openai/v1/chat/completions",
    b"/endpoints/a/inference-components/c1/openai/v1/completions",
)


@st.composite
def plain_heads(draw: st.DrawFn) -> bytes:
    """Heads that are plain, nearly all of them."""
    lines = draw(st.lists(plain_fields, max_size=5, unique_by=lambda field: field[0].lower()))
    length = draw(st.sampled_from([b"Content-Length", b"content-length"])), b"%d" % draw(st.integers(1, 999))
    lines.insert(draw(st.integers(0, len(lines))), length)
    lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from([(b"Host", b"a"), (b"HOST", b"a:80")])))
    fields = b"".join(name + b":" + draw(blanks) + value + draw(endings) + b"\r\n" for name, value in lines)
    path = draw(st.sampled_from([*sorted(READ_PATHS), *OF_ENDPOINTS])) + draw(
        st.sampled_from([b"", b"", b"?", b"?a=/../b"])
    )
    return b"POST %s HTTP/1.1\r\n%s\r\n" % (path, fields)


@st.composite
def odd_heads(draw: st.DrawFn) -> bytes:
    """Heads that would be plain but for a line or some bytes."""
    data = draw(plain_heads())
    if draw(st.booleans()):
        lines = data.split(b"\r\n")
        lines.insert(draw(st.integers(0, len(lines) - 2)), draw(fields | odd_lines))
        data = b"\r\n".join(lines)
    if draw(st.booleans()):
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + draw(st.binary(max_size=2) | st.sampled_from([b"\r\n", b"\n", b" "])) + data[at + 1 :]
    if draw(st.booleans()):
        data = data.replace(b" HTTP", draw(st.sampled_from([b"", b"?%41", b"#a", b"/", b" "])) + b" HTTP", 1)
    return data


heads = plain_heads() | odd_heads()


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


@given(heads)
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


@given(heads)
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


@given(heads, st.sampled_from(["made-up", "0" * 32]))
def test_what_goes_on_is_what_the_full_lane_sends_on(data: bytes, made_up: str) -> None:
    plain = read(data)
    assume(plain is not None)
    assert plain is not None
    head, request_id, _, _ = plain
    name = request_id or made_up
    assert head.fields_for(name)[0] == rendered(identified(forwarded(head.headers), name))


# What may stand where a length or an id did.
seconds = st.sampled_from(
    [b"id", b"5", b"12", b"i" * 128, b"i" * 129, b"", b"0", b"05", b"a b", b"5 ", b"\xff", b"a\rb", b"a\nb", b"9" * 10]
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A head, and the same with another value or two, or with a change somewhere, or any other."""
    first = second = draw(plain_heads())
    for _ in range(draw(st.integers(0, 3))):
        lines = second.split(b"\r\n")
        varying = [n for n, line in enumerate(lines) if line.lower().startswith((b"content-length:", b"x-request-id:"))]
        match draw(st.integers(0, 5)):
            case 0:
                lines.insert(draw(st.integers(1, len(lines) - 2)), b": ".join(draw(plain_fields)))
            case 1:
                at = draw(st.integers(0, len(lines) - 1))
                lines[at] = lines[at][:-1] + draw(st.binary(max_size=2))
            case _:
                at = draw(st.sampled_from(varying or [0]))
                name, colon, _ = lines[at].partition(b":")
                lines[at] = name + colon + draw(st.just(b" ") | blanks) + draw(seconds | ids)
        second = b"\r\n".join(lines)
    return first, second + draw(st.binary(max_size=8))


# Of five, one is recognised.
@settings(max_examples=500)
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
    name = again[1] or "made-up"
    assert head.fields_for(name) == other.fields_for(name)


credentials = st.from_regex(rb"[!-~]{8,24}", fullmatch=True)


@given(
    st.sampled_from([b"Authorization: Bearer ", b"authorization:basic ", b"x-api-key: ", b"API-KEY:", b"Cookie: a="]),
    credentials,
    st.lists(plain_fields.map(b": ".join), max_size=3),
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
