"""Every setting, once: its name, type, bounds, default and meaning.

All tables are frozen and refuse unknown keys. Nothing is coerced: a quoted number is text, `true` is no number.
A table left empty means its defaults. A setting is here only when this version obeys it.
Files: `file`; environment and command line: `load`; the wording of errors: `errors`.
"""

import ipaddress
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from prefixroute.config.routing import RoutingSettings
from prefixroute.config.sagemaker import SageMakerSettings, check_instances
from prefixroute.config.tables import (
    AnyPath,
    CapacityTokens,
    FilePath,
    LogLevel,
    Port,
    Ratio,
    Seconds,
    SecondsFromZero,
    SettingError,
    ShortName,
    Table,
)
from prefixroute.config.url import instance_address, instance_name, instance_url

# Only capitals: a key pasted where its variable's name belongs is then refused rather than echoed as a name.
_ENV_NAME = re.compile(r"[A-Z_][A-Z0-9_]{0,127}")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_PATH = re.compile(r"/[!-\"$-~]{0,1023}")
_ENDPOINT = re.compile(r"tcp://[!-~]+:(?P<port>[0-9]{1,5})|ipc:///[!-~]+")
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")


def _variable_name(name: str | None, word: str) -> str | None:
    """Checks the name of an environment variable that holds a secret, which `word` calls."""
    if name is not None and _ENV_NAME.fullmatch(name) is None:
        raise SettingError(
            "must be the name of an environment variable in capitals, digits and underscores "
            f"(the variable holds the {word}; never write the {word} here)"
        )
    if name is not None and name.startswith("PREFIXROUTE_"):
        raise SettingError("must not begin with PREFIXROUTE_, which is for settings (rename the variable)")
    return name


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _AddressTable(Table):
    host: str
    port: Port

    @field_validator("host", check_fields=False)
    @classmethod
    def _check_host(cls, host: str) -> str:
        try:
            valid = bool(ipaddress.IPv6Address(host)) if ":" in host else _HOST.fullmatch(host) is not None
        except ValueError:
            valid = False
        if not valid and host != "::":
            raise SettingError(
                "must be an address or a host name without port or brackets "
                "(127.0.0.1: this machine only; 0.0.0.0 or '::': every address)"
            )
        return host


class ListenTlsSettings(Table):
    cert_file: FilePath = Field(description="File with the certificate, and those above it (PEM).")
    key_file: FilePath = Field(description="File with the certificate's private key (PEM, not encrypted).")
    client_ca_file: FilePath | None = Field(
        None, description="File with the authorities whose certificates clients must show; null: clients show none."
    )


class CorsSettings(Table):
    allow_origins: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        description="Origins of the web pages that may read answers, such as https://chat.example; '*': every page."
    )
    allow_methods: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        ("GET", "POST", "DELETE"), description="Methods that they may use."
    )
    allow_headers: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        ("*",), description="Request headers that they may send; '*': all they ask for."
    )
    expose_headers: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        ("x-request-id", "retry-after"), description="Response headers that they may read."
    )
    allow_credentials: bool = Field(False, description="Whether browsers may send cookies along.")
    max_age_s: int = Field(600, ge=0, le=86_400, description="How long browsers may remember these permissions.")

    @field_validator("allow_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for index, origin in enumerate(origins):
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise SettingError("must be SCHEME://HOST[:PORT] in lower case, without a path, or '*'", index)
        if "*" in origins and len(origins) > 1:
            raise SettingError("has '*', which is every page, and others (keep one or the other)")
        return origins

    @field_validator("allow_methods", "allow_headers", "expose_headers")
    @classmethod
    def _check_tokens(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(names):
            if _TOKEN.fullmatch(name) is None:
                raise SettingError("must be a name such as content-type", index)
        return names

    @model_validator(mode="after")
    def _check_credentials(self) -> Self:
        if self.allow_credentials and "*" in self.allow_origins:
            raise SettingError("needs the origins named in allow_origins, not '*'", "allow_credentials")
        return self


class ListenSettings(_AddressTable):
    host: str = Field("127.0.0.1", description="Address of the data plane; 0.0.0.0 for every IPv4 address.")
    port: Port = Field(8080, description="Port of the data plane; 0 takes a free one.")
    tls: ListenTlsSettings | None = Field(None, description="TLS for clients; null: plain HTTP.")
    api_keys_file: FilePath | None = Field(
        None, description="File with the keys that requests must bring, one a line; null: anyone may send requests."
    )
    cors: CorsSettings | None = Field(None, description="What web pages of other origins may do; null: the instance's.")


class AdminSettings(_AddressTable):
    host: str = Field("127.0.0.1", description="Address of metrics, health and explanations.")
    port: Port = Field(9190, description="Port of the admin plane; 0 takes a free one.")
    token_env: str | None = Field(
        None, description="Environment variable with the bearer token of everything but /livez and /readyz."
    )
    token_file: FilePath | None = Field(None, description="File with that token, instead of a variable.")
    tls: ListenTlsSettings | None = Field(None, description="TLS for the admin plane; null: plain HTTP.")

    @field_validator("token_env")
    @classmethod
    def _check_token_env(cls, name: str | None) -> str | None:
        return _variable_name(name, "token")

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        if self.token_env is not None and self.token_file is not None:
            raise SettingError("is set beside token_env (keep one of them)", "token_file")
        if self.token_env is None and self.token_file is None and not is_loopback(self.host):
            raise SettingError(
                f"{self.host} can be reached from other machines, which needs a token "
                "(set admin.token_env or admin.token_file; or 127.0.0.1, or admin: null)",
                "host",
            )
        return self


class KvEventsSettings(Table):
    endpoint: str = Field(description="Where the instance publishes its KV events: tcp://HOST:PORT or ipc:///PATH.")
    replay_endpoint: str | None = Field(
        None, description="Where it repeats events that were missed; null: nowhere, and a gap is not repaired."
    )
    topic: str = Field("", description="Topic of its events; empty takes all.")
    bind: bool = Field(False, description="Whether the instance connects to us: then endpoint is ours to listen on.")

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        parts = None if endpoint is None else _ENDPOINT.fullmatch(endpoint)
        if endpoint is not None and (parts is None or not 0 < int(parts["port"] or 1) < 65_536):
            raise SettingError("must be off, auto, tcp://HOST:PORT or ipc:///PATH")
        return endpoint

    @model_validator(mode="after")
    def _check_reachable(self) -> Self:
        for name in ("endpoint", "replay_endpoint"):
            if not (self.bind and name == "endpoint") and (getattr(self, name) or "").startswith("tcp://*:"):
                raise SettingError("must name a host, not * (or set bind, where the instance connects to us)", name)
        return self


class InstanceTlsSettings(Table):
    ca_file: FilePath | None = Field(
        None, description="File with the authorities that its certificate is checked against; null: the machine's."
    )
    cert_file: FilePath | None = Field(None, description="File with the certificate that is shown to it (PEM).")
    key_file: FilePath | None = Field(
        None, description="File with that certificate's private key; null: it is in cert_file."
    )
    server_name: str | None = Field(
        None, description="Name that its certificate must have, and that it is asked for; null: the host in url."
    )
    verify: bool = Field(True, description="Whether its certificate is checked at all.")

    @field_validator("server_name")
    @classmethod
    def _check_server_name(cls, name: str | None) -> str | None:
        if name is not None and _HOST.fullmatch(name) is None:
            raise SettingError("must be a host name")
        return name

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if self.key_file is not None and self.cert_file is None:
            raise SettingError("needs cert_file, whose key it is", "key_file")
        return self


class InstanceSettings(Table):
    url: str = Field(
        description="Where it listens: http(s)://HOST[:PORT][/BASE], kept without trailing slash; or unix:/PATH."
    )
    name: ShortName = Field(
        default_factory=lambda data: instance_name(data["url"]) if "url" in data else "",
        description="What logs, metrics and the admin plane call it; HOST:PORT, or unix:FILE, when left out.",
    )
    models: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="Models it serves; null asks its /v1/models."
    )
    api_key_env: str | None = Field(
        None,
        description="Environment variable with the bearer key of probes, and of requests that bring no key.",
    )
    api_key_file: FilePath | None = Field(None, description="File with that key, instead of a variable.")
    tls: InstanceTlsSettings | None = Field(
        None, description="TLS to an https:// url; null: checked against the machine's authorities."
    )
    capacity_tokens: CapacityTokens | None = Field(
        None,
        description="Tokens its KV cache holds; null reads its metrics, else routing.default_capacity_tokens.",
    )

    kv_events: Literal["off", "auto"] | KvEventsSettings = Field(
        "off",
        description="Its KV events (vLLM): off; auto asks its /kv_event_sources; or an endpoint, alone or in a table.",
    )

    @field_validator("kv_events", mode="plain")
    @classmethod
    def _check_kv_events(cls, value: Any) -> Any:
        # By hand: a union's errors would name every way in which the value is wrong.
        if value in ("off", "auto") or isinstance(value, KvEventsSettings):
            return value
        if not isinstance(value, str | dict):
            raise SettingError("must be off, auto, an endpoint, or a table with an endpoint")
        return KvEventsSettings.model_validate({"endpoint": value} if isinstance(value, str) else value)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return instance_url(url)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name in ("none", "other"):
            raise SettingError("must not be none or other, which mean something else in metrics")
        return name

    @field_validator("models")
    @classmethod
    def _check_models(cls, models: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for index, model in enumerate(models or ()):
            if not model.strip():
                raise SettingError("must not be empty", index)
        return models

    @field_validator("api_key_env")
    @classmethod
    def _check_api_key_env(cls, name: str | None) -> str | None:
        return _variable_name(name, "key")

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        if self.api_key_env is not None and self.api_key_file is not None:
            raise SettingError("is set beside api_key_env (keep one of them)", "api_key_file")
        if self.tls is not None and not self.url.startswith("https://"):
            raise SettingError("is for a url that begins with https:// (change the url, or leave tls out)", "tls")
        return self


class HealthSettings(Table):
    path: str = Field("auto", description="Path that probes ask for; auto: /health, else /ping.")
    interval_s: Seconds = Field(2.0, description="Time between two probes of one instance.")
    timeout_s: Seconds = Field(2.0, description="How long a probe may take.")
    fall: int = Field(3, ge=1, le=1000, description="Failed probes in a row that take an instance out.")
    rise: int = Field(2, ge=1, le=1000, description="Good probes in a row that bring it back.")
    eject_s: Seconds = Field(1.0, description="First pause after a failed connection; doubles each time.")
    eject_max_s: Seconds = Field(30.0, description="Longest such pause.")

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if path != "auto" and _PATH.fullmatch(path) is None:
            raise SettingError("must be auto, or a path that begins with / and has no spaces")
        return path

    @model_validator(mode="after")
    def _check_pauses(self) -> Self:
        if self.eject_max_s < self.eject_s:
            raise SettingError(f"must be at least eject_s, which is {self.eject_s:g}", "eject_max_s")
        return self


class FleetSettings(Table):
    instances: tuple[InstanceSettings, ...] = Field((), strict=False, description="The model servers to route to.")
    health: HealthSettings = Field(HealthSettings(), description="Probes, and what they decide.")

    @field_validator("instances")
    @classmethod
    def _check_distinct(cls, instances: tuple[InstanceSettings, ...]) -> tuple[InstanceSettings, ...]:
        urls: dict[str, int] = {}
        names: dict[str, int] = {}
        for index, instance in enumerate(instances):
            first = urls.setdefault(instance.url, index)
            if first != index:
                raise SettingError(
                    f"{instance.url} is also the url of fleet.instances[{first}] (list each server once)",
                    index,
                    "url",
                )
            first = names.setdefault(instance.name, index)
            if first != index:
                raise SettingError(
                    f"'{instance.name}' is also the name of fleet.instances[{first}] (give each its own name)",
                    index,
                    "name",
                )
        return instances


class TokenizerSettings(Table):
    kind: Literal["bytes", "huggingface"] = Field(
        "bytes", description="How prompts are counted; bytes: UTF-8 bytes / 4; huggingface: as the engine does."
    )
    path: AnyPath | None = Field(None, description="Directory of the model's tokenizer, or its tokenizer.json.")
    chat_template: AnyPath | None = Field(None, description="File with the chat template; null: the model's own.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="What the engine was given as --default-chat-template-kwargs."
    )
    library: Literal["auto", "tokenizers"] = Field(
        "auto", description="What encodes; auto: fastokens where a large sample shows it equal, else tokenizers."
    )
    models: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="Models whose tokenizer it is, adapters included; null: every model."
    )
    budget_ms: float = Field(
        50.0, gt=0, le=10_000, description="How long a request may wait for its tokens; then it is routed by bytes."
    )
    processes: int = Field(1, ge=1, le=64, description="Processes that tokenize.")
    cache_bytes: int = Field(
        64 * 2**20, ge=2**20, le=2**36, description="Memory in each of them for tokens of earlier messages."
    )
    check_every: int = Field(256, ge=1, le=10**9, description="Each how many-th prompt is encoded a second way.")
    verify: bool = Field(True, description="Whether an instance's /tokenize must agree before tokens are used.")

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if self.kind == "huggingface" and self.path is None:
            raise SettingError(
                "is required when tokenizer.kind is huggingface (the model's directory, or its tokenizer.json)", "path"
            )
        return self


class UpstreamSettings(Table):
    connect_timeout_s: Seconds = Field(3.0, description="How long connecting to an instance may take.")
    first_byte_timeout_s: Seconds | None = Field(
        None, description="How long an answer may take to begin; null: any time."
    )
    idle_timeout_s: Seconds | None = Field(600.0, description="How long a begun answer may be silent; null: any time.")
    gone_timeout_s: Seconds | None = Field(
        30.0, description="The same while nothing listens at the instance's address any more; null: no less."
    )
    keepalive_s: Seconds = Field(
        4.0, description="How long an unused connection is kept; below the instance's own limit."
    )
    max_requests: int | None = Field(
        None, ge=1, le=10**9, description="Requests on one connection; null: as many as the instance takes."
    )
    sse_comment_s: Seconds | None = Field(
        None, description="After so long a silence between events, a stream gets a comment line; null: never."
    )
    warm_connections: int = Field(
        0, ge=0, le=10_000, description="Unused connections kept ready for each instance that has traffic."
    )


class RetrySettings(Table):
    max_attempts: int = Field(
        3,
        ge=1,
        le=10,
        description="Attempts in one go, the first included; after waiting for an instance it starts anew.",
    )
    budget_ratio: Ratio = Field(
        0.2, description="Retries other than after a failed connection, as a share of recent requests."
    )
    unanswered: Literal["never", "inference"] = Field(
        "never",
        description="Whether a sent request whose connection died unanswered is sent once more.",
    )


class LimitsSettings(Table):
    max_body_bytes: int = Field(
        64 * 2**20, ge=1024, le=2**32, description="Longest request body, read to be routed or streamed."
    )
    max_header_bytes: int = Field(
        64 * 2**10, ge=1024, le=2**20, description="Longest header field, and longest request line."
    )
    client_head_timeout_s: Seconds = Field(30.0, description="How long a request's head may take to arrive.")
    client_body_timeout_s: Seconds = Field(
        30.0, description="How long its body may be waited for, besides the time that the least rate gives it."
    )
    client_body_bytes_per_s: int = Field(
        1024, ge=1, le=2**30, description="Least rate of a body: each second of waiting is paid with so many bytes."
    )
    client_idle_timeout_s: Seconds = Field(
        90.0, description="How long a client's connection is kept between requests; above that of balancers before us."
    )
    client_stall_timeout_s: Seconds = Field(
        300.0, description="How long a client may take nothing at all of an answer that is waiting for it."
    )
    index_bytes: int = Field(256 * 2**20, ge=2**20, le=2**40, description="Memory of the prefix index.")
    exact_index_bytes: int = Field(
        512 * 2**20, ge=2**20, le=2**40, description="Memory of what instances say they hold (KV events)."
    )
    wait_for_instance_s: SecondsFromZero = Field(
        5.0, description="How long a request waits while no instance is up; then 503."
    )
    max_waiting: int = Field(1024, ge=0, le=10**6, description="Requests that may wait at a time.")
    max_stored_responses: int = Field(
        100_000, ge=0, le=10**7, description="Stored responses whose instance is remembered."
    )
    max_decisions: int = Field(1000, ge=0, le=10**5, description="Requests whose decisions the admin plane can show.")
    per_key_in_flight: int | None = Field(
        None, ge=1, le=10**6, description="Requests of one API key under way at a time; null: any number."
    )
    per_key_requests_per_minute: int | None = Field(
        None, ge=1, le=10**9, description="Requests of one API key in a minute; null: any number."
    )


class LogSettings(Table):
    format: Literal["text", "json"] = Field("text", description="Lines for people or for machines.")
    level: LogLevel = Field("info", description="Least severe level that is written.")
    access: bool = Field(True, description="One line for each request.")
    client_address: bool = Field(
        False, description="Whether lines about requests tell the client's address, which is personal data."
    )


class RecordingSettings(Table):
    path: AnyPath = Field(
        min_length=1, description="File to record to; older ones are kept as PATH.1, PATH.2 and so on."
    )
    key_file: AnyPath | None = Field(
        None, description="File with the key of the hashes, made if it is not there; null: PATH.key."
    )
    max_file_bytes: int = Field(64 * 2**20, ge=2**20, le=2**40, description="Size at which the next file begins.")
    n_files: int = Field(8, ge=2, le=1000, description="Files kept, the current one included.")
    block_tokens: int = Field(128, ge=16, le=4096, description="Prompt tokens that one hash stands for.")

    @field_validator("path", "key_file")
    @classmethod
    def _check_path(cls, path: str | None) -> str | None:
        if path is not None and (not path.isprintable() or path.endswith("/")):
            raise SettingError("must be the path of a file")
        return path

    @model_validator(mode="after")
    def _check_key_file(self) -> Self:
        if self.key_file == self.path:
            raise SettingError("must be another file than path", "key_file")
        return self


class Settings(Table):
    listen: ListenSettings = Field(ListenSettings(), description="The data plane.")
    admin: AdminSettings | None = Field(AdminSettings(), description="The admin plane; null turns it off.")
    fleet: FleetSettings = Field(FleetSettings(), description="The instances and their probes.")
    routing: RoutingSettings = Field(RoutingSettings(), description="How an instance is picked.")
    tokenizer: TokenizerSettings = Field(TokenizerSettings(), description="How prompts are counted.")
    upstream: UpstreamSettings = Field(UpstreamSettings(), description="Connections to instances.")
    retry: RetrySettings = Field(RetrySettings(), description="Further attempts after a failed one.")
    limits: LimitsSettings = Field(LimitsSettings(), description="Bounds on memory and waiting.")
    lane: Literal["auto", "aiohttp"] = Field(
        "auto", description="auto: plain requests are read by the fast lane, others by aiohttp; aiohttp: all of them."
    )
    engine_control: Literal["deny", "allow"] = Field(
        "deny", description="Whether clients reach sleep, cache reset, LoRA loading and profiling."
    )
    sagemaker: SageMakerSettings = Field(SageMakerSettings(), description="Endpoints that AWS clients invoke.")
    log: LogSettings = Field(LogSettings(), description="What is logged, and how.")
    recording: RecordingSettings | None = Field(
        None, description="Requests as keyed hashes, lengths and times, for simulate and replay; null: off."
    )
    response_headers: bool = Field(False, description="Whether answers tell the decision in x-prefixroute-*.")
    watch_config: bool = Field(
        True, description="Whether a change of the file, or of one that it names, is taken up by itself."
    )
    shutdown_delay_s: SecondsFromZero = Field(
        0.0, description="How long requests are taken after a stop signal, while health checks say no already."
    )
    drain_timeout_s: SecondsFromZero = Field(
        25.0, description="How long requests in flight may take to end after a stop signal."
    )

    @model_validator(mode="after")
    def _check_ports_differ(self) -> Self:
        listen, admin = self.listen, self.admin
        if admin is None or admin.port != listen.port or admin.port == 0:
            return self
        hosts = {listen.host, admin.host}
        if len(hosts) == 1 or hosts & _EVERY_ADDRESS:
            raise SettingError(f"{admin.port} is also listen.port (choose another, or admin: null)", "admin", "port")
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.listen.api_keys_file is None and self.sagemaker.access_keys_file is None:
            for name in ("per_key_in_flight", "per_key_requests_per_minute"):
                if getattr(self.limits, name) is not None:
                    raise SettingError(
                        "needs listen.api_keys_file or sagemaker.access_keys_file, which say what keys there are",
                        "limits",
                        name,
                    )
        if self.routing.isolate_by == "api_key" and any(i.kv_events != "off" for i in self.fleet.instances):
            # What an engine holds, it holds for everybody who sends no cache_salt.
            raise SettingError(
                "cannot be api_key while an instance has kv_events (turn them off, or have clients send a cache_salt "
                "and leave this out)",
                "routing",
                "isolate_by",
            )
        return self

    @model_validator(mode="after")
    def _check_endpoints(self) -> Self:
        check_instances(self.sagemaker, [instance.name for instance in self.fleet.instances])
        return self

    @model_validator(mode="after")
    def _check_not_itself(self) -> Self:
        """A router that lists itself would send its requests around for ever."""
        own = {"listen.port": self.listen, **({} if self.admin is None else {"admin.port": self.admin})}
        for index, instance in enumerate(self.fleet.instances):
            host, port = instance_address(instance.url)
            for where, address in own.items():
                is_here = host == address.host or (host in _LOOPBACK and address.host in {*_LOOPBACK, *_EVERY_ADDRESS})
                if is_here and port == address.port:
                    raise SettingError(
                        f"is this router itself ({where} is {port}; change one of them)",
                        *("fleet", "instances", index, "url"),
                    )
        return self
