"""O43, O74: a message that two servers may read differently goes nowhere; what goes on can be read in one way only.

Each refused sample carries a second request where a lenient server would find one. It must not be answered, and no
instance may see a byte of either.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from prefixroute.app import App
from prefixroute.testing import Call, FakeUpstream, RawClient
from tests.conformance.harness import CHAT, OK, Finished, Serve, answers
from tests.conformance.wiretap import Wiretap, requests_of

HOST = b"Host: router.test\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: router.test\r\n\r\n"
END = b"0\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
HI = b"2\r\nhi\r\n" + END
TARGETS = [CHAT, "/v1/messages", "/v1/audio/transcriptions", "/unknown"]


def post(lines: bytes, body: bytes = b"", version: bytes = b"1.1", target: str = CHAT) -> bytes:
    return b"POST %s HTTP/%s\r\n%s%s\r\n%s" % (target.encode(), version, HOST, lines, body)


@asynccontextmanager
async def tapped(serve: Serve) -> AsyncIterator[tuple[App, Wiretap]]:
    async with FakeUpstream(answers(OK)) as upstream, Wiretap(upstream) as tap, serve(tap.url) as app:
        await upstream.wait_probed()
        yield app, tap


async def trickle(client: RawClient, data: bytes) -> None:
    """Sends byte by byte. Who is refused in the middle stops."""
    for code in data:
        with suppress(ConnectionError, RuntimeError):  # uvloop's word for a connection that is closed
            await client.send(bytes([code]))
        # So that it goes off alone.
        await asyncio.sleep(0)


# ---------------------------------------------------------------------- refused

TWO_FRAMINGS = {
    "length, then chunks": (b"Content-Length: 5\r\n" + CHUNKED, END),
    "chunks, then length": (CHUNKED + b"Content-Length: 5\r\n", END),
    "chunks and no length": (CHUNKED + b"Content-Length: 0\r\n", END),
    "chunks and an odd length": (CHUNKED + b"Content-Length: x\r\n", END),
    "length and identity": (b"Content-Length: 2\r\nTransfer-Encoding: identity\r\n", b"hi"),
    "length and nothing": (b"Content-Length: 2\r\nTransfer-Encoding:\r\n", b"hi"),
    "length and gzip": (b"Content-Length: 2\r\nTransfer-Encoding: gzip\r\n", b"hi"),
    "chunks, length and chunks": (CHUNKED + b"Content-Length: 5\r\n" + CHUNKED, END),
}
LENGTHS = {
    "two": (b"Content-Length: 2\r\nContent-Length: 2\r\n", b"hi"),
    "two that differ": (b"Content-Length: 0\r\nContent-Length: %d\r\n" % len(SMUGGLED), b""),
    "two in other case": (b"Content-Length: 2\r\nCONTENT-LENGTH: 2\r\n", b"hi"),
    "a list": (b"Content-Length: 2, 2\r\n", b"hi"),
    "a list that differs": (b"Content-Length: 2, 0\r\n", b"hi"),
    "a list with nothing": (b"Content-Length: 2,\r\n", b"hi"),
    "plus": (b"Content-Length: +2\r\n", b"hi"),
    "minus": (b"Content-Length: -2\r\n", b"hi"),
    "minus nothing": (b"Content-Length: -0\r\n", b""),
    "hexadecimal": (b"Content-Length: 0x2\r\n", b"hi"),
    "octal": (b"Content-Length: 0o2\r\n", b"hi"),
    "a letter": (b"Content-Length: a\r\n", b"hi"),
    "a letter behind": (b"Content-Length: 2a\r\n", b"hi"),
    "a space within": (b"Content-Length: 0 2\r\n", b"hi"),
    "a tab within": (b"Content-Length: 0\t2\r\n", b"hi"),
    "an underscore": (b"Content-Length: 0_2\r\n", b"hi"),
    "a point": (b"Content-Length: 2.0\r\n", b"hi"),
    "an exponent": (b"Content-Length: 2e0\r\n", b"hi"),
    "quotes": (b'Content-Length: "2"\r\n', b"hi"),
    "a parameter": (b"Content-Length: 2;x=1\r\n", b"hi"),
    "nothing": (b"Content-Length:\r\n", b""),
    "only a space": (b"Content-Length: \r\n", b""),
    "a vertical tab": (b"Content-Length: \x0b2\r\n", b"hi"),
    "a form feed": (b"Content-Length: 2\x0c\r\n", b"hi"),
    "a NUL": (b"Content-Length: 2\x00\r\n", b"hi"),
    "a bare CR": (b"Content-Length: 2\r\r\n", b"hi"),
    "an Arabic digit": (b"Content-Length: \xd9\xa2\r\n", b"hi"),
    "a raised digit": (b"Content-Length: \xb2\r\n", b"hi"),
    "past 64 bits": (b"Content-Length: 18446744073709551618\r\n", b"hi"),
    "forty digits": (b"Content-Length: " + b"9" * 40 + b"\r\n", b"hi"),
    "many zeros in front": (b"Content-Length: " + b"0" * 40 + b"2\r\n", b"hi"),
    # More than Python makes a number of.
    "thousands of zeros in front": (b"Content-Length: " + b"0" * 5000 + b"2\r\n", b"hi"),
    "a space before the colon": (b"Content-Length : 2\r\n", b"hi"),
    "a tab before the colon": (b"Content-Length\t: 2\r\n", b"hi"),
    "a space before the name": (b"X: y\r\n Content-Length: 2\r\n", b"hi"),
    "folded": (b"Content-Length:\r\n 2\r\n", b"hi"),
    "folded behind": (b"Content-Length: 2\r\n \r\n", b"hi"),
    "folded into more": (b"Content-Length: 0\r\n 2\r\n", b"hi"),
}
CODINGS = {
    "identity": b"Transfer-Encoding: identity\r\n",
    "gzip": b"Transfer-Encoding: gzip\r\n",
    "gzip, chunked": b"Transfer-Encoding: gzip, chunked\r\n",
    "chunked, gzip": b"Transfer-Encoding: chunked, gzip\r\n",
    "chunked, chunked": b"Transfer-Encoding: chunked, chunked\r\n",
    "chunked, identity": b"Transfer-Encoding: chunked, identity\r\n",
    "twice": CHUNKED + CHUNKED,
    "twice, in other case": CHUNKED + b"transfer-encoding: chunked\r\n",
    "chunked and identity": CHUNKED + b"Transfer-Encoding: identity\r\n",
    "gzip and chunked": b"Transfer-Encoding: gzip\r\n" + CHUNKED,
    "nothing": b"Transfer-Encoding:\r\n",
    "only a comma": b"Transfer-Encoding: ,\r\n",
    "a comma in front": b"Transfer-Encoding: , chunked\r\n",
    "a comma behind": b"Transfer-Encoding: chunked,\r\n",
    "a tab behind": b"Transfer-Encoding: chunked\t\r\n",
    "a vertical tab in front": b"Transfer-Encoding: \x0bchunked\r\n",
    "a vertical tab behind": b"Transfer-Encoding: chunked\x0b\r\n",
    "a form feed behind": b"Transfer-Encoding: chunked\x0c\r\n",
    "a NUL behind": b"Transfer-Encoding: chunked\x00\r\n",
    "a hard space behind": b"Transfer-Encoding: chunked\xa0\r\n",
    "a Kelvin sign": b"Transfer-Encoding: chun\xe2\x84\xaaed\r\n",
    "a letter in front": b"Transfer-Encoding: xchunked\r\n",
    "a letter behind": b"Transfer-Encoding: chunkedx\r\n",
    "a word behind": b"Transfer-Encoding: chunked x\r\n",
    "quotes": b'Transfer-Encoding: "chunked"\r\n',
    "a parameter": b"Transfer-Encoding: chunked;q=1\r\n",
    "a space before the colon": b"Transfer-Encoding : chunked\r\n",
    "a tab before the colon": b"Transfer-Encoding\t: chunked\r\n",
    "a NUL before the colon": b"Transfer-Encoding\x00: chunked\r\n",
    "a space before the name": b"X: y\r\n Transfer-Encoding: chunked\r\n",
    "folded": b"Transfer-Encoding:\r\n chunked\r\n",
    "folded behind": b"Transfer-Encoding: chunked\r\n \r\n",
    "folded into more": b"Transfer-Encoding: gzip\r\n , chunked\r\n",
    "behind a bare LF": b"X: y\nTransfer-Encoding: chunked\r\n",
    "behind a bare CR": b"X: y\rTransfer-Encoding: chunked\r\n",
    "behind a NUL": b"X: y\x00\r\nTransfer-Encoding: chunked\r\n",
}
CHUNKS = {
    "no size": b"\r\nhi\r\n",
    "no size but an extension": b";a\r\nhi\r\n",
    "a letter that is no digit": b"g\r\nhi\r\n",
    "0x": b"0x2\r\nhi\r\n",
    "plus": b"+2\r\nhi\r\n",
    "minus": b"-2\r\nhi\r\n",
    "an underscore": b"0_2\r\nhi\r\n",
    "a space in front": b" 2\r\nhi\r\n",
    "a tab in front": b"\t2\r\nhi\r\n",
    "a space behind": b"2 \r\nhi\r\n",
    "a space within": b"0 2\r\nhi\r\n",
    "past 64 bits": b"10000000000000002\r\nhi\r\n",
    "far past 64 bits": b"f" * 40 + b"\r\nhi\r\n",
    "a bare LF behind the size": b"2\nhi\r\n",
    "a bare CR behind the size": b"2\rhi\r\n",
    "a bare LF behind the payload": b"2\r\nhi\n",
    "a bare CR behind the payload": b"2\r\nhi\r0\r\n\r\n",
    "longer than its size": b"2\r\nhiX\r\n",
    "much longer than its size": b"1\r\n" + b"x" * 5000 + b"\r\n",
    "shorter than its size": b"4\r\nhi\r\n",
    "a bare LF in an extension": b"2;a\nhi\r\n",
    "a bare CR in an extension": b"2;a\rb\r\nhi\r\n",
    "a NUL in an extension": b"2;a\x00\r\nhi\r\n",
    "a line end in a quoted extension": b'2;a="\r\nhi\r\n',
}
ENDS = {
    "a bare LF behind the last size": b"2\r\nhi\r\n0\n\r\n",
    "a bare LF at the end": b"2\r\nhi\r\n0\r\n\n",
    "no end": b"2\r\nhi\r\n0\r\n" + SMUGGLED,
    "a trailer with a space before the colon": b"2\r\nhi\r\n0\r\nX : y\r\n\r\n",
    "a trailer without colon": b"2\r\nhi\r\n0\r\nX\r\n\r\n",
    "a folded trailer": b"2\r\nhi\r\n0\r\nX: y\r\n z\r\n\r\n",
    "a trailer with a bare LF": b"2\r\nhi\r\n0\r\nX: y\n\r\n",
    "a trailer with a NUL": b"2\r\nhi\r\n0\r\nX: \x00\r\n\r\n",
    "a length in the trailers": b"2\r\nhi\r\n0\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED),
    "a coding in the trailers": b"2\r\nhi\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
}
LINES = {
    "bare LFs": b"GET /x HTTP/1.1\nHost: a\n\n",
    "a bare LF behind the request line": b"GET /x HTTP/1.1\nHost: a\r\n\r\n",
    "a bare LF behind a header": b"GET /x HTTP/1.1\r\nHost: a\nX: y\r\n\r\n",
    "a bare LF at the end": b"GET /x HTTP/1.1\r\nHost: a\r\n\n",
    "a bare CR at the end": b"GET /x HTTP/1.1\r\nHost: a\r\n\r",
    "a bare CR in the request line": b"GET /x\rX HTTP/1.1\r\nHost: a\r\n\r\n",
    "a bare CR in a header": b"GET /x HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n",
    "CR twice": b"GET /x HTTP/1.1\r\nHost: a\r\nX: y\r\r\n\r\n",
    "a NUL in a header": b"GET /x HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
    "a NUL in the target": b"GET /x\x00y HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tab in the target": b"GET /x\ty HTTP/1.1\r\nHost: a\r\n\r\n",
    "a space in the target": b"GET /x y HTTP/1.1\r\nHost: a\r\n\r\n",
    "tabs in the request line": b"GET\t/x\tHTTP/1.1\r\nHost: a\r\n\r\n",
    "a space behind the request line": b"GET /x HTTP/1.1 \r\nHost: a\r\n\r\n",
    "a space before the method": b" GET /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "a folded header": b"GET /x HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n",
    "a header folded by a tab": b"GET /x HTTP/1.1\r\nHost: a\r\nX: a\r\n\tb\r\n\r\n",
    "a folded first line": b"GET /x HTTP/1.1\r\n X: a\r\nHost: a\r\n\r\n",
    "a name without colon": b"GET /x HTTP/1.1\r\nHost: a\r\nX\r\n\r\n",
    "a colon without name": b"GET /x HTTP/1.1\r\nHost: a\r\n: y\r\n\r\n",
    "a name of no token": b"GET /x HTTP/1.1\r\nHost: a\r\nX@Y: z\r\n\r\n",
    "a name that is no ASCII": b"GET /x HTTP/1.1\r\nHost: a\r\nX\xe9: z\r\n\r\n",
    "no Host": b"GET /x HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two equal Hosts": b"GET /x HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "two Hosts of an old client": b"GET /x HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n",
    "a list of Hosts": b"GET /x HTTP/1.1\r\nHost: a, b\r\n\r\n",
    "a list of Hosts without space": b"GET /x HTTP/1.1\r\nHost: a,b\r\n\r\n",
    "a Host with a space": b"GET /x HTTP/1.1\r\nHost: a b\r\n\r\n",
    "a Host with a path": b"GET /x HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "a Host with a user": b"GET /x HTTP/1.1\r\nHost: u@a\r\n\r\n",
    "a Host with a scheme": b"GET /x HTTP/1.1\r\nHost: http://a\r\n\r\n",
    "a Host with a port of no number": b"GET /x HTTP/1.1\r\nHost: a:b\r\n\r\n",
    "a Host with two ports": b"GET /x HTTP/1.1\r\nHost: a:1:2\r\n\r\n",
    "a Host with an open bracket": b"GET /x HTTP/1.1\r\nHost: [::1\r\n\r\n",
    "a Host that is no ASCII": b"GET /x HTTP/1.1\r\nHost: \xc3\xa9\r\n\r\n",
    "a folded Host": b"GET /x HTTP/1.1\r\nHost: a\r\n b\r\n\r\n",
    "HTTP/0.9": b"GET /x\r\n\r\n",
    "HTTP/1.2": b"GET /x HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/1.10": b"GET /x HTTP/1.10\r\nHost: a\r\n\r\n",
    "HTTP/1": b"GET /x HTTP/1\r\nHost: a\r\n\r\n",
    "HTTP/01.1": b"GET /x HTTP/01.1\r\nHost: a\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http in lower case": b"GET /x http/1.1\r\nHost: a\r\n\r\n",
    "a method in lower case": b"get /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "an authority for a target": b"GET elsewhere:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a word for a target": b"GET x HTTP/1.1\r\nHost: a\r\n\r\n",
    "another scheme": b"GET ftp://elsewhere/x HTTP/1.1\r\nHost: a\r\n\r\n",
    "a fragment": b"GET /x#y HTTP/1.1\r\nHost: a\r\n\r\n",
    "an empty fragment": b"GET /x# HTTP/1.1\r\nHost: a\r\n\r\n",
    "a fragment behind a query": b"GET /x?y#z HTTP/1.1\r\nHost: a\r\n\r\n",
    "a fragment of a whole address": b"GET http://a/x#y HTTP/1.1\r\nHost: a\r\n\r\n",
    "a fragment behind an authority": b"GET http://a#y HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tunnel": b"CONNECT elsewhere:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tunnel to a path": b"CONNECT /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tunnel of an old client": b"CONNECT elsewhere:80 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    "a tunnel with a length": b"CONNECT /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi",
    # Where another server would take it for over.
    "a head that begins again": b"GET /x HTTP/1.1\r\nHost: a\r\nX: y\r\n\n" + SMUGGLED,
}
OLD = {
    "chunked": CHUNKED,
    "chunked, and a length": CHUNKED + b"Content-Length: 5\r\n",
    "gzip, chunked": b"Transfer-Encoding: gzip, chunked\r\n",
    "identity": b"Transfer-Encoding: identity\r\n",
    "nothing": b"Transfer-Encoding:\r\n",
    "kept alive": b"Connection: keep-alive\r\n" + CHUNKED,
}

REFUSED: dict[str, bytes] = {
    **{f"two framings: {name}": post(*sample) for name, sample in TWO_FRAMINGS.items()},
    **{f"length: {name}": post(*sample) for name, sample in LENGTHS.items()},
    **{f"coding: {name}": post(lines, HI) for name, lines in CODINGS.items()},
    **{f"chunk: {name}": post(CHUNKED, chunks + END) for name, chunks in CHUNKS.items()},
    **{f"end: {name}": post(CHUNKED, chunks) for name, chunks in ENDS.items()},
    **{f"old client: {name}": post(lines, END, b"1.0") for name, lines in OLD.items()},
    **{f"line: {name}": sample for name, sample in LINES.items()},
}


async def check_refused(app: App, tap: Wiretap, sent: bytes, *, by_bytes: bool = False) -> None:
    n_before = len(tap.sent)
    async with RawClient(app.url) as client:
        await (trickle if by_bytes else RawClient.send)(client, sent)
        answer = await client.answer()
        assert answer.status == 400
        assert answer.header("connection") == "close"
        # Nothing behind it is a request any more.
        assert await client.wait_closed() == b""
    assert len(tap.sent) == n_before


@pytest.mark.parametrize("sample", REFUSED.values(), ids=REFUSED)
async def test_o43_what_can_be_read_in_two_ways_is_refused_and_goes_nowhere(serve: Serve, sample: bytes) -> None:
    async with tapped(serve) as (app, tap):
        await check_refused(app, tap, sample + SMUGGLED)


async def test_o43_however_it_arrives(serve: Serve) -> None:
    async with tapped(serve) as (app, tap):
        for name, sample in REFUSED.items():
            if len(sample) < 500:
                try:
                    await check_refused(app, tap, sample + SMUGGLED, by_bytes=True)
                except ConnectionError:
                    # Refused before all of it was sent: the reset may have overtaken the answer.
                    assert tap.sent == [], name
                except AssertionError as error:
                    raise AssertionError(name) from error


@pytest.mark.parametrize("target", TARGETS)
async def test_o43_whatever_the_route(serve: Serve, target: str) -> None:
    samples = [
        *(post(lines, body, target=target) for lines, body in TWO_FRAMINGS.values()),
        *(post(lines, END, b"1.0", target) for lines in OLD.values()),
        post(b"Content-Length: " + b"0" * 5000 + b"2\r\n", b"hi", target=target),
        post(b"Transfer-Encoding: gzip, chunked\r\n", HI, target=target),
    ]
    async with tapped(serve) as (app, tap):
        for sample in samples:
            await check_refused(app, tap, sample + SMUGGLED)


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("target", ["/health", "/v1/models", "/sleep", "/x"])
async def test_o43_also_where_no_body_is_expected(serve: Serve, method: str, target: str) -> None:
    async with tapped(serve) as (app, tap):
        for lines, body in TWO_FRAMINGS.values():
            sent = b"%s %s HTTP/1.1\r\n%s%s\r\n%s" % (method.encode(), target.encode(), HOST, lines, body)
            async with RawClient(app.url) as client:
                await client.send(sent + SMUGGLED)
                answer = await client.answer(method)
                assert (answer.status, answer.header("connection")) == (400, "close")
                rest = await client.wait_closed()
                assert b"HTTP/" not in rest
        assert tap.sent == []


@pytest.mark.parametrize("chunks", [*CHUNKS.values(), *ENDS.values()], ids=[*CHUNKS, *ENDS])
async def test_o43_a_streamed_body_that_goes_wrong_is_never_whole(serve: Serve, chunks: bytes) -> None:
    """The head is with the instance already: what it must not see is an end."""
    heads: list[Call] = []
    taken = asyncio.Event()

    async def reads_on(call: Call) -> None:
        heads.append(call)
        taken.set()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await call.read_body()
        call.close()

    async with FakeUpstream(reads_on, by_hand=True) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        await client.send(post(CHUNKED, b"3\r\nabc\r\n", target="/unknown"))
        await taken.wait()
        await client.send(chunks + SMUGGLED)
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (400, "close")
        assert await client.wait_closed() == b""
        await upstream.wait_connections(0)
        assert [call.target for call in heads] == ["/unknown"]


TOO_LONG = {
    "a request line": (431, b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n" % (b"x" * 100_000)),
    "a value": (431, b"GET /x HTTP/1.1\r\nHost: a\r\nX: %s\r\n\r\n" % (b"x" * 100_000)),
    "a name": (431, b"GET /x HTTP/1.1\r\nHost: a\r\n%s: y\r\n\r\n" % (b"x" * 100_000)),
    "many headers": (431, b"GET /x HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 1000 + b"\r\n"),
    "a Host": (431, b"GET /x HTTP/1.1\r\nHost: %s\r\n\r\n" % (b"a" * 100_000)),
    "a trailer": (431, post(CHUNKED, b"2\r\nhi\r\n0\r\nX: %s\r\n\r\n" % (b"x" * 100_000))),
    "many trailers": (431, post(CHUNKED, b"2\r\nhi\r\n0\r\n" + b"X: y\r\n" * 1000 + b"\r\n")),
    "a method": (400, b"G" * 100_000 + b" /x HTTP/1.1\r\nHost: a\r\n\r\n"),
}


@pytest.mark.parametrize(("status", "sample"), TOO_LONG.values(), ids=TOO_LONG)
async def test_o43_very_long_lines_are_refused(serve: Serve, status: int, sample: bytes) -> None:
    async with tapped(serve) as (app, tap), RawClient(app.url) as client:
        await client.send(sample + SMUGGLED)
        answer = await client.answer()
        # Trailers are part of a request that has been taken in, so that it is the body which is refused.
        assert answer.status in ((400, status) if "Transfer" in sample[:200].decode() else (status,))
        assert answer.header("connection") == "close"
        assert await client.wait_closed() == b""
        assert tap.sent == []


# ---------------------------------------------------------------------- taken

TAKEN: dict[str, tuple[bytes, list[tuple[str, bytes]]]] = {
    "a length": (post(b"Content-Length: 2\r\n", b"hi"), [(CHAT, b"hi")]),
    "a length without space": (post(b"Content-Length:2\r\n", b"hi"), [(CHAT, b"hi")]),
    "a length between tabs": (post(b"Content-Length:\t2\t\r\n", b"hi"), [(CHAT, b"hi")]),
    "a length in capitals": (post(b"CONTENT-LENGTH: 2\r\n", b"hi"), [(CHAT, b"hi")]),
    "a few zeros in front": (post(b"Content-Length: 002\r\n", b"hi"), [(CHAT, b"hi")]),
    "no body": (post(b""), [(CHAT, b"")]),
    "chunks": (post(CHUNKED, HI), [(CHAT, b"hi")]),
    "chunks in capitals": (post(b"TRANSFER-ENCODING: CHUNKED\r\n", HI), [(CHAT, b"hi")]),
    "chunked, without space": (post(b"Transfer-Encoding:chunked\r\n", HI), [(CHAT, b"hi")]),
    "chunked, behind a tab": (post(b"Transfer-Encoding:\tchunked\r\n", HI), [(CHAT, b"hi")]),
    "chunked, before a space": (post(b"Transfer-Encoding: chunked \r\n", HI), [(CHAT, b"hi")]),
    "a size with zeros in front": (post(CHUNKED, b"0000002\r\nhi\r\n000\r\n\r\n"), [(CHAT, b"hi")]),
    "an extension": (post(CHUNKED, b'2;a=b;c="d"\r\nhi\r\n0;e\r\n\r\n'), [(CHAT, b"hi")]),
    "a trailer": (post(CHUNKED, b"2\r\nhi\r\n0\r\nX: y\r\n\r\n"), [(CHAT, b"hi")]),
    "a trailer that would be obeyed in a head": (
        post(CHUNKED, b"2\r\nhi\r\n0\r\nAuthorization: Bearer x\r\n\r\n"),
        [(CHAT, b"hi")],
    ),
    # Names that are read as the real ones where an underscore and a hyphen are the same.
    "Content_Length": (post(b"Content_Length: 40\r\nContent-Length: 2\r\n", b"hi"), [(CHAT, b"hi")]),
    "Transfer_Encoding": (post(b"Transfer_Encoding: chunked\r\nContent-Length: 2\r\n", b"hi"), [(CHAT, b"hi")]),
    "a length that Connection names": (
        post(b"Connection: content-length\r\nContent-Length: 2\r\n", b"hi"),
        [(CHAT, b"hi")],
    ),
    "a coding that Connection names": (post(b"Connection: transfer-encoding\r\n" + CHUNKED, HI), [(CHAT, b"hi")]),
    "a Host that Connection names": (post(b"Connection: host\r\n"), [(CHAT, b"")]),
    "a request in a body": (
        b"GET /x HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (HOST, len(SMUGGLED), SMUGGLED),
        [("/x", SMUGGLED)],
    ),
    "a request in a body of HEAD": (
        b"HEAD /x HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (HOST, len(SMUGGLED), SMUGGLED),
        [("/x", SMUGGLED)],
    ),
    "a request in a chunk": (
        b"DELETE /x HTTP/1.1\r\n%s%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (HOST, CHUNKED, len(SMUGGLED), SMUGGLED),
        [("/x", SMUGGLED)],
    ),
    "a request behind an empty body": (
        b"GET /x HTTP/1.1\r\n%sContent-Length: 0\r\n\r\n%s" % (HOST, SMUGGLED),
        [("/x", b""), ("/smuggled", b"")],
    ),
    "a request behind chunks": (post(CHUNKED, HI + SMUGGLED), [(CHAT, b"hi"), ("/smuggled", b"")]),
    "an offer of WebSockets with a body": (
        post(b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n", b"hi"),
        [(CHAT, b"hi")],
    ),
    "empty lines in front": (b"\r\n\r\n" + post(b"Content-Length: 2\r\n", b"hi"), [(CHAT, b"hi")]),
    "a whole address": (b"GET http://elsewhere:81/x?y HTTP/1.1\r\n" + HOST + b"\r\n", [("/x?y", b"")]),
    "a whole address with a user": (b"GET http://u:p@elsewhere/x HTTP/1.1\r\n" + HOST + b"\r\n", [("/x", b"")]),
    "a whole address without path": (b"GET http://elsewhere?y HTTP/1.1\r\n" + HOST + b"\r\n", [("/?y", b"")]),
    "an empty query": (b"GET /x? HTTP/1.1\r\n" + HOST + b"\r\n", [("/x?", b"")]),
    "a number sign, encoded": (b"GET /x%23y HTTP/1.1\r\n" + HOST + b"\r\n", [("/x%23y", b"")]),
    "an address for a path": (b"GET //elsewhere/x HTTP/1.1\r\n" + HOST + b"\r\n", [("//elsewhere/x", b"")]),
    "an empty Host": (b"GET /x HTTP/1.1\r\nHost:\r\n\r\n", [("/x", b"")]),
    "a Host with a port": (b"GET /x HTTP/1.1\r\nHost: a_b-c.test:8080\r\n\r\n", [("/x", b"")]),
    "an IPv6 Host": (b"GET /x HTTP/1.1\r\nHost: [fe80::1%25eth0]:8080\r\n\r\n", [("/x", b"")]),
    "no Host of an old client": (b"GET /x HTTP/1.0\r\n\r\n", [("/x", b"")]),
    "an old client": (b"POST /x HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi", [("/x", b"hi")]),
}


@pytest.mark.parametrize(("sample", "expected"), TAKEN.values(), ids=TAKEN)
async def test_o43_what_is_taken_goes_on_with_one_framing_and_as_many_requests(
    serve: Serve, sample: bytes, expected: list[tuple[str, bytes]]
) -> None:
    async with tapped(serve) as (app, tap):
        async with RawClient(app.url) as client:
            await client.send(sample)
            for _ in expected:
                answer = await client.answer("HEAD" if sample.startswith(b"HEAD") else "POST")
                assert answer.status == 200
            client.half_close()
            assert await client.wait_closed() == b""
        assert [(one.target, one.body) for one in tap.sent] == expected


async def test_o43_what_is_taken_is_taken_byte_by_byte_as_well(serve: Serve) -> None:
    async with tapped(serve) as (app, tap):
        for name, (sample, expected) in TAKEN.items():
            if sample.startswith(b"HEAD"):
                continue
            n_before = len(tap.sent)
            async with RawClient(app.url) as client:
                await trickle(client, sample)
                for _ in expected:
                    assert (await client.answer()).status == 200, name
            got = sorted((one.target, one.body) for one in tap.sent)
            assert len(got) == n_before + len(expected), name
            assert set(expected) <= set(got), name


# ---------------------------------------------------------------------- trailers

TRAILERS = {
    "one": b"X-Trailer: 1\r\n",
    "two": b"X-Trailer: 1\r\nX-Other: 2\r\n",
    "a credential": b"Authorization: Bearer stolen\r\n",
    "a request id": b"X-Request-Id: stolen\r\n",
    "a host": b"Host: elsewhere\r\n",
    "an offer": b"Upgrade: websocket\r\n",
    "that looks like an end": b"0: 0\r\n",
    "with another empty chunk in front": b"0: 0\r\n0: ;\r\n",
}


@pytest.mark.parametrize("trailers", TRAILERS.values(), ids=TRAILERS)
@pytest.mark.parametrize("arrives", ["with the next", "before the next", "byte by byte"])
@pytest.mark.parametrize("target", [CHAT, "/unknown"])
async def test_o43_a_trailer_becomes_no_header_of_the_next_request(
    serve: Serve, trailers: bytes, arrives: str, target: str
) -> None:
    """Which may be another client's, where a proxy in front of us shares the connection."""
    sent = post(CHUNKED, b"2\r\nhi\r\n0\r\n" + trailers + b"\r\n", target=target)
    async with tapped(serve) as (app, tap), RawClient(app.url) as client:
        if arrives == "byte by byte":
            await trickle(client, sent)
        else:
            await client.send(sent + SMUGGLED if arrives == "with the next" else sent)
        answer = await client.answer()
        # A second Host, for the parser.
        assert answer.status in ((200, 400) if b"Host" in trailers else (200,))
        with suppress(asyncio.IncompleteReadError, ConnectionError, RuntimeError):
            if arrives != "with the next":
                await client.send(SMUGGLED)
            await client.answer()
        for one in tap.sent:
            assert {name.lower() for name, _ in one.headers} <= {
                *("host", "content-length", "transfer-encoding", "x-request-id"),
            }
            assert one.all_headers("x-request-id") != ["stolen"]
        assert [(one.target, one.body) for one in tap.sent[:1]] == ([(target, b"hi")] if answer.status == 200 else [])


async def test_o43_chunks_without_trailers_leave_the_connection_open(serve: Serve) -> None:
    async with tapped(serve) as (app, tap), RawClient(app.url) as client:
        # As they come, and one behind the other at once.
        for end in (END, b"0;a=b\r\n\r\n", b"000\r\n\r\n"):
            await client.send(post(CHUNKED, b"2\r\nhi\r\n" + end))
            assert (await client.answer()).header("connection") is None
            await trickle(client, post(CHUNKED, b"2\r\nhi\r\n" + end))
            assert (await client.answer()).header("connection") is None
        await client.send(post(CHUNKED, HI) * 3 + SMUGGLED)
        for _ in range(4):
            assert (await client.answer()).header("connection") is None
        assert [one.body for one in tap.sent] == [b"hi"] * 9 + [b""]


# ---------------------------------------------------------------------- offers of other protocols

OFFER = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"


@pytest.mark.parametrize("behind", [SMUGGLED, post(CHUNKED, b"2\r\nhi\r\n0\r\nX-Evil: 1\r\n\r\n"), b"\x81\x00"])
@pytest.mark.parametrize(
    "offer", [b"GET /x HTTP/1.1\r\n" + HOST + OFFER + b"\r\n", post(OFFER + b"Content-Length: 2\r\n", b"hi")]
)
async def test_o43_what_comes_behind_an_offer_that_is_declined_is_never_read(
    serve: Serve, offer: bytes, behind: bytes
) -> None:
    """It may be frames, and its trailers might become another request's headers."""
    async with tapped(serve) as (app, tap):
        async with RawClient(app.url) as client:
            await client.send(offer + behind)
            answer = await client.answer()
            assert (answer.status, answer.header("connection")) == (200, "close")
            with suppress(ConnectionError):
                await client.send(b"GET /victim HTTP/1.1\r\n" + HOST + b"\r\n")
            assert await client.wait_closed() == b""
        assert len(tap.sent) == 1


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


async def test_o43_an_offer_of_http2_is_declined_and_the_connection_goes_on(serve: Serve) -> None:
    """Java's client makes it with its first request."""
    async with tapped(serve) as (app, tap), RawClient(app.url) as client:
        for sample in (
            b"GET /x HTTP/1.1\r\n" + HOST + H2C + b"\r\n",
            post(H2C + b"Content-Length: 2\r\n", b"hi"),
            b"GET /y HTTP/1.1\r\n" + HOST + b"\r\n",
        ):
            await client.send(sample)
            assert (await client.answer()).header("connection") is None
        head, body = post(H2C + b"Content-Length: 4\r\n"), b"body"
        await client.send(head)
        for code in body:
            await client.send(bytes([code]))
        assert (await client.answer()).header("connection") is None
        await client.send(b"GET /z HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (await client.answer()).status == 200
        assert [(one.target, one.body) for one in tap.sent] == [
            *(("/x", b""), (CHAT, b"hi"), ("/y", b"")),
            *((CHAT, b"body"), ("/z", b"")),
        ]
        assert all(one.all_headers("upgrade") == one.all_headers("http2-settings") == [] for one in tap.sent)


@pytest.mark.parametrize(
    "sample",
    [
        b"GET /x HTTP/1.1\r\n" + HOST + H2C + b"\r\n",
        post(H2C + b"Content-Length: 2\r\n", b"hi"),
        post(H2C + CHUNKED, HI),
        b"GET /x HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n\r\n",
    ],
)
@pytest.mark.parametrize("n_early", [0, 1, 20, len(SMUGGLED)])
async def test_o43_what_is_sent_behind_such_an_offer_is_answered_or_the_connection_closed(
    serve: Serve, sample: bytes, n_early: int
) -> None:
    """Never read from its middle, and never left waiting."""
    async with tapped(serve) as (app, tap), RawClient(app.url) as client:
        await client.send(sample + SMUGGLED[:n_early])
        answer = await client.answer()
        assert answer.status == 200
        if answer.header("connection") is None:
            await client.send(SMUGGLED[n_early:])
            assert (await client.answer()).status == 200
            assert len(tap.sent) == 2
        else:
            assert await client.wait_closed() == b""
            assert len(tap.sent) == 1
        assert n_early == 0 or answer.header("connection") == "close"


# ---------------------------------------------------------------------- the other direction


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 11\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 11\r\nContent-Length: 11\r\n",
        b"Content-Length: 11, 11\r\n",
        b"Content-Length: +11\r\n",
        b"Content-Length : 11\r\n",
        b"Content-Length:\r\n 11\r\n",
        b"Content-Length: 11\nX: y\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"X: a\rContent-Length: 11\r\n",
        b"X: a\x00\r\nContent-Length: 11\r\n",
    ],
)
async def test_o43_an_answer_that_can_be_read_in_two_ways_is_none(
    serve: Serve, finished: Finished, lines: bytes
) -> None:
    smuggled = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"
    script = answers(b"HTTP/1.1 200 OK\r\n" + lines + b'\r\n{"ok":true}' + smuggled)
    async with FakeUpstream(script) as upstream, serve(upstream) as app:
        for _ in range(2):
            async with RawClient(app.url) as client:
                answer = await client.request(body=b"{}")
                assert (answer.status, b"poison" in answer.raw) == (502, False)
        # A connection that has lied carries nobody else's request.
        assert [call.reused for call in upstream.calls] == [False, False]
    assert [line["outcome"] for line in finished()] == ["broken", "broken"]


def test_the_reader_of_the_wire_knows_no_leniency() -> None:
    good = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    assert [(one.target, one.body) for one in requests_of(good * 2)] == [("/x", b"hi")] * 2
    for bad in (
        good.replace(b"chunked", b"Chunked"),
        good.replace(b"Host: a", b"Host: a\r\nContent-Length: 2"),
        good.replace(b"Host: a", b"X: a"),
        good.replace(b"2\r\nhi", b"3\r\nhi"),
        good.replace(b"/x", b"x"),
        good + b"\r\n",
        good[:-1],
    ):
        with pytest.raises(AssertionError):
            requests_of(bad)
