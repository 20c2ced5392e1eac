"""A request as the router compares it: read once, then good for every attempt and for as long as it is held."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefixroute.core.exact_prompt import ExactPrompt
from prefixroute.core.ladder import Missing
from prefixroute.core.prompt import Prompt

if TYPE_CHECKING:
    from prefixroute.core.group import Group


class Request:
    """Made by `Router.read`; a simulation, which has hashes and no text, makes its own.

    `chain`: hashes of the full blocks of the prompt, shallowest first. `n_tokens`: length of the prompt. `rest`: of the
    prompt's key what is behind the last full block; None when the chain was not made of the key, so that what is known
    of the answer, its text, does not continue it. `exact`: the prompt as instances that tell of their blocks see it.
    `token_scale`: real tokens that one token of the chain's blocks stands for, as far as known. `group`: whom it is
    for; None: all instances, by the router's own policy.
    """

    __slots__ = ("chain", "exact", "group", "missing", "n_tokens", "prompt", "rest", "seen", "token_scale")

    def __init__(
        self,
        prompt: Prompt,
        chain: Sequence[int],
        n_tokens: int,
        rest: bytes | None = None,
        exact: ExactPrompt | None = None,
        token_scale: float = 1.0,
        group: "Group | None" = None,
    ) -> None:
        self.prompt = prompt
        self.chain = chain
        self.n_tokens = n_tokens
        self.rest = rest
        self.exact = exact
        self.token_scale = token_scale
        self.group = group
        self.missing: Missing | None = None
        """Set at the first dispatch, by `audit`."""
        self.seen: tuple[float, dict[int, int]] | None = None
        """What instances said they hold of it, and when: of `matching`, while it is held."""
