"""A running router for each lane; see `harness` for how cases are written."""

import asyncio
import gzip
import io
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from prefixroute.app import App
from prefixroute.logs import configure_logs
from tests.command import Commands
from tests.conformance.fast_time import FastLoop
from tests.conformance.harness import LANES, Serve, scrape

_TINY_MODEL = Path(__file__).parents[1] / "data" / "tiny_llama"


def _everything(path: Path) -> dict[str, Any]:
    """Every optional feature that touches requests; the guard and holding back come with the strategy."""
    return {
        "log": {"format": "json"},
        "recording": {"path": str(path / "recording.jsonl")},
        "response_headers": True,
        "routing": {"strategy": "expected_latency", "shadow": ["round_robin", "session", "prefix_aware"]},
        "retry": {"unanswered": "inference"},
        "upstream": {"sse_comment_s": 3600.0},
        "tokenizer": {
            "kind": "huggingface",
            "path": str(_model(path)),
            "library": "tokenizers",
            "budget_ms": 10_000.0,
            "verify": False,
        },
    }


FEATURES: dict[str, Callable[[Path], dict[str, Any]]] = {"plain": lambda _: {}, "everything": _everything}


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if "in_fast_time" in item.name:
        return {"fast": FastLoop}
    # As the command does. That asyncio's own loop does as well is what tests/integration is run on both for.
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    """The data path under test."""
    return str(request.param)


@pytest.fixture
def serve(serve: Serve, lane: str) -> Serve:
    """As in `tests/conftest.py`, on the lane under test, and with an admin port."""
    settings: dict[str, Any] = {"admin": {"port": 0}, "lane": lane}

    @asynccontextmanager
    async def on_lane(*upstreams: Any, **tables: Any) -> AsyncIterator[App]:
        async with serve(*upstreams, **{**settings, **tables}) as app:
            if tables.get("tokenizer", {}).get("kind") == "huggingface":
                # Its process loads the model first; requests until then go on without.
                while (await scrape(app))['prefixroute_exact_tokens_state{state="exact"}'] != 1.0:
                    await asyncio.sleep(0.01)
            yield app

    return on_lane


@pytest.fixture
async def commands(tmp_path: Path, lane: str) -> AsyncIterator[Commands]:
    """Starts the command, in processes, on the lane under test."""
    commands = Commands(tmp_path, {"PREFIXROUTE_LANE": lane})
    yield commands
    await commands.end()


@pytest.fixture(params=FEATURES)
def features(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings with nothing optional on, and with everything that there is."""
    settings = FEATURES[request.param](tmp_path)
    if "log" not in settings:
        yield settings
        return
    handler = configure_logs("json", "info", io.StringIO())
    yield settings
    handler.close()


def _model(path: Path) -> Path:
    directory = path / "model"
    directory.mkdir()
    (directory / "tokenizer.json").write_bytes(gzip.decompress((_TINY_MODEL / "tokenizer.json.gz").read_bytes()))
    (directory / "tokenizer_config.json").write_bytes((_TINY_MODEL / "tokenizer_config.json").read_bytes())
    return directory
