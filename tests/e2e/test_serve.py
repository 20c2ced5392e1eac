"""`prefixroute serve`, and what is asked of it, as an operator runs them: processes, files, variables, signals."""

import asyncio
import json
import os
import re
import select
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import pytest

from prefixroute import __version__
from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.server import ServerConfig, SimulatedServer
from prefixroute.testing.client import RawAnswer, RawClient, head
from prefixroute.testing.upstream import Call, FakeUpstream, Script, json_answer

pytestmark = pytest.mark.e2e

FAST = ServerConfig(EngineConfig(speed=1_000.0))
STORY = "once upon a time there was a router " * 200
# Nobody listens there, nor may.
NOWHERE = "http://127.0.0.1:1"


class Command:
    """The command in a process of its own, and everything it has written to standard error so far."""

    def __init__(self, process: Process) -> None:
        self.lines: list[str] = []
        self.url = ""
        self.admin_url = ""
        self._process = process
        self._grown = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> str:
        return "".join(self.lines)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def wait_line(self, pattern: str) -> re.Match[str]:
        """The first line of standard error in which `pattern` is found, from the start."""
        n_seen = 0
        while True:
            for line in self.lines[n_seen:]:
                if (match := re.search(pattern, line)) is not None:
                    return match
            n_seen = len(self.lines)
            assert not self._reading.done(), f"ended without a line like {pattern!r}:\n{self.stderr}"
            self._grown.clear()
            await self._grown.wait()

    async def wait_serving(self) -> None:
        """Until it has said where it listens."""
        self.url = (await self.wait_line(r'^  requests  (\S+)|"requests":"([^"]+)"')).expand(r"\1\2")
        self.admin_url = (await self.wait_line(r'^  metrics   (\S+)/metrics|"metrics":"([^"]+)/metrics"')).expand(
            r"\1\2"
        )

    async def wait_exit(self) -> tuple[int, str]:
        """Exit code (minus the signal if one ended it) and standard output."""
        assert self._process.stdout is not None
        out = await self._process.stdout.read()
        await self._reading
        return await self._process.wait(), out.decode()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self.wait_exit()

    async def _read(self) -> None:
        if self._process.stderr is not None:
            async for line in self._process.stderr:
                self.lines.append(line.decode())
                self._grown.set()
        self._grown.set()


class Commands:
    """Starts commands in an empty directory, with an environment that sets nothing."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._started: list[Command] = []

    async def start(
        self,
        *arguments: str,
        environ: dict[str, str] | None = None,
        before: tuple[str, ...] = (),
        stderr: int = PIPE,
    ) -> Command:
        """`before`: a command that ours is the arguments of. `stderr`: where to, if it is not to be read here."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFIXROUTE_")}
        process = await asyncio.create_subprocess_exec(
            *before,
            # What is not closed says so at the end.
            *(sys.executable, "-W", "always::ResourceWarning", "-m", "prefixroute", *arguments),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=stderr,
            cwd=self.home,
            env={**inherited, "COLUMNS": "120", **(environ or {})},
        )
        command = Command(process)
        self._started.append(command)
        return command

    async def serve(self, *arguments: str, **settings: Any) -> Command:
        """`prefixroute serve` on free ports, once it listens."""
        command = await self.start("serve", "--port", "0", "--admin-port", "0", *arguments, **settings)
        await command.wait_serving()
        return command

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command that ends by itself."""
        command = await self.start(*arguments)
        code, out = await command.wait_exit()
        return code, out, command.stderr

    async def end(self) -> None:
        for command in self._started:
            await command.kill()
        for command in self._started:
            assert "ResourceWarning" not in command.stderr
            assert "Traceback" not in command.stderr


@pytest.fixture
async def commands(tmp_path: Path) -> AsyncIterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    await commands.end()


@pytest.fixture
async def server() -> AsyncIterator[SimulatedServer]:
    async with SimulatedServer(FAST) as server:
        yield server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def get(url: str, target: str) -> RawAnswer:
    async with RawClient(url) as client:
        return await client.request("GET", target)


def chat_body(text: str = STORY) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 3, "ignore_eos": True}).encode()


async def chat(url: str, text: str = STORY) -> RawAnswer:
    async with RawClient(url) as client:
        answer = await client.request(body=chat_body(text), headers=[("Content-Type", "application/json")])
    assert answer.status == 200
    assert json.loads(answer.body)["usage"]["completion_tokens"] == 3
    return answer


def begin_stream(then: asyncio.Event) -> Script:
    """A script that streams a piece, and its end after `then`."""

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await call.send_chunk(b"data: first\n\n")
        await then.wait()
        await call.send_chunk(b"data: last\n\n")
        await call.send_chunk(b"")

    return script


async def open_stream(client: RawClient) -> None:
    """Asks for a stream and reads its first piece."""
    body = chat_body()
    await client.send(head("POST", "/v1/chat/completions", body) + body)
    await client.reader.readuntil(b"data: first\n\n\r\n")


async def assert_refused(url: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        await get(url, "/health")


async def stop(command: Command) -> None:
    """Ends it in good order; standard output was left to others."""
    command.signal(SIGTERM)
    assert await command.wait_exit() == (0, "")


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


# Stopping


@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
async def test_a_stop_lets_streams_end_and_takes_nobody_new(commands: Commands, number: signal.Signals) -> None:
    last = asyncio.Event()
    async with FakeUpstream(begin_stream(last)) as upstream:
        command = await commands.serve(upstream.url)
        await command.wait_line(" is up ")
        async with RawClient(command.url) as streaming:
            await open_stream(streaming)

            command.signal(number)
            await command.wait_line(r"stopping: requests under way have up to 25 s to end \(1 now\)")
            ready = await get(command.admin_url, "/readyz")
            assert ready.status == 503
            assert json.loads(ready.body)["reasons"] == ["stopping"]
            assert (await get(command.admin_url, "/livez")).status == 200
            await assert_refused(command.url)

            last.set()
            rest = await streaming.reader.read()
            assert b"data: last\n\n" in rest
            assert rest.endswith(b"\r\n0\r\n\r\n")
        assert await command.wait_exit() == (0, "")
        await assert_refused(command.admin_url)
    await command.wait_line("prefixroute.access: request .* outcome=ok ")


async def test_a_stop_closes_idle_connections_at_once(commands: Commands) -> None:
    """Whoever kept one for the next request has to find out that it must go elsewhere."""
    last = asyncio.Event()
    async with FakeUpstream(begin_stream(last)) as upstream:
        command = await commands.serve(upstream.url)
        async with RawClient(command.url) as streaming, RawClient(command.url) as idle:
            await idle.request("GET", "/health")
            await open_stream(streaming)
            command.signal(SIGTERM)
            assert await idle.reader.read() == b""
            # While everything else goes on.
            assert (await get(command.admin_url, "/livez")).status == 200
            last.set()
            assert (await streaming.reader.read()).endswith(b"0\r\n\r\n")
        assert await command.wait_exit() == (0, "")


async def test_answers_that_their_clients_have_not_taken_yet_are_not_cut_short(commands: Commands) -> None:
    """The router is done with them, but the system's buffers are full."""
    last = asyncio.Event()

    async def answer(call: Call) -> None:
        if call.target == "/v1/chat/completions":
            return await begin_stream(last)(call)
        n_bytes = int(call.target.removeprefix("/"))
        return await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % n_bytes + b"x" * n_bytes)

    # About what Linux takes for a connection whose client reads nothing.
    sizes = range(2_500_000, 3_000_000, 50_000)
    async with FakeUpstream(answer) as upstream:
        command = await commands.serve(upstream.url)
        clients = [await open_deaf(command.url, f"/{n_bytes}") for n_bytes in sizes]
        try:
            async with RawClient(command.url) as streaming:
                await open_stream(streaming)
                command.signal(SIGTERM)
                await command.wait_line("stopping: ")
                last.set()
                await streaming.reader.read()
            # The longest first: those that the router still works on, those it is done with, those the system has.
            for client, n_bytes in zip(reversed(clients), reversed(sizes), strict=True):
                with suppress(OSError, asyncio.IncompleteReadError):
                    for _ in range(20):  # it has every opportunity to leave too early
                        await get(command.admin_url, "/livez")
                assert await read_body(client, n_bytes) == n_bytes
        finally:
            for client in clients:
                client.close()
        assert await command.wait_exit() == (0, "")


async def open_deaf(url: str, target: str) -> socket.socket:
    """A connection with a small buffer, on which the answer has begun and nobody reads."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", int(url.rpartition(":")[2])))
    await loop.sock_sendall(client, head("GET", target, None))
    await asyncio.to_thread(select.select, [client], [], [])
    return client


async def read_body(client: socket.socket, n_bytes: int) -> int:
    """Length of the answer's body, as far as it comes and up to `n_bytes`."""
    loop = asyncio.get_running_loop()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    received = bytearray()
    while (n_received := len(received.partition(b"\r\n\r\n")[2])) < n_bytes:
        piece = await loop.sock_recv(client, 2**20)
        if not piece:
            break
        received += piece
    return n_received


@pytest.mark.parametrize(("first", "second"), [(SIGTERM, SIGTERM), (SIGTERM, SIGINT)])
async def test_a_second_signal_ends_it_at_once(
    commands: Commands, first: signal.Signals, second: signal.Signals
) -> None:
    async with FakeUpstream(begin_stream(asyncio.Event())) as upstream:
        command = await commands.serve(upstream.url)
        async with RawClient(command.url) as streaming:
            await open_stream(streaming)
            command.signal(first)
            await command.wait_line("stopping: ")
            command.signal(second)
            assert await command.wait_exit() == (128 + second, "")
            assert_broken(await read_rest(streaming))


async def test_streams_that_never_end_are_cut_off_when_their_time_is_over(commands: Commands) -> None:
    """One is silent, the other's client has stopped reading."""

    async def endless(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            await call.send_chunk(b"data: more\n\n" * 5_000)

    async with FakeUpstream(begin_stream(asyncio.Event())) as silent, FakeUpstream(endless) as talkative:
        command = await commands.serve(
            *(silent.url, talkative.url, "--strategy", "round_robin"), environ={"PREFIXROUTE_DRAIN_TIMEOUT_S": "0.1"}
        )
        async with RawClient(command.url) as streaming, RawClient(command.url) as deaf:
            await open_stream(streaming)
            await deaf.send(head("POST", "/v1/chat/completions", chat_body()) + chat_body())
            await deaf.reader.readuntil(b"data: more\n\n")
            deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]

            command.signal(SIGTERM)
            await command.wait_line(r"stopping: what did not end in time is cut off \(2 requests\)")
            await command.wait_line(r"outcome\W+cut_off")
            assert await command.wait_exit() == (0, "")
            assert_broken(await read_rest(streaming))
            for upstream in (silent, talkative):
                await upstream.calls[0].wait_disconnected()


async def test_a_stop_does_not_wait_for_idle_or_half_sent_admin_requests(commands: Commands) -> None:
    command = await commands.serve(NOWHERE)
    async with RawClient(command.admin_url) as half_sent, RawClient(command.admin_url) as idle:
        await idle.request("GET", "/livez")
        await half_sent.send(head("POST", "/explain", chat_body()) + b"{")
        # Both are taken up by now: a third was.
        await get(command.admin_url, "/livez")
        await stop(command)


async def test_it_works_as_the_process_that_a_shell_becomes(commands: Commands, server: SimulatedServer) -> None:
    """As in a container: `sh -c "exec prefixroute serve …"`."""
    command = await commands.serve(server.url, before=("sh", "-c", 'exec "$0" "$@"'))
    await chat(command.url)
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


async def read_rest(client: RawClient) -> bytes:
    """What else comes, up to the end or a reset."""
    received = bytearray()
    try:
        while piece := await client.reader.read(65_536):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


def assert_broken(rest: bytes) -> None:
    """Of a chunked answer: it does not look complete."""
    assert not rest.endswith(b"0\r\n\r\n")
