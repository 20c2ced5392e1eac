"""Words that messages about settings share."""

from collections.abc import Iterable
from difflib import get_close_matches

_MAX_SHOWN = 60
_MAX_WORDS = 20


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Which of `known` was probably meant, whatever its case."""
    by_lower = {one.lower(): one for one in known}
    return next((by_lower[near] for near in get_close_matches(word.lower(), by_lower, n=1)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`; where none is near, what is known if that is not too much."""
    words = list(known)
    if (near := nearest(word, words)) is not None:
        return f"; did you mean '{near}'?"
    return f" (known here: {', '.join(words)})" if 0 < len(words) <= _MAX_WORDS else ""


def cut(text: str) -> str:
    """`text`, of a bounded length."""
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def shown(text: str) -> str:
    """`text` on one line, printable and cut to a bounded length."""
    short = cut(text)
    return short if short.isprintable() and short and " " not in short else repr(short)
