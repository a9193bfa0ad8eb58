"""Rotary position embedding, Llama 3's frequency scaling included.

Angles are float32 whatever the model's dtype: bfloat16 rounds position 257 to 256.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pard_jax.config.model import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position for each rotated pair, float32 ``[H/2]``.

    With ``rope.factor`` the low frequencies are divided by it, the high ones kept and those between interpolated
    (Llama 3.1; transformers' ``_compute_llama3_parameters``).
    """
    inv = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    if rope.factor is None:
        return inv.astype(np.float32)
    wavelength = 2 * math.pi / inv
    low = rope.original_max_position_embeddings / rope.low_freq_factor
    high = rope.original_max_position_embeddings / rope.high_freq_factor
    smooth = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * inv / rope.factor + smooth * inv
    scaled = np.where(wavelength > low, inv / rope.factor, np.where(wavelength < high, inv, between))
    return scaled.astype(np.float32)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T 1 H"], Float[Array, "B T 1 H"]]:
    """Cosines and sines for every position, float32, with an axis for the heads."""
    angles = rope_angles(rope, head_dim, positions)
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rope_angles(rope: RopeConfig, head_dim: int, positions: Int[Array, "B T"]) -> Float[Array, "B T half"]:
    """How far each pair is rotated at every position, radians, float32."""
    inv = jnp.asarray(inverse_frequencies(rope, head_dim))
    return positions.astype(jnp.float32)[:, :, None] * inv[None, None, :]


def apply_rope(
    x: Float[Array, "B T N H"], tables: tuple[Float[Array, "B T 1 H"], Float[Array, "B T 1 H"]]
) -> Float[Array, "B T N H"]:
    """Rotate each head's pairs ``(x[i], x[i + H/2])``, as HF's ``rotate_half`` does; computed in float32."""
    cos, sin = tables
    x32 = x.astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    rotated = jnp.concatenate([-second, first], axis=-1)
    return (x32 * cos + rotated * sin).astype(x.dtype)
