"""Answers as they came, and without what differs each time: ids, times."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from tests.engines.cases import Case

REQUEST_ID = "fixed-id"
"""Engines make the ids of most answers from that of the request."""

# Times, and ids that are drawn for each answer.
_VARIABLE = re.compile(
    rb'"(?:created|created_at|completed_at)":\s*[0-9.]+'
    rb"|\b(?:resp|msg|rs|fc|call|modelperm|chatcmpl|cmpl|chatcmpl-tool|item)[-_][0-9a-f]{8,}"
    rb"|\b[0-9a-f]{16,}\b"
)
# About this connection or moment.
_PASSING = frozenset({"date", "connection", "keep-alive", "transfer-encoding", "content-length", "x-request-id"})


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Lower-case names, without those that are about the connection or the moment."""
    body: bytes
    """As it came."""

    @property
    def text(self) -> str:
        """The body without ids and times."""
        return without_variable(self.body)

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


def without_variable(body: bytes) -> str:
    """A body without ids and times."""
    return _VARIABLE.sub(b"*", body).decode(errors="replace")


def gist(stream: bytes) -> tuple[str, list[str], str]:
    """All that it says, all that it counts, and how it ends."""
    text = without_variable(stream)
    said = "".join(re.findall(r'"(?:content|text)": ?"((?:[^"\\]|\\.)*)"', text))
    return said, re.findall(r'"[a-z_]*tokens": ?[0-9]+', text), text[-60:]


async def ask(session: aiohttp.ClientSession, url: str, case: Case) -> Answer:
    headers = {"X-Request-Id": REQUEST_ID}
    if case.content_type is not None:
        headers["Content-Type"] = case.content_type
    async with session.request(
        case.method,
        url + case.target,
        data=case.body,
        headers=headers,
        skip_auto_headers=("Content-Type",),
        allow_redirects=False,
    ) as response:
        told = {name.lower(): value for name, value in response.headers.items()}
        kept = {name: value for name, value in told.items() if name not in _PASSING}
        return Answer(response.status, kept, await response.read())
