"""`prefixroute serve` follows its configuration: by SIGHUP, by looking at files, and never half."""

import asyncio
import json
import os
import shutil
import socket
from pathlib import Path
from signal import SIGHUP, SIGTERM
from typing import Any

import pytest

from prefixroute.testing.client import RawClient
from prefixroute.testing.upstream import FakeUpstream, json_answer
from tests.command import Command, Commands
from tests.e2e.harness import NOWHERE, begin_stream, free_port, get, open_stream, stop

pytestmark = pytest.mark.e2e

APPLIED = "the configuration was taken up; changed: "
REFUSED = "the configuration is not taken up, the one before stays in force: "
UNCHANGED = "the configuration was read again: nothing has changed"


def config(*upstreams: FakeUpstream, health: dict[str, Any] | None = None, **tables: Any) -> str:
    """A configuration of instances gpu-0, gpu-1, … that take turns, and are probed at once and then never."""
    instances = [{"url": upstream.url, "name": f"gpu-{n}"} for n, upstream in enumerate(upstreams)]
    fleet = {"instances": instances, "health": health or {"interval_s": 3600}}
    return json.dumps({"fleet": fleet, "routing": {"strategy": "round_robin"}, **tables})


def replace(path: Path, text: str) -> None:
    """As careful programs do: whole, by a rename."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def reload(command: Command, path: Path, text: str, line: str) -> None:
    """Another file, SIGHUP, and what it says to that."""
    n_lines = len(command.lines)
    replace(path, text)
    command.signal(SIGHUP)
    await command.wait_line(line, since=n_lines)


async def names(command: Command) -> list[str]:
    return [one["name"] for one in json.loads((await get(command.admin_url, "/instances")).body)]


async def metric(command: Command, series: str) -> float | None:
    for line in (await get(command.admin_url, "/metrics")).body.decode().splitlines():
        if line.startswith(f"prefixroute_{series} "):
            return float(line.rpartition(" ")[2])
    return None


async def test_a_removed_instance_finishes_its_streams_and_gets_nothing_new(commands: Commands) -> None:
    last = asyncio.Event()
    path = commands.home / "router.json"
    async with FakeUpstream(begin_stream(last)) as old, FakeUpstream() as new:
        path.write_text(config(old, watch_config=False, health={"interval_s": 0.05}))
        command = await commands.serve("--config", str(path))
        await command.wait_line("gpu-0 is up")
        async with RawClient(command.url) as streaming:
            await open_stream(streaming)
            other = config(new, watch_config=False, health={"interval_s": 0.05}).replace("gpu-0", "gpu-new")
            await reload(command, path, other, f"{APPLIED}fleet.instances; joined: gpu-new; left: gpu-0")
            n_probes = old.n_probes
            await command.wait_line("gpu-new is up")
            n_then = new.n_probes
            while new.n_probes < n_then + 10:
                await get(command.admin_url, "/livez")
            assert await names(command) == ["gpu-new"]
            # It is counted until its stream is over.
            assert await metric(command, 'in_flight{upstream="gpu-0"}') == 1.0
            for _ in range(4):
                assert (await get(command.url, "/v1/anything")).status == 200
            assert len(new.calls) == 4
            assert (len(old.calls), old.n_probes) == (1, n_probes)

            last.set()
            rest = await streaming.reader.readuntil(b"\r\n0\r\n\r\n")
            assert b"data: last\n\n" in rest
        await command.wait_line("prefixroute.access: request .* outcome=ok upstream=gpu-0")
        await command.wait_line("gpu-0 has left: its last request is over")
        metrics = (await get(command.admin_url, "/metrics")).body.decode()
        assert 'upstream="gpu-0"' not in metrics
        assert 'upstream="gpu-new"' in metrics
        await stop(command)


BROKEN = {
    "syntax": ("fleet: {instances: [", "not YAML"),
    "unknown key": ("{fleet: {instances: [{url: 'http://127.0.0.1:1'}]}, routing: {stratgy: random}}", "did you mean"),
    "no instances": ("fleet: {instances: []}", "no instance to route to"),
    "empty": ("", "no instance to route to"),
    "not text": ("\x00\x01", "not text"),
    "no policy": (
        "{fleet: {instances: [{url: 'http://a'}]}, routing: {strategy: custom, custom: {factory: 'no_such_module:x'}}}",
        "no_such_module",
    ),
}


async def test_a_wrong_file_changes_nothing_and_says_why(commands: Commands) -> None:
    path = commands.home / "router.yaml"
    async with FakeUpstream() as upstream:
        path.write_text(config(upstream, watch_config=False))
        command = await commands.serve("--config", str(path))
        await command.wait_line("gpu-0 is up")
        before = (await get(command.admin_url, "/instances")).body
        loaded_s = await metric(command, "config_last_reload_success_timestamp_seconds")
        assert await metric(command, "config_last_reload_successful") == 1.0
        for n, (name, (text, why)) in enumerate(BROKEN.items(), start=1):
            n_lines = len(command.lines)
            await reload(command, path, text, REFUSED)
            told = "".join(command.lines[n_lines:])
            assert why in told, name
            assert " error " in told
            assert await metric(command, 'config_reloads_total{outcome="refused"}') == n
            assert await metric(command, "config_last_reload_successful") == 0.0
            assert await metric(command, "config_last_reload_success_timestamp_seconds") == loaded_s
            assert (await get(command.admin_url, "/instances")).body == before
            assert (await get(command.url, "/v1/anything")).status == 200

        await reload(command, path, config(upstream, watch_config=False, response_headers=True), f"{APPLIED}response_")
        assert (await get(command.url, "/v1/anything")).header("x-prefixroute-instance") == "gpu-0"
        assert await metric(command, "config_last_reload_successful") == 1.0
        await reload(command, path, path.read_text(), UNCHANGED)
        for outcome in ("applied", "unchanged"):
            assert await metric(command, f'config_reloads_total{{outcome="{outcome}"}}') == 1.0
        await stop(command)


async def test_what_needs_a_restart_is_named_and_the_rest_is_taken_up(commands: Commands) -> None:
    path = commands.home / "router.json"
    async with FakeUpstream() as upstream:
        path.write_text(config(upstream, watch_config=False, log={"level": "warning"}))
        command = await commands.serve("--config", str(path))
        other: dict[str, Any] = {
            "listen": {"host": "127.0.0.2", "port": free_port()},
            "limits": {"max_header_bytes": 2048, "max_waiting": 7},
            "log": {"format": "json", "level": "debug"},
        }
        await reload(
            command,
            path,
            config(upstream, watch_config=False, **other),
            "these settings have changed and need a restart: listen.host, limits.max_header_bytes, log.format",
        )
        # The port is the command line's, before and after.
        await command.wait_line(f"{APPLIED}limits.max_waiting, log.level")
        assert (await get(command.url, "/v1/anything")).status == 200
        # By the new level.
        await command.wait_line("prefixroute.access: request ")
        await stop(command)


async def test_without_a_file_there_is_nothing_to_reload(commands: Commands) -> None:
    async with FakeUpstream() as upstream:
        command = await commands.serve(upstream.url)
        command.signal(SIGHUP)
        await command.wait_line("nothing to reload: it was started without a configuration file")
        assert (await get(command.url, "/v1/anything")).status == 200
        await stop(command)


# By itself


async def test_a_file_that_changes_is_taken_up_by_itself(commands: Commands) -> None:
    path = commands.home / "router.yaml"
    async with FakeUpstream() as first, FakeUpstream() as second:
        path.write_text(config(first))
        command = await commands.serve("--config", str(path))
        # Over it, and in place.
        replace(path, config(first, second))
        await command.wait_line(f"{APPLIED}fleet.instances")
        assert await names(command) == ["gpu-0", "gpu-1"]
        with path.open("w") as file:
            file.write(config(first, retry={"max_attempts": 1}))
        await command.wait_line(f"{APPLIED}fleet.instances, retry.max_attempts")
        path.unlink()
        await command.wait_line(f"{REFUSED}.*no such file")
        n_lines = len(command.lines)
        path.write_text(config(second, retry={"max_attempts": 1}))
        await command.wait_line(f"{APPLIED}fleet.instances", since=n_lines)
        assert await names(command) == ["gpu-0"]
        assert (await get(command.url, "/v1/anything")).status == 200
        assert len(second.calls) == 1
        await stop(command)


async def test_the_links_of_a_kubernetes_volume_are_followed(commands: Commands) -> None:
    """router.yaml → ..data/router.yaml, and ..data → a directory of its own for each version."""
    volume = commands.home / "config"

    def publish(version: str, text: str) -> None:
        directory = volume / version
        directory.mkdir(parents=True)
        (directory / "router.yaml").write_text(text)
        link = volume / "..data_tmp"
        link.symlink_to(version)
        link.replace(volume / "..data")

    async with FakeUpstream() as first, FakeUpstream() as second:
        publish("..1", config(first))
        (volume / "router.yaml").symlink_to("..data/router.yaml")
        command = await commands.serve("--config", str(volume / "router.yaml"))
        publish("..2", config(first, second))
        shutil.rmtree(volume / "..1")
        await command.wait_line(f"{APPLIED}fleet.instances")
        assert await names(command) == ["gpu-0", "gpu-1"]
        await stop(command)


async def test_watching_can_be_turned_off(commands: Commands) -> None:
    path = commands.home / "router.yaml"
    async with FakeUpstream() as first, FakeUpstream() as second:
        path.write_text(config(first, watch_config=False))
        command = await commands.serve("--config", str(path))
        replace(path, config(first, second))
        command.signal(SIGHUP)
        # Which turns it on.
        await command.wait_line(f"{APPLIED}fleet.instances, watch_config")
        replace(path, config(second))
        await command.wait_line(f"{APPLIED}fleet.instances; joined: gpu-0; left: gpu-0, gpu-1$")
        await stop(command)


async def test_a_key_file_of_an_instance_is_read_again(commands: Commands) -> None:
    key = commands.home / "key"
    key.write_text("first\n")
    path = commands.home / "router.json"
    async with FakeUpstream(json_answer({})) as upstream:
        instances = [{"url": upstream.url, "name": "gpu-0", "api_key_file": str(key)}]
        path.write_text(json.dumps({"fleet": {"instances": instances, "health": {"interval_s": 3600}}}))
        command = await commands.serve("--config", str(path))
        await get(command.url, "/one")
        replace(key, "second\n")
        await command.wait_line(f"{APPLIED}keys of instances")
        await get(command.url, "/two")
        assert [call.header("authorization") for call in upstream.calls] == ["Bearer first", "Bearer second"]
        await stop(command)


# What systemd is told


@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_systemd_is_told_how_it_is(commands: Commands, kind: str, tmp_path: Path) -> None:
    address = str(tmp_path / "notify") if kind == "path" else f"\0prefixroute-{os.getpid()}"
    path = commands.home / "router.json"
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.setblocking(False)

        async def told() -> dict[str, str]:
            while (datagram := await loop.sock_recv(manager, 4096)) == b"WATCHDOG=1":
                pass
            return dict(line.split("=", 1) for line in datagram.decode().splitlines())

        path.write_text(json.dumps({"fleet": {"instances": [{"url": NOWHERE}]}, "watch_config": False}))
        environ = {"NOTIFY_SOCKET": address.replace("\0", "@")}
        command = await commands.serve("--config", str(path), environ=environ)
        assert await told() == {"READY": "1", "STATUS": "expected_latency over 1 instance"}
        command.signal(SIGHUP)
        reloading = await told()
        assert reloading.keys() == {"RELOADING", "MONOTONIC_USEC"}
        assert int(reloading["MONOTONIC_USEC"]) > 0
        assert (await told())["READY"] == "1"
        command.signal(SIGTERM)
        assert await told() == {"STOPPING": "1"}
        assert await command.wait_exit() == (0, "")


async def test_a_watchdog_gets_signs_of_life(commands: Commands, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
        command = await commands.serve(NOWHERE, environ=environ)
        datagrams = [await loop.sock_recv(manager, 4096) for _ in range(5)]
        assert datagrams.count(b"WATCHDOG=1") == 4
        await stop(command)


async def test_who_does_not_listen_does_not_stop_it(commands: Commands, tmp_path: Path) -> None:
    command = await commands.serve(NOWHERE, environ={"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    await command.wait_line("NOTIFY_SOCKET cannot be told: No such file or directory")
    await stop(command)


async def test_that_urls_on_the_command_line_go_before_the_files_is_said(commands: Commands) -> None:
    path = commands.home / "router.json"
    outranked = r"the instances on the command line count, not those in \S+router.json \(fleet.instances\)"
    async with FakeUpstream() as first, FakeUpstream() as second:
        path.write_text(config(first, watch_config=False))
        command = await commands.serve(second.url, "--config", str(path))
        await command.wait_line(outranked)
        n_lines = len(command.lines)
        await reload(command, path, config(first, second, watch_config=False), UNCHANGED)
        await command.wait_line(outranked, since=n_lines)
        assert await names(command) == [second.url.removeprefix("http://")]
        await stop(command)
