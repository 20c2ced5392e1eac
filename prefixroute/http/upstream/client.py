"""One attempt on one instance: a connection, the request, the head of its answer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from ssl import SSLContext
from weakref import WeakSet

from prefixroute.core.fleet import Instance
from prefixroute.http.upstream.answer import Answer, Interim
from prefixroute.http.upstream.link import Link
from prefixroute.http.upstream.place import place_of
from prefixroute.http.upstream.pool import ConnectionLimits, Pool
from prefixroute.http.upstream.request import UpstreamRequest
from prefixroute.names import Names

# Above this, copying a body behind its head costs more than writing the two of them from where they are.
_JOIN_BYTES = 16_384


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
        gone_timeout_s: float | None = None,
        limits: ConnectionLimits,
        api_keys: Mapping[str, str] | None = None,
        tls: Mapping[str, tuple[SSLContext, str | None]] | None = None,
        names: Names | None = None,
    ) -> None:
        self._names = names or Names()
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._gone_timeout_s = gone_timeout_s
        self._limits = limits
        self._authorizations = _authorizations(api_keys or {})
        self._tls = dict(tls or {})
        self._pools: dict[str, Pool] = {}
        # Whose answers still go on, by instance name.
        self._retired: dict[str, WeakSet[Pool]] = {}

    async def send(
        self, instance: Instance, request: UpstreamRequest, *, fresh: bool = False, on_interim: Interim | None = None
    ) -> Answer:
        """Sends and waits for the head of the answer. `fresh`: on a new connection, not a kept one.

        `on_interim`: gets 1xx answers that come before. Raises UpstreamUnreachableError, UpstreamTimeoutError,
        UpstreamBrokenError, and what a streamed body raises.
        """
        pool = self._pool(instance)
        body = request.body
        kept = None if fresh or request.switches else pool.take()
        link = kept or await pool.connect()
        waiter = link.ask(request, kept is not None, on_interim, self._idle_timeout_s)
        try:
            if callable(body):
                link.sending.write(self._head(pool, request))
                link.sending.keep_spare()
                upload = self._upload(link, body, chunked=request.body_bytes is None)
                link.uploads_by(asyncio.create_task(upload))
            else:
                if body is None or len(body) <= _JOIN_BYTES:
                    link.sending.write(self._head(pool, request, body or b""))
                else:
                    link.sending.write_large(self._head(pool, request), body)
                if self._first_byte_timeout_s is not None:
                    self._await_answer(link)
            return await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # The answer came in the turn in which it was given up. If it is complete, the connection may be
                # another request's by now.
                waiter.result().close()
            else:
                waiter.cancel()
                link.abort()
            raise

    def configure(
        self,
        *,
        first_byte_timeout_s: float | None,
        idle_timeout_s: float | None,
        gone_timeout_s: float | None = None,
        limits: ConnectionLimits,
        api_keys: Mapping[str, str],
        tls: Mapping[str, tuple[SSLContext, str | None]] | None = None,
    ) -> None:
        """For attempts that begin from now on; those under way keep what they began with."""
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._gone_timeout_s = gone_timeout_s
        self._authorizations = _authorizations(api_keys)
        old_tls, self._tls = self._tls, dict(tls or {})
        for name in old_tls.keys() | self._tls.keys():
            if old_tls.get(name) != self._tls.get(name):
                self.forget(name)  # whom its connections go to may be trusted no longer
        if limits != self._limits:
            self._limits = limits
            self.keep(())

    def told(self, name: str, *, listens: bool) -> None:
        """Whether something listens at the instance's address; if not, its answers under way must be heard of."""
        pool = self._pools.get(name)
        pools = [*self._retired.get(name, ()), *(() if pool is None else (pool,))]
        for one in pools:
            one.doubt(None if listens else self._gone_timeout_s)

    def keep(self, names: Collection[str]) -> None:
        """Forgets all instances but these."""
        for name in self._pools.keys() - set(names):
            self.forget(name)

    def forget(self, name: str) -> None:
        """The instance is no more: kept connections close now, others after their answers."""
        pool = self._pools.pop(name, None)
        if pool is not None:
            pool.retire()
            self._retired = {old: pools for old, pools in self._retired.items() if pools}
            self._retired.setdefault(name, WeakSet()).add(pool)

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

    def _head(self, pool: Pool, request: UpstreamRequest, body: bytes = b"") -> bytes:
        """A request's head, its fields in their order behind Host, and what is written with it."""
        place = pool.place
        method = request.method
        authorization = b""
        # What answers a TRACE sends back all that it was sent (RFC 9110, 9.3.8).
        if not request.has_credentials and method != b"TRACE":
            authorization = self._authorizations.get(pool.name, b"")
        return b"".join(
            (
                method,
                b" ",
                place.base,
                request.target,
                b" HTTP/1.1\r\nHost: ",
                place.authority,
                b"\r\n",
                request.fields,
                authorization,
                request.framing(),
                b"\r\n",
                body,
            )
        )

    async def _upload(self, link: Link, body: Callable[[], AsyncIterator[bytes]], *, chunked: bool) -> None:
        """While the client is waited for, the instance's limits do not run."""
        try:
            async for piece in body():
                link.sending.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                if link.sending.is_paused:
                    link.await_head(self._idle_timeout_s, "took nothing of the body for idle_timeout_s ({:g} s)")
                    await link.sending.writable()
                    link.await_head(None)
            if chunked:
                link.sending.write(b"0\r\n\r\n")
        except Exception as fault:  # noqa: BLE001  it is raised again where the answer is waited for
            # Mostly the client's doing. An answer that is already under way will never be whole, either.
            link.give_up(fault)
            return
        link.uploaded()
        self._await_answer(link)

    def _await_answer(self, link: Link) -> None:
        link.await_head(self._first_byte_timeout_s, "no answer within first_byte_timeout_s ({:g} s)")


def _authorizations(api_keys: Mapping[str, str]) -> dict[str, bytes]:
    return {name: b"Authorization: Bearer %s\r\n" % key.encode("latin-1", "replace") for name, key in api_keys.items()}
