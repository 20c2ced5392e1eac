"""What a client gets through the router is what it would get from the engine: status, headers and body, ids and times
aside. For every endpoint that vLLM lists in /openapi.json, with every method, and with bodies of every kind."""

import re
from collections.abc import Callable

import aiohttp

from tests.engines.answers import Answer, ask
from tests.engines.cases import CASES, Case, bare
from tests.engines.load import client
from tests.engines.routers import before
from tests.engines.servers import VllmServer

# What the router says itself: whether it can serve. /metrics is the engine's, and never twice the same.
ITS_OWN = frozenset({"/health", "/ping"})
CHANGING = frozenset({"/metrics"})
STREAM_TRIES = 8
_AT_THE_SERVER = re.compile(r"^http://127\.0\.0\.1:[0-9]+(?=/)")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


async def test_every_endpoint_answers_as_directly(vllm: list[VllmServer], tell: Callable[[str], None]) -> None:
    server = vllm[0]
    # After a fault of its own vLLM closes the connection without a word: a client may find that out too late.
    async with before([server], engine_control="allow") as app, client(reuses_connections=False) as session:
        listed = await endpoints(session, server)
        assert listed <= {(case.method, case.path) for case in CASES} | {("GET", "/metrics")}, "cases for all of them"
        cases = [*CASES, *other_methods(listed)]
        pairs = [(case, await ask_both(session, server.url, app.url, case)) for case in cases]
    differing = [said for case, (direct, routed) in pairs if (said := difference(case, direct, routed)) is not None]
    n_streams = sum(direct.is_stream for _, (direct, _) in pairs)
    tell(
        f"as directly: {len(cases) - len(differing)} of {len(cases)} requests to {len(listed)} endpoints, "
        f"{n_streams} of them streams that are the same bytes"
    )
    assert not differing, "\n".join(differing)


async def endpoints(session: aiohttp.ClientSession, server: VllmServer) -> set[tuple[str, str]]:
    async with session.get(f"{server.url}/openapi.json") as response:
        paths = (await response.json())["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def other_methods(listed: set[tuple[str, str]]) -> list[Case]:
    """Methods that an endpoint does not have."""
    paths = sorted({path for _, path in listed} - ITS_OWN - CHANGING)
    return [
        bare(method, path, path.replace("{response_id}", "resp_nobody"))
        for path in paths
        for method in METHODS
        if (method, path) not in listed
    ]


async def ask_both(session: aiohttp.ClientSession, direct: str, routed: str, case: Case) -> tuple[Answer, Answer]:
    """A stream several times, if need be: where its server falls behind, vLLM puts tokens into one event."""
    await ask(session, direct, case)  # so that as much is cached for both
    wanted, got = await ask(session, direct, case), await ask(session, routed, case)
    for _ in range(STREAM_TRIES):
        if not wanted.is_stream or difference(case, wanted, got) is None:
            break
        wanted, got = await ask(session, direct, case), await ask(session, routed, case)
    return wanted, got


def difference(case: Case, direct: Answer, routed: Answer) -> str | None:
    if case.path in ITS_OWN:
        return None if routed.status == direct.status else f"{case.name}: {routed.status}, not {direct.status}"
    # Where ids and times are as long as ever, so is the whole, to the byte.
    headers = dict(direct.headers)
    if "location" in headers:
        # One at the server itself leads through the router.
        headers["location"] = _AT_THE_SERVER.sub("", headers["location"])
    if (routed.status, routed.headers, routed.text) == (direct.status, headers, direct.text) and (
        not direct.is_stream or len(routed.body) == len(direct.body)
    ):
        return None
    return f"{case.name}:\n  directly {_shown(direct)}\n  routed   {_shown(routed)}"


def _shown(answer: Answer) -> str:
    return f"{answer.status} {dict(sorted(answer.headers.items()))} {answer.text[:600]}"
