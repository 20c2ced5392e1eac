"""The routes that tell about the server, or steer it: health, models, metrics, tokenizer, development mode."""

from collections.abc import Callable

from aiohttp import web

from prefixroute.demo.server import metrics, prompts, tokens
from prefixroute.demo.server.api_errors import BadRequestError, invalid, missing_field
from prefixroute.demo.server.generation_routes import json_response, read_json
from prefixroute.demo.server.prompts import JsonObject
from prefixroute.demo.server.service import Service

# What it imitates; the local part says that it does.
VERSION = "0.33.0+simulated"


class OperationRoutes:
    """Handlers over a `Service`. `healthy`: asked at each probe."""

    def __init__(self, service: Service, healthy: Callable[[], bool]) -> None:
        self._service = service
        self._healthy = healthy

    def routes(self) -> list[web.RouteDef]:
        return [
            *(
                # vLLM's routes know no HEAD.
                web.get(path, handler, allow_head=False)
                for path, handler in (
                    ("/health", self.health),
                    ("/ping", self.health),
                    ("/load", self.load),
                    ("/v1/models", self.models),
                    ("/version", self.version),
                    ("/kv_event_sources", self.kv_event_sources),
                    ("/is_sleeping", self.is_sleeping),
                    ("/is_paused", self.is_paused),
                )
            ),
            web.post("/ping", self.health),
            web.get("/metrics", self.metrics),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
            web.post("/sleep", self.sleep),
            web.post("/wake_up", self.wake_up),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.post("/reset_mm_cache", self.reset_other_cache),
            web.post("/reset_encoder_cache", self.reset_other_cache),
        ]

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._healthy() else 503)

    async def load(self, _: web.Request) -> web.Response:
        """As with --enable-server-load-tracking."""
        return json_response({"server_load": self._service.engine.n_requests})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._service.metrics_page(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def models(self, _: web.Request) -> web.Response:
        config = self._service.config
        base = self._card(config.model, None)
        return json_response(
            {"object": "list", "data": [base, *(self._card(name, config.model) for name in config.adapters)]}
        )

    async def version(self, _: web.Request) -> web.Response:
        return json_response({"version": VERSION})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        self._service.resolve_model(body)
        if "messages" in body:
            prompt = prompts.chat_prompt(body)
        elif isinstance(body.get("prompt"), str):
            prompt = tokens.encode(body["prompt"])
        else:
            raise missing_field("prompt", body)
        limit = self._service.config.engine.context_tokens
        ids = tokens.to_ids(prompt)
        texts = [tokens.decode(tokens.from_ids([one])) for one in ids] if body.get("return_token_strs") else None
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        self._service.resolve_model(body)
        ids = body.get("tokens")
        if not isinstance(ids, list):
            raise missing_field("tokens", body)
        try:
            return json_response({"prompt": tokens.decode(tokens.from_ids(ids))})
        except ValueError as error:
            raise BadRequestError(str(error), "tokens") from error

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """Answers 200 whether or not it could, as vLLM does: it cannot while requests run."""
        return json_response({"success": self._service.engine.reset_prefix_cache()})

    async def reset_other_cache(self, _: web.Request) -> web.Response:
        """There is none."""
        return web.Response()

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        """It publishes no events."""
        return json_response({})

    async def sleep(self, request: web.Request) -> web.Response:
        level = request.query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise invalid("int_parsing", "query.level", "Input should be a valid integer", level)
        self._service.sleep(forget=level != "0")
        return json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, _: web.Request) -> web.Response:
        self._service.wake_up()
        return json_response({"status": "awake", "tags": None})

    async def pause(self, request: web.Request) -> web.Response:
        """Whatever the mode, what is under way is aborted: vLLM's default."""
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise invalid("literal_error", "query.mode", "Input should be 'abort', 'wait' or 'keep'", mode)
        self._service.sleep(forget=False)
        return json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        self._service.wake_up()
        return json_response({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        return json_response({"is_paused": self._service.sleeping})

    async def is_sleeping(self, _: web.Request) -> web.Response:
        return json_response({"is_sleeping": self._service.sleeping})

    def _card(self, name: str, parent: str | None) -> JsonObject:
        created = int(self._service.start_time_s)
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": self._service.config.engine.context_tokens if parent is None else None,
            "permission": [permission],
        }
