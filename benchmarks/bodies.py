"""Chat bodies for the load generator: the same on every machine, because everything comes from one seed.

Several bodies of a file share each system prompt, as the users of one application do. A file has one JSON
object a line, which ends in its closing brace: the load generator puts its own fields before it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

SEED = 7
MODEL = "mock-model"
VOCABULARY = (
    "the model router prefix cache instance token request block stream batch queue memory load latency "
    "system context answer question code function value error server client network policy tree hash "
    "score budget window prompt"
)
WORDS = VOCABULARY.split()
# A turn of a chat; longer bodies have longer turns, not more of them.
TURN_BYTES = 600
MAX_TURNS = 7


@dataclass(frozen=True, slots=True)
class BodyFile:
    """One file of bodies: `sizes_bytes` are taken in turn, and so are the system prompts."""

    name: str
    sizes_bytes: tuple[int, ...]
    n_bodies: int
    n_system_prompts: int
    system_prompt_bytes: int


CHAT_2K_8K = BodyFile("chat-2k-8k.jsonl", (2048, 3072, 4096, 6144, 8192), 64, 8, 1200)
CHAT_32K = BodyFile("chat-32k.jsonl", (32 << 10,), 32, 8, 8000)
CHAT_500K = BodyFile("chat-500k.jsonl", (500 << 10,), 8, 4, 100_000)
BODY_FILES = (CHAT_2K_8K, CHAT_32K, CHAT_500K)


def make_text(n_bytes: int, rng: Random) -> str:
    """ASCII words, exactly `n_bytes` long."""
    n_words = n_bytes // min(map(len, WORDS)) + 1
    return " ".join(rng.choices(WORDS, k=n_words))[:n_bytes]


def make_body(size_bytes: int, system_prompt: str, rng: Random) -> str:
    """A conversation of an odd number of turns (the user has the last word), `size_bytes` long as JSON."""
    n_turns = max(1, min(MAX_TURNS, (size_bytes - len(system_prompt)) // TURN_BYTES))
    n_turns -= 1 - n_turns % 2
    messages = [{"role": "system", "content": system_prompt}]
    messages += [{"role": "assistant" if turn % 2 else "user", "content": ""} for turn in range(n_turns)]
    body = {"model": MODEL, "messages": messages, "temperature": 0.7}
    left_bytes = size_bytes - len(json.dumps(body))
    for turn, message in enumerate(messages[1:]):
        n_bytes = left_bytes // (n_turns - turn)
        message["content"] = make_text(n_bytes, rng)
        left_bytes -= n_bytes
    return json.dumps(body)


def write_bodies(folder: Path) -> None:
    """Write every file of `BODY_FILES`. About 5 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in BODY_FILES:
        rng = Random(SEED)
        system_prompts = [make_text(file.system_prompt_bytes, rng) for _ in range(file.n_system_prompts)]
        lines = [
            make_body(file.sizes_bytes[i % len(file.sizes_bytes)], system_prompts[i % file.n_system_prompts], rng)
            for i in range(file.n_bodies)
        ]
        (folder / file.name).write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
