"""Answers of containers, as the clients of an endpoint get them.

InvokeEndpoint gets the body as it is. InvokeEndpointWithResponseStream gets each piece in a frame, and what goes wrong
once the answer has begun in a last frame. Either gets an error of the container as a ModelError.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from prefixroute.core.lease import Lease
from prefixroute.errors import PrefixRouteError, UpstreamError, UpstreamTimeoutError
from prefixroute.http.ask import Ask, Exchanges
from prefixroute.http.dialects import error_body, error_headers
from prefixroute.http.headers import RawHeaders, relayed
from prefixroute.http.relay import Relay
from prefixroute.http.response import RawResponse
from prefixroute.http.routes import Dialect
from prefixroute.http.upstream import Answer
from prefixroute.record import RequestRecord
from prefixroute.sagemaker.errors import ModelError, ModelNotReadyError
from prefixroute.sagemaker.eventstream import StreamErrorCode, internal_stream_failure, model_stream_error, payload_part
from prefixroute.sagemaker.fields import session_of

if TYPE_CHECKING:
    from prefixroute.sagemaker.calls import InvocationCall

NEW_SESSION_ID = b"x-amzn-sagemaker-new-session-id"
CLOSED_SESSION_ID = b"x-amzn-sagemaker-closed-session-id"
# The endpoint's own to say.
_OURS = frozenset({b"x-amzn-requestid", b"x-amzn-errortype", b"x-amzn-invoked-production-variant"})
# Of the container's body, which the client gets in frames.
_OF_ITS_BODY = frozenset(
    {
        b"content-type",
        b"content-length",
        b"content-encoding",
        b"content-md5",
        b"content-digest",
        b"trailer",
        b"x-amzn-sagemaker-content-type",
    }
)
_MAX_ERROR_BYTES = 65_536


class InvocationRelay(Relay):
    """Passes on what a container answers to InvokeEndpoint."""

    def __init__(
        self,
        call: "InvocationCall",
        shared: Exchanges,
        ask: Ask,
        response: RawResponse,
        record: RequestRecord,
        answer: Answer,
        lease: Lease | None,
    ) -> None:
        super().__init__(shared, ask, response, record, answer, lease)
        self._call = call

    async def _pass_on(self) -> None:
        if 200 <= self._answer.status < 300:
            self._note_sessions()
            await super()._pass_on()
        else:
            await self._refuse()

    def _start(self) -> None:
        answer = self._answer
        headers = [*map(self._followed, self._passed_on(answer)), *self._added()]
        self._response.start(answer.status, answer.reason, headers, with_next=answer.has_more)

    def _passed_on(self, answer: Answer) -> RawHeaders:
        return [header for header in relayed(answer.headers) if header[0].lower() not in _OURS]

    def _added(self) -> RawHeaders:
        request_id = self._ask.request_id.encode("ascii")
        added = [(b"x-amzn-RequestId", request_id), self._variant(), *self._told()]
        if b"x-request-id" not in self._answer.head.index:
            added.append((b"x-request-id", request_id))
        return added

    def _variant(self) -> tuple[bytes, bytes]:
        return b"x-Amzn-Invoked-Production-Variant", self._call.destination.variant.encode("ascii")

    def _note_sessions(self) -> None:
        index, lease = self._answer.head.index, self._lease
        if lease is not None and (opened := index.get(NEW_SESSION_ID)) is not None:
            session = session_of(opened)
            if session is not None:
                self._call.session_opened(session, lease.instance)
        if (closed := index.get(CLOSED_SESSION_ID)) is not None:
            self._call.session_closed(closed.strip().decode("latin-1"))

    async def _refuse(self) -> None:
        """The container's error, as an error of the endpoint."""
        answer, record = self._answer, self._record
        self._call.original_status = answer.status
        body = await answer.start(_MAX_ERROR_BYTES)
        error: PrefixRouteError
        if answer.status == 503 and not self._call.streaming and self._call.is_not_ready(record.upstream):
            error = ModelNotReadyError("the container is not ready yet")
        else:
            error = ModelError(answer.status, body.decode("utf-8", "replace"))
        record.status, record.error = error.status, error.code
        headers = error_headers(Dialect.SAGEMAKER, error.status, self._ask.request_id, error)
        headers += [self._variant(), *self._told()]
        message = error_body(Dialect.SAGEMAKER, error.status, error.code, str(error), error.details)
        self._response.whole_now(error.status, headers, message)


class StreamRelay(InvocationRelay):
    """Passes on what a container answers to InvokeEndpointWithResponseStream."""

    _wrap: Callable[[bytes], bytes] | None = staticmethod(payload_part)

    async def _pass_on(self) -> None:
        self._response.last_words = _last_words
        await super()._pass_on()

    def _passed_on(self, answer: Answer) -> RawHeaders:
        untold = _OURS | _OF_ITS_BODY | {NEW_SESSION_ID, CLOSED_SESSION_ID}
        kept = [header for header in relayed(answer.headers) if header[0].lower() not in untold]
        kind = answer.head.index.get(b"content-type")
        if kind is not None:
            kept.append((b"X-Amzn-SageMaker-Content-Type", kind))
        return [(b"Content-Type", b"application/vnd.amazon.eventstream"), *kept]


def _last_words(error: Exception) -> bytes:
    """What ends a stream that cannot go on."""
    if isinstance(error, UpstreamTimeoutError):
        code: StreamErrorCode = "ModelInvocationTimeExceeded"
        text = "the model went silent in the middle of its answer"
    elif isinstance(error, UpstreamError):
        code, text = "StreamBroken", "the model's answer broke off"
    else:
        return internal_stream_failure("the router failed in the middle of the answer")
    # In words as well: botocore hands on the message alone.
    return model_stream_error(code, f"{code}: {text}")
