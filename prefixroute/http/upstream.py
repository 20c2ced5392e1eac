"""The upstream side: one attempt on one instance.

`Upstream.send` gives an `Answer` once its head is here. What library carries it, only this module, `answer` and
`aiohttp_client` know; its errors end in them and come out as `UpstreamError`s, which say whether anything was sent and
whether the connection was a reused one.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Protocol

import aiohttp
from yarl import URL

from prefixroute.core.fleet import Instance
from prefixroute.errors import UpstreamBrokenError, UpstreamTimeoutError, UpstreamUnreachableError
from prefixroute.http.aiohttp_client import Attempt, ExactSession, header_text
from prefixroute.http.answer import AiohttpAnswer, Answer, GarbledAnswerError
from prefixroute.http.body import Upload
from prefixroute.http.headers import RawHeaders, first

# Read at most this much of an answer at a time: above it the socket is paused, so a slow client holds little memory.
_READ_BYTES = 65_536

# What surely fits in a socket's buffer.
_WRITE_ONCE_BYTES = 32_768

# aiohttp warns of larger bytes objects, which it would write in one go.
_WRITE_WHOLE_BYTES = 1_048_576


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What is sent, as the client sent it. `target`: the request target, starting with a slash.

    `body`: bytes, or what gives a stream once a connection is there (`body_bytes`: its length if known), or None.
    """

    method: str
    target: str
    headers: RawHeaders
    body: bytes | Callable[[], AsyncIterator[bytes]] | None
    body_bytes: int | None = None


class Upstream(Protocol):
    """Carries attempts to instances."""

    async def send(self, instance: Instance, request: UpstreamRequest, *, fresh: bool = False) -> Answer:
        """Sends and waits for the head of the answer. `fresh`: on a new connection, not a kept one.

        Raises UpstreamUnreachableError, UpstreamTimeoutError, UpstreamBrokenError, and what a streamed body raises.
        """
        ...

    async def close(self) -> None:
        """Closes kept connections."""
        ...


class AiohttpUpstream:
    """`Upstream` over aiohttp's client. Make it inside the event loop that uses it."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        first_byte_timeout_s: float | None,
        idle_timeout_s: float | None,
        keepalive_s: float,
        max_header_bytes: int = 65_536,
        api_keys: dict[str, str] | None = None,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        # By instance name: sent when the client itself brings no credential.
        self._authorizations = {name: f"Bearer {key}" for name, key in (api_keys or {}).items()}

        def session(**pool: Any) -> ExactSession:
            return ExactSession(
                connect_timeout_s=connect_timeout_s, max_header_bytes=max_header_bytes, read_bytes=_READ_BYTES, **pool
            )

        # Idle connections are dropped before servers drop them (uvicorn and llama.cpp: after 5 s).
        self._kept = session(keepalive_timeout=keepalive_s)
        self._fresh = session(force_close=True)

    async def send(self, instance: Instance, request: UpstreamRequest, *, fresh: bool = False) -> AiohttpAnswer:
        name = instance.name
        body: Any = request.body
        is_large = callable(body) or (body is not None and len(body) > _WRITE_ONCE_BYTES)
        attempt = Attempt(self._headers(name, request), is_large=is_large)
        limit = asyncio.timeout(self._first_byte_timeout_s)
        upload: Upload | None = None
        if callable(body):
            upload = Upload(body, limit, self._first_byte_timeout_s, self._idle_timeout_s)
            body = upload.pieces()
        elif body is not None and len(body) > _WRITE_WHOLE_BYTES:
            body = BytesIO(body)
        url = URL(instance.url + request.target, encoded=True)
        try:
            async with limit:
                response = await (self._fresh if fresh else self._kept).request(attempt, request.method, url, body)
        except aiohttp.ConnectionTimeoutError as error:
            raise UpstreamUnreachableError(
                f"{name}: no connection within connect_timeout_s ({self._connect_timeout_s:g} s)", timed_out=True
            ) from error
        except TimeoutError as error:
            if not limit.expired():
                raise _lost(name, attempt, error) from error
            if upload is not None and upload.is_handing_over:
                text = f"took nothing of the body for idle_timeout_s ({self._idle_timeout_s:g} s)"
            else:
                text = f"no answer within first_byte_timeout_s ({self._first_byte_timeout_s:g} s)"
            raise UpstreamTimeoutError(f"{name}: {text}") from error
        except aiohttp.ClientConnectorError as error:
            raise UpstreamUnreachableError(f"{name}: {_cause(error)}") from error
        except (aiohttp.ClientError, OSError) as error:
            if upload is not None and upload.fault is not None:
                raise upload.fault from error
            raise _lost(name, attempt, error) from error
        finally:
            if upload is not None:
                upload.is_limited = False
        answer = AiohttpAnswer(name, attempt, response, self._idle_timeout_s)
        answer.check()
        return answer

    def _headers(self, name: str, request: UpstreamRequest) -> list[tuple[str, str]]:
        headers = [(header_text(key), header_text(value)) for key, value in request.headers]
        if (
            name in self._authorizations
            and first(request.headers, b"authorization") is None
            and first(request.headers, b"x-api-key") is None
        ):
            headers.append(("Authorization", self._authorizations[name]))
        if request.body_bytes is not None:
            headers.append(("Content-Length", str(request.body_bytes)))
        return headers

    async def close(self) -> None:
        await self._kept.close()
        await self._fresh.close()


def _lost(name: str, attempt: Attempt, error: Exception) -> UpstreamBrokenError:
    link = attempt.link
    if link is not None and link.heard:
        return GarbledAnswerError(f"{name}: the head of the answer broke off or is malformed ({type(error).__name__})")
    return UpstreamBrokenError(
        f"{name}: connection lost before an answer ({type(error).__name__})",
        reused=link is not None and link.n_requests > 1,
    )


def _cause(error: aiohttp.ClientConnectorError) -> str:
    # The error's own text holds the address, which is no client's business; the operating system's word is enough.
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate was refused ({getattr(error.certificate_error, 'verify_message', 'wrong name')})"
    fault = error.os_error
    if isinstance(fault, ssl.SSLError):
        return f"no TLS ({fault.reason})"
    if isinstance(fault, socket.gaierror) or not fault.errno:
        return fault.strerror or type(fault).__name__
    return os.strerror(fault.errno)
