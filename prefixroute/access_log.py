"""One line for each finished request.

Every request pays for its line, so the usual case goes a short way: where our own handler is the only one that would
get it, no `LogRecord` is made. What repeats from request to request is kept as text, and numbers are put behind it.
Whoever else listens (another handler, a filter) gets a record as from any logger, with `fields`. Either way our handler
writes the same bytes.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from prefixroute.logs import JsonFormatter, TextFormatter, only_line_handler, quoted, text_pairs
from prefixroute.record import METHODS, RequestRecord

MAX_KEPT = 1024
"""Texts that are kept, of 300 bytes each. Above it all go at once: each is made again in some microseconds."""

_LEVEL = logging.INFO
_CLIENT = ',"client":'


class AccessLog:
    """`knows_model`: whether a model's name may be shown."""

    def __init__(self, logger: logging.Logger, knows_model: Callable[[str], bool]) -> None:
        self._logger = logger
        self._knows_model = knows_model
        # What repeats, by its values.
        self._texts: dict[tuple[object, ...], str] = {}
        self._jsons: dict[tuple[object, ...], str] = {}

    def note(self, record: RequestRecord) -> None:
        """Writes one line, if the level says so. Neither blocks nor raises."""
        logger = self._logger
        if not logger.isEnabledFor(_LEVEL):
            return
        model = record.model
        if model is not None and not self._knows_model(model):
            model = "other"
        handler = only_line_handler(logger, _LEVEL)
        formatter = None if handler is None else handler.formatter
        if handler is not None and type(formatter) is TextFormatter:
            handler.write_line(self._text_line(record, model, formatter))
        elif handler is not None and type(formatter) is JsonFormatter:
            handler.write_line(self._json_line(record, model, formatter))
        else:
            # Past `Logger.info`, which would walk the stack for the caller's place.
            entry = logging.LogRecord(logger.name, _LEVEL, "", 0, "request", None, None)
            entry.fields = _fields(record, model)
            logger.handle(entry)

    def _text_line(self, record: RequestRecord, model: str | None, formatter: TextFormatter) -> str:
        # As TextFormatter writes `_fields`: None is left out.
        values = _repeating_values(record, model)
        repeating = self._texts.get(values)
        if repeating is None:
            repeating = _keep(self._texts, values, text_pairs(_repeating(record, model)))
        cached, ttft_s, waited_s, held_s, client = (
            record.cached_tokens, record.ttft_s, record.waited_s, record.held_s, record.client,
        )  # fmt: skip
        return (
            f"{formatter.time_text(time.time())} info {self._logger.name}: request"
            f" request_id={quoted(record.request_id)}{repeating}"
            f" prompt_tokens={record.prompt_tokens} matched_tokens={record.matched_tokens}"
            f"{f' cached_tokens={cached}' if cached is not None else ''}"
            f"{f' ttft_ms={ttft_s * 1000:.1f}' if ttft_s is not None else ''}"
            f" duration_ms={record.duration_s * 1000:.1f}"
            f"{f' waited_ms={waited_s * 1000:.1f}' if waited_s else ''}"
            f"{f' held_ms={held_s * 1000:.1f}' if held_s else ''}"
            f" body_bytes={record.body_bytes} answer_bytes={record.answer_bytes}"
            f"{f' client={quoted(client)}' if client is not None else ''}\n"
        )

    def _json_line(self, record: RequestRecord, model: str | None, formatter: JsonFormatter) -> str:
        # As JsonFormatter writes `_fields`: None is null, so that each line has the same keys.
        encode = formatter.encode
        values = _repeating_values(record, model)
        repeating = self._jsons.get(values)
        if repeating is None:
            repeating = _keep(self._jsons, values, encode(_repeating(record, model))[1:-1])
        cached, ttft_s, waited_s, held_s, client = (
            record.cached_tokens, record.ttft_s, record.waited_s, record.held_s, record.client,
        )  # fmt: skip
        return (
            f'{{"time":"{formatter.time_text(time.time())}","level":"info","logger":{encode(self._logger.name)}'
            f',"message":"request","request_id":{encode(record.request_id)},{repeating}'
            f',"prompt_tokens":{record.prompt_tokens},"matched_tokens":{record.matched_tokens}'
            f',"cached_tokens":{cached if cached is not None else "null"}'
            f',"ttft_ms":{f"{ttft_s * 1000:.1f}" if ttft_s is not None else "null"}'
            f',"duration_ms":{record.duration_s * 1000:.1f}'
            f',"waited_ms":{f"{waited_s * 1000:.1f}" if waited_s else "null"}'
            f',"held_ms":{f"{held_s * 1000:.1f}" if held_s else "null"}'
            f',"body_bytes":{record.body_bytes},"answer_bytes":{record.answer_bytes}'
            f"{_CLIENT + encode(client) if client is not None else ''}}}\n"
        )


def _keep(kept: dict[tuple[object, ...], str], values: tuple[object, ...], text: str) -> str:
    if len(kept) >= MAX_KEPT:
        kept.clear()
    kept[values] = text
    return text


def _repeating_values(record: RequestRecord, model: str | None) -> tuple[object, ...]:
    """All that `_repeating` is made of."""
    attempts, reason = record.attempts, record.reason
    return (
        record.method,
        record.route,
        record.lane,
        record.key,
        model,
        record.status,
        record.outcome,
        record.error,
        record.upstream,
        # Not the member, whose hash is a function in Python.
        reason if reason is None else reason._value_,
        attempts[0] if len(attempts) == 1 else tuple(attempts),
        record.streamed,
    )


def _repeating(record: RequestRecord, model: str | None) -> dict[str, Any]:
    """Fields from closed sets, or as good as closed."""
    return {
        "method": record.method if record.method in METHODS else "other",
        "route": record.route,
        "lane": record.lane,
        "key": record.key,
        "model": model,
        "status": record.status,
        "outcome": record.outcome.value,
        "error": record.error,
        "upstream": record.upstream,
        "reason": record.reason.value if record.reason is not None else None,
        "attempts": ",".join([attempt.value for attempt in record.attempts]) or None,
        "streamed": record.streamed,
    }


def _fields(record: RequestRecord, model: str | None) -> dict[str, Any]:
    """The line, field by field."""
    fields = {
        "request_id": record.request_id,
        **_repeating(record, model),
        "prompt_tokens": record.prompt_tokens,
        "matched_tokens": record.matched_tokens,
        "cached_tokens": record.cached_tokens,
        "ttft_ms": _ms(record.ttft_s),
        "duration_ms": _ms(record.duration_s),
        "waited_ms": _ms(record.waited_s) if record.waited_s else None,
        "held_ms": _ms(record.held_s) if record.held_s else None,
        "body_bytes": record.body_bytes,
        "answer_bytes": record.answer_bytes,
    }
    if record.client is not None:
        fields["client"] = record.client
    return fields


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
