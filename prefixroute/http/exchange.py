"""One request on its way: lease, attempt, maybe another attempt, relay.

A request's facts are fixed before the first attempt; what happens is written into its record. The rules for repeating
are in `retry`.
"""

import asyncio

from prefixroute.core.lease import Lease
from prefixroute.core.request import Request
from prefixroute.errors import (
    NoInstanceError,
    RequestError,
    UpstreamBrokenError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
    UpstreamUntrustedError,
)
from prefixroute.http.ask import Ask, Exchanges
from prefixroute.http.decisions import MAX_OF_ONE_REQUEST
from prefixroute.http.holding import Turn
from prefixroute.http.relay import Relay
from prefixroute.http.response import RawResponse
from prefixroute.http.upstream import Answer, GarbledAnswerError
from prefixroute.record import AttemptOutcome, Decided, RequestRecord

__all__ = ["Exchange", "Exchanges"]

_BUSY = (429, 503)


class Exchange:
    """Carries one ask to an answer. `run` once."""

    # What most requests leave as it is.
    _held: tuple[Answer, str] | None = None
    """A busy instance's answer, kept in case nobody else takes the request; and whose it is."""
    _unreachable: UpstreamUnreachableError | None = None
    _request: Request | None = None
    _n_attempts = 0

    def __init__(self, shared: Exchanges, ask: Ask, response: RawResponse, record: RequestRecord) -> None:
        self._shared = shared
        self._ask = ask
        self._record = record
        self._response = response
        # Names of instances.
        self._tried: set[str] = set()
        # A body that cannot be sent again must not be lost to a connection that the instance is just closing.
        self._fresh = not ask.body_again

    async def run(self) -> None:
        """Relays an answer. Raises NoInstanceError or UpstreamError when none could be begun, or when it broke off.

        Of a streamed body also what it raises.
        """
        shared = self._shared
        shared.budget.paid_in()
        began_s = shared.clock()
        try:
            while True:
                lease: Lease | None = None
                if self._n_attempts < shared.max_attempts:
                    entered = self._enter()
                    lease = await self._turn(entered) if isinstance(entered, Turn) else entered
                if lease is not None:
                    try:
                        if await self._attempt(lease):
                            return
                    finally:
                        lease.end()
                        shared.holding.look()
                elif self._held is not None:
                    answer, self._record.upstream = self._held
                    await self._relay(answer, None)
                    return
                elif self._unreachable is not None and (
                    self._others() or isinstance(self._unreachable, UpstreamUntrustedError)
                ):
                    raise self._unreachable
                else:
                    # Being held for a turn is no waiting for an instance.
                    await self._wait(began_s + shared.waiting.wait_s + self._record.held_s)
        finally:
            self._let_go()

    def _enter(self) -> Lease | Turn | None:
        """A place on the instance that is picked, or a turn to wait for, the first time; None: nobody may take it.

        Raises TooManyRequestsError when too many wait for their turn.
        """
        shared, ask = self._shared, self._ask
        began_s = shared.clock()
        request = self._request
        if request is None:
            request = self._request = shared.router.read(ask.prompt, ask.token_ids, ask.group)
            if ask.group is not None:
                self._record.strategy = ask.group.strategy
        try:
            # Who asks for no prefill waits for nobody's.
            if self._tried or ask.only is not None or not ask.prompt.n_tokens:
                entered: Lease | Turn = shared.router.lease(request, now_s=began_s, without=self._tried, only=ask.only)
            else:
                entered = shared.holding.enter(request, began_s)
        except NoInstanceError:
            return None
        entered_s = shared.clock()
        self._record.decision_s = entered_s - began_s
        if isinstance(entered, Lease):
            self._note_decision(entered, entered_s)
        return entered

    async def _turn(self, turn: Turn) -> Lease | None:
        """Waits for it. None: nobody can take the request any more."""
        shared = self._shared
        began_s = shared.clock()
        try:
            lease = await turn.wait()
        finally:
            self._record.held_s += shared.clock() - began_s
        if lease is not None:
            self._note_decision(lease, shared.clock())
        return lease

    def _note_decision(self, lease: Lease, now_s: float) -> None:
        record, decision = self._record, lease.decision
        record.reason = decision.reason
        record.upstream = decision.candidate.instance.name
        record.matched_tokens = decision.candidate.matched_tokens
        if len(record.decisions) < MAX_OF_ONE_REQUEST:
            record.decisions.append(Decided(now_s - record.began_s, lease.candidates, decision))
            self._shared.decisions.note(record)

    def _others(self) -> bool:
        """Whether there is an instance left to try."""
        shared, ask = self._shared, self._ask
        among = None if ask.group is None else ask.group.members
        return bool(shared.router.fleet.candidates(ask.prompt.model, shared.clock(), self._tried, among))

    async def _wait(self, until_s: float) -> None:
        began_s = self._shared.clock()
        try:
            await self._shared.waiting.wait_change(until_s)
        finally:
            self._record.waited_s += self._shared.clock() - began_s
        if self._ask.call is not None:
            self._ask.call.again()
            self._request = None
        # Whoever could not be reached may be back.
        self._tried.clear()
        self._n_attempts = 0
        self._unreachable = None

    async def _attempt(self, lease: Lease) -> bool:
        """An attempt, and what is to be repeated on the same instance. False: try another one."""
        shared = self._shared
        name = lease.instance.name
        self._tried.add(name)
        call = self._ask.call
        on_interim = self._response.interim if call is None or call.takes_interim else None
        while True:
            self._n_attempts += 1
            try:
                answer = await shared.upstream.send(
                    lease.instance, self._ask.request, fresh=self._fresh, on_interim=on_interim
                )
            except UpstreamUnreachableError as error:
                self._note(AttemptOutcome.UNREACHABLE)
                lease.refused()
                # Who listens with a certificate that is not trusted is there: probes take it out, and 502 says why.
                if not error.own_fault and not isinstance(error, UpstreamUntrustedError):
                    lease.connect_failed(shared.clock(), timed_out=error.timed_out)
                self._unreachable = error
                return False
            except UpstreamBrokenError as error:
                self._note(_outcome_of_loss(error))
                if error.reused:
                    # Nothing can have been computed: this one and its repeat are one attempt.
                    self._n_attempts -= 1
                if not self._may_repeat(error):
                    raise
                self._fresh = True
                if not shared.router.fleet.has(lease.instance):
                    # A reload has replaced it: whoever has its name and its key now is another one.
                    self._tried.discard(name)
                    return False
                if not error.reused and self._others():
                    return False
                continue
            except UpstreamTimeoutError:
                self._note(AttemptOutcome.TIMEOUT)
                raise
            except (asyncio.CancelledError, RequestError, ConnectionError):
                self._note(AttemptOutcome.ABANDONED)
                raise
            break
        if answer.status in _BUSY:
            lease.refused()
            if self._may_go_on(name):
                self._note(AttemptOutcome.BUSY)
                self._let_go()
                self._held = answer, name
                return False
        self._let_go()
        await self._relay(answer, lease)
        return True

    async def _relay(self, answer: Answer, lease: Lease | None) -> None:
        ask = self._ask
        ask.forget_body()
        make = Relay if ask.call is None else ask.call.relay
        try:
            await make(self._shared, ask, self._response, self._record, answer, lease).run()
        finally:
            answer.close()

    def _may_repeat(self, error: UpstreamBrokenError) -> bool:
        shared, ask = self._shared, self._ask
        if isinstance(error, GarbledAnswerError) or not ask.body_again:
            return False
        if error.reused:
            return shared.max_attempts > 1
        if self._n_attempts >= shared.max_attempts:
            return False
        # Once: a second death of the same request is likely its own doing.
        already = self._record.attempts.count(AttemptOutcome.UNANSWERED) > 1
        return shared.repeat_unanswered and ask.repeatable and not already and shared.budget.take()

    def _may_go_on(self, name: str) -> bool:
        """Whether a busy instance's answer may be held back to ask another."""
        shared, ask = self._shared, self._ask
        # Nobody else has the stored response that the request names.
        if not ask.body_again or name == ask.only or self._n_attempts >= shared.max_attempts:
            return False
        return self._others() and shared.budget.take()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held[0].close()

    def _note(self, outcome: AttemptOutcome) -> None:
        self._record.attempts.append(outcome)


def _outcome_of_loss(error: UpstreamBrokenError) -> AttemptOutcome:
    if isinstance(error, GarbledAnswerError):
        return AttemptOutcome.BROKEN
    return AttemptOutcome.STALE if error.reused else AttemptOutcome.UNANSWERED
