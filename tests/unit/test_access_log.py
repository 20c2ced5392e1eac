"""The line of a request: the short way writes what the long one would, and is taken only where nobody would miss it."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute.access_log import MAX_KEPT, AccessLog
from prefixroute.core.policy import Reason
from prefixroute.logs import JsonFormatter, LineHandler, TextFormatter
from prefixroute.record import AttemptOutcome, Outcome, RequestRecord

LOG_FORMATS: tuple[Literal["text", "json"], ...] = ("text", "json")


class Keeper(logging.Handler):
    """Anybody else's handler."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Log:
    """A logger of its own with our handler, away from those of pytest."""

    def __init__(self, log_format: Literal["text", "json"]) -> None:
        self.stream = io.StringIO()
        self.handler = LineHandler(self.stream)
        self.handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
        self.logger = logging.Logger("prefixroute.access", logging.INFO)  # noqa: LOG001  one that no other test has
        self.logger.addHandler(self.handler)
        self.models = {"llama"}
        self.access = AccessLog(self.logger, self.models.__contains__)

    @property
    def lines(self) -> list[str]:
        self.handler.flush()
        return self.stream.getvalue().splitlines(keepends=True)


@pytest.fixture(params=LOG_FORMATS)
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    log = Log(request.param)
    yield log
    log.handler.close()


def a_record(request_id: str = "req-1", model: str | None = "llama") -> RequestRecord:
    return RequestRecord(
        request_id, "POST", "/v1/chat/completions", "aiohttp", 0.0,
        model=model, outcome=Outcome.OK, status=200, streamed=True, body_bytes=4000, answer_bytes=1234,
        duration_s=1.23456, ttft_s=0.2504, reason=Reason.AFFINITY, upstream="gpu-a:8000",
        prompt_tokens=900, matched_tokens=640, cached_tokens=624, attempts=[AttemptOutcome.ANSWERED],
    )  # fmt: skip


def without_time(line: str) -> str:
    """The time in front is that of the writing."""
    at = line.index("Z") + 1
    return line[at:]


TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", "a=b", 'a"b', "a\\b", "a b", "a\nb", "\u2028", "\x7f", "é", "gpu-a:1"]
)
SECONDS = st.floats(0, 1e7) | st.sampled_from([0.0, 0.00005, 0.00025, 0.000_75, 0.25, 1.0005, 12345.67895])
RECORDS = st.builds(
    RequestRecord,
    request_id=TEXTS,
    method=st.sampled_from(["GET", "POST", "BREW"]),
    route=TEXTS,
    lane=TEXTS,
    began_s=st.just(0.0),
    model=st.none() | st.sampled_from(["llama", "other one"]),
    outcome=st.sampled_from(Outcome),
    status=st.none() | st.integers(100, 599),
    error=st.none() | TEXTS,
    key=st.none() | TEXTS,
    client=st.none() | TEXTS,
    streamed=st.booleans(),
    body_bytes=st.integers(0, 10**12),
    answer_bytes=st.integers(0, 10**12),
    duration_s=SECONDS,
    ttft_s=st.none() | SECONDS,
    waited_s=SECONDS,
    held_s=SECONDS,
    reason=st.none() | st.sampled_from(Reason),
    upstream=st.none() | TEXTS,
    prompt_tokens=st.integers(0, 10**9),
    matched_tokens=st.integers(0, 10**9),
    cached_tokens=st.none() | st.integers(0, 10**9),
    attempts=st.lists(st.sampled_from(AttemptOutcome), max_size=3),
)


@pytest.mark.parametrize("log_format", LOG_FORMATS)
@settings(max_examples=30, deadline=None)  # each waits for two writers
@given(records=st.lists(RECORDS, min_size=1, max_size=20))
def test_the_short_way_writes_what_the_long_one_does(
    records: list[RequestRecord], log_format: Literal["text", "json"]
) -> None:
    short, long = Log(log_format), Log(log_format)
    keeper = Keeper()
    long.logger.addHandler(keeper)
    try:
        for record in records * 2:  # made, and then kept
            short.access.note(record)
            long.access.note(record)
        assert [*map(without_time, short.lines)] == [*map(without_time, long.lines)]
        assert len(short.lines) == len(keeper.records) == 2 * len(records)
    finally:
        short.handler.close()
        long.handler.close()


def test_another_handler_gets_a_record_with_fields(log: Log) -> None:
    keeper = Keeper()
    log.logger.addHandler(keeper)
    log.access.note(a_record())

    (record,) = keeper.records
    assert (record.name, record.levelno, record.getMessage()) == ("prefixroute.access", logging.INFO, "request")
    fields = record.__dict__["fields"]
    assert (fields["request_id"], fields["ttft_ms"], fields["error"]) == ("req-1", 250.4, None)
    assert len(log.lines) == 1


def test_handlers_of_parents_count_unless_nothing_is_passed_on(log: Log) -> None:
    parent, keeper = logging.Logger("prefixroute"), Keeper()  # noqa: LOG001  one that no other test has
    parent.addHandler(keeper)
    log.logger.parent = parent
    log.access.note(a_record("first"))
    log.logger.propagate = False
    log.access.note(a_record("second"))

    assert [record.__dict__["fields"]["request_id"] for record in keeper.records] == ["first"]
    assert len(log.lines) == 2


def test_filters_and_levels_are_obeyed(log: Log) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        return False

    log.handler.addFilter(refuse)
    log.access.note(a_record())
    log.handler.removeFilter(refuse)
    log.logger.addFilter(refuse)
    log.access.note(a_record())
    log.logger.removeFilter(refuse)
    log.handler.setLevel(logging.WARNING)
    log.access.note(a_record())
    log.handler.setLevel(logging.NOTSET)
    assert log.lines == []

    log.access.note(a_record())
    assert len(log.lines) == 1


def test_a_formatter_of_somebody_elses_is_used(log: Log) -> None:
    log.handler.setFormatter(logging.Formatter("%(levelname)s %(message)s\n"))
    log.access.note(a_record())
    assert log.lines == ["INFO request\n"]


def test_a_models_name_is_shown_as_long_as_it_is_known(log: Log) -> None:
    log.access.note(a_record())
    log.models.clear()
    log.access.note(a_record())

    known, unknown = log.lines
    assert "llama" in known
    assert "llama" not in unknown
    assert "other" in unknown


def test_what_is_kept_is_bounded(log: Log) -> None:
    for number in range(2 * MAX_KEPT):
        record = a_record()
        record.upstream = f"gpu-{number}"
        log.access.note(record)
        assert len(log.access._texts) + len(log.access._jsons) <= MAX_KEPT
    assert [f"gpu-{number}" in line for number, line in enumerate(log.lines)] == [True] * 2 * MAX_KEPT


def test_the_time_is_that_of_the_writing() -> None:
    formatter = JsonFormatter()
    assert formatter.time_text(0.0) == "1970-01-01T00:00:00.000Z"
    assert formatter.time_text(1_700_000_000.9999) == "2023-11-14T22:13:20.999Z"
    assert formatter.time_text(1_700_000_001.0) == "2023-11-14T22:13:21.000Z"
    assert formatter.time_text(1_699_999_999.5) == "2023-11-14T22:13:19.500Z"  # clocks are set back, too
    log = Log("json")
    log.access.note(a_record())
    assert json.loads(log.lines[0])["time"].startswith("20")
    log.handler.close()
