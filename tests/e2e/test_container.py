"""`serve` as all that a container runs: told everything by variables, SageMaker's own among them."""

from signal import SIGHUP

import pytest

from prefixroute.demo.server import SimulatedServer
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
