"""Refusals in vLLM's words and shapes."""

from prefixroute.errors import PrefixRouteError, RequestError


class ApiError(PrefixRouteError):
    """Base of what the simulated server refuses. `type`, `param`: fields of the body."""

    type = "InternalServerError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def openai_body(self) -> dict[str, object]:
        return {
            "error": {"message": str(self), "type": self.type, "param": self.param, "code": self.status},
        }

    def anthropic_body(self) -> dict[str, object]:
        return {"type": "error", "error": {"type": self.type, "message": str(self)}}


class BadRequestError(ApiError, RequestError):
    """The request is understood, and cannot be done."""

    status = 400
    type = "BadRequestError"


class ValidationError(BadRequestError):
    """The body has the wrong shape. Answered in the OpenAI shape on every route, as by vLLM."""

    type = "Bad Request"


class NotFoundError(ApiError, RequestError):
    """No such model, or no such stored response."""

    status = 404
    type = "NotFoundError"


class BusyError(ApiError):
    """Admission control: too many requests in flight. Without Retry-After, as by vLLM."""

    status = 503
    type = "Service Unavailable"


def missing_field(name: str) -> ValidationError:
    return ValidationError(f"[{{'type': 'missing', 'loc': ('body', '{name}'), 'msg': 'Field required'}}]", name)


def wrong_field(name: str, wanted: str) -> ValidationError:
    return ValidationError(f"[{{'type': 'value_error', 'loc': ('body', '{name}'), 'msg': '{wanted}'}}]", name)
