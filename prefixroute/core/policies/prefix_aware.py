"""Amazon SageMaker's PREFIX_AWARE rule, from its public documentation.

Requests with the same prefix (and the same id header) go to the same instance, until the number in flight there
*reaches* the threshold: then to the candidate with fewest in flight. The prefix stays where it is: a spill does not
move it. The rule applies where two or more instances can serve. The length counts bytes of the body on invocations,
characters of the messages' text on the OpenAI path; `Prompt.prefix_bytes` knows which.

Not documented, so chosen: the first instance of a prefix is the one with fewest in flight, ties at random; a prefix
whose instance cannot serve moves. Where a SageMaker endpoint has one model, a fleet may have several: each model has
its own prefixes.

Of copies of a model (inference components), the prefix is kept on one copy: beyond the threshold of its own requests
first another copy on the same machine that is under it, then another machine.
"""

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

from xxhash import xxh3_128_digest

from prefixroute.core.policy import Candidate, Decision, Facts, Reason, least_outstanding


class PrefixAware:
    """`prefix_length`: bytes or characters looked at; `max_prefixes`: how many are remembered, the oldest unused go.

    `by_model`: each model that requests name has prefixes of its own. A SageMaker endpoint has one model, and what a
    body says about it behind the prefix makes no difference there.
    """

    def __init__(
        self, prefix_length: int, concurrency_threshold: int, max_prefixes: int, seed: int, *, by_model: bool = True
    ) -> None:
        self._prefix_length = prefix_length
        self._threshold = concurrency_threshold
        self._max_prefixes = max_prefixes
        self._seed = seed
        self._by_model = by_model
        self._homes: OrderedDict[bytes, str] = OrderedDict()

    def succeeds(self, earlier: "PrefixAware") -> None:
        """What `earlier` remembers is known here: it had the same length and seed."""
        self._homes = earlier._homes

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        key = self._key(facts)
        if key is None or len(candidates) < 2:
            return Decision(least_outstanding(candidates, rng), Reason.LOAD)
        home = self._homes.get(key)
        for candidate in candidates:
            if candidate.instance.name == home:
                if candidate.in_flight < self._threshold:
                    return Decision(candidate, Reason.AFFINITY)
                return Decision(least_outstanding(self._beside(candidate, candidates), rng), Reason.SPILL)
        # Who was tried and is busy now, by its own word, keeps the prefix; who is gone is none the next time.
        was_tried = facts.is_retry and home is not None
        return Decision(least_outstanding(candidates, rng), Reason.SPILL if was_tried else Reason.COLD)

    def record(self, facts: Facts, decision: Decision) -> None:
        key = self._key(facts)
        if key is None or decision.reason is Reason.LOAD:
            return
        if decision.reason is Reason.COLD:
            self._homes[key] = decision.instance.name
            while len(self._homes) > self._max_prefixes:
                self._homes.popitem(last=False)
        if key in self._homes:
            self._homes.move_to_end(key)

    def _beside(self, home: Candidate, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Who may take what `home` is too busy for: copies on its machine that are not, else those on other machines,
        else whoever there is."""
        others = [c for c in candidates if c is not home]
        if not home.machine:
            return others
        near = [c for c in others if c.machine == home.machine and c.in_flight < self._threshold]
        return near or [c for c in others if c.machine != home.machine] or others

    def _key(self, facts: Facts) -> bytes | None:
        prefix = facts.prompt.prefix_bytes(self._prefix_length)
        if not prefix:
            return None
        # Lengths keep an id and a prefix apart from a longer id and a shorter prefix.
        owners = b""
        for name in (facts.prompt.prefix_aware_id, facts.prompt.model if self._by_model else None):
            owner = (name or "").encode("utf-8", "surrogatepass")
            owners += len(owner).to_bytes(4) + owner
        return xxh3_128_digest(facts.prompt.tenant + owners + prefix, self._seed)
