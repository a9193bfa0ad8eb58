"""A model's shape, read from its HF ``config.json`` alone.

One decoder runs three families that differ only in a handful of switches, so a config is those switches. What the
decoder cannot run is refused here, by name, before any weight is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
}
# vLLM's order (vllm/v1/spec_decode/llm_base_proposer.py, _init_parallel_drafting_params): the first that is set wins.
MASK_TOKEN_KEYS = (
    "dflash_config.mask_token_id",
    "mask_token_id",
    "dspark_noise_token_id",
    "pard_token",
    "ptd_token_id",
)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the base, and Llama 3's frequency scaling where ``factor`` is set."""

    theta: float
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of one decoder. Letters as in docs/architecture.md: V, D, L, N, M, H, F."""

    family: str  # "qwen3", "qwen2" or "llama"
    vocab_size: int  # V, padded rows included
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # M
    head_dim: int  # H; N * H need not be D
    intermediate_size: int  # F
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm of every query and key head (Qwen3)
    mask_token_id: int | None = None  # the id PARD drafts with; None for a model that is no parallel draft
    eos_token_ids: tuple[int, ...] = ()  # of config.json; generation_config.json may add more
    bos_token_id: int | None = None
    dtype: str = "float32"  # of the checkpoint

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "max_position_embeddings"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"the model's {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings rotate pairs")

    @property
    def num_parameters(self) -> int:
        """Number of parameters held in memory (a tied head counts once)."""
        d, h, f = self.hidden_size, self.head_dim, self.intermediate_size
        q, kv = self.num_heads * h, self.num_kv_heads * h
        layer = d * (2 * q + 2 * kv) + 3 * d * f + 2 * d
        layer += (q + 2 * kv) * self.qkv_bias + d * self.o_bias + (2 * f + d) * self.mlp_bias + 2 * h * self.qk_norm
        return self.num_layers * layer + d + self.vocab_size * d * (1 if self.tie_word_embeddings else 2)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelConfig:
        """Read ``config.json`` of a checkpoint directory.

        Raises:
            FileNotFoundError: no ``config.json`` there.
            ValueError, NotImplementedError: see :meth:`from_hf`.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{directory} holds no config.json; expected a Hugging Face checkpoint directory")
        return cls.from_file(path)

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read a ``config.json``, whatever its name.

        Raises:
            OSError: it cannot be read.
            ValueError, NotImplementedError: see :meth:`from_hf`.
        """
        try:
            hf = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            raise ValueError(f"{path} is not valid JSON: {e}") from None
        if not isinstance(hf, dict):
            raise ValueError(f"{path} holds a {type(hf).__name__}; expected a JSON object")
        try:
            return cls.from_hf(hf)
        except (ValueError, NotImplementedError) as e:
            raise type(e)(f"{path}: {e}") from None

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> ModelConfig:
        """Build from the contents of an HF ``config.json``.

        Raises:
            NotImplementedError: M-RoPE, as vLLM refuses it.
            ValueError: an architecture, layer type, quantization, activation or rope scaling that the decoder does
                not run, or a key that is missing.
        """
        family = _family(hf)
        _refuse_unsupported(hf, family)

        def need(key: str) -> int:
            if (value := hf.get(key)) is None:
                raise ValueError(f"config.json lacks {key!r}, which a {family} model needs")
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{key}={value!r}; expected a whole number")
            return value

        heads = need("num_attention_heads")
        hidden = need("hidden_size")
        head_dim = hf.get("head_dim")
        if head_dim is None:
            # HF's own defaults: Qwen3's is 128 whatever D and N, the others' is D / N.
            head_dim = 128 if family == "qwen3" else hidden // max(heads, 1)  # no heads at all are refused below
        attention_bias = bool(hf.get("attention_bias", False))
        eos = hf.get("eos_token_id")
        bos = hf.get("bos_token_id")
        return cls(
            family=family,
            vocab_size=need("vocab_size"),
            hidden_size=hidden,
            num_layers=need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=int(hf.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            intermediate_size=need("intermediate_size"),
            rms_norm_eps=_positive(hf, "rms_norm_eps", 1e-6),
            rope=_rope(hf),
            max_position_embeddings=need("max_position_embeddings"),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else attention_bias,
            o_bias=False if family == "qwen2" else attention_bias,
            mlp_bias=bool(hf.get("mlp_bias", False)) if family == "llama" else False,
            qk_norm=family == "qwen3",
            mask_token_id=_mask_token_id(hf),
            eos_token_ids=_token_ids(eos),
            bos_token_id=int(bos) if isinstance(bos, int) else None,
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
        )


def _positive(hf: dict[str, Any], key: str, default: float) -> float:
    value = hf.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key}={value!r}; expected a positive number")
    return float(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    """``eos_token_id``: an id, several, or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"eos_token_id={value!r}; expected a token id or a list of them")
    return tuple(ids)


def _family(hf: dict[str, Any]) -> str:
    architectures = hf.get("architectures") or []
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    for name in architectures:
        if name in SUPPORTED_ARCHITECTURES:
            return SUPPORTED_ARCHITECTURES[name]
    if not architectures and hf.get("model_type") in SUPPORTED_ARCHITECTURES.values():
        return hf["model_type"]
    named = ", ".join(map(str, architectures)) or f"model_type {hf.get('model_type')!r}"
    raise ValueError(f"architecture {named} is not supported; supported are {supported}")


def _refuse_unsupported(hf: dict[str, Any], family: str) -> None:
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if "mrope_section" in scaling or scaling.get("rope_type", scaling.get("type")) == "mrope":
        raise NotImplementedError(
            "Speculative Decoding with draft models or parallel drafting does not support M-RoPE yet"
        )
    # Qwen configs carry `sliding_window` with `use_sliding_window: false`: only layers that would use it are refused.
    layer_types = hf.get("layer_types") or []
    others = sorted({str(t) for t in layer_types} - {"full_attention"})
    uses_window = bool(hf.get("use_sliding_window")) and hf.get("sliding_window") is not None
    windowed_layers = int(hf.get("num_hidden_layers") or 0) - int(hf.get("max_window_layers") or 0)
    if family != "llama" and uses_window and not layer_types and windowed_layers > 0:
        others = ["sliding_attention"]
    if others:
        raise ValueError(f"layers of type {', '.join(others)} are not supported; only full attention is")
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"):
        if hf.get(key):
            raise ValueError(f"mixture-of-experts models are not supported ({key}={hf[key]})")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown method")
        raise ValueError(f"quantized checkpoints are not supported ({method}); use the bf16, f16 or f32 weights")
    if (act := hf.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {act!r} is not supported; expected 'silu'")


def _rope(hf: dict[str, Any]) -> RopeConfig:
    """Both layouts: ``rope_theta`` beside ``rope_scaling`` (transformers 4), ``rope_parameters`` (transformers 5)."""
    # transformers 5 nests by layer type where layer types differ; only full attention is left at this point.
    params = hf.get("rope_parameters") or {}
    params = params.get("full_attention", params)
    scaling = params or hf.get("rope_scaling") or {}
    theta = params.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise ValueError(
            "config.json has neither rope_theta nor rope_parameters.rope_theta; a default would be a guess"
        )
    if not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise ValueError(f"rope_theta={theta!r}; expected a positive number")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if float(hf.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial rotary embeddings (partial_rotary_factor) are not supported")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r} is not supported; supported are 'default' and 'llama3'")
    try:
        return RopeConfig(
            theta=float(theta),
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        )
    except KeyError as e:
        raise ValueError(f"llama3 rope scaling lacks {e.args[0]!r}") from None


def _mask_token_id(hf: dict[str, Any]) -> int | None:
    for key in MASK_TOKEN_KEYS:
        value: Any = hf
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return int(value)
    return None
