"""A request as the router compares it: read once, then good for every attempt and for as long as it is held."""

from collections.abc import Sequence

from prefixroute.core.prompt import Prompt


class Request:
    """Made by `Router.read`; a simulation, which has hashes and no text, makes its own.

    `chain`: hashes of the full blocks of the prompt, shallowest first. `n_tokens`: length of the prompt.
    """

    __slots__ = ("chain", "n_tokens", "prompt")

    def __init__(self, prompt: Prompt, chain: Sequence[int], n_tokens: int) -> None:
        self.prompt = prompt
        self.chain = chain
        self.n_tokens = n_tokens
