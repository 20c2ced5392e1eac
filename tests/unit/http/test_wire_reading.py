"""Heads of answers cut out of what comes, and what they say of the connection."""

import pytest

from prefixroute.http.headers import rendered
from prefixroute.http.wire.heads import MalformedError, parse_answer_head
from prefixroute.http.wire.reading import HeadReader, Keeping, keeping

HEAD = b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n"


def test_a_head_is_the_same_however_it_comes() -> None:
    whole = HeadReader(100).feed(HEAD + b"rest")
    assert whole is not None
    assert (whole[0].headers, whole[1]) == ([(b"A", b"b")], b"rest")
    single = HeadReader(100)
    for at in range(len(HEAD) - 1):
        assert single.feed(HEAD[at : at + 1]) is None
    assert single.feed(HEAD[-1:] + b"rest") == whole
    assert single.feed(HEAD + b"rest") == whole


@pytest.mark.parametrize(
    "data", [b"x", b"HTTP/2", b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200 + b"\r\n\r\n", b"HTTP/1." + b"1" * 401]
)
def test_what_will_never_be_a_head_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(MalformedError):
        HeadReader(100).feed(data)


def test_many_headers_may_be_longer_together_than_each_may_be() -> None:
    assert HeadReader(100).feed(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 40 + b"\r\n") is not None


@pytest.mark.parametrize(
    ("minor", "headers", "said"),
    [
        (1, [], Keeping(True)),
        (0, [], Keeping(False)),
        (0, [(b"connection", b"Keep-Alive")], Keeping(True)),
        (1, [(b"Connection", b"x,close")], Keeping(False)),
        (1, [(b"Connection", b"keep-alive"), (b"Connection", b"close"), (b"Keep-Alive", b"timeout=5")], Keeping(False)),
        (1, [(b"Keep-Alive", b"timeout=5, max=100")], Keeping(True, 5.0, 100)),
        (1, [(b"keep-alive", b"MAX=0 ,Timeout=1")], Keeping(True, 1.0, 0)),
        (1, [(b"Keep-Alive", b"timeout=x, max=-1, timeout=99999999999, =5, ,")], Keeping(True)),
    ],
)
def test_what_an_answer_says_of_its_connection(minor: int, headers: list[tuple[bytes, bytes]], said: Keeping) -> None:
    assert keeping(parse_answer_head(b"HTTP/1.%d 200 OK\r\n%s\r\n" % (minor, rendered(headers)))) == said
