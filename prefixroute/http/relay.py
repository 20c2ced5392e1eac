"""An answer's way to the client, piece by piece as it comes. A copy of some pieces tells what the instance did.

Once the head has gone to the client there is no way back: a broken answer becomes a broken stream.
"""

from contextlib import nullcontext
from http import HTTPStatus

from prefixroute.core.lease import Lease
from prefixroute.errors import UpstreamError, UpstreamTimeoutError
from prefixroute.http.ask import Ask, Exchanges
from prefixroute.http.comments import Comments, may_have_comments
from prefixroute.http.headers import first, relayed, switched
from prefixroute.http.response import RawResponse
from prefixroute.http.transcript import Transcript
from prefixroute.http.upstream import Answer
from prefixroute.http.usage import UsageWatch
from prefixroute.record import AttemptOutcome, Outcome, RequestRecord


class Relay:
    """Passes one answer on to `response`, and notes in `record` how it went."""

    def __init__(self, shared: Exchanges, ask: Ask, response: RawResponse, record: RequestRecord) -> None:
        self._shared = shared
        self._ask = ask
        self._response = response
        self._record = record

    async def run(self, answer: Answer, lease: Lease | None) -> None:
        """Passes the answer on, piece by piece as they come. `lease` None: the answer was held back."""
        shared, response, record = self._shared, self._response, self._record
        sound = answer.status < 400
        if lease is not None and answer.status < 500:
            lease.answered()
            if len(shared.waiting):
                shared.waiting.wake()
        watch = UsageWatch() if self._ask.watched and sound and not first(answer.headers, b"content-encoding") else None
        transcript = None
        if lease is not None and watch is not None and lease.request.rest is not None:
            transcript = Transcript.of(self._ask.prompt, answer.headers)
        comments = None
        if shared.comment_s is not None and may_have_comments(answer.status, answer.headers):
            comments = Comments(shared.comment_s, response.put, is_held=lambda: answer.is_paused)
        outcome = AttemptOutcome.ABANDONED
        mark = self._ask.token_mark
        record.status = answer.status

        def take(piece: bytes, is_last: bool) -> None:
            if piece:
                if comments is not None:
                    comments.saw(piece)
                if record.ttft_s is None and (not sound or mark is None or mark in piece):
                    now_s = shared.clock()
                    record.ttft_s = now_s - record.began_s
                    if lease is not None:
                        lease.first_byte(now_s, learn=sound)
                        shared.holding.look()
                if watch is not None and watch.see(piece):
                    self._remember_home(watch)
                if transcript is not None:
                    transcript.see(piece)
            if is_last:
                response.finish(piece, answer.trailers)
            else:
                response.put(piece)

        try:
            if answer.status == HTTPStatus.SWITCHING_PROTOCOLS:
                await response.switch(answer.reason, switched(answer.headers), *answer.detach())
            else:
                response.start(answer.status, answer.reason, self._headers(answer), with_next=answer.has_more)
                with response.paces(answer), comments.running() if comments is not None else nullcontext():
                    await answer.pour(take)
            outcome = AttemptOutcome.ANSWERED
            # After the client has it all: it takes no longer to answer for this.
            if lease is not None and sound:
                self._computed(lease, transcript)
        except UpstreamError as error:
            outcome = AttemptOutcome.TIMEOUT if isinstance(error, UpstreamTimeoutError) else AttemptOutcome.BROKEN
            raise
        finally:
            if lease is not None:
                record.attempts.append(outcome)
            record.answer_bytes = response.sent_bytes
            if watch is not None:
                record.completion_tokens, record.n_events = watch.completion_tokens(), watch.n_events
                if (usage := watch.usage()) is not None:
                    record.cached_tokens, record.reported_prompt_tokens = usage
                    if lease is not None:
                        lease.reported(*usage)
        record.outcome = outcome_of(answer.status)

    def _computed(self, lease: Lease, transcript: Transcript | None) -> None:
        """The instance holds the prompt, and the answer, which the next turn begins with if it can be told how."""
        material = None if transcript is None else transcript.material()
        lease.computed(None if material is None else self._shared.router.continued(lease.request, material))

    def _remember_home(self, watch: UsageWatch) -> None:
        # Before the client has read the id: it may ask for the response while it is still being made.
        name = self._record.upstream
        if self._ask.stores_responses and name is not None and (response_id := watch.response_id()) is not None:
            self._shared.stored.record(response_id, name)

    def _headers(self, answer: Answer) -> list[tuple[bytes, bytes]]:
        headers = relayed(answer.headers)
        if first(headers, b"x-request-id") is None:
            headers.append((b"x-request-id", self._ask.request_id.encode("ascii")))
        if self._shared.tell_decision:
            headers += self._decision_headers()
        return headers

    def _decision_headers(self) -> list[tuple[bytes, bytes]]:
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
