"""The layers of a decoding pass by the kernels of :mod:`pard_jax.kernels`: five kernels a layer.

The same numbers as the decoder's own loop up to rounding: a norm's scale is applied after its product, and residual
sums are rounded once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pard_jax.config.model import ModelConfig
from pard_jax.kernels.attention import decode_attention
from pard_jax.kernels.linear import fits_linear, normed
from pard_jax.kernels.linear import linear as fused_linear
from pard_jax.kernels.tuning import SLOTS
from pard_jax.models.cache import KVCache
from pard_jax.models.layer import Params, linear, mlp, qkv_projections, rms_norm
from pard_jax.models.rope import rope_angles

_MAX_QUERIES = 128  # new tokens times the query heads of a key/value head, which one program of attention holds


def runs_fused(config: ModelConfig, tokens: int, cache: KVCache) -> bool:
    """Whether the kernels take a pass of ``tokens`` new tokens a row over ``cache``."""
    head_dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    whole = cache.num_slots % SLOTS == 0 and head_dim >= 32 and head_dim & (head_dim - 1) == 0
    return cache.k.dtype == jnp.bfloat16 and whole and tokens * group <= _MAX_QUERIES


def fused_layers(
    config: ModelConfig,
    layers: Params,
    x: Float[Array, "R T D"],
    positions: Int[Array, "R T"],
    cache: KVCache,
    starts: Int[Array, "R"],
    *,
    window: int,
    capture: tuple[int, ...] = (),
    interpret: bool = False,
) -> tuple[Float[Array, "R T D"], KVCache, Float[Array, "C R T D"] | None]:
    """All layers of one pass over the cache's first R rows: the residual stream, the cache, the captured streams."""
    c, eps = config, config.rms_norm_eps
    r, t, d = x.shape
    angles = rope_angles(c.rope, c.head_dim, positions)
    rotations = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    qk_norm = (layers["q_norm"], layers["k_norm"]) if c.qk_norm else None
    inner, outer = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    fused = all(
        fits_linear(r * t, *sizes)
        for sizes in ((d, inner), (d, outer), (inner, d), (d, c.intermediate_size), (c.intermediate_size, d))
    )

    def biases(*names: str) -> list[Array] | None:
        return [layers[name] for name in names] if names[0] in layers else None

    x = x.reshape(r * t, d)
    streams = []
    before = normed(x, layers["attn_norm"][0]) if fused else None  # the stream as the next product takes it
    # Unrolled: a loop's counter and condition are kernels of their own.
    for i in range(c.num_layers):
        index = np.int32(i)
        with jax.named_scope("attention"):
            if fused:
                projections = [layers[name] for name in ("q_proj", "k_proj", "v_proj")]
                q, k, v = fused_linear(
                    before, projections, index, eps=eps,
                    biases=biases("q_bias", "k_bias", "v_bias"), interpret=interpret,
                )  # fmt: skip
                q, k, v = (a.reshape(r, t, -1, c.head_dim) for a in (q, k, v))
            else:
                p = {name: stacked[i] for name, stacked in layers.items()}
                q, k, v = qkv_projections(c, p, rms_norm(x.reshape(r, t, d), p["attn_norm"], eps))
            out, new_k, new_v = decode_attention(
                q, k, v, rotations, cache.k, cache.v, index, starts,
                window=window, qk_norm=qk_norm, eps=eps, interpret=interpret,
            )  # fmt: skip
            cache = KVCache(k=new_k, v=new_v)
            out = out.reshape(r * t, -1)
            if fused:
                x, before = fused_linear(
                    out, [layers["o_proj"]], index, residual=x, biases=biases("o_bias"),
                    next_norm=(layers["mlp_norm"], index), interpret=interpret,
                )  # fmt: skip
            else:
                x = x + linear(out[None], p["o_proj"], p.get("o_bias"))[0]
        with jax.named_scope("mlp"):
            if fused:
                (h,) = fused_linear(
                    before, [layers["gate_proj"], layers["up_proj"]], index, eps=eps,
                    biases=biases("gate_bias", "up_bias"), gated=True, interpret=interpret,
                )  # fmt: skip
                following = (layers["attn_norm"], np.int32(i + 1)) if i + 1 < c.num_layers else None
                x, *rest = fused_linear(
                    h, [layers["down_proj"]], index, residual=x, biases=biases("down_bias"), next_norm=following,
                    interpret=interpret,
                )  # fmt: skip
                before = rest[0] if rest else None
            else:
                x = x + mlp(c, p, x[None])[0]
        streams.append(x)
    features = jnp.stack([streams[i] for i in capture]).reshape(-1, r, t, d) if capture else None
    return x.reshape(r, t, d), cache, features
