"""How `prefixroute serve` ends, as an operator and an orchestrator see it: signals, drains, what is left to finish."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, SIGTERM

import pytest

from prefixroute.demo.server import SimulatedServer
from prefixroute.testing.client import RawClient, head
from prefixroute.testing.upstream import Call, FakeUpstream
from tests.command import Commands
from tests.e2e.harness import (
    NOWHERE,
    assert_broken,
    assert_refused,
    begin_stream,
    chat,
    chat_body,
    get,
    open_stream,
    read_rest,
    stop,
)

pytestmark = pytest.mark.e2e


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
            last = command.lines[-1]
            assert f"ended at once by a second signal ({second.name}): what is under way breaks off" in last


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
        *before, last = command.lines
        assert "prefixroute.app: stopped" in last
        assert sum("outcome=cut_off" in line for line in before) == 2


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


async def test_balancers_may_find_out_before_the_port_closes(commands: Commands, server: SimulatedServer) -> None:
    """Whichever port they look at."""
    command = await commands.serve(server.url, environ={"PREFIXROUTE_SHUTDOWN_DELAY_S": "3600"})
    await command.wait_line(" is up ")
    assert (await get(command.url, "/health")).status == 200

    command.signal(SIGTERM)
    await command.wait_line("stopping: not ready any more, the port closes in 3600 s")
    ready = await get(command.admin_url, "/readyz")
    assert (ready.status, json.loads(ready.body)["reasons"]) == (503, ["stopping"])
    for path in ("/health", "/ping"):
        health = await get(command.url, path)
        assert (health.status, health.body) == (503, b'{"status":"stopping"}')
    # Whoever does not know yet is served.
    await chat(command.url)

    command.signal(SIGTERM)
    assert await command.wait_exit() == (128 + SIGTERM, "")


async def test_after_the_delay_it_stops_by_itself(commands: Commands, server: SimulatedServer) -> None:
    command = await commands.serve(server.url, environ={"PREFIXROUTE_SHUTDOWN_DELAY_S": "0.2"})
    await stop(command)
    lines = [line for line in command.lines if "stopp" in line]
    assert ["closes in 0.2 s" in lines[0], "stopped" in lines[-1]] == [True, True]


# As the first process of a container


def can_unshare() -> bool:
    command = ("unshare", "--user", "--map-root-user", "--fork", "--pid", "true")
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.skipif(not can_unshare(), reason="no process of its own namespace may be made here")
@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
async def test_the_first_process_of_a_namespace_stops_as_any_other(commands: Commands, number: signal.Signals) -> None:
    """The kernel sends it no signal whose handling it left as it was."""
    last = asyncio.Event()
    async with FakeUpstream(begin_stream(last)) as upstream:
        command = await commands.serve(
            upstream.url, before=("unshare", "--user", "--map-root-user", "--fork", "--kill-child", "--pid")
        )
        router = only_child(command.pid)
        async with RawClient(command.url) as streaming:
            await open_stream(streaming)
            os.kill(router, number)
            await command.wait_line(r"stopping: requests under way")
            last.set()
            assert (await streaming.reader.read()).endswith(b"0\r\n\r\n")
        assert await command.wait_exit() == (0, "")


@pytest.mark.skipif(not can_unshare(), reason="no process of its own namespace may be made here")
async def test_the_first_process_of_a_namespace_can_be_ended_before_it_serves(
    commands: Commands, tmp_path: Path
) -> None:
    """While it reads its configuration, here from a pipe that nobody writes to."""
    pipe = tmp_path / "router.yaml"
    os.mkfifo(pipe)
    command = await commands.start(
        *("serve", "--config", str(pipe)),
        before=("unshare", "--user", "--map-root-user", "--fork", "--kill-child", "--pid"),
    )
    # It has opened the pipe to read it: only then can it be opened to be written to.
    writer = await asyncio.to_thread(os.open, pipe, os.O_WRONLY)
    try:
        os.kill(only_child(command.pid), SIGTERM)
        assert await command.wait_exit() == (128 + SIGTERM, "")
    finally:
        os.close(writer)
