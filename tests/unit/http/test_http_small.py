"""The small parts: error bodies, what answers tell, where responses live, how many repeats there may be."""

import json

import pytest

from prefixroute.errors import NoInstanceError, RequestError
from prefixroute.http.dialects import error_body, error_headers
from prefixroute.http.front import address
from prefixroute.http.retry import RetryBudget
from prefixroute.http.routes import Dialect
from prefixroute.http.stored import StoredResponses
from prefixroute.http.usage import UsageWatch

# ---------------------------------------------------------------------- dialects


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 417, 429, 431, 500, 501, 502, 503, 504])
def test_an_error_says_whose_fault_it_is(status: int) -> None:
    openai = json.loads(error_body(Dialect.OPENAI, status, "a_code", 'say "hi"'))["error"]
    assert (openai["message"], openai["param"], openai["code"]) == ('say "hi"', None, "a_code")
    assert (openai["type"] == "server_error") == (status in (500, 502, 504))
    anthropic = json.loads(error_body(Dialect.ANTHROPIC, status, "a_code", "hi"))
    assert anthropic == {"type": "error", "error": {"type": anthropic["error"]["type"], "message": "hi"}}
    assert (anthropic["error"]["type"] == "api_error") == (status in (500, 502, 504))


def test_an_error_says_when_to_come_back_where_that_is_known() -> None:
    json_type = (b"Content-Type", b"application/json")
    openai, whose = Dialect.OPENAI, (b"x-request-id", b"r")
    assert error_headers(openai, 400, "r") == error_headers(openai, 400, "r", RequestError("x")) == [json_type, whose]
    assert error_headers(openai, 503, "r", NoInstanceError("x", 7)) == [json_type, whose, (b"Retry-After", b"7")]
    assert error_headers(openai, 503, "r", NoInstanceError("x")) == [json_type, whose, (b"Retry-After", b"1")]


# ---------------------------------------------------------------------- usage


def watched(*pieces: bytes) -> UsageWatch:
    watch = UsageWatch()
    for piece in pieces:
        watch.see(piece)
    return watch


CHAT_USAGE = b'"usage":{"prompt_tokens":100,"total_tokens":120,"prompt_tokens_details":{"cached_tokens":64}}'
RESPONSES_USAGE = b'"usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64}}'
MESSAGES_START = (
    b'{"type":"message_start","message":{"usage":'
    b'{"input_tokens":6,"cache_creation_input_tokens":30,"cache_read_input_tokens":64}}}'
)


@pytest.mark.parametrize(
    "pieces",
    [
        [b'{"choices":[],' + CHAT_USAGE + b"}"],
        [b"data: {}\n\n"] * 100 + [b"data: {" + CHAT_USAGE + b"}\n\n", b"data: [DONE]\n\n"],
        [b"x" * 100_000 + CHAT_USAGE],
        [b"x", CHAT_USAGE[:40], CHAT_USAGE[40:70], CHAT_USAGE[70:]],
        [b"{" + RESPONSES_USAGE + b"}"],
        [MESSAGES_START, *[b"data: {}\n\n"] * 100],
        [MESSAGES_START[:50], MESSAGES_START[50:], *[b"data: {}\n\n"] * 100],
    ],
)
def test_usage_is_found_where_apis_put_it(pieces: list[bytes]) -> None:
    assert watched(*pieces).usage() == (64, 100)


@pytest.mark.parametrize(
    "pieces",
    [[], [b""], [b"{}"], [b'"prompt_tokens":5'], [b'"cached_tokens":5'], [b'"cached_tokens":"5","prompt_tokens":x']],
)
def test_usage_is_none_where_it_is_not_told(pieces: list[bytes]) -> None:
    assert watched(*pieces).usage() is None


@pytest.mark.parametrize(
    "pieces",
    [
        [b'{"usage":{"prompt_tokens":100,"total_tokens":120,"completion_tokens":20,"completion_tokens_details":null}}'],
        [b"data: {}\n\n"] * 100 + [b'data: {"usage": {"completion_tokens" : 20}}\n\n', b"data: [DONE]\n\n"],
        [b'{"usage":{"completion_tokens":19}}', b'{"usage":{"completion_tokens":20}}'],
        [b'{"usage":{"input_tokens":5,"output_tok', b'ens":20,"output_tokens_details":{"reasoning_tokens":0}}}'],
        [MESSAGES_START, *[b"data: {}\n\n"] * 100, b'{"type":"message_delta","usage":{"output_tokens":20}}'],
        [b'{"details":{"generated_tokens":20},"generated_text":"\\"output_tokens\\": 7"}'],
    ],
)
def test_the_length_of_an_answer_is_found_where_apis_put_it(pieces: list[bytes]) -> None:
    assert watched(*pieces).completion_tokens() == 20


@pytest.mark.parametrize("pieces", [[], [b"{}"], [b'"completion_tokens":null'], [b'"completion_tokens":"20"']])
def test_the_length_of_an_answer_is_none_where_it_is_not_told(pieces: list[bytes]) -> None:
    assert watched(*pieces).completion_tokens() is None


# The end of a stream of llama.cpp (build 11434) that was not asked for its usage.
TIMINGS = (
    b'data: {"choices":[{"finish_reason":"length","index":0,"delta":{}}],"object":"chat.completion.chunk",'
    b'"timings":{"cache_n":41,"prompt_n":1,"prompt_ms":151.201,"prompt_per_second":6.613712872269364,"predicted_n":4}}\n\n'
)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "pieces", [[TIMINGS, DONE], [TIMINGS + DONE], [TIMINGS[:120], TIMINGS[120:160], TIMINGS[160:], DONE]]
)
def test_timings_of_llama_cpp_tell_where_usage_does_not(pieces: list[bytes]) -> None:
    watch = watched(b"data: {}\n\n", *pieces)
    assert (watch.usage(), watch.completion_tokens()) == ((41, 42), 4)


@pytest.mark.parametrize(
    ("pieces", "usage"),
    [
        ([TIMINGS, b"data: {" + CHAT_USAGE + b"}\n\n"], (64, 100)),
        ([b'{"text":"\\"timings\\": {\\"cache_n\\": 1, \\"prompt_n\\": 2}"}'], None),
        ([b'"timings":{"cache_n":41}'], None),
        ([b'"timings":{"cache_n":123456789012,"prompt_n":1}'], None),
        ([TIMINGS.replace(b'"cache_n":41', b'"cache_n":7'), TIMINGS], (41, 42)),
        ([b'"timings":null,"cache_n":41,"prompt_n":1'], None),
    ],
)
def test_timings_count_only_as_llama_cpp_tells_them(pieces: list[bytes], usage: tuple[int, int] | None) -> None:
    assert watched(*pieces).usage() == usage


def test_events_of_a_stream_are_counted() -> None:
    assert watched(b"data: a\n\n", b"data: b\n\ndata: c\n\n", b'{"text":"a\\n\\n"}').n_events == 3
    assert watched(b"data: a\r\n\r\n", b"data: b\r\n\r\ndata: c\r\n\r\n").n_events == 3


def test_the_last_word_on_usage_counts() -> None:
    assert watched(b'"prompt_tokens":1,"cached_tokens":0', CHAT_USAGE).usage() == (64, 100)


@pytest.mark.parametrize(
    "pieces",
    [
        [b'{"id":"resp_1","object":"response"}'],
        [b'data: {"response": {"id" : "resp_1"}}'],
        [b'{"id":"re', b'sp_1"}'],
        [b"x" * 4000, b'"id":"resp_1"'],
        [b'"previous_response_id":"resp_0","id":"resp_1","metadata":{"id":"resp_2"}'],
    ],
)
def test_the_id_of_a_response_is_found_at_its_beginning(pieces: list[bytes]) -> None:
    assert watched(*pieces).response_id() == "resp_1"


@pytest.mark.parametrize(
    "pieces", [[], [b'{"id":"chatcmpl-1"}'], [b"x" * 5000, b'"id":"resp_1"'], [b'"id":"resp_' + b"x" * 300]]
)
def test_what_is_no_id_of_a_response_is_none(pieces: list[bytes]) -> None:
    assert watched(*pieces).response_id() is None


def test_what_is_kept_of_an_answer_is_bounded() -> None:
    watch = UsageWatch()
    assert watch.see(b"x" * 1000)
    assert watch.see(b"x" * 1_000_000)
    assert not watch.see(b"x" * 1_000_000)
    assert len(watch._first) + sum(map(len, watch._last)) <= 5 * 4096


# ---------------------------------------------------------------------- stored responses, retry budget, addresses


def test_the_responses_used_last_are_remembered() -> None:
    stored = StoredResponses(2)
    stored.record("a", "gpu-0")
    stored.record("b", "gpu-1")
    assert stored.home("a") == "gpu-0"
    stored.record("c", "gpu-0")
    assert (stored.home("a"), stored.home("b"), stored.home("c"), stored.home(None)) == ("gpu-0", None, "gpu-0", None)
    stored.record("c", "gpu-1")
    assert (stored.home("c"), len(stored)) == ("gpu-1", 2)
    none = StoredResponses(0)
    none.record("a", "gpu-0")
    assert none.home("a") is None


def test_repeats_are_a_share_of_requests_with_a_reserve() -> None:
    budget = RetryBudget(0.5)
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    for _ in range(4):
        budget.paid_in()
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(1000):
        budget.paid_in()
    # Quiet times save no more than the reserve.
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]


def test_no_share_means_no_repeats() -> None:
    budget = RetryBudget(0.0)
    budget.paid_in()
    assert not budget.take()


@pytest.mark.parametrize(
    ("host", "text"), [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("a.test", "a.test:80")]
)
def test_an_address_is_written_as_in_a_url(host: str, text: str) -> None:
    assert address(host, 80) == text
