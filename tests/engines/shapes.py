"""Whether a simulated server answers as a real one: status, headers, and the shape of what it says, not its words."""

import json
from itertools import groupby
from typing import Any

from tests.engines.answers import Answer
from tests.engines.cases import FACTS, GENERATION, INVOCATIONS, REFUSED, TOKENS, Case, bare, post

CONTROL = [
    bare("POST", "/reset_prefix_cache"),
    bare("POST", "/reset_mm_cache"),
    bare("POST", "/reset_encoder_cache"),
    bare("POST", "/pause"),
    bare("POST", "/pause", "/pause?mode=nobody"),
    bare("GET", "/is_paused"),
    bare("POST", "/resume"),
    bare("GET", "/is_sleeping"),
    bare("POST", "/sleep", "/sleep?level=0"),
    bare("POST", "/sleep", "/sleep?level=many"),
    bare("POST", "/wake_up"),
]
OTHERS = [
    bare("GET", "/nobody"),
    bare("GET", "/v1/chat/completions/"),
    *(bare("HEAD", path) for path in ("/health", "/v1/models", "/version")),
    *(bare("PUT", path) for path in ("/v1/models", "/v1/chat/completions")),
    post("/nobody", "anything", {}),
]
# What the simulated server leaves out on purpose, because no router looks at it.
NOT_IMITATED = frozenset(
    {
        "GET /kv_event_sources",  # it has none
        "POST /v1/chat/completions: probabilities",
        "POST /v1/chat/completions: token ids",
        "POST /v1/completions: token ids",  # their probabilities
        "POST /v1/chat/completions: no role",  # eleven complaints, one for each kind of message
        "POST /v1/completions: no such token",  # its vocabulary has four billion
    }
)
IMITATED = [
    case
    for case in (*FACTS, *GENERATION, *REFUSED, *TOKENS, *INVOCATIONS, *CONTROL, *OTHERS)
    if case.name not in NOT_IMITATED
]


def shape_of(answer: Answer) -> Any:
    """What two answers that are alike have in common."""
    # Where a redirect leads depends on the host.
    headers = {name: value for name, value in answer.headers.items() if name != "location"}
    return answer.status, headers, _body(answer)


def differences(case: Case, real: Answer, simulated: Answer) -> list[str]:
    """One line for each."""
    return [f"{case.name}: {line}" for line in _differing("", shape_of(real), shape_of(simulated))]


def _body(answer: Answer) -> Any:
    if answer.is_stream:
        events = [_event(block) for block in answer.body.split(b"\n\n") if block]
        return [event for event, _ in groupby(events)]  # however many tokens there are
    try:
        document = json.loads(answer.body)
    except ValueError:
        return answer.body.decode(errors="replace")
    error = document.get("error") if isinstance(document, dict) else None
    if answer.status >= 400 and isinstance(error, dict):
        # Its type and place are for programs, its words for people.
        return {**document, "error": {**error, "message": "str"}}
    return _shape(document)


def _event(block: bytes) -> Any:
    fields = dict(line.split(": ", 1) for line in block.decode().splitlines())
    data = fields["data"]
    return fields.get("event"), _shape(json.loads(data)) if data.startswith("{") else data


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shape(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    return None if value is None else type(value).__name__


def _differing(where: str, real: Any, simulated: Any) -> list[str]:
    if isinstance(real, dict) and isinstance(simulated, dict):
        return [
            line
            for name in dict.fromkeys((*real, *simulated))
            for line in _differing(f"{where} {name}", real.get(name, "nothing"), simulated.get(name, "nothing"))
        ]
    if isinstance(real, list | tuple) and isinstance(simulated, list | tuple) and len(real) == len(simulated):
        pairs = enumerate(zip(real, simulated, strict=True))
        return [line for i, (one, other) in pairs for line in _differing(f"{where} {i}", one, other)]
    return [] if real == simulated else [f"{where}: {str(real)[:300]}, not {str(simulated)[:300]}"]
