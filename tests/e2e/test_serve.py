"""`prefixroute serve`, and what is asked of it, as an operator runs them: processes, files, variables, signals."""

import asyncio
import json
import os
import re
from signal import SIGTERM

import pytest

from prefixroute import __version__
from prefixroute.demo.server import SimulatedServer
from prefixroute.testing.client import RawClient, head
from prefixroute.testing.upstream import Call, FakeUpstream, json_answer
from tests.command import Commands
from tests.e2e.harness import FAST, NOWHERE, STORY, chat, chat_body, free_port, get, stop

pytestmark = pytest.mark.e2e

# Serving


async def test_serving_urls_needs_no_configuration(commands: Commands, server: SimulatedServer) -> None:
    async with SimulatedServer(FAST) as other:
        command = await commands.serve(
            server.url, other.url, environ={"PREFIXROUTE_RESPONSE_HEADERS": "true", "PREFIXROUTE_LOG__LEVEL": "info"}
        )
        names = [url.removeprefix("http://") for url in (server.url, other.url)]
        width = max(map(len, names))
        assert command.stderr.startswith(
            f"PrefixRoute {__version__}: expected_latency over 2 instances\n"
            f"  requests  {command.url}\n"
            f"  metrics   {command.admin_url}/metrics\n"
        )
        for name in names:
            await command.wait_line(f"^  instance  {name:{width}}  http://{name}$")
            await command.wait_line(f"{name} is up ")

        ready = await get(command.admin_url, "/readyz")
        assert (ready.status, json.loads(ready.body)["ready"]) == (200, True)
        first = await chat(command.url)
        again = await chat(command.url, STORY + "and then")
        assert first.header("x-prefixroute-reason") == "cold"
        assert again.header("x-prefixroute-reason") == "affinity"
        assert again.header("x-prefixroute-instance") == first.header("x-prefixroute-instance")
        await command.wait_line("prefixroute.access: request .* status=200 outcome=ok .* reason=affinity")
        metrics = (await get(command.admin_url, "/metrics")).body.decode()
        assert 'prefixroute_decisions_total{reason="affinity"} 1.0' in metrics
        await stop(command)


async def test_a_file_is_obeyed_and_variables_and_options_go_before_it(
    commands: Commands, server: SimulatedServer
) -> None:
    (commands.home / "router.yaml").write_text(
        "listen: {port: 0}\n"
        "admin: {port: 0}\n"
        f"fleet: {{instances: [{{url: '{server.url}', name: gpu-a}}]}}\n"
        "routing: {strategy: random}\n"
        "log: {level: warning}\n"
    )
    environ = {"PREFIXROUTE_ROUTING__STRATEGY": "round_robin", "PREFIXROUTE_LOG__LEVEL": "error"}
    command = await commands.start("serve", "--config", "router.yaml", "--log-level", "info", environ=environ)
    await command.wait_serving()
    assert command.lines[0].endswith(": round_robin over 1 instance\n")
    await command.wait_line(f"^  instance  gpu-a  {server.url}$")
    await command.wait_line("info prefixroute.prober: gpu-a is up")
    await chat(command.url)
    await stop(command)


async def test_a_fleet_that_is_not_up_yet_is_waited_for(commands: Commands) -> None:
    (commands.home / "router.json").write_text(
        json.dumps({"fleet": {"health": {"interval_s": 0.05}}, "limits": {"wait_for_instance_s": 60}})
    )
    port = free_port()
    command = await commands.serve(f"http://127.0.0.1:{port}", "--config", "router.json")
    await command.wait_line(f"warning prefixroute.prober: 127.0.0.1:{port} is down .*cause=refused")
    ready = await get(command.admin_url, "/readyz")
    assert ready.status == 503
    assert json.loads(ready.body)["reasons"] == ["no_instance"]
    assert (await get(command.admin_url, "/livez")).status == 200
    assert (await get(command.url, "/health")).status == 503

    early = asyncio.create_task(chat(command.url))
    server = SimulatedServer(FAST)
    await server.start(port=port)
    try:
        await command.wait_line(f"info prefixroute.prober: 127.0.0.1:{port} is up")
        assert (await get(command.admin_url, "/readyz")).status == 200
        assert (await get(command.url, "/health")).status == 200
        await early
        await stop(command)
    finally:
        await server.stop()


async def test_a_second_router_on_a_busy_port_leaves_the_first_alone(
    commands: Commands, server: SimulatedServer
) -> None:
    first = await commands.serve(server.url)
    data, admin = first.url.rpartition(":")[2], first.admin_url.rpartition(":")[2]
    text, in_json = await asyncio.gather(
        commands.run("serve", server.url, "--port", data, "--admin-port", "0"),
        commands.run("serve", server.url, "--port", "0", "--admin-port", admin, "--log-format", "json"),
    )
    problem = "cannot listen on 127.0.0.1:{}: another process listens there (stop it, or choose another port)"
    assert text == (1, "", f"prefixroute: {problem.format(data)}\n")
    code, out, err = in_json
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert json.loads(line).items() >= {"level": "error", "message": problem.format(admin)}.items()
    await chat(first.url)
    assert (await get(first.admin_url, "/livez")).status == 200
    await stop(first)


async def test_a_wrong_configuration_is_a_line_and_no_start(commands: Commands) -> None:
    (commands.home / "router.yaml").write_text("routing: {stratgy: random}")
    line = "prefixroute: routing.stratgy: unknown setting; did you mean 'strategy'?\n"
    runs = [commands.run(command, NOWHERE, "--config", "router.yaml") for command in ("serve", "check")]
    assert await asyncio.gather(*runs) == [(2, "", line)] * 2


async def test_whoever_stops_reading_the_log_does_not_stop_the_router(commands: Commands) -> None:
    """Such as `prefixroute serve … 2>&1 | head -1`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    port = free_port()
    async with FakeUpstream(json_answer({"status": "ok"}), script_all=True) as upstream:
        try:
            command = await commands.start(
                *("serve", upstream.url, "--port", str(port), "--admin-port", "0"), stderr=write_end
            )
        finally:
            os.close(write_end)
        # The first probe: it listens.
        await upstream.wait_calls(1)
        answer = await get(f"http://127.0.0.1:{port}", "/v1/anything")
        assert (answer.status, answer.body) == (200, b'{"status": "ok"}')
        await stop(command)


async def test_without_an_admin_port_it_serves_all_the_same(commands: Commands, server: SimulatedServer) -> None:
    command = await commands.start("serve", server.url, "--port", "0", environ={"PREFIXROUTE_ADMIN": "null"})
    await command.wait_line(r"^  metrics   off \(admin: null\)$")
    url = (await command.wait_line(r"^  requests  (\S+)"))[1]
    await chat(url)
    await stop(command)


# Asking a running router


async def test_explain_asks_a_running_router(commands: Commands, server: SimulatedServer) -> None:
    async with SimulatedServer(FAST) as other:
        command = await commands.serve(server.url, other.url, environ={"PREFIXROUTE_RESPONSE_HEADERS": "true"})
        for url in (server.url, other.url):
            await command.wait_line(f"{url.removeprefix('http://')} is up ")
        warm = (await chat(command.url)).header("x-prefixroute-instance")
        (commands.home / "body.json").write_bytes(chat_body())
        admin = ("--admin", command.admin_url)

        code, out, err = await commands.run("explain", "body.json", *admin)
        assert (code, err) == (0, "")
        title, *_, chosen = out.splitlines()
        assert re.fullmatch(r"model -: \d+ tokens in \d+ blocks; strategy expected_latency", title)
        assert chosen == f"→ {warm} (affinity)"

        code, out, err = await commands.run(
            "explain", "body.json", *admin, "--json", "--path", "/v1/chat/completions", "--header", "x-session-id: 7"
        )
        assert (code, err) == (0, "")
        answer = json.loads(out)
        matched = {c["instance"]: c["matched_tokens"] for c in answer["candidates"]}
        assert answer["chosen"] == warm
        assert sorted(matched.values()) == [0, matched[warm]]
        assert matched[warm] > 0

        await stop(command)


# What is never told

# Distinct, so that the one that leaks is named.
PLANTED = "PLANTED"
LEAKS = re.compile(rf"{PLANTED}-?\w*", re.IGNORECASE)

# A policy that fails, and says what it was asked.
POLICY = """
from prefixroute.core.policy import StatelessPolicy

class Fails(StatelessPolicy):
    def pick(self, facts, candidates, rng):
        raise ValueError(f"PLANTED-policy {facts} {facts.prompt}")
"""

SECRET_HEADERS = [
    ("Authorization", "Bearer PLANTED-authorization"),
    ("x-api-key", "PLANTED-key"),
    ("Cookie", "session=PLANTED-cookie"),
    ("x-request-id", "PLANTED id, not fit to be logged"),
    ("x-session-id", "PLANTED-session"),
    ("Content-Type", "application/json"),
]
SECRET_BODY = json.dumps(
    {
        "model": "PLANTED-model",
        "messages": [{"role": "user", "content": "PLANTED-prompt " * 500}],
        "user": "PLANTED-user",
    }
).encode()

# What is no request, or is one that cannot be taken.
MALFORMED = [
    b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization : Bearer PLANTED-space\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nPLANTED-colon\r\n\r\n",
    b"GET /?token=PLANTED-version HTTP/9.9\r\nHost: a\r\n\r\n",
    b"PLANTED-line\r\n\r\n",
    b"PLANTED-method / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://user:PLANTED-password@a:PLANTED/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"CONNECT PLANTED-connect:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: PLANTED-length\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: PLANTED-coding, chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nPLANTED-chunk\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nExpect: PLANTED-expect\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nx-long: PLANTED-long" + b"x" * 100_000 + b"\r\n\r\n",
    b"POST /reset_prefix_cache?PLANTED-control HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\nPLANTED-large",
]

BROKEN_ANSWERS = {
    "/status": b"HTTP/1.1 PLANTED-status\r\n\r\n",
    "/colon": b"HTTP/1.1 200 OK\r\nPLANTED-answer-colon\r\n\r\n",
    "/space": b"HTTP/1.1 200 OK\r\nset-cookie : PLANTED-answer-space\r\n\r\n",
    "/long": b"HTTP/1.1 200 OK\r\nx-long: PLANTED-answer-long" + b"x" * 100_000 + b"\r\n\r\n",
    "/chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nPLANTED-answer-chunk\r\n",
    "/length": b"HTTP/1.1 200 OK\r\ncontent-length: PLANTED-answer-length\r\n\r\n",
    "/cut": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n",
    "/nothing": b"",
}


async def misbehave(call: Call) -> None:
    """Breaks off in the way that the path asks for; else answers."""
    path = call.target.partition("?")[0]
    if path in BROKEN_ANSWERS:
        await call.send(BROKEN_ANSWERS[path])
        call.close()
    elif path == "/reset":
        call.reset()
    else:
        await json_answer({"done": True})(call)


async def misbehave_always(call: Call) -> None:
    """To probes, too."""
    await call.send(BROKEN_ANSWERS["/colon"])
    call.close()


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_no_secret_and_no_prompt_is_ever_written(commands: Commands, log_format: str) -> None:
    """At the level of most detail, whatever breaks; and nothing but objects when the format is JSON."""
    (commands.home / "failing_policies.py").write_text(POLICY)
    async with FakeUpstream(misbehave) as upstream, FakeUpstream(misbehave_always, script_all=True) as unwell:
        (commands.home / "router.yaml").write_text(
            "fleet:\n"
            f"  instances: [{{url: '{upstream.url}', name: gpu-a, api_key_env: GPU_KEY}}, {{url: '{unwell.url}'}}]\n"
            "  health: {interval_s: 0.05, fall: 1}\n"
            "routing: {strategy: custom, custom: {factory: 'failing_policies:Fails'}}\n"
            f"log: {{format: {log_format}, level: debug}}\n"
        )
        command = await commands.serve("--config", "router.yaml", environ={"GPU_KEY": "PLANTED-of-the-instance"})
        await command.wait_line("gpu-a is up")
        await command.wait_line(f"{unwell.url.removeprefix('http://')} is down")

        answers = [await exchange(command.url, data) for data in MALFORMED]
        for path in ("/v1/chat/completions", *BROKEN_ANSWERS, "/reset"):
            request = head("POST", f"{path}?token=PLANTED-query", SECRET_BODY, SECRET_HEADERS) + SECRET_BODY
            answers.append(await exchange(command.url, request))
        # Streamed up rather than read, and a client that leaves in the middle of its body.
        answers.append(
            await exchange(command.url, head("PUT", "/PLANTED-path", b"PLANTED", SECRET_HEADERS) + b"PLANTED")
        )
        async with RawClient(command.url) as leaving:
            await leaving.send(head("POST", "/v1/chat/completions", SECRET_BODY, SECRET_HEADERS) + b"PLANTED")
        await command.wait_line(r"outcome\W+client_gone")
        # What was answered, the router wrote.
        assert LEAKS.findall(b"".join(answers).decode("latin-1")) == []
        assert b'{"done": true}' in answers[len(MALFORMED)]
        assert upstream.calls[0].header("authorization") == "Bearer PLANTED-authorization"
        assert len(upstream.calls) >= 2 + len(BROKEN_ANSWERS)

        for data in MALFORMED:
            await exchange(command.admin_url, data)
        await exchange(
            command.admin_url, head("POST", "/explain?path=/PLANTED", SECRET_BODY, SECRET_HEADERS) + SECRET_BODY
        )
        for target in ("/PLANTED-admin", "/instances/PLANTED-instance/drain?PLANTED-query"):
            await exchange(command.admin_url, head("POST", target, b"", SECRET_HEADERS))

        command.signal(SIGTERM)
        assert await command.wait_exit() == (0, "")
    assert LEAKS.findall(command.stderr) == []
    await command.wait_line("strategy custom failed, so that load decides")
    if log_format == "json":
        for line in command.lines:
            assert json.loads(line).keys() >= {"time", "level", "logger", "message"}


async def exchange(url: str, data: bytes) -> bytes:
    """Sends bytes as they are, and gives the answer's."""
    async with RawClient(url) as client:
        await client.send(data)
        return (await client.answer()).raw
