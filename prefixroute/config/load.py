"""Settings from command line, environment and file, in this order of precedence, over the defaults.

`PREFIXROUTE_ROUTING__STRATEGY=random` sets `routing.strategy`. A variable may also hold a whole table or list,
written as YAML or JSON; the deeper variable wins. An empty one counts as unset; `null` means null.
SAGEMAKER_BIND_TO_PORT, which SageMaker sets for its containers, wins over these: requests come there and nowhere else.
Tables merge, everything else replaces. All problems are told at once, each with its place.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from prefixroute.config.access_keys import read_access_keys_of
from prefixroute.config.api_keys import read_api_keys
from prefixroute.config.errors import Where, describe
from prefixroute.config.file import TextError, parse_yaml, read_file
from prefixroute.config.secrets import admin_token, api_key
from prefixroute.config.settings import Settings
from prefixroute.config.tables import Table, fields_by_key, is_path, table_in
from prefixroute.config.tls import client_context, server_context
from prefixroute.config.url import instance_url
from prefixroute.config.words import shown
from prefixroute.errors import ConfigError

ENV_PREFIX = "PREFIXROUTE_"
CONFIG_VARIABLE = "PREFIXROUTE_CONFIG"
"""Names the file, for the command: no setting."""
BIND_VARIABLE = "SAGEMAKER_BIND_TO_PORT"
# A wrong file can be wrong on every line.
MAX_PROBLEMS = 20

# What Kubernetes puts into every pod beside a Service called prefixroute or prefixroute-something.
_KUBERNETES = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://")
_PORT = re.compile(r"[0-9]{1,5}")


def load_settings(
    path: Path | None,
    *,
    overrides: Mapping[str, Any] = {},
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The settings of file `path` (None: no file) under `environ` (None: the process's) under `overrides`.

    `overrides` nests as the settings do. Raises ConfigError, whose message has one line for each problem.
    """
    environ = os.environ if environ is None else environ
    # As written, a path in a file counts from where the file is; all others from the working directory.
    in_file = {} if path is None else resolved(read_file(path), Path(os.path.abspath(path)).parent)
    in_environ, sources, problems = _read_environ(environ)
    sources.update(dict.fromkeys(_leaves(overrides, ()), None))
    try:
        settings = Settings.model_validate(_merge(_merge(in_file, in_environ), overrides))
    except ValidationError as error:
        raise _config_error([*problems, *describe(error, sources)]) from None
    problems += _file_problems(settings, environ)
    if problems:
        raise _config_error(problems)
    return settings


def require_instances(settings: Settings) -> None:
    """Raises ConfigError if there is no instance to route to."""
    if not settings.fleet.instances:
        raise ConfigError(
            "fleet.instances: no instance to route to (list at least one, such as {url: 'http://gpu-a:8000'}, "
            "in the configuration file, or name its URL on the command line)"
        )


def instances_in_file(path: Path) -> object:
    """`fleet.instances` as a file has it, unchecked; None where it has none. Raises ConfigError as `read_file` does."""
    fleet = read_file(path).get("fleet")
    return fleet.get("instances") if isinstance(fleet, Mapping) else None


def instances_from_urls(urls: Sequence[str]) -> list[dict[str, Any]]:
    """`fleet.instances` for URLs of the command line. Raises ConfigError if one is malformed."""
    instances: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, url in enumerate(urls, start=1):
        try:
            instances.append({"url": instance_url(url)})
        except ValueError as error:
            # Not quoted where it may hold a password or a key.
            secret = any(mark in url for mark in "@?#")
            problems.append(f"{f'URL {number}' if secret else shown(url)}: {error}")
    if problems:
        raise _config_error(problems)
    return instances


def _config_error(problems: Sequence[str]) -> ConfigError:
    more = len(problems) - MAX_PROBLEMS
    return ConfigError("\n".join([*problems[:MAX_PROBLEMS], *([f"and {more} more problems"] if more > 0 else [])]))


def _file_problems(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """What is wrong with the variables and files that settings name and a start depends on."""
    problems: list[str] = []

    def attempt(make: Callable[[], object], where: str = "") -> None:
        try:
            make()
        except ConfigError as error:
            problems.append(f"{where}: {error}" if where else str(error))

    listen, admin = settings.listen, settings.admin
    if listen.tls is not None:
        attempt(partial(server_context, listen.tls, "listen.tls"))
    if listen.api_keys_file is not None:
        attempt(partial(read_api_keys, Path(listen.api_keys_file)), "listen.api_keys_file")
    if settings.sagemaker.access_keys_file is not None:
        attempt(partial(read_access_keys_of, settings), "sagemaker.access_keys_file")
    if admin is not None:
        attempt(partial(admin_token, admin, environ), f"admin.token_{'env' if admin.token_file is None else 'file'}")
        if admin.tls is not None:
            attempt(partial(server_context, admin.tls, "admin.tls"))
    for index, instance in enumerate(settings.fleet.instances):
        where = f"fleet.instances[{index}]"
        kind = "env" if instance.api_key_file is None else "file"
        attempt(partial(api_key, instance, environ), f"{where}.api_key_{kind}")
        if instance.tls is not None:
            attempt(partial(client_context, instance.tls, f"{where}.tls"))
    return problems


def _read_environ(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[Where, str | None], list[str]]:
    """What the environment sets, nested; which variable set each path; the problems."""
    known = dict(_variables(Settings, ()))
    values: dict[str, Any] = {}
    sources: dict[Where, str | None] = {}
    problems: list[str] = []
    # Whole tables first: the deeper variable wins.
    for name in sorted(environ, key=lambda name: (name.count("__"), name)):
        text = environ[name].strip()
        if not name.startswith(ENV_PREFIX) or name == CONFIG_VARIABLE or not text or _is_kubernetes(name, text):
            continue
        if name not in known:
            near = get_close_matches(
                name.removeprefix(ENV_PREFIX), [key.removeprefix(ENV_PREFIX) for key in known], n=1
            )
            hint = f"did you mean {ENV_PREFIX}{near[0]}?" if near else "unset it, or see config.example.yaml"
            problems.append(f"{shown(name)}: unknown setting; {hint}")
            continue
        where, takes_text = known[name]
        try:
            value: Any = text if takes_text and text != "null" else parse_yaml(text)
        except TextError as error:
            problems.append(f"{name}: {error}")
            continue
        sources.update(dict.fromkeys(_leaves(value, where), name))
        for key in reversed(where):
            value = {key: value}
        values = _merge(values, value)
    if text := environ.get(BIND_VARIABLE, "").strip():
        try:
            bound = _bound_listen(text)
        except ValueError as error:
            problems.append(f"{BIND_VARIABLE}: {error}")
        else:
            sources.update(dict.fromkeys(_leaves(bound, ()), BIND_VARIABLE))
            values = _merge(values, bound)
    return values, sources, problems


def _bound_listen(text: str) -> dict[str, Any]:
    """What a container's port means. Raises ValueError."""
    # A free port of our choice is one that nobody asks.
    if not _PORT.fullmatch(text) or not 0 < int(text) < 65_536:
        raise ValueError(f"must be a port from 1 to 65535, not {shown(text)}")
    return {"listen": {"host": "0.0.0.0", "port": int(text)}}


def resolved(values: Mapping[str, Any], base: Path, table: type[Table] = Settings) -> dict[str, Any]:
    """`values` of `table`, unchecked, with the paths in them that are relative put behind `base`."""
    made = dict(values)
    for key, field in fields_by_key(table).items():
        value = made.get(key)
        inner = table_in(field.annotation)
        if is_path(field) and isinstance(value, str) and value:
            # An absolute path stays; and what is at the end of a wrong one, too.
            made[key] = os.path.join(base, value)
        elif inner is not None and isinstance(value, Mapping):
            made[key] = resolved(value, base, inner)
        elif inner is not None and isinstance(value, list):
            made[key] = [resolved(one, base, inner) if isinstance(one, Mapping) else one for one in value]
    return made


def _variables(table: type[Table], above: tuple[str, ...]) -> Iterator[tuple[str, tuple[tuple[str, ...], bool]]]:
    """Each variable that sets something, with the path of that, and whether that is text."""
    for key, field in fields_by_key(table).items():
        where = (*above, key)
        yield ENV_PREFIX + "__".join(where).upper(), (where, _takes_text(field.annotation))
        inner = table_in(field.annotation)
        if inner is not None and get_origin(field.annotation) is not tuple:
            yield from _variables(inner, where)


def _takes_text(annotation: Any) -> bool:
    if get_origin(annotation) in (tuple, dict):
        return False
    return annotation is str or get_origin(annotation) is Literal or any(map(_takes_text, get_args(annotation)))


def _is_kubernetes(name: str, value: str) -> bool:
    if name.endswith("_PORT") and _KUBERNETES_PORT.match(value):
        return True
    return _KUBERNETES.fullmatch(name) is not None


def _leaves(value: Any, where: Where) -> Iterator[Where]:
    """The path of everything in `value`, itself at `where`, that is no table."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*where, key))
    else:
        yield where


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
