"""A model small enough for one CPU thread: a Llama whose weights the server makes up, and this repository's tokenizer.

Its greedy answers are nonsense, and always the same nonsense. Four layers of 256: a prompt of 3,000 tokens takes half a
second, or a fiftieth of that when it is cached.
"""

import gzip
import json
from pathlib import Path

NAME = "tiny"
_DATA = Path(__file__).parents[1] / "data"
_HIDDEN = 256
_LAYERS = 4
_VOCABULARY = 8192
MAX_TOKENS = 32_768


def make_tiny_model(folder: Path) -> Path:
    """`folder`, with what `--model` wants but weights: start with `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _DATA / "tiny_llama"
    (folder / "tokenizer.json").write_bytes(gzip.decompress((tokenizer / "tokenizer.json.gz").read_bytes()))
    told = json.loads((tokenizer / "tokenizer_config.json").read_text())
    # A template that knows tools.
    told["chat_template"] = (_DATA / "templates" / "qwen25.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=1))
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=1))
    return folder


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": _HIDDEN,
    "intermediate_size": _HIDDEN * 3,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HIDDEN // 64,
    "num_key_value_heads": _HIDDEN // 128,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": MAX_TOKENS,
    "vocab_size": _VOCABULARY,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
