"""Which headers pass, and what is read from them."""

import pytest

from prefixroute.http.arrival import RequestHead
from prefixroute.http.headers import (
    asking,
    first,
    forwarded,
    identified,
    is_encoded,
    local_location,
    prefix_aware_id,
    relayed,
    short_text,
)

Header = tuple[bytes, bytes]


def test_what_belongs_to_a_connection_is_dropped_either_way() -> None:
    names = [
        b"Connection", b"Keep-Alive", b"Proxy-Connection", b"Proxy-Authenticate", b"Proxy-Authorization", b"TE",
        b"Trailer", b"Transfer-Encoding", b"Upgrade",
    ]  # fmt: skip
    headers = [(name, b"close") for name in names] + [(b"X", b"y")]
    assert forwarded(headers) == [(b"X", b"y")]
    # What comes behind a body is announced to whoever gets it.
    assert relayed(headers) == [(b"Trailer", b"close"), (b"X", b"y")]


@pytest.mark.parametrize(
    ("connection", "kept"),
    [
        ([b"close"], [b"A", b"b"]),
        ([b"keep-alive"], [b"A", b"b"]),
        ([b"a"], [b"b"]),
        ([b" B ,, close,A"], []),
        ([b"a", b"b"], []),
        ([b""], [b"A", b"b"]),
    ],
)
def test_what_a_connection_header_names_is_dropped(connection: list[bytes], kept: list[bytes]) -> None:
    headers = [(b"A", b"1"), *((b"Connection", value) for value in connection), (b"b", b"2")]
    assert [name for name, _ in forwarded(headers)] == kept
    assert [name for name, _ in relayed(headers)] == kept


def test_host_and_framing_are_each_sides_own() -> None:
    headers = [(b"HOST", b"a"), (b"Content-Length", b"1"), (b"Expect", b"100-continue"), (b"X", b"y")]
    assert forwarded(headers) == [(b"X", b"y")]


def test_a_length_comes_back_only_where_it_is_the_framing() -> None:
    length: Header = (b"content-length", b"5")
    assert relayed([length]) == [length]
    assert relayed([length, (b"Transfer-Encoding", b"chunked")]) == []


def test_a_request_of_the_routers_own_asks_for_the_whole_thing_in_plain() -> None:
    conditions = [b"Range", b"If-None-Match", b"If-Modified-Since", b"If-Match", b"If-Range", b"If-Unmodified-Since"]
    headers = [(name, b"x") for name in [*conditions, b"Accept-Encoding", b"Host"]]
    assert asking([*headers, (b"Authorization", b"Bearer x")]) == [(b"Authorization", b"Bearer x")]


def test_the_first_value_counts() -> None:
    headers = [(b"X-A", b"1"), (b"x-a", b"2")]
    assert first(headers, b"x-a") == b"1"
    assert first(headers, b"x-b") is None


@pytest.mark.parametrize("sent", [b"a", b"A-Z_0.9:/@", b"x" * 128])
def test_a_fit_request_id_is_kept(sent: bytes) -> None:
    assert head([(b"X-Request-Id", sent)]).request_id == sent.decode()


@pytest.mark.parametrize("sent", [b"", b" ", b"a b", b'"', b"'", b"\\", b"\x7f", b"\xc3\xa9", b"a\tb", b"x" * 129])
def test_an_unfit_request_id_is_replaced(sent: bytes) -> None:
    assert head([(b"x-request-id", sent)]).request_id is None
    assert head([(b"x-request-id", sent)]).fields_for("made")[0] == b"x-request-id: made\r\n"


@pytest.mark.parametrize("second", [b"a", b"b", b""])
def test_of_two_request_ids_neither_is_kept(second: bytes) -> None:
    one = head([(b"x-request-id", b"a"), (b"X-Request-ID", second), (b"X-Own", b"1")])
    assert one.request_id is None
    assert one.fields_for("made")[0] == b"X-Own: 1\r\nx-request-id: made\r\n"


@pytest.mark.parametrize("name", [b"Authorization", b"X-Api-Key", b"api-key"])
def test_a_credential_counts_only_where_it_goes_on(name: bytes) -> None:
    assert head([(name, b"k")]).fields_for("i")[1]
    assert not head([(name, b"k"), (b"Connection", name)]).fields_for("i")[1]
    assert not head([(b"Host", b"a")]).fields_for("i")[1]


def test_a_fit_request_id_stays_in_its_place_and_may_be_another_one() -> None:
    one = head([(b"A", b"1"), (b"X-Request-ID", b"a"), (b"B", b"2"), (b"Connection", b"b")])
    assert one.fields_for("b")[0] == b"A: 1\r\nX-Request-ID: b\r\n"


@pytest.mark.parametrize(
    ("headers", "after"),
    [
        ([], [(b"x-request-id", b"i")]),
        ([(b"X-Request-ID", b"i"), (b"A", b"1")], [(b"X-Request-ID", b"i"), (b"A", b"1")]),
        ([(b"X-Request-ID", b"j"), (b"A", b"1")], [(b"A", b"1"), (b"x-request-id", b"i")]),
        ([(b"X-Request-ID", b"i"), (b"x-request-id", b"j")], [(b"x-request-id", b"i")]),
    ],
)
def test_there_is_one_request_id(headers: list[Header], after: list[Header]) -> None:
    assert identified(headers, "i") == after


@pytest.mark.parametrize(
    ("value", "text"),
    [(b"s", "s"), (b"a b~", "a b~"), (b"", None), (b"\x01", None), (b"\xff", None), (b"x" * 257, None)],
)
def test_a_short_text_is_printable(value: bytes, text: str | None) -> None:
    assert short_text(value) == text
    assert short_text(None) is None


@pytest.mark.parametrize(
    ("value", "read"),
    [(b"app-1", "app-1"), (b"a" * 64, "a" * 64), (b"a" * 65, None), (b"", None), (b" a", None), (b"a\x7f", None)],
)
def test_a_prefix_aware_id_is_as_sagemaker_takes_it(value: bytes, read: str | None) -> None:
    assert prefix_aware_id(value) == read


@pytest.mark.parametrize(
    ("values", "encoded"),
    [([], False), ([b"identity"], False), ([b" Identity "], False), ([b"gzip"], True), ([b"identity", b"br"], True)],
)
def test_a_body_is_encoded_unless_it_says_that_it_is_not(values: list[bytes], encoded: bool) -> None:
    assert is_encoded([(b"Content-Encoding", value) for value in values]) is encoded


def head(headers: list[Header]) -> RequestHead:
    return RequestHead("POST", "/v1/chat/completions", 1, headers)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"http://gpu-a:8000/base/v1/models?a=b#c", b"/v1/models?a=b#c"),
        (b"https://GPU-A:8000/base/v1", b"/v1"),
        (b"http://gpu-a:8000/base/v1", b"/v1"),
        (b"http://gpu-a:8000/base", b"/"),
        # Elsewhere, or no address at all.
        (b"http://gpu-a:8000/baseless", b"http://gpu-a:8000/baseless"),
        (b"http://gpu-a:8000", b"http://gpu-a:8000"),
        (b"http://gpu-a:80001/v1", b"http://gpu-a:80001/v1"),
        (b"http://gpu-a:8000.evil.example/", b"http://gpu-a:8000.evil.example/"),
        (b"http://gpu-b:8000/v1", b"http://gpu-b:8000/v1"),
        (b"ftp://gpu-a:8000/v1", b"ftp://gpu-a:8000/v1"),
        (b"http://gpu-a:8000/base?a=b", b"/?a=b"),
        (b"http://gpu-a:8000/base#c", b"/#c"),
        (b"/base/v1", b"/v1"),
        # What clients would take for another host.
        (b"http://gpu-a:8000/base/\t/evil.example", b"http://gpu-a:8000/base/\t/evil.example"),
        (b"http://gpu-a:8000/base/\\evil.example/x", b"http://gpu-a:8000/base/\\evil.example/x"),
        (b"http://gpu-a:8000/base//evil.example", b"http://gpu-a:8000/base//evil.example"),
        (b"//evil.example/x", b"//evil.example/x"),
        (b"/v1/models", b"/v1/models"),
        (b"models", b"models"),
        (b"", b""),
    ],
)
def test_a_location_at_the_instance_leads_through_here(sent: bytes, told: bytes) -> None:
    assert local_location(sent, b"gpu-a:8000", b"/base") == told


def test_a_location_leads_through_where_the_client_asked() -> None:
    assert local_location(b"http://gpu-a/v1/x", b"gpu-a", b"", b"/endpoints/e/openai") == b"/endpoints/e/openai/v1/x"
    assert local_location(b"/v1/x", b"gpu-a", b"", b"/endpoints/e/openai") == b"/endpoints/e/openai/v1/x"
    assert local_location(b"http://gpu-a", b"gpu-a", b"") == b"/"
    assert local_location(b"http://gpu-a?a=b", b"gpu-a", b"") == b"/?a=b"
    assert local_location(b"http://gpu-a//evil/x", b"gpu-a", b"") == b"http://gpu-a//evil/x"
    assert local_location(b"http://gpu-b/v1/x", b"gpu-a", b"", b"/endpoints/e/openai") == b"http://gpu-b/v1/x"
