"""What a watch says of an answer, however it was cut, against a plain reading of the bytes that it may look at."""

import re

from hypothesis import given
from hypothesis import strategies as st

from prefixroute.http.usage import UsageWatch

NAMES = [
    b"cached_tokens", b"cache_read_input_tokens", b"cache_creation_input_tokens", b"prompt_tokens", b"input_tokens",
    b"completion_tokens", b"output_tokens", b"generated_tokens",
]  # fmt: skip
PARTS = st.sampled_from(
    [
        *(b'"%b"' % name for name in NAMES), *(b'"%b": 12' % name for name in NAMES),
        b": 3456789", b":7", b" :\n", b": null", b"8" * 15, b'"', b"x" * 900, b"\xd9\xa1",
        b'data: {"a":1}\n\n', b"event: b\ndata: {}\n\n", b'data: {"c":1}\r\n\r\n', b"\n", b"\n\n", b"\n\r\n", b"\r",
        b'"id": "resp_1"', b'"id":"resp_',
    ]
)  # fmt: skip


def last_number(text: bytes, *names: bytes) -> int | None:
    found = re.findall(rb'"(?:%b)"\s*:\s*(\d{1,12})' % b"|".join(names), text)
    return int(found[-1]) if found else None


def usage(text: bytes) -> tuple[int, int] | None:
    cached, prompt = last_number(text, *NAMES[:2]), last_number(text, *NAMES[3:5])
    if cached is None or prompt is None:
        return None
    if last_number(text, NAMES[1]) is None:
        return cached, prompt
    return cached, prompt + cached + (last_number(text, NAMES[2]) or 0)


def completion_tokens(text: bytes) -> int | None:
    at, name = max((text.rfind(b'"%b"' % name), name) for name in NAMES[5:])
    found = re.compile(rb"\s*:\s*(\d{1,9})").match(text, at + len(name) + 2) if at >= 0 else None
    return int(found[1]) if found else None


@given(parts=st.lists(PARTS, max_size=60), piece_bytes=st.sampled_from([1, 3, 20, 300, 5_000]))
def test_a_watch_reads_the_first_bytes_and_the_last_pieces(parts: list[bytes], piece_bytes: int) -> None:
    body = b"".join(parts)
    pieces = [body[at : at + piece_bytes] for at in range(0, len(body), piece_bytes)]
    watch = UsageWatch()
    n_seen = 0
    for piece in pieces:
        assert watch.see(piece) == (n_seen < 4096)
        n_seen += len(piece)
    first, last = body[:4096], b"".join(piece[-4096:] for piece in pieces[-4:])
    assert watch.usage() == (usage(last) or usage(first))
    assert watch.completion_tokens() == completion_tokens(last)
    assert watch.n_events == sum(piece.count(b"\n\n") or piece.count(b"\n\r\n") for piece in pieces)
    found = re.search(rb'"id"\s*:\s*"(resp[^"\\]{1,200})"', first)
    assert watch.response_id() == (found[1].decode("utf-8", "replace") if found else None)
