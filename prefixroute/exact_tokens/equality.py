"""Proof that one library encodes as the other does, for one tokenizer."""

from collections.abc import Iterable
from itertools import count, islice

from prefixroute.exact_tokens import sample
from prefixroute.exact_tokens.libraries import Fastokens, Library, Tokenizers

_BATCH = 64


def first_difference(reference: Library, other: Library, texts: Iterable[str]) -> str | None:
    """The first text whose ids differ, alone or with the prompt's special tokens; None: they agree on all."""
    iterator = iter(texts)
    for n in count():
        batch = list(islice(iterator, _BATCH))
        if not batch:
            return None
        # What stands around a prompt does not depend on the prompt: some of it is enough.
        for special in (False, True) if n % 8 == 0 else (False,):
            ours, theirs = (library.encode(batch, special=special) for library in (reference, other))
            for text, one, two in zip(batch, ours, theirs, strict=True):
                if one != two:
                    return text
    raise AssertionError("unreachable")


def proven_library(reference: Tokenizers, tokenizer_json: str, added: Iterable[str]) -> tuple[Library, str]:
    """fastokens where it is equal on the whole sample, else the reference; and the reason in words.

    `added`: contents of added tokens, which are mixed into the sample.
    """
    try:
        fast = Fastokens(tokenizer_json)
    except ImportError:
        return reference, "fastokens is not installed"
    except Exception as error:  # noqa: BLE001  whatever keeps it from being used
        return reference, f"fastokens does not support this tokenizer ({type(error).__name__})"
    try:
        differing = first_difference(reference, fast, _with_added(list(added)))
    except Exception as error:  # noqa: BLE001  as above
        return reference, f"fastokens failed on the sample ({type(error).__name__})"
    if differing is not None:
        return reference, f"fastokens encodes {differing[:40]!r} otherwise"
    return fast, "fastokens is equal on the whole sample"


def _with_added(added: list[str]) -> Iterable[str]:
    for i, text in enumerate(sample.texts()):
        yield text
        if added and i % 4 == 0:
            # At every border a text can have, in turn, and two at a time.
            one, two = added[i % len(added)], added[(i * 7 + 1) % len(added)]
            middle = len(text) // 2
            yield f"{one}{text[:middle]}{two}{one}{text[middle:]}{two}"
