"""Text of a prompt → token ids, encoding only what has not been seen before.

Encoding is no homomorphism: ids of a text are not those of its parts put together. Except at added tokens, which
tokenizers find before anything else and never join with what stands beside them. So a prompt is cut in front of
those that the chat template puts between messages, and the pieces are cached: of a conversation's next turn only
the new messages are encoded. A piece keeps its token at the front, so that what libraries do to the very beginning of
a text (a space put there) happens to the first piece only, as in the whole.

Where that would not be sure, nothing is cut (see `cut_tokens`); and the claim is checked like the library, on live
prompts, every `check_every`-th of them.
"""

import re
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import Any

from prefixroute.exact_tokens.cache import TokenCache
from prefixroute.exact_tokens.libraries import Library

# A check encodes as much by the reference library: 10 ms, or 8,000 tokens.
CHECKED_CHARS = 32_768
# What one-letter texts around a token show: more letters make no further borders.
_BORDERS = ("a", " ", "\n", "é", "中", ".", "1", "\t ", " b", "'s")


class Encoder:
    """Encodes prompts with `library`, checked against `reference`. For one thread.

    `cuts`: tokens in front of which a text is cut. `on_fault(what)`: called when a check fails; from then on nothing
    is done that failed.
    """

    def __init__(
        self,
        library: Library,
        reference: Library,
        cuts: Collection[str] = (),
        *,
        cache_bytes: int,
        check_every: int = 256,
        on_fault: Callable[[str], None] = lambda _what: None,
    ) -> None:
        self.library = library
        self.n_checks = 0
        self._reference = reference
        self._cache = TokenCache(cache_bytes)
        self._check_every = check_every
        self._on_fault = on_fault
        self._n_encoded = 0
        self._frame = _frame(library)
        self.cut(cuts)

    def encode(self, text: str, *, special: bool = False) -> bytes:
        """Ids, four bytes each, little-endian; `special`: with what the tokenizer puts around a prompt."""
        self._n_encoded += 1
        if self._n_encoded % self._check_every == 0:
            self._check(text)
        return self._encode(text, special=special)

    def cut(self, tokens: Collection[str]) -> None:
        """From now on, texts are cut in front of these tokens, see `cut_tokens`."""
        self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None

    def _encode(self, text: str, *, special: bool) -> bytes:
        if special and self._frame is None:
            return self.library.encode([text], special=True)[0]
        pieces = self._pieces(text)
        digests = [self._cache.digest(piece) for piece in pieces]
        known = [self._cache.get(digest) for digest in digests]
        missing = [i for i, ids in enumerate(known) if ids is None]
        made = iter(self.library.encode([pieces[i] for i in missing], special=False) if missing else ())
        for i in missing:
            known[i] = ids = next(made)
            self._cache.put(digests[i], ids)
        whole = b"".join(ids for ids in known if ids is not None)
        if special and self._frame is not None:
            before, after = self._frame
            return before + whole + after
        return whole

    def _pieces(self, text: str) -> list[str]:
        if self._pattern is None:
            return [text]
        at = [0, *(match.start() for match in self._pattern.finditer(text) if match.start()), len(text)]
        return [text[start:end] for start, end in pairwise(at)]

    # ------------------------------------------------------------------ checks

    def _check(self, text: str) -> None:
        """Compares a stretch of the prompt as it is encoded here with the reference on the same text."""
        self.n_checks += 1
        stretch = text[:CHECKED_CHARS] if self.n_checks % 2 else text[-CHECKED_CHARS:]
        truth = self._reference.encode([stretch], special=False)[0]
        if self._encode(stretch, special=False) == truth:
            return
        if self.library is not self._reference and self.library.encode([stretch], special=False)[0] != truth:
            self._on_fault(f"{self.library.name} encoded a prompt otherwise: {self._reference.name} is used instead")
            self.library = self._reference
        else:
            self._on_fault("a prompt in pieces encoded otherwise than whole: prompts are encoded whole from now on")
            self._pattern = None
        self._cache.clear()
        self._frame = _frame(self.library)


def cut_tokens(added: Iterable[Any], rendered: Iterable[str], reference: Library) -> list[str]:
    """The added tokens in front of which text may be cut: among those that occur in `rendered` prompts, the sure ones.

    Sure is a token that is found wherever its characters stand: taken from the text as it is, without regard to its
    neighbours, and that no other token can swallow or overlap. What this promises is tried on short texts as well.
    """
    added = list(added)
    if any(token.single_word for token in added):
        return []  # such a token looks at the characters beside it, and so at the cut
    contents = [token.content for token in added]
    texts = list(rendered)
    cuts = [
        token.content
        for token in added
        if token.special
        and not (token.normalized or token.lstrip or token.rstrip)
        and any(token.content in text for text in texts)
        and not any(_may_swallow(other, token.content) for other in contents)
    ]
    return [token for token in cuts if _holds(token, reference)]


def _may_swallow(other: str, token: str) -> bool:
    """Whether an occurrence of `other` that begins before one of `token` can reach into it."""
    if token in other[1:]:
        return True
    return any(other.endswith(token[:n]) for n in range(1, min(len(token), len(other))))


def _holds(token: str, reference: Library) -> bool:
    pairs = [(a, b) for a in _BORDERS for b in _BORDERS]
    whole = reference.encode([f"{a}{token}{b}" for a, b in pairs], special=False)
    first = reference.encode([a for a, _ in pairs], special=False)
    rest = reference.encode([f"{token}{b}" for _, b in pairs], special=False)
    return all(w == f + r for w, f, r in zip(whole, first, rest, strict=True))


def _frame(library: Library) -> tuple[bytes, bytes] | None:
    """What the tokenizer puts before and after a prompt; None when that is not the same for all."""
    found = set()
    for text in ("a", "b c\n", "中"):
        plain, framed = (library.encode([text], special=special)[0] for special in (False, True))
        at = framed.find(plain)
        if at < 0 or at % 4:
            return None
        found.add((framed[:at], framed[at + len(plain) :]))
    return found.pop() if len(found) == 1 else None
