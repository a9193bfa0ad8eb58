"""Products with int8 matrices in XLA's operations, which are to read integers and keep no other copy of them."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pard_jax.int8 import Int8Matrix
from pard_jax.models.precision import precision_of

_BLOCK = 1 << 20  # weights converted at a time on a CPU; 4 MiB as float32


def int8_product(x: Float[Array, "R T I"], weight: Int8Matrix) -> Float[Array, "R T O"]:
    """``x`` times ``weight``, transposed; float32, as float16 could not hold the sums before they are scaled."""
    # The barrier ties the matrix to x. Without it, XLA converts what does not change ahead of the loop over steps.
    x, values = lax.optimization_barrier((x, weight.values))
    sums = lax.platform_dependent(x, values, cpu=_by_blocks, default=_sums)
    return sums * weight.scale[None, None, :]


def _sums(x: Array, values: Array) -> Array:
    # Every 16-bit float holds the integers exactly.
    return jnp.einsum(
        "rti,oi->rto",
        x,
        values.astype(x.dtype),
        preferred_element_type=jnp.float32,
        precision=precision_of(x.dtype),
    )


def _by_blocks(x: Array, values: Array) -> Array:
    """XLA's CPU library multiplies floats alone. It is given what fits a cache; a head would go through memory."""
    height, width = values.shape
    rows = max(1, _BLOCK // width)
    if height <= 2 * rows:
        return _sums(x, values)

    def body(i: Array, out: Array) -> Array:
        start = jnp.minimum(i * rows, height - rows)  # the last block overlaps the one before it
        block = lax.dynamic_slice_in_dim(values, start, rows)
        return lax.dynamic_update_slice_in_dim(out, _sums(x, block), start, axis=2)

    out = jnp.zeros((*x.shape[:2], height), jnp.float32)
    return lax.fori_loop(0, -(-height // rows), body, out)
