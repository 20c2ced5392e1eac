"""Errors that only SageMaker's contract has."""

from collections.abc import Mapping

from prefixroute.errors import PrefixRouteError, RequestError

# What SageMaker calls the one container of an endpoint in its messages.
_CONTAINER = "primary"
# Of the model's `Message` and `OriginalMessage` shapes.
_MAX_CHARS = 2_048


class UnknownDestinationError(RequestError):
    """Whom the request names is not there: no such endpoint, variant, component or session."""

    code = "unknown_destination"


class UnsupportedOperationError(RequestError):
    """An operation of SageMaker's that this router does not have."""

    code = "unsupported_operation"


class ModelNotReadyError(PrefixRouteError):
    """Those who could answer have not been ready yet since they started."""

    status = 429
    code = "model_not_ready"
    aws_type = "ModelNotReadyException"


class DependencyError(PrefixRouteError):
    """Something that the answer depends on, and that is nobody's model, failed."""

    status = 530
    code = "dependency_failed"


class ModelError(PrefixRouteError):
    """The container answered with an error, or not as it should.

    `original_status`: the container's; 0 when it gave none. `original`: what it said.
    """

    status = 424
    code = "model_error"

    def __init__(self, original_status: int, original: str) -> None:
        fault = "client" if 400 <= original_status < 500 else "server"
        original = original[:_MAX_CHARS]
        said = f'Received {fault} error ({original_status}) from {_CONTAINER} with message "{original}"'
        super().__init__(said[:_MAX_CHARS])
        self.details: Mapping[str, object] = {
            "OriginalStatusCode": original_status,
            "OriginalMessage": original,
            "LogStreamArn": "",
        }
