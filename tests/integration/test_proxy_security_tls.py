"""TLS on both sides, client certificates, new certificates while running, and instances behind unix sockets."""

import asyncio
import json
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from prefixroute.app import App
from prefixroute.config.tls import trusting
from prefixroute.errors import ConfigError
from prefixroute.explain import ExplainError, ask_ladder
from prefixroute.testing.client import RawClient

Serve = Callable[..., AbstractAsyncContextManager[App]]
Until = Callable[[Callable[[], bool]], Any]

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


class Files:
    """Authorities and certificates as files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.other_ca = trustme.CA()
        self.ca_file = self.write("ca.pem", self.ca.cert_pem.bytes())
        self.other_ca_file = self.write("other-ca.pem", self.other_ca.cert_pem.bytes())

    def write(self, name: str, content: bytes) -> str:
        path = self.folder / name
        path.write_bytes(content)
        return str(path)

    def certificate(self, name: str, *names: str, ca: trustme.CA | None = None) -> dict[str, str]:
        """Settings with a new certificate for these names, in files that `name` begins."""
        made = (ca or self.ca).issue_cert(*(names or ("127.0.0.1",)))
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        return {
            "cert_file": self.write(f"{name}.pem", chain),
            "key_file": self.write(f"{name}.key", made.private_key_pem.bytes()),
        }


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def server_side(certificate: dict[str, str], client_ca: str | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate["cert_file"], certificate["key_file"])
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_side(ca_file: str, certificate: dict[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    if certificate is not None:
        context.load_cert_chain(certificate["cert_file"], certificate["key_file"])
    return context


class Instance:
    """A server that answers everything, probes too; `heads` are those of requests that are no probes."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.probes: list[bytes] = []
        self.names: list[str | None] = []
        self.answer = b"{}"
        self.breaks = False
        self.connections: set[int] = set()
        """Those that requests came on."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                is_request = b"x-request-id" in head.lower()
                (self.heads if is_request else self.probes).append(head)
                if is_request:
                    self.connections.add(id(writer))
                if is_request and self.breaks:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nbroken")
                    return
                if b"upgrade: websocket" in head.lower():
                    await self._echo(reader, writer)
                    return
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        await reader.readexactly(int(line.partition(b":")[2]))
                body = self.answer
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the router left, or the test is over
        finally:
            writer.close()

    @staticmethod
    async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()


@asynccontextmanager
async def tls_instance(instance: Instance, context: ssl.SSLContext, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """The URL of an instance that speaks TLS."""
    context.sni_callback = lambda _connection, name, _context: instance.names.append(name)
    server = await asyncio.start_server(instance.serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://{host}:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def plain_instance(instance: Instance) -> AsyncIterator[str]:
    """The URL of an instance that does not."""
    async with await asyncio.start_server(instance.serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def ask(
    app: App, tls: ssl.SSLContext | None = None, *, body: bytes = BODY, target: str = CHAT
) -> tuple[int, bytes]:
    """Status and body of one request on its own connection. Raises ssl.SSLError, ConnectionError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", app.port, ssl=tls)
    try:
        writer.write(f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode())
        writer.write(b"Connection: close\r\n\r\n" + body)
        # With TLS 1.3 a client learns here that its certificate is refused.
        answer = await reader.read()
    finally:
        writer.close()
    if not answer:
        raise ConnectionError("closed without an answer")
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), rest


async def _speaks_no_tls(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


def listening(**tls: Any) -> dict[str, Any]:
    return {"port": 0, "tls": tls}


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


# Clients


async def test_clients_are_served_over_tls(serve: Serve, files: Files) -> None:
    instance = Instance()
    instance.answer = b"x" * 5_000_000
    async with plain_instance(instance) as url, serve(url, listen=listening(**files.certificate("front"))) as app:
        assert app.url.startswith("https://")
        status, body = await ask(app, client_side(files.ca_file), body=b'{"model":"m","prompt":"%s"}' % (b"y" * 2**20))
        assert (status, body) == (200, instance.answer)
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(app, client_side(files.other_ca_file))
        # Plain HTTP, and rubbish, on a port that wants TLS: closed, and the next client is served.
        with pytest.raises(ConnectionError):
            await ask(app)
        assert (await ask(app, client_side(files.ca_file)))[0] == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_an_answer_that_breaks_off_is_seen_to_break_off_through_tls(
    serve: Serve, files: Files, version: str
) -> None:
    instance = Instance()
    instance.breaks = True
    async with plain_instance(instance) as url, serve(url, listen=listening(**files.certificate("front"))) as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port, ssl=client_side(files.ca_file))
        writer.write(f"GET /x HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        got = b""
        with suppress(ssl.SSLError, ConnectionError):
            while piece := await reader.read(65_536):
                got += piece
        writer.close()
        # The length says that more was to come.
        assert b"\r\nContent-Length: 10\r\n" in got
        assert got.endswith(b"\r\n\r\nbroken")


async def test_failed_handshakes_are_counted_and_told_seldom(
    serve: Serve, files: Files, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 1000.0
    mine, theirs = files.certificate("mine", "me"), files.certificate("theirs", "me", ca=files.other_ca)
    listen = listening(**files.certificate("front"), client_ca_file=files.ca_file)
    admin = {"port": 0, "tls": files.certificate("admin")}

    def told() -> list[str]:
        return [line for line in lines(caplog) if "handshake" in line]

    async with (
        plain_instance(Instance()) as url,
        serve(url, listen=listen, admin=admin, clock=lambda: now_s) as app,
    ):
        failed = app.metrics.failed_handshakes
        assert (await ask(app, client_side(files.ca_file, mine)))[0] == 200
        # Who only looks whether the port is open, as balancers do, is no failure.
        _, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.close()
        assert failed == {"data": 0, "admin": 0}
        for tls in (None, client_side(files.ca_file, theirs), client_side(files.ca_file)):
            n_before = failed["data"]
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await ask(app, tls)
            await until(partial(lambda n: failed["data"] == n, n_before + 1))
        assert told() == ["a TLS handshake on the data port failed: http request"]
        now_s += 1
        # Most clients say what they do not like; asyncio's own hangs up without a word.
        await asyncio.to_thread(_refuse_certificate, app.port, client_side(files.other_ca_file, mine))
        await until(lambda: failed["data"] == 4)
        assert told()[1].endswith("unknown ca (and 2 more since the last such line)")
        _, writer = await asyncio.open_connection("127.0.0.1", app.admin_port)
        writer.write(b"rubbish\r\n\r\n")
        await until(lambda: failed == {"data": 4, "admin": 1})
        writer.close()
        assert told()[2].startswith("a TLS handshake on the admin port failed: ")
        assert (await ask(app, client_side(files.ca_file, mine)))[0] == 200


def _refuse_certificate(port: int, context: ssl.SSLContext) -> None:
    with socket.create_connection(("127.0.0.1", port)) as plain, pytest.raises(ssl.SSLCertVerificationError):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


async def test_the_cause_of_a_failed_handshake_is_told_where_it_is_the_clients_certificate(
    serve: Serve, files: Files, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    listen = listening(**files.certificate("front"), client_ca_file=files.ca_file)
    theirs = files.certificate("theirs", "me", ca=files.other_ca)
    async with serve("http://127.0.0.1:9", listen=listen) as app:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(app, client_side(files.ca_file, theirs))
        await until(lambda: app.metrics.failed_handshakes["data"] == 1)
    told = [line for line in lines(caplog) if "handshake" in line]
    assert told == ["a TLS handshake on the data port failed: unable to get local issuer certificate"]


async def test_old_tls_is_refused(serve: Serve, files: Files) -> None:
    async with serve("http://127.0.0.1:9", listen=listening(**files.certificate("front"))) as app:
        context = client_side(files.ca_file)
        context.set_ciphers("DEFAULT@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            context.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(app, context)


async def test_clients_must_show_certificates_where_an_authority_is_named(serve: Serve, files: Files) -> None:
    instance = Instance()
    good, foreign = files.certificate("client", "me"), files.certificate("foreign", "me", ca=files.other_ca)
    listen = listening(**files.certificate("front"), client_ca_file=files.ca_file)
    async with plain_instance(instance) as url, serve(url, listen=listen) as app:
        assert (await ask(app, client_side(files.ca_file, good)))[0] == 200
        for bad in (None, foreign):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await ask(app, client_side(files.ca_file, bad))
        assert len(instance.heads) == 1


async def test_new_certificates_are_taken_up_and_old_authorities_forgotten(serve: Serve, files: Files) -> None:
    instance = Instance()
    mine, theirs = files.certificate("mine", "me"), files.certificate("theirs", "me", ca=files.other_ca)
    client_ca = files.write("clients.pem", files.ca.cert_pem.bytes())
    listen = listening(**files.certificate("front"), client_ca_file=client_ca)
    async with plain_instance(instance) as url, serve(url, listen=listen) as app:
        assert (await ask(app, client_side(files.ca_file, mine)))[0] == 200
        # A bad file changes nothing.
        files.write("front.key", b"not a key")
        with pytest.raises(ConfigError, match=r"listen\.tls\.key_file: .*front\.key: holds no private key"):
            app.security.reload()
        assert (await ask(app, client_side(files.ca_file, mine)))[0] == 200
        # Another authority, on either side.
        files.certificate("front", ca=files.other_ca)
        files.write("clients.pem", files.other_ca.cert_pem.bytes())
        app.security.reload()
        assert (await ask(app, client_side(files.other_ca_file, theirs)))[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(app, client_side(files.ca_file, mine))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(app, client_side(files.other_ca_file, mine))


def visit(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bytes]:
    """Blocks: asyncio resumes no sessions. The session, and what came back."""
    with (
        socket.create_connection(("127.0.0.1", port)) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1", session=session) as tls,
    ):
        tls.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = b""
        with suppress(ConnectionError):
            while piece := tls.recv(65_536):
                data += piece
        return tls.session, data


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_does_not_outlive_its_authority(serve: Serve, files: Files, version: ssl.TLSVersion) -> None:
    instance = Instance()
    client_ca = files.write("clients.pem", files.ca.cert_pem.bytes())
    listen = listening(**files.certificate("front"), client_ca_file=client_ca)
    context = client_side(files.ca_file, files.certificate("mine", "me"))
    context.maximum_version = version
    async with plain_instance(instance) as url, serve(url, listen=listen) as app:
        session, data = await asyncio.to_thread(visit, app.port, context, None)
        assert data.startswith(b"HTTP/1.1 200")
        files.write("clients.pem", files.other_ca.cert_pem.bytes())
        app.security.reload()
        try:
            _, data = await asyncio.to_thread(visit, app.port, context, session)
        except (ssl.SSLError, ConnectionError):
            data = b""
        assert data == b""
        assert len(instance.heads) == 1


async def test_a_websocket_goes_through_tls_on_both_sides(serve: Serve, files: Files) -> None:
    instance = Instance()
    async with (
        tls_instance(instance, server_side(files.certificate("gpu"))) as url,
        serve(url, listen=listening(**files.certificate("front")), instance={"tls": {"ca_file": files.ca_file}}) as app,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port, ssl=client_side(files.ca_file))
        writer.write(b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        for piece in (b"hello", b"z" * 1_000_000):
            writer.write(piece)
            assert await reader.readexactly(len(piece)) == piece
        writer.close()


# Instances


async def test_instances_are_asked_over_tls_probes_and_requests_alike(serve: Serve, files: Files, until: Until) -> None:
    instance = Instance()
    key = files.write("instance.key", b"sk-own\n")
    tls = {"ca_file": files.ca_file, **files.certificate("router", "router")}
    context = server_side(files.certificate("gpu"), client_ca=files.ca_file)
    async with (
        tls_instance(instance, context) as url,
        serve(url, instance={"tls": tls, "api_key_file": key}) as app,
    ):
        await until(lambda: len(instance.probes) >= 2)
        assert app.router.fleet.can_serve(0.0)
        for _ in range(3):
            assert (await ask(app))[0] == 200
        assert len(instance.connections) == 1
        for head in instance.heads + instance.probes:
            assert b"Authorization: Bearer sk-own\r\n" in head


async def test_a_certificate_is_checked_against_server_name_where_one_is_given(
    serve: Serve, files: Files, until: Until
) -> None:
    instance = Instance()
    tls = {"ca_file": files.ca_file, "server_name": "gpu.internal"}
    async with (
        tls_instance(instance, server_side(files.certificate("gpu", "gpu.internal")), "localhost") as url,
        serve(url, instance={"tls": tls}) as app,
    ):
        await until(lambda: bool(instance.probes))
        assert (await ask(app))[0] == 200
        assert set(instance.names) == {"gpu.internal"}
        assert b"Host: localhost:" in instance.heads[0]


@pytest.mark.parametrize(
    ("tls", "why"),
    [
        (None, "its certificate was refused (unable to get local issuer certificate)"),
        ({"ca_file": "other"}, "its certificate was refused ("),
        ({"ca_file": "ca", "server_name": "someone.else"}, "its certificate was refused (Hostname mismatch"),
        ("expired", "its certificate was refused (certificate has expired)"),
        ("plain", "no TLS ("),
    ],
)
async def test_an_instance_that_is_not_trusted_gets_no_request_and_the_log_says_why(
    serve: Serve,
    files: Files,
    until: Until,
    caplog: pytest.LogCaptureFixture,
    tls: dict[str, str] | str | None,
    why: str,
) -> None:
    instance = Instance()
    certificate = files.certificate("gpu")
    table: dict[str, str] | None = {"ca_file": files.ca_file} if isinstance(tls, str) else tls
    if isinstance(tls, dict):
        names = {"ca": files.ca_file, "other": files.other_ca_file}
        table = {**tls, "ca_file": names[tls["ca_file"]]}
    if tls == "expired":
        made = files.ca.issue_cert("127.0.0.1", not_after=datetime(2020, 1, 1, tzinfo=UTC))
        certificate = {
            "cert_file": files.write("old.pem", made.cert_chain_pems[0].bytes()),
            "key_file": files.write("old.key", made.private_key_pem.bytes()),
        }
    # It says so each time, and at once, also after its probes have found out.
    async with (
        tls_instance(instance, server_side(certificate)) as tls_url,
        await asyncio.start_server(_speaks_no_tls, "127.0.0.1", 0) as plain,
        serve(
            f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}" if tls == "plain" else tls_url,
            instance={"tls": table},
            health={"interval_s": 0.05, "fall": 1},
        ) as app,
    ):
        for _ in range(2):
            status, body = await ask(app)
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (502, "upstream_untrusted")
            assert error["message"].startswith(f"gpu-0: {why}")
            await until(lambda: any("gpu-0 is down" in line for line in lines(caplog)))
        assert any(why in line for line in lines(caplog))
        causes = [r.__dict__["fields"]["cause"] for r in caplog.records if "gpu-0 is down" in r.getMessage()]
        assert causes
        assert causes[0].startswith(why.partition(" (")[0])
    assert instance.heads == instance.probes == []


async def test_a_fleet_that_is_not_trusted_is_not_ready_and_says_why(
    serve: Serve, files: Files, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        tls_instance(Instance(), server_side(files.certificate("gpu", ca=files.other_ca))) as url,
        serve(
            url, instance={"tls": {"ca_file": files.ca_file}}, health={"interval_s": 0.01, "fall": 3}, admin={"port": 0}
        ) as app,
        RawClient(app.url) as client,
        RawClient(app.admin_url or "") as admin,
    ):
        await until(lambda: any("gpu-0 is down" in line for line in lines(caplog)))
        for _ in range(3):
            n_probes = _n_untrusted((await admin.request("GET", "/metrics")).body)
            while _n_untrusted((await admin.request("GET", "/metrics")).body) < n_probes + 3:
                await asyncio.sleep(0)
            assert (await client.request("GET", "/health")).status == 503
            assert (await admin.request("GET", "/readyz")).status == 503
        (shown,) = json.loads((await admin.request("GET", "/instances")).body)
        assert (shown["state"], shown["failure"]) == ("down", "untrusted")
        assert shown["failure_reason"].startswith("its certificate was refused: ")


def _n_untrusted(exposition: bytes) -> float:
    series = b'prefixroute_probes_total{outcome="untrusted",upstream="gpu-0"} '
    return float(next(line for line in exposition.splitlines() if line.startswith(series)).removeprefix(series))


async def test_another_instance_serves_while_one_is_not_trusted(serve: Serve, files: Files, until: Until) -> None:
    bad, good = Instance(), Instance()
    context = server_side(files.certificate("gpu"))
    async with (
        tls_instance(bad, server_side(files.certificate("bad", ca=files.other_ca))) as bad_url,
        tls_instance(good, context) as good_url,
        serve(bad_url, good_url, instance={"tls": {"ca_file": files.ca_file}}) as app,
    ):
        for _ in range(4):
            assert (await ask(app))[0] == 200
        assert len(good.heads) == 4
        assert bad.heads == []


async def test_verification_can_be_turned_off_and_that_is_said(
    serve: Serve, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    instance = Instance()
    async with (
        tls_instance(instance, server_side(files.certificate("gpu", "someone.else", ca=files.other_ca))) as url,
        serve(url, instance={"tls": {"verify": False}}) as app,
    ):
        assert (await ask(app))[0] == 200
    assert "gpu-0: its certificate is not checked (tls.verify is false)" in lines(caplog)


# Unix sockets


async def test_an_instance_behind_a_unix_socket_is_probed_and_served(
    serve: Serve, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = Instance()
    key = tmp_path / "instance.key"
    key.write_text("sk-own")
    # Within the length that sockets' paths may have.
    monkeypatch.chdir(tmp_path)
    path = Path(f"/tmp/prefixroute-test-{os.getpid()}.sock")
    server = await asyncio.start_unix_server(instance.serve, path)
    try:
        async with server, serve(f"unix:{path}", instance={"api_key_file": str(key)}, admin={"port": 0}) as app:
            await until(lambda: len(instance.probes) >= 2)
            for _ in range(2):
                assert (await ask(app))[0] == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", app.admin_port)
            writer.write(b"GET /instances HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert f'"url":"unix:{path}"'.encode() in await reader.read()
            writer.close()
            for head in instance.heads + instance.probes:
                assert head.lower().count(b"\r\nhost: localhost\r\n") == 1
                assert b"Authorization: Bearer sk-own\r\n" in head
    finally:
        path.unlink(missing_ok=True)


async def test_a_unix_socket_that_is_not_there_is_an_instance_that_refuses(serve: Serve, tmp_path: Path) -> None:
    async with serve(f"unix:{tmp_path}/no.sock", limits={"wait_for_instance_s": 0.0}) as app:
        assert (await ask(app))[0] == 503


# The admin port


async def test_the_admin_port_can_speak_tls(serve: Serve, files: Files) -> None:
    admin = {"port": 0, "tls": files.certificate("admin")}
    async with serve("http://127.0.0.1:9", admin=admin) as app:
        assert (app.admin_url or "").startswith("https://")
        reader, writer = await asyncio.open_connection("127.0.0.1", app.admin_port, ssl=client_side(files.ca_file))
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_explain_says_that_a_certificate_was_refused_and_takes_an_authority(serve: Serve, files: Files) -> None:
    admin = {"port": 0, "tls": files.certificate("admin")}
    async with serve("http://127.0.0.1:9", admin=admin) as app:
        url = app.admin_url or ""
        with pytest.raises(ExplainError) as caught:
            await asyncio.to_thread(ask_ladder, url)
        assert str(caught.value).startswith(f"the certificate of {url} was refused: ")
        assert "--ca-file" in str(caught.value)
        assert "gaps" in await asyncio.to_thread(partial(ask_ladder, url, tls=trusting(files.ca_file, "--ca-file")))
        with pytest.raises(ConfigError, match=r"--ca-file: .*nowhere\.pem: no such file"):
            trusting(str(files.folder / "nowhere.pem"), "--ca-file")
    async with serve("http://127.0.0.1:9", admin={"port": 0}) as app:
        with pytest.raises(ExplainError, match=r"^no TLS with https://.* \(is it an http:// port\?\)$"):
            await asyncio.to_thread(ask_ladder, (app.admin_url or "").replace("http:", "https:"))
