"""How exact a matrix product must be."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def precision_of(dtype) -> lax.Precision:
    """``HIGHEST`` for float32, the platform's own for narrower types.

    By default TPUs multiply float32 in bfloat16 and GPUs in TF32. Whoever asks for float32 asks for the lossless
    guarantee, token for token, and that needs the products to be float32 too.
    """
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT
