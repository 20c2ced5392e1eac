"""The command. Says what is wrong in one line and exits: 2 for a wrong configuration or call, 1 for a failure."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixroute import __version__
from prefixroute.collector import settle
from prefixroute.errors import ConfigError, PrefixRouteError
from prefixroute.memory import bound_heap
from prefixroute.trial_commands import TRIAL_COMMANDS

app = typer.Typer(
    name="prefixroute",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Prefix-aware reverse proxy for LLM servers: sends each request where the KV cache is warm.",
)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="PREFIXROUTE_CONFIG", help="Configuration file (YAML or JSON).", show_default=False
    ),
]
UrlArgument = Annotated[
    list[str] | None, typer.Argument(metavar="URL", help="Instances, such as http://gpu-a:8000.", show_default=False)
]


def main() -> None:
    """Entry point of the `prefixroute` command."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  for the rest of the process
    if isinstance(sys.stdout, TextIOWrapper):
        # What a terminal cannot show is no reason to fail. (Standard error escapes it by itself.)
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except PrefixRouteError as error:
        _complain(error)
        sys.exit(_exit_code(error))


def _exit_code(error: PrefixRouteError) -> int:
    code: int = getattr(error, "exit_code", 1)
    return code


def _complain(error: Exception) -> None:
    first, *more = str(error).splitlines() or [type(error).__name__]
    typer.echo(f"prefixroute: {first}", err=True)
    for line in more:
        typer.echo(f"             {line}", err=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prefixroute {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Common options."""


@app.command()
def serve(
    urls: UrlArgument = None,
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to take requests on.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(help="Port to take requests on.", show_default=False)] = None,
    admin_host: Annotated[
        str | None, typer.Option(help="Address of metrics, health and explanations.", show_default=False)
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port of metrics, health and explanations.", show_default=False)
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="How an instance is picked.", show_default=False)] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.", show_default=False)] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default=False)] = None,
    record: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Record requests there, as hashes and lengths.", show_default=False),
    ] = None,
) -> None:
    """Route requests to model servers, until stopped by SIGTERM or Ctrl-C. SIGHUP reads the configuration again."""
    exit_on_signals()
    bound_heap()
    from prefixroute.app import running
    from prefixroute.config import Settings, instances_in_file, require_instances
    from prefixroute.logs import configure_logs, flush_logs, log_loop_exception
    from prefixroute.reload import ConfigSource
    from prefixroute.systemd import Notifier

    options = {
        ("listen", "host"): host,
        ("listen", "port"): port,
        ("admin", "host"): admin_host,
        ("admin", "port"): admin_port,
        ("routing", "strategy"): strategy,
        ("log", "format"): log_format,
        ("log", "level"): log_level,
        ("recording", "path"): record,
    }

    def read() -> Settings:
        settings: Settings = _settings(config, urls, options)
        require_instances(settings)
        return settings

    source = ConfigSource(config, read, lambda: instances_in_file(config) if urls and config is not None else None)
    settings = source.load()
    machines_read = settings.log.format == "json"
    log = logging.getLogger(__name__)

    def say_last(name: str) -> None:
        log.warning("ended at once by a second signal (%s): what is under way breaks off", name)
        flush_logs()

    async def serving(settings: Settings) -> None:
        asyncio.get_running_loop().set_exception_handler(log_loop_exception)
        stop = stop_on_signals(say_last)
        reload_on_signal(source.ask)
        async with running(settings, source=source, notifier=Notifier.of(os.environ)) as router:
            if machines_read:
                # Whatever the level: a port that was free to choose is told nowhere else.
                log.handle(
                    log.makeRecord(log.name, logging.INFO, "", 0, "serving", (), None, extra={"fields": router.facts()})
                )
            else:
                with suppress(OSError):  # nobody reads
                    typer.echo("\n".join(router.banner()), err=True)
            await stop.wait()

    settle()
    with closing(configure_logs(settings.log.format, settings.log.level)):
        try:
            run(serving(settings))
        except PrefixRouteError as error:
            if not machines_read:
                raise
            log.error("%s", error)  # noqa: TRY400  a line, not a traceback
            raise typer.Exit(_exit_code(error)) from error


@app.command()
def check(urls: UrlArgument = None, config: ConfigOption = None) -> None:
    """Check a configuration and say what is wrong, and where."""
    from prefixroute.build import check_settings
    from prefixroute.config import require_instances

    settings = _settings(config, urls, {})
    require_instances(settings)
    check_settings(settings)
    n = len(settings.fleet.instances)
    typer.echo(f"ok: {settings.routing.strategy} over {n} instance{'s' if n != 1 else ''}")
    for endpoint in settings.sagemaker.endpoints:
        for variant in endpoint.production_variants:
            members = ", ".join(variant.instances or ("all instances",))
            rule = variant.routing_config.routing_strategy
            typer.echo(f"    endpoint {endpoint.endpoint_name}, {variant.variant_name}: {rule} over {members}")
        for component in endpoint.inference_components:
            servers = ", ".join(copy.server for copy in component.copies)
            typer.echo(f"    endpoint {endpoint.endpoint_name}, {component.inference_component_name}: on {servers}")


def _settings(config: Path | None, urls: list[str] | None, options: dict[tuple[str, str], Any]) -> Any:
    from prefixroute.config import instances_from_urls, load_settings

    overrides: dict[str, Any] = {}
    for (table, name), value in options.items():
        if value is not None:
            overrides.setdefault(table, {})[name] = value
    if urls:
        overrides["fleet"] = {"instances": instances_from_urls(urls)}
    return load_settings(config, overrides=overrides)


def exit_on_signals() -> None:
    """Until `stop_on_signals`, the first process of a container ends by SIGTERM and SIGINT as any other would.

    The kernel sends it no signal that it has not asked for.
    """
    if os.getpid() == 1:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: os._exit(128 + number))


def reload_on_signal(reload: Callable[[], None]) -> None:
    if hasattr(signal, "SIGHUP"):  # not on Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def stop_on_signals(on_second: Callable[[str], None] = lambda _name: None) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. The second signal ends the process at once, with 128 and its number.

    `on_second`: gets that signal's name before the end.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            on_second(signal.Signals(number).name)
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:  # not on Windows
        asyncio.run(main)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)


@app.command()
def explain(
    body: Annotated[
        Path | None,
        typer.Argument(help="File with a request body (JSON); - for standard input.", show_default=False),
    ] = None,
    admin: Annotated[str, typer.Option(help="Admin URL of a running router.")] = "http://127.0.0.1:9190",
    path: Annotated[
        str | None, typer.Option(help="Path the body would be sent to; guessed from its shape.", show_default=False)
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="Header of the request that decides too, such as 'x-session-id: 7'.", show_default=False),
    ] = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Instead: why the hit rate is what it is. Takes no body.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as it came.")] = False,
    token_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable with the admin port's token.", show_default=False),
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with the admin port's token.", show_default=False)
    ] = None,
    ca_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File with the authority of an https:// admin port's certificate.", show_default=False
        ),
    ] = None,
) -> None:
    """Ask a running router where a request would go, and why. Nothing is sent to any instance."""
    from rich.console import Console

    from prefixroute.config.secrets import secret
    from prefixroute.config.tls import trusting
    from prefixroute.explain import ask, ask_ladder, show, show_ladder

    if body is None and not ladder:
        raise ConfigError(
            "explain needs a request body: a file, or - for standard input "
            "(or --ladder, which takes none and says why so little is cached)"
        )
    if body is not None and ladder:
        raise ConfigError("explain takes a request body or --ladder, not both")
    token = secret("token", token_env, token_file)
    authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
    tls = None if ca_file is None else trusting(ca_file, "--ca-file")
    if body is None:
        answer = ask_ladder(admin, authorization, tls=tls)
    else:
        content = sys.stdin.buffer.read() if str(body) == "-" else _read(body)
        headers = dict(_header(text) for text in header or []) | authorization
        answer = ask(admin, content, path=path, headers=headers, tls=tls)
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        (show_ladder if ladder else show)(answer, Console())


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    name, value = name.strip(), value.strip()
    if not (colon and name.replace("-", "").replace("_", "").isalnum() and text.isascii() and text.isprintable()):
        raise ConfigError("--header: must be written 'name: value', in ASCII")
    return name, value


_MAX_EXPLAINED_BYTES = 64 * 1024 * 1024


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_EXPLAINED_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    if len(content) > _MAX_EXPLAINED_BYTES:
        raise ConfigError(f"{path}: is longer than {_MAX_EXPLAINED_BYTES} bytes, which is no request body")
    return content


for trial_command in TRIAL_COMMANDS:
    app.command()(trial_command)
