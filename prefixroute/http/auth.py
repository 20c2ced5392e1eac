"""Who may use the data port, how much of it, and the token of the admin port.

Of the keys that are known only digests are held. A head costs a pass over its headers, a hash and one look into a
dictionary; which of several keys it brings, or how near a wrong one comes, makes no difference in time. Where a
connection sends the same head again, what was found out is kept with it, until there are other keys. A key of ours is
taken out of the headers: it is nobody's business upstream.
"""

import hmac
import secrets
from collections.abc import Callable, Sequence
from math import ceil
from typing import NamedTuple

from prefixroute.config.access_keys import AccessKey
from prefixroute.config.api_keys import ApiKey, digest_of
from prefixroute.errors import TooManyRequestsError, UnauthorizedError, n_requests
from prefixroute.http.arrival import RequestHead
from prefixroute.http.cors import Cors
from prefixroute.http.headers import CREDENTIALS, RawHeaders

# The other one has a scheme in front of the key.
_PLAIN = CREDENTIALS - {b"authorization"}
_LENGTHS = frozenset(map(len, CREDENTIALS))
# How much the last request says about how long the next one takes.
_NEWEST = 0.2
_LONGEST_RETRY_AFTER_S = 60


class KeyLimitError(TooManyRequestsError):
    """The key has as many requests under way, or had as many lately, as it may. `key`: its name."""

    code = "key_limit_exceeded"

    def __init__(self, message: str, retry_after_s: int, key: str) -> None:
        super().__init__(message, retry_after_s)
        self.key = key


class Caller:
    """What one name of the key file may do, and does. It outlives a reload of the file."""

    __slots__ = (
        *("_mean_s", "_refilled_s", "_tokens"),
        *("in_flight", "max_in_flight", "name", "requests_per_minute", "tenant"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.tenant = digest_of(name.encode("ascii"))
        self.max_in_flight: int | None = None
        self.requests_per_minute: int | None = None
        self.in_flight = 0
        # Full at first, whatever the limit comes to be.
        self._tokens = float("inf")
        self._refilled_s = 0.0
        self._mean_s = 1.0

    def check(self, now_s: float) -> None:
        """Whether a request might begin. Raises KeyLimitError as `take` would, and takes nothing."""
        tokens, refilled_s = self._tokens, self._refilled_s
        try:
            self.take(now_s)
        finally:
            self._tokens, self._refilled_s = tokens, refilled_s
        self.in_flight -= 1

    def take(self, now_s: float) -> None:
        """A request begins. Raises KeyLimitError, and then nothing was taken."""
        if self.max_in_flight is not None and self.in_flight >= self.max_in_flight:
            # Requests that take this long each, so many at a time, end this often.
            wait_s = min(self._mean_s / self.in_flight, _LONGEST_RETRY_AFTER_S)
            raise KeyLimitError(
                f"this key has {n_requests(self.max_in_flight)} under way, its limit", ceil(wait_s), self.name
            )
        limit = self.requests_per_minute
        if limit is not None:
            # A minute's worth at once, then as fast as they come back.
            tokens = min(self._tokens + (now_s - self._refilled_s) * limit / 60, float(limit))
            self._refilled_s = now_s
            self._tokens = tokens
            if tokens < 1:
                wait_s = (1 - tokens) * 60 / limit
                raise KeyLimitError(f"this key may send {n_requests(limit)} in a minute", ceil(wait_s), self.name)
            self._tokens = tokens - 1
        self.in_flight += 1

    def give_back(self, duration_s: float) -> None:
        """The request is over."""
        self.in_flight -= 1
        self._mean_s += (duration_s - self._mean_s) * _NEWEST


class Visit:
    """One request that may be served. `leave` it in the end, whatever happens.

    `head`: of the request, without keys of ours.
    """

    __slots__ = ("_caller", "_since_s", "head")

    def __init__(self, caller: Caller, head: RequestHead, now_s: float) -> None:
        self._caller = caller
        self._since_s = now_s
        self.head = head

    @property
    def name(self) -> str:
        """Of the key."""
        return self._caller.name

    @property
    def tenant(self) -> bytes:
        """What keeps its caller's prompts apart from others'."""
        return self._caller.tenant

    def leave(self, now_s: float) -> None:
        self._caller.give_back(now_s - self._since_s)


class _Admitted(NamedTuple):
    """Whose key a head brings, by which edition of the keys, and the head without it."""

    edition: int
    caller: Caller
    head: RequestHead


class ApiKeys:
    """The keys that requests may come with: none at all until `use`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._callers: dict[str, Caller] = {}
        self._by_digest: dict[bytes, tuple[bytes, Caller]] = {}
        self._edition = 0
        # Compared with where there is nothing to compare with.
        self._nobody = (secrets.token_bytes(32), Caller(""))

    def use(
        self,
        keys: Sequence[ApiKey],
        access_keys: Sequence[AccessKey] = (),
        *,
        max_in_flight: int | None = None,
        requests_per_minute: int | None = None,
    ) -> None:
        """These keys from now on, and no others; the limits are for those that have none of their own.

        `access_keys`: who has one comes in by `enter_as` only.

        Requests under way go on. Callers whose name was there keep what they have used of their limits.
        """
        callers: dict[str, Caller] = {}
        by_digest: dict[bytes, tuple[bytes, Caller]] = {}
        every: Sequence[ApiKey | AccessKey] = (*keys, *access_keys)
        for key in every:
            caller = callers.setdefault(key.name, self._callers.get(key.name) or Caller(key.name))
            caller.max_in_flight = max_in_flight if key.max_in_flight is None else key.max_in_flight
            own = key.requests_per_minute
            caller.requests_per_minute = requests_per_minute if own is None else own
            if isinstance(key, ApiKey):
                by_digest[key.digest] = key.digest, caller
        # Who has requests under way may be back with the next reload.
        gone = {name: caller for name, caller in self._callers.items() if name not in callers and caller.in_flight}
        self._callers, self._by_digest = gone | callers, by_digest
        self._edition += 1

    def enter(self, head: RequestHead) -> Visit:
        """A request comes. Raises UnauthorizedError, KeyLimitError."""
        admitted = head.admitted
        # Found out once for a head, and again when there are other keys.
        if not isinstance(admitted, _Admitted) or admitted.edition != self._edition:
            admitted = head.admitted = self._admit(head)
        now_s = self._clock()
        admitted.caller.take(now_s)
        return Visit(admitted.caller, admitted.head, now_s)

    def _admit(self, head: RequestHead) -> "_Admitted":
        caller, kept = self._sorted(head)
        if caller is None:
            raise UnauthorizedError("a valid API key is required (Authorization: Bearer KEY, or x-api-key: KEY)")
        return _Admitted(self._edition, caller, head.without(kept))

    def _sorted(self, head: RequestHead) -> tuple[Caller | None, list[tuple[bytes, bytes]]]:
        """Whose key a head brings, if it does, and its headers without keys of ours."""
        kept = []
        caller = None
        for header in head.headers:
            found = None
            # Nearly all headers are of another length, which is less work to see.
            if len(header[0]) in _LENGTHS and (key := presented_key(header)) is not None:
                found = self._find(key)
            if found is None:
                kept.append(header)
            elif caller is None:
                caller = found
        return caller, kept

    def check(self, name: str) -> None:
        """Whether a caller's request might come, before it has proven that it is his. Raises KeyLimitError."""
        caller = self._callers.get(name)
        if caller is not None:
            caller.check(self._clock())

    def enter_as(self, name: str, head: RequestHead) -> Visit:
        """A request comes whose caller has been found out. Raises UnauthorizedError, KeyLimitError."""
        caller = self._callers.get(name)
        if caller is None:
            raise UnauthorizedError("this key is valid no longer")
        now_s = self._clock()
        caller.take(now_s)
        _, kept = self._sorted(head)
        return Visit(caller, head if len(kept) == len(head.headers) else head.without(kept), now_s)

    def in_flight(self, name: str) -> int:
        """Requests under way by keys of this name."""
        caller = self._callers.get(name)
        return 0 if caller is None else caller.in_flight

    def _find(self, key: bytes) -> Caller | None:
        digest = digest_of(key)
        # The dictionary hashes digests with a secret of the process, so its time tells nothing about them either.
        known, caller = self._by_digest.get(digest, self._nobody)
        return caller if hmac.compare_digest(known, digest) else None


class Gate:
    """What stands before the data port. Each of it may be replaced at any time; the next request meets the new."""

    __slots__ = ("api_keys", "cors", "isolates")

    def __init__(self, api_keys: ApiKeys | None = None, cors: Cors | None = None, *, isolates: bool = False) -> None:
        self.api_keys = api_keys
        """One of them is needed; None: anyone is served."""
        self.cors = cors
        """None leaves to instances what web pages may do."""
        self.isolates = isolates
        """Whether prompts of different keys match each other never."""


class AdminToken:
    """The one token of the admin port."""

    def __init__(self, token: str | None = None) -> None:
        """None: nobody needs one."""
        self._digest: bytes | None = None
        self.use(token)

    def use(self, token: str | None) -> None:
        """This one from now on."""
        self._digest = None if token is None else digest_of(token.encode("ascii"))

    def admits(self, headers: RawHeaders) -> bool:
        """Whether who sends these may see and do everything."""
        wanted = self._digest
        keys = map(presented_key, headers)
        return wanted is None or any(key is not None and hmac.compare_digest(digest_of(key), wanted) for key in keys)


def tenant_of(headers: RawHeaders) -> bytes:
    """What keeps callers apart whose keys the instances check: a digest of the key that is brought; empty for none."""
    for header in headers:
        key = presented_key(header)
        if key is not None:
            return digest_of(key)
    return b""


def presented_key(header: tuple[bytes, bytes]) -> bytes | None:
    """The key in a header; None when it is none that brings one."""
    name = header[0].lower()
    if name in _PLAIN:
        return header[1].strip() or None
    if name != b"authorization":
        return None
    words = header[1].split(None, 1)  # by any white space
    return words[1].strip() if len(words) > 1 and words[0].lower() == b"bearer" else None
