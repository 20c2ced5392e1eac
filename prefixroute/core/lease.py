"""A request's place on an instance: what is taken at the decision, and given back at the end."""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from prefixroute.core.fleet import Instance
from prefixroute.core.index import Recorded
from prefixroute.core.load import Flight
from prefixroute.core.policy import Candidate, Decision
from prefixroute.core.request import Request

if TYPE_CHECKING:
    from prefixroute.core.router import Router


class Lease:
    """A request's place on an instance, from the decision until the attempt is over. Use as a context manager.

    The instance may leave the fleet meanwhile. Then the place stays counted until the end, and nothing of what is
    learned here touches another instance that has its name by now.
    """

    __slots__ = ("_flight", "_recorded", "_router", "_trial", "_unreported", "candidates", "decision", "request")

    def __init__(
        self,
        router: "Router",
        decision: Decision,
        request: Request,
        candidates: Sequence[Candidate],
        recorded: Recorded,
        flight: Flight,
        trial: int,
    ) -> None:
        self._router = router
        self._flight: Flight | None = flight
        self._recorded = recorded
        self._trial = trial
        self._unreported = False
        self.candidates = candidates
        """What was chosen from."""
        self.decision = decision
        self.request = request

    @property
    def instance(self) -> Instance:
        return self.decision.instance

    def answered(self) -> None:
        """A sound answer (not 5xx) has begun: the instance lives."""
        self._router.fleet.answered_by(self.decision.candidate.instance)

    def connect_failed(self, now_s: float, *, timed_out: bool) -> None:
        """No connection to the instance, as `Router.connect_failed`."""
        if self._router.fleet.has(self.instance):
            self._router.connect_failed(self.instance.name, now_s, timed_out=timed_out)

    def first_byte(self, now_s: float, *, learn: bool) -> None:
        """The first byte of the answer's body is here. `learn`: of a sound answer, so its time tells the speed."""
        if self._flight is not None:
            self._router.load.first_byte(self._flight, now_s, learn=learn)
            self._unreported = learn

    def reported(self, cached_tokens: int, prompt_tokens: int) -> None:
        """The instance told how much of the prompt was cached, in its own tokens. To be called before the end."""
        if self._flight is not None and prompt_tokens > 0:
            self._unreported = False
            share = cached_tokens / prompt_tokens if cached_tokens < prompt_tokens else 1.0
            self._router.reported(self, self.request.n_tokens * share)

    def computed(self, chain: Sequence[int] | None = None) -> None:
        """The answer is whole: the instance holds the prompt, or `chain`, which is the prompt and its answer.

        It was used until now, so it is the newest there.
        """
        router, instance, prompt_chain = self._router, self.decision.candidate.instance, self.request.chain
        if router.fleet.has(instance):
            router.index.record(prompt_chain if chain is None else chain, instance.slot)
        if chain is not None and len(chain) > len(prompt_chain):
            router.audit.ladder.extended(chain[len(prompt_chain) :])

    def refused(self) -> None:
        """The instance did not take the request (busy, or never reached): it computed none of it."""
        self._router.index.forget(self._recorded)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Gives the place back. The second time does nothing."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._router.load.end(flight)
            if self.request.group is not None:
                self.request.group.released(self.decision.candidate.instance.slot)
            self._router.fleet.released(self.decision.candidate.instance.name, self._trial)
            if self._unreported:
                self._router.audit.answered(self.request, self.candidates, self.decision.candidate, None)
