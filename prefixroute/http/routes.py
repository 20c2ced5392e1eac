"""Request target → route: what a path means to the router. A closed table.

Every path is proxied; a route says how its body is read for routing, in which dialect errors are answered, and under
which label it is counted. Engine control is what changes an engine for everybody: closed unless the operator opens it.
"""

import re
from dataclasses import dataclass
from enum import Enum
from urllib.parse import unquote

from prefixroute.core.prompt import Api


class Dialect(Enum):
    """Whose error bodies a route's clients can read."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    SAGEMAKER = "sagemaker"


@dataclass(frozen=True, slots=True)
class Route:
    """`label`: for metrics and logs. `repeatable`: generation and pooling, which may be computed twice.

    `is_endpoint`: a path of SageMaker's, which an instance knows under another name.
    """

    label: str
    api: Api = Api.OTHER
    dialect: Dialect = Dialect.OPENAI
    repeatable: bool = False
    stores_responses: bool = False
    is_endpoint: bool = False


OTHER = Route("other")

_ROUTES: dict[str, Route] = {
    "/v1/chat/completions": Route("/v1/chat/completions", Api.CHAT, repeatable=True),
    "/v1/completions": Route("/v1/completions", Api.COMPLETIONS, repeatable=True),
    "/v1/responses": Route("/v1/responses", Api.RESPONSES, stores_responses=True),
    "/v1/messages": Route("/v1/messages", Api.MESSAGES, Dialect.ANTHROPIC, repeatable=True),
    "/v1/messages/count_tokens": Route("/v1/messages/count_tokens", Api.TOKENIZE, Dialect.ANTHROPIC, repeatable=True),
    "/invocations": Route("/invocations", Api.INVOCATIONS, repeatable=True),
    "/generate": Route("/generate", Api.GENERATE, repeatable=True),
    "/inference/v1/generate": Route("/generate", Api.GENERATE, repeatable=True),
    "/tokenize": Route("/tokenize", Api.TOKENIZE, repeatable=True),
    "/detokenize": Route("/detokenize", Api.TOKENIZE, repeatable=True),
    "/v1/models": Route("/v1/models"),
    "/health": Route("/health"),
    "/ping": Route("/ping"),
    "/v1/audio/transcriptions": Route("/v1/audio"),
    "/v1/audio/translations": Route("/v1/audio"),
    "/v1/realtime": Route("/v1/realtime"),
    **{
        path: Route("pooling", Api.POOLING, repeatable=True)
        for path in (
            "/v1/embeddings",
            "/v2/embed",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            # TGI's and TEI's names for the same
            "/embed",
            "/embed_all",
            "/embed_sparse",
            "/predict",
            "/similarity",
        )
    },
    # TGI: the root path and its streaming twin
    "/generate_stream": Route("/generate", Api.GENERATE, repeatable=True),
}

# What is posted to these, written so, is read for routing.
READ_PATHS = frozenset(path.encode("ascii") for path, route in _ROUTES.items() if route.api is not Api.OTHER)

# SageMaker's, below the name of an endpoint.
ENDPOINT_PATH = re.compile(
    r"/endpoints/(?P<endpoint>[^/]+)"
    r"(?:/(?P<operation>(?:async-)?invocations(?:-[a-z-]+)?)"
    r"|(?:/inference-components/(?P<component>[^/]+))?/openai(?P<openai>/v1(?:/.*)?))"
)
_ENDPOINT_PATH_BYTES = re.compile(ENDPOINT_PATH.pattern.encode("ascii"))
_INVOCATIONS = Route("/endpoints/{name}/invocations", dialect=Dialect.SAGEMAKER, is_endpoint=True)
_RESPONSE_STREAM = Route("/endpoints/{name}/invocations-response-stream", dialect=Dialect.SAGEMAKER, is_endpoint=True)
_OTHER_INVOCATIONS = Route("other", dialect=Dialect.SAGEMAKER, is_endpoint=True)
_OPENAI_OF_ENDPOINT = Route("/endpoints/{name}/openai", is_endpoint=True)

_STORED = Route("/v1/responses/{id}")
_MESSAGES_BELOW = Route("other", dialect=Dialect.ANTHROPIC)


def is_read_of_endpoint(path: bytes) -> bool:
    """Whether what is posted to this path, written so, is read for routing on behalf of an endpoint."""
    found = _ENDPOINT_PATH_BYTES.fullmatch(path) if path.startswith(b"/endpoints/") else None
    if found is None:
        return False
    openai = found["openai"]
    return (
        found["operation"] in (b"invocations", b"invocations-response-stream")
        if openai is None
        else openai in READ_PATHS
    )


_AUTHORITY = re.compile(r"^[^/?#]*")
# As far as its target: what is behind that may be what is wrong.
_REQUEST_LINE = re.compile(rb"[\r\n]*[A-Za-z]+ +([^ \r\n]+)[ \r\n]")

# Paths of vLLM (development mode, runtime LoRA, RL), SGLang and llama.cpp that change the engine for all its users.
_ENGINE_CONTROL = frozenset(
    {
        "/sleep",
        "/wake_up",
        "/pause",
        "/resume",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/release_kv_cache_memory",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/start_profile",
        "/stop_profile",
        "/collective_rpc",
        "/scale_elastic_ep",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/finish_weight_update",
        "/update_weights",
        "/update_weight_version",
        "/weight_checker",
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/server_info",
        "/flush_cache",
        "/abort_request",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/pause_generation",
        "/continue_generation",
        "/set_internal_state",
        "/configure_logging",
        "/lora-adapters",
        "/models/load",
        "/models/unload",
    }
)
# Of those, what leaves nothing of a prefix cache.
_EMPTIES_CACHE = frozenset(
    {
        "/sleep",
        "/reset_prefix_cache",
        "/release_kv_cache_memory",
        "/flush_cache",
        "/release_memory_occupation",
        "/update_weights",
        "/finish_weight_update",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
    }
)
_SLEEPS = frozenset({"/sleep", "/release_kv_cache_memory", "/release_memory_occupation"})
# llama.cpp: reading is harmless, POST changes the server.
_ENGINE_CONTROL_BY_POST = frozenset({"/props"})
_ENGINE_CONTROL_PREFIXES_BY_POST = ("/slots/",)


def origin_form(target: str) -> str | None:
    """The request target as an instance takes it: path and query. None for what names no resource of an instance."""
    if target.startswith("/"):
        return target
    scheme, separator, rest = target.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return None
    path = _AUTHORITY.sub("", rest, count=1)
    return path if path.startswith("/") else "/" + path


def plain_path(target: str) -> str:
    """The path of a request target as a server sees it: no query, percent-decoded, no doubled or trailing slash.

    For looking at only: what is forwarded is the target as sent.
    """
    path = (origin_form(target) or "/").partition("?")[0].partition("#")[0]
    if "%" in path:
        path = unquote(path)
    while "//" in path:
        path = path.replace("//", "/")
    if "/." in path:
        path = _without_dots(path)
    return path.rstrip("/") or "/"


def route_of(path: str) -> Route:
    """The route of a plain path; OTHER for what is not known."""
    route = _ROUTES.get(path)
    if route is not None:
        return route
    if path.startswith("/v1/messages/"):
        return _MESSAGES_BELOW
    if path.startswith("/endpoints/") and (found := ENDPOINT_PATH.fullmatch(path)) is not None:
        if found["openai"] is not None:
            return _OPENAI_OF_ENDPOINT
        match found["operation"]:
            case "invocations":
                return _INVOCATIONS
            case "invocations-response-stream":
                return _RESPONSE_STREAM
            case _:
                return _OTHER_INVOCATIONS
    return _STORED if stored_response_id(path) else OTHER


def dialect_of(start: bytes) -> Dialect:
    """The dialect of a request of which only the first bytes are known, and maybe no good."""
    line = _REQUEST_LINE.match(start)
    return Dialect.OPENAI if line is None else route_of(plain_path(line[1].decode("latin-1"))).dialect


def stored_response_id(path: str) -> str | None:
    """The id in `/v1/responses/{id}` and what is below it, such as its cancel; None for any other plain path."""
    if not path.startswith("/v1/responses/"):
        return None
    return path[len("/v1/responses/") :].partition("/")[0] or None


def is_engine_control(method: str, path: str) -> bool:
    """Whether a plain path changes an engine for everybody."""
    if path in _ENGINE_CONTROL:
        return True
    return method not in ("GET", "HEAD", "OPTIONS") and (
        path in _ENGINE_CONTROL_BY_POST or path.startswith(_ENGINE_CONTROL_PREFIXES_BY_POST)
    )


def empties_cache(path: str) -> bool:
    """Whether an engine that has done what this plain path asks for holds no prefix any more."""
    return path in _EMPTIES_CACHE


def is_sleep(path: str) -> bool:
    """Whether an engine that has done what this plain path asks for says so to nobody, its KV events included."""
    return path in _SLEEPS


def _without_dots(path: str) -> str:
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment and segment != ".":
            kept.append(segment)
    return "/" + "/".join(kept)
