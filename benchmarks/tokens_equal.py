"""Proof that fastokens encodes as tokenizers does, for one tokenizer, on more text than a start can wait for.

    python -m benchmarks.tokens_equal MODEL_DIR [--seeds N] [FILE …]

Samples of many scripts (`prefixroute.exact_tokens.sample`) from N seeds, every Python file of the standard library
and every file named. Ends with status 1 and the text that differs.
"""

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from prefixroute.exact_tokens import sample
from prefixroute.exact_tokens.equality import first_difference
from prefixroute.exact_tokens.libraries import Fastokens, Tokenizers


def all_texts(seeds: int, files: list[str]) -> Iterator[str]:
    for seed in range(seeds):
        yield from sample.texts(seed)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(stdlib.rglob("*.py")) if "site-packages" not in path.parts]
    for path in (*paths, *map(Path, files)):
        yield path.read_text(errors="replace")


def main(directory: str, seeds: int, files: list[str]) -> int:
    text = (Path(directory) / "tokenizer.json").read_text()
    reference, fast = Tokenizers(text), Fastokens(text)
    n_texts = n_chars = 0

    def counted() -> Iterator[str]:
        nonlocal n_texts, n_chars
        for one in all_texts(seeds, files):
            n_texts += 1
            n_chars += len(one)
            yield one

    began_s = time.perf_counter()
    differing = first_difference(reference, fast, counted())
    print(f"{n_texts} texts, {n_chars:,} characters, {time.perf_counter() - began_s:.0f} s")
    if differing is None:
        print("equal")
        return 0
    print(f"differs: {differing[:200]!r}")
    return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()
    sys.exit(main(arguments.model_dir, arguments.seeds, arguments.files))
