"""Where an instance is, as requests to it say."""

import ssl

import pytest

from prefixroute.http.upstream.place import authority_and_base, place_of


@pytest.mark.parametrize(
    ("url", "authority", "base"),
    [
        ("http://gpu-a:8000", b"gpu-a:8000", b""),
        ("http://gpu-a/base/of/it", b"gpu-a", b"/base/of/it"),
        ("http://[::1]:8000", b"[::1]:8000", b""),
        ("unix:/run/vllm.sock", b"localhost", b""),
    ],
)
def test_what_requests_name(url: str, authority: bytes, base: bytes) -> None:
    place = place_of(url)
    assert authority_and_base(url) == (place.authority, place.base) == (authority, base)


def test_to_ask_for_it_makes_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context takes a tenth of a second to make, and a redirect asks."""

    def fails() -> None:
        raise AssertionError("a context was made")

    monkeypatch.setattr(ssl, "create_default_context", fails)
    assert authority_and_base("https://gpu-a/base") == (b"gpu-a", b"/base")
