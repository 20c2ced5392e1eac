"""What SageMaker's request headers may be, and what a container says of a session.

The bounds are those of the service model that AWS SDKs are made from. Who breaks one is told which header it was and
what it takes, never what it held: some of them are nobody else's business, and messages end up in logs.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from prefixroute.errors import RequestError
from prefixroute.http.headers import RawHeaders

NEW_SESSION = "NEW_SESSION"
MAX_NAME_CHARS = 63

# The same as AWS's `[a-zA-Z0-9](-*[a-zA-Z0-9])*`, without a repetition in a repetition.
_NAME = rb"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_NAME_WORDS = "letters, digits, and hyphens between them"
_PRINTABLE = rb"[!-~][ -~]*"
_PRINTABLE_WORDS = "printable characters, the first of them no space"
_ENDPOINT_NAME = re.compile(_NAME.decode("ascii"))
_MAX_SESSION_CHARS = 256
_SESSION = re.compile(rb"(%b)(?:;\s*Expires=([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z))?" % _NAME)


@dataclass(frozen=True, slots=True)
class InvocationFields:
    """What a request says beside its body. None: it says nothing of it."""

    accept: str | None = None
    """Of InvokeEndpointWithResponseStream only, which does not say it in `Accept`."""
    custom_attributes: str | None = None
    enable_explanations: str | None = None
    inference_component: str | None = None
    inference_id: str | None = None
    prefix_aware_id: str | None = None
    session_id: str | None = None
    """`NEW_SESSION` (never when streaming) asks for one."""
    target_container_hostname: str | None = None
    target_model: str | None = None
    target_variant: str | None = None


class _HeaderRule(NamedTuple):
    """What one header takes. `pattern` is of all of it; `n_chars`: from and to; `words` go on after their number."""

    field: str
    pattern: re.Pattern[bytes]
    n_chars: tuple[int, int]
    words: str


def _rule(field: str, pattern: bytes, least: int, most: int, words: str) -> _HeaderRule:
    return _HeaderRule(field, re.compile(pattern), (least, most), words)


_HEADER = "X-Amzn-SageMaker-"
_BOTH = {
    "Custom-Attributes": _rule("custom_attributes", rb"[\x00-\x7f]*", 0, 1024, "ASCII characters"),
    "Inference-Component": _rule("inference_component", _NAME, 1, MAX_NAME_CHARS, _NAME_WORDS),
    "Inference-Id": _rule("inference_id", _PRINTABLE, 1, 64, _PRINTABLE_WORDS),
    "Prefix-Aware-Id": _rule("prefix_aware_id", _PRINTABLE, 1, 64, _PRINTABLE_WORDS),
    "Target-Container-Hostname": _rule("target_container_hostname", _NAME, 1, MAX_NAME_CHARS, _NAME_WORDS),
    "Target-Variant": _rule("target_variant", _NAME, 1, MAX_NAME_CHARS, _NAME_WORDS),
}
_WHOLE = _BOTH | {
    "Enable-Explanations": _rule("enable_explanations", rb"[^\r\n]*", 1, 64, "characters"),
    "Session-Id": _rule(
        "session_id", rb"NEW_SESSION|" + _NAME, 1, _MAX_SESSION_CHARS, f"{_NAME_WORDS}, or NEW_SESSION"
    ),
    "Target-Model": _rule("target_model", _PRINTABLE, 1, 1024, _PRINTABLE_WORDS),
}
_STREAMING = _BOTH | {
    "Accept": _rule("accept", rb"[\x00-\x7f]*", 0, 1024, "ASCII characters"),
    "Session-Id": _rule("session_id", _NAME, 1, _MAX_SESSION_CHARS, _NAME_WORDS),
}


def _by_header(rules: dict[str, _HeaderRule]) -> dict[bytes, tuple[str, _HeaderRule]]:
    return {(_HEADER + name).lower().encode("ascii"): (_HEADER + name, rule) for name, rule in rules.items()}


_RULES = {False: _by_header(_WHOLE), True: _by_header(_STREAMING)}


def read_fields(headers: RawHeaders, *, streaming: bool) -> InvocationFields:
    """What InvokeEndpoint, or when `streaming` InvokeEndpointWithResponseStream, is told. Raises RequestError.

    Headers of SageMaker's that the operation does not have are let be, as SageMaker does.
    """
    rules = _RULES[streaming]
    found: dict[str, str] = {}
    for key, value in headers:
        known = rules.get(key.lower())
        if known is None:
            continue
        name, rule = known
        if rule.field in found:
            raise RequestError(f"{name} may be sent once only")
        least, most = rule.n_chars
        if not least <= len(value) <= most or rule.pattern.fullmatch(value) is None:
            has = "" if least <= len(value) <= most else f" (it has {len(value)} characters)"
            raise RequestError(f"{name} must be {_bounds(least, most)} {rule.words}{has}")
        found[rule.field] = value.decode("latin-1")
    return InvocationFields(**found)


def check_endpoint_name(name: str) -> None:
    """Raises RequestError for what no endpoint can be called."""
    if len(name) > MAX_NAME_CHARS or _ENDPOINT_NAME.fullmatch(name) is None:
        raise RequestError(f"the endpoint's name in the path must be {_bounds(1, MAX_NAME_CHARS)} {_NAME_WORDS}")


def session_of(value: bytes) -> tuple[str, float | None] | None:
    """What a container's `New-Session-Id` names: the session, and when it ends, in seconds since 1970 (None: it does
    not say). None when it cannot be read."""
    parts = _SESSION.fullmatch(value.strip()) if len(value) <= _MAX_SESSION_CHARS else None
    if parts is None:
        return None
    session, expires = parts.groups()
    if expires is None:
        return session.decode("ascii"), None
    try:
        ends = datetime.strptime(expires.decode("ascii"), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None  # a 13th month
    return session.decode("ascii"), ends.timestamp()


def _bounds(least: int, most: int) -> str:
    return f"{least} to {most}" if least else f"at most {most}"
