"""The endpoint contract of one router: who is let in, what is asked, and whom it is for."""

import asyncio
import re
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from random import Random

from prefixroute.core.fleet import Fleet
from prefixroute.core.group import Group
from prefixroute.core.policies.blind import LeastOutstanding
from prefixroute.errors import MethodError, RequestError, TooManyRequestsError
from prefixroute.http.arrival import Arrival, RequestHead
from prefixroute.http.auth import Gate, Visit, presented_key
from prefixroute.http.body import BodyLimits, check_length, expect_continue, read_whole
from prefixroute.http.contract import Call
from prefixroute.http.headers import RawHeaders
from prefixroute.http.routes import ENDPOINT_PATH
from prefixroute.sagemaker.calls import InvocationCall
from prefixroute.sagemaker.endpoints import Destination, Endpoints
from prefixroute.sagemaker.errors import UnknownDestinationError, UnsupportedOperationError
from prefixroute.sagemaker.fields import NEW_SESSION, InvocationFields, check_endpoint_name, read_fields
from prefixroute.sagemaker.sessions import Sessions
from prefixroute.sagemaker.sigv4 import Verifier, missing_authentication, read_signature

# What proves to AWS who asks and tells it how; none of an instance's business. SageMaker's bearer tokens are made of
# credentials of an AWS account.
_CREDENTIALS = frozenset(
    {
        b"authorization",
        b"x-amz-date",
        b"x-amz-security-token",
        b"x-amz-content-sha256",
        b"amz-sdk-invocation-id",
        b"amz-sdk-request",
    }
)
# No segment of it is empty or made of dots, but for an empty one at its end.
_DOTLESS = re.compile(r"(?:/(?!\.{0,2}(?:/|$))[^/]*)+/?")
_STREAM_ACCEPT = b"x-amzn-sagemaker-accept"
# Of a query: presigned URLs.
_SIGNING_QUERY = "x-amz-"
# Above this, hashing takes longer than others should wait for a turn: half a millisecond.
_HASHED_AT_ONCE_BYTES = 262_144
# Bodies are read before it is known who sends them. Those above this size, of all clients together, only as far as so
# many of the longest would be.
_UNPROVEN_BYTES = 1_048_576
_MAX_UNPROVEN = 4


class SageMaker:
    """`signatures`: what verifies them at the moment; None: they are not looked at. `wall_clock`: seconds since 1970.

    `gate`: of the data port, where keys are.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        sessions: Sessions,
        fleet: Fleet,
        gate: Gate,
        signatures: Callable[[], Verifier | None],
        *,
        rng: Random,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.endpoints = endpoints
        self.sessions = sessions
        self._fleet = fleet
        self._gate = gate
        self._signatures = signatures
        self._rng = rng
        self._wall_clock = wall_clock
        # Of endpoints that have no groups of their own, for sessions.
        self._whole_fleet = Group(LeastOutstanding())
        self._unproven_bytes = 0

    async def enter(self, arrival: Arrival, limits: BodyLimits) -> Visit | None:
        """As `Contract` has it: by AWS's signature, where access keys are configured."""
        verifier, keys = self._signatures(), self._gate.api_keys
        if verifier is None or keys is None:
            return None
        head = arrival.head
        signature = read_signature(head.headers)
        if signature is None:
            if any(presented_key(header) for header in head.headers):
                return None
            raise missing_authentication(head.target)
        came_s = self._wall_clock()
        claim = verifier.check_head(signature, head.headers, came_s)
        keys.check(claim.key.name)
        body = b""
        if arrival.content is not None or arrival.whole is not None:
            body = arrival.whole = await self._unproven_body(arrival, limits)
        digest = sha256(body).hexdigest() if len(body) <= _HASHED_AT_ONCE_BYTES else await _digest_aside(body)
        latest, keys = self._signatures(), self._gate.api_keys
        if latest is None or keys is None:
            return None
        if latest is not verifier:  # the keys have changed while the body came
            claim = latest.check_head(signature, head.headers, came_s)
        name = latest.verify(claim, head.method, head.origin or head.target, head.headers, digest)
        return keys.enter_as(name, head)

    async def _unproven_body(self, arrival: Arrival, limits: BodyLimits) -> bytes:
        """The body of a request of which only the head has been looked at. Raises as `read_whole` does, and
        TooManyRequestsError where much is being read for others who have proven nothing either."""
        check_length(arrival, limits)
        n_bytes = limits.max_bytes if arrival.length is None else arrival.length
        if arrival.whole is not None or n_bytes <= _UNPROVEN_BYTES:
            n_bytes = 0
        elif self._unproven_bytes + n_bytes > _MAX_UNPROVEN * limits.max_bytes:
            raise TooManyRequestsError("too many large bodies are being read whose senders are not known yet", 1)
        self._unproven_bytes += n_bytes
        try:
            expect_continue(arrival)
            return await read_whole(arrival, limits)
        finally:
            self._unproven_bytes -= n_bytes

    def call(self, head: RequestHead, *, dry: bool = False) -> Call:
        """As `Contract` has it. `dry`: nothing is noted, as nothing will be asked."""
        path, _, query = (head.origin or "/").partition("?")
        if _SIGNING_QUERY in query.lower():
            query = "&".join(part for part in query.split("&") if not part.lower().startswith(_SIGNING_QUERY))
        found = ENDPOINT_PATH.fullmatch(path)
        if found is None:
            raise RequestError("the path must be written plainly: /endpoints/NAME/invocations, without escapes")
        check_endpoint_name(found["endpoint"])
        rng = Random() if dry else self._rng
        query = f"?{query}" if query else ""
        if found["openai"] is not None:
            return self._openai(head, found, query, rng)
        operation = found["operation"]
        if operation not in ("invocations", "invocations-response-stream"):
            raise UnsupportedOperationError(
                f"{operation} is not supported by this router (invocations and invocations-response-stream are)"
            )
        if head.method != "POST":
            raise MethodError("endpoints are invoked with POST", "POST")
        return self._invocation(head, found, query, rng, dry=dry)

    def _openai(self, head: RequestHead, found: re.Match[str], query: str, rng: Random) -> Call:
        endpoint, path = found["endpoint"], found["openai"]
        fields = read_fields(head.headers, streaming=False)
        component = found["component"] or fields.inference_component
        if fields.inference_component not in (None, component):
            raise RequestError("the path and X-Amzn-SageMaker-Inference-Component name two inference components")
        destination = self.endpoints.destination(endpoint, fields.target_variant, component, rng)
        asked = _with(head, path + query, _for_instance(head.headers))
        # Whoever reads it must read the same: servers resolve dots, and signatures are of what is resolved.
        if not _DOTLESS.fullmatch(path) or not f"{asked.path}/".startswith("/v1/"):
            raise RequestError("the path must be written plainly: /endpoints/NAME/openai/v1/…, without '..'")
        prefix = found.string[: found.start("openai")].encode("utf-8", "surrogateescape")
        return Call(asked, destination.group, partial(self._group, endpoint, destination), prefix)

    def _invocation(
        self, head: RequestHead, found: re.Match[str], query: str, rng: Random, *, dry: bool
    ) -> InvocationCall:
        endpoint, streaming = found["endpoint"], found["operation"] != "invocations"
        fields = read_fields(head.headers, streaming=streaming)
        destination, group = self._destination(endpoint, fields, rng, dry=dry)
        # Frames and errors are made of what can be read.
        headers = [header for header in _for_instance(head.headers) if header[0].lower() != b"accept-encoding"]
        if streaming:
            headers = _asking_as_streams_do(headers)
        return InvocationCall(
            _with(head, f"/invocations{query}", headers),
            endpoint,
            destination,
            group,
            # A session's state is nowhere else, whatever the configuration says by then.
            partial(self._group, endpoint, destination) if group is destination.group else lambda: group,
            streaming=streaming,
            sessions=self.sessions,
            fleet=self._fleet,
        )

    def _group(self, endpoint: str, destination: Destination) -> Group | None:
        """Who may take a request now that was for this destination."""
        return self.endpoints.destination(endpoint, destination.variant, destination.component, self._rng).group

    def _destination(
        self, endpoint: str, fields: InvocationFields, rng: Random, *, dry: bool
    ) -> tuple[Destination, Group | None]:
        """Which part of the endpoint, and who of it."""
        variant, component, session = fields.target_variant, fields.inference_component, fields.session_id
        if session is None or session == NEW_SESSION:
            destination = self.endpoints.destination(endpoint, variant, component, rng)
            return destination, destination.group
        home = self.sessions.home(endpoint, session, self._wall_clock(), touch=not dry)
        if home is None or (variant or home.variant, component or home.component) != (home.variant, home.component):
            # An endpoint that is not there is the first thing to be told.
            self.endpoints.destination(endpoint, variant, component, rng)
        else:
            destination = self.endpoints.destination(endpoint, home.variant, home.component, rng)
            group = destination.group or self._whole_fleet
            # The configuration may have given its instance to others meanwhile.
            if group.members is None or home.instance in group.members:
                return destination, group.only(home.instance)
        raise UnknownDestinationError(
            "there is no such session, or it has ended (X-Amzn-SageMaker-Session-Id: NEW_SESSION begins one)"
        )


def _with(head: RequestHead, target: str, headers: RawHeaders) -> RequestHead:
    return RequestHead(head.method, target, head.minor, headers, is_plain=head.is_plain)


def _for_instance(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    kept = []
    for header in headers:
        name = header[0].lower()
        if name not in _CREDENTIALS:
            kept.append(header)
    return kept


def _asking_as_streams_do(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What the client accepts of a container, it says in a header of SageMaker's: its own Accept is for the frames."""
    accepts = [value for name, value in headers if name.lower() == _STREAM_ACCEPT]
    kept = [header for header in headers if header[0].lower() not in (b"accept", _STREAM_ACCEPT)]
    return [*kept, *((b"Accept", value) for value in accepts)]


async def _digest_aside(body: bytes) -> str:
    """In a thread: hashing large bodies lets go of the interpreter."""
    digest = await asyncio.get_running_loop().run_in_executor(None, partial(sha256, body))
    return digest.hexdigest()
