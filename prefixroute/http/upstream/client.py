"""One attempt on one instance: a connection, the request, the head of its answer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from ssl import SSLContext

from prefixroute.core.fleet import Instance
from prefixroute.errors import UpstreamTimeoutError
from prefixroute.http.headers import RawHeaders, first
from prefixroute.http.upstream.answer import Answer, Interim
from prefixroute.http.upstream.link import Link
from prefixroute.http.upstream.place import place_of
from prefixroute.http.upstream.pool import ConnectionLimits, Pool
from prefixroute.http.wire.heads import request_head
from prefixroute.names import Names

# What surely fits in a socket's buffer, so that it is gone when it is written.
_WRITE_ONCE_BYTES = 32_768


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What is sent, as the client sent it. `target`: the request target, starting with a slash.

    `body`: bytes, or what gives a stream once a connection is there (`body_bytes`: its length if known), or None.
    `switches`: headers that ask for another protocol are among `headers`.
    """

    method: str
    target: str
    headers: RawHeaders
    body: bytes | Callable[[], AsyncIterator[bytes]] | None
    body_bytes: int | None = None
    switches: bool = False


class Upstream:
    """Carries attempts to instances. Make it inside the event loop that uses it.

    `api_keys`, `tls` (with the name that certificates are checked against, or None): by instance name. A key is sent
    when the client itself brings no credential.
    """

    def __init__(
        self,
        *,
        first_byte_timeout_s: float | None,
        idle_timeout_s: float | None,
        limits: ConnectionLimits,
        api_keys: Mapping[str, str] | None = None,
        tls: Mapping[str, tuple[SSLContext, str | None]] | None = None,
        names: Names | None = None,
    ) -> None:
        self._names = names or Names()
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._limits = limits
        self._authorizations = _authorizations(api_keys or {})
        self._tls = dict(tls or {})
        self._pools: dict[str, Pool] = {}

    async def send(
        self, instance: Instance, request: UpstreamRequest, *, fresh: bool = False, on_interim: Interim | None = None
    ) -> Answer:
        """Sends and waits for the head of the answer. `fresh`: on a new connection, not a kept one.

        `on_interim`: gets 1xx answers that come before. Raises UpstreamUnreachableError, UpstreamTimeoutError,
        UpstreamBrokenError, and what a streamed body raises.
        """
        pool = self._pool(instance)
        head, body = self._head(pool, instance.name, request), request.body
        kept = None if fresh or request.switches else pool.take()
        link = kept or await pool.connect()
        is_streamed = callable(body)
        waiter = link.ask(
            request.method.encode("ascii"),
            kept=kept is not None,
            has_body=bool(body),
            uploads=is_streamed,
            switches=request.switches,
            on_interim=on_interim,
            idle_timeout_s=self._idle_timeout_s,
        )
        timer = _Limit(link, waiter)
        try:
            if callable(body):
                link.write(head)
                link.keep_spare()
                upload = self._upload(link, body, timer, chunked=request.body_bytes is None)
                link.uploads_by(asyncio.create_task(upload))
            else:
                if body is None:
                    link.write(head)
                elif len(body) <= _WRITE_ONCE_BYTES:
                    link.write(head + body)
                else:
                    link.keep_spare()
                    link.write(head)
                    link.write(body)
                self._await_answer(timer)
            answer = await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # The answer came in the turn in which it was given up. If it is complete, the connection may be
                # another request's by now.
                waiter.result().close()
            else:
                waiter.cancel()
                link.abort()
            raise
        finally:
            timer.stop()
        return answer

    def configure(
        self,
        *,
        first_byte_timeout_s: float | None,
        idle_timeout_s: float | None,
        limits: ConnectionLimits,
        api_keys: Mapping[str, str],
        tls: Mapping[str, tuple[SSLContext, str | None]] | None = None,
    ) -> None:
        """For attempts that begin from now on; those under way keep what they began with."""
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._authorizations = _authorizations(api_keys)
        old_tls, self._tls = self._tls, dict(tls or {})
        for name in old_tls.keys() | self._tls.keys():
            if old_tls.get(name) != self._tls.get(name):
                self.forget(name)  # whom its connections go to may be trusted no longer
        if limits != self._limits:
            self._limits = limits
            self.keep(())

    def keep(self, names: Collection[str]) -> None:
        """Forgets all instances but these."""
        for name in self._pools.keys() - set(names):
            self.forget(name)

    def forget(self, name: str) -> None:
        """The instance is no more: kept connections close now, others after their answers."""
        pool = self._pools.pop(name, None)
        if pool is not None:
            pool.retire()

    async def close(self) -> None:
        """Closes all connections."""
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            await pool.close()

    def _pool(self, instance: Instance) -> Pool:
        name = instance.name
        pool = self._pools.get(name)
        if pool is None or pool.url != instance.url:
            self.forget(name)
            place = place_of(instance.url, *self._tls.get(name, ()))
            pool = self._pools[name] = Pool(name, instance.url, place, self._limits, self._names)
        return pool

    def _head(self, pool: Pool, name: str, request: UpstreamRequest) -> bytes:
        headers, body = request.headers, request.body
        added: list[tuple[bytes, bytes]] = []
        if (
            name in self._authorizations
            # What answers a TRACE sends back all that it was sent (RFC 9110, 9.3.8).
            and request.method != "TRACE"
            and first(headers, b"authorization") is None
            and first(headers, b"x-api-key") is None
            and first(headers, b"api-key") is None
        ):
            added.append((b"Authorization", self._authorizations[name]))
        if isinstance(body, bytes):
            added.append((b"Content-Length", b"%d" % len(body)))
        elif request.body_bytes is not None:
            added.append((b"Content-Length", b"%d" % request.body_bytes))
        elif body is not None:
            added.append((b"Transfer-Encoding", b"chunked"))
        return request_head(
            request.method.encode("ascii"),
            pool.place.base + request.target.encode("utf-8", "surrogateescape"),
            pool.place.authority,
            [*headers, *added] if added else headers,
        )

    async def _upload(
        self, link: Link, body: Callable[[], AsyncIterator[bytes]], limit: "_Limit", *, chunked: bool
    ) -> None:
        """While the client is waited for, the instance's limits do not run."""
        try:
            async for piece in body():
                link.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                if link.is_write_paused:
                    idle_timeout_s = self._idle_timeout_s
                    limit.run(idle_timeout_s, "took nothing of the body for idle_timeout_s ({:g} s)")
                    await link.writable()
                    limit.stop()
            if chunked:
                link.write(b"0\r\n\r\n")
        except Exception as fault:  # noqa: BLE001  it is raised again where the answer is waited for
            # Mostly the client's doing. An answer that is already under way will never be whole, either.
            link.give_up(fault)
            return
        link.uploaded()
        self._await_answer(limit)

    def _await_answer(self, limit: "_Limit") -> None:
        limit.run(self._first_byte_timeout_s, "no answer within first_byte_timeout_s ({:g} s)")


class _Limit:
    """One limit at a time on how long the instance may keep the beginning of its answer waiting."""

    __slots__ = ("_link", "_timer", "_waiter")

    def __init__(self, link: Link, waiter: asyncio.Future[Answer]) -> None:
        self._link = link
        self._waiter = waiter
        self._timer: asyncio.TimerHandle | None = None

    def run(self, seconds: float | None, text: str) -> None:
        """After so long without `stop`, or an answer, the attempt ends with `text`."""
        if seconds is not None and not self._waiter.done():
            self._timer = self._link.loop.call_later(seconds, self._end, text.format(seconds))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, text: str) -> None:
        if not self._waiter.done():
            self._link.give_up(UpstreamTimeoutError(f"{self._link.name}: {text}"))


def _authorizations(api_keys: Mapping[str, str]) -> dict[str, bytes]:
    return {name: b"Bearer " + key.encode("latin-1", "replace") for name, key in api_keys.items()}
