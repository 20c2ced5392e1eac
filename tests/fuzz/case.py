"""A case: the bytes a target is given, and how they come. Made by edits of a corpus, shrunk by leaving bytes out."""

import base64
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Any

# Longest case: enough for every limit the targets set, and short enough for many cases a second.
MAX_CASE_BYTES = 65_536
_MAX_EDITS = 6


class Finding(Exception):  # noqa: N818  what fuzzers call it
    """A property does not hold. The message says which one."""


class Ending(Enum):
    """What a peer does once its bytes are sent."""

    HALF_CLOSE = "half_close"
    CLOSE = "close"
    RESET = "reset"
    STAY = "stay"


@dataclass(frozen=True, slots=True)
class Case:
    """`cuts`: offsets at which the bytes are sent apart. `pick`: chooses among what a target has to choose from."""

    data: bytes
    cuts: tuple[int, ...] = ()
    ending: Ending = Ending.HALF_CLOSE
    pick: int = 0

    @property
    def pieces(self) -> list[bytes]:
        ends = sorted({0, len(self.data), *(cut % (len(self.data) + 1) for cut in self.cuts)})
        return [self.data[a:b] for a, b in itertools.pairwise(ends)]

    def to_json(self) -> dict[str, Any]:
        return {
            "data": base64.b64encode(self.data).decode(),
            "cuts": list(self.cuts),
            "ending": self.ending.value,
            "pick": self.pick,
        }

    @classmethod
    def from_json(cls, text: str) -> "Case":
        fields = json.loads(text)
        data = base64.b64decode(fields["data"])
        return cls(data, tuple(fields["cuts"]), Ending(fields["ending"]), fields["pick"])


class Edit(Enum):
    FLIP = "flip"
    DELETE = "delete"
    REPEAT = "repeat"
    INSERT = "insert"
    REPLACE = "replace"
    SPLICE = "splice"
    TRUNCATE = "truncate"


@dataclass(frozen=True, slots=True)
class Change:
    """One edit. `at` and `n` are taken modulo what there is; `word` is what is put in."""

    edit: Edit
    at: int
    n: int
    word: bytes


def changed(data: bytes, changes: Sequence[Change]) -> bytes:
    """`data` after all `changes`, cut to the longest case."""
    for change in changes:
        at = change.at % (len(data) + 1)
        end = min(at + change.n, len(data))
        match change.edit:
            case Edit.FLIP:
                data = data[:at] + bytes([data[at] ^ (change.n % 255 + 1)]) + data[at + 1 :] if at < len(data) else data
            case Edit.DELETE:
                data = data[:at] + data[end:]
            case Edit.REPEAT:
                data = data[:end] + data[at:end] * (change.n % 4 + 1) + data[end:]
            case Edit.INSERT:
                data = data[:at] + change.word + data[at:]
            case Edit.REPLACE:
                data = data[:at] + change.word + data[at + len(change.word) :]
            case Edit.SPLICE:
                data = data[:at] + change.word[change.n % (len(change.word) + 1) :]
            case Edit.TRUNCATE:
                data = data[:at]
    return data[:MAX_CASE_BYTES]


def cases(rng: Random, corpus: Sequence[bytes], words: Sequence[bytes]) -> Iterator[Case]:
    """Cases without end: the corpus as it is, then edits of it."""
    for data in corpus:
        yield Case(data, (), Ending.HALF_CLOSE, rng.randrange(1 << 16))
    while True:
        data = rng.choice(corpus)
        changes = []
        for _ in range(rng.randint(1, _MAX_EDITS)):
            edit = rng.choice(list(Edit))
            word = rng.choice(corpus) if edit is Edit.SPLICE else rng.choice(words)
            if rng.random() < 0.1:
                word = rng.randbytes(rng.randint(1, 16))
            changes.append(Change(edit, rng.randrange(1 << 16), min(rng.randrange(1, 9) ** 2, 64), word))
        cuts = tuple(rng.randrange(1 << 16) for _ in range(rng.choice((0, 0, 1, 2, 5))))
        yield Case(changed(data, changes), cuts, rng.choice(list(Ending)), rng.randrange(1 << 16))


async def shrunk(case: Case, fails: Callable[[Case], Awaitable[bool]], *, max_tries: int = 400) -> Case:
    """A small case that `fails` as well: bytes and cuts are left out as long as it does."""
    n_tries = 0

    async def smaller(candidate: Case) -> bool:
        nonlocal n_tries
        n_tries += 1
        return n_tries <= max_tries and await fails(candidate)

    for plainer in ({"cuts": ()}, {"ending": Ending.HALF_CLOSE}, {"pick": 0}):
        candidate = replace(case, **plainer)
        if candidate != case and await smaller(candidate):
            case = candidate
    n = len(case.data) // 2
    while n and n_tries < max_tries:
        at = 0
        while at < len(case.data) and n_tries < max_tries:
            candidate = replace(case, data=case.data[:at] + case.data[at + n :])
            if await smaller(candidate):
                case = candidate
            else:
                at += n
        n //= 2
    return case
