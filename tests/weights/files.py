"""Checkpoints as other programs write them: names and shapes spelled out here, files by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.helpers.models import hf_config


def hf_state(config: dict[str, Any], dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a model by their HF names, as transformers names and shapes them."""
    d, f, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n, m = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    family, bias = config["model_type"], config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (d,)
        for name, shape in (("q", (n, d)), ("k", (m, d)), ("v", (m, d)), ("o", (d, n))):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = shape
            if bias or (family == "qwen2" and name != "o"):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = shape[:1]
        for name, shape in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = shape
            if config.get("mlp_bias", False):
                shapes[f"{prefix}mlp.{name}_proj.bias"] = shape[:1]
        if family == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = shapes[prefix + "self_attn.k_norm.weight"] = (h,)
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def write_hf(directory: Path, config: dict[str, Any], state: dict[str, np.ndarray]) -> Path:
    """A directory with ``config.json`` and ``model.safetensors``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(state, directory / "model.safetensors")
    return directory


def write_shards(directory: Path, config: dict[str, Any], state: dict[str, np.ndarray], *, index: bool) -> Path:
    """The same in three files, with or without an index."""
    write_hf(directory, config, {})
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for i in range(3):
        shard = dict(list(state.items())[i::3])
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file(shard, directory / file)
        weight_map |= dict.fromkeys(shard, file)
    if index:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def tiny(tmp_path: Path, family: str = "llama", dtype: Any = np.float32, **overrides: Any):
    """(directory, config.json, tensors) of a tiny model."""
    config = hf_config(family, **overrides)
    state = hf_state(config, dtype)
    return write_hf(tmp_path / family, config, state), config, state


def bits(array: Any) -> np.ndarray:
    """An array's bits, so that equality means equality."""
    array = np.ascontiguousarray(np.asarray(array))
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(params: dict[str, Any], state: dict[str, np.ndarray]) -> None:
    """Every parameter of a tree is the stored tensor, bit for bit; every stored tensor is in the tree."""
    seen = set()

    def same(array: Any, name: str) -> None:
        seen.add(name)
        assert array.dtype == state[name].dtype, name
        np.testing.assert_array_equal(bits(array), bits(state[name]), err_msg=name)

    layers = params["layers"]
    suffixes = {
        "attn_norm": "input_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        **{f"{n}_proj": f"self_attn.{n}_proj.weight" for n in "qkvo"},
        **{f"{n}_bias": f"self_attn.{n}_proj.bias" for n in "qkvo"},
        **{f"{n}_proj": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
        **{f"{n}_bias": f"mlp.{n}_proj.bias" for n in ("gate", "up", "down")},
    }
    for key, stacked in layers.items():
        for layer, array in enumerate(np.asarray(stacked)):
            same(array, f"model.layers.{layer}.{suffixes[key]}")
    same(params["embed"], "model.embed_tokens.weight")
    same(params["norm"], "model.norm.weight")
    if "lm_head" in params:
        same(params["lm_head"], "lm_head.weight")
    assert seen == set(state)


def transformers_model(directory: Path) -> Any:
    """The model that transformers loads from a directory, which must hold exactly what it wants."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)  # pyright: ignore
    assert not any(info.values()), info
    return model
