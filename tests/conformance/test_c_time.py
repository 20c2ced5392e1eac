"""Section C of the failure cases: limits in time, probes, drains and signals."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import pytest

from prefixroute.testing import Call, FakeUpstream, RawAnswer, RawClient
from prefixroute.testing.upstream import Script, black_hole, json_answer
from tests.command import Commands
from tests.conformance import fast_time
from tests.conformance.harness import (
    CHAT,
    OK,
    SSE_HEAD,
    Finished,
    Serve,
    chat,
    event,
    n_delivered,
    post,
    scrape,
    silent,
    wait_metric,
)

UPLOAD = "/v1/audio/transcriptions"
UP = 'prefixroute_upstream_state{state="up",upstream="gpu-0"}'
DOWN = 'prefixroute_upstream_state{state="down",upstream="gpu-0"}'
IN_FLIGHT = 'prefixroute_in_flight{upstream="gpu-0"}'
PATIENCE_S = 20 * fast_time.SPEED


def fast(**tables: Any) -> dict[str, Any]:
    upstream = {**fast_time.SETTINGS["upstream"], **tables.pop("upstream", {})}
    return {**fast_time.SETTINGS, "patience_s": PATIENCE_S, **tables, "upstream": upstream}


def probes(outcome: str) -> str:
    return f'prefixroute_probes_total{{outcome="{outcome}",upstream="gpu-0"}}'


def message_of(answer: RawAnswer) -> str:
    return str(json.loads(answer.body)["error"]["message"])


# ---------------------------------------------------------------------- O19: no total limit, and which one fired


async def test_o19_a_stream_of_310_s_comes_whole_in_fast_time(serve: Serve, finished: Finished) -> None:
    """With the default limits, a byte each 5 s, on a loop whose clock runs faster (see `fast_time`)."""

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD)
        for _ in range(62):
            await asyncio.sleep(5)
            await call.send_chunk(b":")
        await call.send_chunk(b"")

    async with FakeUpstream(script) as upstream, serve(upstream, **fast()) as app, RawClient(app.url) as client:
        began_s = asyncio.get_running_loop().time()
        answer = await client.request(body=chat(stream=True))
        assert (answer.status, answer.body, answer.complete) == (200, b":" * 62, True)
        assert asyncio.get_running_loop().time() - began_s >= 310
    assert finished()[0]["outcome"] == "ok"


@pytest.mark.parametrize("when", ["before_the_head", "after_the_head", "mid_stream"])
async def test_o19_70_s_of_silence_are_no_fault_in_fast_time(serve: Serve, when: str) -> None:
    """A long prefill: by default there is no limit on the first byte, and one of 600 s on silence after it."""
    parts = [SSE_HEAD, b"1\r\na\r\n", b"1\r\nb\r\n0\r\n\r\n"]

    async def script(call: Call) -> None:
        for name, part in zip(("before_the_head", "after_the_head", "mid_stream"), parts, strict=True):
            if name == when:
                await asyncio.sleep(70)
            await call.send(part)

    async with FakeUpstream(script) as upstream, serve(upstream, **fast()) as app, RawClient(app.url) as client:
        answer = await client.request(body=chat(stream=True))
        assert (answer.status, answer.body, answer.complete) == (200, b"ab", True)


async def test_o19_a_prefill_may_take_longer_than_a_begun_answer_may_be_silent_in_fast_time(serve: Serve) -> None:
    async def script(call: Call) -> None:
        await asyncio.sleep(700)
        await call.send(OK)

    async with FakeUpstream(script) as upstream, serve(upstream, **fast()) as app, RawClient(app.url) as client:
        assert (await client.request(body=chat())).status == 200


async def test_o19_a_stream_that_falls_silent_for_good_ends_at_600_s_in_fast_time(
    serve: Serve, finished: Finished, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE_HEAD + b"1\r\na\r\n")
        await call.wait_disconnected()

    async with FakeUpstream(script) as upstream, serve(upstream, **fast()) as app, RawClient(app.url) as client:
        began_s = asyncio.get_running_loop().time()
        answer = await client.request(body=chat(stream=True))
        assert (answer.body, answer.complete) == (b"a", False)
        assert asyncio.get_running_loop().time() - began_s >= 600
    assert "silent for idle_timeout_s (600 s)" in caplog.text
    assert finished()[0]["outcome"] == "timeout"


@pytest.mark.parametrize("target", [CHAT, UPLOAD, "/v1/messages", "/x"])
async def test_o19_the_limit_on_the_first_byte_is_named(serve: Serve, finished: Finished, target: str) -> None:
    async with (
        FakeUpstream(silent) as a,
        FakeUpstream(silent) as b,
        serve(a, b, upstream={"first_byte_timeout_s": 0.05}, retry={"unanswered": "inference"}) as app,
        RawClient(app.url) as client,
    ):
        answer = await client.request("POST", target, chat("MARKER"))
        assert (answer.status, "first_byte_timeout_s (0.05 s)" in message_of(answer)) == (504, True)
        # It may have been computed.
        assert n_delivered("MARKER", a, b) == 1
        assert finished()[0]["outcome"] == "timeout"


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\nx: y\r\n"])
async def test_o19_a_head_that_stops_half_way_is_bounded_too(serve: Serve, beginning: bytes) -> None:
    async def script(call: Call) -> None:
        await call.send(beginning)
        await call.wait_disconnected()

    table = {"first_byte_timeout_s": 0.1}
    async with FakeUpstream(script) as upstream, serve(upstream, upstream=table) as app, RawClient(app.url) as client:
        answer = await client.request(body=chat())
        assert (answer.status, "first_byte_timeout_s (0.1 s)" in message_of(answer)) == (504, True)


async def test_o19_the_limit_on_silence_is_named(
    serve: Serve, finished: Finished, caplog: pytest.LogCaptureFixture
) -> None:
    """The client sees a broken stream, which cannot say why; the log does."""

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD)
        await call.send_chunk(event("a"))
        await call.wait_disconnected()

    async with FakeUpstream(script) as upstream, serve(upstream, upstream={"idle_timeout_s": 0.05}) as app:
        async with RawClient(app.url) as client:
            answer = await client.request(body=chat(stream=True))
            assert (answer.status, answer.body, answer.complete) == (200, event("a"), False)
        assert "idle_timeout_s (0.05 s)" in caplog.text
        assert (finished()[0]["outcome"], finished()[0]["error"]) == ("timeout", "upstream_timeout")


async def test_o19_a_limit_on_silence_is_none_on_the_whole_in_fast_time(serve: Serve) -> None:
    """Each piece gives it a new beginning: the stream takes twice as long as it may be silent."""

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD)
        for i in range(12):
            await asyncio.sleep(40)
            await call.send_chunk(event(str(i)))
        await call.send_chunk(b"")

    table = fast(upstream={"idle_timeout_s": 240.0})
    async with FakeUpstream(script) as upstream, serve(upstream, **table) as app, RawClient(app.url) as client:
        assert (await client.request(body=chat(stream=True))).complete


# ---------------------------------------------------------------------- O20: connect limit


@pytest.mark.parametrize("target", [CHAT, UPLOAD, "/x"])
async def test_o20_an_instance_in_a_black_hole_costs_a_connect_limit_and_no_request(
    serve: Serve, finished: Finished, target: str
) -> None:
    async with (
        black_hole() as url,
        FakeUpstream() as other,
        serve(url, other, upstream={"connect_timeout_s": 0.1}) as app,
        RawClient(app.url) as client,
    ):
        assert (await client.request("POST", target, chat("MARKER"))).status == 200
        assert n_delivered("MARKER", other) == 1
        assert finished()[0]["attempts"] == "unreachable,answered"
        # The next one does not find out again.
        assert (await client.request("POST", target, chat("AGAIN"))).status == 200
        assert finished()[1]["attempts"] == "answered"


async def test_o20_the_default_is_below_5_s_in_fast_time(serve: Serve) -> None:
    async with black_hole() as url, FakeUpstream() as other:
        table = fast(retry={"max_attempts": 1})
        del table["upstream"]
        async with serve(url, other, **table) as app, RawClient(app.url) as client:
            answer = await client.request(body=chat())
        assert answer.status == 502
        limit = re.search(r"connect_timeout_s \((\d+) s\)", message_of(answer))
        assert limit is not None
        assert int(limit[1]) <= 5


# ---------------------------------------------------------------------- O21: thresholds of probes

HEALTH = {"interval_s": 0.03, "timeout_s": 5.0, "fall": 3, "rise": 2}


class Health:
    """A health check that answers as it is told, and 200 otherwise; `n` counts."""

    def __init__(self) -> None:
        self.next: list[int] = []
        self.always: int | None = None
        self.n = 0

    async def __call__(self, call: Call) -> None:
        self.n += 1
        status = self.next.pop(0) if self.next else self.always or 200
        await json_answer({}, status=status)(call)


async def test_o21_one_failed_probe_is_a_blip_and_lasting_failure_is_not(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeUpstream() as sick, FakeUpstream() as well, serve(sick, well, health=HEALTH) as app:
        health = sick.health = Health()
        for blip in ([503], [503, 503], [500, 200, 502], [503, 503, 200, 503, 503]):
            health.next, before = [*blip], health.n
            # And two good ones behind it.
            while health.n < before + len(blip) + 2:
                await asyncio.sleep(0.005)
            assert "gpu-0 is down" not in caplog.text
        health.always = 503
        await wait_metric(app, DOWN, bool)
        async with RawClient(app.url) as client:
            for i in range(4):
                assert (await client.request(body=chat(f"WHILE-DOWN-{i}"))).status == 200
        assert n_delivered("WHILE-DOWN", sick) == 0
        # Two good ones bring it back; one does not.
        health.next, before = [200], health.n
        while health.n < before + 3:
            await asyncio.sleep(0.005)
        assert (await scrape(app))[DOWN] == 1
        health.always = None
        await wait_metric(app, UP, bool)
        async with RawClient(app.url) as client:
            for i in range(4):
                assert (await client.request(body=chat(f"LATER-{i}"))).status == 200
        assert n_delivered("LATER", sick) == 2


async def test_o21_answers_are_evidence_of_life(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Between any two failing probes a request is answered: that is no row of failures."""
    async with FakeUpstream() as upstream, serve(upstream, health=HEALTH) as app, RawClient(app.url) as client:

        async def fails(call: Call) -> None:
            async with RawClient(app.url) as other:
                assert (await other.request(body=chat())).status == 200
            await json_answer({}, status=503)(call)

        upstream.health = fails
        await wait_metric(app, probes("status"), lambda n: n >= 8)
        assert "gpu-0 is down" not in caplog.text
        assert (await client.request(body=chat())).status == 200


# ---------------------------------------------------------------------- O22: busy is not dead


async def test_o22_a_fleet_too_busy_for_probes_goes_on_serving(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Every probe hangs; requests are answered; the probes' timeouts can be seen."""
    health = {**HEALTH, "timeout_s": 0.03}
    async with FakeUpstream() as a, FakeUpstream() as b, FakeUpstream() as c, serve(a, b, c, health=health) as app:
        for upstream in (a, b, c):
            upstream.health = silent
        await wait_metric(app, probes("timeout"), lambda n: n >= 8)
        async with RawClient(app.url) as client:
            for i in range(9):
                assert (await client.request(body=chat(f"MARKER-{i}"))).status == 200
            assert (await client.request("GET", "/health")).status == 200
        assert [n_delivered("MARKER", upstream) for upstream in (a, b, c)] == [3, 3, 3]
        assert "is down" not in caplog.text


async def test_o22_a_lone_instance_too_busy_for_probes_is_better_than_none(serve: Serve) -> None:
    health = {**HEALTH, "timeout_s": 0.03}
    async with FakeUpstream() as upstream, serve(upstream, health=health) as app, RawClient(app.url) as client:
        upstream.health = silent
        await wait_metric(app, probes("timeout"), lambda n: n >= 5)
        assert (await client.request(body=chat())).status == 200
        assert (await client.request("GET", "/health")).status == 200


async def test_o22_one_silent_instance_among_well_ones_is_avoided_and_returns(serve: Serve) -> None:
    health = {**HEALTH, "timeout_s": 0.03}
    async with FakeUpstream() as a, FakeUpstream() as b, FakeUpstream() as c, serve(a, b, c, health=health) as app:
        a.health = silent
        await wait_metric(app, DOWN, bool)
        async with RawClient(app.url) as client:
            for i in range(6):
                assert (await client.request(body=chat(f"MARKER-{i}"))).status == 200
        assert n_delivered("MARKER", a) == 0
        a.health = None
        await wait_metric(app, UP, bool)


# ---------------------------------------------------------------------- O23: credentials of probes


async def test_o23_probes_bring_the_configured_key(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    upstream = FakeUpstream(models=("m",))
    upstream.api_key = "sk-instance"
    async with upstream, FakeUpstream(models=("other",)) as other:
        instance = {"api_key_env": "KEY"}
        async with (
            serve(upstream, other, instance=instance, environ={"KEY": "sk-instance"}, health=HEALTH) as app,
            RawClient(app.url) as client,
        ):
            await wait_metric(app, probes("passed"), lambda n: n >= 3)
            # Its list of models was read with it, so that it is known who serves what.
            for i in range(4):
                assert (await client.request(body=chat(f"MARKER-{i}"))).status == 200
            assert n_delivered("MARKER", upstream) == 4
        assert "sk-instance" not in caplog.text


async def test_o23_a_key_that_is_refused_is_told_as_such_and_is_no_flapping(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    upstream = FakeUpstream()
    upstream.api_key = "sk-right"
    async with upstream, serve(upstream.url, health=HEALTH) as app, RawClient(app.url) as client:
        await wait_metric(app, probes("passed"), lambda n: n >= 5)
        assert (await scrape(app))[UP] == 1
        assert "is down" not in caplog.text
        told = [record for record in caplog.records if "answers its health check with 401" in record.getMessage()]
        assert len(told) == 1
        assert "api_key_env" in told[0].getMessage()
        # A client that has the key itself is served, and without one is told by the instance.
        key = ("Authorization", "Bearer sk-right")
        assert (await client.request(body=chat(), headers=[key])).status == 200
        assert (await client.request(body=chat())).status == 401


# ---------------------------------------------------------------------- O24: the list of models


async def _null(call: Call) -> None:
    await json_answer({"object": "list", "data": None})(call)


async def _nothing(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


async def _html(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>")


async def _list(call: Call) -> None:
    await json_answer([{"id": "m"}])(call)


async def _odd_entries(call: Call) -> None:
    await json_answer({"data": [None, 1, {"id": None}, {"id": ["m"]}, {}, {"id": {}}]})(call)


async def _error(call: Call) -> None:
    await json_answer({"error": {}}, status=500)(call)


async def _unavailable(call: Call) -> None:
    await json_answer({"error": {}}, status=503)(call)


async def _moved(call: Call) -> None:
    await call.send(b"HTTP/1.1 302 Found\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n")


async def _resets(call: Call) -> None:
    call.reset()


async def _garbage(call: Call) -> None:
    await call.send(b"garbage\r\n\r\n")


async def _half(call: Call) -> None:
    await call.send(b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"data":[')
    call.close()


ODD = [_null, _nothing, _html, _list, _odd_entries, _error, _unavailable, _moved, _resets, _garbage, _half]


@pytest.mark.parametrize("odd", [*ODD, None])
async def test_o24_models_are_those_of_the_instances_that_list_them(serve: Serve, odd: Script | None) -> None:
    """The first is odd, or (None) gone; the others answer. So does a listing that the client encodes or conditions."""
    listing = json_answer({"object": "list", "data": [{"id": "m", "object": "model"}]})
    other = json_answer({"object": "list", "data": [{"id": "m"}, {"id": "n"}]})
    async with (
        FakeUpstream(odd or silent) as first,
        FakeUpstream(listing) as a,
        FakeUpstream(other) as b,
        serve(first, a, b) as app,
        RawClient(app.url) as client,
    ):
        if odd is None:
            await first.stop()
        for headers in ([], [("Accept-Encoding", "gzip"), ("If-None-Match", "*")]):
            answer = await client.request("GET", "/v1/models", headers=headers)
            assert (answer.status, answer.all_headers("content-type")) == (200, ["application/json"])
            models = [entry["id"] for entry in json.loads(answer.body)["data"]]
            assert models == ["m", "n"]


# ---------------------------------------------------------------------- O25: counters


async def test_o25_flaps_do_not_touch_what_is_counted(serve: Serve) -> None:
    """Ten requests are in flight while their instance falls, returns, refuses, drains; then they end."""
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await call.send(OK)

    async with FakeUpstream(script) as upstream, serve(upstream, health=HEALTH) as app:
        clients = [RawClient(app.url) for _ in range(10)]
        for client in clients:
            await client.__aenter__()
            await post(client, chat("MARKER"))
        await upstream.wait_calls(10)

        async def reaches(series: str) -> None:
            await wait_metric(app, series, bool)
            assert (await scrape(app))[IN_FLIGHT] == 10

        for _ in range(3):
            upstream.health_status = 503
            await reaches(DOWN)
            upstream.health_status = 200
            await reaches(UP)
        upstream.refuse()
        await wait_metric(app, UP, lambda value: not value)
        assert (await scrape(app))[IN_FLIGHT] == 10
        await upstream.start()
        await reaches(UP)
        assert app.admin_url is not None
        async with RawClient(app.admin_url) as admin:
            for change in ("drain", "undrain"):
                assert (await admin.request("POST", f"/instances/gpu-0/{change}", b"")).status == 200
                assert (await scrape(app))[IN_FLIGHT] == 10
        # Half of them leave, half are answered.
        for client in clients[:5]:
            client.close()
        await wait_metric(app, IN_FLIGHT, lambda value: value == 5)
        release.set()
        for client in clients[5:]:
            assert (await client.answer()).status == 200
        await wait_metric(app, IN_FLIGHT, lambda value: value == 0)
        for client in clients:
            await client.__aexit__(None, None, None)
        assert n_delivered("MARKER", upstream) == 10


# ---------------------------------------------------------------------- O26: instances removed while they stream


async def _gate(release: asyncio.Event, call: Call) -> None:
    await call.send(SSE_HEAD)
    await call.send_chunk(event("first"))
    await release.wait()
    await call.send_chunk(event("last"))
    await call.send_chunk(b"")


def _config(path: Path, *urls: str) -> None:
    names = {url: f"gpu-{url.rpartition(':')[2]}" for url in urls}
    instances = [{"url": url, "name": name} for url, name in names.items()]
    fleet = {"instances": instances, "health": {"interval_s": 0.05}}
    written = path.with_suffix(".new")
    written.write_text(json.dumps({"fleet": fleet, "routing": {"strategy": "round_robin"}}))
    written.replace(path)


async def test_o26_a_drained_instance_ends_its_streams_and_gets_no_more(serve: Serve) -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await _gate(release, call)

    async with FakeUpstream(script) as leaving, FakeUpstream() as staying, serve(leaving, staying) as app:
        async with RawClient(app.url) as streaming, RawClient(app.url) as client:
            await post(streaming, chat(stream=True))
            await streaming.begin()
            assert await streaming.chunk() == event("first")
            assert app.admin_url is not None
            async with RawClient(app.admin_url) as admin:
                assert (await admin.request("POST", "/instances/gpu-0/drain", b"")).status == 200
            for i in range(4):
                assert (await client.request(body=chat(f"MARKER-{i}"))).status == 200
            release.set()
            assert [await streaming.chunk(), await streaming.chunk()] == [event("last"), b""]
        assert (n_delivered("MARKER", leaving), n_delivered("MARKER", staying)) == (0, 4)


async def test_o26_an_instance_removed_from_the_configuration_ends_its_streams(
    commands: Commands, tmp_path: Path
) -> None:
    """Read again by SIGHUP: nothing new goes there, probes included, and what is under way comes to its end."""
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await _gate(release, call)

    path = tmp_path / "config.json"
    async with FakeUpstream(script) as leaving, FakeUpstream() as staying:
        leaving.health, staying.health = Health(), Health()
        _config(path, leaving.url)
        command = await commands.serve("--config", str(path))
        async with RawClient(command.url) as streaming, RawClient(command.url) as client:
            await _open_stream(streaming)
            _config(path, staying.url)
            command.signal(signal.SIGHUP)
            await command.wait_line("configuration was taken up")
            n_probes = leaving.health.n
            for i in range(4):
                assert (await client.request(body=chat(f"MARKER-{i}"))).status == 200
            before = staying.health.n
            while staying.health.n < before + 4:
                await asyncio.sleep(0.005)
            assert leaving.health.n == n_probes
            release.set()
            assert [await streaming.chunk(), await streaming.chunk()] == [event("last"), b""]
        assert (n_delivered("MARKER", leaving), n_delivered("MARKER", staying)) == (0, 4)


# ---------------------------------------------------------------------- O27: signals


async def _open_stream(client: RawClient) -> None:
    await post(client, chat(stream=True))
    await client.begin()
    assert await client.chunk() == event("first")


async def test_o27_a_stop_is_unready_first_and_lets_streams_end(commands: Commands) -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await _gate(release, call)

    async with FakeUpstream(script) as upstream:
        command = await commands.serve(upstream.url)
        async with RawClient(command.url) as streaming:
            await _open_stream(streaming)
            command.signal(SIGTERM)
            await command.wait_line("stopping: ")
            async with RawClient(command.admin_url) as admin:
                ready = await admin.request("GET", "/readyz")
                assert (ready.status, json.loads(ready.body)["reasons"]) == (503, ["stopping"])
            with pytest.raises(ConnectionRefusedError):
                async with RawClient(command.url):
                    pass
            release.set()
            assert [await streaming.chunk(), await streaming.chunk()] == [event("last"), b""]
        assert await command.wait_exit() == (0, "")


@pytest.mark.parametrize(("first", "second"), [(SIGTERM, SIGTERM), (SIGTERM, SIGINT), (SIGINT, SIGTERM)])
async def test_o27_a_second_signal_ends_it_at_once(
    commands: Commands, first: signal.Signals, second: signal.Signals
) -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await _gate(release, call)

    async with FakeUpstream(script) as upstream:
        command = await commands.serve(upstream.url)
        async with RawClient(command.url) as streaming:
            await _open_stream(streaming)
            command.signal(first)
            await command.wait_line("stopping: ")
            command.signal(second)
            assert await command.wait_exit() == (128 + second, "")
            assert not (await _rest(streaming)).endswith(b"0\r\n\r\n")
        release.set()


async def test_o27_a_drain_is_bounded(commands: Commands) -> None:
    """What does not end in time is cut off, visibly, and that is still an orderly exit."""

    async def script(call: Call) -> None:
        await _gate(asyncio.Event(), call)

    async with FakeUpstream(script) as upstream:
        command = await commands.serve(upstream.url, environ={"PREFIXROUTE_DRAIN_TIMEOUT_S": "0.2"})
        async with RawClient(command.url) as streaming:
            await _open_stream(streaming)
            command.signal(SIGTERM)
            assert not (await _rest(streaming)).endswith(b"0\r\n\r\n")
        assert await command.wait_exit() == (0, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of one's own takes privileges")
async def test_o27_it_works_as_process_1(commands: Commands) -> None:
    """In a namespace of its own: signals without a handler would be ignored there."""
    async with FakeUpstream() as upstream:
        command = await commands.start(
            *("serve", "--port", "0", "--admin-port", "0", upstream.url),
            before=("unshare", "--pid", "--fork", "--kill-child", "sh", "-c", 'echo "pid $$" >&2; exec "$@"', "sh"),
        )
        await command.wait_line(r"^pid 1$")
        await command.wait_serving()
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        async with RawClient(command.url) as client:
            assert (await client.request(body=chat())).status == 200
        os.kill(int(children[0]), SIGTERM)
        assert await command.wait_exit() == (0, "")


async def _rest(client: RawClient) -> bytes:
    return await client.wait_closed()
