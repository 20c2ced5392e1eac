"""An answer's way to the client, piece by piece as it comes. A copy of some pieces tells what the instance did.

Once the head has gone to the client there is no way back: a broken answer becomes a broken stream.
"""

from collections.abc import Callable
from http import HTTPStatus

from prefixroute.core.lease import Lease
from prefixroute.errors import UpstreamError, UpstreamTimeoutError
from prefixroute.http.ask import Ask, Exchanges
from prefixroute.http.comments import Comments, may_have_comments
from prefixroute.http.headers import local_location, relayed, rendered, switched
from prefixroute.http.response import RawResponse
from prefixroute.http.transcript import Transcript
from prefixroute.http.upstream import Answer
from prefixroute.http.upstream.place import authority_and_base
from prefixroute.http.usage import UsageWatch
from prefixroute.record import AttemptOutcome, Outcome, RequestRecord

# A length may be among its headers, and must not be told.
_SPECIAL = (204,)
# Some forty events of a token each: less than a stream keeps of its answer anyway.
_MAX_UNSEEN_BYTES = 8_192


class Relay:
    """Passes one answer on to `response`, and notes in `record` how it went. `run` once.

    `lease` None: the answer was held back.
    """

    # What most answers leave as it is.
    _watch: UsageWatch | None = None
    _transcript: Transcript | None = None
    _comments: Comments | None = None
    _wrap: Callable[[bytes], bytes] | None = None
    """Makes of a piece what the client gets; of an answer that has no length then, nor trailers."""
    _n_unseen = 0

    def __init__(
        self,
        shared: Exchanges,
        ask: Ask,
        response: RawResponse,
        record: RequestRecord,
        answer: Answer,
        lease: Lease | None,
    ) -> None:
        self._shared = shared
        self._ask = ask
        self._response = response
        self._record = record
        self._answer = answer
        self._lease = lease
        status = record.status = answer.status
        self._is_sound = status < 400
        self._unseen: list[bytes] = []
        """Pieces that were passed on and are still to be looked at."""
        if ask.watched and self._is_sound and b"content-encoding" not in answer.head.index:
            self._watch = UsageWatch()
            if lease is not None and lease.request.rest is not None:
                self._transcript = Transcript.of(ask.prompt, answer.headers)
        if shared.comment_s is not None and may_have_comments(status, answer.headers):
            wrap, put = self._wrap, response.put
            self._comments = Comments(
                shared.comment_s,
                put if wrap is None else lambda comment: put(wrap(comment)),
                is_held=lambda: answer.is_paused,
            )

    async def run(self) -> None:
        """Passes the answer on, piece by piece as they come."""
        answer, lease, record = self._answer, self._lease, self._record
        if lease is not None and answer.status < 500:
            lease.answered()
            if len(self._shared.waiting):
                self._shared.waiting.wake()
        outcome = AttemptOutcome.ABANDONED
        try:
            if answer.status == HTTPStatus.SWITCHING_PROTOCOLS:
                await self._response.switch(answer.reason, switched(answer.headers), *answer.detach())
            else:
                await self._pass_on()
            outcome = AttemptOutcome.ANSWERED
            # After the client has it all: it takes no longer to answer for this.
            if lease is not None and self._is_sound:
                self._computed(lease)
        except UpstreamError as error:
            outcome = AttemptOutcome.TIMEOUT if isinstance(error, UpstreamTimeoutError) else AttemptOutcome.BROKEN
            raise
        finally:
            if lease is not None:
                record.attempts.append(outcome)
            record.answer_bytes = self._response.sent_bytes
            if self._watch is not None:
                self._note_usage(self._watch)
        record.outcome = outcome_of(answer.status)

    async def _pass_on(self) -> None:
        self._start()
        await self._pour()

    async def _pour(self) -> None:
        answer, response = self._answer, self._response
        response.pace(answer)
        try:
            if self._comments is None:
                await answer.pour(self._take)
            else:
                with self._comments.running():
                    await answer.pour(self._take)
        finally:
            response.pace(None)

    def _take(self, piece: bytes, is_last: bool, chunks: bytes | None) -> None:
        """More of the answer: as `upstream.Consume` has it."""
        if piece:
            if self._comments is not None:
                self._comments.saw(piece)
            if self._record.ttft_s is None:
                self._see_first(piece)
            if self._watch is not None:
                # Pieces of a token each are looked at many at a time.
                self._unseen.append(piece)
                self._n_unseen += len(piece)
                if self._n_unseen > _MAX_UNSEEN_BYTES or self._ask.stores_responses:
                    self._look(self._watch)
        if self._wrap is not None:
            piece = self._wrap(piece) if piece else b""
            chunks = None
        if is_last:
            self._response.finish(piece, self._answer.trailers if self._wrap is None else (), chunks)
        else:
            self._response.put(piece, chunks)

    def _look(self, watch: UsageWatch) -> None:
        """At what has come since the last look."""
        pieces = self._unseen
        if not pieces:
            return
        seen = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._n_unseen = 0
        if watch.see(seen) and self._ask.stores_responses:
            self._remember_home(watch)
        if self._transcript is not None:
            self._transcript.see(seen)

    def _see_first(self, piece: bytes) -> None:
        mark = self._ask.token_mark
        if mark is not None and self._is_sound and mark not in piece:
            return
        record, shared = self._record, self._shared
        now_s = shared.clock()
        record.ttft_s = now_s - record.began_s
        if self._lease is not None:
            self._lease.first_byte(now_s, learn=self._is_sound)
            shared.holding.look()

    def _note_usage(self, watch: UsageWatch) -> None:
        record = self._record
        self._look(watch)
        record.completion_tokens, record.n_events = watch.completion_tokens(), watch.n_events
        if (usage := watch.usage()) is not None:
            record.cached_tokens, record.reported_prompt_tokens = usage
            if self._lease is not None:
                self._lease.reported(*usage)

    def _computed(self, lease: Lease) -> None:
        """The instance holds the prompt, and the answer, which the next turn begins with if it can be told how."""
        if self._watch is not None:
            self._look(self._watch)
        material = None if self._transcript is None else self._transcript.material()
        lease.computed(None if material is None else self._shared.router.continued(lease.request, material))

    def _remember_home(self, watch: UsageWatch) -> None:
        # Before the client has read the id: it may ask for the response while it is still being made.
        name = self._record.upstream
        if name is not None and (response_id := watch.response_id()) is not None:
            self._shared.stored.record(response_id, name)

    def _start(self) -> None:
        answer, response = self._answer, self._response
        head = answer.head
        status, index, with_next = answer.status, head.index, answer.has_more
        added: list[tuple[bytes, bytes]] = []
        if b"x-request-id" not in index:
            added.append((b"x-request-id", self._ask.request_id.encode("ascii")))
        added += self._told()
        # As they came, where nothing about them is special.
        is_usual = response.permissions is None and status not in _SPECIAL and b"location" not in index
        lines = head.relayed if is_usual else None
        if lines is None:
            headers = relayed(answer.headers)
            if b"location" in index:
                headers = [self._followed(header) for header in headers]
            response.start(status, answer.reason, [*headers, *added], with_next=with_next)
            return
        is_framed = b"content-length" in index and b"transfer-encoding" not in index
        lines += rendered(added)
        response.start_lines(status, answer.reason, lines, is_framed=is_framed, with_next=with_next)

    def _followed(self, header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        """A Location of the instance's own, which its clients may not reach."""
        if header[0].lower() != b"location" or self._lease is None:
            return header
        authority, base = authority_and_base(self._lease.instance.url)
        prefix = b"" if self._ask.call is None else self._ask.call.prefix
        return header[0], local_location(header[1], authority, base, prefix)

    def _told(self) -> list[tuple[bytes, bytes]]:
        """What was decided, if answers tell."""
        if not self._shared.tell_decision:
            return []
        record = self._record
        return [
            (b"x-prefixroute-instance", (record.upstream or "").encode("ascii", "replace")),
            (b"x-prefixroute-matched-tokens", b"%d" % record.matched_tokens),
            (b"x-prefixroute-reason", (record.reason.value if record.reason else "").encode("ascii")),
        ]


def outcome_of(status: int) -> Outcome:
    """How a request ended whose answer, with this status, was passed on whole."""
    if status < 400:
        return Outcome.OK
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.SERVER_ERROR
