"""The prober against servers on real sockets that answer, refuse, hang, reset and talk nonsense."""

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack
from random import Random
from types import TracebackType
from typing import Self

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from prefixroute.config import HealthSettings
from prefixroute.core.blocks import BlockHasher
from prefixroute.core.fleet import Instance, ProbeFailure, State
from prefixroute.core.policies.blind import LeastOutstanding
from prefixroute.core.prompt import Api, read_prompt
from prefixroute.core.router import Router
from prefixroute.instance_facts import EventSource
from prefixroute.prober import LEARN_EVERY_S, Prober, failure_of

SECRET = "sk-1234567890abcdef"
TIMEOUT_S = 0.2
MODELS = b'{"object":"list","data":[{"id":"llama"},{"id":"lora-a"}]}'
METRICS = (
    b"process_start_time_seconds %d\n"
    b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} %d.0\n'
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="8192"} 1.0\n'
)


def answer(status: int, body: bytes = b"", head: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), head, body)


class Server:
    """Answers each path with the bytes it is told; None hangs until the client leaves, b"" closes."""

    def __init__(self, answers: dict[str, bytes | None] | None = None) -> None:
        self.answers: dict[str, bytes | None] = {"/health": answer(200), **(answers or {})}
        self.asked: list[str] = []
        self.heads: list[bytes] = []
        self._server: asyncio.Server | None = None
        self._port = 0
        self._changed = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def wait_asked(self, n: int, path: str = "/health") -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.asked.count(path) >= n)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            async with self._changed:
                self.asked.append(path)
                self.heads.append(head)
                self._changed.notify_all()
            reply = self.answers.get(path, answer(404))
            if reply is None:
                await reader.read()
            else:
                writer.write(reply)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the prober left
        finally:
            writer.close()


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Probing:
    """A router over servers, its prober, and what the prober told."""

    def __init__(self, servers: list[Server], *, path: str = "auto", **instance: frozenset[str]) -> None:
        self.instances = [Instance(f"gpu-{i}", s.url, i, **instance) for i, s in enumerate(servers)]
        self.router = Router(self.instances, LeastOutstanding(), BlockHasher(64, seed=1), Random(1))
        self.health = HealthSettings(path=path, timeout_s=TIMEOUT_S, interval_s=0.01)
        self.clock = Clock()
        self.n_changes = 0
        self.outcomes: list[str] = []
        self.asks_events: list[str] = []
        self.events: list[tuple[str, Sequence[EventSource]]] = []
        self.emptied: list[tuple[str, float | None]] = []
        self.adapters: list[Collection[str]] | None = None

    def prober(self, *, api_keys: dict[str, str] | None = None, known_capacity: tuple[str, ...] = ()) -> Prober:
        return Prober(
            self.router, self.health, api_keys=api_keys, known_capacity=known_capacity,
            on_change=self._on_change, on_probe=lambda _name, outcome: self.outcomes.append(outcome),
            asks_events=self.asks_events, on_events=lambda name, sources: self.events.append((name, sources)),
            on_emptied=lambda name, started_s: self.emptied.append((name, started_s)),
            on_adapters=None if self.adapters is None else self.adapters.append,
            clock=self.clock, rng=Random(1),
        )  # fmt: skip

    def state(self, slot: int = 0) -> State:
        return self.router.fleet.state(f"gpu-{slot}").state

    def n_blocks(self, slot: int = 0) -> int:
        return self.router.index.n_blocks(slot)

    def send_prompt(self) -> None:
        prompt = read_prompt(Api.COMPLETIONS, b'{"prompt":"%s"}' % (b"once upon a time " * 100))
        with self.router.lease(self.router.read(prompt), now_s=self.clock()):
            pass

    def _on_change(self) -> None:
        self.n_changes += 1


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def changes(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """What was said of states: before, after, cause."""
    told = [(r.getMessage(), r.__dict__["fields"]) for r in caplog.records if "before" in r.__dict__["fields"]]
    return [(fields["before"], message.rpartition(" is ")[2], fields["cause"]) for message, fields in told]


# ---------------------------------------------------------------------- health


async def test_the_first_good_probe_brings_an_instance_up(server: Server) -> None:
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])

    assert probing.state() is State.UP
    assert probing.outcomes == ["passed"]
    assert probing.n_changes >= 1


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (answer(503), ProbeFailure.STATUS),
        (answer(500), ProbeFailure.STATUS),
        (answer(302, head=b"Location: /ping\r\n"), ProbeFailure.STATUS),
        (b"", ProbeFailure.STATUS),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ProbeFailure.STATUS),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", ProbeFailure.STATUS),
        (None, ProbeFailure.TIMEOUT),
    ],
)
async def test_an_answer_that_is_no_health_fails_the_probe(
    server: Server, reply: bytes | None, failure: ProbeFailure
) -> None:
    server.answers["/health"] = reply
    probing = Probing([server])
    async with probing.prober() as prober:
        for _ in range(3):
            await prober.probe_once(probing.instances[0])

    assert probing.state() is State.DOWN
    assert probing.router.fleet.state("gpu-0").failure is failure
    assert probing.outcomes == [failure.value] * 3
    assert set(server.asked) == {"/health"}


async def test_a_closed_port_refuses(server: Server) -> None:
    await server.stop()
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])

    assert probing.outcomes == ["refused"]
    assert not probing.router.fleet.can_serve(0)


async def test_one_failed_probe_changes_nothing_and_each_change_is_told_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    probing = Probing([server])
    good, bad = answer(200), answer(503)
    async with probing.prober() as prober:
        for reply in (good, bad, good, bad, bad, bad, bad, good, good, good):
            server.answers["/health"] = reply
            await prober.probe_once(probing.instances[0])

    assert changes(caplog) == [("starting", "up", "passed"), ("up", "down", "status 503"), ("down", "up", "passed")]


async def test_what_traffic_changed_is_told_too(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])
        probing.router.connect_failed("gpu-0", 1000.0, timed_out=False)
        await prober.probe_once(probing.instances[0])

    assert changes(caplog) == [
        ("starting", "up", "passed"), ("up", "ejected", "traffic"), ("ejected", "half_open", "passed"),
    ]  # fmt: skip


async def test_a_fleet_that_is_too_busy_to_answer_keeps_serving() -> None:
    async with Server({"/health": None}) as first, Server({"/health": None}) as second:
        probing = Probing([first, second])
        for instance in probing.instances:
            probing.router.fleet.answered(instance.name)
        async with probing.prober() as prober:
            for _ in range(4):
                await asyncio.gather(*(prober.probe_once(i) for i in probing.instances))

    assert probing.state(0) is probing.state(1) is State.UP
    assert probing.outcomes == ["timeout"] * 8


async def test_ping_stands_in_for_health_and_is_remembered(server: Server) -> None:
    server.answers = {"/ping": answer(200)}
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])
        await prober.probe_once(probing.instances[0])
        probes = [path for path in server.asked if path in ("/health", "/ping")]
        assert probes == ["/health", "/ping", "/ping"]

        server.asked.clear()
        server.answers = {"/health": answer(200), "/ping": answer(405)}  # another server at the same address
        await prober.probe_once(probing.instances[0])
        assert server.asked == ["/ping", "/health"]

    assert probing.outcomes == ["passed"] * 3


async def test_a_configured_path_is_the_only_one(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.answers = {"/up?deep=1": answer(204)}
    probing = Probing([server], path="/up?deep=1", models=frozenset({"llama"}))
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])

    assert server.asked == ["/up?deep=1", "/metrics"]
    assert probing.state() is State.UP


async def test_the_base_path_of_an_instance_comes_first(server: Server) -> None:
    server.answers = {"/base/health": answer(200), "/base/v1/models": answer(200, MODELS)}
    probing = Probing([server])
    instance = Instance("gpu-0", f"{server.url}/base", 0)
    async with probing.prober() as prober:
        await prober.probe_once(instance)

    assert server.asked == ["/base/health", "/base/v1/models", "/base/metrics"]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_health_check_that_wants_a_key_is_misconfiguration_told_once(
    server: Server, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    server.answers["/health"] = answer(status)
    probing = Probing([server])
    async with probing.prober() as prober:
        for _ in range(5):
            await prober.probe_once(probing.instances[0])

        assert probing.state() is State.UP
        told = warnings(caplog)
        assert len(told) == 1
        assert "api_key_env" in told[0]

        server.answers["/health"] = answer(200)
        await prober.probe_once(probing.instances[0])
        server.answers["/health"] = answer(status)
        await prober.probe_once(probing.instances[0])
        assert warnings(caplog) == told * 2  # it was in order in between


async def test_a_server_without_a_health_check_is_alive(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.answers = {}
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])
        await prober.probe_once(probing.instances[0])

    assert probing.state() is State.UP
    told = warnings(caplog)
    assert len(told) == 1
    assert "fleet.health.path" in told[0]


async def test_a_server_that_is_busy_is_alive(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.answers["/health"] = answer(429)
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])

    assert probing.state() is State.UP
    assert warnings(caplog) == []


async def test_the_key_goes_with_every_request_and_into_no_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.answers["/v1/models"] = answer(401)
    async with Server({"/health": answer(403)}) as keyless:
        probing = Probing([server, keyless])
        async with probing.prober(api_keys={"gpu-0": SECRET}) as prober:
            for instance in probing.instances:
                await prober.probe_once(instance)
            await server.stop()
            await prober.probe_once(probing.instances[0])

        assert server.asked == ["/health", "/v1/models", "/metrics"]
        assert all(f"\r\nAuthorization: Bearer {SECRET}\r\n".encode() in head for head in server.heads)
        assert all(b"authorization" not in head.lower() for head in keyless.heads)
    assert SECRET not in caplog.text
    assert any("/v1/models with 401" in warning and "api_key_env" in warning for warning in warnings(caplog))


async def test_a_fault_of_this_machine_is_no_news_of_an_instance(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    probing = Probing([server])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with probing.prober() as prober:
        next_fd = os.dup(0)
        os.close(next_fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd, limits[1]))
        try:
            for _ in range(5):
                await prober.probe_once(probing.instances[0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert probing.state() is State.STARTING
    assert probing.outcomes == ["not_sent"] * 5
    assert warnings(caplog) == ["gpu-0 cannot be probed from here (Too many open files)"]


async def test_cookies_and_redirects_are_ignored(server: Server) -> None:
    server.answers["/health"] = answer(200, head=b"Set-Cookie: a=b; Path=/\r\n")
    server.answers["/v1/models"] = answer(307, head=b"Location: /elsewhere\r\n")
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])

    assert "/elsewhere" not in server.asked
    assert all(b"cookie" not in head.lower() for head in server.heads)


async def test_flaps_leave_requests_in_flight_alone(server: Server) -> None:
    probing = Probing([server])
    prompt = read_prompt(Api.CHAT, b"{}")
    async with probing.prober() as prober, AsyncExitStack() as in_flight:
        for _ in range(10):
            in_flight.enter_context(probing.router.lease(probing.router.read(prompt), now_s=0))
        for status in (200, 503, 503, 503, 200, 200):
            server.answers["/health"] = answer(status)
            await prober.probe_once(probing.instances[0])
        assert probing.router.load.of(0).in_flight == 10

    assert probing.router.load.of(0).in_flight == 0


async def test_whoever_waits_hears_when_an_instance_may_serve_again(server: Server) -> None:
    probing = Probing([server], models=frozenset({"llama"}))
    heard: list[bool] = []
    async with probing.prober() as prober:
        for status in (200, 200, 503, 503, 503, 503, 200, 200, 200):
            server.answers["/health"] = answer(status)
            before = probing.n_changes
            await prober.probe_once(probing.instances[0])
            heard.append(probing.n_changes > before)

    assert heard == [True, False, False, False, True, False, False, True, False]


# ---------------------------------------------------------------------- what is learned


async def test_models_and_capacity_are_learned_when_an_instance_appears(server: Server) -> None:
    server.answers |= {"/v1/models": answer(200, MODELS), "/metrics": answer(200, METRICS % (100, 1))}
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])

    assert probing.router.fleet.state("gpu-0").models == frozenset({"llama", "lora-a"})
    assert probing.router.capacity_tokens("gpu-0") == 16 * 8192


async def test_learning_is_repeated_at_intervals_and_after_trouble(server: Server) -> None:
    probing = Probing([server])
    async with probing.prober() as prober:

        async def n_learned() -> int:
            server.asked.clear()
            await prober.probe_once(probing.instances[0])
            return server.asked.count("/v1/models")

        assert [await n_learned() for _ in range(3)] == [1, 0, 0]
        probing.clock.now_s += LEARN_EVERY_S
        assert [await n_learned() for _ in range(2)] == [1, 0]
        server.answers["/health"] = answer(503)
        assert await n_learned() == 0
        server.answers["/health"] = answer(200)
        assert [await n_learned() for _ in range(2)] == [1, 0]
        probing.router.connect_failed("gpu-0", probing.clock(), timed_out=False)
        assert await n_learned() == 1


@pytest.mark.parametrize(
    "reply",
    [
        answer(200, b'{"data":null}'),
        answer(200, b'{"data":[]}'),
        answer(200, b"<html>"),
        answer(500, MODELS),
        answer(404),
        answer(200, b'{"data":[{"id":"%s"}]}' % (b"x" * 1_100_000)),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",
        b"",
        None,
    ],
)
async def test_an_odd_model_list_leaves_what_is_known(server: Server, reply: bytes | None) -> None:
    server.answers |= {"/v1/models": answer(200, MODELS), "/metrics": reply}
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])
        server.answers["/v1/models"] = reply
        probing.clock.now_s += LEARN_EVERY_S
        await prober.probe_once(probing.instances[0])

    assert probing.router.fleet.state("gpu-0").models == frozenset({"llama", "lora-a"})
    assert probing.router.capacity_tokens("gpu-0") == 1_000_000
    assert probing.state() is State.UP


async def test_what_is_configured_is_not_learned(server: Server) -> None:
    server.answers |= {"/v1/models": answer(200, MODELS), "/metrics": answer(200, METRICS % (100, 1))}
    probing = Probing([server], models=frozenset({"mine"}))
    async with probing.prober(known_capacity=("gpu-0",)) as prober:
        await prober.probe_once(probing.instances[0])

    assert server.asked == ["/health", "/metrics"]
    assert probing.router.fleet.state("gpu-0").models == frozenset({"mine"})
    assert probing.router.capacity_tokens("gpu-0") == 1_000_000


@pytest.mark.parametrize("models", [None, frozenset({"mine"})], ids=["learned", "configured"])
async def test_adapters_are_told_to_who_wants_to_know(server: Server, models: frozenset[str] | None) -> None:
    server.answers["/v1/models"] = answer(200, b'{"data":[{"id":"llama"},{"id":"sql","parent":"llama"}]}')
    probing = Probing([server]) if models is None else Probing([server], models=models)
    probing.adapters = []
    async with probing.prober() as prober:
        for _ in range(2):
            await prober.probe_once(probing.instances[0])
            probing.clock.now_s += LEARN_EVERY_S

    assert probing.adapters == [{"sql"}, {"sql"}]
    assert probing.router.fleet.state("gpu-0").models == (models or {"llama", "sql"})


@pytest.mark.parametrize(
    ("later", "is_kept"),
    [
        (answer(200, METRICS % (100, 1)), True),
        (answer(200, METRICS % (160, 1)), False),  # another process
        (answer(200, METRICS % (100, 0)), False),  # asleep
        (answer(200), True),  # tells nothing
        (answer(404), True),
    ],
)
async def test_a_restart_or_sleep_empties_the_map(server: Server, later: bytes, is_kept: bool) -> None:
    server.answers["/metrics"] = answer(200, METRICS % (100, 1))
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])
        probing.send_prompt()
        n_blocks = probing.n_blocks()
        server.answers["/metrics"] = later
        probing.clock.now_s += LEARN_EVERY_S
        await prober.probe_once(probing.instances[0])

    assert n_blocks > 0
    assert probing.n_blocks() == (n_blocks if is_kept else 0)


async def test_a_silent_spell_keeps_the_map_of_the_same_process(server: Server) -> None:
    server.answers["/metrics"] = answer(200, METRICS % (100, 1))
    probing = Probing([server])
    async with probing.prober() as prober:
        await prober.probe_once(probing.instances[0])
        probing.send_prompt()
        for reply in (None, None, None, answer(200), answer(200)):
            server.answers["/health"] = reply
            await prober.probe_once(probing.instances[0])

    assert probing.state() is State.UP
    assert probing.n_blocks() > 0


# ---------------------------------------------------------------------- running


async def test_all_instances_are_probed_at_once_and_again_whatever_one_does(server: Server) -> None:
    async with Server({"/health": None}) as silent, Server() as other:
        probing = Probing([silent, server, other])
        probing.health = HealthSettings(timeout_s=60, interval_s=0.01)
        running = asyncio.create_task(probing.prober().run())
        await asyncio.gather(silent.wait_asked(1), server.wait_asked(5), other.wait_asked(5))
        assert silent.asked == ["/health"]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    assert probing.state(0) is State.STARTING
    assert probing.state(1) is probing.state(2) is State.UP


def connector_error(error: OSError) -> aiohttp.ClientConnectorError:
    return aiohttp.ClientConnectorError(ConnectionKey("gpu-a", 8000, False, True, None, None, None), error)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (connector_error(ConnectionRefusedError(errno.ECONNREFUSED, "refused")), ProbeFailure.REFUSED),
        (connector_error(OSError(errno.EHOSTUNREACH, "no route")), ProbeFailure.REFUSED),
        (connector_error(socket.gaierror(socket.EAI_NONAME, "unknown name")), ProbeFailure.REFUSED),
        (connector_error(socket.gaierror(socket.EAI_AGAIN, "resolver is down")), ProbeFailure.TIMEOUT),
        (connector_error(TimeoutError(errno.ETIMEDOUT, "no SYN-ACK")), ProbeFailure.TIMEOUT),
        (connector_error(OSError(errno.EMFILE, "too many open files")), None),
        (connector_error(OSError(errno.EADDRNOTAVAIL, "no free port")), None),
        (TimeoutError(), ProbeFailure.TIMEOUT),
        (aiohttp.ConnectionTimeoutError(), ProbeFailure.TIMEOUT),
        (aiohttp.ServerDisconnectedError(), ProbeFailure.STATUS),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), ProbeFailure.STATUS),
        (aiohttp.ClientPayloadError(), ProbeFailure.STATUS),
    ],
)
def test_what_an_error_says_about_the_instance(error: Exception, failure: ProbeFailure | None) -> None:
    assert failure_of(error) is failure


async def test_a_prober_outside_its_context_says_so(server: Server) -> None:
    probing = Probing([server])

    with pytest.raises(RuntimeError, match="outside its context"):
        await probing.prober().probe_once(probing.instances[0])


# ------------------------------------------------------------------ KV events


async def test_where_events_are_is_asked_of_those_that_are_to_tell(server: Server) -> None:
    server.answers["/kv_event_sources"] = answer(200, b'{"0": {"endpoint": "tcp://*:5557"}}')
    async with Server() as other:
        probing = Probing([server, other])
        probing.asks_events = ["gpu-0"]
        async with probing.prober() as prober:
            for instance in probing.instances:
                await prober.probe_once(instance)
        assert "/kv_event_sources" not in other.asked
    assert probing.events == [("gpu-0", (EventSource("tcp://*:5557"),))]


@pytest.mark.parametrize("reply", [answer(404), answer(200, b"{}"), answer(200, b"not json"), b""])
async def test_an_instance_without_events_is_told_once(
    server: Server, reply: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers["/kv_event_sources"] = reply
    probing = Probing([server])
    probing.asks_events = ["gpu-0"]
    async with probing.prober() as prober:
        for _ in range(2):
            await prober.probe_once(probing.instances[0])
            probing.clock.now_s += LEARN_EVERY_S
    assert probing.events == []
    lines = [r.getMessage() for r in caplog.records if "KV events" in r.getMessage()]
    assert lines == ["gpu-0 tells of no KV events: the estimated map serves (start it with --kv-events-config)"]


async def test_others_hear_of_a_restart_and_of_sleep(server: Server) -> None:
    probing = Probing([server])
    async with probing.prober() as prober:
        for started, awake in ((100, 1), (100, 0), (200, 1)):
            server.answers["/metrics"] = answer(200, METRICS % (started, awake))
            await prober.probe_once(probing.instances[0])
            probing.clock.now_s += LEARN_EVERY_S
    assert probing.emptied == [("gpu-0", None), ("gpu-0", 200.0)]
