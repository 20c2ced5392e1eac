"""What an instance tells of itself: its model list, vLLM's metrics in Prometheus text, where its KV events are.

Pure and tolerant: whatever cannot be understood is unknown, which is None and never 0. Linear in the text.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson

from prefixroute.core.prompt import is_parsable

# One engine has one line of each kind; several engines behind one address have one each.
_MAX_LINES = 1000
# Data-parallel ranks of one instance.
_MAX_SOURCES = 64
# Searched for behind `{` or `,`, so that no other label's end is taken for one of them.
_KV_TOKENS = re.compile(rb'[{,]kv_cache_size_tokens="([0-9]{1,15})"')
_N_BLOCKS = re.compile(rb'[{,]num_gpu_blocks="([0-9]{1,15})"')
_BLOCK_SIZE = re.compile(rb'[{,]block_size="([0-9]{1,15})"')


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What metrics tell; None: they do not."""

    capacity_tokens: int | None = None
    """Size of the KV cache."""
    started_s: float | None = None
    """When the process started, by the instance's wall clock."""
    asleep: bool | None = None


@dataclass(frozen=True, slots=True)
class EventSource:
    """A publisher of KV events, in its own words: `*` stands for all addresses of its machine."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


def read_event_sources(body: bytes) -> tuple[EventSource, ...] | None:
    """Publishers in an answer to `/kv_event_sources`, one for each data-parallel rank; None when it is none.

    vLLM has written them as a list, as `{"sources": list}` and as a map by rank.
    """
    document = _parsed(body)
    if isinstance(document, dict) and "sources" in document:
        document = document["sources"]
    listed = list(document.values()) if isinstance(document, dict) else document
    if not isinstance(listed, list):
        return None
    sources = [_event_source(entry) for entry in listed[:_MAX_SOURCES]]
    return tuple(source for source in sources if source is not None)


def _event_source(entry: Any) -> EventSource | None:
    if not isinstance(entry, dict):
        return None
    endpoint, replay, topic = (entry.get(name) for name in ("endpoint", "replay_endpoint", "topic"))
    # Not a transport within the other process.
    if not isinstance(endpoint, str) or not endpoint.startswith(("tcp://", "ipc://")):
        return None
    return EventSource(
        endpoint, replay if isinstance(replay, str) and replay else None, topic if isinstance(topic, str) else ""
    )


@dataclass(frozen=True, slots=True)
class ModelList:
    """What an instance serves."""

    models: frozenset[str]
    """Ids, adapters among them; never empty."""
    adapters: frozenset[str] = frozenset()
    """Those of them that are adapters of another: vLLM tells their parent."""


def read_models(body: bytes) -> ModelList | None:
    """An OpenAI model list; None when it is none or lists nothing."""
    document = _parsed(body)
    listed = document.get("data") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        return None
    parents = {
        model: entry.get("parent")
        for entry in listed
        if isinstance(entry, dict) and isinstance(model := entry.get("id"), str) and model
    }
    return ModelList(frozenset(parents), frozenset(model for model in parents if parents[model])) if parents else None


def _parsed(body: bytes) -> Any:
    """None: it is no JSON, or such as would stop the event loop."""
    try:
        return orjson.loads(body) if is_parsable(body) else None
    except orjson.JSONDecodeError:
        return None


def read_metrics(text: bytes) -> InstanceFacts:
    """Facts out of vLLM's metrics. Engines behind one address add up; one that sleeps counts as all."""
    capacities = [_capacity(line) for line in _lines(text, b"vllm:cache_config_info{")]
    known = [capacity for capacity in capacities if capacity]
    starts = [_value(line) for line in _lines(text, b"process_start_time_seconds ")]
    awake = [_value(line) for line in _lines(text, b"vllm:engine_sleep_state{") if b'sleep_state="awake"' in line]
    return InstanceFacts(
        capacity_tokens=sum(known) if known and len(known) == len(capacities) else None,
        started_s=starts[0] if starts else None,
        asleep=0 in awake if awake and None not in awake else None,
    )


def _capacity(line: bytes) -> int | None:
    # Where layers share blocks, blocks times their size is not what the cache holds; newer vLLM tells both.
    tokens = _KV_TOKENS.search(line)
    if tokens is not None:
        return int(tokens[1])
    n_blocks, block_size = _N_BLOCKS.search(line), _BLOCK_SIZE.search(line)
    return int(n_blocks[1]) * int(block_size[1]) if n_blocks and block_size else None


def _value(line: bytes) -> float | None:
    # Behind the labels, whose values may hold spaces, or behind the name; a timestamp may follow.
    behind = line.rpartition(b"}")[2] if b"}" in line else line.partition(b" ")[2]
    try:
        value = float(behind.split()[0])
    except (IndexError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _lines(text: bytes, beginning: bytes) -> Iterator[bytes]:
    return islice(_all_lines(b"\n" + text, b"\n" + beginning), _MAX_LINES)


def _all_lines(text: bytes, beginning: bytes) -> Iterator[bytes]:
    at = text.find(beginning)
    while at >= 0:
        end = text.find(b"\n", at + 1)
        yield text[at + 1 : end if end >= 0 else len(text)]
        at = text.find(beginning, at + 1)
