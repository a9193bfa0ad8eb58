"""What a layer is made of: projections, gated MLP, norm; in XLA's operations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pard_jax.config.model import ModelConfig
from pard_jax.int8 import Int8Matrix
from pard_jax.models.precision import precision_of
from pard_jax.models.quantized import int8_product

Params = dict[str, Any]  # nested dict of arrays and Int8Matrix, keyed as the attributes of Decoder


def qkv(config: ModelConfig, p: Params, x: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values, the norms of their heads included, before any rotation."""
    q, k, v = qkv_projections(config, p, x)
    if config.qk_norm:
        q = rms_norm(q, p["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, p["k_norm"], config.rms_norm_eps)
    return q, k, v


def qkv_projections(config: ModelConfig, p: Params, x: Array) -> tuple[Array, Array, Array]:
    """Queries ``[R, T, N, H]``, keys and values ``[R, T, M, H]`` as they are projected."""
    r, t, _ = x.shape
    q = linear(x, p["q_proj"], p.get("q_bias")).reshape(r, t, config.num_heads, config.head_dim)
    k = linear(x, p["k_proj"], p.get("k_bias")).reshape(r, t, config.num_kv_heads, config.head_dim)
    v = linear(x, p["v_proj"], p.get("v_bias")).reshape(r, t, config.num_kv_heads, config.head_dim)
    return q, k, v


def mlp(config: ModelConfig, p: Params, x: Array) -> Array:
    """The gated MLP of ``x``, its norm included."""
    h = rms_norm(x, p["mlp_norm"], config.rms_norm_eps)
    gate = jax.nn.silu(linear(h, p["gate_proj"], p.get("gate_bias")))
    up = linear(h, p["up_proj"], p.get("up_bias"))
    return linear(gate * up, p["down_proj"], p.get("down_bias"))


def linear(x: Array, weight: Array | Int8Matrix, bias: Array | None = None) -> Array:
    """``x [R, T, I]`` times ``weight [O, I]``, transposed."""
    y = product(x, weight, x.dtype)
    return y if bias is None else y + bias[None, None, :]


def product(x: Array, weight: Array | Int8Matrix, dtype: Any) -> Array:
    """``x [R, T, I]`` times ``weight [O, I]``, transposed, as ``dtype``."""
    if isinstance(weight, Int8Matrix):
        return int8_product(x, weight).astype(dtype)
    return jnp.einsum("rti,oi->rto", x, weight, preferred_element_type=dtype, precision=precision_of(x.dtype))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Statistics in float32, the product in the model's dtype, as HF has it."""
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.expand_dims(weight, tuple(range(x.ndim - 1)))
