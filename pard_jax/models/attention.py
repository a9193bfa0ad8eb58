"""Grouped-query attention of new tokens over a row's cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pard_jax.models.precision import precision_of


def attend(
    q: Float[Array, "R T N H"],
    k: Float[Array, "R M W H"],
    v: Float[Array, "R M W H"],
    mask: Bool[Array, "R T W"],
) -> Float[Array, "R T N*H"]:
    """Softmax attention; each of the M key/value heads serves N/M query heads.

    Scores and softmax are float32. Every query sees at least its own slot, so no row of ``mask`` is empty.
    """
    r, t, n, h = q.shape
    m = k.shape[1]
    q = q.reshape(r, t, m, n // m, h)
    scores = jnp.einsum("rtmgh,rmwh->rmgtw", q, k, preferred_element_type=jnp.float32, precision=precision_of(q.dtype))
    scores = jnp.where(mask[:, None, None, :, :], scores * h**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("rmgtw,rmwh->rtmgh", weights, v, precision=precision_of(v.dtype))
    return out.reshape(r, t, n * h)
