"""Tiny random models: as HF configs, as transformers models (the oracle), as parameters of ours.

``params_of`` stacks by plain NumPy, apart from the package's own loader, which has tests of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.config import ModelConfig
from pard_jax.int8 import Int8Matrix, quantize
from pard_jax.models import KVCache, abstract_params, bind

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def hf_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The ``config.json`` of a tiny model; N * H is not D. An override of None removes the key."""
    config = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    } | overrides
    return {key: value for key, value in config.items() if value is not None}


def model_config(family: str = "qwen3", **overrides: Any) -> ModelConfig:
    """:func:`hf_config`, parsed."""
    return ModelConfig.from_hf(hf_config(family, **overrides))


def hf_model(config: dict[str, Any], seed: int = 0):
    """The transformers model of ``config``: float32, random weights, gains and biases that all matter.

    Skips the test without torch. The weights' scale keeps the residual stream alive and the logits far apart, so that
    argmax depends on every part.
    """
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)  # more would only wait for each other over matrices this small
    kwargs = {key: value for key, value in config.items() if key != "model_type"}
    # Copies: transformers writes into the nested dicts that it is given.
    kwargs = json.loads(json.dumps(kwargs))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **kwargs)).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(noise * (0.3 if name.endswith("bias") or "embed" in name else 0.2))
    return model


def params_of(model: Any, config: ModelConfig) -> dict[str, Any]:
    """The weights of a transformers model as the decoder's nested dict."""
    tensors = {name: value.detach().numpy() for name, value in model.state_dict().items()}

    def stacked(suffix: str) -> Any:
        arrays = [tensors[f"model.layers.{i}.{suffix}"] for i in range(config.num_layers)]
        return jnp.asarray(np.stack(arrays))

    layers = {
        "attn_norm": stacked("input_layernorm.weight"),
        "mlp_norm": stacked("post_attention_layernorm.weight"),
    }
    for name in ("q", "k", "v", "o"):
        layers[f"{name}_proj"] = stacked(f"self_attn.{name}_proj.weight")
        if config.o_bias if name == "o" else config.qkv_bias:
            layers[f"{name}_bias"] = stacked(f"self_attn.{name}_proj.bias")
    for name in ("gate", "up", "down"):
        layers[f"{name}_proj"] = stacked(f"mlp.{name}_proj.weight")
        if config.mlp_bias:
            layers[f"{name}_bias"] = stacked(f"mlp.{name}_proj.bias")
    if config.qk_norm:
        layers["q_norm"] = stacked("self_attn.q_norm.weight")
        layers["k_norm"] = stacked("self_attn.k_norm.weight")
    params = {
        "embed": jnp.asarray(tensors["model.embed_tokens.weight"]),
        "layers": layers,
        "norm": jnp.asarray(tensors["model.norm.weight"]),
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = jnp.asarray(tensors["lm_head.weight"])
    return params


def save_hf(model: Any, directory: str | Path, **config_extra: Any) -> Path:
    """Write ``model`` as an HF checkpoint directory, with ``config_extra`` (``pard_token=...``) in its config.json."""
    directory = Path(directory)
    model.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config_extra, indent=2))
    return directory


class Pair(NamedTuple):
    """A target and its draft."""

    target: ModelConfig
    draft: ModelConfig
    params: dict[str, Any]  # {"target": ..., "draft": ...}


def random_params(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Random parameters, drawn by NumPy (nothing compiles) and sharp enough that greedy output hangs on the context."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.asarray(rng.normal(1, 0.3, leaf.shape), leaf.dtype)
        # An embedding of unit size would drown what the layers add, and the output would follow the last token alone.
        scale = 0.3 if name.endswith(("bias", "embed")) else leaf.shape[-1] ** -0.5
        return jnp.asarray(rng.normal(0, scale, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config, jnp.float32))


def is_int8(leaf: Any) -> bool:
    """Whether a leaf of parameters is quantized; ``is_leaf`` of trees that may hold such."""
    return isinstance(leaf, Int8Matrix)


def quantized_params(config: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters, those that multiply something quantized."""
    like = abstract_params(config, jnp.float32, quantization="int8")
    return jax.tree.map(lambda a, p: quantize(p) if is_int8(a) else p, like, params, is_leaf=is_int8)


def stands_for(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with plain matrices of the same values, by NumPy."""

    def plain(leaf: Any) -> Any:
        return jnp.asarray(np.asarray(leaf.values, np.float32) * np.asarray(leaf.scale)[..., None])

    return jax.tree.map(lambda leaf: plain(leaf) if is_int8(leaf) else leaf, params, is_leaf=is_int8)


def tiny_pair(
    *, num_layers: int = 1, vocab_size: int = 64, draft_vocab_size: int | None = None, seed: int = 0, **overrides: Any
) -> Pair:
    """A random target and a random draft of another family and width; the mask id is the draft's last row."""
    draft_vocab_size = draft_vocab_size or vocab_size
    shape = {"head_dim": 8} | overrides
    target = model_config("qwen3", **shape, num_hidden_layers=num_layers, vocab_size=vocab_size)
    shape |= {"num_hidden_layers": 1, "hidden_size": 24, "num_key_value_heads": 1, "intermediate_size": 32}
    draft = model_config("llama", **shape, vocab_size=draft_vocab_size, pard_token=draft_vocab_size - 1)
    params = {"target": random_params(target, seed), "draft": random_params(draft, seed + 1)}
    return Pair(target, draft, params)


def full_forward(config: ModelConfig, params: dict[str, Any], size: int) -> Callable[[Sequence[int]], np.ndarray]:
    """``logits(tokens) -> [T, V]`` for up to ``size`` tokens: one pass from position 0, no cache kept, one compile."""
    shape = (config.num_layers, 1, config.num_kv_heads, size, config.head_dim)

    @jax.jit
    def run(params, tokens):
        model = bind(config, params)
        out = model(tokens, KVCache.zeros(shape, jnp.float32), jnp.zeros((1,), jnp.int32), window=size)
        return model.logits(out.hidden)

    def logits(tokens: Sequence[int]) -> np.ndarray:
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(params, padded))[0, : len(tokens)]

    return logits
