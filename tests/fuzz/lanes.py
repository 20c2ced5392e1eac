"""The same bytes at both lanes: the same requests go on, the same answers come back, the same is written down.

Each case goes to a router with `lane: auto` and to one with `lane: aiohttp`, side by side. They are alike otherwise,
have an instance each that answers by what it is asked, and one clock, which stands still during a case: times are not
compared. No difference is allowed. What can be none is taken out before: request ids that the routers make up, and
Date, which is the wall clock's. Three things have several right outcomes on either lane, and each of them is allowed:
requests that come together (`_apart`), a connection that ends with an earlier answer while pieces are still arriving
(`_has_ended_early`), and how much of a refused body had come by then. Between two cases nothing is kept that could make
the next one differ, so that cases stand alone.

Clients are connected by socket pairs. What one has sent is there at the next turn of the loop, and how much of it was
read can be asked, so that both lanes see the same pieces, and it can be told when neither will do more. A client's
resets are not among what can be had that way: `requests` has them.
"""

import asyncio
import fcntl
import re
import socket
import sys
import tempfile
import termios
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from prefixroute.background import background
from prefixroute.config import Settings
from prefixroute.http.front import ClientLimits, FrontServer
from prefixroute.http.front.plain import read_plain
from prefixroute.parts import Parts
from prefixroute.record import Outcome, RequestRecord
from tests.fuzz import lane_seeds, seeds
from tests.fuzz.case import Case, Ending, Finding
from tests.fuzz.targets import Target
from tests.fuzz.watch import PATIENCE_S, Watch, wait_until
from tests.fuzz.wire import request_bytes

LANES = ("auto", "aiohttp")
# Turns of the loop without any change after which nothing moves any more: the longest chain of callbacks between two
# changes that can be seen is about half as long.
_QUIET_TURNS = 12
_PAUSE_S = 0.005
_GENERATED_ID = re.compile(rb"(x-request-id: )([0-9a-f]{32})(?=\r\n)", re.IGNORECASE)
_DATE = re.compile(rb"(?<=\r\nDate: )[^\r\n]*")

_CLOSE = re.compile(rb"Connection: close\r\n")


class _Seen(NamedTuple):
    """What must be the same on both lanes."""

    answer: bytes
    end: str | bool
    """Of the connection."""
    requests: list[bytes]
    """As they arrived at the instance."""
    records: list[tuple[Any, ...]]
    refused: list[str]
    """Causes of what was no request."""


class _Pace(Enum):
    """How the pieces of a case follow each other."""

    SETTLED = 0
    """The next one when nothing moves any more: requests are answered, if they are complete."""
    NEXT_TURN = 1
    """One a turn of the loop, so that they meet requests under way."""
    AT_ONCE = 2


def _pace_of(case: Case) -> _Pace:
    return _Pace(case.pick // 2 % len(_Pace))


class LanesTarget:
    """Bytes as a client sends them, to routers that serve everybody, and to guarded ones: keys, CORS, told decisions.

    Of a client that leaves while something still moves, no two runs are alike: then it is only looked whether all is
    given back.
    """

    corpus = lane_seeds.CORPUS
    words = lane_seeds.WORDS

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._watch = Watch()
        # One case at a time: the clock is everybody's, and what arrives has no name.
        self._lock = asyncio.Lock()
        self._now_s = 1_000.0
        self._pairs: list[list[_Lane]] = []
        self.taken: Counter[str] = Counter()
        """Requests by the lane that took them."""

    async def __aenter__(self) -> Self:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        keys = folder / "keys"
        keys.write_bytes(lane_seeds.KEYS_FILE)
        keys.chmod(0o600)
        guarded: dict[str, Any] = {
            "listen": {
                "port": 0,
                "api_keys_file": str(keys),
                "cors": {"allow_origins": [lane_seeds.ORIGIN.decode()], "allow_credentials": True},
            },
            "response_headers": True,
            "routing": {"isolate_by": "api_key"},
        }
        for number, tables in enumerate(({}, guarded)):
            pair = [
                _Lane(name, folder / f"{number}-{name}.sock", lambda: self._now_s, self.taken, tables) for name in LANES
            ]
            self._pairs.append(pair)
            for lane in pair:
                await lane.open(self._stack)
        await self._stack.enter_async_context(self._watch)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def run(self, case: Case) -> None:
        async with self._lock:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._run(case)
            except TimeoutError:
                raise Finding("the connection neither ends nor rests") from None

    async def rest(self) -> None:
        async with self._lock:
            for pair in self._pairs:
                for lane in pair:
                    lane.check_leases()
        await self._watch.wait_rest()

    async def _run(self, case: Case) -> None:
        fast, full = self._pairs[case.pick % 2]
        is_hasty = case.pick // 6 % 8 == 7 and case.ending is not Ending.STAY
        difference = None
        for is_patient in (False, True):
            seen, expected = await self._play([fast, full], case, case.pieces, _pace_of(case), is_hasty, is_patient)
            difference = None if is_hasty else _difference(seen, expected)
            for pieces in _apart(case):
                if difference is None:
                    break
                (expected,) = await self._play([full], case, pieces, _Pace.SETTLED, is_hasty, is_patient)
                if _difference(seen, expected) is None or _has_ended_early(seen, expected, case):
                    difference = None
            if difference is None:
                break
        if difference is not None:
            raise Finding(difference)
        self._watch.check()

    async def _play(
        self,
        lanes: Sequence["_Lane"],
        case: Case,
        pieces: Sequence[bytes],
        pace: _Pace,
        is_hasty: bool,
        is_patient: bool,
    ) -> list[list[_Seen]]:
        """What was seen of each of the lanes: while the client listens, and when it has gone."""
        self._now_s += 1.0
        stages = []
        for lane in lanes:
            await lane.connect()
        try:
            for piece in pieces:
                for lane in lanes:
                    lane.client.send(piece)
                match pace:
                    case _Pace.SETTLED:
                        await _settle(lanes, is_patient)
                    case _Pace.NEXT_TURN:
                        await _turn(lanes)
                    case _Pace.AT_ONCE:
                        pass
            if not is_hasty:
                await _settle(lanes, is_patient)
            stages.append([lane.seen(case) for lane in lanes])
            if case.ending is Ending.HALF_CLOSE:
                for lane in lanes:
                    lane.client.half_close()
                if not is_hasty:
                    await _settle(lanes, is_patient)
                stages.append([lane.seen(case) for lane in lanes])
        finally:
            for lane in lanes:
                lane.client.close()
        for lane in lanes:
            await lane.wait_idle()
        await _settle(lanes, is_patient)
        for lane in lanes:
            if lane.violations:
                raise Finding(f"passed on by {lane.name}: {lane.violations.pop()}")
        stages.append([lane.seen(case) for lane in lanes])
        return [list(seen) for seen in zip(*stages, strict=True)]


def _apart(case: Case) -> list[list[bytes]]:
    """Other pieces of the same bytes, between which plain requests end: as the fast lane reads them, one by one.

    What aiohttp's parser makes of requests depends on what comes in one piece with them. Behind it may be what cannot
    be read, and then the requests before are lost; or trailers (`parser_gaps`), and the connection ends with the first
    answer. So the fast lane is also right where it does what the full one would do, were they sent one by one.
    """
    found = []
    for pieces in (case.pieces, [case.data]):
        cuts = []
        at = end = 0
        for piece in pieces:
            # Who has the rest of a piece is asked again at the next one's beginning.
            at = max(at, end)
            end += len(piece)
            cuts.append(end)
            while at < end and (plain := read_plain(case.data[at:end], lane_seeds.MAX_HEADER_BYTES)) is not None:
                _, _, n_head, n_body = plain[0]
                if n_body > lane_seeds.MAX_BODY_BYTES:
                    break
                at += n_head + n_body
                cuts.append(at)
        found.append(Case(case.data, tuple(cut for cut in cuts if cut < len(case.data))).pieces)
    return found


def _difference(ours: Sequence[_Seen], theirs: Sequence[_Seen]) -> str | None:
    """What is not the same in both, in short."""
    for here, there in zip(ours, theirs, strict=True):
        for what, one, other in zip(_Seen._fields, here, there, strict=True):
            if one != other:
                return f"another {what}: {LANES[0]} {_near(one, other)!r}, {LANES[1]} {_near(other, one)!r}"
    return None


def _has_ended_early(ours: Sequence[_Seen], theirs: Sequence[_Seen], case: Case) -> bool:
    """Whether ours are the same, but for an end after fewer answers, of which the last says so.

    Where trailers or a declined offer have come, the connection ends with the answer that is next, whatever has come
    before them: which one that is, is a matter of turns.
    """
    if _pace_of(case) is _Pace.SETTLED:
        return False
    for here, there in zip(ours, theirs, strict=True):
        n = len(here.records)
        *_, last = (b"", *here.answer.split(b"HTTP/1.1 "))
        if not (
            here.end
            and _CLOSE.search(last)
            and _CLOSE.sub(b"", there.answer).startswith(_CLOSE.sub(b"", here.answer))
            and there.requests[: len(here.requests)] == here.requests
            and there.records[:n] == here.records
            and n < len(there.records)
            and not here.refused
        ):
            return False
    return True


def _near(one: Any, other: Any) -> Any:
    """Of bytes, those around the first difference."""
    if not isinstance(one, bytes):
        return one
    at = max(next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one)) - 40, 0)
    return one[at : at + 160]


async def _turn(lanes: Sequence["_Lane"], pause_s: float = 0.0) -> None:
    await asyncio.sleep(pause_s)
    for lane in lanes:
        lane.client.pump()


async def _settle(lanes: Sequence["_Lane"], is_patient: bool) -> None:
    """Until nothing moves any more. `is_patient`: in case the machine is so busy that turns are too short for it."""
    n_quiet = 0
    before: list[tuple[Any, ...]] = []
    while n_quiet < _QUIET_TURNS:
        await _turn(lanes, _PAUSE_S if is_patient else 0.0)
        now = [lane.progress() for lane in lanes]
        n_quiet = n_quiet + 1 if now == before else 0
        before = now


class _Client:
    """One end of a socket pair, looked at once a turn. Reads all that comes."""

    def __init__(self, raw: socket.socket) -> None:
        self._raw = raw
        self._unsent = b""
        self.is_closed = False
        self.said = b""
        """What the router has answered."""
        self.ended = "no"

    def send(self, data: bytes) -> None:
        self._unsent += data
        self.pump()

    def half_close(self) -> None:
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.is_closed = True
        self._raw.close()

    def pump(self) -> None:
        if self.is_closed:
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[self._raw.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""
        try:
            while self.ended == "no":
                data = self._raw.recv(65_536)
                self.said += data
                if not data:
                    self.ended = "yes"
        except BlockingIOError:
            pass
        except ConnectionError:
            # It left bytes of ours unread, which is a reset where it is no socket pair, and may overtake an answer.
            self.ended = "reset"

    def n_unread(self) -> int:
        """Bytes that the router has not read."""
        if self.is_closed:
            return 0
        count = fcntl.ioctl(self._raw, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(count, sys.byteorder) + len(self._unsent)


class _Lane:
    """A router on one lane, in front of an instance, with one client at a time. What came of it is `seen`."""

    def __init__(
        self, name: str, path: Path, clock: Callable[[], float], taken: Counter[str], tables: Mapping[str, Any]
    ) -> None:
        """`taken`: requests are counted there by lane."""
        self.name = name
        self._taken = taken
        self.violations: list[str] = []
        self.n_moves = 0
        """Of the instance: whatever it is told, and says."""
        self.arrived: list[bytes] = []
        self.client: _Client
        self._records: list[RequestRecord] = []
        self._unread: list[str] = []
        self._path = path
        limits = {"max_body_bytes": lane_seeds.MAX_BODY_BYTES, "max_header_bytes": lane_seeds.MAX_HEADER_BYTES}
        settings = Settings.model_validate(
            {
                "fleet": {
                    "instances": [{"url": f"unix:{path}", "name": "gpu"}],
                    "health": {"interval_s": 3600.0},
                },
                # Connections to the instance close soon, so that what stays open is a leak.
                "upstream": {"keepalive_s": 0.05},
                **tables,
                "limits": {**limits, "wait_for_instance_s": 0.0},
                "lane": name,
            }
        )
        self._parts = Parts(settings, {}, clock, on_record=self._note, on_served=None)
        self._front = FrontServer(
            self._parts.proxy.handle,
            ClientLimits(lane_seeds.MAX_HEADER_BYTES),
            self._unread.append,
            max_fast_bytes=lambda: lane_seeds.MAX_BODY_BYTES if settings.lane == "auto" else 0,
        )

    async def open(self, stack: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: _Instance(self), str(self._path))
        stack.callback(server.close)
        stack.push_async_callback(self._parts.upstream.close)
        stack.push_async_callback(self._front.shutdown, 0.0)
        await stack.enter_async_context(background(self._parts.prober.run(), "prober"))
        await wait_until(self._is_up, lambda: "the instance is not up")
        await asyncio.sleep(0.05)  # the prober's last question

    async def connect(self) -> None:
        for seen in (self._records, self._unread, self.arrived, self.violations):
            seen.clear()
        ours, its = socket.socketpair()
        ours.setblocking(False)
        self.client = _Client(ours)
        await asyncio.get_running_loop().connect_accepted_socket(self._front, its)

    async def wait_idle(self) -> None:
        """Until no connection is left, nor a request under way."""
        for _ in range(200):
            if self._is_idle():
                return
            await asyncio.sleep(0)
        await wait_until(self._is_idle, lambda: f"{self.name}: requests stay under way")

    def _note(self, record: RequestRecord) -> None:
        self._records.append(record)
        self._taken[record.lane] += 1

    def progress(self) -> tuple[Any, ...]:
        """What changes while something moves."""
        client, active = self.client, self._parts.proxy.n_active
        return (len(client.said), client.ended, client.n_unread(), self.n_moves, active, len(self._records))

    def seen(self, case: Case) -> _Seen:
        def known(data: bytes) -> bytes:
            return _GENERATED_ID.sub(lambda one: one[0] if one[2] in case.data else one[1] + b"*", data)

        end = self.client.ended
        return _Seen(
            answer=_DATE.sub(b"*", known(self.client.said)),
            # Who sends all the while may do so just when the connection closes.
            end=end if _pace_of(case) is _Pace.SETTLED else end != "no",
            requests=[known(one) for one in self.arrived],
            records=[_facts(record, case) for record in self._records],
            refused=list(self._unread),
        )

    def check_leases(self) -> None:
        for one in self._parts.router.fleet.instances:
            load = self._parts.router.load.of(one.slot)
            if (load.in_flight, load.in_flight_tokens, load.pending_work) != (0, 0, 0.0):
                raise Finding(f"{self.name}: a lease was not given back: {load.in_flight} in flight")
        if not self._is_up():
            raise Finding(f"{self.name}: the instance is out, and most cases say nothing")

    def _is_up(self) -> bool:
        return all(state.state.value == "up" for state in self._parts.router.fleet.states())

    def _is_idle(self) -> bool:
        return not self._front.transports() and not self._parts.proxy.n_active


def _facts(record: RequestRecord, case: Case) -> tuple[Any, ...]:
    """All of a record but its lane and its times: metrics and the access log are made of it."""
    name = record.request_id
    # Of a refused body, as much as had come: one turn more or less, when it comes all the while.
    is_chance = record.outcome is Outcome.REFUSED and _pace_of(case) is not _Pace.SETTLED
    return (
        name if name.encode() in case.data else "*",
        *(record.method, record.route, record.model, record.outcome.value, record.status, record.error, record.key),
        *(
            record.streamed,
            not is_chance and record.body_bytes,
            record.answer_bytes,
            record.upstream,
            record.reason and record.reason.value,
        ),
        *(record.prompt_tokens, record.matched_tokens, record.cached_tokens, record.reported_prompt_tokens),
        *(record.completion_tokens, record.n_events, record.no_key and record.no_key.value),
        *(record.ttft_s is None, record.decision_s is None, len(record.decisions)),
        *(attempt.value for attempt in record.attempts),
    )


_SILENT = b""
_ANSWERS = (
    *(seeds.ANSWERS[i] for i in (0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12, 13, 14)),
    b"HTTP/1.1 200 OK\r\nX-Request-Id: the-instance's\r\nAccess-Control-Allow-Origin: *\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbrok",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbrok\r\n",
    _SILENT,
)


class _Instance(asyncio.Protocol):
    """Notes what it is asked, byte for byte, and answers in pieces over some turns. Which answer: by a checksum."""

    def __init__(self, lane: _Lane) -> None:
        self._lane = lane
        self._data = b""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a stream, it is one
        self._lane.n_moves += 1

    def connection_lost(self, exc: BaseException | None) -> None:
        self._lane.n_moves += 1
        if self._task is not None:
            self._task.cancel()
        if self._data:
            # As much of a streamed body as came.
            self._lane.arrived.append(b"in part: " + _unframed(self._data))

    def data_received(self, data: bytes) -> None:
        self._lane.n_moves += 1
        self._data += data
        try:
            n = request_bytes(self._data)
        except ValueError as error:
            self._violated(str(error))
            return
        if n is None:
            return
        request, self._data = self._data[:n], self._data[n:]
        if self._data:
            self._violated("bytes behind the request")
            return
        if b"\r\nx-request-id: " not in request.lower():
            # A probe.
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        self._lane.arrived.append(_unframed(request))
        # By what is the same on both lanes: not by ids.
        line, _, body = _unframed(request).partition(b"\r\n")
        n = zlib.crc32(line + body.rpartition(b"\r\n\r\n")[2] + b"%d" % body.count(b"\r\n"))
        self._task = asyncio.get_running_loop().create_task(self._answer(_ANSWERS[n % len(_ANSWERS)], line))

    async def _answer(self, answer: bytes, line: bytes) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        if line.startswith(b"HEAD "):
            body = b""
        for piece in (head + b"\r\n\r\n" + body[:5], body[5:]) if answer else ():
            if self._transport.is_closing():
                return
            self._transport.write(piece)
            self._lane.n_moves += 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if (answer and not _keeps(head)) or b"brok" in body:
            self._transport.close()

    def _violated(self, what: str) -> None:
        self._lane.violations.append(f"{what}: {self._data[:200]!r}")
        self._data = b""
        self._transport.abort()


def _keeps(head: bytes) -> bool:
    return b"HTTP/1.0" not in head and (b"Content-Length" in head or b"chunked" in head or b" 10" in head[:13])


def _unframed(data: bytes) -> bytes:
    """A request with a plain body instead of chunks: how a body is cut into them depends on how it came."""
    head, separator, body = data.partition(b"\r\n\r\n")
    if b"\r\ntransfer-encoding:" not in head.lower():
        return data
    whole = b""
    while body:
        size, line_end, rest = body.partition(b"\r\n")
        if not line_end:
            break
        n = int(size, 16)
        whole, body = whole + rest[:n], rest[n + 2 :]
    return head + separator + whole


TARGETS: Mapping[str, Callable[[], Target]] = {"lanes": LanesTarget}
