"""The admin port on a real socket: what it answers, what it refuses, what it never repeats."""

import asyncio
import json
import logging
import zlib
from collections.abc import AsyncIterator, Sequence
from io import BytesIO
from random import Random
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance, ProbeFailure
from prefixroute.core.group import Group
from prefixroute.core.policies.blind import LeastOutstanding
from prefixroute.core.policies.expected_latency import ExpectedLatency
from prefixroute.core.policies.session import SessionPolicy
from prefixroute.core.policy import Candidate, Decision, Facts, Policy, Reason, StatelessPolicy
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.core.router import Router
from prefixroute.http.admin import Admin as AdminHandler
from prefixroute.http.arrival import RequestHead
from prefixroute.http.body import BodyLimits
from prefixroute.http.decisions import Decisions
from prefixroute.http.front import ClientLimits, FrontServer, listen
from prefixroute.http.stored import StoredResponses
from prefixroute.metrics import Metrics
from prefixroute.record import AttemptOutcome, Decided, Outcome, RequestRecord

SECRET = "sk-1234567890abcdef"
STORY = "once upon a time there was a router " * 50
CHAT = {"model": "llama", "messages": [{"role": "user", "content": STORY}], "stream": True}
MAX_BODY_BYTES = 2 * 1024 * 1024
APIS = {
    "/v1/completions": Api.COMPLETIONS,
    "/v1/responses": Api.RESPONSES,
    "/v1/chat/completions": Api.CHAT,
    "/v1/embeddings": Api.POOLING,
}


def aim(path: str, _head: RequestHead) -> tuple[Api, Group | None]:
    if path == "/fault":
        raise KeyError(SECRET)
    group = Group(LeastOutstanding(), ["[::1]:8002"], strategy="OURS") if path == "/grouped" else None
    return APIS.get(path, Api.CHAT if group else Api.OTHER), group


class Admin:
    """A router and its admin port."""

    def __init__(self, policy: Policy | None = None, body_timeout_s: float = 30.0) -> None:
        self.router = Router(
            [
                Instance("127.0.0.1:8001", "http://127.0.0.1:8001", 0, frozenset({"llama"})),
                Instance("[::1]:8002", "http://user:sk-in-url@[::1]:8002", 1),
            ],
            policy or ExpectedLatency(),
            BlockHasher(64, seed=1),
            Random(1),
        )
        self.metrics = Metrics(self.router, strategy="expected_latency")
        self.stored = StoredResponses(10)
        self.decisions = Decisions(2)
        self.stopping = False
        self.now_s = 1000.0
        self.n_changes = 0
        self.handler = AdminHandler(
            self.router,
            self.metrics,
            strategy="expected_latency",
            aim=aim,
            is_stopping=lambda: self.stopping,
            stored=self.stored,
            decisions=self.decisions,
            on_change=self._on_change,
            body_limits=BodyLimits(MAX_BODY_BYTES, body_timeout_s),
            clock=lambda: self.now_s,
        )
        self.port = 0
        self.session: aiohttp.ClientSession

    def _on_change(self) -> None:
        self.n_changes += 1

    async def ask(
        self,
        method: str,
        target: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any, aiohttp.ClientResponse]:
        """Status, JSON (or bytes) and the answer itself. The target goes out as it is."""
        url = URL(f"http://127.0.0.1:{self.port}{target}", encoded=True)
        raw_body = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        data = None if raw_body is None else BytesIO(raw_body)
        async with self.session.request(method, url, data=data, headers=headers) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json" and raw
            return response.status, json.loads(raw) if is_json else raw, response


async def running(admin: Admin) -> AsyncIterator[Admin]:
    front = FrontServer(admin.handler.handle, ClientLimits())
    server = await listen(front, "127.0.0.1", 0)
    admin.port = server.port
    async with aiohttp.ClientSession() as session:
        admin.session = session
        yield admin
    server.close()
    await front.shutdown(0.1)


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    async for one in running(Admin()):
        yield one


@pytest.fixture
async def session_admin() -> AsyncIterator[Admin]:
    async for one in running(Admin(SessionPolicy(1.25, seed=1))):
        yield one


@pytest.fixture
async def impatient_admin() -> AsyncIterator[Admin]:
    async for one in running(Admin(body_timeout_s=0.1)):
        yield one


class Unbounded(StatelessPolicy):
    """A policy of the user's own whose scores are out of bounds."""

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        return Decision(candidates[0], Reason.CUSTOM, [float("inf")])


@pytest.fixture
async def odd_admin() -> AsyncIterator[Admin]:
    async for one in running(Admin(Unbounded())):
        yield one


# ---------------------------------------------------------------------- reading


async def test_the_index_names_every_endpoint(admin: Admin) -> None:
    status, body, _ = await admin.ask("GET", "/")

    assert status == 200
    admin.decisions.note(decided(admin, "r-1"))
    for endpoint in body["endpoints"]:
        method, path = endpoint.split()
        path = path.replace("{name}", "127.0.0.1:8001").replace("{request_id}", "r-1")
        status, _, _ = await admin.ask(method, path)
        assert status in (200, 503)


@pytest.mark.parametrize(("target", "status"), [("/livez", 200), ("/instances", 200), ("/nothing", 404)])
async def test_a_json_answer_ends_its_line_for_terminals(admin: Admin, target: str, status: int) -> None:
    async with admin.session.get(f"http://127.0.0.1:{admin.port}{target}") as answer:
        raw = await answer.read()
        assert (answer.status, raw[-2:-1], raw[-1:]) == (status, raw.rstrip()[-1:], b"\n")


async def test_metrics_are_scraped_in_either_format(admin: Admin) -> None:
    status, text, response = await admin.ask("GET", "/metrics")
    assert status == 200
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "prefixroute_in_flight" in {family.name for family in text_string_to_metric_families(text.decode())}

    accept = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;q=0.1"}
    status, text, response = await admin.ask("GET", "/metrics", headers=accept)
    assert status == 200
    assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"# EOF\n")


async def test_alive_is_not_ready(admin: Admin) -> None:
    assert (await admin.ask("GET", "/livez"))[0] == 200
    status, body, _ = await admin.ask("GET", "/readyz")
    assert (status, body["ready"], body["reasons"]) == (503, False, ["no_instance"])
    assert body["instances"] == {"127.0.0.1:8001": "starting", "[::1]:8002": "starting"}

    admin.router.fleet.probe_passed("127.0.0.1:8001")
    status, body, _ = await admin.ask("GET", "/readyz")
    assert (status, body["ready"], body["reasons"]) == (200, True, [])

    admin.stopping = True
    status, body, _ = await admin.ask("GET", "/readyz")
    assert (status, body["reasons"]) == (503, ["stopping"])
    assert (await admin.ask("GET", "/livez"))[0] == 200


async def test_an_ejected_instance_makes_ready_again_when_its_pause_is_over(admin: Admin) -> None:
    admin.router.fleet.probe_passed("127.0.0.1:8001")
    admin.router.connect_failed("127.0.0.1:8001", admin.now_s, timed_out=False)
    assert (await admin.ask("GET", "/readyz"))[0] == 503

    admin.now_s += 1.5
    assert (await admin.ask("GET", "/readyz"))[0] == 200


async def test_why_an_instance_is_not_up_yet_is_shown_after_one_failed_probe(admin: Admin) -> None:
    admin.router.probe_failed("[::1]:8002", ProbeFailure.STATUS, "status 500")

    shown = (await admin.ask("GET", "/instances"))[1][1]
    assert (shown["state"], shown["failure"], shown["failure_reason"]) == ("starting", "status", "status 500")
    # A reason is shown beside its own failure only: this one is the fleet's, the reason a later probe's.
    for _ in range(2):
        admin.router.probe_failed("[::1]:8002", ProbeFailure.STATUS, "status 500")
    admin.router.fleet.probe_passed("127.0.0.1:8001")
    admin.router.probe_failed("127.0.0.1:8001", ProbeFailure.TIMEOUT, "no answer in time")
    admin.router.probe_failed("[::1]:8002", ProbeFailure.TIMEOUT, "no answer in time")
    up, down = (await admin.ask("GET", "/instances"))[1]
    assert (up["failure"], up["failure_reason"]) == (None, None)
    assert (down["failure"], down["failure_reason"]) == ("status", None)


async def test_instances_are_shown_as_the_router_sees_them(admin: Admin) -> None:
    admin.router.fleet.probe_passed("127.0.0.1:8001")
    admin.router.probe_failed("[::1]:8002", ProbeFailure.REFUSED)
    with admin.router.lease(
        admin.router.read(read_prompt(Api.CHAT, json.dumps(CHAT).encode())), now_s=admin.now_s
    ) as lease:
        _, body, _ = await admin.ask("GET", "/instances")

    assert body[0] == {
        "name": "127.0.0.1:8001",
        "url": "http://127.0.0.1:8001",
        "state": "up",
        "draining": False,
        "failure": None,
        "failure_reason": None,
        "models": ["llama"],
        "in_flight": 1,
        "pending_prefill_tokens": body[0]["pending_prefill_tokens"],
        "index_blocks": len(lease.request.chain),
        "kv_events": "off",
        "capacity_tokens": 1_000_000,
        "capacity_told": False,
        "prediction": "unknown",
        "prefill_tokens_per_second": 12_000.0,
    }
    assert body[0]["pending_prefill_tokens"] > 400
    assert (body[1]["state"], body[1]["failure"], body[1]["models"]) == ("down", "refused", None)
    assert body[1]["url"] == "http://[::1]:8002"  # without the user and password it was made with


# ---------------------------------------------------------------------- decisions and the ladder


def decided(admin: Admin, request_id: str, model: str = "llama") -> RequestRecord:
    """A request that is under way on an instance."""
    prompt = read_prompt(Api.CHAT, json.dumps({**CHAT, "model": model}).encode())
    record = RequestRecord(request_id, "POST", "/v1/chat/completions", "aiohttp", admin.now_s, model=model)
    with admin.router.lease(admin.router.read(prompt), now_s=admin.now_s) as lease:
        record.decisions.append(Decided(0.002, lease.candidates, lease.decision))
    record.upstream = lease.instance.name
    return record


async def test_a_decision_is_shown_with_what_it_was_made_from_and_how_it_went(admin: Admin) -> None:
    record = decided(admin, "r-1")
    admin.decisions.note(record)

    status, body, _ = await admin.ask("GET", "/decisions/r-1")
    assert (status, body["over"], body["outcome"], body["duration_s"]) == (200, False, None, None)

    record.attempts.append(AttemptOutcome.ANSWERED)
    record.is_over, record.outcome, record.status, record.ttft_s = True, Outcome.OK, 200, 0.25
    record.held_s, record.cached_tokens, record.reported_prompt_tokens = 1.5, 32, 460
    _, body, _ = await admin.ask("GET", "/decisions/r-1")

    decision = body["decisions"][0]
    assert [c["instance"] for c in decision["candidates"]] == ["127.0.0.1:8001", "[::1]:8002"]
    assert {c["matched_tokens"] for c in decision["candidates"]} == {0}
    assert all(c["cost_s"] > 0 and c["held_prefill_tokens"] == 0 for c in decision["candidates"])
    assert (decision["at_s"], decision["reason"], decision["chosen"]) == (0.002, "cold", record.upstream)
    assert (body["attempts"], body["outcome"], body["status"], body["ttft_s"]) == (["answered"], "ok", 200, 0.25)
    assert (body["held_s"], body["cached_tokens"], body["strategy"]) == (1.5, 32, "expected_latency")
    assert STORY not in json.dumps(body)


async def test_a_decision_that_is_not_kept_is_said_so_with_how_many_are(admin: Admin) -> None:
    for request_id in ("r-1", "r-2", "r-3"):
        admin.decisions.note(decided(admin, request_id))
    status, body, _ = await admin.ask("GET", "/decisions/r-1")
    assert (status, body["error"]["code"]) == (404, "unknown_decision")
    assert "the last 2 requests" in body["error"]["message"]
    assert (await admin.ask("GET", "/decisions"))[0] == 404
    assert (await admin.ask("POST", "/decisions/r-2"))[0] == 405


@pytest.mark.parametrize("request_id", ["a/../b", "a//b/", "a?b#c", "50%"])
async def test_a_decision_is_found_by_any_id_that_a_request_may_have(admin: Admin, request_id: str) -> None:
    admin.decisions.note(decided(admin, request_id))
    status, body, _ = await admin.ask("GET", f"/decisions/{quote(request_id, safe='/')}")
    assert (status, body["request_id"]) == (200, request_id)


async def test_a_model_that_nobody_lists_is_not_repeated(admin: Admin) -> None:
    admin.decisions.note(decided(admin, "r-1", model=SECRET))
    _, body, _ = await admin.ask("GET", "/decisions/r-1")
    assert body["model"] == "other"


async def test_the_ladder_tells_tokens_and_gaps_of_those_that_reported_apart_from_the_others(admin: Admin) -> None:
    request = admin.router.read(read_prompt(Api.CHAT, json.dumps(CHAT).encode()))
    for reports in (True, True, False):
        with admin.router.lease(request, now_s=admin.now_s) as lease:
            lease.first_byte(admin.now_s, learn=True)
            if reports:
                lease.reported(0, request.n_tokens)
    status, body, _ = await admin.ask("GET", "/ladder")
    whole = len(request.chain) * 64
    assert status == 200
    assert list(body["tokens"]) == ["prompt", "ideal", "pooled", "reachable", "chosen", "reported"]
    assert (body["requests"], body["tokens"]["prompt"]) == (2, 2 * request.n_tokens)
    assert (body["tokens"]["reachable"], body["tokens"]["chosen"], body["tokens"]["reported"]) == (whole, whole, 0)
    assert body["gaps"]["engine"] == pytest.approx(whole / request.n_tokens / 2)
    assert body["unreported"]["requests"] == 1
    assert body["unreported"]["tokens"]["chosen"] == whole


# ---------------------------------------------------------------------- draining


@pytest.mark.parametrize("name", ["127.0.0.1:8001", "[::1]:8002", "%5B%3A%3A1%5D%3A8002"])
async def test_an_instance_is_drained_and_taken_back(admin: Admin, name: str) -> None:
    status, body, _ = await admin.ask("POST", f"/instances/{name}/drain")
    assert (status, body["draining"]) == (200, True)
    assert admin.router.fleet.state(body["name"]).draining
    assert (await admin.ask("GET", "/readyz"))[1]["instances"][body["name"]] == "draining"
    assert admin.n_changes == 0

    status, body, _ = await admin.ask("POST", f"/instances/{name}/undrain")
    assert (status, body["draining"]) == (200, False)
    assert not admin.router.fleet.state(body["name"]).draining
    assert admin.n_changes == 1


@pytest.mark.parametrize("action", ["drain", "undrain"])
async def test_an_unknown_instance_is_not_found(admin: Admin, action: str) -> None:
    status, body, _ = await admin.ask("POST", f"/instances/{SECRET}/{action}")

    assert status == 404
    assert body["error"]["code"] == "unknown_instance"
    assert body["error"]["message"].startswith("no instance of this name")


# ---------------------------------------------------------------------- explaining


async def test_explain_says_where_a_request_of_a_group_would_go_and_by_which_rule(admin: Admin) -> None:
    _, whole, _ = await admin.ask("POST", "/explain", CHAT)
    status, body, _ = await admin.ask("POST", "/explain?path=/grouped", CHAT)
    assert (status, body["strategy"], whole["strategy"]) == (200, "OURS", "expected_latency")
    assert [candidate["instance"] for candidate in body["candidates"]] == ["[::1]:8002"] == [body["chosen"]]
    assert len(whole["candidates"]) == 2


async def test_an_explanation_says_who_would_take_it_and_why(admin: Admin) -> None:
    admin.router.fleet.probe_passed("127.0.0.1:8001")
    prompt = read_prompt(Api.CHAT, json.dumps(CHAT).encode())
    with admin.router.lease(admin.router.read(prompt), now_s=admin.now_s) as lease:
        home = lease.instance.name
    for instance in admin.router.fleet.instances:
        admin.router.fleet.learned_models(instance.name, frozenset({"llama"}))

    status, body, _ = await admin.ask("POST", "/explain", CHAT)

    assert status == 200
    assert (body["model"], body["strategy"], body["no_key"]) == ("llama", "expected_latency", None)
    assert body["prompt_tokens"] == prompt.n_tokens
    assert body["blocks"] == len(lease.request.chain) > 0
    assert (body["chosen"], body["reason"]) == (home, "affinity")
    by_name = {candidate["instance"]: candidate for candidate in body["candidates"]}
    assert by_name.keys() == {"127.0.0.1:8001", "[::1]:8002"}
    assert by_name[home]["matched_tokens"] == 64 * len(lease.request.chain)
    assert by_name[home]["cost_s"] == min(candidate["cost_s"] for candidate in by_name.values())
    assert {candidate["state"] for candidate in by_name.values()} <= {"up", "starting"}


async def test_an_explanation_is_a_dry_run(admin: Admin) -> None:
    before = (await admin.ask("GET", "/instances"))[1]
    first = (await admin.ask("POST", "/explain", CHAT))[1]
    second = (await admin.ask("POST", "/explain", CHAT))[1]

    assert first["reason"] == second["reason"] == "cold"
    assert (await admin.ask("GET", "/instances"))[1] == before
    assert admin.router.index.n_bytes == 0


@pytest.mark.parametrize("home", ["127.0.0.1:8001", "[::1]:8002"])
async def test_a_stored_response_decides(admin: Admin, home: str) -> None:
    admin.stored.record("resp_1", home)
    body = {"model": "llama", "input": "go on", "previous_response_id": "resp_1"}
    _, answered, _ = await admin.ask("POST", "/explain?path=/v1/responses", body)

    assert (answered["chosen"], answered["reason"]) == (home, "stored")


async def test_nobody_may_take_it(admin: Admin) -> None:
    for instance in admin.router.fleet.instances:
        admin.router.fleet.drain(instance.name)

    status, body, _ = await admin.ask("POST", "/explain", CHAT)

    assert status == 200
    assert (body["chosen"], body["reason"], body["candidates"]) == (None, "no_instance", [])


@pytest.mark.parametrize(
    ("body", "path", "api"),
    [
        (CHAT, None, Api.CHAT),
        (CHAT, "/v1/chat/completions", Api.CHAT),
        ({"model": "llama", "system": "be kind", "messages": CHAT["messages"]}, None, Api.MESSAGES),
        ({"model": "llama", "prompt": STORY}, None, Api.COMPLETIONS),
        ({"model": "llama", "input": STORY, "instructions": "be kind"}, None, Api.RESPONSES),
        ({"model": "llama", "input": STORY}, "/v1/embeddings", Api.POOLING),
        ({"model": "llama", "prompt": STORY}, "/somewhere", Api.OTHER),
    ],
)
async def test_the_grammar_is_the_paths_or_the_bodys(
    admin: Admin, body: dict[str, Any], path: str | None, api: Api
) -> None:
    prompt = read_prompt(api, json.dumps(body).encode())

    _, explained, _ = await admin.ask("POST", "/explain" if path is None else f"/explain?path={path}", body)

    assert explained["prompt_tokens"] == prompt.n_tokens
    assert explained["blocks"] == len(BlockHasher(64, seed=1).chain(prompt.scope, prompt.key))
    assert explained["no_key"] == (None if prompt.no_key is None else prompt.no_key.value)


@pytest.mark.parametrize(
    ("body", "no_key"),
    [
        (b"", "not_json"),
        (b"{", "not_json"),
        (b"\xff\xfe", "not_json"),
        (b"[]", "not_an_object"),
        (b"{}", "no_prompt"),
        (b'{"model":"\\ud800","messages":[]}', "not_json"),
    ],
)
async def test_an_odd_body_is_explained_too(admin: Admin, body: bytes, no_key: str) -> None:
    status, explained, _ = await admin.ask("POST", "/explain", body)

    assert (status, explained["no_key"]) == (200, no_key)
    assert explained["chosen"] is not None


async def test_a_body_too_large_to_parse_is_explained(admin: Admin) -> None:
    body = b'{"model":"\\ud800m","prompt":"%s"}' % (b"x" * 1_500_000)

    status, explained, _ = await admin.ask("POST", "/explain", body)

    assert status == 200
    assert explained["blocks"] > 0


async def test_the_session_of_the_header_decides(session_admin: Admin) -> None:
    bodies = [
        (await session_admin.ask("POST", "/explain", CHAT, headers={"X-Session-Id": "alice"}))[1] for _ in range(5)
    ]

    assert bodies == bodies[:1] * 5
    assert (bodies[0]["reason"], bodies[0]["candidates"][0]["cost_s"]) == ("session", None)


async def test_scores_that_json_cannot_hold_are_null(odd_admin: Admin) -> None:
    odd_admin.router.fleet.drain("[::1]:8002")

    status, body, _ = await odd_admin.ask("POST", "/explain", CHAT)

    assert (status, body["reason"], body["candidates"][0]["cost_s"]) == (200, "custom", None)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("target", ["/instances/127.0.0.1:8001/drain", "/explain"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Content-Type": "text/plain"},
    ],
)
async def test_a_web_page_can_change_and_ask_nothing(admin: Admin, target: str, headers: dict[str, str]) -> None:
    status, body, _ = await admin.ask("POST", target, CHAT, headers=headers)

    assert status == 403
    assert body["error"]["code"] == "forbidden"
    assert not admin.router.fleet.state("127.0.0.1:8001").draining


async def test_errors_are_json_without_what_was_asked(admin: Admin) -> None:
    status, body, _ = await admin.ask("GET", f"/{SECRET}?key={SECRET}")
    assert status == 404
    assert body["error"]["code"] == "not_found"
    assert SECRET not in str(body)

    status, body, response = await admin.ask("POST", "/metrics")
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["Allow"] == "GET,HEAD"


async def test_a_fault_is_a_500_without_its_text(admin: Admin, caplog: pytest.LogCaptureFixture) -> None:
    status, body, _ = await admin.ask("POST", "/explain?path=/fault", CHAT)

    assert status == 500
    assert body == {"error": {"code": "internal_error", "message": "internal error"}}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("admin: KeyError\n")
    assert SECRET not in line
    assert (await admin.ask("GET", "/livez"))[0] == 200


async def test_a_body_above_the_limit_is_refused(admin: Admin) -> None:
    status, body, _ = await admin.ask("POST", "/explain", b"x" * (MAX_BODY_BYTES + 1))

    assert (status, body["error"]["code"]) == (413, "body_too_large")


async def test_an_encoded_body_is_never_expanded(admin: Admin) -> None:
    bomb = zlib.compress(b"x" * (50 * MAX_BODY_BYTES))
    status, body, _ = await admin.ask("POST", "/explain", bomb, headers={"Content-Encoding": "deflate"})

    assert (status, body["no_key"]) == (200, "encoded")


async def test_what_is_not_http_is_not_echoed(admin: Admin) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
    writer.write(f"GET /livez HTTP/1.1\r\nHost: x\r\nAuthorization : {SECRET}\r\n\r\n".encode())

    reply = await reader.read()

    assert reply.startswith(b"HTTP/1.1 400 ")
    assert SECRET.encode() not in reply
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("chunks", "status", "code"),
    [
        (b"5\r\nhello\r\n", b"408", b"request_timeout"),
        (b"5\r\nhello\r\nzz\r\n", b"400", b"malformed_request"),
    ],
)
async def test_a_body_that_never_ends_is_not_waited_for(
    impatient_admin: Admin, chunks: bytes, status: bytes, code: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient_admin.port)
    writer.write(b"POST /explain HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(chunks)

    reply = await reader.readuntil(b"}}")

    assert reply.startswith(b"HTTP/1.1 %s " % status)
    assert b'"code":"%s"' % code in reply
    writer.close()
    await writer.wait_closed()


async def test_secrets_of_requests_are_neither_answered_nor_logged(
    admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"model": "llama", "messages": [{"role": "user", "content": f"{SECRET} {STORY}"}], "api_key": SECRET}
    headers = {"Authorization": f"Bearer {SECRET}", "Cookie": SECRET, "X-Session-Id": SECRET}
    for method, target in (
        ("POST", f"/explain?path=/{SECRET}"),
        ("POST", "/explain"),
        ("GET", f"/instances?key={SECRET}"),
        ("GET", f"/{SECRET}"),
        ("PUT", "/explain"),
        ("GET", "/metrics"),
    ):
        _, answered, response = await admin.ask(method, target, body, headers=headers)
        assert SECRET not in str(answered)
        assert SECRET not in str(response.headers)

    assert SECRET not in caplog.text
