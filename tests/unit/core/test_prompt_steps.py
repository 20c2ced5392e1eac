"""Reading a prompt takes some milliseconds: what would take longer is not parsed, or not rendered, or not walked."""

from typing import Any, Self

import orjson
import pytest

from prefixroute.core import canonical, scan
from prefixroute.core.content import MAX_ODD_PIECES, MAX_PIECES, IntricateError
from prefixroute.core.prompt import (
    MAX_PARSED_BYTES,
    MAX_PARSED_FIELDS,
    MAX_PARSED_ITEMS,
    MAX_PARSED_VALUES,
    Api,
    is_parsable,
    read_fields,
    read_prompt,
)
from prefixroute.instance_facts import read_models

USER = {"role": "user", "content": "Hello"}


def chat(*messages: Any, **more: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages, **more})


@pytest.mark.parametrize(
    ("item", "n_most"),
    [(b"{}", MAX_PARSED_ITEMS), (b"[]", MAX_PARSED_ITEMS), (b"1", MAX_PARSED_VALUES), (b'"a":1', MAX_PARSED_FIELDS)],
)
def test_so_many_are_parsed_and_no_more(item: bytes, n_most: int) -> None:
    padding = b'"' + b"x" * 66_000 + b'"'
    assert is_parsable(b",".join([padding] + [item] * n_most))
    assert not is_parsable(b",".join([padding] + [item] * (n_most + 1)))


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "user", "content": [{}]},
        {"role": "user", "content": [1]},
        {"role": "user", "content": 1},
        {"type": "other"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]},
    ],
)
def test_of_very_many_odd_things_the_key_is_the_body(message: object) -> None:
    few, many = chat(*[message] * MAX_ODD_PIECES, USER), chat(*[message] * (MAX_ODD_PIECES + 1), USER)
    assert read_prompt(Api.CHAT, few).key != few[:MAX_PARSED_BYTES]
    prompt = read_prompt(Api.CHAT, many)
    assert (prompt.key, prompt.no_key) == (many, None)
    assert (prompt.model, prompt.messages, prompt.answered_as) == ("m", None, None)
    longer = chat(*[message] * (MAX_ODD_PIECES + 1), USER, {"role": "assistant", "content": "Hi"}, USER)
    assert read_prompt(Api.CHAT, longer).key.startswith(prompt.key[:-2])


@pytest.mark.parametrize("shape", ["messages", "parts", "calls"])
def test_no_key_is_of_very_many_pieces(shape: str) -> None:
    many: list[Any] = ["x"] * (MAX_PIECES + 1)
    message = {
        "messages": {},
        "parts": {"role": "user", "content": many},
        "calls": {"role": "assistant", "content": "", "tool_calls": many},
    }[shape]
    with pytest.raises(IntricateError):
        canonical.chat_key({"messages": [message] if message else [USER, *many]})


@pytest.mark.parametrize("api", [Api.MESSAGES, Api.RESPONSES])
def test_so_it_is_in_other_grammars(api: Api) -> None:
    body = orjson.dumps({("input" if api is Api.RESPONSES else "messages"): [{}] * (MAX_ODD_PIECES + 1)})
    assert read_prompt(api, body).key == body


class Prompts(list[int]):
    """A prompt of a batch, by its token ids, that counts how often its length is asked."""

    n_asked = 0

    def __len__(self) -> int:
        type(self).n_asked += 1
        return super().__len__()

    @classmethod
    def batch(cls, n: int) -> list[Self]:
        cls.n_asked = 0
        return [cls([7] * 10) for _ in range(n)]


def test_of_a_very_long_batch_some_prompts_are_measured() -> None:
    key, n_tokens = canonical.completions_key({"prompt": Prompts.batch(100_001)})
    assert (len(key), n_tokens) == (40, 1_000_010)
    assert Prompts.n_asked < 5_000


def test_the_first_of_a_very_long_batch_counts_whole() -> None:
    key, n_tokens = canonical.completions_key({"prompt": ["x" * 4_000, *["y"] * 50_000]})
    assert (key, n_tokens) == (b"x" * 4_000, 1_000 + 50_000)


def test_fields_may_be_read_first() -> None:
    for body in (chat(USER), chat(USER)[:-1], b"[]", chat(USER, model="x" * MAX_PARSED_BYTES)):
        assert read_prompt(Api.CHAT, body, fields_read=read_fields(body)) == read_prompt(Api.CHAT, body)
    fields = read_fields(b"\x1f\x8b", encoded=True)
    assert read_prompt(Api.CHAT, b"\x1f\x8b", fields_read=fields) == read_prompt(Api.CHAT, b"\x1f\x8b", encoded=True)


def test_behind_so_much_of_a_body_nothing_is_walked() -> None:
    medium = (
        b'{"messages":[{"content":"' + bytes(range(48, 58)) + b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqr" * 400_000
    )
    assert len(medium) > scan.MAX_WALKED_BYTES
    keys = {scan.folded(medium + end, MAX_PARSED_BYTES) for end in (b'"}]}', b'","a":"another"}]}', b"x" * 20_000_000)}
    assert len(keys) == 1
    ((_, stands_for),) = keys
    assert stands_for == scan.MAX_WALKED_BYTES


def test_edges_full_of_items_are_parsed_but_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n_parsed = 0
    parse = scan._object

    def counting(text: bytes) -> dict[str, Any] | None:
        nonlocal n_parsed
        n_parsed += 1
        return parse(text)

    monkeypatch.setattr(scan, "_object", counting)
    names = b'"text":[],"input":[],"inputs":[],"tools":[],"prompt":[],"system":[],"messages":[]'
    head = b'{"x":[' + b"{}," * 21_000 + b"1]," + names
    assert scan.edge_fields(head.ljust(scan.EDGE_BYTES) + b"x" * scan.EDGE_BYTES) != {}
    assert n_parsed == 1


def test_a_list_of_models_that_would_take_long_to_read_tells_nothing() -> None:
    entries = [{"id": f"m{n}"} for n in range(20_000)]
    assert read_models(orjson.dumps({"data": entries[:5_000]})) is not None
    assert read_models(orjson.dumps({"data": entries})) is None
