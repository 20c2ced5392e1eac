"""Commands that try routing out, without a fleet of one's own or beside it: demo, demo-server, replay, simulate."""

from pathlib import Path
from typing import Annotated

import typer

SpeedOption = Annotated[float, typer.Option(min=0.01, max=1000, help="How much faster than life.")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.", show_default=False)
]


def demo(
    strategies: Annotated[
        str, typer.Option(metavar="A,B", help="Strategies to compare, the first being what others are held against.")
    ] = "random,expected_latency",
    conversations: Annotated[int, typer.Option(min=1, max=100_000, help="Conversations in the workload.")] = 200,
    seed: Annotated[int, typer.Option(help="Decides the workload.")] = 1,
    speed: SpeedOption = 5.0,
    json_file: JsonOption = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the figures there (.svg or .png).", show_default=False)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave fleet and router up until Ctrl-C.")] = False,
) -> None:
    """Show what routing does: one workload over simulated servers, with each strategy in turn. Needs no GPU."""
    from prefixroute.demo.run import DemoOptions, parse_strategies, run_demo

    options = DemoOptions(
        strategies=parse_strategies(strategies),
        seed=seed,
        speed=speed,
        n_conversations=conversations,
        json_path=json_file,
        chart_path=chart,
        keep=keep,
    )
    raise typer.Exit(run_demo(options))


def demo_server(
    servers: Annotated[int, typer.Option(min=1, max=256, help="How many.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port of the first; the others follow. 0: any free ones.")
    ] = 8001,
    model: Annotated[str, typer.Option(help="Name of the model they serve.")] = "demo-model",
    kv_tokens: Annotated[int, typer.Option(min=1, max=10**9, help="Tokens in the KV cache of each.")] = 400_000,
    block_size: Annotated[int, typer.Option(min=1, max=65_536, help="Tokens in one block of it.")] = 16,
    speed: SpeedOption = 1.0,
    stream_interval: Annotated[int, typer.Option(min=1, max=10**6, help="Tokens in one event of a stream.")] = 1,
    max_queue: Annotated[
        int | None,
        typer.Option(min=1, help="Requests that may be in one server; above it 503. No limit if left out."),
    ] = None,
) -> None:
    """Run simulated vLLM servers: real HTTP, a real prefix cache, the times of a GPU, no GPU."""
    from prefixroute.demo.engine import EngineConfig
    from prefixroute.demo.server import ServerConfig
    from prefixroute.demo.server.fleet import run_demo_server

    engine = EngineConfig(block_size=block_size, kv_tokens=kv_tokens, speed=speed, max_num_queued_reqs=max_queue)
    config = ServerConfig(engine=engine, model=model, stream_interval=stream_interval)
    run_demo_server(host, port, servers, config, say=typer.echo)


def replay(
    trace: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="Recording, or trace in Mooncake's format; several recordings are joined."),
    ],
    target: Annotated[str, typer.Option(metavar="URL", help="Any OpenAI-compatible server, without /v1.")],
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many.", show_default=False)] = None,
    speed: Annotated[float, typer.Option(min=0.001, max=10_000, help="Divides the times of the trace.")] = 1.0,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; the first that the target lists.", show_default=False)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at most; no limit.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that one request may take.")] = 600.0,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the key.", show_default=False)
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Play a recording or a trace of real traffic against a server and measure it."""
    from prefixroute.sim.replay import ReplayOptions, run_replay

    options = ReplayOptions(
        traces=trace,
        target=target,
        n_requests=requests,
        speed=speed,
        model=model,
        json_path=json_file,
        max_in_flight=concurrency,
        timeout_s=timeout,
        api_key_env=api_key_env,
    )
    raise typer.Exit(run_replay(options))


def simulate(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE…",
            help="Recordings or traces in Mooncake's format, or chat, rag, toolagent, noshare, heldout.",
        ),
    ],
    strategies: Annotated[
        str,
        typer.Option(metavar="A,B", help="Strategies to compare, with or without parameters (name:key=value); or all."),
    ] = "random,round_robin,least_outstanding_requests,prefix_aware,expected_latency",
    instances: Annotated[str, typer.Option(metavar="N", help="How many; several fleets with commas between.")] = "8",
    load: Annotated[
        str | None,
        typer.Option(
            metavar="X",
            help="1.0 is where random spreading makes the p90 of TTFT three times that of idle servers. [default: 1.0]",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="X", help="Requests per second, instead of --load.", show_default=False)
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=10_000_000, help="How many at most.")] = 12_000,
    seeds: Annotated[str, typer.Option(metavar="A,B-C", help="The mean of their runs is shown.")] = "0",
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="X", help="Speed of the first instance, such as 0.4; or i3=0.4.", show_default=False),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="I@S", help="i0@120: dies after 120 s, and is back 60 s later; i0@120:30: 30 s.", show_default=False
        ),
    ] = None,
    kv_tokens: Annotated[int, typer.Option(min=1, max=10**9, help="Tokens in the KV cache of each.")] = 400_000,
    cached_cost: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="X",
            help="Share of its prefill that a cached token costs all the same; at 1, hits bring nothing.",
        ),
    ] = 0.0,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1_024, help="Processes; as many as processors.", show_default=False)
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the rates of load 1.0 there.", show_default=False)
    ] = None,
    json_file: JsonOption = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the figures there (.svg or .png).", show_default=False)
    ] = None,
) -> None:
    """Compare strategies on virtual time: the router's own code before simulated servers. Needs no GPU."""
    from prefixroute.sim.command import run_simulate
    from prefixroute.sim.options import SimulateOptions

    options = SimulateOptions(
        traces=traces,
        strategies=strategies,
        instances=instances,
        load=load,
        rate=rate,
        seeds=seeds,
        slow=slow or (),
        kill=kill or (),
        n_requests=requests,
        kv_tokens=kv_tokens,
        cached_cost=cached_cost,
        n_processes=jobs,
        json_path=json_file,
        chart_path=chart,
        calibration_path=calibration,
    )
    raise typer.Exit(run_simulate(options))


TRIAL_COMMANDS = (demo, demo_server, replay, simulate)
