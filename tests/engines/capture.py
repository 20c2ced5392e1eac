"""Answers of a real vLLM server, kept so that the simulated one can be held against them where there is none.

`python -m tests.engines.capture URL > tests/data/vllm_answers.json` asks a server of `tests.engines.servers`.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.engines.answers import Answer, ask
from tests.engines.load import client
from tests.engines.servers import tiny_model
from tests.engines.shapes import IMITATED
from tests.engines.tiny_model import NAME

FILE = Path(__file__).parents[1] / "data" / "vllm_answers.json"


async def capture(url: str) -> dict[str, Any]:
    """Name of a case → its answer."""
    async with client(reuses_connections=False) as session:
        return {case.name: _written(await ask(session, url, case)) for case in IMITATED}


def read_captured() -> dict[str, Answer]:
    """What `FILE` holds."""
    captured = json.loads(FILE.read_text())
    return {
        name: Answer(answer["status"], answer["headers"], answer["body"].encode()) for name, answer in captured.items()
    }


def _written(answer: Answer) -> dict[str, Any]:
    # Without the path of this machine.
    body = answer.body.decode(errors="replace").replace(str(tiny_model()), NAME)
    headers = {name: value for name, value in answer.headers.items() if name != "location"}
    return {"status": answer.status, "headers": headers, "body": body}


if __name__ == "__main__":
    json.dump(asyncio.run(capture(sys.argv[1])), sys.stdout, indent=1, ensure_ascii=False)
    print()
