"""All instances go, and come back. The router stays, and needs nobody's help."""

import asyncio
import json

import pytest

from prefixroute.testing.upstream import FakeUpstream
from tests.command import Commands
from tests.e2e.harness import get, stop

pytestmark = pytest.mark.e2e


async def test_the_whole_fleet_goes_and_comes_back(commands: Commands) -> None:
    path = commands.home / "router.json"
    async with FakeUpstream() as first, FakeUpstream() as second:
        instances = [{"url": first.url, "name": "gpu-0"}, {"url": second.url, "name": "gpu-1"}]
        health = {"interval_s": 0.05, "rise": 1}
        limits = {"wait_for_instance_s": 3600, "max_waiting": 3}
        path.write_text(json.dumps({"fleet": {"instances": instances, "health": health}, "limits": limits}))
        command = await commands.serve("--config", str(path))
        for name in ("gpu-0", "gpu-1"):
            await command.wait_line(f"{name} is up")
        for n_time in range(1, 3):
            assert (await get(command.url, "/v1/anything")).status == 200
            n_lines = len(command.lines)
            first.refuse()
            second.refuse()
            for name in ("gpu-0", "gpu-1"):
                await command.wait_line(f"{name} is down .*cause=refused", since=n_lines)
            ready = await get(command.admin_url, "/readyz")
            assert (ready.status, json.loads(ready.body)["reasons"]) == (503, ["no_instance"])
            assert (await get(command.url, "/health")).status == 503

            # As many wait as may, and the others are told to come again.
            waiting = [asyncio.create_task(get(command.url, f"/v1/waiting/{n_time}")) for _ in range(3)]
            while b"prefixroute_waiting 3.0" not in (await get(command.admin_url, "/metrics")).body:
                pass
            refused = await get(command.url, "/v1/one-too-many")
            assert (refused.status, refused.header("retry-after") is None) == (503, False)

            n_lines = len(command.lines)
            await second.start()
            await command.wait_line("gpu-1 is up", since=n_lines)
            assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200, 200]
            await first.start()
            await command.wait_line("gpu-0 is up", since=n_lines)
            assert (await get(command.admin_url, "/readyz")).status == 200
            assert (await get(command.url, "/health")).status == 200
        metrics = (await get(command.admin_url, "/metrics")).body.decode()
        for name in ("gpu-0", "gpu-1"):
            assert f'prefixroute_in_flight{{upstream="{name}"}} 0.0' in metrics
        assert "prefixroute_waiting 0.0" in metrics
        await stop(command)
