"""GGUF files as llama.cpp's converter writes them, from the tensors and tokenizers of Hugging Face models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant
from tokenizers import Tokenizer

TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{n}_norm": f"attn_{n}_norm" for n in "qk"},
    **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
}


def gguf_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{TENSORS[stem]}.{kind}"
    return f"{TENSORS[stem]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of convert_hf_to_gguf.py, word for word."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def as_llama_cpp(config: dict[str, Any], state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by their GGUF names, in llama.cpp's order of rows."""
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    tensors = {}
    for name, array in state.items():
        for head, count in heads.items():
            if config["model_type"] == "llama" and f".{head}_proj." in name:
                array = permute(array, count)
        tensors[gguf_name(name)] = array
    return tensors


def rope_factors(config: dict[str, Any]) -> np.ndarray:
    """``LlamaModel.generate_extra_tensors`` of convert_hf_to_gguf.py."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    old = scaling["original_max_position_embeddings"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / dim)
        if wavelength < old / high:
            factors.append(1)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def tokenizer_fields(tokenizer: Tokenizer, size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges, padded with unused tokens up to ``size``."""
    import json

    content = json.loads(tokenizer.to_str())
    tokens, types = [f"[PAD{i}]" for i in range(size)], [int(gguf.TokenType.UNUSED)] * size
    for token, i in content["model"]["vocab"].items():
        tokens[i], types[i] = token, int(gguf.TokenType.NORMAL)
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = int(gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED)
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    return tokens, types, merges


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    tokenizer: Tokenizer,
    *,
    quant: Quant | dict[str, Quant] = Quant.F32,
    pre: str | None = "smollm",
    model: str | None = "gpt2",
    eos: int = 2,
    fields: dict[str, Any] | None = None,
    architecture: str | None = None,
    raw: dict[str, tuple[np.ndarray, Quant]] | None = None,
) -> dict[str, np.ndarray]:
    """Write a GGUF file; matrices are quantized as ``quant`` says, vectors are float32.

    Args:
        fields: further key-value pairs; None as a value leaves a usual one out.
        raw: tensors whose bytes are quantized already.

    Returns:
        What the tensors are once dequantized (by the `gguf` library), by their GGUF names.
    """
    arch = architecture or config["model_type"]
    tokens, types, merges = tokenizer_fields(tokenizer, config["vocab_size"])
    pairs = {
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        f"{arch}.rope.dimension_count": config["head_dim"],
        f"{arch}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}",
    } | (fields or {})
    writer = gguf.GGUFWriter(path, arch)
    for key, value in pairs.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    dequantized = {}
    for name, array in tensors.items():
        kind = quant.get(name, Quant.F32) if isinstance(quant, dict) else quant
        kind = kind if array.ndim == 2 else Quant.F32
        data = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        dequantized[name] = gguf.quants.dequantize(data, kind)
    for name, (data, kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
        dequantized[name] = gguf.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantized
