"""Amazon SageMaker's PREFIX_AWARE rule, from its public documentation.

Requests with the same prefix (and the same id header) go to the same instance, until the number in flight there
*reaches* the threshold: then to the candidate with fewest in flight. The prefix stays where it is: a spill does not
move it. The rule applies where two or more instances can serve. The length counts bytes of the body on invocations,
characters of the messages' text on the OpenAI path; `Prompt.prefix_bytes` knows which.

Not documented, so chosen: the first instance of a prefix is the one with fewest in flight, ties at random; a prefix
whose instance cannot serve moves. Where a SageMaker endpoint has one model, a fleet may have several: each model has
its own prefixes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

from xxhash import xxh3_128_digest

from prefixroute.core.policy import Candidate, Decision, Facts, Reason, least_outstanding


class PrefixAware:
    """`prefix_length`: bytes or characters looked at; `max_prefixes`: how many are remembered, the oldest unused go."""

    def __init__(self, prefix_length: int, concurrency_threshold: int, max_prefixes: int, seed: int) -> None:
        self._prefix_length = prefix_length
        self._threshold = concurrency_threshold
        self._max_prefixes = max_prefixes
        self._seed = seed
        self._homes: OrderedDict[bytes, str] = OrderedDict()

    def pick(self, facts: Facts, candidates: Sequence[Candidate], rng: Random) -> Decision:
        key = self._key(facts)
        if key is None or len(candidates) < 2:
            return Decision(least_outstanding(candidates, rng), Reason.LOAD)
        home = self._homes.get(key)
        for candidate in candidates:
            if candidate.instance.name == home:
                if candidate.in_flight < self._threshold:
                    return Decision(candidate, Reason.AFFINITY)
                others = [c for c in candidates if c is not candidate]
                return Decision(least_outstanding(others, rng), Reason.SPILL)
        return Decision(least_outstanding(candidates, rng), Reason.COLD)

    def record(self, facts: Facts, decision: Decision) -> None:
        key = self._key(facts)
        if key is None or decision.reason is Reason.LOAD:
            return
        if decision.reason is Reason.COLD:
            self._homes[key] = decision.instance.name
            if len(self._homes) > self._max_prefixes:
                self._homes.popitem(last=False)
        if key in self._homes:
            self._homes.move_to_end(key)

    def _key(self, facts: Facts) -> bytes | None:
        prefix = facts.prompt.prefix_bytes(self._prefix_length)
        if not prefix:
            return None
        # Lengths keep an id and a prefix apart from a longer id and a shorter prefix.
        owners = b""
        for name in (facts.prompt.prefix_aware_id, facts.prompt.model):
            owner = (name or "").encode("utf-8", "surrogatepass")
            owners += len(owner).to_bytes(4) + owner
        return xxh3_128_digest(facts.prompt.tenant + owners + prefix, self._seed)
