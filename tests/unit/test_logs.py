"""Lines: what they hold, what they never hold, and that nobody waits for them."""

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from prefixroute.access_log import AccessLog
from prefixroute.core.policy import Reason
from prefixroute.errors import NoInstanceError
from prefixroute.logs import LineHandler, TextFormatter, configure_logs, escaped, log_loop_exception
from prefixroute.record import AttemptOutcome, Outcome, RequestRecord

SECRET = "sk-1234567890abcdef"


class Lines:
    """The whole of logging, pointed at memory for one test."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.handler: LineHandler | None = None

    def configure(self, log_format: Literal["text", "json"] = "text", level: str = "info") -> logging.Logger:
        self.handler = configure_logs(log_format, level, self.stream)
        return logging.getLogger("prefixroute.test")

    @property
    def text(self) -> str:
        assert self.handler is not None
        self.handler.flush()
        return self.stream.getvalue()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def lines() -> Iterator[Lines]:
    root = logging.getLogger()
    loggers = [root, logging.getLogger("aiohttp"), logging.getLogger("asyncio")]
    levels = [logger.level for logger in loggers]
    lines = Lines()
    yield lines
    if lines.handler is not None:
        root.removeHandler(lines.handler)
        lines.handler.close()
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def a_record() -> RequestRecord:
    return RequestRecord(
        "req-1", "POST", "/v1/chat/completions", "aiohttp", 0.0,
        model="llama", outcome=Outcome.OK, status=200, streamed=True, body_bytes=4000, answer_bytes=1234,
        duration_s=1.23456, ttft_s=0.2504, reason=Reason.AFFINITY, upstream="gpu-a:8000",
        prompt_tokens=900, matched_tokens=640, cached_tokens=624,
        attempts=[AttemptOutcome.BUSY, AttemptOutcome.ANSWERED],
    )  # fmt: skip


def a_line(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("prefixroute.test", logging.INFO, "", 0, message, args, None)


def knows_llama(model: str) -> bool:
    return model == "llama"


def test_a_clients_address_is_told_where_the_record_has_it(lines: Lines) -> None:
    logger = lines.configure("json")
    AccessLog(logger, knows_llama).note(a_record())
    record = a_record()
    record.client = "192.0.2.7"
    AccessLog(logger, knows_llama).note(record)
    without, told = lines.objects
    assert "client" not in without
    assert told["client"] == "192.0.2.7"


def test_a_request_is_one_line_of_text(lines: Lines) -> None:
    AccessLog(lines.configure(), knows_llama).note(a_record())

    assert lines.text.partition(" ")[2] == (
        "info prefixroute.test: request request_id=req-1 method=POST route=/v1/chat/completions lane=aiohttp"
        " model=llama status=200 outcome=ok upstream=gpu-a:8000 reason=affinity attempts=busy,answered streamed=true"
        " prompt_tokens=900 matched_tokens=640 cached_tokens=624 ttft_ms=250.4 duration_ms=1234.6"
        " body_bytes=4000 answer_bytes=1234\n"
    )


def test_a_request_is_one_json_object_with_the_same_keys_each_time(lines: Lines) -> None:
    logger = lines.configure("json")
    AccessLog(logger, knows_llama).note(a_record())
    AccessLog(logger, knows_llama).note(RequestRecord("req-2", "GET", "/health", "fast", 0.0))

    first, second = lines.objects
    assert first.keys() == second.keys()
    assert (first["request_id"], first["ttft_ms"], first["error"]) == ("req-1", 250.4, None)
    assert (second["model"], second["status"], second["outcome"]) == (None, None, "fault")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_a_client_wrote_is_not_logged(lines: Lines, log_format: Literal["text", "json"]) -> None:
    record = a_record()
    record.model, record.method = SECRET, SECRET

    AccessLog(lines.configure(log_format, "debug"), knows_llama).note(record)

    assert SECRET not in lines.text
    assert "other" in lines.text


def test_nothing_is_made_when_the_level_is_off(lines: Lines) -> None:
    def knows_model(model: str) -> bool:
        raise AssertionError("asked for a line that nobody reads")

    AccessLog(lines.configure(level="warning"), knows_model).note(a_record())

    assert lines.text == ""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_control_characters_cannot_forge_a_line(lines: Lines, log_format: Literal["text", "json"]) -> None:
    hostile = "a\nb\r\x1b[31m\x00\x7f\x9b\u2028\u202e\ud800é"
    lines.configure(log_format)
    assert lines.handler is not None
    line = a_line("hello %s", hostile)  # past pytest, which cannot carry a lone surrogate
    line.fields = {"model": hostile}
    lines.handler.handle(line)

    assert lines.text.count("\n") == 1
    assert lines.text.rstrip("\n").isprintable()
    if log_format == "json":
        assert (lines.objects[0]["message"], lines.objects[0]["model"]) == (f"hello {hostile}", hostile)
    else:
        shown = r"a\nb\r\x1b[31m\x00\x7f\x9b\u2028\u202e\ud800é"
        assert f'hello {shown} model="{shown}"\n' in lines.text


def test_text_values_cannot_pass_for_two(lines: Lines) -> None:
    lines.configure().info("hello", extra={"fields": {"a": 'x" b=2', "c": None, "d": "", "e": "back\\slash"}})

    assert lines.text.endswith('hello a="x\\" b=2" d="" e="back\\\\slash"\n')


def test_long_messages_are_cut(lines: Lines) -> None:
    lines.configure().info("x" * 100_000)

    assert len(lines.text) < 10_000
    assert lines.text.endswith("(100000 characters)\n")


def fail_with(secret: str) -> None:
    try:
        int(secret)
    except ValueError as error:
        raise ConnectionRefusedError(111, "Connection refused") from error


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_tracebacks_show_types_and_places_but_no_foreign_text(
    lines: Lines, log_format: Literal["text", "json"]
) -> None:
    logger = lines.configure(log_format, "debug")
    try:
        fail_with(SECRET)
    except ConnectionRefusedError:
        logger.exception("it failed")

    text = lines.objects[0]["exception"] if log_format == "json" else lines.text
    assert SECRET not in text
    value_error, connection_error = text.index("ValueError"), text.index("ConnectionRefusedError: Connection refused")
    assert value_error < connection_error  # the cause first
    assert "in fail_with" in text
    assert lines.text.count("\n") == (1 if log_format == "json" else len(text.splitlines()))


def test_our_own_errors_tell_what_they_say(lines: Lines) -> None:
    try:
        raise ExceptionGroup("several", [NoInstanceError("nobody\nis there"), KeyError(SECRET)])
    except ExceptionGroup:
        lines.configure("text").exception("it failed")

    assert r"  | prefixroute.errors.NoInstanceError: nobody\nis there" in lines.text
    assert "  | KeyError\n" in lines.text
    assert SECRET not in lines.text


def test_a_traceback_that_refers_to_itself_ends(lines: Lines) -> None:
    error = ValueError(SECRET)
    other = KeyError(SECRET)
    error.__cause__, other.__cause__ = other, error

    lines.configure("json").error("odd", exc_info=error)

    assert lines.objects[0]["exception"] == "KeyError\nValueError"


async def test_a_task_that_fails_unseen_is_logged_without_what_it_held(lines: Lines) -> None:
    lines.configure("json")
    asyncio.get_running_loop().set_exception_handler(log_loop_exception)

    asyncio.get_running_loop().call_exception_handler(
        {"message": "Task exception was never retrieved", "exception": ValueError(SECRET), "future": SECRET}
    )

    assert lines.objects[0]["message"] == "Task exception was never retrieved"
    assert lines.objects[0]["exception"] == "ValueError"
    assert SECRET not in lines.text


def test_a_record_that_cannot_be_formatted_fails_nobody(lines: Lines) -> None:
    lines.configure()
    assert lines.handler is not None
    lines.handler.handle(a_line("%d items", SECRET))

    assert SECRET not in lines.text
    assert "could not be formatted" in lines.text


def test_configuring_twice_leaves_one_handler(lines: Lines) -> None:
    first = lines.configure("text")
    first_handler = lines.handler
    lines.configure("json", "warning").warning("once")

    assert [h for h in logging.getLogger().handlers if isinstance(h, LineHandler)] == [lines.handler]
    assert first_handler is not lines.handler
    assert len(lines.objects) == 1
    assert not first.isEnabledFor(logging.INFO)


def test_libraries_do_not_speak_below_warnings(lines: Lines) -> None:
    lines.configure(level="debug")
    logging.getLogger("aiohttp.server").debug("GET /?key=%s", SECRET)
    logging.getLogger("asyncio").info("task %s", SECRET)

    assert lines.text == ""


def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    """Lines above the bound are dropped, counted, and told of when the reader is back."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        handler = LineHandler(stream, max_backlog_chars=400_000)
        handler.setFormatter(TextFormatter())

        for i in range(20_000):  # far above what the pipe holds: a blocking write would never return
            handler.handle(a_line(f"line {i} {'x' * 40}"))
        assert handler.n_dropped > 10_000

        with os.fdopen(reader, "rb") as pipe:
            n_read = 0
            while b" lines were dropped" not in (line := pipe.readline()):
                n_read += b" line " in line
        assert n_read == 20_000 - handler.n_dropped
        handler.close()


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        handler = LineHandler(stream)
        os.close(reader)
        handler.handle(a_line("to nobody"))
        handler.flush()

        assert handler.n_dropped == 1
        handler.close()


def test_the_last_line_is_written_when_the_service_ends() -> None:
    script = """
        import logging, sys
        from prefixroute.logs import configure_logs
        configure_logs("text", "info")
        logging.getLogger("prefixroute").info("goodbye")
        sys.exit(3)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=30)

    assert done.returncode == 3
    assert done.stderr.endswith(" info prefixroute: goodbye\n")


def test_a_stalled_reader_does_not_keep_the_process_from_ending() -> None:
    script = """
        import logging
        from prefixroute.logs import configure_logs
        configure_logs("text", "info")
        for i in range(5000):
            logging.getLogger("prefixroute").info("%s", "x" * 100)
    """
    reader, writer = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], stderr=writer, timeout=30)
    finally:
        os.close(reader)
        os.close(writer)

    assert done.returncode == 0


def test_ordinary_text_is_left_alone() -> None:
    assert escaped("Grüße, 世界 🎉 \\n") == "Grüße, 世界 🎉 \\n"
