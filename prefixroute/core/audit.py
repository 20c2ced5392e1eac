"""The loop closed: each decision is held against what came of it.

At the dispatch: what could have been cached (`ladder`), and what other strategies would have done (`shadow`). At the
answer's end: what the instance reported (`feedback`, `ladder`). A request counts once, by the lease that was answered.
"""

from collections.abc import Sequence

from prefixroute.core.feedback import Feedback
from prefixroute.core.ladder import Ladder
from prefixroute.core.policy import Candidate, Decision, Facts
from prefixroute.core.request import Request
from prefixroute.core.shadow import Shadows


class Audit:
    """Of one fleet. Prompts without a chain (no key, or less than a block) are not looked at."""

    __slots__ = ("feedback", "ladder", "shadows")

    def __init__(self, block_tokens: int, capacity_blocks: int, shadows: Shadows | None = None) -> None:
        self.feedback = Feedback(block_tokens)
        self.ladder = Ladder(block_tokens, capacity_blocks)
        self.shadows = shadows

    def dispatched(self, request: Request, facts: Facts, candidates: Sequence[Candidate], decision: Decision) -> None:
        """The decision is carried out. Only the first one of a request asks what could have been cached."""
        if request.missing is None and request.chain:
            request.missing = self.ladder.dispatched(request.chain)
        # Shadows are compared with the router's own policy.
        if self.shadows is not None and request.group is None:
            self.shadows.see(facts, candidates, decision)

    def answered(
        self, request: Request, candidates: Sequence[Candidate], chosen: Candidate, reported_tokens: float | None
    ) -> None:
        """The answer is over. `reported_tokens`: cached, in the router's tokens; None: the instance did not tell."""
        if request.missing is None:
            return
        matched = chosen.matched_tokens
        if reported_tokens is not None:
            self.feedback.reported(chosen.instance.slot, matched, reported_tokens)
        self.ladder.count(
            request.n_tokens,
            len(request.chain),
            request.missing,
            max([candidate.matched_tokens for candidate in candidates]),
            matched,
            reported_tokens,
            request.token_scale,
        )
