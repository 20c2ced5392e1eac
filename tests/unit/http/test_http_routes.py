"""What a path means, whatever way it is spelt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixroute.core.prompt import Api
from prefixroute.http.routes import (
    OTHER,
    Dialect,
    is_engine_control,
    origin_form,
    plain_path,
    route_of,
    stored_response_id,
)


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        ("/", "/"),
        ("/a?b#c", "/a?b#c"),
        ("//a", "//a"),
        ("/a://b", "/a://b"),
        ("http://h/a?b", "/a?b"),
        ("HTTPS://h:1/a", "/a"),
        ("http://h", "/"),
        ("http://h?a=/b", "/?a=/b"),
        ("http://u:p@[::1]:1//a", "//a"),
        ("*", None),
        ("h:443", None),
        ("a", None),
        ("", None),
        ("ftp://h/a", None),
        ("ws://h/a", None),
    ],
)
def test_a_target_in_origin_form(target: str, origin: str | None) -> None:
    assert origin_form(target) == origin


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/", "/"),
        ("/a/", "/a"),
        ("//a///b//", "/a/b"),
        ("/a?b/c", "/a"),
        ("/a#b", "/a"),
        ("/%61%2Fb", "/a/b"),
        ("/%2561", "/%61"),
        ("/a/./b/../c", "/a/c"),
        ("/../a", "/a"),
        ("/..", "/"),
        ("/a/..", "/"),
        ("/%2e%2E/a", "/a"),
        ("/.a/..b", "/.a/..b"),
        ("/%ff", "/\ufffd"),
        ("/%", "/%"),
        ("http://h/a/", "/a"),
        ("http://h", "/"),
        ("*", "/"),
    ],
)
def test_a_plain_path(target: str, path: str) -> None:
    assert plain_path(target) == path


@given(st.text(st.sampled_from("/.%2eEfFa?#:h"), max_size=30))
def test_a_plain_path_is_plain(target: str) -> None:
    path = plain_path("/" + target)
    assert path.startswith("/")
    assert "//" not in path
    assert path == "/" or not path.endswith("/")
    assert not {".", ".."} & set(path.split("/"))


@given(st.text(max_size=30))
def test_any_text_has_a_path_and_a_route(target: str) -> None:
    assert route_of(plain_path(target)) is not None


def test_routes_know_their_grammar_and_dialect() -> None:
    assert route_of("/v1/chat/completions").api is Api.CHAT
    assert route_of("/v1/messages").dialect is Dialect.ANTHROPIC
    assert route_of("/v1/messages/batches/x").dialect is Dialect.ANTHROPIC
    assert route_of("/v1/messages/batches/x").label == "other"
    assert route_of("/v1/messagesx") is OTHER
    assert route_of("/v1/responses/resp_1/cancel").label == "/v1/responses/{id}"
    assert route_of("/scanner.php") is OTHER


def test_only_what_may_be_computed_twice_is_repeatable() -> None:
    assert route_of("/v1/embeddings").repeatable
    # A response that is stored is made once.
    assert not route_of("/v1/responses").repeatable
    assert not route_of("/v1/audio/transcriptions").repeatable


@pytest.mark.parametrize(
    ("path", "response_id"),
    [
        ("/v1/responses", None),
        ("/v1/responses/", None),
        ("/v1/responses/r", "r"),
        ("/v1/responses/r/cancel", "r"),
        ("/v1/chat/r", None),
    ],
)
def test_the_id_of_a_stored_response(path: str, response_id: str | None) -> None:
    assert stored_response_id(path) == response_id


@pytest.mark.parametrize(
    ("method", "path", "controls"),
    [
        ("POST", "/sleep", True),
        ("GET", "/sleep", True),
        ("POST", "/props", True),
        ("GET", "/props", False),
        ("PUT", "/slots/1", True),
        ("HEAD", "/slots/1", False),
        ("POST", "/v1/models", False),
    ],
)
def test_what_controls_an_engine(method: str, path: str, controls: bool) -> None:
    assert is_engine_control(method, path) is controls
