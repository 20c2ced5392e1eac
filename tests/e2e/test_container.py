"""`serve` as all that a container runs: told everything by variables, SageMaker's own among them."""

from signal import SIGHUP

import aiohttp
import pytest

from prefixroute.demo.server import SimulatedServer
from prefixroute.testing.upstream import Call, FakeUpstream, json_answer, raw_answer
from tests.command import Commands
from tests.e2e.harness import assert_refused, chat, free_port, get, stop

pytestmark = pytest.mark.e2e

# An address of this machine on which nothing listens by default: only what listens on every address does.
ELSEWHERE = "127.0.0.2"


async def test_it_listens_where_sagemaker_asks_and_ends_when_told(commands: Commands, server: SimulatedServer) -> None:
    port = free_port()
    command = await commands.start(
        "serve",
        environ={
            "SAGEMAKER_BIND_TO_PORT": str(port),
            "PREFIXROUTE_LISTEN__PORT": "1",
            "PREFIXROUTE_ADMIN__PORT": "0",
            "PREFIXROUTE_FLEET__INSTANCES": f"[{{url: '{server.url}', name: gpu-a}}]",
        },
    )
    await command.wait_serving()
    await command.wait_line("gpu-a is up")
    for host in ("127.0.0.1", ELSEWHERE):
        assert (await get(f"http://{host}:{port}", "/ping")).status == 200
    await chat(f"http://127.0.0.1:{port}")
    await stop(command)
    await assert_refused(f"http://127.0.0.1:{port}")


async def test_a_file_that_listens_elsewhere_asks_for_no_restart(commands: Commands, server: SimulatedServer) -> None:
    file = commands.home / "router.yaml"
    text = f"admin: {{port: 0}}\nwatch_config: false\nfleet: {{instances: [{{url: '{server.url}', name: gpu-a}}]}}\n"
    file.write_text(f"{text}listen: {{port: 1}}\n")
    port = free_port()
    command = await commands.start(
        "serve", environ={"SAGEMAKER_BIND_TO_PORT": str(port), "PREFIXROUTE_CONFIG": "router.yaml"}
    )
    await command.wait_serving()
    file.write_text(f"{text}listen: {{host: '::1', port: 2}}\n")
    command.signal(SIGHUP)
    await command.wait_line("the configuration was read again: nothing has changed$")
    assert "restart" not in command.stderr
    await stop(command)


async def test_options_go_before_the_containers_port(commands: Commands, server: SimulatedServer) -> None:
    port = free_port()
    command = await commands.serve(server.url, "--host", "127.0.0.1", environ={"SAGEMAKER_BIND_TO_PORT": str(port)})
    await command.wait_line("is up")
    assert (await get(command.url, "/ping")).status == 200
    await assert_refused(command.url.replace("127.0.0.1", ELSEWHERE))
    await assert_refused(f"http://127.0.0.1:{port}")
    await stop(command)


async def test_servers_that_speak_ping_and_invocations_only(commands: Commands) -> None:
    async def container(call: Call) -> None:
        match call.method, call.target:
            case "GET", "/ping":
                await json_answer({})(call)
            case "POST", "/invocations":
                await raw_answer(call.body[::-1])(call)
            case _:
                await json_answer({"detail": "Not Found"}, status=404)(call)

    async with FakeUpstream(container, script_all=True) as first, FakeUpstream(container, script_all=True) as second:
        port = free_port()
        command = await commands.start(
            "serve",
            *(first.url, second.url, "--admin-port", "0"),
            environ={"SAGEMAKER_BIND_TO_PORT": str(port)},
        )
        await command.wait_serving()
        await command.wait_line(f"{first.port} is up")
        await command.wait_line(f"{second.port} is up")
        own = f"http://127.0.0.1:{port}"
        assert (await get(own, "/ping")).status == 200
        async with aiohttp.ClientSession() as client:
            for path in ("/invocations", "/endpoints/any/invocations"):
                async with client.post(own + path, data=b"\x00opaque\xff") as answer:
                    assert (answer.status, await answer.read()) == (200, b"\xffeuqapo\x00")
        await stop(command)
