"""The sizes of published models by short names, for measurements that need no weights: random ones cost the same.

As the published ``config.json`` files have them. The pairs that come with the package are read from their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pard_jax.config import ModelConfig

_PACKAGE = Path(__file__).parent.parent


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": ffn,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "eos_token_id": 151645,
    }


def _llama3(
    hidden: int, layers: int, heads: int, head_dim: int, ffn: int, factor: float, *, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": tied,
        "eos_token_id": 128001,
    }


# Contents of a config.json, or where it lies.
SHAPES: dict[str, dict[str, Any] | Path] = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600, tied=False),
    "llama-3.2-1b": _llama3(2048, 16, 32, 64, 8192, 32.0, tied=True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 128, 8192, 32.0, tied=True),
    "llama-3.1-8b": _llama3(4096, 32, 32, 128, 14336, 8.0, tied=False),
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    "smollm2-draft": _PACKAGE / "drafts" / "smollm2",
    "demo-target": _PACKAGE / "demo" / "target",
    "demo-draft": _PACKAGE / "demo" / "draft",
}


def model_shape(given: str) -> ModelConfig:
    """The config that a name stands for, or that a ``config.json`` (or a directory with one) holds.

    Raises:
        ValueError: neither a name nor a path, or see :meth:`pard_jax.config.ModelConfig.from_hf`.
        OSError: the file cannot be read.
    """
    known = SHAPES.get(given)
    if isinstance(known, dict):
        return ModelConfig.from_hf(known)
    path = known or Path(given)
    if path.is_dir():
        return ModelConfig.from_pretrained(path)
    if path.is_file():
        return ModelConfig.from_file(path)
    raise ValueError(
        f"{given!r} is neither a config.json, nor a directory that holds one, nor a known size: {', '.join(SHAPES)}"
    )
