"""Section H of the failure cases: configuration, names, TLS, clocks, SageMaker's container surface (O71).

O70, and what else SageMaker's endpoints ask for, has no part in the plain proxy.
"""

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from prefixroute.app import App, running
from prefixroute.config.load import load_settings
from prefixroute.names import Names
from prefixroute.reload import ConfigSource
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.upstream import json_answer
from tests.conformance.harness import (
    CHAT,
    JSON,
    OK,
    SSE_HEAD,
    Finished,
    Serve,
    Until,
    answers,
    chat,
    event,
    scrape,
    sse,
    wait_metric,
)

REFUSED = 'prefixroute_config_reloads_total{outcome="refused"}'
APPLIED = 'prefixroute_config_reloads_total{outcome="applied"}'


async def ask(app: App, body: bytes = chat(), target: str = CHAT) -> int:
    async with RawClient(app.url) as client:
        return (await client.request("POST", target, body, [JSON])).status


# ---------------------------------------------------------------------- O66: a broken configuration


class ConfigFile:
    """A configuration on disk, as an operator writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *upstreams: FakeUpstream, **tables: Any) -> None:
        self.path.write_text(yaml.safe_dump(self.document(*upstreams, **tables)))

    def document(self, *upstreams: FakeUpstream, **tables: Any) -> dict[str, Any]:
        instances = [{"url": one.url, "name": f"gpu-{one.port}"} for one in upstreams]
        return {
            "listen": {"port": 0},
            "admin": {"port": 0},
            "fleet": {"instances": instances, "health": {"interval_s": 3600.0}},
            "routing": {"strategy": "round_robin"},
            "drain_timeout_s": 0.0,
            **tables,
        }

    @asynccontextmanager
    async def running(self, *upstreams: FakeUpstream) -> AsyncIterator[tuple[App, ConfigSource]]:
        source = ConfigSource(self.path, lambda: load_settings(self.path, environ={}))
        async with asyncio.timeout(20), running(source.load(), environ={}, source=source) as app:
            for one in upstreams:
                await one.wait_probed()
            yield app, source


@pytest.fixture
def config(tmp_path: Path) -> ConfigFile:
    return ConfigFile(tmp_path / "config.yaml")


def half(text: str) -> str:
    return text[: len(text) // 2]


BROKEN: dict[str, Any] = {
    "no YAML": lambda text: text + "\n  : [",
    "an unknown key": lambda text: text + "\nlimit: {}\n",
    "an unknown key within": lambda text: text.replace("interval_s", "intervals"),
    "a wrong type": lambda text: text.replace("3600.0", "often"),
    "empty upstream list": lambda text: json.dumps({**yaml.safe_load(text), "fleet": {"instances": 5}}),
    "an upstream twice": lambda text: json.dumps(
        {**yaml.safe_load(text), "fleet": {"instances": [{"url": "http://a"}, {"url": "http://a"}]}}
    ),
    "an unknown strategy": lambda text: text.replace("round_robin", "best"),
    "a good part and a bad one": lambda text: text.replace("round_robin", "random") + "\nlog: {level: loud}\n",
    "half a file": half,
    "a list": lambda _: "- 1\n- 2\n",
    "no UTF-8": lambda _: "\udcff\udcfe",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_o66_a_broken_configuration_changes_nothing_and_a_good_one_is_taken_up_later(
    config: ConfigFile, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    async with FakeUpstream() as old, FakeUpstream() as new:
        config.write(old)
        good = config.path.read_text()
        async with config.running(old) as (app, source):
            config.path.write_text(BROKEN[name](good), encoding="utf-8", errors="surrogateescape")
            source.ask()
            await wait_metric(app, REFUSED, lambda n: n == 1.0)
            assert "not taken up" in caplog.text
            for _ in range(2):
                assert await ask(app) == 200
            assert (len(old.calls), new.n_connections_ever) == (2, 0)
            assert (await scrape(app))["prefixroute_config_last_reload_successful"] == 0.0
            config.write(new)
            source.ask()
            await wait_metric(app, APPLIED, lambda n: n == 1.0)
            assert await ask(app) == 200
            assert (len(old.calls), len(new.calls)) == (2, 1)
            assert (await scrape(app))["prefixroute_config_last_reload_successful"] == 1.0


async def test_o66_a_file_that_is_gone_changes_nothing(config: ConfigFile) -> None:
    async with FakeUpstream() as upstream:
        config.write(upstream)
        async with config.running(upstream) as (app, source):
            config.path.unlink()
            source.ask()
            await wait_metric(app, REFUSED, lambda n: n == 1.0)
            assert await ask(app) == 200


async def test_o66_streams_of_a_removed_instance_end_well(config: ConfigFile) -> None:
    go_on = asyncio.Event()

    async def streams(call: Call) -> None:
        await call.send(SSE_HEAD)
        await call.send_chunk(event("a"))
        await go_on.wait()
        await call.send_chunk(event("b"))
        await call.send_chunk(b"")

    async with FakeUpstream(streams) as old, FakeUpstream() as new:
        config.write(old)
        async with config.running(old) as (app, source), RawClient(app.url) as client:
            await client.send(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
            await client.begin()
            assert await client.chunk() == event("a")
            config.write(new)
            source.ask()
            await wait_metric(app, APPLIED, lambda n: n == 1.0)
            go_on.set()
            assert await client.chunk() == event("b")
            assert await client.chunk() == b""


# ---------------------------------------------------------------------- O67: names with several addresses


async def test_o67_localhost_is_reached_where_only_ipv4_listens(serve: Serve) -> None:
    async with FakeUpstream() as upstream, serve(f"http://localhost:{upstream.port}") as app:
        assert await ask(app) == 200
        assert upstream.calls[-1].header("host") == f"localhost:{upstream.port}"


async def test_o67_a_name_whose_first_addresses_are_dead_is_reached_at_another(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeUpstream() as upstream:

        async def resolved(_names: Any, _host: str, _port: int) -> list[Any]:
            # A name server cannot be had in a test: what it would say, and everything from there on for real.
            addresses = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, upstream.port)) for one in addresses]

        monkeypatch.setattr(Names, "addresses", resolved)
        async with serve(f"http://gpu.test:{upstream.port}") as app:
            assert await ask(app) == 200
        assert upstream.calls[-1].header("host") == f"gpu.test:{upstream.port}"


async def test_o67_a_name_that_nobody_knows_is_an_instance_that_is_not_there(serve: Serve, finished: Finished) -> None:
    async with FakeUpstream() as upstream, serve(upstream, "http://no-such-host.invalid:1") as app:
        for _ in range(4):
            assert await ask(app) == 200
        assert len(upstream.calls) == 4
    assert {line["outcome"] for line in finished()} == {"ok"}


# ---------------------------------------------------------------------- O68: TLS and unix sockets


@asynccontextmanager
async def tls_upstream(authority: trustme.CA, *names: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    heads: list[bytes] = []

    async def serves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                length = heads[-1].lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                writer.write(OK)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            writer.close()

    server = await asyncio.start_server(serves, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        server.close()


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_o68_a_certificate_is_verified_unless_told_not_to(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_trusted: bool
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    tls = {"ca_file": str(tmp_path / "ca.pem")} if is_trusted else {}
    limits = {"wait_for_instance_s": 0.0}
    async with (
        tls_upstream(authority, "127.0.0.1") as (url, heads),
        serve(url, instance={"tls": tls}, limits=limits) as app,
    ):
        status = await ask(app)
    assert status == (200 if is_trusted else 502)
    assert bool(heads) == is_trusted
    assert ("certificate" in caplog.text) == (not is_trusted)


@pytest.mark.parametrize("is_right", [True, False])
async def test_o68_of_the_name_that_was_asked_for(serve: Serve, tmp_path: Path, is_right: bool) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    tls = {"ca_file": str(tmp_path / "ca.pem"), "server_name": "gpu.internal" if is_right else "other.internal"}
    async with (
        tls_upstream(authority, "gpu.internal") as (url, heads),
        serve(url, instance={"tls": tls}, limits={"wait_for_instance_s": 0.0}) as app,
    ):
        assert (await ask(app) == 200) == is_right
    assert bool(heads) == is_right


async def test_o68_a_unix_socket_has_a_valid_host(serve: Serve, tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def serves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(OK)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            writer.close()

    server = await asyncio.start_unix_server(serves, tmp_path / "vllm.sock")
    async with serve(f"unix:{tmp_path}/vllm.sock") as app, RawClient(app.url) as client:
        assert (await client.request("GET", "/x?")).status == 200
    server.close()
    mine = [head for head in heads if b"x-request-id" in head]
    assert mine[0].startswith(b"GET /x? HTTP/1.1\r\nHost: localhost\r\n")
    # Probes come by the same way.
    assert any(head.startswith(b"GET /health ") for head in heads)


# ---------------------------------------------------------------------- O69: clocks


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 86_400.0 * 365])
async def test_o69_a_clock_that_is_set_changes_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, finished: Finished, until: Until, step_s: float
) -> None:
    """Of deadlines, ages, pauses and durations: all of them go by the monotonic clock."""
    go_on = asyncio.Event()

    async def streams(call: Call) -> None:
        if call.target == "/quick":
            await call.send(OK)
            return
        await call.send(SSE_HEAD)
        await call.send_chunk(event("a"))
        await go_on.wait()
        await call.send_chunk(event("b"))
        await call.send_chunk(b"")

    wall = time.time
    upstream_settings = {"idle_timeout_s": 60.0, "first_byte_timeout_s": 60.0}
    async with FakeUpstream(streams) as upstream, serve(upstream, upstream=upstream_settings) as app:
        async with RawClient(app.url) as client, RawClient(app.url) as other:
            assert (await other.request("GET", "/quick")).status == 200
            await client.send(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
            await client.begin()
            assert await client.chunk() == event("a")
            assert (await other.request("GET", "/quick")).status == 200
            monkeypatch.setattr(time, "time", lambda: wall() + step_s)
            # Connections kept here and there are as young as before.
            assert (await other.request("GET", "/quick")).status == 200
            assert upstream.calls[-1].reused
            go_on.set()
            assert await client.chunk() == event("b")
            assert await client.chunk() == b""
        await until(lambda: len(finished()) == 4)
    assert all(0 <= line["duration_ms"] < 60_000 for line in finished())
    assert {line["outcome"] for line in finished()} == {"ok"}


# ---------------------------------------------------------------------- O71: the container's surface


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_o71_ping_tells_by_its_status(serve: Serve, method: str) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, limits={"wait_for_instance_s": 0.0}) as app,
        RawClient(app.url) as client,
    ):
        well = await client.request(method, "/ping")
        assert (well.status, upstream.calls) == (200, [])
        await upstream.stop()
        # It is known once somebody has tried.
        assert (await client.request(body=chat())).status == 503
        sick = await client.request(method, "/ping")
        assert sick.status == 503


async def test_o71_an_instance_that_says_by_its_body_that_it_is_unwell_is_well(serve: Serve) -> None:
    async with FakeUpstream() as upstream:
        upstream.health = json_answer({"status": "unhealthy"})
        async with serve(upstream) as app, RawClient(app.url) as client:
            assert (await client.request("GET", "/ping")).status == 200


@pytest.mark.parametrize("body", [chat(), b'{"inputs":"hi"}', b'{"prompt":"hi"}', b"plain", b"\x00\xff", b""])
@pytest.mark.parametrize("kind", ["application/json", "application/x-npy", "text/csv"])
async def test_o71_invocations_pass_as_they_are(serve: Serve, finished: Finished, body: bytes, kind: str) -> None:
    headers = [
        ("Content-Type", kind),
        ("Accept", "application/json"),
        ("X-Amzn-SageMaker-Custom-Attributes", "trace=1"),
        ("X-Amzn-SageMaker-Target-Model", "m"),
    ]
    async with FakeUpstream(answers(OK)) as upstream, serve(upstream) as app, RawClient(app.url) as client:
        answer = await client.request("POST", "/invocations", body, headers)
        assert (answer.status, answer.body) == (200, b'{"ok":true}')
        (call,) = upstream.calls
        assert (call.target, call.body) == ("/invocations", body)
        assert [one for one in call.headers if one in headers] == headers
    assert finished()[0]["route"] == "/invocations"


async def test_o71_invocations_stream_as_they_come(serve: Serve) -> None:
    async with (
        FakeUpstream(sse(event("a"), event("b"))) as upstream,
        serve(upstream) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request("POST", "/invocations", chat(stream=True), [JSON])
        assert answer.body == event("a") + event("b")
