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


class UnparsableError(BadRequestError):
    """The body is no text in UTF-8: answered by the framework below vLLM."""

    def openai_body(self) -> dict[str, object]:
        return {"detail": str(self)}


class NotFoundError(ApiError, RequestError):
    """No such model."""

    status = 404
    type = "NotFoundError"


class UnknownResponseError(NotFoundError):
    """No such stored response."""

    type = "invalid_request_error"


class BusyError(ApiError):
    """Admission control: too many requests in flight. Without Retry-After, as by vLLM."""

    status = 503
    type = "Service Unavailable"


def invalid(kind: str, loc: str, message: str, given: object, cause: str | None = None) -> ValidationError:
    """What the server's own check of shapes says of `loc`, where `given` was."""
    told = f"<{type(given).__name__} of {len(given)} items>" if isinstance(given, dict | list) else str(given)[:100]
    context = "" if cause is None else f", 'ctx': {{'error': {cause!r}}}"
    what = f"{{'type': '{kind}', 'loc': '{loc}', 'msg': '{message}', 'input': {told!r}{context}}}"
    return ValidationError(f"1 validation error:\n  {what}", loc)


def missing_field(name: str, body: dict[str, object]) -> ValidationError:
    return invalid("missing", f"body.{name}", "Field required", body)


def require_fields(body: dict[str, object], *names: str) -> None:
    """Raises ValidationError for the first of them that is missing, where vLLM lists all of them."""
    for name in names:
        if body.get(name) is None:
            raise missing_field(name, body)


def wrong_field(name: str, wanted: str, given: object) -> ValidationError:
    return invalid("value_error", f"body.{name}", f"Value error, {wanted}", given)
